"""The cold tail's backward, token by token, and the weight gradients, neuron by neuron.

    dh = dy . Wd_n + l1 sign(h)     dz = dh u a'(r)     du = dh a     dx = sum over n of dz Wg_n + du Wu_n
    dWg_n = sum over tokens of dz x    dWu_n = sum of du x    dWd_n = sum of h dy       (plain FFN: no u; dz = dh a'(r))

``write_tail_gradients`` runs over tokens, as the tail's forward does: it gathers three rows a (token, neuron) pair and
leaves dz, du and h in lists by neurons. ``write_weight_gradients`` runs over neurons and gathers the pairs' rows of x
and dy: two, since dWg and dWu share x. Chunks of D are its outermost loop, so that what is gathered from fits in L2.

Sums are fp32, in the order of a token's neurons or a neuron's tokens: no atomics, the same bits every time.
Bytes, M 16384, D 2048, 10 pairs a token, bf16: 2.0 GB and 1.3 GB, mostly from L2; the gradients written, 69 MB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import can_overlap, ceil_div, launch, power_of_2
from twell.kernels.lists import LONG, Lists, n_early, n_long, n_programs, token_of_program
from twell.kernels.split import Layout
from twell.kernels.tiles import RowTile, neuron_of_bit, start_after
from twell.kernels.transpose import CHUNK, Columns, is_listed, place_of

_BLOCK_D = 256  # of x and dy: 16384 rows of both are 17 MB in bf16
_TOKENS = 2  # rows gathered at once
_WARPS = 1  # as many as leave every thread 8 elements of a row: then a sum over rows needs no other thread


class Pairs(NamedTuple):
    """By neurons: see ``transpose.py``."""

    tokens: Tensor  # int32 [size]
    factors: Tensor  # [3, size]: dz, du, h


@triton.jit
def _tail_backward_kernel(
    i_dy,  # [M, D]
    i_rows,  # [size]
    i_values,  # [size]
    i_saved_up,  # [size] or unused
    i_marks,  # int32, see Lists
    i_l1,  # [] or unused: the gradient of sum |h|
    i_counted,  # [M] bool or unused: tokens whose |h| counts
    i_gate,  # [F, D]
    i_up,  # [F, D] or unused
    i_down,  # [F, D], neuron-major
    i_places,  # [F] int32 or unused: cold neurons among the cold ones
    i_bits,  # see Columns
    i_offsets,
    o_dx,  # [M, D]
    o_tokens,  # see Pairs
    o_factors,
    M,
    D,
    cap,
    n_early,
    long_start,
    size,
    keys,
    P,
    BD: tl.constexpr,
    WHOLE: tl.constexpr,  # BD == D
    NEURONS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WANTS_DX: tl.constexpr,
    WANTS_PAIRS: tl.constexpr,
    LONG: tl.constexpr,
    N_LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    dtype = o_factors.dtype.element_ty
    token, n, start = token_of_program(tl.program_id(0), i_marks, M, cap, n_early, long_start, LONG, N_LONG)
    d = tl.arange(0, BD)
    in_d = (d < D) | WHOLE
    if n >= 0:
        dy = tl.load(i_dy + token.to(tl.int64) * D + d, mask=in_d, other=0.0).to(tl.float32)
        acc = tl.zeros((BD,), tl.float32)
        if HAS_L1:
            l1 = tl.load(i_l1).to(tl.float32)
            if HAS_MASK:
                l1 = tl.where(tl.load(i_counted + token) != 0, l1, 0.0)
        for first in tl.range(0, n, NEURONS, num_stages=STAGES):
            e = first + tl.arange(0, NEURONS)
            there = e < n
            row = tl.load(i_rows + start + e, mask=there, other=0)
            a = tl.load(i_values + start + e, mask=there, other=0.0).to(tl.float32)
            inside = there[:, None] & in_d[None, :]
            down = tl.load(i_down + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            if WANTS_DX:  # asked for before the sum below, which is a barrier to the loads after it
                gate = tl.load(i_gate + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            slope = tl.where(there, 1.0, 0.0)
            if SQUARED:
                slope = 2.0 * a
                a = a * a
            h = a
            if GATED:
                u = tl.load(i_saved_up + start + e, mask=there, other=0.0).to(tl.float32)
                h = a * u
                slope = slope * u
                if WANTS_DX:
                    up = tl.load(i_up + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            dh = tl.sum(down.to(tl.float32) * dy[None, :], axis=1)
            if HAS_L1:
                dh += tl.where(h > 0, l1, tl.where(h < 0, -l1, 0.0))
            dz = dh * slope
            du = dh * a
            if WANTS_DX:
                part = dz[:, None] * gate.to(tl.float32)
                if GATED:
                    part += du[:, None] * up.to(tl.float32)
                acc += tl.sum(part, axis=0)
            if WANTS_PAIRS:
                neuron = row
                if HAS_ORDER:
                    neuron = tl.load(i_places + row, mask=there, other=0)
                place = place_of(i_bits, i_offsets, token, neuron, there, keys, P, CHUNK).to(tl.int64)
                tl.store(o_tokens + place, token + tl.zeros_like(e), mask=there)
                tl.store(o_factors + place, dz.to(dtype), mask=there)
                if GATED:
                    tl.store(o_factors + size.to(tl.int64) + place, du.to(dtype), mask=there)
                tl.store(o_factors + 2 * size.to(tl.int64) + place, h.to(dtype), mask=there)
        if WANTS_DX:
            tl.store(o_dx + token.to(tl.int64) * D + d, acc.to(o_dx.dtype.element_ty), mask=in_d)
    elif WANTS_DX:
        own = tl.program_id(0) - N_LONG - n_early
        if own >= 0:
            active = -1 - tl.load(i_marks + 4 + own)
            if is_listed(active, i_marks, cap, LONG, N_LONG) == 0:  # heavy: what it adds comes later
                tl.store(o_dx + own.to(tl.int64) * D + d, tl.zeros((BD,), o_dx.dtype.element_ty), mask=in_d)


@triton.jit
def _weight_gradient_kernel(
    i_x,  # [M, D]
    i_dy,  # [M, D]
    i_tokens,  # see Pairs
    i_factors,
    i_offsets,  # see Columns
    i_order,  # [C] int32 or unused
    o_gate,  # [F, D] or unused; likewise the others
    o_up,  # [F, D]
    o_down,  # [F, D], neuron-major
    o_gate_bias,  # [F]
    o_up_bias,  # [F]
    D,
    C,
    size,
    keys,
    P,
    x_stride,
    BD: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr,
    WANTS_UP_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    key = tl.program_id(0) % keys
    block = tl.program_id(0) // keys
    neuron = neuron_of_bit(key // 32, key % 32)
    if neuron < C:
        begin = tl.load(i_offsets + key * P)
        end = tl.load(i_offsets + (key + 1) * P)
        d = block * BD + tl.arange(0, BD)
        gate = tl.zeros((BD,), tl.float32)
        up = tl.zeros((BD,), tl.float32)
        down = tl.zeros((BD,), tl.float32)
        gate_bias = tl.zeros((TOKENS,), tl.float32)
        up_bias = tl.zeros((TOKENS,), tl.float32)
        for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
            e = (first + tl.arange(0, TOKENS)).to(tl.int64)
            there = e < end
            token = tl.load(i_tokens + e, mask=there, other=0).to(tl.int64)
            inside = there[:, None] & (d < D)[None, :]
            if WANTS_GATE | WANTS_UP:
                x = tl.load(i_x + token[:, None] * x_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
            if WANTS_DOWN:
                dy = tl.load(i_dy + token[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
                h = tl.load(i_factors + 2 * size.to(tl.int64) + e, mask=there, other=0.0).to(tl.float32)
                down += tl.sum(h[:, None] * dy, axis=0)
            if WANTS_GATE | WANTS_GATE_BIAS:
                dz = tl.load(i_factors + e, mask=there, other=0.0).to(tl.float32)
                gate_bias += dz
                if WANTS_GATE:
                    gate += tl.sum(dz[:, None] * x, axis=0)
            if WANTS_UP | WANTS_UP_BIAS:
                du = tl.load(i_factors + size.to(tl.int64) + e, mask=there, other=0.0).to(tl.float32)
                up_bias += du
                if WANTS_UP:
                    up += tl.sum(du[:, None] * x, axis=0)
        row = neuron
        if HAS_ORDER:
            row = tl.load(i_order + neuron)
        at = row.to(tl.int64) * D + d
        if WANTS_GATE:
            tl.store(o_gate + at, gate.to(o_gate.dtype.element_ty), mask=d < D)
        if WANTS_UP:
            tl.store(o_up + at, up.to(o_up.dtype.element_ty), mask=d < D)
        if WANTS_DOWN:
            tl.store(o_down + at, down.to(o_down.dtype.element_ty), mask=d < D)
        if block == 0:
            if WANTS_GATE_BIAS:
                tl.store(o_gate_bias + row, tl.sum(gate_bias, axis=0).to(o_gate_bias.dtype.element_ty))
            if WANTS_UP_BIAS:
                tl.store(o_up_bias + row, tl.sum(up_bias, axis=0).to(o_up_bias.dtype.element_ty))


def write_tail_gradients(
    dx: Tensor | None,
    dy: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    lists: Lists,
    saved_up: Tensor | None,
    layout: Layout,
    columns: Columns | None,
    *,
    squared: bool,
    tile: RowTile,
) -> Pairs | None:
    """Write dx [M, D], zeros for heavy tokens; with ``columns`` return the pairs that the weight gradients want."""
    M, D = dy.shape
    size, up, order = lists.rows.shape[0], layout.up, layout.order
    pairs = None
    if columns is not None:
        pairs = Pairs(torch.empty(size, dtype=torch.int32, device=dy.device), lists.values.new_empty(3, size))
    if M == 0 or (dx is None and pairs is None):
        return pairs
    wide = power_of_2(D)
    launch(
        _tail_backward_kernel,
        n_programs(M),
        (
            dy,
            lists.rows,
            lists.values,
            dy if saved_up is None else saved_up,
            lists.marks,
            dy if dl1 is None else dl1,
            dy if token_mask is None else token_mask,
            layout.gate,
            dy if up is None else up,
            layout.down,
            lists.marks if order is None else order.places,
            lists.marks if columns is None else columns.bits,
            lists.marks if columns is None else columns.offsets,
            dy if dx is None else dx,
            lists.marks if pairs is None else pairs.tokens,
            dy if pairs is None else pairs.factors,
            M,
            D,
            lists.cap,
            n_early(M),
            M * lists.cap,
            size,
            0 if columns is None else columns.bits.shape[1],
            ceil_div(M, CHUNK),
        ),
        {
            "BD": wide,
            "WHOLE": wide == D,
            "NEURONS": tile.neurons,
            "GATED": up is not None,
            "SQUARED": squared,
            "HAS_ORDER": order is not None,
            "HAS_L1": dl1 is not None,
            "HAS_MASK": token_mask is not None,
            "WANTS_DX": dx is not None,
            "WANTS_PAIRS": pairs is not None,
            "LONG": LONG,
            "N_LONG": n_long(M),
            "CHUNK": CHUNK,
            "STAGES": tile.stages,
            "OVERLAPS": can_overlap(),
        },
        warps=tile.warps_for(wide),
        stages=tile.stages,
    )
    return pairs


class NeuronGradients(NamedTuple):
    """Of the model's weights, neuron by neuron; None where none is wanted."""

    gate: Tensor | None  # [F, D]
    up: Tensor | None  # [F, D]
    down: Tensor | None  # [F, D]
    gate_bias: Tensor | None  # [F]
    up_bias: Tensor | None  # [F]


def write_weight_gradients(
    out: NeuronGradients, x: Tensor, dy: Tensor, pairs: Pairs, columns: Columns, order: Tensor | None, n_cold: int
) -> None:
    """Write the cold neurons' rows of ``out``; those without tokens become 0."""
    M, D = x.shape
    keys = columns.bits.shape[1]
    if keys == 0:
        return
    block = min(_BLOCK_D, power_of_2(D))
    launch(
        _weight_gradient_kernel,
        keys * ceil_div(D, block),
        (
            x,
            dy,
            pairs.tokens,
            pairs.factors,
            columns.offsets,
            columns.offsets if order is None else order,
            *(x if o is None else o for o in out),
            D,
            n_cold,
            pairs.tokens.shape[0],
            keys,
            ceil_div(M, CHUNK),
            x.stride(0),
        ),
        {
            "BD": block,
            "TOKENS": _TOKENS,
            "HAS_ORDER": order is not None,
            "WANTS_GATE": out.gate is not None,
            "WANTS_UP": out.up is not None,
            "WANTS_DOWN": out.down is not None,
            "WANTS_GATE_BIAS": out.gate_bias is not None,
            "WANTS_UP_BIAS": out.up_bias is not None,
            "STAGES": 1,
            "OVERLAPS": can_overlap(),
        },
        warps=_WARPS,
        stages=1,
    )
