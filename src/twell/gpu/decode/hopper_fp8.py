"""The kernels of hopper.py for e4m3 weights with a scale per row, and x rounded as a dense FP8 layer rounds it.

hopper_fp8_neurons_kernel: every program rounds x itself, which saves a launch. e4m3 values are exact in fp16, in which
tensor cores multiply them, with sums in fp32. Loads of the gate's rows are issued before x is there, one tile after the
other: an SM's loads return in order, and the preceding kernel's loads would wait behind all of them.

hopper_fp8_sums_kernel: rows of Wd are loaded as e4m3, converted to 16 bits in registers and stored to shared memory,
from where tensor cores read; the columns' scales multiply the sums.

Legend: M tokens (BM in a tile), D model width, F neurons (TN in a program, SUBS tiles of 16).
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (tuples that grow while a kernel is compiled)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twell.gpu.decode.hopper import (
    barrier,
    copy_neurons,
    copy_rows,
    fire,
    lowest,
    nth_bit,
    popcount,
    store_gated,
    words_from,
)


@gluon.jit
def load_x(i_x, M, D, x_stride, CHAINS: gl.constexpr, DEPTH: gl.constexpr, TOKENS: gl.constexpr):
    """x in registers, [CHAINS, TOKENS, DEPTH]."""
    LANES: gl.constexpr = DEPTH // 8 if DEPTH < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [CHAINS, 1, 1], [2, 1, 0])
    chain = gl.arange(0, CHAINS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    m = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = chain[:, None, None] * DEPTH + k[None, None, :]
    inside = (m < M)[None, :, None] & (at < D)
    return gl.load(i_x + m.to(gl.int64)[None, :, None] * x_stride + at, mask=inside, other=0.0)


@gluon.jit
def rounded(x):
    """x [CHAINS, TOKENS, DEPTH] in e4m3, and its scales [TOKENS], as in ``reference.to_fp8``."""
    # Compare |x| by its bits: inf and NaN are above any number.
    bits = (x.to(gl.int16, bitcast=True) & 0x7FFF).to(gl.int32)
    largest = gl.max(gl.max(bits, axis=2), axis=0)
    inf: gl.constexpr = 0x7F80 if x.dtype == gl.bfloat16 else 0x7C00
    amax = gl.maximum(largest.to(gl.int16).to(x.dtype, bitcast=True).to(gl.float32), 1e-12)
    scale = gl.where(largest >= inf, float("nan"), amax * (1 / 448.0))
    q = x.to(gl.float32) * gl.div_rn(1.0 + 0.0 * amax, scale)[None, :][:, :, None]
    q = gl.where(q > 448.0, 448.0, gl.where(q < -448.0, -448.0, q))  # min and max would drop NaN
    return q.to(gl.float8e4nv), scale


@gluon.jit
def copy_gate(
    i_gate, first, row, n, D, layout: gl.constexpr, EARLY: gl.constexpr, SUBS: gl.constexpr, CHAINS: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """Copy n rows of the gate to shared memory, SUBS blocks [CHAINS, 16, DEPTH], asynchronously. ``row``: 0 to 15."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0])  # four threads read 64 bytes of a row
    blocks = ()  # slices of one allocation would have barriers between them
    for sub in gl.static_range(SUBS):
        blocks += (gl.allocate_shared_memory(gl.float8e4nv, [CHAINS, 16, DEPTH], shared),)
        wanted = sub * 16 + row
        copy_rows(i_gate, first + wanted, wanted < n, D, layout, blocks[sub], CHAINS, DEPTH)
        if EARLY:  # not all at once: the preceding kernel's loads would wait behind them
            async_copy.wait_group(0)
    return blocks


@gluon.jit
def products_of(rows, x, CHAINS: gl.constexpr, BM: gl.constexpr):
    """fp32 [CHAINS, 16, BM] of rows [CHAINS, 16, DEPTH] in shared memory."""
    mma: gl.constexpr = x.type.layout.parent
    w = rows.load(gl.DotOperandLayout(0, mma, 16)).to(gl.float16)
    return mma_v2(w, x, gl.zeros((CHAINS, 16, BM), gl.float32, mma))


@gluon.jit
def touch(pointers):
    """Prefetch to L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def hopper_fp8_neurons_kernel(
    i_x,  # [M, D]
    i_gate,  # e4m3 [F, D]
    i_gate_scale,  # fp32 [F]
    i_up,  # e4m3 [F, D] or unused
    i_up_scale,  # fp32 [F] or unused
    i_down,  # e4m3 [F, D]
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
    TOKENS: gl.constexpr,  # power of 2 >= M, at least 2: one token has hopper_fp8_one.py
    TN: gl.constexpr,
    SUBS: gl.constexpr,
    CHAINS: gl.constexpr,
    DEPTH: gl.constexpr,
    PREFETCHES: gl.constexpr,
    GATED: gl.constexpr,
    SQUARED: gl.constexpr,
):
    dtype: gl.constexpr = m_h.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHAINS, 1, 1], [1, 16, 8])
    copied: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 512 // DEPTH, DEPTH // 16], [CHAINS, 1, 1], [2, 1, 0])
    # Sums: a thread adds up all chains of some of [64, BM]. SAME: bits of a thread's number that do not change its row.
    summed: gl.constexpr = gl.BlockedLayout([CHAINS, 1, 1], [1, 32 // BM, BM], [1, CHAINS, 1], [2, 1, 0])
    SAME: gl.constexpr = BM - 1 + (CHAINS * 32 - BM * 64 if CHAINS * 32 > BM * 64 else 0)
    x_shared: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0])

    if OVERLAPS and not EARLY:
        gdc_wait()
    if OVERLAPS:
        gdc_launch_dependents()
    first = gl.program_id(0) * TN
    n = gl.minimum(TN, F - first)  # neurons of this program
    copied_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, copied)))
    m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(0, summed)))
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(0, summed)))
    blocks = copy_gate(i_gate, first, copied_row, n, D, copied, EARLY, SUBS, CHAINS, DEPTH)
    touch(i_gate_scale + gl.where(row < n, first + row, 0))
    if GATED:
        touch(i_up_scale + gl.where(row < n, first + row, 0))
    if OVERLAPS and EARLY:
        gdc_wait()
    of_x = gl.allocate_shared_memory(gl.float8e4nv, [CHAINS, BM, DEPTH], x_shared)
    x_scales = gl.allocate_shared_memory(gl.float32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q, scale = rounded(load_x(i_x, M, D, x_stride, CHAINS, DEPTH, TOKENS))
    of_x.slice(0, TOKENS, dim=1).store(q)
    x_scales.slice(0, TOKENS, dim=0).store(scale)
    async_copy.wait_group(0)
    w_scale = gl.load(i_gate_scale + first + row, mask=row < n, other=0.0)
    x = of_x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, mma, 16)).to(gl.float16)

    sums = gl.allocate_shared_memory(gl.float32, [CHAINS, 64, BM], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    products = ()
    for sub in gl.static_range(SUBS):
        products += (products_of(blocks[sub], x, CHAINS, BM),)
    for sub in gl.static_range(SUBS):  # the chains' sums meet here
        sums.slice(sub * 16, 16, dim=1).store(products[sub])
    x_scale = x_scales.load(m.type.layout)
    z = gl.sum(sums.load(summed), axis=0) * (w_scale[:, None] * x_scale[None, :])
    # i_gate and i_up below stand for biases, which are not read.
    fired = fire(z, first + row, row < n, m, M, D, i_gate, i_down, m_h, HM, SAME, PREFETCHES, GATED, SQUARED, False)
    bits = gl.sum(fired.to(gl.int64) << row.to(gl.int64), axis=0)
    gl.store(o_bits + gl.program_id(0), bits)

    if GATED:
        n_fired = popcount(bits)
        slot = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, summed)))
        for start in range(0, n_fired, 16):
            up_row = first + nth_bit(bits + 0 * copied_row, start + copied_row)
            copy_rows(i_up, up_row, start + copied_row < n_fired, D, copied, blocks[0], CHAINS, DEPTH)
            its = first + nth_bit(bits + 0 * slot, start + slot)
            filled = start + slot < n_fired
            places = m_h + its.to(gl.int64)[:, None] * HM + m[None, :]
            barrier()  # now all of a is written
            a = gl.load(places, mask=filled[:, None], other=0.0).to(gl.float32)
            up_scale = gl.load(i_up_scale + its, mask=filled, other=0.0)
            async_copy.wait_group(0)
            part = sums.slice(0, 16, dim=1)
            part.store(products_of(blocks[0], x, CHAINS, BM))
            u = gl.sum(part.load(summed), axis=0) * (up_scale[:, None] * x_scale[None, :])
            store_gated(a, u, its, filled, places, i_up, dtype, SQUARED, False)


@gluon.jit
def hopper_fp8_sums_kernel(
    i_h,  # [F, BM]
    i_words,  # int64 [n_words]: bit b of word w is neuron w * STRIDE + b
    i_down,  # e4m3 [F, D]
    i_down_scale,  # fp32 [D]
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
):
    """As hopper_sums_kernel, with e4m3 rows of Wd and a scale for each column of y."""
    dtype: gl.constexpr = o_y.dtype.element_ty
    ROWS: gl.constexpr = BW // CHAINS  # words of a warp
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHAINS, 1, 1], [1, 16, 8])
    of_w: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 512 // BD, BD // 16], [CHAINS, 1, 1], [2, 1, 0])
    of_h: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // BM, BM // 8], [CHAINS, 1, 1], [2, 1, 0])
    summed: gl.constexpr = gl.BlockedLayout([CHAINS, 1, 1], [1, 32 // BD, BD], [1, CHAINS, 1], [2, 1, 0])
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 4 if BD == 16 else 2, BD // 8, [2, 1, 0])
    h_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2 if BM == 32 else 1, BM // 8, [2, 1, 0])
    d = gl.program_id(0) * BD + gl.arange(0, BD, gl.SliceLayout(0, gl.SliceLayout(0, summed)))
    if OVERLAPS:
        gdc_launch_dependents()
        touch(i_down_scale + gl.where(d < D, d, 0))
        gdc_wait()
    scale = gl.load(i_down_scale + d, mask=d < D, other=0.0)
    w_blocks = ()  # slices of one allocation would have barriers between them
    h_blocks = ()
    for _slot in gl.static_range(BS):
        w_blocks += (gl.allocate_shared_memory(dtype, [CHAINS, ROWS, BD], w_shared),)
        h_blocks += (gl.allocate_shared_memory(dtype, [CHAINS, ROWS, BM], h_shared),)
    column = gl.program_id(0) * BD + gl.arange(0, BD, gl.SliceLayout(0, gl.SliceLayout(1, of_w)))
    token = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, of_h)))
    acc = gl.zeros((CHAINS, BM, BD), gl.float32, mma)
    for first in range(0, n_words, BW):
        bits_w, word_w = words_from(i_words, first, n_words, of_w, CHAINS, ROWS)
        bits_h, word_h = words_from(i_words, first, n_words, of_h, CHAINS, ROWS)
        most = gl.max(gl.max(popcount(bits_w), axis=1), axis=0)
        for _ in range(0, most, BS):
            rows = ()
            for slot in gl.static_range(BS):
                neuron_w, bits_w = lowest(bits_w, word_w * STRIDE)
                neuron_h, bits_h = lowest(bits_h, word_h * STRIDE)
                mask = (neuron_w >= 0)[:, :, None] & (column < D)[None, None, :]
                pointers = (i_down + neuron_w.to(gl.int64) * D)[:, :, None] + column[None, None, :]
                rows += (gl.load(pointers, mask=mask, other=0.0),)
                copy_neurons(i_h, neuron_h, BM, token, token < BM, h_blocks[slot])
            async_copy.commit_group()
            for slot in gl.static_range(BS):
                w_blocks[slot].store(rows[slot].to(dtype))
            async_copy.wait_group(0)
            for slot in gl.static_range(BS):
                h = h_blocks[slot].permute((0, 2, 1)).load(gl.DotOperandLayout(0, mma, 2))
                w = w_blocks[slot].load(gl.DotOperandLayout(1, mma, 2))
                acc = mma_v2(h, w, acc)
    sums = gl.allocate_shared_memory(gl.float32, [CHAINS, BM, BD], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums.store(acc)
    m = gl.arange(0, BM, gl.SliceLayout(1, gl.SliceLayout(0, summed)))
    y = gl.sum(sums.load(summed), axis=0) * scale[None, :]
    gl.store(o_y + m[:, None] * D + d[None, :], y.to(dtype), mask=(m < M)[:, None] & (d < D)[None, :])
