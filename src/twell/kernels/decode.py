"""Few tokens (M <= 64), as in generation: read all of the gate, and of up and down only the neurons that fire.

    neurons kernel   z = x Wg^T + bg;  u = x Wu^T + bu for the tile's neurons that any token fires;  h = a(relu(z)) * u
    sums kernel      y = sum over those neurons n of h_n Wd_n,  + bd

A program of the first has BN neurons over the whole of D: ReLU needs the whole sum. It marks those that fire, a bit
each, and sends for their rows of Wd, which the second reads. A program of the second finds the neurons whose bits are
set, in order, and adds them up for BD columns of y: no sum depends on timing, and no grid on a count, so that both can
be captured in a CUDA graph. For one token screen.py has another first kernel.

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

from twell.kernels import screen
from twell.kernels.launch import can_overlap, ceil_div, launch, power_of_2
from twell.kernels.screen import Screen
from twell.kernels.tiles import popcount, prefetch, relu, start_after, take
from twell.plan import MAX_FEW_TOKENS
from twell.reference import Weights

_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # of a tile's neurons
_SHARED_KIB = {80: 163, 90: 227, 100: 227}  # a program may have, where it is not 99
_CHAINS, _CHAIN_DEPTH, _CHAIN_STAGES = 4, 128, 4  # of up for few rows: D is divided among warps


class NeuronTile(NamedTuple):
    """Neurons (16, 32 or 64) and depth of a tile, warps, stages.

    slots: neurons that fire are taken so many at once for up (16, not in fp32); 0: all of the tile's at once.
    """

    BN: int
    BK: int
    warps: int
    stages: int
    slots: int = 0


class SumTile(NamedTuple):
    """Neurons taken at once, columns of y, warps, stages.

    lists: all neurons that fire are listed in memory first; else each block's are found in registers.
    """

    BU: int
    BD: int
    warps: int
    stages: int
    lists: bool = True

    def warps_for(self, n_words: int) -> int:
        """The table is for up to 8192 neurons; every thread looks at some words."""
        return min(16, self.warps * max(1, n_words // 256))


def tiles_for(tokens: int, element_size: int = 2, capability: int = 90) -> tuple[NeuronTile, SumTile]:
    """For D 2048 on an H200; right anywhere."""
    shared = _SHARED_KIB.get(capability, 99)
    has_room = shared > 99 and element_size == 2
    BN = 32 if capability // 10 == 10 else 64  # Triton 3.7 cannot compile tcgen05's narrow tiles
    warps = 8 if tokens > 32 and (capability < 90 or element_size == 4) else 4  # without wgmma: registers
    neurons = NeuronTile(BN, 512 // element_size**2, warps, 6, slots=16 if tokens <= 16 and has_room else 0)
    if tokens <= 8:
        sums = SumTile({1: 32, 2: 32, 4: 64}.get(power_of_2(tokens), 256), 32, 4, 1, lists=False)
    elif tokens <= 32:
        sums = SumTile(256, 64 if tokens > 16 and element_size == 2 else 32, 4, 2)
    else:
        sums = SumTile(512, 16, 4, 2) if has_room and capability >= 90 else SumTile(128, 16, 4, 5)
    stage = (neurons.BN + max(16, power_of_2(tokens))) * neurons.BK * element_size
    return neurons._replace(stages=max(1, min(neurons.stages, shared * 1024 // stage))), sums


# ---------------------------------------------------------------------------------------------------------
# Device functions
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def _products(
    i_x, i_rows, neuron, wanted, M, D, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: x . row for the ``wanted`` rows [BN] and all tokens; what is not wanted is not read."""
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    rows = i_rows + neuron[:, None].to(tl.int64) * D
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
    return acc


@triton.jit
def _products_of_few(
    i_x, i_rows, row, filled, M, D, x_stride,
    BM: tl.constexpr, SLOTS: tl.constexpr, DEPTH: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``_products``, for 16 rows: a warp has them all and a share of D, where one chain of dots would be long."""
    m = tl.arange(0, BM)
    k = tl.arange(0, CHAINS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]  # [CHAINS, DEPTH]
    rows = i_rows + row.to(tl.int64) * D
    acc = tl.zeros((CHAINS, SLOTS, BM), tl.float32)
    for start in tl.range(0, D, CHAINS * DEPTH, num_stages=STAGES):
        at = start + k
        inside = at < D
        w = tl.load(rows[None, :, None] + at[:, None, :], mask=filled[None, :, None] & inside[:, None, :], other=0.0)
        tokens = i_x + m[None, None, :] * x_stride
        x = tl.load(tokens + at[:, :, None], mask=(m[None, None, :] < M) & inside[:, :, None], other=0.0)
        acc = tl.dot(w, x, acc)
    return tl.sum(acc, axis=0)


@triton.jit
def _nth_bit(word, n):
    """Place of the n-th set bit (from 0) of each word, by halves."""
    place = tl.zeros_like(n)
    for level in tl.static_range(5):
        width = 16 >> level
        below = popcount((word >> place.to(tl.uint32)) & ((1 << width) - 1))
        is_above = below <= n
        n = tl.where(is_above, n - below, n)
        place = tl.where(is_above, place + width, place)
    return place


@triton.jit
def _nth_neurons(bits, counts, start, total, BW: tl.constexpr, BU: tl.constexpr):
    """int32 [BU]: the set bits of words [BW] from the start-th on, 0 past the last; ``counts``: how many a word has.

    The word of the i-th is the number of words that end at or before it: a histogram of the ends, summed up.
    """
    ends = tl.cumsum(counts, axis=0)
    local = ends - start
    before = tl.sum((local < 0).to(tl.int32), axis=0)
    inside = (local >= 0) & (local < BU)
    ending = tl.histogram(tl.where(inside, local, 0), BU, mask=inside)
    word = tl.minimum(tl.cumsum(ending, axis=0) + before, BW - 1)
    u = start + tl.arange(0, BU)
    n = u - tl.gather(ends - counts, word, 0)
    place = _nth_bit(tl.gather(bits, word, 0).to(tl.uint32, bitcast=True), n)
    return tl.where(u < total, word * 32 + place, 0)


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
    m_h,  # [F, BM]: of the neurons that fire
    o_bits,  # [F / BN]: of BN bits each, set for the neurons that fire for any token
    M,
    D,
    F,
    x_stride,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    PREFETCHES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SLOTS: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAIN_STAGES: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
):
    start_after(OVERLAPS)
    tile = tl.program_id(0)
    dtype = m_h.dtype.element_ty
    neuron = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    there = neuron < F
    z = _products(i_x, i_gate, neuron, there, M, D, x_stride, BM, BN, BK, PRECISION)
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
            prefetch(i_down, neuron, wanted, D, 3)  # four neighbours have the same ones
        places = m_h + neuron[:, None].to(tl.int64) * BM + m[None, :]
        if GATED and SLOTS > 0:  # a goes through memory, to where its neuron is taken; -inf as itself
            tl.store(places, tl.where(fires, tl.where(z == float("-inf"), z, a), 0.0).to(dtype), mask=wanted[:, None])
            tl.debug_barrier()
            n = tl.sum(fired, axis=0)
            for first in range(0, n, SLOTS):
                its, filled = take(neuron, fired, first, n, SLOTS)
                u = _products_of_few(i_x, i_up, its, filled, M, D, x_stride, BM, SLOTS, DEPTH, CHAINS, CHAIN_STAGES)
                if HAS_UP_BIAS:
                    u += tl.load(i_up_bias + its, mask=filled, other=0.0).to(tl.float32)[:, None]
                at = m_h + its[:, None].to(tl.int64) * BM + m[None, :]
                kept = tl.load(at, mask=filled[:, None], other=0.0).to(tl.float32)
                r = relu(kept)
                if SQUARED:
                    r = r * r
                tl.store(at, tl.where(kept != 0, r * u, 0.0).to(dtype), mask=filled[:, None])
        else:
            if SQUARED:
                a = a * a
            if GATED:
                u = _products(i_x, i_up, neuron, wanted, M, D, x_stride, BM, BN, BK, PRECISION)
                if HAS_UP_BIAS:
                    u += tl.load(i_up_bias + neuron, mask=wanted, other=0.0).to(tl.float32)[:, None]
                a = a * u
            tl.store(places, tl.where(fires, a, 0.0).to(dtype), mask=wanted[:, None])


@triton.jit
def _sums_kernel(
    i_h,  # [F, BM]
    i_words,  # int32 [F / 32]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    m_lists,  # int32 [D / BD, F]: for each program the neurons that fire, in order; unused without LISTS
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
    LISTS: tl.constexpr,
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
    total = tl.sum(counts, axis=0)
    its_list = m_lists + column * F
    if LISTS:
        starts = tl.cumsum(counts, axis=0) - counts
        bit = tl.arange(0, 32).to(tl.uint32)
        place = starts[:, None] + popcount(words[:, None] & ((1 << bit) - 1)[None, :])  # [BW, 32]
        is_set = ((words[:, None] >> bit[None, :]) & 1) != 0
        tl.store(its_list + place, word[:, None] * 32 + bit[None, :].to(tl.int32), mask=is_set)
        tl.debug_barrier()  # all of it, before it is read
    acc = tl.zeros((BM, BD), tl.float32)
    nothing = tl.zeros((BM, BD), tl.float32) + tl.where(M < 0, 1.0, 0.0)
    for start in tl.range(0, total, BU, num_stages=STAGES):
        there = start + tl.arange(0, BU) < total
        if LISTS:
            neuron = tl.load(its_list + start + tl.arange(0, BU), mask=there, other=0).to(tl.int64)
        else:
            neuron = _nth_neurons(bits, counts, start, total, BW, BU).to(tl.int64)
        w = tl.load(i_down + neuron[:, None] * D + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0)
        if DOTS:
            h = tl.load(i_h + neuron[None, :] * BM + m[:, None], mask=there[None, :], other=0.0)
            if PRECISION == "ieee":
                acc += tl.dot(h, w, nothing, input_precision=PRECISION)
            else:
                acc = tl.dot(h, w, acc)
        else:  # one token
            h = tl.load(i_h + neuron, mask=there, other=0.0).to(tl.float32)
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
    screened: Screen | None = None,
) -> Tensor:
    """y [M, D] for x [M, D], M from 1 to 64. ``down``: Wd as [F, D], contiguous; ``screened``: the gate's, for M 1."""
    (M, D), F = x.shape, w.gate.shape[0]
    if not 0 < M <= MAX_FEW_TOKENS:
        raise ValueError(f"decode.forward takes 1 to {MAX_FEW_TOKENS} tokens, got {M}")
    if screened is not None and M > 1:
        raise ValueError(f"a screened gate is for one token, got {M}")
    x = x if x.stride(1) == 1 else x.contiguous()
    neurons, sums = tiles
    dots = screened is None
    BM = max(16, power_of_2(M)) if dots else 1
    overlaps = can_overlap()
    precision = "ieee" if x.dtype == torch.float32 else "tf32"  # which says nothing of 16 bits
    h = x.new_empty(F, BM)
    words = torch.empty(2 * ceil_div(F, 64), dtype=torch.int32, device=x.device)
    BN = neurons.BN if dots else screen.BN
    gate, up = w.gate.contiguous(), None if w.up is None else w.up.contiguous()
    shared = (  # by both ways to the neurons, after x
        gate,
        x if w.gate_bias is None else w.gate_bias,
        x if up is None else up,
        x if w.up_bias is None else w.up_bias,
        down,
        h,
        words.view(_BITS[BN]),
    )
    prefetches = {"PREFETCHES": overlaps and D * x.element_size() % 16 == 0 and down.data_ptr() % 16 == 0}
    kind = {
        "GATED": up is not None,
        "SQUARED": activation == "relu2",
        "HAS_GATE_BIAS": w.gate_bias is not None,
        "HAS_UP_BIAS": w.up_bias is not None,
    }
    if screened is not None:
        launch(
            screen.screened_neurons_kernel,
            ceil_div(F, BN),
            (x, *screened, *shared, D, F),
            {"OVERLAPS": overlaps, **prefetches, "BN": BN, "BK": min(screen.BK, power_of_2(D)), "SLOTS": screen.SLOTS}
            | kind,
            warps=screen.WARPS,
            stages=1,
            registers=screen.REGISTERS,
        )
    else:
        launch(
            _neurons_kernel,
            ceil_div(F, BN),
            (x, *shared, M, D, F, x.stride(0)),
            {
                "PRECISION": precision,
                "OVERLAPS": overlaps,
                "BM": BM,
                **prefetches,
                "BN": BN,
                "BK": min(neurons.BK, power_of_2(D)),
                "SLOTS": neurons.slots,
                "CHAINS": _CHAINS,
                "DEPTH": min(_CHAIN_DEPTH, max(16, power_of_2(D) // _CHAINS)),
                "CHAIN_STAGES": _CHAIN_STAGES,
                **kind,
            },
            warps=neurons.warps,
            stages=neurons.stages,
        )
    y = x.new_empty(M, D)
    columns, wide = ceil_div(D, sums.BD), power_of_2(len(words))
    lists = torch.empty((columns, F) if sums.lists else 0, dtype=torch.int32, device=x.device)
    launch(
        _sums_kernel,
        columns,
        (h, words, down, x if w.down_bias is None else w.down_bias, y, lists, M, D, F),
        {
            "DOTS": dots,
            "PRECISION": precision,
            "OVERLAPS": overlaps,
            "BM": BM,
            "BW": wide,
            "BU": sums.BU,
            "BD": sums.BD,
            "LISTS": sums.lists,
            "HAS_DOWN_BIAS": w.down_bias is not None,
            "STAGES": sums.stages,
        },
        warps=sums.warps_for(wide),
        stages=sums.stages,
    )
    return y
