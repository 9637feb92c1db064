"""The steps of the heavy tokens' forward: device functions of the one kernel in ``heavy.py``.

Arguments that always go together are tuples: ``biases`` of gate, up and down; ``tokens``: places, heavy, counted,
n_first, begin and end of the chunk; ``out``: h, counts, y, sums; ``sizes``: M, D, F, x_stride. FFN is a ``HeavyFFN``,
TILE a ``GateTile``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twell.gpu.shared.cooperative import fence, wait_for_all
from twell.gpu.shared.gate import load_tile
from twell.gpu.shared.lists import heavy_tokens
from twell.gpu.shared.tiles import quarters, relu, tile_of


@triton.jit
def pack_rows(i_x, i_heavy, n_first, begin, end, o_packed, M, D, x_stride, BM: tl.constexpr, BD: tl.constexpr):
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
    z, u, left, first, second, row, has_row, m, n, k, sizes,
    FFN: tl.constexpr, TILE: tl.constexpr, DOWN: tl.constexpr, PACKED: tl.constexpr, USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one step of depth BK, from k * BK on, to both accumulators: x times rows of Wg and of Wu (plain FFN: of Wg,
    and the rows after them), or DOWN: h times columns of Wd and the columns after them. PACKED: rows of x or h start at
    m * BM; otherwise they are ``row``."""
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    _, D, F, x_stride = sizes
    if PACKED:
        a = left.load([m * BM, k * BK])
    else:
        col = k * BK + tl.arange(0, BK)
        inside = has_row[:, None] & (col[None, :] < (F if DOWN else D))
        a = tl.load(left + row[:, None] * (F if DOWN else x_stride) + col[None, :], mask=inside, other=0.0)
    if DOWN:
        b = load_tile(first, k * BK, n * 2 * BN, F, D, D, BK, BN, USE_TMA)
        c = load_tile(second, k * BK, n * 2 * BN + BN, F, D, D, BK, BN, USE_TMA)
    else:
        neuron = n * BN if FFN.gated else n * 2 * BN
        b = load_tile(first, neuron, k * BK, F, D, D, BN, BK, USE_TMA)
        c = load_tile(second, neuron if FFN.gated else neuron + BN, k * BK, F, D, D, BN, BK, USE_TMA)
        b = b.T
        c = c.T
    z = tl.dot(a, b, z, input_precision=PRECISION)
    return z, tl.dot(a, c, u, input_precision=PRECISION)


@triton.jit
def _column_blocks(z, u, BM: tl.constexpr, BN: tl.constexpr):
    """Eight column blocks of both accumulators: an epilogue lacks the registers for all at once."""
    a, b, c, d = quarters(z, BM, BN)
    fence("fence.acq_rel.cta")  # without it ptxas serialises the wgmmas: it does not see that the first sum is final
    e, f, g, h = quarters(u, BM, BN)
    return a, b, c, d, e, f, g, h


@triton.jit
def _store_h(z, u, m, n, biases, tokens, out, sizes, FFN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile of h; 0 for hot neurons."""
    i_gate_bias, i_up_bias, _ = biases
    i_places, i_heavy, i_counted, n_first, begin, end = tokens
    o_h, o_counts, _, _ = out
    M, _, F, _ = sizes
    dtype = o_h.dtype.element_ty
    row = m * BM + tl.arange(0, BM)
    has_row = begin + row < end
    counts = has_row
    if FFN.mask:
        token = heavy_tokens(i_heavy, begin + row, n_first, end, M)
        counts = tl.load(i_counted + token, mask=has_row, other=0) != 0
    blocks = _column_blocks(z, u, BM, BN)
    N: tl.constexpr = 4 if FFN.gated else 8
    for q in tl.static_range(N):
        neuron = (n * N + q) * (BN // 4) + tl.arange(0, BN // 4)
        place = tl.load(i_places + neuron, mask=neuron < F, other=-1)
        is_cold = place >= 0
        z = blocks[q]
        if FFN.gate_bias:
            z += tl.load(i_gate_bias + place, mask=is_cold, other=0.0).to(tl.float32)[None, :]
        r = relu(z).to(dtype)
        if FFN.statistics:
            fired = tl.sum(((r != 0) & counts[:, None]).to(tl.int32), axis=0)
            tl.atomic_add(o_counts + place, fired, mask=is_cold & (fired > 0), sem="relaxed")
        h = r.to(tl.float32)
        if FFN.squared:
            h = h * h
        if FFN.gated:
            u = blocks[4 + q]
            if FFN.up_bias:
                u += tl.load(i_up_bias + neuron, mask=is_cold, other=0.0).to(tl.float32)[None, :]
            h = h * u
        h = tl.where(is_cold[None, :], h, 0.0)
        inside = has_row[:, None] & (neuron[None, :] < F)
        tl.store(o_h + row[:, None] * F + neuron[None, :], h.to(dtype), mask=inside)


@triton.jit
def _store_y(
    left, right, m, n, share, biases, tokens, out, sizes, FFN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Store a tile of y, or SHARED: of one share's sums [shares, end - begin, D]."""
    _, _, i_down_bias = biases
    _, i_heavy, _, n_first, begin, end = tokens
    _, _, o_y, o_sums = out
    M, D, _, _ = sizes
    row = m * BM + tl.arange(0, BM)
    rows = o_sums + (share * (end - begin) + row) * D
    if not SHARED:
        rows = o_y + heavy_tokens(i_heavy, begin + row, n_first, end, M).to(tl.int64) * D
    blocks = _column_blocks(left, right, BM, BN)
    for q in tl.static_range(8):
        part = blocks[q]
        d = (n * 8 + q) * (BN // 4) + tl.arange(0, BN // 4)
        if FFN.down_bias and not SHARED:
            part += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        inside = (begin + row < end)[:, None] & (d[None, :] < D)
        tl.store(rows[:, None] + d[None, :], part.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    z, u, m, n, share, biases, tokens, out, sizes, FFN: tl.constexpr, TILE: tl.constexpr, DOWN: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    if DOWN:
        _store_y(z, u, m, n, share, biases, tokens, out, sizes, FFN, TILE.BM, TILE.BN, SHARED)
    else:
        _store_h(z, u, m, n, biases, tokens, out, sizes, FFN, TILE.BM, TILE.BN)


@triton.jit
def product_tiles(
    left, first, second, biases, tokens, shares, out, sizes,
    FFN: tl.constexpr, TILE: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
    DOWN: tl.constexpr, SHARED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of h, or DOWN: of y. One loop over the steps of all tiles would issue a tile's first
    loads before the last tile's epilogue, but Triton 3.6 then serialises the wgmmas, or does not pipeline them."""
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    _, i_heavy, _, n_first, begin, end = tokens
    M, D, F, _ = sizes
    tiles_m = tl.cdiv(end - begin, BM)
    tiles_n = tl.cdiv(D, 2 * BN) if DOWN else tl.cdiv(F, BN if FFN.gated else 2 * BN)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(F if DOWN else D, TILE.BK), shares)
    for tile in range(tl.program_id(0), tiles * shares, tl.num_programs(0)):
        share = tile // tiles
        m, n = tile_of(tile % tiles, tiles_m, tiles_n, GROUP_M)
        row = m * BM + tl.arange(0, BM)
        has_row = begin + row < end
        if not DOWN and not PACKED:
            row = tl.where(has_row, heavy_tokens(i_heavy, begin + row, n_first, end, M), 0).to(tl.int64)
        z = tl.zeros((BM, BN), tl.float32)
        u = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            z, u = _add_products(z, u, left, first, second, row, has_row, m, n, share * steps + k, sizes, FFN, TILE,
                                 DOWN, PACKED, USE_TMA, PRECISION)  # fmt: skip
        _store(z, u, m, n, share, biases, tokens, out, sizes, FFN, TILE, DOWN, SHARED)


@triton.jit
def sum_shares(
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
def l1_rows(i_h, i_heavy, n_first, begin, end, o_l1, M, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
def wait_with_tma(counter, USE_TMA: tl.constexpr):
    """``wait_for_all``, after which TMA, too, can read data that was written by pointers."""
    if USE_TMA:
        fence("fence.proxy.async.global")
    wait_for_all(counter)
    if USE_TMA:
        fence("fence.proxy.async.global")
