"""One token: an int8 copy of the gate rules out neurons that cannot fire, and only the other neurons' rows are read.

    w = s (q + e):   x . w  <=  s x . q + |x| s |e|        (Cauchy and Schwarz; s, q and |e| row by row)

A neuron for which the right side, plus a margin for the roundings of fp32 sums, is not positive cannot fire. The others
are candidates: their z and u are computed from their own rows, so the result is that of the whole gate. Of skew29 (D
2048, F 5632) 29 neurons fire and 71 are candidates: 11.5 MB of q and 0.6 MB of rows are read instead of 23 MB and 0.1
MB.

The loads of q are issued before the kernel waits for the preceding one: weights do not depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell import int8
from twell.gpu.shared.tiles import INTERPRETED, let_next_kernel_start, prefetch, relu, take, wait_for_kernel_before
from twell.plan import Plan

BN, BK, WARPS = 8, 2048, 4  # BN neurons of a program: six programs per SM have 85 kB of q in flight
SLOTS = 2  # candidates of a tile processed at once
REGISTERS = 80
_CHUNK_ROWS = 1024
_MOST_ACTIVE = 0.01  # share of all neurons: from 2.5 % candidates on, reading the gate itself is faster (H200)


class Screen(NamedTuple):
    """The int8 copy of a gate [F, D]."""

    q: Tensor  # uint8 [F, D]: q + 128
    scale: Tensor  # fp32 [F]: s
    reach: Tensor  # fp32 [F]: s x . q may be below x . w by this multiple of |x|


def screen_of(gate: Tensor) -> Screen | None:
    """None for weights that are not finite, or too large or small for the bound."""
    rows = int8.quantise_rows(gate, _CHUNK_ROWS)
    if rows is None:
        return None
    rounding = int8.roundings(gate.shape[1])
    scale = rows.per_s.reciprocal()
    reach = (rows.e_norm + rows.q_norm * rounding) * (1 + rounding) * scale
    return Screen(rows.q.view(torch.uint8).bitwise_xor_(128), scale, reach)


def bounds(screen: Screen, x: Tensor, gate_bias: Tensor | None) -> Tensor:
    """fp32 [M, F]: upper bounds of z for the tokens x [M, D], which the kernel compares with 0."""
    x = x.float()
    most = x @ (screen.q.float() - 128).t() * screen.scale + x.norm(dim=1, keepdim=True) * screen.reach
    return most if gate_bias is None else most + gate_bias


def is_worth_it(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether weights have 16 bits and so few neurons fire that few are candidates: about 2.5 for each that fires."""
    return dtype.itemsize == 2 and plan.mean_active is not None and plan.mean_active <= _MOST_ACTIVE * plan.n_neurons


@triton.jit
def _floats(q):
    """fp32 of bytes that hold a number + 128."""
    if INTERPRETED:
        return q.to(tl.float32) - 128
    else:  # put the byte into the mantissa of 2^23: two instructions; a conversion runs at an eighth of the speed
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 b;
                mov.b32 b, 0x4B000000;
                prmt.b32 $0, $4, b, 0x7650;
                prmt.b32 $1, $4, b, 0x7651;
                prmt.b32 $2, $4, b, 0x7652;
                prmt.b32 $3, $4, b, 0x7653;
                add.rn.f32 $0, $0, 0fCB000080;
                add.rn.f32 $1, $1, 0fCB000080;
                add.rn.f32 $2, $2, 0fCB000080;
                add.rn.f32 $3, $3, 0fCB000080;
            }""",
            "=f,=f,=f,=f,r",
            [q],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )


@triton.jit
def screened_neurons_kernel(
    i_x,  # [1, D]
    i_q,  # uint8 [F, D]
    i_scale,  # [F]
    i_reach,  # [F]
    i_gate,  # [F, D]
    i_gate_bias,  # [F] or unused
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    o_h,  # [F]: h of the neurons that fire
    o_bits,  # uint8 [F / 8]: one bit per neuron, set if it fires
    D,
    F,
    OVERLAPS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SLOTS: tl.constexpr,
    PREFETCHES: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
):
    """As neurons_kernel of steps.py, for one token."""
    let_next_kernel_start(OVERLAPS)
    tile = tl.program_id(0)
    dtype = o_h.dtype.element_ty
    neuron = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    there = neuron < F
    rows = i_q + neuron[:, None].to(tl.int64) * D
    sums = tl.zeros((BN,), tl.float32)
    squares = D * 1.2e-38  # squares of tiny numbers underflow to 0: their upper bound
    for start in range(0, D, BK):
        at = start + k
        q = tl.load(rows + at[None, :], mask=there[:, None] & (at[None, :] < D), other=128)
        wait_for_kernel_before(OVERLAPS)  # it does not write q: the layer is frozen
        x = tl.load(i_x + at, mask=at < D, other=0.0).to(tl.float32)
        sums += tl.sum(_floats(q) * x[None, :], axis=1)
        squares += tl.sum(x * x, axis=0)
    most = sums * tl.load(i_scale + neuron, mask=there, other=0.0)
    most += tl.sqrt(squares) * tl.load(i_reach + neuron, mask=there, other=0.0)
    if HAS_GATE_BIAS:
        bias = tl.load(i_gate_bias + neuron, mask=there, other=0.0).to(tl.float32)
        most += bias + tl.abs(bias) * 1e-6  # margin for the rounding of this sum
    candidate = (~(most <= 0) & there).to(tl.int32)  # NaN is a candidate
    if PREFETCHES:
        prefetch(i_down, neuron, candidate > 0, D, BK // 16 - 1)  # BK / 16 threads read a row, 16 bytes each
    n = tl.sum(candidate, axis=0)
    bits = tl.zeros((), tl.int32)
    for first in range(0, n, SLOTS):
        its, filled = take(neuron, candidate, first, n, SLOTS)
        begin = its.to(tl.int64) * D
        z = tl.zeros((SLOTS,), tl.float32)
        u = tl.zeros((SLOTS,), tl.float32)
        for start in range(0, D, BK):
            at = start + k
            inside = filled[:, None] & (at[None, :] < D)
            gate = tl.load(i_gate + begin[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
            x = tl.load(i_x + at, mask=at < D, other=0.0).to(tl.float32)
            if GATED:  # both rows' loads are in flight at once
                up = tl.load(i_up + begin[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
                u += tl.sum(up * x[None, :], axis=1)
            z += tl.sum(gate * x[None, :], axis=1)
        if HAS_GATE_BIAS:
            z += tl.load(i_gate_bias + its, mask=filled, other=0.0).to(tl.float32)
        a = relu(z).to(dtype).to(tl.float32)
        fires = ((a != 0) | (z == float("-inf"))) & filled
        bits |= tl.sum(fires.to(tl.int32) << (its - tile * BN), axis=0)
        if SQUARED:
            a = a * a
        if GATED:
            if HAS_UP_BIAS:
                u += tl.load(i_up_bias + its, mask=filled, other=0.0).to(tl.float32)
            a = a * u
        tl.store(o_h + its, a.to(dtype), mask=fires)
    tl.store(o_bits + tile, bits.to(tl.uint8))
