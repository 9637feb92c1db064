"""The kernels of few.py for Hopper, in Gluon: Triton with explicit shared memory and layouts.

hopper_neurons_kernel, up to 16 tokens. Between two kernels that read weights the memory is idle: one kernel ends, the
other starts, and its first bytes arrive. Weights do not depend on the preceding kernel. So each program, one per SM,
issues the loads of all its gate rows at once, which fill the shared memory (44 rows of D 2048: 192 KB), and only then
waits for the preceding kernel:

    sums of a layer     -----------|
    gate of the next        wwwwwww|x mma | bits | rows of Wu of what fires: mma | h

(EARLY; not where a kernel in flight may write the gate.) Triton's pipelined loops cannot express that, and Triton's
wgmma would be one chain of 128 for D 2048. Here D is divided among CHAINS warps, each with tiles of 16 rows of its own,
whose sums meet in shared memory. x is read into registers once, for gate and up, in the order in which tensor cores
take it.

hopper_sums_kernel: loads of many neurons' rows are in flight at once, and mask words are divided among warps.

Legend: M tokens (BM in a tile), D model width, F neurons (TN in a program, SUBS tiles of 16).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twell.gpu.shared import tiles

prefetch = gluon.jit(tiles.prefetch.fn)
popcount = gluon.jit(tiles.popcount64.fn)
relu = gluon.jit(tiles.relu.fn)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the name before Triton 3.7


@gluon.jit
def nth_bit(words, n):
    """int32: position of the n-th set bit (from 0) of int64 words, by bisection; 63 if there is none."""
    place = 0 * n
    for level in gl.static_range(6):
        width = 32 >> level
        below = popcount((words >> place.to(gl.int64)) << (64 - width))  # of the next ``width`` bits
        is_above = below <= n
        n = gl.where(is_above, n - below, n)
        place = gl.where(is_above, place + width, place)
    return place


@gluon.jit
def copy_rows(i_rows, row, wanted, D, layout: gl.constexpr, block, CHAINS: gl.constexpr, DEPTH: gl.constexpr):
    """Copy 16 rows to shared memory, [CHAINS, 16, DEPTH], asynchronously; zeros for rows that are not wanted."""
    chain = gl.arange(0, CHAINS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = chain[:, None, None] * DEPTH + k[None, None, :]
    pointers = (i_rows + row.to(gl.int64) * D)[None, :, None] + at
    async_copy.async_copy_global_to_shared(block, pointers, mask=wanted[None, :, None] & (at < D))
    async_copy.commit_group()


@gluon.jit
def _load_x(i_x, M, D, x_stride, layout: gl.constexpr, CHAINS: gl.constexpr, DEPTH: gl.constexpr, BM: gl.constexpr):
    """[CHAINS, DEPTH, BM] of x in registers, in the layout that tensor cores take."""
    chain = gl.arange(0, CHAINS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = chain[:, None, None] * DEPTH + k[None, :, None]
    return gl.load(
        i_x + m.to(gl.int64)[None, None, :] * x_stride + at, mask=(m < M)[None, None, :] & (at < D), other=0.0
    )


@gluon.jit
def fire(
    z, neuron, there, m, M, D, i_gate_bias, i_down, m_h, HM: gl.constexpr, SAME: gl.constexpr,
    PREFETCHES: gl.constexpr, GATED: gl.constexpr, SQUARED: gl.constexpr, HAS_GATE_BIAS: gl.constexpr,
):  # fmt: skip
    """int32 [neurons]: 1 if the neuron fires for any token. Writes to m_h: gated, a, for store_gated; plain, h.

    SAME: bits of a thread's number that do not change its neuron."""
    dtype: gl.constexpr = m_h.dtype.element_ty
    if HAS_GATE_BIAS:
        z += gl.load(i_gate_bias + neuron, mask=there, other=0.0).to(gl.float32)[:, None]
    a = relu(z).to(dtype).to(gl.float32)
    fires = ((a != 0) | (z == float("-inf"))) & (m < M)[None, :] & there[:, None]
    fired = gl.max(fires.to(gl.int32), axis=1)
    if PREFETCHES:
        prefetch(i_down, neuron, fired, D, SAME)
    if GATED:  # a passes through memory to its neuron's slot; -inf stays -inf
        a = gl.where(z == float("-inf"), z, a)
    elif SQUARED:
        a = a * a
    kept = gl.where(fires, a, 0.0).to(dtype)
    gl.store(m_h + neuron.to(gl.int64)[:, None] * HM + m[None, :], kept, mask=(fired > 0)[:, None])
    return fired


@gluon.jit
def store_gated(
    a, u, neuron, filled, places, i_up_bias, dtype: gl.constexpr, SQUARED: gl.constexpr, HAS_UP_BIAS: gl.constexpr
):
    """Write h of neurons that fire, in the place of a."""
    if HAS_UP_BIAS:
        u += gl.load(i_up_bias + neuron, mask=filled, other=0.0).to(gl.float32)[:, None]
    r = relu(a)
    if SQUARED:
        r = r * r
    gl.store(places, gl.where(a != 0, r * u, 0.0).to(dtype), mask=filled[:, None])


@gluon.jit
def _products(rows, x, sums, summed: gl.constexpr, CHAINS: gl.constexpr, BM: gl.constexpr):
    """fp32 [16, BM] of rows [CHAINS, 16, DEPTH] in shared memory; ``sums``: buffer in which the chains' sums meet."""
    mma: gl.constexpr = x.type.layout.parent
    zeros = gl.zeros((CHAINS, 16, BM), gl.float32, mma)
    sums.store(mma_v2(rows.load(gl.DotOperandLayout(0, mma, 8)), x, zeros))
    return gl.sum(sums.load(summed), axis=0)


@gluon.jit
def hopper_neurons_kernel(
    i_x,  # [M, D]
    i_gate,  # [F, D]
    i_gate_bias,  # [F] or unused
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    m_h,  # [F, HM]: rows of the neurons that fire
    o_bits,  # int64 [programs]: bit b of word w is set if neuron w * TN + b fires for any token
    M,
    D,
    F,
    x_stride,
    OVERLAPS: gl.constexpr,
    EARLY: gl.constexpr,
    HM: gl.constexpr,
    BM: gl.constexpr,
    TN: gl.constexpr,
    SUBS: gl.constexpr,
    CHAINS: gl.constexpr,
    DEPTH: gl.constexpr,
    PREFETCHES: gl.constexpr,
    GATED: gl.constexpr,
    SQUARED: gl.constexpr,
    HAS_GATE_BIAS: gl.constexpr,
    HAS_UP_BIAS: gl.constexpr,
):
    dtype: gl.constexpr = m_h.dtype.element_ty
    # Tiles of a warp: 16 rows, 8 tokens. A thread has 8 neighbours along D, for 16-byte loads: any order of D will do.
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHAINS, 1, 1], [1, 16, 8])
    copied: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // DEPTH, DEPTH // 8], [CHAINS, 1, 1], [2, 1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])  # four threads read 64 bytes of a row
    # Sums: a thread adds up all chains of some of [16, BM]. SAME: bits of a thread's number that do not change its row.
    summed: gl.constexpr = gl.BlockedLayout([CHAINS, 1, 1], [1, 32 // BM, BM], [1, CHAINS, 1], [2, 1, 0])
    SAME: gl.constexpr = BM - 1 + (CHAINS * 32 - BM * 16 if CHAINS * 32 > BM * 16 else 0)

    if OVERLAPS and not EARLY:  # before launching dependents: they assume that the gate is written
        gdc_wait()
    if OVERLAPS:
        gdc_launch_dependents()
    sums = gl.allocate_shared_memory(gl.float32, [CHAINS, 16, BM], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    blocks = gl.allocate_shared_memory(dtype, [SUBS, CHAINS, 16, DEPTH], shared)
    first = gl.program_id(0) * TN
    n = gl.minimum(TN, F - first)  # neurons of this program
    copied_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, copied)))
    for sub in gl.static_range(SUBS):
        row = sub * 16 + copied_row
        copy_rows(i_gate, first + row, row < n, D, copied, blocks.index(sub), CHAINS, DEPTH)
    if OVERLAPS and EARLY:
        gdc_wait()
    x = _load_x(i_x, M, D, x_stride, gl.DotOperandLayout(1, mma, 8), CHAINS, DEPTH, BM)
    async_copy.wait_group(0)

    m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(0, summed)))
    slot = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, summed)))
    marks = 0 * slot.to(gl.int64)
    for sub in gl.static_range(SUBS):
        z = _products(blocks.index(sub), x, sums, summed, CHAINS, BM)
        row = sub * 16 + slot
        neuron = first + row
        there = row < n
        fired = fire(
            z, neuron, there, m, M, D, i_gate_bias, i_down, m_h, HM, SAME, PREFETCHES, GATED, SQUARED, HAS_GATE_BIAS
        )
        marks += fired.to(gl.int64) << row.to(gl.int64)
    bits = gl.sum(marks, axis=0)
    gl.store(o_bits + gl.program_id(0), bits)

    if GATED:
        n_fired = popcount(bits)
        for start in range(0, n_fired, 16):
            up_row = first + nth_bit(bits + 0 * copied_row, start + copied_row)
            copy_rows(i_up, up_row, start + copied_row < n_fired, D, copied, blocks.index(0), CHAINS, DEPTH)
            its = first + nth_bit(bits + 0 * slot, start + slot)
            filled = start + slot < n_fired
            places = m_h + its.to(gl.int64)[:, None] * HM + m[None, :]
            barrier()  # now all of a is written
            a = gl.load(places, mask=filled[:, None], other=0.0).to(gl.float32)
            async_copy.wait_group(0)
            u = _products(blocks.index(0), x, sums, summed, CHAINS, BM)
            store_gated(a, u, its, filled, places, i_up_bias, dtype, SQUARED, HAS_UP_BIAS)


@gluon.jit
def lowest(bits, first):
    """(int32, int64): ``first`` + the position of each word's lowest set bit, or -1 if none is set; and the remaining
    bits."""
    place = popcount((bits & (0 - bits)) - 1)
    return gl.where(bits != 0, first + place, -1), bits & (bits - 1)


@gluon.jit
def words_from(i_words, first, n_words, layout: gl.constexpr, CHAINS: gl.constexpr, ROWS: gl.constexpr):
    """(int64, int32) [CHAINS, ROWS]: mask words, and their numbers."""
    chain = gl.arange(0, CHAINS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = first + chain[:, None] * ROWS + row[None, :]
    return gl.load(i_words + word, mask=word < n_words, other=0), word


@gluon.jit
def copy_neurons(i_rows, neuron, width, column, inside, block):
    """Copy rows of neurons [CHAINS, ROWS] to shared memory, [CHAINS, ROWS, columns], asynchronously; zeros for -1."""
    pointers = (i_rows + neuron.to(gl.int64) * width)[:, :, None] + column[None, None, :]
    mask = (neuron >= 0)[:, :, None] & inside[None, None, :]
    async_copy.async_copy_global_to_shared(block, pointers, mask=mask)


@gluon.jit
def hopper_sums_kernel(
    i_h,  # [F, BM]
    i_words,  # int64 [n_words]: bit b of word w is neuron w * STRIDE + b
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    M,
    D,
    n_words,
    STRIDE: gl.constexpr,
    OVERLAPS: gl.constexpr,
    BM: gl.constexpr,
    BW: gl.constexpr,
    BS: gl.constexpr,
    BD: gl.constexpr,
    CHAINS: gl.constexpr,
    HAS_DOWN_BIAS: gl.constexpr,
):
    """As sums_kernel of steps.py, with BS bits of each of BW words in flight at once; words are divided among warps."""
    dtype: gl.constexpr = o_y.dtype.element_ty
    ROWS: gl.constexpr = BW // CHAINS  # words of a warp
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHAINS, 1, 1], [1, 16, 8])
    of_w: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // BD, BD // 8], [CHAINS, 1, 1], [2, 1, 0])
    of_h: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // BM, BM // 8], [CHAINS, 1, 1], [2, 1, 0])
    summed: gl.constexpr = gl.BlockedLayout([CHAINS, 1, 1], [1, 32 // BD, BD], [1, CHAINS, 1], [2, 1, 0])
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 4 if BD == 16 else 2, BD // 8, [2, 1, 0])
    h_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2 if BM == 32 else 1, BM // 8, [2, 1, 0])
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    w_blocks = gl.allocate_shared_memory(dtype, [BS, CHAINS, ROWS, BD], w_shared)
    h_blocks = gl.allocate_shared_memory(dtype, [BS, CHAINS, ROWS, BM], h_shared)
    column = gl.program_id(0) * BD + gl.arange(0, BD, gl.SliceLayout(0, gl.SliceLayout(1, of_w)))
    token = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, of_h)))
    acc = gl.zeros((CHAINS, BM, BD), gl.float32, mma)
    for first in range(0, n_words, BW):
        bits_w, word_w = words_from(i_words, first, n_words, of_w, CHAINS, ROWS)
        bits_h, word_h = words_from(i_words, first, n_words, of_h, CHAINS, ROWS)
        most = gl.max(gl.max(popcount(bits_w), axis=1), axis=0)
        for _ in range(0, most, BS):
            for slot in gl.static_range(BS):
                neuron_w, bits_w = lowest(bits_w, word_w * STRIDE)
                neuron_h, bits_h = lowest(bits_h, word_h * STRIDE)
                copy_neurons(i_down, neuron_w, D, column, column < D, w_blocks.index(slot))
                copy_neurons(i_h, neuron_h, BM, token, token < BM, h_blocks.index(slot))
            async_copy.commit_group()
            async_copy.wait_group(0)
            for slot in gl.static_range(BS):
                h = h_blocks.index(slot).permute((0, 2, 1)).load(gl.DotOperandLayout(0, mma, 2))
                w = w_blocks.index(slot).load(gl.DotOperandLayout(1, mma, 2))
                acc = mma_v2(h, w, acc)
    sums = gl.allocate_shared_memory(gl.float32, [CHAINS, BM, BD], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums.store(acc)
    y = gl.sum(sums.load(summed), axis=0)
    m = gl.arange(0, BM, gl.SliceLayout(1, gl.SliceLayout(0, summed)))
    d = gl.program_id(0) * BD + gl.arange(0, BD, gl.SliceLayout(0, gl.SliceLayout(0, summed)))
    if HAS_DOWN_BIAS:
        y += gl.load(i_down_bias + d, mask=d < D, other=0.0).to(gl.float32)[None, :]
    gl.store(o_y + m[:, None] * D + d[None, :], y.to(dtype), mask=(m < M)[:, None] & (d < D)[None, :])
