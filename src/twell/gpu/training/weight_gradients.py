"""The cold neurons' weight gradients, neuron by neuron.

    dWg_n = sum over tokens of dz x    dWu_n = sum of du x    dWd_n = sum of h dy

A neuron's pairs (``tail_backward.py``) are gathered: two rows each, since dWg and dWu share x. Chunks of D are the
outermost loop, so that what is gathered from fits in L2. A neuron is one warp's work, 16 pairs at once: a product of
[BD, 16] by [16, 8] on tensor cores, whose first three columns are dz, du and h, the others 0. (They are idle anyway; by
fp32 products and sums it took 110 instructions a pair and block of D, and was bound by them: 249 us.)

A plan leaves the neurons that fire often among the hot ones; but one made from other text leaves some among the cold
ones, and a neuron that fires for half of 16384 tokens would keep its warp busy for long. So neurons of more than SPLIT
pairs are divided, where the list of all pairs reaches a multiple of SPLIT: a first launch sums every such share of
them into a buffer, the second one what comes before the first share, and adds the shares. Which neuron has the pair at
a multiple of SPLIT is known from ``tail_backward.py``, so nothing has to be counted or sorted.

Sums are fp32, and their order follows from the counts: no atomics, the same bits every time.
Bytes, M 16384, D 2048, 10 pairs a token, bf16: 1.3 GB, mostly from L2, and 69 MB of gradients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, LONG, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import start_after
from twell.gpu.training.tail_backward import Pairs, split_at
from twell.gpu.training.transpose import Columns

_BLOCK_D = 128  # of x and dy: 16384 rows of both are 8 MB in bf16
_TOKENS = 16  # rows gathered at once: the depth of a product
_STAGES = 2
_SHARES = 512  # at once: there is room for several times as many, and as a rule none is needed


class NeuronGradients(NamedTuple):
    """Of the model's weights, neuron by neuron; None where none is wanted."""

    gate: Tensor | None  # [F, D]
    up: Tensor | None  # [F, D]
    down: Tensor | None  # [F, D]
    gate_bias: Tensor | None  # [F]
    up_bias: Tensor | None  # [F]


@triton.jit
def _sum_pairs(
    begin, end, d, i_x, i_dy, i_tokens, i_factors, D, size, x_stride,
    BD: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, WANTS_INPUTS: tl.constexpr, WANTS_DOWN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[16, BD]: columns ``d`` of the sums over pairs begin to end, for gate, up and down, then zeros."""
    acc = tl.zeros((16, BD), tl.float32)
    kind = tl.arange(0, 16)[:, None]
    for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
        e = (first + tl.arange(0, TOKENS)).to(tl.int64)
        there = e < end
        token = tl.load(i_tokens + e, mask=there, other=0).to(tl.int64)
        factors = i_factors + kind * size + e[None, :]
        inside = there[:, None] & (d < D)[None, :]
        if WANTS_INPUTS:
            x = tl.load(i_x + token[:, None] * x_stride + d[None, :], mask=inside, other=0.0)
            f = tl.load(factors, mask=there[None, :] & (kind < 2), other=0.0)
            acc = tl.dot(f, x, acc, input_precision=PRECISION)
        if WANTS_DOWN:
            dy = tl.load(i_dy + token[:, None] * D + d[None, :], mask=inside, other=0.0)
            f = tl.load(factors, mask=there[None, :] & (kind == 2), other=0.0)
            acc = tl.dot(f, dy, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_factors(begin, end, i_factors, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        total += tl.load(i_factors + e, mask=e < end, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def _share_kernel(
    i_x,  # [M, D]
    i_dy,  # [M, D]
    i_tokens,  # see Pairs
    i_factors,
    i_owners,
    i_offsets,  # see Columns
    o_shares,  # fp32 [shares, 3, D]: sums for gate, up and down
    D,
    size,
    keys,
    x_stride,
    programs,  # for each block of D
    BD: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WANTS_INPUTS: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    d = tl.program_id(0) // programs * BD + tl.arange(0, BD)
    kind = tl.arange(0, 16)[:, None]
    n_shares = tl.cdiv(tl.load(i_offsets + keys), SPLIT)
    for share in range(tl.program_id(0) % programs, n_shares, programs):
        begin = share * SPLIT
        key = tl.load(i_owners + share)
        end = tl.load(i_offsets + key + 1)
        if end - tl.load(i_offsets + key) > SPLIT:
            acc = _sum_pairs(begin, min(end, begin + SPLIT), d, i_x, i_dy, i_tokens, i_factors, D, size, x_stride, BD,
                             TOKENS, STAGES, WANTS_INPUTS, WANTS_DOWN, PRECISION)  # fmt: skip
            sums = o_shares + (share + tl.zeros((), tl.int64)) * (3 * D)
            tl.store(sums + kind * D + d[None, :], acc, mask=(kind < 3) & (d < D)[None, :])


@triton.jit
def _neuron_kernel(
    i_x,  # [M, D]
    i_dy,  # [M, D]
    i_tokens,  # see Pairs
    i_factors,
    i_offsets,  # see Columns
    i_shares,  # see _share_kernel
    i_order,  # int32 [F]: rows of the weights, hot neurons first
    o_gate,  # [F, D] or unused; likewise the others
    o_up,  # [F, D]
    o_down,  # [F, D], neuron-major
    o_gate_bias,  # [F]
    o_up_bias,  # [F]
    D,
    C,
    H,
    size,
    keys,
    x_stride,
    BD: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr,
    WANTS_UP_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    key = tl.program_id(0) % keys
    block = tl.program_id(0) // keys
    if key < C:
        begin = tl.load(i_offsets + key)
        end = tl.load(i_offsets + key + 1)
        row = tl.load(i_order + H + key)
        is_split = end - begin > SPLIT
        d = block * BD + tl.arange(0, BD)
        kind = tl.arange(0, 16)[:, None]
        acc = _sum_pairs(begin, tl.where(is_split, tl.cdiv(begin, SPLIT) * SPLIT, end), d, i_x, i_dy, i_tokens,
                         i_factors, D, size, x_stride, BD, TOKENS, STAGES, WANTS_GATE | WANTS_UP, WANTS_DOWN,
                         PRECISION)  # fmt: skip
        if is_split:
            for share in range(tl.cdiv(begin, SPLIT), tl.cdiv(end, SPLIT)):
                sums = i_shares + (share + tl.zeros((), tl.int64)) * (3 * D)
                acc += tl.load(sums + kind * D + d[None, :], mask=(kind < 3) & (d < D)[None, :], other=0.0)
        at = row.to(tl.int64) * D + d
        if WANTS_GATE:
            gate = tl.sum(tl.where(kind == 0, acc, 0.0), axis=0)
            tl.store(o_gate + at, gate.to(o_gate.dtype.element_ty), mask=d < D)
        if WANTS_UP:
            up = tl.sum(tl.where(kind == 1, acc, 0.0), axis=0)
            tl.store(o_up + at, up.to(o_up.dtype.element_ty), mask=d < D)
        if WANTS_DOWN:
            down = tl.sum(tl.where(kind == 2, acc, 0.0), axis=0)
            tl.store(o_down + at, down.to(o_down.dtype.element_ty), mask=d < D)
        if block == 0:
            if WANTS_GATE_BIAS:
                gate_bias = _sum_factors(begin, end, i_factors, 128)
                tl.store(o_gate_bias + row, gate_bias.to(o_gate_bias.dtype.element_ty))
            if WANTS_UP_BIAS:
                up_bias = _sum_factors(begin, end, i_factors + size, 128)
                tl.store(o_up_bias + row, up_bias.to(o_up_bias.dtype.element_ty))


@functools.cache
def _kernels(dtype: torch.dtype, D: int, split: int, wants: tuple[bool, ...], overlaps: bool) -> tuple[Kernel, Kernel]:
    """For shares and for neurons. ``wants``: which of ``NeuronGradients``."""
    of_pairs: tuple[Any, ...] = (dtype, dtype, torch.int32, dtype)
    sizes = {"BD": block_of(D, dtype), "TOKENS": _TOKENS, "STAGES": _STAGES, "SPLIT": split}
    names = ("WANTS_GATE", "WANTS_UP", "WANTS_DOWN", "WANTS_GATE_BIAS", "WANTS_UP_BIAS")
    ends = {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", "OVERLAPS": overlaps}
    of_shares = (torch.int32, torch.int32, torch.float32, MULTIPLE, LONG, ANY, MULTIPLE, ANY)
    shared_wants = {"WANTS_INPUTS": wants[0] or wants[1], "WANTS_DOWN": wants[2]}
    shares = Kernel(_share_kernel, (*of_pairs, *of_shares), {**sizes, **shared_wants, **ends}, warps=1, stages=_STAGES)
    of_neurons: tuple[Any, ...] = (torch.int32, torch.float32, torch.int32, *[dtype] * 5, MULTIPLE, ANY, ANY, LONG, ANY, MULTIPLE)
    constants = {**sizes, **dict(zip(names, wants, strict=True)), **ends}
    return shares, Kernel(_neuron_kernel, (*of_pairs, *of_neurons), constants, warps=1, stages=_STAGES)


def block_of(D: int, dtype: torch.dtype) -> int:
    """Columns of x and dy that a program takes."""
    return min(_BLOCK_D * 2 // dtype.itemsize, power_of_2(D))


def write_weight_gradients(
    out: NeuronGradients,
    x: Tensor,
    dy: Tensor,
    pairs: Pairs,
    columns: Columns,
    order: Tensor,
    n_cold: int,
    space: Space | None = None,
) -> None:
    """Write the cold neurons' rows of ``out``; those without tokens become 0. ``order``: int32 [F], hot neurons
    first."""
    D, keys = x.shape[1], columns.keys
    if keys == 0:
        return
    size, n_shares = pairs.tokens.shape[0], pairs.owners.shape[0]
    shares = (x.new_empty if space is None else space.take)(n_shares, 3, D, dtype=torch.float32)
    share_kernel, neuron_kernel = _kernels(x.dtype, D, split_at(size), tuple(o is not None for o in out), can_overlap())
    blocks, offsets = ceil_div(D, block_of(D, x.dtype)), columns.offsets
    if n_shares:
        programs = min(n_shares, _SHARES)
        share_kernel(programs * blocks, x, dy, *pairs, offsets, shares, D, size, keys, x.stride(0), programs)
    inputs = x, dy, pairs.tokens, pairs.factors, offsets, shares, order
    outputs = (0 if o is None else o for o in out)
    neuron_kernel(keys * blocks, *inputs, *outputs, D, n_cold, len(order) - n_cold, size, keys, x.stride(0))
