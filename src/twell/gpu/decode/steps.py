"""The kernels for few tokens (few.py) in Triton, for any GPU; hopper.py and screen.py have variants."""

from __future__ import annotations

import triton
import triton.language as tl

from twell.gpu.shared.tiles import INTERPRETED, nth_neurons, popcount, popcount64, prefetch, relu, start_after, take

# ---------------------------------------------------------------------------------------------------------
# Device functions
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def _products(
    i_x, i_rows, neuron, wanted, M, D, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: x . row for the ``wanted`` rows [BN] and all tokens; other rows are not read."""
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    rows = i_rows + neuron[:, None].to(tl.int64) * D
    acc = tl.zeros((BN, BM), tl.float32)
    nothing = tl.zeros((BN, BM), tl.float32) + tl.where(M < 0, 1.0, 0.0)  # zeros, but the compiler does not know that
    for start in range(0, D, BK):
        at = start + k
        x = tl.load(
            i_x + m[None, :].to(tl.int64) * x_stride + at[:, None], mask=(m[None, :] < M) & (at[:, None] < D), other=0.0
        )
        w = tl.load(rows + at[None, :], mask=wanted[:, None] & (at[None, :] < D), other=0.0)
        if SCALED and INTERPRETED:  # it cannot multiply e4m3
            x, w = x.to(tl.float16), w.to(tl.float16)
        if PRECISION == "ieee":  # sums of partial sums: long chains of fp32 additions lose digits
            acc += tl.dot(w, x, nothing, input_precision=PRECISION)
        else:
            acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _products_of_few(
    i_x, i_rows, row, filled, M, D, x_stride,
    BM: tl.constexpr, SLOTS: tl.constexpr, DEPTH: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``_products``, for SLOTS rows: each warp takes all rows and a share of D, since one chain of dots would be
    long."""
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
def _lowest(bits, first):
    """(int32, uint64): ``first`` + the position of each word's lowest set bit, or -1 if none is set; and the remaining
    bits."""
    place = popcount64((bits & (0 - bits)) - 1)
    return tl.where(bits != 0, first + place, -1), bits & (bits - 1)


# ---------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def neurons_kernel(
    i_x,  # [M, D]
    i_gate,  # [F, D]
    i_gate_bias,  # [F] or unused
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    m_h,  # [F, BM]: rows of the neurons that fire
    o_bits,  # [programs]: masks of BN bits, set for the neurons that fire for any token
    i_x_scale,  # SCALED: fp32 [M]
    i_gate_scale,  # SCALED: fp32 [F]
    i_up_scale,  # SCALED: fp32 [F]
    M,
    D,
    F,
    x_stride,
    SCALED: tl.constexpr,  # without biases and SLOTS
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
    z = _products(i_x, i_gate, neuron, there, M, D, x_stride, BM, BN, BK, PRECISION, SCALED)
    if SCALED:
        x_scale = tl.load(i_x_scale + m, mask=m < M, other=0.0)
        z *= tl.load(i_gate_scale + neuron, mask=there, other=0.0)[:, None] * x_scale[None, :]
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
            prefetch(i_down, neuron, wanted, D, 3)  # four neighbouring threads hold the same rows
        places = m_h + neuron[:, None].to(tl.int64) * BM + m[None, :]
        if GATED and SLOTS > 0:  # a passes through memory to its neuron's slot; -inf stays -inf
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
                u = _products(i_x, i_up, neuron, wanted, M, D, x_stride, BM, BN, BK, PRECISION, SCALED)
                if SCALED:
                    u *= tl.load(i_up_scale + neuron, mask=wanted, other=0.0)[:, None] * x_scale[None, :]
                if HAS_UP_BIAS:
                    u += tl.load(i_up_bias + neuron, mask=wanted, other=0.0).to(tl.float32)[:, None]
                a = a * u
            tl.store(places, tl.where(fires, a, 0.0).to(dtype), mask=wanted[:, None])


@triton.jit
def sums_kernel(
    i_h,  # [F, BM]
    i_words,  # int64 [n_words]: bit b of word w is neuron w * STRIDE + b
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    i_down_scale,  # SCALED: fp32 [D]
    M,
    D,
    n_words,
    last_bits,  # bits in use of the last word
    STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
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
        for _ in tl.range(0, most, BS, num_stages=STAGES):  # the lowest BS bits of every word
            neuron, bits = _lowest(bits, word * STRIDE)
            if BS == 2:
                second, bits = _lowest(bits, word * STRIDE)
                neuron = tl.reshape(tl.join(neuron, second), (2 * BW,))
            row, column = neuron[:, None], neuron[None, :]
            w = tl.load(i_down + row.to(tl.int64) * D + d[None, :], mask=(row >= 0) & (d[None, :] < D), other=0.0)
            if SCALED:
                w = w.to(i_h.dtype.element_ty)
            h = tl.load(i_h + column.to(tl.int64) * BM + m[:, None], mask=column >= 0, other=0.0)
            if PRECISION == "ieee":
                acc += tl.dot(h, w, nothing, input_precision=PRECISION)
            else:
                acc = tl.dot(h, w, acc)
    if SCALED:
        acc *= tl.load(i_down_scale + d, mask=d < D, other=0.0)[None, :]
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (d[None, :] < D)
    tl.store(o_y + m[:, None] * D + d[None, :], acc.to(o_y.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    i_h,  # [F]
    i_words,  # int32 [F / 32]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [1, D]
    D,
    F,
    OVERLAPS: tl.constexpr,
    BW: tl.constexpr,  # mask words: power of 2 >= F / 32
    BU: tl.constexpr,
    BD: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
):
    """The sums kernel for one token, for which few neurons fire: BU of them at once."""
    start_after(OVERLAPS)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    word = tl.arange(0, BW)
    bits = tl.load(i_words + word, mask=word * 32 < F, other=0)
    bits = tl.where(word * 32 + 32 > F, bits & ((1 << (F % 32)) - 1), bits)  # the last word may be written in part
    counts = popcount(bits.to(tl.uint32, bitcast=True))
    total = tl.sum(counts, axis=0)
    acc = tl.zeros((BD,), tl.float32)
    for start in range(0, total, BU):
        there = start + tl.arange(0, BU) < total
        neuron = nth_neurons(bits, counts, start, total, BW, BU).to(tl.int64)
        w = tl.load(i_down + neuron[:, None] * D + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0)
        h = tl.load(i_h + neuron, mask=there, other=0.0).to(tl.float32)
        acc += tl.sum(h[:, None] * w.to(tl.float32), axis=0)
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(o_y + d, acc.to(o_y.dtype.element_ty), mask=d < D)
