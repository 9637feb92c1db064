"""One token of an FFN with FP8 weights, for Hopper, in Gluon. A chain of latencies limits it, not bytes.

hopper_one_kernel has one program of TN neurons per SM, like hopper_fp8_neurons_kernel, but each program also computes
its own share of y. The program itself knows which of its neurons fire, so no other program has to read mask words first
and rows then. Rows of Wu and Wd are loaded together, for four neurons at once. hopper_add_kernel adds the shares, in
the programs' order.

    next layer's gate    wwwwwwwwwwwwww|
    this layer's         |x mma | who fires | rows of Wu and Wd: u, h | its share of y |
    shares                                                                             |y|

Two layers' programs fit an SM's shared memory and registers, so that the next layer's gate rows arrive while this layer
runs: 8 warps, REGISTERS, and one tile of the gate converted to fp16 before x is there.

Legend: D model width, F neurons (TN in a program, SUBS tiles of 16).
Bytes, D 2048, F 5632: Wg 11.5 MB, then 4 KB for each neuron that fires, and 1 MB of shares, which L2 holds.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (tuples that grow while a kernel is compiled)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twell.gpu.decode.hopper import barrier, popcount, prefetch, relu
from twell.gpu.decode.hopper_fp8 import copy_gate, load_x, products_of, rounded, touch

# If two programs (FITS_TWICE bytes each, at most) fit an SM's shared memory: the most registers with which they fit
# beside two of hopper_add_kernel. (121 and 113 registers: 7.4 and 7.8 us per layer, 112: 6.8; H200.)
REGISTERS, FITS_TWICE = 112, 96 * 1024


@gluon.jit
def hopper_one_kernel(
    i_x,  # [D]
    i_gate,  # e4m3 [F, D]
    i_gate_scale,  # fp32 [F]
    i_up,  # e4m3 [F, D] or unused
    i_up_scale,  # fp32 [F] or unused
    i_down,  # e4m3 [F, D]
    m_a,  # fp32 [F]: relu(z) of the neurons that fire
    o_share,  # fp32 [programs, D]: shares of y, before its columns' scales
    D,
    F,
    OVERLAPS: gl.constexpr,
    EARLY: gl.constexpr,
    TN: gl.constexpr,
    SUBS: gl.constexpr,
    CHAINS: gl.constexpr,
    DEPTH: gl.constexpr,
    BU: gl.constexpr,  # neurons that fire processed at once
    GATED: gl.constexpr,
    SQUARED: gl.constexpr,
):
    dtype: gl.constexpr = i_x.dtype.element_ty
    BM: gl.constexpr = 8  # the least that tensor cores take; the first is the token
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHAINS, 1, 1], [1, 16, 8])
    copied: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 512 // DEPTH, DEPTH // 16], [CHAINS, 1, 1], [2, 1, 0])
    summed: gl.constexpr = gl.BlockedLayout([CHAINS, 1, 1], [1, 32 // BM, BM], [1, CHAINS, 1], [2, 1, 0])
    SAME: gl.constexpr = BM - 1 + (CHAINS * 32 - BM * 64 if CHAINS * 32 > BM * 64 else 0)
    rows: gl.constexpr = gl.BlockedLayout([1, DEPTH // 32], [1, 32], [1, CHAINS], [1, 0])  # a thread's part of D

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
    async_copy.wait_group(SUBS - 1)
    converted = blocks[0].load(gl.DotOperandLayout(0, mma, 16)).to(gl.float16)
    if OVERLAPS and EARLY:
        gdc_wait()
    of_x = gl.allocate_shared_memory(gl.float8e4nv, [CHAINS, BM, DEPTH], gl.SwizzledSharedLayout(64, 1, 1, [2, 1, 0]))
    q, scale = rounded(load_x(i_x, 1, D, D, CHAINS, DEPTH, 1))
    of_x.slice(0, 1, dim=1).store(q)
    x_scale = gl.sum(scale, axis=0)
    async_copy.wait_group(0)
    x = of_x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, mma, 16)).to(gl.float16)
    products = (mma_v2(converted, x, gl.zeros((CHAINS, 16, BM), gl.float32, mma)),)
    for sub in gl.static_range(1, SUBS):
        products += (products_of(blocks[sub], x, CHAINS, BM),)
    # Allocated here, so that it may reuse the rows' memory.
    sums = gl.allocate_shared_memory(gl.float32, [CHAINS, 64, BM], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    for sub in gl.static_range(SUBS):  # the chains' sums meet here
        sums.slice(sub * 16, 16, dim=1).store(products[sub])
    w_scale = gl.load(i_gate_scale + first + row, mask=row < n, other=0.0)
    z = gl.sum(sums.load(summed), axis=0) * (w_scale[:, None] * x_scale)
    a = relu(z).to(dtype).to(gl.float32)
    fires = ((a != 0) | (z == float("-inf"))) & (m < 1)[None, :] & (row < n)[:, None]
    fired = gl.max(fires.to(gl.int32), axis=1)
    if OVERLAPS:  # issued before all threads know which fire
        prefetch(i_down, first + row, fired, D, SAME)
        if GATED:
            prefetch(i_up, first + row, fired, D, SAME)
    gl.store(m_a + first + row, gl.sum(gl.where(fires, a, 0.0), axis=1), mask=fired > 0)
    bits = gl.sum(fired.to(gl.int64) << row.to(gl.int64), axis=0)

    d = gl.arange(0, CHAINS * DEPTH, gl.SliceLayout(0, rows))
    slot = gl.arange(0, BU, gl.SliceLayout(1, rows))
    x_values = gl.convert_layout(q.reshape(CHAINS * DEPTH), gl.SliceLayout(0, rows)).to(gl.float32)
    share = gl.zeros((CHAINS * DEPTH,), gl.float32, gl.SliceLayout(0, rows))
    n_fired = popcount(bits)
    for start in range(0, n_fired, BU):
        its = 0 * slot
        for i in gl.static_range(BU):
            its = gl.where(slot == i, popcount((bits & (0 - bits)) - 1), its)
            bits = bits & (bits - 1)
        filled = start + slot < n_fired
        its = first + gl.where(filled, its, 0)
        at = (its.to(gl.int64) * D)[:, None] + d[None, :]
        there = filled[:, None] & (d < D)[None, :]
        down = gl.load(i_down + at, mask=there, other=0.0)
        barrier()  # now all of a is written
        h = relu(gl.load(m_a + its))
        if SQUARED:
            h = h * h
        if GATED:
            up = gl.load(i_up + at, mask=there, other=0.0)
            up_scale = gl.load(i_up_scale + its)
            h = h * (gl.sum(up.to(gl.float32) * x_values[None, :], axis=1) * (up_scale * x_scale))
        h = gl.where(filled, h, 0.0).to(dtype).to(gl.float32)
        share += gl.sum(down.to(gl.float32) * h[:, None], axis=0)
    gl.store(o_share + gl.program_id(0) * D + d, share, mask=d < D)


@gluon.jit
def hopper_add_kernel(
    i_share,  # fp32 [programs, D]
    i_down_scale,  # fp32 [D]
    o_y,  # [D]
    D,
    n_shares,
    OVERLAPS: gl.constexpr,
    BP: gl.constexpr,  # power of 2 >= n_shares
    BD: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BD, BD // 4], [WARPS, 1], [1, 0])
    d = gl.program_id(0) * BD + gl.arange(0, BD, gl.SliceLayout(0, layout))
    program = gl.arange(0, BP, gl.SliceLayout(1, layout))
    if OVERLAPS:
        gdc_launch_dependents()
    scale = gl.load(i_down_scale + d, mask=d < D, other=0.0)  # a weight: the preceding kernel does not write it
    if OVERLAPS:
        gdc_wait()
    there = (program < n_shares)[:, None] & (d < D)[None, :]
    y = gl.sum(gl.load(i_share + program[:, None] * D + d[None, :], mask=there, other=0.0), axis=0) * scale
    gl.store(o_y + d, y.to(o_y.dtype.element_ty), mask=d < D)
