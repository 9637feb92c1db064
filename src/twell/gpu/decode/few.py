"""Few tokens (M <= 64), as in generation: read all of the gate, and of up and down only the neurons that fire.

    neurons kernel   z = x Wg^T + bg;  u = x Wu^T + bu for the tile's neurons that any token fires;  h = a(relu(z)) * u
    sums kernel      y = sum over those neurons n of h_n Wd_n,  + bd

A program of the first has TN neurons over the whole of D: ReLU needs the whole sum. It marks those that fire, a bit
each, and sends for their rows of Wd, which the second reads. A program of the second takes the lowest bits of all words
of bits, then the next ones, and adds the neurons up for BD columns of y: no sum depends on timing, and no grid on a
count, so that both can be captured in a CUDA graph. For one token screen.py has another first kernel, and there is
another second one; for Hopper hopper.py has another first kernel for up to 16 tokens, and another second one for up to
32.

From Hopper on a kernel's programs start while the kernel before ends, each where most is free: where one processor had
none of the kernel before, it would get several of the next, and all would wait for it. So the first kernel has as many
programs as there are processors, or a multiple, even if some have no neurons.

A token with inf or NaN in x has z = inf, -inf or NaN everywhere. -inf counts as firing: h = 0 * u is NaN, as it is in a
dense FFN, where u is inf or NaN.

Legend: M tokens, D model width, F neurons, U neurons that fire for any token.
Weights: Wg, Wu [F, D] as the model has them, Wd neuron-major [F, D].
Bytes, D 2048, F 5632, bf16: Wg 23 MB, then 8 KB for each of U neurons (29 at M 1, 0.2 MB; about 1000 at M 64 of skew29,
8 MB); dense reads 69 MB.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.decode import screen
from twell.gpu.decode.screen import Screen
from twell.gpu.prefill.split import aligned
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.replay import INTERPRETED, Recorded, Space
from twell.gpu.shared.tiles import device_facts, popcount, popcount64, prefetch, relu, start_after, take
from twell.plan import MAX_FEW_TOKENS
from twell.reference import Weights

_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # of a tile's neurons
_SHARED_KIB = {80: 163, 90: 227, 100: 227}  # a program may have, where it is not 99
_CHAINS, _CHAIN_DEPTH, _CHAIN_STAGES = 4, 128, 4  # of up for few rows: D is divided among warps
_GLUON = ("3.6.", "3.7.")  # versions of Triton with whose Gluon hopper.py was tried
HOPPER_CHAINS = 8  # warps of hopper.py's kernel, each with a share of D
_WORDS = 128  # of bits that the sums kernel takes at once
_ONE = {"BU": 32, "BD": 32}  # the sum of one token: neurons at once, columns of y


class NeuronTile(NamedTuple):
    """Neurons (16, 32 or 64) and depth of a tile, warps, stages.

    slots: neurons that fire are taken so many at once for up (16, not in fp32); 0: all of the tile's at once.
    TN: neurons of a program, where they are fewer than a tile's 64; 0: all.
    programs: at least so many.
    """

    BN: int
    BK: int
    warps: int
    stages: int
    slots: int = 0
    TN: int = 0
    programs: int = 0


class HopperTile(NamedTuple):
    """Of hopper.py's kernel: neurons of a program, at least so many programs, depth of a chain."""

    TN: int
    programs: int
    depth: int
    BN: int = 64  # bits of a program


class SumTile(NamedTuple):
    """Columns of y, warps, stages; so many bits of each word (1 or 2), and words, are taken at once."""

    BD: int
    warps: int
    stages: int
    BS: int = 1
    BW: int = _WORDS


class HopperSumTile(NamedTuple):
    """Of hopper.py's kernel: so many bits of each word are taken at once; warps; columns of y."""

    BS: int
    chains: int
    BD: int = 16


_SUMS_ON_HOPPER: dict[int, SumTile | HopperSumTile] = {  # by the most tokens
    8: HopperSumTile(3, 4),
    16: HopperSumTile(2, 4),
    32: HopperSumTile(10, 8),
    64: SumTile(16, 4, 4, BS=2),
}


def why_not_hopper(capability: int, version: str = triton.__version__) -> str | None:
    """Why the kernels of hopper.py cannot run, or None."""
    if capability != 90:
        return "for sm_90"
    return None if version.startswith(_GLUON) else f"tried with Triton 3.6 and 3.7, not {version}"


def tiles_of(x: Tensor, F: int) -> tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]:
    """For the two kernels of few tokens x [M, D]."""
    if INTERPRETED:
        return NeuronTile(16, 32, 4, 2), SumTile(32, 4, 2, BS=2, BW=2)  # tiny
    capability, processors = device_facts(x.device.index)
    M, D = x.shape
    return tiles_for(M, D, F, element_size=x.element_size(), capability=capability, processors=processors)


def tiles_for(
    tokens: int,
    D: int,
    F: int,
    *,
    element_size: int = 2,
    capability: int = 90,
    processors: int = 132,
) -> tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]:
    """Measured on an H200 at D 2048, F 5632 and at D 4096, F 14336; right anywhere."""
    shared = 1024 * _SHARED_KIB.get(capability, 99)
    BM = max(16, power_of_2(tokens))
    sums: SumTile | HopperSumTile
    if why_not_hopper(capability) is None and element_size == 2:
        sums = next(tile for most, tile in _SUMS_ON_HOPPER.items() if tokens <= most or most == MAX_FEW_TOKENS)
        hopper_tile = _hopper_tile(tokens, D, F, processors)
        if hopper_tile is not None:
            return hopper_tile, sums
    else:
        room = shared * 3 // 4 // (_WORDS * (16 + BM) * element_size)  # blocks; a stage has BS
        BS = min(1 if tokens <= 16 else 2, max(1, room))
        sums = SumTile(16, 4, max(1, min(4, 1 + room // BS)), BS)
    has_room = shared > 99 * 1024 and element_size == 2
    BN = 32 if 100 <= capability < 120 else 64  # Triton 3.7 cannot compile tcgen05's narrow tiles
    BK = 512 // element_size**2
    warps = 8 if tokens > 32 and (capability < 90 or element_size == 4) else 4  # without wgmma: registers
    stages = max(1, min(6, shared // ((BN + BM) * BK * element_size)))
    neurons = NeuronTile(BN, BK, warps, stages, slots=16 if tokens <= 16 and has_room else 0)
    if capability >= 90 and BN == 64:
        TN, programs = _divided(F, BN, processors)
        neurons = neurons._replace(TN=TN, programs=programs)
        if programs > processors and tokens > 16 and capability == 90 and element_size == 2:
            neurons = neurons._replace(stages=4 if tokens <= 32 else 3)  # so that a processor has two at once
            sums = HopperSumTile(6, 8) if isinstance(sums, HopperSumTile) else SumTile(32, 4, 4, BS=2)
    return neurons, sums


def _divided(F: int, most: int, processors: int) -> tuple[int, int]:
    """(neurons of a program, at most ``most``; programs), so that all processors have as many programs.

    The words of bits are a multiple of what the sums kernel takes at once, if there are so many.
    """
    programs = processors * ceil_div(F, most * processors)
    words = programs // _WORDS * _WORDS or programs
    return (ceil_div(F, words), programs) if ceil_div(F, words) <= most else (ceil_div(F, programs), programs)


def _hopper_tile(tokens: int, D: int, F: int, processors: int) -> HopperTile | None:
    """None where one processor's rows of the gate do not fit into its shared memory, beside a program of sums."""
    if tokens > 16:
        return None
    TN, programs = _divided(F, 64, processors)
    depth = max(64, power_of_2(ceil_div(D, HOPPER_CHAINS)))
    size = 16 * ceil_div(TN, 16) * HOPPER_CHAINS * depth * 2
    return HopperTile(TN, programs, depth) if programs == processors and depth <= 256 and size <= 192 * 1024 else None


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
        x = tl.load(
            i_x + m[None, :].to(tl.int64) * x_stride + at[:, None], mask=(m[None, :] < M) & (at[:, None] < D), other=0.0
        )
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
        tokens = i_x + m[None, None, :].to(tl.int64) * x_stride
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


@triton.jit
def _lowest(bits, first):
    """(int32, uint64): ``first`` + the place of the lowest bit of each word, or -1 where none is set; the others."""
    place = popcount64((bits & (0 - bits)) - 1)
    return tl.where(bits != 0, first + place, -1), bits & (bits - 1)


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
    o_bits,  # [programs]: of BN bits each, set for the neurons that fire for any token
    M,
    D,
    F,
    x_stride,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    TN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SLOTS: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAIN_STAGES: tl.constexpr,
    PREFETCHES: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
):
    start_after(OVERLAPS)
    tile = tl.program_id(0)
    dtype = m_h.dtype.element_ty
    neuron = tile * TN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    there = (neuron < F) & (tl.arange(0, BN) < TN)
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
                at = m_h + its[:, None].to(tl.int64) * BM + m[None, :]
                kept = tl.load(at, mask=filled[:, None], other=0.0).to(tl.float32)
                u = _products_of_few(i_x, i_up, its, filled, M, D, x_stride, BM, SLOTS, DEPTH, CHAINS, CHAIN_STAGES)
                if HAS_UP_BIAS:
                    u += tl.load(i_up_bias + its, mask=filled, other=0.0).to(tl.float32)[:, None]
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
    i_words,  # int64 [n_words]: bit b of word w is neuron w * STRIDE + b
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    M,
    D,
    n_words,
    last_bits,  # of the last word that were written
    STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    start_after(OVERLAPS)
    m = tl.arange(0, BM)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    acc = tl.zeros((BM, BD), tl.float32)
    nothing = tl.zeros((BM, BD), tl.float32) + tl.where(M < 0, 1.0, 0.0)
    for first in range(0, n_words, BW):
        word = first + tl.arange(0, BW)
        bits = tl.load(i_words + word, mask=word < n_words, other=0).to(tl.uint64, bitcast=True)
        if last_bits < 64:
            bits = tl.where(word == n_words - 1, bits & ((tl.full((), 1, tl.uint64) << last_bits) - 1), bits)
        most = tl.max(popcount64(bits), axis=0)
        for _ in tl.range(0, most, BS, num_stages=STAGES):  # the lowest bits of every word
            neuron, bits = _lowest(bits, word * STRIDE)
            if BS == 2:
                second, bits = _lowest(bits, word * STRIDE)
                neuron = tl.reshape(tl.join(neuron, second), (2 * BW,))
            row, column = neuron[:, None], neuron[None, :]
            w = tl.load(i_down + row.to(tl.int64) * D + d[None, :], mask=(row >= 0) & (d[None, :] < D), other=0.0)
            h = tl.load(i_h + column.to(tl.int64) * BM + m[:, None], mask=column >= 0, other=0.0)
            if PRECISION == "ieee":
                acc += tl.dot(h, w, nothing, input_precision=PRECISION)
            else:
                acc = tl.dot(h, w, acc)
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (d[None, :] < D)
    tl.store(o_y + m[:, None] * D + d[None, :], acc.to(o_y.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(
    i_h,  # [F]
    i_words,  # int32 [F / 32]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [1, D]
    D,
    F,
    OVERLAPS: tl.constexpr,
    BW: tl.constexpr,  # words of bits: power of 2 >= F / 32
    BU: tl.constexpr,
    BD: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
):
    """Of one token, for which few neurons fire: they are found BU at once."""
    start_after(OVERLAPS)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    word = tl.arange(0, BW)
    bits = tl.load(i_words + word, mask=word * 32 < F, other=0)
    bits = tl.where(word * 32 + 32 > F, bits & ((1 << (F % 32)) - 1), bits)  # the last word may be half written
    counts = popcount(bits.to(tl.uint32, bitcast=True))
    total = tl.sum(counts, axis=0)
    acc = tl.zeros((BD,), tl.float32)
    for start in range(0, total, BU):
        there = start + tl.arange(0, BU) < total
        neuron = _nth_neurons(bits, counts, start, total, BW, BU).to(tl.int64)
        w = tl.load(i_down + neuron[:, None] * D + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0)
        h = tl.load(i_h + neuron, mask=there, other=0.0).to(tl.float32)
        acc += tl.sum(h[:, None] * w.to(tl.float32), axis=0)
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(o_y + d, acc.to(o_y.dtype.element_ty), mask=d < D)


# ---------------------------------------------------------------------------------------------------------
# Launchers
# ---------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Weights,
    activation: str,
    tiles: tuple[NeuronTile | HopperTile, SumTile | HopperSumTile] | None = None,
    screened: Screen | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """y [..., D] for x [..., D], of 1 to 64 tokens.

    ``w``: all weights as rows [F, D] (``split.by_rows``); ``screened``: the gate's, for M 1. ``settled``: the gate was
    written before the kernel before this was launched, so that it may be read while that runs."""
    M = x.numel() // x.shape[-1]
    if not 0 < M <= MAX_FEW_TOKENS:
        raise ValueError(f"decode.forward takes 1 to {MAX_FEW_TOKENS} tokens, got {M}")
    if screened is not None and M > 1:
        raise ValueError(f"a screened gate is for one token, got {M}")
    x = aligned(x)
    gate, up, down, b_gate, b_up, b_down = w
    flags = (up is not None, activation == "relu2", b_gate is not None, b_up is not None)
    y = x.new_empty(x.shape)
    key = (x.shape, x.stride(-2), x.dtype, gate.shape[0], flags, b_down is None, tiles, settled, screened is None)
    if screened is None:
        _several_tokens(key, (x, y, gate, b_gate, up, b_up, down, b_down), tiles, settled, flags)
    else:
        _one_token(key, (x, y, gate, b_gate, up, b_up, down, b_down, *screened), flags)
    return y


@Recorded
def _one_token(
    space: Space,
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    q: Tensor,
    scale: Tensor,
    reach: Tensor,
    flags: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    D, F = x.shape[-1], len(gate)
    h, words = space.take(F), space.take(ceil_div(F, 32), dtype=torch.int32)
    first, second = _kernels_of_one(x.dtype, D, F, down_bias is not None, flags, can_overlap())
    weights = (0 if t is None else t for t in (gate, gate_bias, up, up_bias, down))
    first(ceil_div(F, screen.BN), x, q, scale, reach, *weights, h, words, D, F)
    second(ceil_div(D, _ONE["BD"]), h, words, down, 0 if down_bias is None else down_bias, y, D, F)
    return ()


@functools.cache
def _kernels_of_one(
    dtype: torch.dtype, D: int, F: int, has_down_bias: bool, flags: tuple[bool, ...], overlaps: bool
) -> tuple[Kernel, Kernel]:
    BW = power_of_2(ceil_div(F, 32))
    first = Kernel(
        screen.screened_neurons_kernel,
        (dtype, torch.uint8, torch.float32, torch.float32, *[dtype] * 6, _BITS[screen.BN], MULTIPLE, MULTIPLE),
        {
            "OVERLAPS": overlaps,
            "BN": screen.BN,
            "BK": min(screen.BK, power_of_2(D)),
            "SLOTS": screen.SLOTS,
            **_constants(flags, overlaps),
        },
        warps=screen.WARPS,
        registers=screen.REGISTERS,
    )
    second = Kernel(
        _sum_kernel,
        (dtype, torch.int32, dtype, dtype, dtype, MULTIPLE, MULTIPLE),
        {"OVERLAPS": overlaps, "BW": BW, **_ONE, "HAS_DOWN_BIAS": has_down_bias},
        warps=_warps_for_words(BW),
    )
    return first, second


def _warps_for_words(n: int) -> int:
    """Every thread looks at some words."""
    return min(16, 4 * max(1, n // 256))


@Recorded
def _several_tokens(
    space: Space,
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    tiles: tuple[NeuronTile | HopperTile, SumTile | HopperSumTile] | None,
    settled: bool,
    flags: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (M, D), F = x.shape, len(gate)
    neurons, sums = tiles or tiles_of(x, F)
    BM, BN, TN = max(16, power_of_2(M)), neurons.BN, neurons.TN or neurons.BN
    n_tiles = ceil_div(F, TN)
    n_words, programs = ceil_div(n_tiles * BN, 64), max(n_tiles, neurons.programs)
    h, words = space.take(F, BM), space.take(ceil_div(programs * BN, 64), dtype=torch.int64)
    first, second = kernels_of(x.dtype, M, D, neurons, sums, settled, down_bias is not None, flags, can_overlap())
    weights = (0 if t is None else t for t in (gate, gate_bias, up, up_bias, down))
    first(programs, x, *weights, h, words, M, D, F, x.stride(0))
    last_bits = () if isinstance(sums, HopperSumTile) else (n_tiles * BN - 64 * (n_words - 1),)
    bias = 0 if down_bias is None else down_bias
    second(ceil_div(D, sums.BD), h, words, down, bias, y, M, D, n_words, *last_bits)
    return ()


def kernels_of(
    dtype: torch.dtype,
    M: int,
    D: int,
    neurons: NeuronTile | HopperTile,
    sums: SumTile | HopperSumTile,
    settled: bool,
    has_down_bias: bool,
    flags: tuple[bool, ...],
    overlaps: bool,
) -> tuple[Kernel, Kernel]:
    """The first and the second kernel for M tokens."""
    stride = (neurons.TN or 64) if neurons.BN == 64 else 64
    first = _first_kernel(dtype, D, power_of_2(M), neurons, settled, flags, overlaps)
    return first, _second_kernel(dtype, max(16, power_of_2(M)), stride, sums, has_down_bias, overlaps)


@functools.cache
def _first_kernel(
    dtype: torch.dtype,
    D: int,
    tokens: int,
    tile: NeuronTile | HopperTile,
    settled: bool,
    flags: tuple[bool, ...],
    overlaps: bool,
) -> Kernel:
    """``tokens``: a power of 2."""
    arguments: tuple[Any, ...] = (*[dtype] * 7, _BITS[tile.BN], ANY, MULTIPLE, MULTIPLE, MULTIPLE)
    constants: dict[str, Any]
    if isinstance(tile, HopperTile):
        from twell.gpu.decode import hopper  # needs Gluon, of which there is none in the interpreter

        constants = {
            "OVERLAPS": overlaps,
            "EARLY": settled,
            "HM": max(16, tokens),
            "BM": max(8, tokens),
            "TN": tile.TN,
            "SUBS": ceil_div(tile.TN, 16),
            "CHAINS": HOPPER_CHAINS,
            "DEPTH": tile.depth,
            **_constants(flags, overlaps),
        }
        return Kernel(hopper.neurons_kernel, arguments, constants, warps=HOPPER_CHAINS)
    constants = {
        "PRECISION": _precision(dtype),
        "OVERLAPS": overlaps,
        "BM": max(16, tokens),
        "TN": tile.TN or tile.BN,
        "BN": tile.BN,
        "BK": min(tile.BK, power_of_2(D)),
        "SLOTS": tile.slots,
        "CHAINS": _CHAINS,
        "DEPTH": min(_CHAIN_DEPTH, max(16, power_of_2(D) // _CHAINS)),
        "CHAIN_STAGES": _CHAIN_STAGES,
        **_constants(flags, overlaps),
    }
    return Kernel(_neurons_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


@functools.cache
def _second_kernel(
    dtype: torch.dtype, BM: int, stride: int, tile: SumTile | HopperSumTile, has_bias: bool, overlaps: bool
) -> Kernel:
    pointers: tuple[Any, ...] = (dtype, torch.int64, dtype, dtype, dtype)
    constants: dict[str, Any]
    if isinstance(tile, HopperSumTile):
        from twell.gpu.decode import hopper

        constants = {
            "STRIDE": stride,
            "OVERLAPS": overlaps,
            "BM": BM,
            "BW": _WORDS,
            "BS": tile.BS,
            "BD": tile.BD,
            "CHAINS": tile.chains,
            "HAS_DOWN_BIAS": has_bias,
        }
        return Kernel(hopper.sums_kernel, (*pointers, ANY, MULTIPLE, ANY), constants, warps=tile.chains)
    constants = {
        "STRIDE": stride,
        "PRECISION": _precision(dtype),
        "OVERLAPS": overlaps,
        "BM": BM,
        "BW": tile.BW,
        "BS": tile.BS,
        "BD": tile.BD,
        "HAS_DOWN_BIAS": has_bias,
        "STAGES": tile.stages,
    }
    arguments = (*pointers, ANY, MULTIPLE, ANY, ANY)
    return Kernel(_sums_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # which says nothing of 16 bits


def _constants(flags: tuple[bool, ...], overlaps: bool) -> dict[str, bool]:
    gated, squared, has_gate_bias, has_up_bias = flags
    return {
        "PREFETCHES": overlaps,
        "GATED": gated,
        "SQUARED": squared,
        "HAS_GATE_BIAS": has_gate_bias,
        "HAS_UP_BIAS": has_up_bias,
    }
