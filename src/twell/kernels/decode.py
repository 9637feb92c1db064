"""Few tokens (M <= 64), as in generation: read all of the gate, and of up and down only the neurons that fire.

    neurons kernel   z = x Wg^T + bg;  u = x Wu^T + bu for the tile's neurons that any token fires;  h = a(relu(z)) * u
    sums kernel      y = sum over those neurons n of h_n Wd_n,  + bd

A program of the first has BN neurons over the whole of D: ReLU needs the whole sum. It marks those that fire, a bit
each. A program of the second counts the bits of all words, and so finds the neurons of its share of them, in order, for
BD columns of y. Where they are cut in SPLITS shares the last program to come adds what the others left, always in the
same order: no sum depends on timing, and no grid on a count, so that both can be captured in a CUDA graph.

A token with inf or NaN in x has z = inf, -inf or NaN everywhere. -inf counts as firing: h = 0 * u is NaN, as it is in a
dense FFN, where u is inf or NaN.

Legend: M tokens, D model width, F neurons, U neurons that fire for any token.
Weights: Wg, Wu [F, D] as the model has them, Wd neuron-major [F, D].
Bytes, D 2048, F 5632, bf16: Wg 23 MB, then 8 KB for each of U neurons (29 at M 1, 0.2 MB; about 850 at M 64 of skew29,
7 MB); dense reads 69 MB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import can_overlap, ceil_div, launch, power_of_2
from twell.kernels.tiles import popcount, relu, start_after
from twell.reference import Weights

MAX_TOKENS = 64
_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}  # of a tile's neurons


class NeuronTile(NamedTuple):
    """Neurons (8, 16 or 32) and depth of a tile, warps, pipeline stages; by tensor cores, or (one token) without."""

    BN: int
    BK: int
    warps: int
    stages: int
    dots: bool = True


class SumTile(NamedTuple):
    """Neurons taken at once, columns of y, shares of the neurons, warps."""

    BU: int
    BD: int
    splits: int
    warps: int

    def warps_for(self, n_words: int) -> int:
        """The table is for up to 8192 neurons; every thread holds BU counts of some words."""
        return min(16, self.warps * max(1, n_words // 256))


def tiles_for(tokens: int, element_size: int = 2) -> tuple[NeuronTile, SumTile]:
    """For D 2048 on an H200; right anywhere."""
    if tokens == 1:
        neurons, sums = NeuronTile(8, 2048, 4, 1, dots=False), SumTile(32, 128, 1, 4)
    elif tokens <= 16:
        neurons, sums = NeuronTile(16, 128, 4, 6), SumTile(32, 64, 4, 4)
    else:
        neurons, sums = NeuronTile(32, 128, 4, 4), SumTile(32, 64, 8, 4)
    return neurons._replace(BK=neurons.BK * 4 // element_size**2), sums


# ---------------------------------------------------------------------------------------------------------
# Device functions
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def _products(
    i_x, i_rows, neuron, wanted, M, D, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: x . row for the ``wanted`` rows [BN] and all tokens; what is not wanted is not read."""
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    rows = i_rows + neuron[:, None].to(tl.int64) * D
    if DOTS:
        acc = tl.zeros((BN, BM), tl.float32)
        for start in range(0, D, BK):
            at = start + k
            x = tl.load(i_x + m[None, :] * x_stride + at[:, None], mask=(m[None, :] < M) & (at[:, None] < D), other=0.0)
            w = tl.load(rows + at[None, :], mask=wanted[:, None] & (at[None, :] < D), other=0.0)
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
    else:  # one token: products stay where the rows were loaded to, and are summed once
        parts = tl.zeros((BN, BK), tl.float32)
        for start in range(0, D, BK):
            at = start + k
            x = tl.load(i_x + at, mask=at < D, other=0.0).to(tl.float32)
            w = tl.load(rows + at[None, :], mask=wanted[:, None] & (at[None, :] < D), other=0.0).to(tl.float32)
            parts += w * x[None, :]
        acc = tl.sum(parts, axis=1)[:, None]
    return acc


@triton.jit
def _place_of_bit(words, n):
    """Where the n-th set bit (from 0) of each word is, by halves."""
    place = tl.zeros_like(n)
    for level in tl.static_range(5):
        width = 16 >> level
        below = popcount((words >> place.to(tl.uint32)) & ((1 << width) - 1))
        is_above = below <= n
        n = tl.where(is_above, n - below, n)
        place = tl.where(is_above, place + width, place)
    return place


# ---------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def _neurons_kernel(
    i_x,  # [M, D]
    i_gate,  # [F, D]
    i_gate_bias,  # [F] or unused
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    o_h,  # [F, M]: of the neurons that fire
    o_bits,  # [F / BN]: of BN bits each, set for the neurons that fire for any token
    o_arrived,  # int32 [N_ARRIVED]: zeros for the kernel after this
    M,
    D,
    F,
    x_stride,
    DOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    N_ARRIVED: tl.constexpr,
):
    start_after(OVERLAPS)
    tile = tl.program_id(0)
    if tile == 0:
        tl.store(o_arrived + tl.arange(0, N_ARRIVED), tl.zeros((N_ARRIVED,), tl.int32))
    dtype = o_h.dtype.element_ty
    neuron = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    there = neuron < F
    z = _products(i_x, i_gate, neuron, there, M, D, x_stride, BM, BN, BK, DOTS, PRECISION)
    if HAS_GATE_BIAS:
        z += tl.load(i_gate_bias + neuron, mask=there, other=0.0).to(tl.float32)[:, None]
    a = relu(z).to(dtype).to(tl.float32)
    fires = ((a != 0) | (z == float("-inf"))) & (m[None, :] < M) & there[:, None]
    fired = tl.max(fires.to(tl.int32), axis=1)
    bits = tl.sum(fired << tl.arange(0, BN), axis=0)
    tl.store(o_bits + tile, bits.to(o_bits.dtype.element_ty))
    if bits != 0:
        wanted = fired > 0
        if SQUARED:
            a = a * a
        if GATED:
            u = _products(i_x, i_up, neuron, wanted, M, D, x_stride, BM, BN, BK, DOTS, PRECISION)
            if HAS_UP_BIAS:
                u += tl.load(i_up_bias + neuron, mask=wanted, other=0.0).to(tl.float32)[:, None]
            a = a * u
        h = tl.where(fires, a, 0.0)
        inside = wanted[:, None] & (m[None, :] < M)
        tl.store(o_h + neuron[:, None].to(tl.int64) * M + m[None, :], h.to(dtype), mask=inside)


@triton.jit
def _sums_kernel(
    i_h,  # [F, M]
    i_words,  # int32 [F / 32]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    m_parts,  # fp32 [SPLITS, M, D] or unused
    m_arrived,  # int32 [D / BD]: programs of these columns that are done
    M,
    D,
    F,
    columns,  # ceil(D / BD)
    DOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,  # words of bits: power of 2 >= F / 32
    BU: tl.constexpr,
    BD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
):
    start_after(OVERLAPS)
    column = tl.program_id(0) % columns
    split = tl.program_id(0) // columns
    m = tl.arange(0, BM)
    d = column * BD + tl.arange(0, BD)
    word = tl.arange(0, BW)
    bits = tl.load(i_words + word, mask=word * 32 < F, other=0)
    bits = tl.where(word * 32 + 32 > F, bits & ((1 << (F % 32)) - 1), bits)  # the last word may be half written
    counts = popcount(bits.to(tl.uint32, bitcast=True))
    ends = tl.cumsum(counts, axis=0)
    total = tl.sum(counts, axis=0)
    each = tl.cdiv(tl.cdiv(total, BU), SPLITS) * BU  # of whole blocks, so that one split is as many as fit
    last = tl.minimum(total, (split + 1) * each)
    acc = tl.zeros((BM, BD), tl.float32)
    for first in range(split * each, last, BU):
        place = first + tl.arange(0, BU)
        inside = place < last
        passed = ends[None, :] <= place[:, None]  # [BU, BW]: words whose neurons come before
        its_word = tl.sum(passed.to(tl.int32), axis=1)
        before = tl.sum(tl.where(passed, counts[None, :], 0), axis=1)
        its_bits = tl.load(i_words + its_word, mask=inside, other=0).to(tl.uint32, bitcast=True)
        neuron = (its_word * 32 + _place_of_bit(its_bits, place - before)).to(tl.int64)
        w = tl.load(i_down + neuron[:, None] * D + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
        if DOTS:
            h = tl.load(i_h + neuron[None, :] * M + m[:, None], mask=inside[None, :] & (m[:, None] < M), other=0.0)
            acc = tl.dot(h, w, acc, input_precision=PRECISION)
        else:
            h = tl.load(i_h + neuron, mask=inside, other=0.0).to(tl.float32)
            acc += tl.sum(h[:, None] * w.to(tl.float32), axis=0)[None, :]
    here = (m[:, None] < M) & (d[None, :] < D)
    place = m[:, None] * D + d[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(m_parts + split * M * D + place, acc, mask=here)
        tl.debug_barrier()  # all of it, before it is told
        is_last = tl.atomic_add(m_arrived + column, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.debug_barrier()
            acc = tl.zeros((BM, BD), tl.float32)
            for s in range(SPLITS):
                acc += tl.load(m_parts + s * M * D + place, mask=here, other=0.0, cache_modifier=".cg")
        if HAS_DOWN_BIAS:
            acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        tl.store(o_y + place, acc.to(o_y.dtype.element_ty), mask=here)


# ---------------------------------------------------------------------------------------------------------
# Launcher
# ---------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Weights,
    down: Tensor,
    activation: str,
    tiles: tuple[NeuronTile, SumTile] | None = None,
) -> Tensor:
    """y [M, D] for x [M, D], M from 1 to 64. ``down``: Wd as [F, D], contiguous."""
    (M, D), F = x.shape, w.gate.shape[0]
    if not 0 < M <= MAX_TOKENS:
        raise ValueError(f"decode.forward takes 1 to {MAX_TOKENS} tokens, got {M}")
    x = x if x.stride(1) == 1 else x.contiguous()
    gate, up = w.gate.contiguous(), None if w.up is None else w.up.contiguous()
    neurons, sums = tiles or tiles_for(M, x.element_size())
    dots = neurons.dots or M > 1
    columns, n_words = ceil_div(D, sums.BD), ceil_div(F, 32)
    constants = {
        "DOTS": dots,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",  # which says nothing of 16 bits
        "OVERLAPS": can_overlap(),
        "BM": max(16, power_of_2(M)) if dots else 1,
    }
    h = x.new_empty(F, M)
    words, arrived = torch.empty(n_words + power_of_2(columns), dtype=torch.int32, device=x.device).split(
        [n_words, power_of_2(columns)]
    )
    launch(
        _neurons_kernel,
        ceil_div(F, neurons.BN),
        (
            x,
            gate,
            x if w.gate_bias is None else w.gate_bias,
            x if up is None else up,
            x if w.up_bias is None else w.up_bias,
            h,
            words.view(_BITS[neurons.BN]),
            arrived,
            M,
            D,
            F,
            x.stride(0),
        ),
        {
            **constants,
            "BN": neurons.BN,
            "BK": min(neurons.BK, power_of_2(D)),
            "GATED": up is not None,
            "SQUARED": activation == "relu2",
            "HAS_GATE_BIAS": w.gate_bias is not None,
            "HAS_UP_BIAS": w.up_bias is not None,
            "N_ARRIVED": power_of_2(columns),
        },
        warps=neurons.warps,
        stages=neurons.stages,
    )
    y = x.new_empty(M, D)
    parts = torch.empty(sums.splits, M, D, dtype=torch.float32, device=x.device) if sums.splits > 1 else y
    wide = power_of_2(n_words)
    launch(
        _sums_kernel,
        columns * sums.splits,
        (h, words, down, x if w.down_bias is None else w.down_bias, y, parts, arrived, M, D, F, columns),
        {
            **constants,
            "BW": wide,
            "BU": sums.BU,
            "BD": sums.BD,
            "SPLITS": sums.splits,
            "HAS_DOWN_BIAS": w.down_bias is not None,
        },
        warps=sums.warps_for(wide),
        stages=2,
    )
    return y
