"""The steps of the heavy tokens' backward: device functions of the one kernel in ``heavy_backward.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from twell.gpu.shared.lists import heavy_tokens
from twell.gpu.shared.tiles import quarters, relu, tile_of


@triton.jit
def sort_heavy(i_heavy, o_flags, o_tokens, n_first, n_heavy, M, BLOCK: tl.constexpr):
    """Write this program's share of the heavy tokens, ascending, to its place in ``o_tokens`` [n_heavy]."""
    share = tl.cdiv(M, tl.num_programs(0))
    begin = tl.program_id(0) * share
    end = min(begin + share, M)
    at = tl.arange(0, BLOCK)
    for first in range(begin, end, BLOCK):
        tl.store(o_flags + first + at, tl.zeros((BLOCK,), tl.int32), mask=first + at < end)
    tl.debug_barrier()
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n_heavy, BLOCK):
        r = first + at
        token = heavy_tokens(i_heavy, r, n_first, n_heavy, M)
        before += (token < begin).to(tl.int32)
        tl.store(o_flags + token, tl.full((BLOCK,), 1, tl.int32), mask=(token >= begin) & (token < end))
    place = tl.sum(before, axis=0)
    tl.debug_barrier()
    for first in range(begin, end, BLOCK):
        flag = tl.load(o_flags + first + at, mask=first + at < end, other=0)
        tl.store(o_tokens + place + tl.cumsum(flag, axis=0) - flag, first + at, mask=flag != 0)
        place += tl.sum(flag, axis=0)


@triton.jit
def factor_tiles(
    i_dy, i_l1, i_x, i_gate, i_up, i_down, i_gate_bias, i_up_bias, i_order, i_counted, i_tokens, n, o_dz, o_du, o_h,
    D, C, width, x_stride, GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_L1: tl.constexpr, HAS_MASK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz, du and h [n, width] of the n ``i_tokens``. o_dz and o_du hold r and u first."""
    dtype = o_dz.dtype.element_ty
    tiles_m = tl.cdiv(n, BM)
    tiles_n = tl.cdiv(C, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, c = tile_of(tile, tiles_m, tiles_n, 8)
        row = m * BM + tl.arange(0, BM)
        has_row = row < n
        token = tl.load(i_tokens + row, mask=has_row, other=0).to(tl.int64)
        at = row[:, None].to(tl.int64) * width
        for which in range(2 + GATED):  # gate, up, down; not unrolled: one of them fills the registers
            factor = i_x
            stride = x_stride
            weights = i_gate
            bias = i_gate_bias
            values = o_dz
            if which == 1 and GATED:
                weights = i_up
                bias = i_up_bias
                values = o_du
            if which == 1 + GATED:
                factor = i_dy
                stride = D
                weights = i_down
            tile_cold = c * BN + tl.arange(0, BN)
            tile_neuron = tile_cold
            if HAS_ORDER:
                tile_neuron = tl.load(i_order + tile_cold, mask=tile_cold < C, other=0)
            # Scalars are chosen: with Triton 3.6 tensors of pointers that were chosen are not copied asynchronously.
            rows = factor + token * stride
            columns = weights + tile_neuron.to(tl.int64) * D
            has_column = tile_cold < C
            acc = tl.zeros((BM, BN), tl.float32)
            for k in tl.range(0, tl.cdiv(D, BK), num_stages=STAGES):
                d = k * BK + tl.arange(0, BK)
                left = tl.load(rows[:, None] + d[None, :], mask=has_row[:, None] & (d < D)[None, :], other=0.0)
                right = tl.load(columns[None, :] + d[:, None], mask=has_column[None, :] & (d < D)[:, None], other=0.0)
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
            parts = quarters(acc, BM, BN)
            if which <= GATED:
                for q in tl.static_range(4):
                    part = parts[q]
                    cold = c * BN + q * (BN // 4) + tl.arange(0, BN // 4)
                    if HAS_GATE_BIAS | HAS_UP_BIAS:
                        biased = (cold < C) & (((which == 0) & HAS_GATE_BIAS) | ((which == 1) & HAS_UP_BIAS))
                        neuron = cold
                        if HAS_ORDER:
                            neuron = tl.load(i_order + cold, mask=cold < C, other=0)
                        part += tl.load(bias + neuron, mask=biased, other=0.0).to(tl.float32)[None, :]
                    part = tl.where(which == 0, relu(part), part)
                    inside = has_row[:, None] & (cold < C)[None, :]
                    tl.store(values + at + cold[None, :], part.to(dtype), mask=inside)
            else:
                tl.debug_barrier()  # r and u were written by other threads
                for q in tl.static_range(4):
                    dh = parts[q]
                    cold = c * BN + q * (BN // 4) + tl.arange(0, BN // 4)
                    place = at + cold[None, :]
                    inside = has_row[:, None] & (cold < C)[None, :]
                    a = tl.load(o_dz + place, mask=inside, other=0.0).to(tl.float32)
                    slope = tl.where(a != 0, 1.0, 0.0)
                    if SQUARED:
                        slope = 2.0 * a
                        a = a * a
                    h = a
                    if GATED:
                        u = tl.load(o_du + place, mask=inside, other=0.0).to(tl.float32)
                        h = a * u
                        slope = slope * u
                    if HAS_L1:
                        l1 = tl.zeros((BM,), tl.float32) + tl.load(i_l1).to(tl.float32)
                        if HAS_MASK:
                            l1 = tl.where(tl.load(i_counted + token, mask=has_row, other=0) != 0, l1, 0.0)
                        dh += tl.where(h > 0, l1[:, None], tl.where(h < 0, -l1[:, None], 0.0))
                    tl.store(o_h + place, h.to(dtype), mask=inside)
                    tl.store(o_dz + place, (dh * slope).to(dtype), mask=inside)
                    if GATED:
                        tl.store(o_du + place, (dh * a).to(dtype), mask=inside)


@triton.jit
def dx_tiles(
    i_gate, i_up, i_order, i_tokens, n, i_dz, i_du, m_dx, D, C, width, GATED: tl.constexpr, HAS_ORDER: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dx of the n ``i_tokens``. Returns the number of tiles."""
    tiles_m = tl.cdiv(n, BM)
    tiles_d = tl.cdiv(D, BD)
    for tile in range(tl.program_id(0), tiles_m * tiles_d, tl.num_programs(0)):
        m, column = tile_of(tile, tiles_m, tiles_d, 8)
        row = m * BM + tl.arange(0, BM)
        has_row = row < n
        acc = tl.zeros((BM, BD), tl.float32)
        for which in range(1 + GATED):
            factors = i_dz
            weights = i_gate
            if which == 1:
                factors = i_du
                weights = i_up
            d = column * BD + tl.arange(0, BD)
            for k in tl.range(0, tl.cdiv(C, BK), num_stages=2 * STAGES - 2 if HAS_ORDER else STAGES):
                cold = k * BK + tl.arange(0, BK)
                at = row[:, None].to(tl.int64) * width + cold[None, :]
                left = tl.load(factors + at, mask=has_row[:, None] & (cold < C)[None, :], other=0.0)
                neuron = cold
                if HAS_ORDER:
                    neuron = tl.load(i_order + cold, mask=cold < C, other=0)
                at = neuron[:, None].to(tl.int64) * D + d[None, :]
                right = tl.load(weights + at, mask=(cold < C)[:, None] & (d < D)[None, :], other=0.0)
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
        token = tl.load(i_tokens + row, mask=has_row, other=0).to(tl.int64)
        parts = quarters(acc, BM, BD)
        for q in tl.static_range(4):
            d = column * BD + q * (BD // 4) + tl.arange(0, BD // 4)
            at = m_dx + token[:, None] * D + d[None, :]
            inside = has_row[:, None] & (d < D)[None, :]
            total = parts[q] + tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, total.to(m_dx.dtype.element_ty), mask=inside)
    return tiles_m * tiles_d


@triton.jit
def _add(m_sums, m_rests, total, mask, goes_on, keeps):
    """m_sums += total. ``keeps``: store the rounding error ("rest") for the next chunk; ``goes_on``: add the last
    chunk's."""
    total += tl.load(m_sums, mask=mask, other=0.0).to(tl.float32)
    if goes_on:
        total += tl.load(m_rests, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(m_sums.dtype.element_ty)
    tl.store(m_sums, rounded, mask=mask)
    if keeps:
        rest = total - rounded.to(tl.float32)
        rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # for sums that are not finite
        tl.store(m_rests, rest.to(m_rests.dtype.element_ty), mask=mask)


@triton.jit
def weight_tiles(
    turn, i_x, i_dy, i_order, i_tokens, n, i_dz, i_du, i_h, m_gate, m_up, m_down, m_rests, goes_on, keeps,
    D, C, width, x_stride, WANTS_GATE: tl.constexpr, WANTS_UP: tl.constexpr, WANTS_DOWN: tl.constexpr,
    HAS_ORDER: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the weights' gradients: this program's share of the tiles that are wanted, from ``turn`` on."""
    tiles_c = tl.cdiv(C, BM)
    tiles_d = tl.cdiv(D, BD)
    tiles = tiles_c * tiles_d
    for tile in range(turn, (WANTS_GATE + WANTS_UP + WANTS_DOWN) * tiles, tl.num_programs(0)):
        which = tile // tiles
        c, column = tile_of(tile % tiles, tiles_c, tiles_d, 8)
        factors = i_dz
        sums = m_gate
        rows = i_x
        stride = x_stride
        if which >= WANTS_GATE:
            factors = i_du
            sums = m_up
        if which >= WANTS_GATE + WANTS_UP:
            factors = i_h
            sums = m_down
            rows = i_dy
            stride = D
        cold = c * BM + tl.arange(0, BM)
        d = column * BD + tl.arange(0, BD)
        acc = tl.zeros((BM, BD), tl.float32)
        for k in tl.range(0, tl.cdiv(n, BK), num_stages=2 * STAGES - 2):
            r = k * BK + tl.arange(0, BK)
            token = tl.load(i_tokens + r, mask=r < n, other=0).to(tl.int64)
            at = r[None, :].to(tl.int64) * width + cold[:, None]
            left = tl.load(factors + at, mask=(r < n)[None, :] & (cold < C)[:, None], other=0.0)
            at = token[:, None] * stride + d[None, :]
            right = tl.load(rows + at, mask=(r < n)[:, None] & (d < D)[None, :], other=0.0)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        neuron = cold
        if HAS_ORDER:
            neuron = tl.load(i_order + cold, mask=cold < C, other=0)
        parts = quarters(acc, BM, BD)
        for q in tl.static_range(4):
            d = column * BD + q * (BD // 4) + tl.arange(0, BD // 4)
            at = neuron[:, None].to(tl.int64) * D + d[None, :]
            rest = (which.to(tl.int64) * C + cold[:, None]) * D + d[None, :]
            inside = (cold < C)[:, None] & (d < D)[None, :]
            _add(sums + at, m_rests + rest, parts[q], inside, goes_on, keeps)


@triton.jit
def bias_tiles(
    i_order, n, i_dz, i_du, m_gate_bias, m_up_bias, m_rests, goes_on, keeps, C, width,
    WANTS_GATE_BIAS: tl.constexpr, WANTS_UP_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add to the biases' gradients. The last programs start, since the first may have more tiles of the weights."""
    tiles_c = tl.cdiv(C, BC)
    last = tl.num_programs(0) - 1
    for tile in range(last - tl.program_id(0), (WANTS_GATE_BIAS + WANTS_UP_BIAS) * tiles_c, tl.num_programs(0)):
        which = tile // tiles_c
        factors = i_dz
        sums = m_gate_bias
        if which >= WANTS_GATE_BIAS:
            factors = i_du
            sums = m_up_bias
        cold = tile % tiles_c * BC + tl.arange(0, BC)
        total = tl.zeros((BM, BC), tl.float32)
        for k in range(tl.cdiv(n, BM)):
            r = k * BM + tl.arange(0, BM)
            at = r[:, None].to(tl.int64) * width + cold[None, :]
            total += tl.load(factors + at, mask=(r < n)[:, None] & (cold < C)[None, :], other=0.0).to(tl.float32)
        neuron = cold
        if HAS_ORDER:
            neuron = tl.load(i_order + cold, mask=cold < C, other=0)
        _add(sums + neuron, m_rests + which * C + cold, tl.sum(total, axis=0), cold < C, goes_on, keeps)
