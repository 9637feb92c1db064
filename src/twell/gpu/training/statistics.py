"""The statistics of a training forward out of the parts that other kernels leave: one launch instead of seven small
operations.

    counts[order[i]] = sum over parts of what the i-th neuron was active for      (hot neurons, then cold ones)
    l1_sum           = sum of |h| over parts of the hot neurons and over tokens

Integers, and sums in a fixed order: the same bits every time.
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

_NEURONS, _ROWS, _LINE = 64, 64, 4096  # neurons of a program, parts at once; numbers of |h| at once


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
    i_l1,  # [M], of the cold neurons
    i_counted,  # [M] bool or unused
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
def _kernel(has_hot: bool, has_cold: bool, has_order: bool, has_mask: bool, overlaps: bool) -> Kernel:
    pointers = (torch.int32, torch.float32, torch.int32, torch.float32, torch.bool, torch.int32, torch.int32)
    constants = {"HAS_HOT": has_hot, "HAS_COLD": has_cold, "HAS_ORDER": has_order, "HAS_MASK": has_mask}
    tiles = {"NEURONS": _NEURONS, "ROWS": _ROWS, "LINE": _LINE, "OVERLAPS": overlaps}
    return Kernel(_statistics_kernel, (*pointers, torch.float32, *[ANY] * 6), constants | tiles, warps=8)


def write_statistics(
    l1_sum: Tensor,
    counts: Tensor,
    hot: Sequence[Tensor] | None,
    cold: tuple[Tensor, Tensor] | None,
    order: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    """Write l1_sum [] float32 and counts int32 [F].

    ``hot``: parts of |h| [n] and of counts [parts, H] (``activation.py``, which has left out what the mask does);
    ``cold``: |h| by tokens [M] and parts of counts [P, C]; ``order``: int32
    [F], hot first."""
    hot_l1, hot_counts = hot or (0, None)
    l1, cold_counts = cold or (0, None)
    hot_parts, H = (0, 0) if hot_counts is None else hot_counts.shape
    cold_parts, C = (0, 0) if cold_counts is None else cold_counts.shape
    kernel = _kernel(
        hot is not None, cold is not None, order is not None, cold is not None and token_mask is not None, can_overlap()
    )
    kernel(
        max(1, ceil_div(H + C, _NEURONS)),
        0 if hot_counts is None else hot_counts,
        hot_l1,
        0 if cold_counts is None else cold_counts,
        l1,
        0 if token_mask is None else token_mask,
        0 if order is None else order,
        counts,
        l1_sum,
        hot_parts,
        H,
        0 if hot is None else hot[0].shape[0],
        cold_parts,
        C,
        0 if cold is None else cold[0].shape[0],
    )
