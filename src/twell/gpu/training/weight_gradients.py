"""The cold neurons' weight gradients, neuron by neuron.

    dWg_n = sum over tokens of dz x    dWu_n = sum of du x    dWd_n = sum of h dy

For each of a neuron's pairs (``tail_backward.py``) two rows are gathered, since dWg and dWu share x. Blocks of D are
the outermost loop, so that the gathered columns fit in L2. A neuron is one warp's work, 0.35 us per pair.

Neurons that often fired on the plan's text are hot. On another text some cold neurons fire often, too: one that fires
for half of 16384 tokens would keep its warp busy for 3 ms. So the pairs of a neuron with more than SPLIT of them are
divided into shares, which start where the list of all neurons' pairs has a multiple of SPLIT. A first launch sums each
share into a buffer; the second sums the pairs before the neuron's first share, and adds the shares.
``tail_backward.py`` stores which neuron has the pair at each multiple of SPLIT, so nothing has to be counted or sorted.

Sums are fp32, and their order follows from the counts: no atomics, the same bits every time.
Bytes, M 16384, D 2048, 10 pairs per token, bf16: 1.3 GB, mostly from L2, and 69 MB of gradients.
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
from twell.gpu.training.columns import Columns
from twell.gpu.training.tail_backward import Pairs, split_at

_BLOCK_D = 256  # columns per program: 16384 rows of x and dy are 17 MB in bf16
_TOKENS = 2  # rows gathered at once
_SHARE_TOKENS = 8  # rows gathered at once for a share: a share is long, and all programs wait for the last
_SHARES = 512  # programs per block of D; more shares run in turn, and as a rule there are none
_WARPS = 1  # every thread has 8 elements of a row, so that a sum over rows needs no other thread


class NeuronGradients(NamedTuple):
    """Gradients of the model's weights, neuron-major; None where not wanted."""

    gate: Tensor | None  # [F, D]
    up: Tensor | None  # [F, D]
    down: Tensor | None  # [F, D]
    gate_bias: Tensor | None  # [F]
    up_bias: Tensor | None  # [F]


@triton.jit
def _sum_pairs(
    begin, end, d, i_x, i_dy, i_tokens, i_factors, D, size, x_stride,
    BD: tl.constexpr, TOKENS: tl.constexpr, WANTS_GATE: tl.constexpr, WANTS_UP: tl.constexpr, WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr, WANTS_UP_BIAS: tl.constexpr,
):  # fmt: skip
    """Columns ``d`` of the sums over pairs begin to end, for gate, up and down, and the sums for both biases."""
    gate = tl.zeros((BD,), tl.float32)
    up = tl.zeros((BD,), tl.float32)
    down = tl.zeros((BD,), tl.float32)
    gate_bias = tl.zeros((TOKENS,), tl.float32)
    up_bias = tl.zeros((TOKENS,), tl.float32)
    for first in range(begin, end, TOKENS):
        e = (first + tl.arange(0, TOKENS)).to(tl.int64)
        there = e < end
        token = tl.load(i_tokens + e, mask=there, other=0).to(tl.int64)
        inside = there[:, None] & (d < D)[None, :]
        if WANTS_GATE | WANTS_UP:
            x = tl.load(i_x + token[:, None] * x_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if WANTS_DOWN:
            dy = tl.load(i_dy + token[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
            h = tl.load(i_factors + 2 * size + e, mask=there, other=0.0).to(tl.float32)
            down += tl.sum(h[:, None] * dy, axis=0)
        if WANTS_GATE | WANTS_GATE_BIAS:
            dz = tl.load(i_factors + e, mask=there, other=0.0).to(tl.float32)
            gate_bias += dz
            if WANTS_GATE:
                gate += tl.sum(dz[:, None] * x, axis=0)
        if WANTS_UP | WANTS_UP_BIAS:
            du = tl.load(i_factors + size + e, mask=there, other=0.0).to(tl.float32)
            up_bias += du
            if WANTS_UP:
                up += tl.sum(du[:, None] * x, axis=0)
    return gate, up, down, tl.sum(gate_bias, axis=0), tl.sum(up_bias, axis=0)


@triton.jit
def _share_kernel(
    i_x,  # [M, D]
    i_dy,  # [M, D]
    i_tokens,  # see Pairs, as the next two
    i_factors,
    i_owners,
    i_offsets,  # see Columns
    o_shares,  # fp32 [shares, 3 D + 16]: sums for gate, up, down, and the two biases
    D,
    size,
    keys,
    x_stride,
    programs,  # per block of D
    BD: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr,
    WANTS_UP_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    block = tl.program_id(0) // programs
    d = block * BD + tl.arange(0, BD)
    n_shares = tl.cdiv(tl.load(i_offsets + keys), SPLIT)
    for share in range(tl.program_id(0) % programs, n_shares, programs):
        begin = share * SPLIT
        key = tl.load(i_owners + share)
        end = tl.load(i_offsets + key + 1)
        if end - tl.load(i_offsets + key) > SPLIT:
            gate, up, down, gate_bias, up_bias = _sum_pairs(
                begin, min(end, begin + SPLIT), d, i_x, i_dy, i_tokens, i_factors, D, size, x_stride, BD, TOKENS,
                WANTS_GATE, WANTS_UP, WANTS_DOWN, WANTS_GATE_BIAS, WANTS_UP_BIAS,
            )  # fmt: skip
            sums = o_shares + (share + tl.zeros((), tl.int64)) * (3 * D + 16)
            tl.store(sums + d, gate, mask=d < D)
            tl.store(sums + D + d, up, mask=d < D)
            tl.store(sums + 2 * D + d, down, mask=d < D)
            if block == 0:
                tl.store(sums + 3 * D, gate_bias)
                tl.store(sums + 3 * D + 1, up_bias)


@triton.jit
def _neuron_kernel(
    i_x,  # [M, D]
    i_dy,  # [M, D]
    i_tokens,  # see Pairs, as i_factors
    i_factors,
    i_offsets,  # see Columns
    i_shares,  # see _share_kernel
    i_order,  # int32 [F]: rows of the weights, hot neurons first
    o_gate,  # [F, D] or unused, as the next four
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
    SPLIT: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr,
    WANTS_UP_BIAS: tl.constexpr,
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
        gate, up, down, gate_bias, up_bias = _sum_pairs(
            begin, tl.where(is_split, tl.cdiv(begin, SPLIT) * SPLIT, end), d, i_x, i_dy, i_tokens, i_factors, D, size,
            x_stride, BD, TOKENS, WANTS_GATE, WANTS_UP, WANTS_DOWN, WANTS_GATE_BIAS, WANTS_UP_BIAS,
        )  # fmt: skip
        if is_split:
            for share in range(tl.cdiv(begin, SPLIT), tl.cdiv(end, SPLIT)):
                sums = i_shares + (share + tl.zeros((), tl.int64)) * (3 * D + 16)
                gate += tl.load(sums + d, mask=d < D, other=0.0)
                up += tl.load(sums + D + d, mask=d < D, other=0.0)
                down += tl.load(sums + 2 * D + d, mask=d < D, other=0.0)
                gate_bias += tl.load(sums + 3 * D)
                up_bias += tl.load(sums + 3 * D + 1)
        at = row.to(tl.int64) * D + d
        if WANTS_GATE:
            tl.store(o_gate + at, gate.to(o_gate.dtype.element_ty), mask=d < D)
        if WANTS_UP:
            tl.store(o_up + at, up.to(o_up.dtype.element_ty), mask=d < D)
        if WANTS_DOWN:
            tl.store(o_down + at, down.to(o_down.dtype.element_ty), mask=d < D)
        if block == 0:
            if WANTS_GATE_BIAS:
                tl.store(o_gate_bias + row, gate_bias.to(o_gate_bias.dtype.element_ty))
            if WANTS_UP_BIAS:
                tl.store(o_up_bias + row, up_bias.to(o_up_bias.dtype.element_ty))


@functools.cache
def _kernels(dtype: torch.dtype, D: int, split: int, wants: tuple[bool, ...], overlaps: bool) -> tuple[Kernel, Kernel]:
    """For shares and for neurons. ``wants``: one flag per field of ``NeuronGradients``."""
    i32, f32, pairs = torch.int32, torch.float32, (dtype, dtype, torch.int32, dtype)
    of_shares = (*pairs, i32, i32, f32, MULTIPLE, LONG, ANY, MULTIPLE, ANY)
    of_neurons = (*pairs, i32, f32, i32, *(dtype,) * 5, MULTIPLE, ANY, ANY, LONG, ANY, MULTIPLE)
    wanted = {f"WANTS_{name.upper()}": w for name, w in zip(NeuronGradients._fields, wants, strict=True)}
    constants: dict[str, Any] = {"BD": min(_BLOCK_D, power_of_2(D)), "SPLIT": split, **wanted, "OVERLAPS": overlaps}
    return (
        Kernel(_share_kernel, of_shares, constants | {"TOKENS": _SHARE_TOKENS}, warps=_WARPS),
        Kernel(_neuron_kernel, of_neurons, constants | {"TOKENS": _TOKENS}, warps=_WARPS),
    )


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
    """Write the cold neurons' rows of ``out``, zeros for neurons without tokens. ``order``: int32 [F], hot neurons
    first."""
    D, keys = x.shape[1], columns.keys
    if keys == 0:
        return
    size, n_shares = pairs.tokens.shape[0], pairs.owners.shape[0]
    shares = (x.new_empty if space is None else space.take)(n_shares, 3 * D + 16, dtype=torch.float32)
    share_kernel, neuron_kernel = _kernels(x.dtype, D, split_at(size), tuple(o is not None for o in out), can_overlap())
    blocks, offsets = ceil_div(D, _BLOCK_D), columns.offsets
    if n_shares:
        programs = min(n_shares, _SHARES)
        share_kernel(programs * blocks, x, dy, *pairs, offsets, shares, D, size, keys, x.stride(0), programs)
    inputs = x, dy, pairs.tokens, pairs.factors, offsets, shares, order
    outputs = (0 if o is None else o for o in out)
    neuron_kernel(keys * blocks, *inputs, *outputs, D, n_cold, len(order) - n_cold, size, keys, x.stride(0))
