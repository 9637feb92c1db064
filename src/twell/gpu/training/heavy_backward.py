"""The backward of heavy tokens, densely on tensor cores: one launch, as many tokens as the device counted.

A heavy token keeps nothing for the backward: its cold neurons are computed again from x. With r = relu(x Wg^T + bg),
u = x Wu^T + bu, a = r or r^2, h = a u and dh = dy Wd^T + l1 sign(h) (h = a, and no u, in a plain FFN):

    dz = dh u a'(r)    du = dh a    dx += dz Wg + du Wu    dWg += dz^T x    dWu += du^T x    dWd += h^T dy

The tail's kernels have written dx and the weights' gradients before; all is added in fp32 to what is there.

One cooperative launch of at most a program a multiprocessor; no heavy token is the rule, and then it returns at once.
    1. The heavy tokens in ascending order: sums over them must not depend on how they came into the list. Program p
       takes the p-th share of all tokens, flags the heavy ones and counts those before its share.
    2. For every chunk of them: dz, du and h, into a workspace of [chunk, C] each; then dx and the weights' gradients.
All programs wait for each other between steps. Tiles are dealt out in turn; no sum is shared between programs.

More than a chunk is summed chunk by chunk, and a 16-bit gradient rounded as often, where a dense backward rounds once.
So there are at most four chunks, or what rounding takes is kept for the next chunk ("rests").

Bytes, bf16, C 5632, D 2048, few tokens: the weights once and Wg and Wu once more (115 MB), their gradients read and
written (138 MB). Workspace: 3 C values a token of a chunk, 69 MB up to M 8192, and at most 3 C D for rests: 138 MB.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.prefill.heavy import leave_for_all, wait_for_all
from twell.gpu.prefill.lists import N_WAITING, count_heavy, heavy_tokens
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, ceil_div
from twell.gpu.shared.replay import INTERPRETED, Space
from twell.gpu.shared.tiles import device_facts, quarters, relu, tile_of
from twell.gpu.training.weight_gradients import NeuronGradients
from twell.saved import Turns

_CHUNK = 2048  # heavy tokens at once
_ROUNDINGS = 4  # of a 16-bit gradient, at most, if nothing is kept of what they take
_SORT = 1024  # tokens looked at together while sorting


class HeavyTiles(NamedTuple):
    """Tiles of the GEMMs: BM tokens x BN neurons, then BM tokens or neurons x BD, both BK deep.

    Up to FEW tokens they are FEW_BM x FEW_BN and FEW_BM x FEW_BD: narrow, so that every processor has one, and deep.
    """

    BM: int
    BN: int
    BD: int
    BK: int
    FEW: int
    FEW_BM: int
    FEW_BN: int
    FEW_BD: int
    FEW_BK: int
    warps: int
    stages: int


_BY_CAPABILITY = {
    80: HeavyTiles(128, 128, 128, 64, 128, 64, 64, 32, 64, 8, 4),
    86: HeavyTiles(128, 128, 128, 64, 128, 64, 64, 32, 64, 8, 3),
    90: HeavyTiles(128, 128, 256, 64, 256, 64, 64, 32, 128, 8, 4),
    100: HeavyTiles(128, 128, 128, 64, 256, 64, 64, 32, 128, 8, 4),
    120: HeavyTiles(128, 128, 128, 64, 128, 64, 64, 32, 64, 8, 3),
}
_TINY = HeavyTiles(32, 32, 64, 32, 16, 16, 16, 16, 32, 4, 1)  # for Triton's interpreter


def heavy_tiles(capability: int, dtype: torch.dtype) -> HeavyTiles:
    """Chosen by registers and shared memory (tests/test_heavy_backward.py), not by measurement."""
    tiles = _BY_CAPABILITY[max(c for c in _BY_CAPABILITY if c <= capability)]
    if dtype == torch.float32:
        tiles = tiles._replace(BM=64, BN=64, BD=64, BK=32, FEW_BK=32, stages=3)
    return tiles


@triton.jit
def _sort_heavy(i_heavy, o_flags, o_tokens, n_first, n_heavy, M, BLOCK: tl.constexpr):
    """This program's share of the heavy tokens, ascending, into its place in ``o_tokens`` [n_heavy]."""
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
def _factor_tiles(
    i_dy, i_l1, i_x, i_gate, i_up, i_down, i_gate_bias, i_up_bias, i_order, i_counted, i_tokens, n, o_dz, o_du, o_h,
    D, C, width, x_stride, GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_L1: tl.constexpr, HAS_MASK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz, du and h [n, width] of the n ``i_tokens``. First r and u take the places of dz and du."""
    dtype = o_dz.dtype.element_ty
    tiles_m = tl.cdiv(n, BM)
    tiles_n = tl.cdiv(C, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, c = tile_of(tile, tiles_m, tiles_n, 8)
        row = m * BM + tl.arange(0, BM)
        has_row = row < n
        token = tl.load(i_tokens + row, mask=has_row, other=0).to(tl.int64)
        at = row[:, None].to(tl.int64) * width
        for which in range(2 + GATED):  # gate, up, down: not unrolled, since one of them fills the registers
            rows = i_x + token * x_stride
            weights = i_gate
            bias = i_gate_bias
            values = o_dz
            if which == 1 and GATED:
                weights = i_up
                bias = i_up_bias
                values = o_du
            if which == 1 + GATED:
                rows = i_dy + token * D
                weights = i_down
            tile_cold = c * BN + tl.arange(0, BN)
            tile_neuron = tile_cold
            if HAS_ORDER:
                tile_neuron = tl.load(i_order + tile_cold, mask=tile_cold < C, other=0)
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
def _dx_tiles(
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
    """m_sums += total. What rounding takes from a sum is kept for the next chunk, or was by the last one."""
    total += tl.load(m_sums, mask=mask, other=0.0).to(tl.float32)
    if goes_on:
        total += tl.load(m_rests, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(m_sums.dtype.element_ty)
    tl.store(m_sums, rounded, mask=mask)
    if keeps:
        rest = total - rounded.to(tl.float32)
        rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # a sum that is not finite
        tl.store(m_rests, rest.to(m_rests.dtype.element_ty), mask=mask)


@triton.jit
def _weight_tiles(
    turn, i_x, i_dy, i_order, i_tokens, n, i_dz, i_du, i_h, m_gate, m_up, m_down, m_rests, goes_on, keeps,
    D, C, width, x_stride, WANTS_GATE: tl.constexpr, WANTS_UP: tl.constexpr, WANTS_DOWN: tl.constexpr,
    HAS_ORDER: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the weights' gradients: one tile after the other of those wanted, this program from ``turn`` on."""
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
def _bias_tiles(
    i_order, n, i_dz, i_du, m_gate_bias, m_up_bias, m_rests, goes_on, keeps, C, width,
    WANTS_GATE_BIAS: tl.constexpr, WANTS_UP_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add to the biases' gradients. The last programs begin: the first ones may have more tiles of the weights."""
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


@triton.jit
def _heavy_backward_kernel(
    i_dy,  # [M, D]
    i_l1,  # [] or unused: the gradient of sum |h|
    i_x,  # [M, D]
    i_gate,  # [F, D]
    i_up,  # [F, D] or unused
    i_down,  # [F, D], neuron-major
    i_gate_bias,  # [F] or unused
    i_up_bias,  # [F] or unused
    i_order,  # [F] int32 or unused: rows of the weights, H hot ones first
    i_counted,  # [M] bool or unused: tokens whose |h| counts
    m_counters,  # see Turns
    i_heavy,  # likewise
    m_dx,  # [M, D] or unused; likewise the others
    m_gate,  # [F, D]
    m_up,  # [F, D]
    m_down,  # [F, D], neuron-major
    m_gate_bias,  # [F]
    m_up_bias,  # [F]
    m_space,  # see _size_of_space
    M,
    D,
    C,
    H,
    x_stride,
    chunk,  # tokens at once
    keeps_rests,  # 0 or 1
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WANTS_DX: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr,
    WANTS_UP_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SORT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_BM: tl.constexpr,
    FEW_BN: tl.constexpr,
    FEW_BD: tl.constexpr,
    FEW_BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_order += H
    n_first, n_heavy = count_heavy(m_counters, M)
    if n_heavy > 0:
        programs = tl.num_programs(0)
        width = tl.cdiv(C, 16) * 16
        tokens = m_space.to(tl.pointer_type(tl.int32))
        size = chunk.to(tl.int64) * width
        dz = m_space + tl.cdiv(M, 16).to(tl.int64) * (16 * 64 // m_space.dtype.element_ty.primitive_bitwidth)
        du = dz + size
        h = du + size
        rests = h + size
        _sort_heavy(i_heavy, tokens + M, tokens, n_first, n_heavy, M, SORT)
        wait_for_all(m_counters + N_WAITING)
        for first in range(0, n_heavy, chunk):
            n = min(chunk, n_heavy - first)
            is_last = first + n == n_heavy
            own = tokens + first
            if n <= FEW:
                _factor_tiles(
                    i_dy, i_l1, i_x, i_gate, i_up, i_down, i_gate_bias, i_up_bias, i_order, i_counted, own, n,
                    dz, du, h, D, C, width, x_stride, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_ORDER, HAS_L1,
                    HAS_MASK, FEW_BM, FEW_BN, FEW_BK, STAGES, PRECISION,
                )  # fmt: skip
            else:
                _factor_tiles(
                    i_dy, i_l1, i_x, i_gate, i_up, i_down, i_gate_bias, i_up_bias, i_order, i_counted, own, n,
                    dz, du, h, D, C, width, x_stride, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_ORDER, HAS_L1,
                    HAS_MASK, BM, BN, BK, STAGES, PRECISION,
                )  # fmt: skip
            wait_for_all(m_counters + N_WAITING)
            turn = tl.program_id(0)  # tiles go round: who had none of the last goes first
            if WANTS_DX:
                if n <= FEW:
                    done = _dx_tiles(i_gate, i_up, i_order, own, n, dz, du, m_dx, D, C, width, GATED, HAS_ORDER,
                                     FEW_BM, FEW_BD, FEW_BK, STAGES, PRECISION)  # fmt: skip
                else:
                    done = _dx_tiles(i_gate, i_up, i_order, own, n, dz, du, m_dx, D, C, width, GATED, HAS_ORDER,
                                     BM, BD, BK, STAGES, PRECISION)  # fmt: skip
                turn = (turn + programs - done % programs) % programs
            goes_on = (first > 0) & (keeps_rests != 0)
            keeps = (is_last == 0) & (keeps_rests != 0)
            if WANTS_GATE | WANTS_UP | WANTS_DOWN:
                _weight_tiles(turn, i_x, i_dy, i_order, own, n, dz, du, h, m_gate, m_up, m_down, rests, goes_on, keeps,
                              D, C, width, x_stride, WANTS_GATE, WANTS_UP, WANTS_DOWN, HAS_ORDER,
                              BM, BD, BK, STAGES, PRECISION)  # fmt: skip
            if WANTS_GATE_BIAS | WANTS_UP_BIAS:
                _bias_tiles(i_order, n, dz, du, m_gate_bias, m_up_bias, rests + 3 * C.to(tl.int64) * D, goes_on, keeps,
                            C, width, WANTS_GATE_BIAS, WANTS_UP_BIAS, HAS_ORDER, BM, FEW_BD)  # fmt: skip
            if is_last == 0:
                wait_for_all(m_counters + N_WAITING)
        leave_for_all(m_counters + N_WAITING)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    l1_dtype: torch.dtype | None,
    has_mask: bool,
    whole: bool,
    kind: tuple[bool, ...],
    wants: tuple[bool, ...],
    tiles: HeavyTiles,
) -> Kernel:
    """``whole``: C is a multiple of 16; ``wants``: dx and the fields of NeuronGradients."""
    gated, squared, has_gate_bias, has_up_bias, has_order = kind
    values = (dtype,) * 6
    arguments = (dtype, l1_dtype or dtype, *values, torch.int32, torch.bool if has_mask else dtype)
    of_turns = (torch.int32, torch.int32)
    names = ("DX", "GATE", "UP", "DOWN", "GATE_BIAS", "UP_BIAS")
    blocks = tiles._asdict()
    warps, stages = blocks.pop("warps"), blocks.pop("stages")
    return Kernel(
        _heavy_backward_kernel,
        (*arguments, *of_turns, *values, dtype, ANY, MULTIPLE, MULTIPLE if whole else ANY, ANY, MULTIPLE, ANY, ANY),
        {"GATED": gated, "SQUARED": squared, "HAS_GATE_BIAS": has_gate_bias, "HAS_UP_BIAS": has_up_bias}
        | {"HAS_ORDER": has_order, "HAS_L1": l1_dtype is not None, "HAS_MASK": has_mask}
        | {f"WANTS_{name}": wanted for name, wanted in zip(names, wants, strict=True)}
        | {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", "SORT": _SORT}
        | blocks
        | {"STAGES": stages},
        warps=warps,
        stages=stages,
        cooperative=True,
    )


def _chunks(M: int, D: int, dtype: torch.dtype) -> tuple[int, bool]:
    """(tokens at once, whether rests are kept): a few roundings, or rests, whichever takes less room."""
    chunk = max(_CHUNK, ceil_div(M, _ROUNDINGS))
    if dtype == torch.float32 or chunk > _CHUNK + D:  # rests take the room of D tokens
        return min(M, _CHUNK), dtype != torch.float32
    return min(M, chunk), False


def _size_of_space(x: Tensor, n_cold: int, chunk: int, keeps_rests: bool) -> int:
    """Elements: int32 [M] heavy tokens and [M] flags, a multiple of 128 bytes together; dz, du, h [chunk, C rounded up
    to 16s]; rests of the weights' gradients [3, C, D] and of the biases' [2, C]."""
    M, D = x.shape
    size = ceil_div(M, 16) * (128 // x.element_size()) + 3 * chunk * ceil_div(n_cold, 16) * 16
    return size + (n_cold * (3 * D + 2) if keeps_rests else 0)


def add_heavy_gradients_(
    dx: Tensor | None,
    out: NeuronGradients,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    order: Tensor,
    n_hot: int,
    turns: Turns,
    token_mask: Tensor | None,
    *,
    squared: bool,
    programs: int,
    space: Space | None = None,
    chunk: int | None = None,
    tiles: HeavyTiles | None = None,
) -> None:
    """Add to dx [M, D] and ``out`` what the cold neurons of heavy tokens give. All on one device, aligned to 16 bytes.

    x: rows lie a multiple of 16 elements apart; the others are contiguous, ``gate``, ``up``, ``down`` [F, D].
    ``order`` int32 [F]: the ``n_hot`` hot neurons first. ``dl1`` []: the gradient of sum abs(h) over the tokens in
    ``token_mask`` bool [M]. ``turns``: the last of its counters is 0 before and after, but not meanwhile: not for two
    streams at once. ``programs``: at most the multiprocessors. ``chunk``, ``tiles``: for tests.
    """
    (M, D), n_cold = x.shape, len(gate) - n_hot
    targets = (dx, *out)
    wants = tuple(t is not None for t in targets)
    if M == 0 or n_cold == 0 or not any(wants):
        return
    at_once, keeps_rests = _chunks(M, D, x.dtype) if chunk is None else (min(M, chunk), M > chunk)
    if tiles is None:
        tiles = _TINY if INTERPRETED else heavy_tiles(device_facts(x.device.index)[0], x.dtype)
    has_mask = dl1 is not None and token_mask is not None
    kernel = _kernel(
        x.dtype,
        None if dl1 is None else dl1.dtype,
        has_mask,
        n_cold % 16 == 0,
        (up is not None, squared, gate_bias is not None, up_bias is not None, n_hot > 0),
        wants,
        tiles,
    )
    kernel(
        1 if INTERPRETED else programs,  # the interpreter runs one after the other
        dy,
        dy if dl1 is None else dl1,
        x,
        gate,
        x if up is None else up,
        down,
        x if gate_bias is None else gate_bias,
        x if up_bias is None else up_bias,
        order,
        token_mask if has_mask else x,
        turns.counters,
        turns.heavy,
        *(x if t is None else t for t in targets),
        (x.new_empty if space is None else space.take)(_size_of_space(x, n_cold, at_once, keeps_rests)),
        M,
        D,
        n_cold,
        n_hot,
        x.stride(0),
        at_once,
        int(keeps_rests),
    )
