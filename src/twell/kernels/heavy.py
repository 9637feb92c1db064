"""The heavy tokens, densely on tensor cores: h = a(r) * (x Wu^T + bu) over all cold neurons, then y = h Wd + bd.

h takes the place of r in the gate (which holds r only where the bitmap has a bit), so there is no buffer that could be
too small. Both kernels loop over a count that
lives on the device: no host sync. The list's order may vary between runs; a row's sums do not depend on its place.

Few heavy tokens are the rule, and then the time is that of reading the weights once (40 MB at C 5000, D 2048, bf16: 12
us): small tiles spread them over the whole GPU. Many are a GEMM over listed rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import can_overlap, launch
from twell.kernels.lists import Lists, n_long
from twell.kernels.tiles import GateTile, bit_of_neuron, few, start_after, tile_of

FEW = 128  # heavy tokens


@triton.jit
def _count_heavy(i_marks, N_LONG: tl.constexpr):
    """Heavy tokens by their own count, and all heavy ones: see ``lists.py``."""
    n_over = tl.load(i_marks + 1)
    if n_over <= N_LONG:  # the tail has them
        n_over = tl.zeros_like(n_over)
    n_first = tl.load(i_marks)
    return n_first, n_first + n_over


@triton.jit
def _heavy_tokens(i_marks, r, n_first, n_heavy, M):
    """The r-th heavy tokens, int64; 0 beyond the last."""
    place = tl.where(r < n_first, r, M - 1 - (r - n_first))
    return tl.load(i_marks + 4 + M + place, mask=r < n_heavy, other=0).to(tl.int64)


@triton.jit
def _activations(i_gate, i_bitmap, token, cold, inside, C, words):
    """r, 0 where a neuron is not active: there the gate holds anything."""
    key = bit_of_neuron(cold)
    bits = tl.load(i_bitmap + token[:, None] * words + (key // 32)[None, :], mask=inside, other=0)
    active = ((bits >> (key % 32)[None, :]) & 1) != 0
    return tl.load(i_gate + token[:, None] * C + cold[None, :], mask=inside & active, other=0.0)


@triton.jit
def _up_tiles(
    i_x, i_up, i_up_bias, i_order, i_bitmap, i_marks, n_first, n_heavy, m_gate, M, D, C, words, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(n_heavy, BM)
    tiles_n = tl.cdiv(C, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        r = m * BM + tl.arange(0, BM)
        token = _heavy_tokens(i_marks, r, n_first, n_heavy, M)
        cold = n * BN + tl.arange(0, BN)
        neuron = cold
        if HAS_ORDER:
            neuron = tl.load(i_order + cold, mask=cold < C, other=0)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(D, BK)):
            d = k * BK + tl.arange(0, BK)
            x = tl.load(
                i_x + token[:, None] * x_stride + d[None, :], mask=(r[:, None] < n_heavy) & (d[None, :] < D), other=0.0
            )
            w = tl.load(
                i_up + neuron[None, :].to(tl.int64) * D + d[:, None],
                mask=(cold[None, :] < C) & (d[:, None] < D),
                other=0.0,
            )
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if HAS_UP_BIAS:
            acc += tl.load(i_up_bias + neuron, mask=cold < C, other=0.0).to(tl.float32)[None, :]
        place = m_gate + token[:, None] * C + cold[None, :]
        inside = (r[:, None] < n_heavy) & (cold[None, :] < C)
        a = _activations(m_gate, i_bitmap, token, cold, inside, C, words).to(tl.float32)
        if SQUARED:
            a = a * a
        tl.store(place, (a * acc).to(m_gate.dtype.element_ty), mask=inside)


@triton.jit
def _heavy_up_kernel(
    i_x,  # [M, D]
    i_up,  # [F, D]
    i_up_bias,  # [F] or unused
    i_order,  # [C] int32 or unused
    i_bitmap,  # [M, words]
    i_marks,  # int32, see Lists
    m_gate,  # [M, C]: r in, h out, in heavy rows
    M,
    D,
    C,
    words,
    x_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_BM: tl.constexpr,
    FEW_BN: tl.constexpr,
    FEW_BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    N_LONG: tl.constexpr,
    PRECISION: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    n_first, n_heavy = _count_heavy(i_marks, N_LONG)
    if n_heavy <= FEW:
        _up_tiles(i_x, i_up, i_up_bias, i_order, i_bitmap, i_marks, n_first, n_heavy, m_gate, M, D, C, words, x_stride,
                  FEW_BM, FEW_BN, FEW_BK, GROUP_M, SQUARED, HAS_UP_BIAS, HAS_ORDER, PRECISION)  # fmt: skip
    else:
        _up_tiles(i_x, i_up, i_up_bias, i_order, i_bitmap, i_marks, n_first, n_heavy, m_gate, M, D, C, words, x_stride,
                  BM, BN, BK, GROUP_M, SQUARED, HAS_UP_BIAS, HAS_ORDER, PRECISION)  # fmt: skip


@triton.jit
def _down_tiles(
    i_h, i_down, i_down_bias, i_order, i_marks, n_first, n_heavy, o_y, M, D, C,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SQUARED: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(n_heavy, BM)
    tiles_n = tl.cdiv(D, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        r = m * BM + tl.arange(0, BM)
        token = _heavy_tokens(i_marks, r, n_first, n_heavy, M)
        d = n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(C, BK)):
            cold = k * BK + tl.arange(0, BK)
            inside = (r[:, None] < n_heavy) & (cold[None, :] < C)
            h = tl.load(i_h + token[:, None] * C + cold[None, :], mask=inside, other=0.0)
            if SQUARED:  # a plain FFN: what is stored is r
                h = (h.to(tl.float32) * h.to(tl.float32)).to(h.dtype)
            row = cold
            if HAS_ORDER:
                row = tl.load(i_order + cold, mask=cold < C, other=0)
            w = tl.load(
                i_down + row[:, None].to(tl.int64) * D + d[None, :],
                mask=(cold[:, None] < C) & (d[None, :] < D),
                other=0.0,
            )
            acc = tl.dot(h, w, acc, input_precision=PRECISION)
        if HAS_DOWN_BIAS:
            acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        inside = (r[:, None] < n_heavy) & (d[None, :] < D)
        tl.store(o_y + token[:, None] * D + d[None, :], acc.to(o_y.dtype.element_ty), mask=inside)


@triton.jit
def _heavy_down_kernel(
    i_h,  # [M, C]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    i_order,  # [C] int32 or unused
    i_marks,  # int32, see Lists
    o_y,  # [M, D], heavy rows
    M,
    D,
    C,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_BM: tl.constexpr,
    FEW_BN: tl.constexpr,
    FEW_BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    N_LONG: tl.constexpr,
    PRECISION: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    n_first, n_heavy = _count_heavy(i_marks, N_LONG)
    if n_heavy <= FEW:
        _down_tiles(i_h, i_down, i_down_bias, i_order, i_marks, n_first, n_heavy, o_y, M, D, C,
                    FEW_BM, FEW_BN, FEW_BK, GROUP_M, SQUARED, HAS_DOWN_BIAS, HAS_ORDER, PRECISION)  # fmt: skip
    else:
        _down_tiles(i_h, i_down, i_down_bias, i_order, i_marks, n_first, n_heavy, o_y, M, D, C,
                    BM, BN, BK, GROUP_M, SQUARED, HAS_DOWN_BIAS, HAS_ORDER, PRECISION)  # fmt: skip


@triton.jit
def _heavy_l1_kernel(
    i_h,  # [M, C]
    i_marks,  # int32, see Lists
    o_l1,  # [M]
    M,
    C,
    N_LONG: tl.constexpr,
    BC: tl.constexpr,
    SQUARED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    n_first, n_heavy = _count_heavy(i_marks, N_LONG)
    for r in range(tl.program_id(0), n_heavy, tl.num_programs(0)):
        token = _heavy_tokens(i_marks, r, n_first, n_heavy, M)
        total = tl.zeros((BC,), tl.float32)
        for first in range(0, C, BC):
            cold = first + tl.arange(0, BC)
            h = tl.load(i_h + token * C + cold, mask=cold < C, other=0.0).to(tl.float32)
            if SQUARED:  # a plain FFN: what is stored is r
                h = h * h
            total += tl.abs(h)
        tl.store(o_l1 + token, tl.sum(total, axis=0))


def write_heavy_(
    y: Tensor,
    x: Tensor,
    gate: Tensor,
    bitmap: Tensor,
    lists: Lists,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    order: Tensor | None,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
    l1: Tensor | None = None,
) -> None:
    """Write the rows of y [M, D] that belong to heavy tokens, and their sums of abs(h) into ``l1`` [M].

    Overwrites their rows of ``gate``.
    """
    (M, D), C = x.shape, gate.shape[1]
    if M == 0:
        return
    small = few(tile)
    constants: dict[str, Any] = {
        "BM": tile.BM,
        "BN": tile.BN,
        "BK": tile.BK,
        "FEW": FEW,
        "FEW_BM": small.BM,
        "FEW_BN": small.BN,
        "FEW_BK": small.BK,
        "GROUP_M": 8,
        "N_LONG": n_long(M),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    marks, words = lists.marks, bitmap.shape[1]
    some_order = marks if order is None else order
    if up is not None:
        launch(
            _heavy_up_kernel,
            programs,
            (x, up, x if up_bias is None else up_bias, some_order, bitmap, marks, gate, M, D, C, words, x.stride(0)),
            constants
            | {"SQUARED": squared, "HAS_UP_BIAS": up_bias is not None, "HAS_ORDER": order is not None}
            | {"OVERLAPS": can_overlap()},
            warps=tile.warps,
            stages=tile.stages,
        )
    launch(
        _heavy_down_kernel,
        programs,
        (gate, down, x if down_bias is None else down_bias, some_order, marks, y, M, D, C),
        constants
        | {"SQUARED": squared and up is None, "HAS_DOWN_BIAS": down_bias is not None, "HAS_ORDER": order is not None}
        | {"OVERLAPS": can_overlap()},
        warps=tile.warps,
        stages=tile.stages,
    )
    if l1 is not None:
        launch(
            _heavy_l1_kernel,
            4 * programs,  # small ones, each waiting for memory most of the time
            (gate, marks, l1, M, C),
            {"N_LONG": n_long(M), "BC": 1024, "SQUARED": squared and up is None, "OVERLAPS": can_overlap()},
            warps=4,
            stages=1,
        )
