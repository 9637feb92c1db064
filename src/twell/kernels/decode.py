"""Few tokens (M <= 64), as in generation: read all of the gate, and of up and down only the neurons that fire.

    neurons kernel   z = x Wg^T + bg;  u = x Wu^T + bu for the tile's neurons that any token fires;  h = a(relu(z)) * u
    sums kernel      y = sum over those neurons n of h_n Wd_n,  + bd

A program of the first has BN neurons over the whole of D: ReLU needs the whole sum. It marks those that fire, a bit
each, and sends for their rows of Wd, which the second reads. A program of the second lists the neurons whose bits are
set, in order, and adds them up for BD columns of y: no sum depends on timing, and no grid on a count, so that both can
be captured in a CUDA graph.

A token with inf or NaN in x has z = inf, -inf or NaN everywhere. -inf counts as firing: h = 0 * u is NaN, as it is in a
dense FFN, where u is inf or NaN.

Legend: M tokens, D model width, F neurons, U neurons that fire for any token.
Weights: Wg, Wu [F, D] as the model has them, Wd neuron-major [F, D].
Bytes, D 2048, F 5632, bf16: Wg 23 MB, then 8 KB for each of U neurons (29 at M 1, 0.2 MB; about 980 at M 64 of skew29,
8 MB); dense reads 69 MB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import can_overlap, ceil_div, launch, power_of_2
from twell.kernels.tiles import popcount, relu, start_after
from twell.plan import MAX_FEW_TOKENS
from twell.reference import Weights

_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # of a tile's neurons
_SHARED_KIB = {80: 163, 90: 227, 100: 227}  # a program may have, where it is not 99


class NeuronTile(NamedTuple):
    """Neurons (8, 16, 32 or 64) and depth of a tile, warps, stages; by tensor cores, or (one token) without."""

    BN: int
    BK: int
    warps: int
    stages: int
    dots: bool = True


class SumTile(NamedTuple):
    """Neurons taken at once, columns of y, warps, stages."""

    BU: int
    BD: int
    warps: int
    stages: int

    def warps_for(self, n_words: int) -> int:
        """The table is for up to 8192 neurons; every thread lists those of some words."""
        return min(16, self.warps * max(1, n_words // 256))


def tiles_for(tokens: int, element_size: int = 2, capability: int = 90) -> tuple[NeuronTile, SumTile]:
    """For D 2048 on an H200; right anywhere."""
    if tokens == 1:
        neurons, sums = NeuronTile(8, 2048, 4, 1, dots=False), SumTile(32, 32, 4, 2)
    else:
        BN = 32 if capability // 10 == 10 else 64  # Triton 3.7 cannot compile tcgen05's narrow tiles
        warps = 8 if tokens > 32 and (capability < 90 or element_size == 4) else 4  # without wgmma: registers
        neurons = NeuronTile(BN, 128, warps, 6)
        sums = SumTile(128, 16, 4, 5) if tokens > 32 else SumTile(64, 32, 4, 5)
    neurons = neurons._replace(BK=neurons.BK * 4 // element_size**2)
    stage = (neurons.BN + max(16, power_of_2(tokens))) * neurons.BK * element_size
    fits = _SHARED_KIB.get(capability, 99) * 1024 // stage
    return neurons._replace(stages=max(1, min(neurons.stages, fits))), sums


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
        nothing = tl.zeros((BN, BM), tl.float32) + tl.where(M < 0, 1.0, 0.0)  # which the compiler does not know
        for start in range(0, D, BK):
            at = start + k
            x = tl.load(i_x + m[None, :] * x_stride + at[:, None], mask=(m[None, :] < M) & (at[:, None] < D), other=0.0)
            w = tl.load(rows + at[None, :], mask=wanted[:, None] & (at[None, :] < D), other=0.0)
            if PRECISION == "ieee":  # sums of sums, as long chains of fp32 lose digits
                acc += tl.dot(w, x, nothing, input_precision=PRECISION)
            else:
                acc = tl.dot(w, x, acc)
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
def _prefetch(i_rows, row, wanted, D, DOTS: tl.constexpr):
    """Rows of D (16-byte multiples) on their way to the L2 cache, for the kernel after this.

    A thread holds some of ``row``, and others hold the same: with dots four neighbours, without all.
    """
    address = (i_rows + row.to(tl.int64) * D).to(tl.int64)
    size = tl.zeros_like(row) + D * (i_rows.dtype.element_ty.primitive_bitwidth // 8)
    others = tl.zeros_like(row) + (3 if DOTS else 0xFFFF)
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 t;
            mov.u32 t, %tid.x;
            and.b32 t, t, $4;
            setp.eq.u32 p, t, 0;
            setp.ne.and.u32 p, $3, 0, p;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [address, size, wanted.to(tl.int32), others],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    i_down,  # [F, D]
    o_h,  # [F, BM]: of the neurons that fire
    o_bits,  # [F / BN]: of BN bits each, set for the neurons that fire for any token
    M,
    D,
    F,
    x_stride,
    DOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    PREFETCHES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
):
    start_after(OVERLAPS)
    tile = tl.program_id(0)
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
    wide = fired.to(tl.int64) if BN == 64 else fired
    bits = tl.sum(wide << tl.arange(0, BN), axis=0)
    tl.store(o_bits + tile, bits.to(o_bits.dtype.element_ty))
    if bits != 0:
        wanted = fired > 0
        if PREFETCHES:
            _prefetch(i_down, neuron, wanted, D, DOTS)
        if SQUARED:
            a = a * a
        if GATED:
            u = _products(i_x, i_up, neuron, wanted, M, D, x_stride, BM, BN, BK, DOTS, PRECISION)
            if HAS_UP_BIAS:
                u += tl.load(i_up_bias + neuron, mask=wanted, other=0.0).to(tl.float32)[:, None]
            a = a * u
        h = tl.where(fires, a, 0.0)
        tl.store(o_h + neuron[:, None].to(tl.int64) * BM + m[None, :], h.to(dtype), mask=wanted[:, None])


@triton.jit
def _sums_kernel(
    i_h,  # [F, BM]
    i_words,  # int32 [F / 32]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    m_lists,  # int32 [D / BD, F]: for each program the neurons that fire, in order
    M,
    D,
    F,
    DOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,  # words of bits: power of 2 >= F / 32
    BU: tl.constexpr,
    BD: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    start_after(OVERLAPS)
    column = tl.program_id(0)
    m = tl.arange(0, BM)
    d = column * BD + tl.arange(0, BD)
    word = tl.arange(0, BW)
    bits = tl.load(i_words + word, mask=word * 32 < F, other=0)
    bits = tl.where(word * 32 + 32 > F, bits & ((1 << (F % 32)) - 1), bits)  # the last word may be half written
    words = bits.to(tl.uint32, bitcast=True)
    counts = popcount(words)
    starts = tl.cumsum(counts, axis=0) - counts
    total = tl.sum(counts, axis=0)
    its_list = m_lists + column * F
    bit = tl.arange(0, 32).to(tl.uint32)
    place = starts[:, None] + popcount(words[:, None] & ((1 << bit) - 1)[None, :])  # [BW, 32]
    is_set = ((words[:, None] >> bit[None, :]) & 1) != 0
    tl.store(its_list + place, word[:, None] * 32 + bit[None, :].to(tl.int32), mask=is_set)
    tl.debug_barrier()  # all of it, before it is read
    acc = tl.zeros((BM, BD), tl.float32)
    nothing = tl.zeros((BM, BD), tl.float32) + tl.where(M < 0, 1.0, 0.0)
    for start in tl.range(0, total, BU, num_stages=STAGES):
        u = start + tl.arange(0, BU)
        neuron = tl.load(its_list + u, mask=u < total, other=0).to(tl.int64)
        w = tl.load(i_down + neuron[:, None] * D + d[None, :], mask=(u < total)[:, None] & (d[None, :] < D), other=0.0)
        if DOTS:
            h = tl.load(i_h + neuron[None, :] * BM + m[:, None], mask=(u < total)[None, :], other=0.0)
            if PRECISION == "ieee":
                acc += tl.dot(h, w, nothing, input_precision=PRECISION)
            else:
                acc = tl.dot(h, w, acc)
        else:
            h = tl.load(i_h + neuron, mask=u < total, other=0.0).to(tl.float32)
            acc += tl.sum(h[:, None] * w.to(tl.float32), axis=0)[None, :]
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (d[None, :] < D)
    tl.store(o_y + m[:, None] * D + d[None, :], acc.to(o_y.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------
# Launcher
# ---------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Weights,
    down: Tensor,
    activation: str,
    tiles: tuple[NeuronTile, SumTile],
) -> Tensor:
    """y [M, D] for x [M, D], M from 1 to 64. ``down``: Wd as [F, D], contiguous."""
    (M, D), F = x.shape, w.gate.shape[0]
    if not 0 < M <= MAX_FEW_TOKENS:
        raise ValueError(f"decode.forward takes 1 to {MAX_FEW_TOKENS} tokens, got {M}")
    x = x if x.stride(1) == 1 else x.contiguous()
    gate, up = w.gate.contiguous(), None if w.up is None else w.up.contiguous()
    neurons, sums = tiles
    dots = neurons.dots or M > 1
    BM = max(16, power_of_2(M)) if dots else 1
    overlaps = can_overlap()
    constants = {
        "DOTS": dots,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",  # which says nothing of 16 bits
        "OVERLAPS": overlaps,
        "BM": BM,
    }
    h = x.new_empty(F, BM)
    words = torch.empty(2 * ceil_div(F, 64), dtype=torch.int32, device=x.device)
    launch(
        _neurons_kernel,
        ceil_div(F, neurons.BN),
        (
            x,
            gate,
            x if w.gate_bias is None else w.gate_bias,
            x if up is None else up,
            x if w.up_bias is None else w.up_bias,
            down,
            h,
            words.view(_BITS[neurons.BN]),
            M,
            D,
            F,
            x.stride(0),
        ),
        {
            **constants,
            "PREFETCHES": overlaps and D * x.element_size() % 16 == 0 and down.data_ptr() % 16 == 0,
            "BN": neurons.BN,
            "BK": min(neurons.BK, power_of_2(D)),
            "GATED": up is not None,
            "SQUARED": activation == "relu2",
            "HAS_GATE_BIAS": w.gate_bias is not None,
            "HAS_UP_BIAS": w.up_bias is not None,
        },
        warps=neurons.warps,
        stages=neurons.stages,
    )
    y = x.new_empty(M, D)
    columns, wide = ceil_div(D, sums.BD), power_of_2(len(words))
    lists = torch.empty(columns, F, dtype=torch.int32, device=x.device)
    launch(
        _sums_kernel,
        columns,
        (h, words, down, x if w.down_bias is None else w.down_bias, y, lists, M, D, F),
        {
            **constants,
            "BW": wide,
            "BU": sums.BU,
            "BD": sums.BD,
            "HAS_DOWN_BIAS": w.down_bias is not None,
            "STAGES": sums.stages,
        },
        warps=sums.warps_for(wide),
        stages=sums.stages,
    )
    return y
