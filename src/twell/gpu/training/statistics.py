"""The statistics of a training forward, from the partial sums of other kernels: one launch instead of seven small ones.

    counts[order[i]] = the i-th neuron's partial counts, summed      (hot neurons, then cold ones)
    l1_sum           = sum of |h|: partial sums of the hot neurons, and sums by tokens of the cold ones

Counts are integers and sums have a fixed order: the same bits every time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, Kernel, can_overlap, ceil_div
from twell.gpu.shared.tiles import start_after

_NEURONS, _ROWS, _LINE = 64, 64, 4096  # neurons per program, partial counts at once, values of |h| at once


@triton.jit
def _sum_rows(i_parts, n_parts, width, column, wanted, ROWS: tl.constexpr, NEURONS: tl.constexpr):
    total = tl.zeros((ROWS, NEURONS), tl.int32)
    for first in range(0, n_parts, ROWS):
        row = first + tl.arange(0, ROWS)
        at = i_parts + row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(at, mask=(row < n_parts)[:, None] & wanted[None, :], other=0)
    return tl.sum(total, axis=0)


@triton.jit
def _statistics_kernel(
    i_hot,  # int32 [hot_parts, H]
    i_hot_l1,  # [n_l1]
    i_cold,  # int32 [cold_parts, C]
    i_l1,  # [M]: |h| of the cold neurons
    i_counted,  # bool [M] or unused
    i_order,  # int32 [F]
    o_counts,  # int32 [F]
    o_l1,  # []
    hot_parts,
    H,
    n_l1,
    cold_parts,
    C,
    M,
    HAS_HOT: tl.constexpr,
    HAS_COLD: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    if tl.program_id(0) == 0:
        total = tl.zeros((LINE,), tl.float32)
        if HAS_HOT:
            for first in range(0, n_l1, LINE):
                i = first + tl.arange(0, LINE)
                total += tl.load(i_hot_l1 + i, mask=i < n_l1, other=0.0)
        if HAS_COLD:
            for first in range(0, M, LINE):
                i = first + tl.arange(0, LINE)
                counted = i < M
                if HAS_MASK:
                    counted = counted & (tl.load(i_counted + i, mask=i < M, other=0) != 0)
                total += tl.load(i_l1 + i, mask=counted, other=0.0)
        tl.store(o_l1, tl.sum(total, axis=0))
    place = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    count = tl.zeros((NEURONS,), tl.int32)
    if HAS_HOT:
        count += _sum_rows(i_hot, hot_parts, H, place, place < H, ROWS, NEURONS)
    if HAS_COLD:
        is_cold = (place >= H) & (place < H + C)
        count += _sum_rows(i_cold, cold_parts, C, place - H, is_cold, ROWS, NEURONS)
    there = place < H + C
    neuron = place
    if HAS_ORDER:
        neuron = tl.load(i_order + place, mask=there, other=0)
    tl.store(o_counts + neuron, count, mask=there)


@functools.cache
def _kernel(**flags: bool) -> Kernel:
    """``flags``: HAS_HOT, HAS_COLD, HAS_ORDER, HAS_MASK, OVERLAPS."""
    pointers = (torch.int32, torch.float32, torch.int32, torch.float32, torch.bool, torch.int32, torch.int32)
    constants = {**flags, "NEURONS": _NEURONS, "ROWS": _ROWS, "LINE": _LINE}
    return Kernel(_statistics_kernel, (*pointers, torch.float32, *[ANY] * 6), constants, warps=8)


def write_statistics(
    l1_sum: Tensor,
    counts: Tensor,
    hot: Sequence[Tensor] | None,
    cold: tuple[Tensor, Tensor] | None,
    order: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    """Write l1_sum [] float32 and counts int32 [F].

    ``hot``: partial sums of |h| [n] and partial counts [parts, H] (``activation.py``, which has applied the mask);
    ``cold``: |h| by tokens [M] and partial counts [P, C]; ``order``: int32 [F], hot neurons first."""
    hot_l1, hot_counts = hot or (0, None)
    l1, cold_counts = cold or (0, None)
    hot_parts, H = (0, 0) if hot_counts is None else hot_counts.shape
    cold_parts, C = (0, 0) if cold_counts is None else cold_counts.shape
    kernel = _kernel(
        HAS_HOT=hot is not None, HAS_COLD=cold is not None, HAS_ORDER=order is not None,
        HAS_MASK=cold is not None and token_mask is not None, OVERLAPS=can_overlap(),
    )  # fmt: skip
    inputs = (0 if t is None else t for t in (hot_counts, hot_l1, cold_counts, l1, token_mask, order))
    n_l1, M = 0 if hot is None else len(hot[0]), 0 if cold is None else len(cold[0])
    kernel(max(1, ceil_div(H + C, _NEURONS)), *inputs, counts, l1_sum, hot_parts, H, n_l1, cold_parts, C, M)
