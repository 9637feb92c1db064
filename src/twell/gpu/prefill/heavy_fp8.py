"""The heavy tokens of an FFN with FP8 weights, densely on tensor cores: heavy.py for e4m3, with plain tiles.

    h = a(relu(x Wg^T)) * (x Wu^T), 0 for hot neurons, e4m3 times e4m3        then        y = h Wd, bf16 times e4m3

h is not rounded to e4m3, so rows need no scale, and y is closer to the truth than a dense FP8 FFN's. One cooperative
launch, chunk by chunk, as in heavy.py: no capacity, no host synchronisation.
Workspace: h [CHUNK, F], 23 MB in bf16 at F 5632.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.cooperative import leave_for_all, wait_for_all
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel
from twell.gpu.shared.lists import LONG, N_WAITING, count_for_drift, count_heavy, heavy_tokens
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import INTERPRETED, GateTile, relu
from twell.reference import E4M3
from twell.saved import Turns

CHUNK = 2048  # heavy tokens at once


@triton.jit
def _heavy_fp8_kernel(
    i_x,  # e4m3 [M, D]
    i_gate,  # e4m3 [F, D]
    i_up,  # e4m3 [F, D]; plain FFN: unused
    i_down,  # e4m3 [F, D]
    i_x_scale,  # fp32 [M]
    i_gate_scale,  # fp32 [F]
    i_up_scale,  # fp32 [F] or unused
    i_down_scale,  # fp32 [D]
    i_places,  # int32 [F]: negative for hot neurons
    m_counters,  # int32, see Turns, as the next two
    i_heavy,
    i_entries,
    m_h,  # [CHUNK, F]
    o_y,  # [M, D], heavy rows
    m_watch,  # int32 [2] or unused
    M,
    D,
    F,
    cap,
    watches,  # 0 or 1
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    n_first, n_heavy = count_heavy(m_counters, M)
    if watches != 0:
        count_for_drift(m_watch, i_entries, m_counters, n_heavy, M, cap, LONG)
    dtype = m_h.dtype.element_ty
    waiting = m_counters + N_WAITING
    for begin in range(0, n_heavy, CHUNK):
        end = min(begin + CHUNK, n_heavy)
        tiles_m = tl.cdiv(end - begin, BM)
        if begin > 0:
            wait_for_all(waiting)  # nobody reads the last chunk's h any more
        for tile in range(tl.program_id(0), tiles_m * tl.cdiv(F, BN), tl.num_programs(0)):
            row = tile % tiles_m * BM + tl.arange(0, BM)
            has_row = begin + row < end
            token = tl.where(has_row, heavy_tokens(i_heavy, begin + row, n_first, end, M), 0).to(tl.int64)
            neuron = tile // tiles_m * BN + tl.arange(0, BN)
            z = tl.zeros((BM, BN), tl.float32)
            u = tl.zeros((BM, BN), tl.float32)
            for first in range(0, D, BK):
                d = first + tl.arange(0, BK)
                x = tl.load(i_x + token[:, None] * D + d[None, :], mask=has_row[:, None] & (d < D)[None, :], other=0.0)
                inside = (neuron < F)[:, None] & (d < D)[None, :]
                at = neuron[:, None].to(tl.int64) * D + d[None, :]
                gate = tl.load(i_gate + at, mask=inside, other=0.0)
                if INTERPRETED:  # it cannot multiply e4m3
                    x = x.to(tl.float16)
                    gate = gate.to(tl.float16)
                z = tl.dot(x, gate.T, z)
                if GATED:
                    up = tl.load(i_up + at, mask=inside, other=0.0)
                    if INTERPRETED:
                        up = up.to(tl.float16)
                    u = tl.dot(x, up.T, u)
            x_scale = tl.load(i_x_scale + token)[:, None]
            h = relu(z * x_scale * tl.load(i_gate_scale + neuron, mask=neuron < F, other=0.0)[None, :])
            h = h.to(dtype).to(tl.float32)
            if SQUARED:
                h = h * h
            if GATED:
                h = h * (u * x_scale * tl.load(i_up_scale + neuron, mask=neuron < F, other=0.0)[None, :])
            is_cold = tl.load(i_places + neuron, mask=neuron < F, other=-1) >= 0
            h = tl.where(is_cold[None, :], h, 0.0)
            at = m_h + row[:, None] * F + neuron[None, :]
            tl.store(at, h.to(dtype), mask=has_row[:, None] & (neuron < F)[None, :])
        wait_for_all(waiting)
        for tile in range(tl.program_id(0), tiles_m * tl.cdiv(D, BN), tl.num_programs(0)):
            row = tile % tiles_m * BM + tl.arange(0, BM)
            has_row = begin + row < end
            d = tile // tiles_m * BN + tl.arange(0, BN)
            y = tl.zeros((BM, BN), tl.float32)
            for first in range(0, F, BK):
                neuron = first + tl.arange(0, BK)
                inside = has_row[:, None] & (neuron < F)[None, :]
                h = tl.load(m_h + row[:, None] * F + neuron[None, :], mask=inside, other=0.0)
                inside = (neuron < F)[:, None] & (d < D)[None, :]
                down = tl.load(i_down + neuron[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
                y = tl.dot(h, down.to(dtype), y)
            y = y * tl.load(i_down_scale + d, mask=d < D, other=0.0)[None, :]
            token = heavy_tokens(i_heavy, begin + row, n_first, end, M).to(tl.int64)
            inside = has_row[:, None] & (d < D)[None, :]
            tl.store(o_y + token[:, None] * D + d[None, :], y.to(o_y.dtype.element_ty), mask=inside)
    if n_heavy > 0:
        leave_for_all(waiting)


@functools.cache
def _kernel(dtype: torch.dtype, tile: GateTile, gated: bool, squared: bool, chunk: int, long: int) -> Kernel:
    f32, i32 = torch.float32, torch.int32
    return Kernel(
        _heavy_fp8_kernel,
        (*[E4M3] * 4, *[f32] * 4, *[i32] * 4, dtype, dtype, i32, ANY, MULTIPLE, MULTIPLE, ANY, ANY),
        {
            "GATED": gated,
            "SQUARED": squared,
            "LONG": long,
            "CHUNK": chunk,
            "BM": tile.BM,
            "BN": tile.BN,
            "BK": tile.BK,
        },
        warps=tile.warps,
        stages=tile.stages,
        cooperative=True,
    )


def write_heavy_fp8_(
    y: Tensor,
    x: tuple[Tensor, Tensor],
    turns: Turns,
    gate: tuple[Tensor, Tensor],
    up: tuple[Tensor | None, Tensor | None],
    down: tuple[Tensor, Tensor],
    places: Tensor,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
    space: Space,
    watch: tuple[Tensor, int] | None = None,
) -> None:
    """Write the rows of y [M, D] that belong to heavy tokens. ``x``, ``gate``, ``up``, ``down`` [F, D]: e4m3 and
    scales; ``places``, ``watch``, ``programs``: as in ``write_heavy_``."""
    (M, D), F = y.shape, len(places)
    h = space.take(min(M, CHUNK), F, dtype=y.dtype)
    kernel = _kernel(y.dtype, tile, up[0] is not None, squared, CHUNK, LONG)
    counted, cap = watch or (0, 0)
    factors, scales = zip(x, gate, up, down, strict=True)
    given = (0 if t is None else t for t in (*factors, *scales))
    of_turns = turns.counters, turns.heavy, turns.entries
    numbers = M, D, F, cap, int(watch is not None)
    programs = 1 if INTERPRETED else programs  # the interpreter runs programs one after the other
    kernel(programs, *given, places, *of_turns, h, y, counted, *numbers)
