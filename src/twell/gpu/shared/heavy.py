"""The heavy tokens, densely on tensor cores: h = a(relu(x Wg^T + bg)) * (x Wu^T + bu) over all neurons, 0 for hot ones,
then y = h Wd + bd. (Plain FFN: h = a(relu(x Wg^T + bg)).)

TwELL does not hold all of a heavy token's gate, so the gate is computed again from x. (A value next to 0 may round the
other way than in TwELL. Either is right, and nothing else of a heavy token comes from TwELL.) This is one cooperative
launch: all programs run at the same time and wait for each other between the products. They process the heavy tokens
chunk by chunk, with h in a workspace of one chunk, and loop up to a count that lives on the device: no host
synchronisation, and no capacity. The list's order may vary between runs; a row's sums do not depend on its place.

Hot neurons run along, so that TMA reads the weights as they are stored; on Hopper x of a chunk is packed for TMA, too.
Every product is a pair of two 128 x 128 tiles: gate and up, or neighbouring columns of y. ptxas reserves registers for
the accumulators of every wgmma loop, for the whole kernel; two loops' share them if one loop starts with what the other
returns. So the accumulators are passed from loop to loop.

Up to FEW tokens, pairs of 64 x 64 tiles read x by pointers: 88 pairs for 5632 neurons. If the tiles of y fill at most
half a wave, narrow tiles share the depth (up to SHARES shares), whose sums are added in order.

F 5632, D 2048, bf16: the weights are 69 MB, 16 us; FLOPs of 16384 tokens 1.13e12, 1.5 ms at 750 TFLOP/s. Measured on an
H200: 64 tokens 41 us, 512 124, 2048 282, and 16384, when a chunk had 4096 tokens, 2056 (551 TFLOP/s).
Workspace: h [CHUNK, F], 23 MB, and x [CHUNK, D] or shares of sums, 9 MB.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.cooperative import fence, leave_for_all, wait_for_all
from twell.gpu.shared.gate import GROUP_M, load_tile
from twell.gpu.shared.launch import ANY, MULTIPLE, Descriptor, Kernel
from twell.gpu.shared.lists import LONG, N_WAITING, count_for_drift, count_heavy, heavy_tokens
from twell.gpu.shared.replay import Matrix, Space
from twell.gpu.shared.tiles import INTERPRETED, GateTile, narrowed, quarters, relu, tile_of
from twell.reference import Weights
from twell.saved import Turns

FEW = 128  # heavy tokens, up to which tiles are narrow
CHUNK = 2048  # heavy tokens at once
SHARES = 16  # of a sum, at most


@triton.jit
def _pack_rows(i_x, i_heavy, n_first, begin, end, o_packed, M, D, x_stride, BM: tl.constexpr, BD: tl.constexpr):
    """Copy x of the heavy tokens from ``begin`` on to consecutive rows: TMA cannot follow a list."""
    tiles_d = tl.cdiv(D, BD)
    for tile in range(tl.program_id(0), tl.cdiv(end - begin, BM) * tiles_d, tl.num_programs(0)):
        row = tile // tiles_d * BM + tl.arange(0, BM)
        token = heavy_tokens(i_heavy, begin + row, n_first, end, M).to(tl.int64)
        d = tile % tiles_d * BD + tl.arange(0, BD)
        inside = (begin + row < end)[:, None] & (d[None, :] < D)
        x = tl.load(i_x + token[:, None] * x_stride + d[None, :], mask=inside, other=0.0)
        tl.store(o_packed + row[:, None] * D + d[None, :], x, mask=inside)


@triton.jit
def _add_products(
    z, u, i_left, i_first, i_second, row, has_row, m, n, k, D, F, x_stride,
    DOWN: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one step of depth BK, from k * BK on, to both accumulators: x times rows of Wg and of Wu (plain FFN: of Wg,
    and the rows after them), or DOWN: h times columns of Wd and the columns after them. PACKED: rows of x or h start at
    m * BM; otherwise they are ``row``."""
    if PACKED:
        left = i_left.load([m * BM, k * BK])
    else:
        col = k * BK + tl.arange(0, BK)
        inside = has_row[:, None] & (col[None, :] < (F if DOWN else D))
        at = row[:, None] * (F if DOWN else x_stride) + col[None, :]
        left = tl.load(i_left + at, mask=inside, other=0.0)
    if DOWN:
        first = load_tile(i_first, k * BK, n * 2 * BN, F, D, D, BK, BN, USE_TMA)
        second = load_tile(i_second, k * BK, n * 2 * BN + BN, F, D, D, BK, BN, USE_TMA)
    else:
        neuron = n * BN if GATED else n * 2 * BN
        first = load_tile(i_first, neuron, k * BK, F, D, D, BN, BK, USE_TMA)
        second = load_tile(i_second, neuron if GATED else neuron + BN, k * BK, F, D, D, BN, BK, USE_TMA)
        first = first.T
        second = second.T
    z = tl.dot(left, first, z, input_precision=PRECISION)
    return z, tl.dot(left, second, u, input_precision=PRECISION)


@triton.jit
def _column_blocks(z, u, BM: tl.constexpr, BN: tl.constexpr):
    """Eight column blocks of both accumulators: an epilogue lacks the registers for all at once."""
    a, b, c, d = quarters(z, BM, BN)
    fence("fence.acq_rel.cta")  # without it ptxas serialises the wgmmas: it does not see that the first sum is final
    e, f, g, h = quarters(u, BM, BN)
    return a, b, c, d, e, f, g, h


@triton.jit
def _store_h(
    z, u, m, n, i_gate_bias, i_up_bias, i_places, i_heavy, i_counted, n_first, begin, end, o_h, o_counts, M, F,
    GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, COUNTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store a tile of h; 0 for hot neurons."""
    dtype = o_h.dtype.element_ty
    row = m * BM + tl.arange(0, BM)
    has_row = begin + row < end
    counts = has_row
    if HAS_MASK:
        token = heavy_tokens(i_heavy, begin + row, n_first, end, M)
        counts = tl.load(i_counted + token, mask=has_row, other=0) != 0
    blocks = _column_blocks(z, u, BM, BN)
    N: tl.constexpr = 4 if GATED else 8
    for q in tl.static_range(N):
        neuron = (n * N + q) * (BN // 4) + tl.arange(0, BN // 4)
        place = tl.load(i_places + neuron, mask=neuron < F, other=-1)
        is_cold = place >= 0
        z = blocks[q]
        if HAS_GATE_BIAS:
            z += tl.load(i_gate_bias + place, mask=is_cold, other=0.0).to(tl.float32)[None, :]
        r = relu(z).to(dtype)
        if COUNTS:
            fired = tl.sum(((r != 0) & counts[:, None]).to(tl.int32), axis=0)
            tl.atomic_add(o_counts + place, fired, mask=is_cold & (fired > 0), sem="relaxed")
        h = r.to(tl.float32)
        if SQUARED:
            h = h * h
        if GATED:
            u = blocks[4 + q]
            if HAS_UP_BIAS:
                u += tl.load(i_up_bias + neuron, mask=is_cold, other=0.0).to(tl.float32)[None, :]
            h = h * u
        h = tl.where(is_cold[None, :], h, 0.0)
        inside = has_row[:, None] & (neuron[None, :] < F)
        tl.store(o_h + row[:, None] * F + neuron[None, :], h.to(dtype), mask=inside)


@triton.jit
def _store_y(
    left, right, m, n, share, i_down_bias, i_heavy, n_first, begin, end, o_y, o_sums, M, D,
    HAS_DOWN_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Store a tile of y, or SHARED: of one share's sums [shares, end - begin, D]."""
    row = m * BM + tl.arange(0, BM)
    rows = o_sums + (share * (end - begin) + row) * D
    if not SHARED:
        rows = o_y + heavy_tokens(i_heavy, begin + row, n_first, end, M).to(tl.int64) * D
    blocks = _column_blocks(left, right, BM, BN)
    for q in tl.static_range(8):
        part = blocks[q]
        d = (n * 8 + q) * (BN // 4) + tl.arange(0, BN // 4)
        if HAS_DOWN_BIAS and not SHARED:
            part += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        inside = (begin + row < end)[:, None] & (d[None, :] < D)
        tl.store(rows[:, None] + d[None, :], part.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    z, u, m, n, share, i_gate_bias, i_up_bias, i_down_bias, i_places, i_heavy, i_counted, n_first, begin, end, o_h,
    o_counts, o_y, o_sums, M, D, F,
    GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, COUNTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DOWN: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    if DOWN:
        _store_y(z, u, m, n, share, i_down_bias, i_heavy, n_first, begin, end, o_y, o_sums, M, D, HAS_DOWN_BIAS, BM,
                 BN, SHARED)  # fmt: skip
    else:
        _store_h(z, u, m, n, i_gate_bias, i_up_bias, i_places, i_heavy, i_counted, n_first, begin, end, o_h, o_counts,
                 M, F, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_MASK, COUNTS, BM, BN)  # fmt: skip


@triton.jit
def _tiles(
    z, u, i_left, i_first, i_second, i_gate_bias, i_up_bias, i_down_bias, i_places, i_heavy, i_counted, n_first, begin,
    end, shares, o_h, o_counts, o_y, o_sums, M, D, F, x_stride,
    GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, COUNTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr, DOWN: tl.constexpr,
    SHARED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of h, or DOWN: of y. ``z``, ``u`` and the returned accumulators are zeros [BM, BN].

    PACKED: one loop over all tiles, so that a tile's first loads are issued before the epilogue of the tile before. The
    accumulators go from product to product, as zeros: otherwise each product has its own registers for them, and there
    are not enough."""
    tiles_m = tl.cdiv(end - begin, BM)
    tiles_n = tl.cdiv(D, 2 * BN) if DOWN else tl.cdiv(F, BN if GATED else 2 * BN)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(F if DOWN else D, BK), shares)
    if PACKED:
        tile = tl.program_id(0) - tl.num_programs(0)
        m = 0
        n = 0
        share = 0
        k = steps - 1
        row = 0
        for _ in range(tl.cdiv(tl.maximum(tiles * shares - tl.program_id(0), 0), tl.num_programs(0)) * steps):
            k = tl.where(k == steps - 1, 0, k + 1)
            if k == 0:
                tile += tl.num_programs(0)
                share = tile // tiles
                m, n = tile_of(tile % tiles, tiles_m, tiles_n, GROUP_M)
            z, u = _add_products(z, u, i_left, i_first, i_second, row, row, m, n, share * steps + k, D, F, x_stride,
                                 DOWN, GATED, BM, BN, BK, PACKED, USE_TMA, PRECISION)  # fmt: skip
            if k == steps - 1:
                _store(z, u, m, n, share, i_gate_bias, i_up_bias, i_down_bias, i_places, i_heavy, i_counted, n_first,
                       begin, end, o_h, o_counts, o_y, o_sums, M, D, F, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS,
                       HAS_DOWN_BIAS, HAS_MASK, COUNTS, BM, BN, DOWN, SHARED)  # fmt: skip
                z = tl.zeros((BM, BN), tl.float32)
                u = tl.zeros((BM, BN), tl.float32)
    else:
        for tile in range(tl.program_id(0), tiles * shares, tl.num_programs(0)):
            share = tile // tiles
            m, n = tile_of(tile % tiles, tiles_m, tiles_n, GROUP_M)
            row = m * BM + tl.arange(0, BM)
            has_row = begin + row < end
            if not DOWN:
                row = tl.where(has_row, heavy_tokens(i_heavy, begin + row, n_first, end, M), 0).to(tl.int64)
            z = tl.zeros((BM, BN), tl.float32)
            u = tl.zeros((BM, BN), tl.float32)
            for k in range(steps):
                z, u = _add_products(z, u, i_left, i_first, i_second, row, has_row, m, n, share * steps + k, D, F,
                                     x_stride, DOWN, GATED, BM, BN, BK, PACKED, USE_TMA, PRECISION)  # fmt: skip
            _store(z, u, m, n, share, i_gate_bias, i_up_bias, i_down_bias, i_places, i_heavy, i_counted, n_first, begin,
                   end, o_h, o_counts, o_y, o_sums, M, D, F, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_DOWN_BIAS,
                   HAS_MASK, COUNTS, BM, BN, DOWN, SHARED)  # fmt: skip
    return z, u


@triton.jit
def _sum_shares(
    i_sums, i_down_bias, i_heavy, n_first, begin, end, shares, o_y, M, D,
    HAS_DOWN_BIAS: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows of y from ``shares`` partial sums [shares, end - begin, D], always added in the same order."""
    size = (end - begin) * D
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        share = tl.arange(0, SHARES)
        inside = (share < shares)[:, None] & (at < size)[None, :]
        total = tl.sum(tl.load(i_sums + share[:, None] * size + at[None, :], mask=inside, other=0.0), axis=0)
        if HAS_DOWN_BIAS:
            total += tl.load(i_down_bias + at % D, mask=at < size, other=0.0).to(tl.float32)
        token = heavy_tokens(i_heavy, begin + at // D, n_first, end, M).to(tl.int64)
        tl.store(o_y + token * D + at % D, total.to(o_y.dtype.element_ty), mask=at < size)


@triton.jit
def _l1_rows(i_h, i_heavy, n_first, begin, end, o_l1, M, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of abs(h) of the chunk's tokens."""
    for first in range(begin + tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        r = first + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for n in range(0, F, BLOCK):
            neuron = n + tl.arange(0, BLOCK)
            inside = (r < end)[:, None] & (neuron < F)[None, :]
            h = tl.load(i_h + (r - begin)[:, None] * F + neuron[None, :], mask=inside, other=0.0)
            total += tl.abs(h.to(tl.float32))
        tl.store(o_l1 + heavy_tokens(i_heavy, r, n_first, end, M), tl.sum(total, axis=1), mask=r < end)


@triton.jit
def _wait_for_all(counter, USE_TMA: tl.constexpr):
    """``wait_for_all``, after which TMA, too, can read data that was written by pointers."""
    if USE_TMA:
        fence("fence.proxy.async.global")
    wait_for_all(counter)
    if USE_TMA:
        fence("fence.proxy.async.global")


@triton.jit
def _heavy_kernel(
    i_x,  # [M, D]
    i_few_gate,  # [F, D] descriptor with few tokens' blocks, or pointer
    i_few_up,  # [F, D], as i_few_gate; plain FFN: Wg again
    i_few_down,  # [F, D], as i_few_gate
    i_packed,  # USE_TMA: descriptor of m_packed, else i_x
    i_gate,  # [F, D] descriptor or pointer
    i_up,  # [F, D] descriptor or pointer; plain FFN: Wg again
    i_down,  # [F, D] descriptor or pointer
    i_h,  # descriptor of m_h, or m_h
    i_gate_bias,  # [C] or unused
    i_up_bias,  # [F] or unused
    i_down_bias,  # [D] or unused
    i_places,  # int32 [F]: index of each cold neuron among the cold ones; -1: hot
    m_counters,  # int32, see Turns
    i_heavy,  # int32, see Turns
    i_counted,  # bool [M] or unused: tokens that ``m_counts`` counts
    m_packed,  # x of a chunk [CHUNK, D], or shares of sums in float32: see _size_of_packed
    m_h,  # [CHUNK, F]
    o_y,  # [M, D], heavy rows
    o_l1,  # [M] or unused
    m_counts,  # int32 [C] or unused: the number of tokens for which each neuron is active is added
    i_entries,  # see Turns
    m_watch,  # int32 [2] or unused: the entries of all lists and the heavy tokens are added
    M,
    D,
    F,
    x_stride,
    wanted,  # tiles that fill the GPU
    cap,
    watches,  # 0 or 1; a constexpr would mean a second kernel to compile, for a few calls
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_BM: tl.constexpr,
    FEW_BN: tl.constexpr,
    FEW_BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n_first, n_heavy = count_heavy(m_counters, M)
    if watches != 0:
        count_for_drift(m_watch, i_entries, m_counters, n_heavy, M, cap, LONG)
    if n_heavy > 0:
        waiting = m_counters + N_WAITING
        sums = m_packed.to(tl.pointer_type(tl.float32))
        chunk = tl.cdiv(tl.cdiv(n_heavy, tl.cdiv(n_heavy, CHUNK)), BM) * BM  # all but the last have this size
        narrow = (n_heavy <= FEW) | ((n_heavy <= chunk) & (2 * tl.cdiv(n_heavy, BM) * tl.cdiv(D, 2 * BN) <= wanted))
        for begin in tl.range(
            0, n_heavy, chunk, disable_licm=True
        ):  # hoisted values would need registers that are lacking
            end = min(begin + chunk, n_heavy)
            packs = USE_TMA & (n_heavy > FEW)
            if packs:
                _pack_rows(i_x, i_heavy, n_first, begin, end, m_packed, M, D, x_stride, BM, 2 * BN)
            if packs | (begin > 0):  # after it nobody reads the last chunk's h
                _wait_for_all(waiting, USE_TMA)
            if n_heavy <= FEW:
                few_z = tl.zeros((FEW_BM, FEW_BN), tl.float32)
                _tiles(few_z, few_z, i_x, i_few_gate, i_few_up, i_gate_bias, i_up_bias, i_down_bias, i_places,
                       i_heavy, i_counted, n_first, begin, end, 1, m_h, m_counts, o_y, sums, M, D, F, x_stride,
                       GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_DOWN_BIAS, HAS_MASK, HAS_STATISTICS,
                       FEW_BM, FEW_BN, FEW_BK, GROUP_M, PRECISION, USE_TMA, False, False, False)  # fmt: skip
                wait_for_all(waiting)
            else:
                z = tl.zeros((BM, BN), tl.float32)
                z, u = _tiles(z, z, i_packed, i_gate, i_up, i_gate_bias, i_up_bias, i_down_bias, i_places,
                              i_heavy, i_counted, n_first, begin, end, 1, m_h, m_counts, o_y, sums, M, D, F, x_stride,
                              GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_DOWN_BIAS, HAS_MASK, HAS_STATISTICS,
                              BM, BN, BK, GROUP_M, PRECISION, USE_TMA, False, False, USE_TMA)  # fmt: skip
                _wait_for_all(waiting, USE_TMA)
                if narrow == 0:
                    _tiles(z, u, i_h, i_down, i_down, i_gate_bias, i_up_bias, i_down_bias, i_places,
                           i_heavy, i_counted, n_first, begin, end, 1, m_h, m_counts, o_y, sums, M, D, F, x_stride,
                           GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_DOWN_BIAS, HAS_MASK, HAS_STATISTICS,
                           BM, BN, BK, GROUP_M, PRECISION, USE_TMA, True, False, USE_TMA)  # fmt: skip
            if narrow:
                shares = wanted // (tl.cdiv(n_heavy, FEW_BM) * tl.cdiv(D, 2 * FEW_BN))
                shares = tl.minimum(tl.maximum(shares, 1), SHARES)
                few_y = tl.zeros((FEW_BM, FEW_BN), tl.float32)
                _tiles(few_y, few_y, m_h, i_few_down, i_few_down, i_gate_bias, i_up_bias, i_down_bias, i_places,
                       i_heavy, i_counted, n_first, begin, end, shares, m_h, m_counts, o_y, sums, M, D, F, x_stride,
                       GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_DOWN_BIAS, HAS_MASK, HAS_STATISTICS,
                       FEW_BM, FEW_BN, FEW_BK, GROUP_M, PRECISION, USE_TMA, True, True, False)  # fmt: skip
                wait_for_all(waiting)
                _sum_shares(sums, i_down_bias, i_heavy, n_first, begin, end, shares, o_y, M, D, HAS_DOWN_BIAS, SHARES,
                            1024)  # fmt: skip
            if HAS_STATISTICS:
                _l1_rows(m_h, i_heavy, n_first, begin, end, o_l1, M, F, 4, 2048)
        leave_for_all(waiting)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    tile: GateTile,
    use_tma: bool,
    chunk: int,
    long: int,
    **flags: bool,
) -> Kernel:
    """``flags``: GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_DOWN_BIAS, HAS_MASK, HAS_STATISTICS."""
    small, (BM, BN, BK, *_) = narrowed(tile), tile
    of_few = (small.BN, small.BK), (small.BN, small.BK), (small.BK, small.BN)
    blocks = *of_few, (BM, BK), (BN, BK), (BN, BK), (BK, BN), (BM, BK)
    tiles = (Descriptor(dtype, block) if use_tma else dtype for block in blocks)
    integers = (torch.int32, torch.int32, torch.int32, torch.bool)
    outputs = (dtype, dtype, dtype, torch.float32, *[torch.int32] * 3)
    return Kernel(
        _heavy_kernel,
        (dtype, *tiles, *[dtype] * 3, *integers, *outputs, ANY, MULTIPLE, MULTIPLE, MULTIPLE, ANY, ANY, ANY),
        {
            **flags,
            "LONG": long,
            "CHUNK": chunk,
            "SHARES": SHARES,
            "BM": BM,
            "BN": BN,
            "BK": BK,
            "FEW": FEW,
            "FEW_BM": small.BM,
            "FEW_BN": small.BN,
            "FEW_BK": small.BK,
            "GROUP_M": GROUP_M,
            "USE_TMA": use_tma,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        },
        warps=tile.warps,
        stages=tile.stages,
        registers=255 if dtype.itemsize == 2 else None,  # ptxas would spill to fit a second program, which never runs
        cooperative=True,
    )


def _size_of_packed(rows: int, D: int, tile: GateTile, programs: int, dtype: torch.dtype) -> int:
    """Elements of ``m_packed``: room for x of a chunk, or for shares of sums: of half as many wide tiles as there are
    programs (as many narrow tiles do not exceed that), or of all few tokens."""
    return max(rows * D, max(programs * tile.BM * tile.BN, min(rows, FEW) * D) * 4 // dtype.itemsize)


def write_heavy_(
    y: Tensor,
    x: Tensor,
    turns: Turns,
    w: Weights,
    places: Tensor,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    statistics: tuple[Tensor, Tensor] | None = None,
    token_mask: Tensor | None = None,
    watch: tuple[Tensor, int] | None = None,
    space: Space | None = None,
) -> None:
    """Write the rows of y [M, D] that belong to heavy tokens.

    ``w``: all rows [F, D], Wd too, and the gate's bias of the cold neurons [C]; ``places``: of ``PlanTensors``.
    ``statistics``: outputs, sums of abs(h) by tokens [M], and counts of the cold neurons int32 [C], to which the counts
    of the tokens in ``token_mask`` are added. ``watch``: int32 [2], to which the numbers of all entries and of heavy
    tokens are added, and the lists' cap. ``programs``: at most the number of SMs."""
    (M, D), F = x.shape, len(places)
    if M == 0:
        return
    token_mask = None if statistics is None else token_mask
    kernel = _kernel(
        x.dtype, tile, use_tma, CHUNK, LONG, GATED=w.up is not None, SQUARED=squared,
        HAS_GATE_BIAS=w.gate_bias is not None, HAS_UP_BIAS=w.up_bias is not None,
        HAS_DOWN_BIAS=w.down_bias is not None, HAS_MASK=token_mask is not None, HAS_STATISTICS=statistics is not None,
    )  # fmt: skip
    new, rows = x.new_empty if space is None else space.take, min(M, CHUNK)
    packed, h = new(_size_of_packed(rows, D, tile, programs, x.dtype)), new(rows, F)
    b_gate, b_up, b_down, mask = (0 if t is None else t for t in (w.gate_bias, w.up_bias, w.down_bias, token_mask))
    down = w.down if w.down.is_contiguous() else w.down.t()  # neuron-major as a [D, F] view or as [F, D]
    weights = w.gate, w.gate if w.up is None else w.up, down
    matrices: tuple[Any, ...] = (*weights, x, *weights, h)
    if use_tma:
        matrices = tuple(Matrix(t) for t in (*weights, packed[: rows * D].view(rows, D), *weights, h))
    l1, counts = statistics or (0, 0)
    counted, cap = watch or (0, 0)
    of_turns, outputs = (turns.counters, turns.heavy), (packed, h, y, l1, counts, turns.entries, counted)
    numbers = M, D, F, x.stride(0), programs, cap, int(watch is not None)
    programs = 1 if INTERPRETED else programs  # the interpreter runs programs one after the other
    kernel(programs, x, *matrices, b_gate, b_up, b_down, places, *of_turns, mask, *outputs, *numbers)
