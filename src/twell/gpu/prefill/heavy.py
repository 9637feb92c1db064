"""The heavy tokens, densely on tensor cores: h = a(r) * (x Wu^T + bu) over all cold neurons, then y = h Wd + bd.

h takes the place of r in the gate (which holds r only where the bitmap has a bit), so there is no buffer that could be
too small. One launch, whose programs all run at the same time (a cooperative launch) and wait for each other between
the two products. They loop over a count that lives on the device: no host sync. The list's order may vary between runs;
a row's sums do not depend on its place.

Few heavy tokens are the rule, and then the time is that of reading the weights once (40 MB at C 5000, D 2048, bf16: 12
us): small tiles spread them over the whole GPU. Many are a GEMM over listed rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.prefill.lists import rooms
from twell.gpu.shared.launch import ANY, INTERPRETED, MULTIPLE, Kernel
from twell.gpu.shared.tiles import GateTile, bit_of_neuron, few, tile_of
from twell.reference import Weights

FEW = 128  # heavy tokens
BARRIER = tl.constexpr(3)  # of marks: where programs count themselves that wait for each other; 0 between kernels


@triton.jit
def _count_heavy(i_marks, M):
    """Heavy tokens by their own count, and all heavy ones: see ``lists.py``."""
    n_over = tl.load(i_marks + 1)
    n_long, _ = rooms(M)
    if n_over <= n_long:  # the tail has them
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
    i_x, i_up, i_up_bias, i_order, i_bitmap, i_marks, n_first, n_heavy, m_gate, M, D, C, H, words, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(n_heavy, BM)
    tiles_n = tl.cdiv(C, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        r = m * BM + tl.arange(0, BM)
        token = _heavy_tokens(i_marks, r, n_first, n_heavy, M)
        cold = n * BN + tl.arange(0, BN)
        neuron = tl.load(i_order + H + cold, mask=cold < C, other=0)
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
def _down_tiles(
    i_h, i_down, i_down_bias, i_order, i_marks, n_first, n_heavy, o_y, M, D, C, H,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SQUARED: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr, PRECISION: tl.constexpr,
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
            row = tl.load(i_order + H + cold, mask=cold < C, other=0)
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
def _l1_rows(i_h, i_marks, n_first, n_heavy, o_l1, M, C, BC: tl.constexpr, SQUARED: tl.constexpr):
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


@triton.jit
def wait_for_all(counter, arrived):
    """Until the programs have arrived that often, all together. What they wrote before, all can read afterwards."""
    tl.debug_barrier()  # one thread speaks for the program
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrived:
        pass
    tl.debug_barrier()


@triton.jit
def leave_for_all(counter, arrived):
    """The last program to come here, of those that arrived so often, sets the counter to 0: nobody waits any more."""
    if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == arrived + tl.num_programs(0) - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")


@triton.jit
def _heavy_kernel(
    i_x,  # [M, D]
    i_up,  # [F, D]; plain FFN: unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    i_order,  # int32 [F]: rows of the weights, hot neurons first
    i_bitmap,  # [M, words]
    m_marks,  # int32, see Lists
    m_gate,  # [M, C]: r in, h out, in heavy rows
    o_y,  # [M, D], heavy rows
    o_l1,  # [M] or unused
    M,
    D,
    C,
    H,
    words,
    x_stride,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    WANTS_L1: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_BM: tl.constexpr,
    FEW_BN: tl.constexpr,
    FEW_BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n_first, n_heavy = _count_heavy(m_marks, M)
    if n_heavy > 0:
        few = n_heavy <= FEW
        if GATED:
            if few:
                _up_tiles(i_x, i_up, i_up_bias, i_order, i_bitmap, m_marks, n_first, n_heavy, m_gate, M, D, C, H, words,
                          x_stride, FEW_BM, FEW_BN, FEW_BK, GROUP_M, SQUARED, HAS_UP_BIAS, PRECISION)  # fmt: skip
            else:
                _up_tiles(i_x, i_up, i_up_bias, i_order, i_bitmap, m_marks, n_first, n_heavy, m_gate, M, D, C, H, words,
                          x_stride, BM, BN, BK, GROUP_M, SQUARED, HAS_UP_BIAS, PRECISION)  # fmt: skip
            wait_for_all(m_marks + BARRIER, tl.num_programs(0))
        STORED_R: tl.constexpr = SQUARED and not GATED
        if few:
            _down_tiles(m_gate, i_down, i_down_bias, i_order, m_marks, n_first, n_heavy, o_y, M, D, C, H,
                        FEW_BM, FEW_BN, FEW_BK, GROUP_M, STORED_R, HAS_DOWN_BIAS, PRECISION)  # fmt: skip
        else:
            _down_tiles(m_gate, i_down, i_down_bias, i_order, m_marks, n_first, n_heavy, o_y, M, D, C, H,
                        BM, BN, BK, GROUP_M, STORED_R, HAS_DOWN_BIAS, PRECISION)  # fmt: skip
        if WANTS_L1:
            _l1_rows(m_gate, m_marks, n_first, n_heavy, o_l1, M, C, 1024, STORED_R)
        if GATED:
            leave_for_all(m_marks + BARRIER, tl.num_programs(0))


@functools.cache
def _kernel(
    dtype: torch.dtype,
    tile: GateTile,
    gated: bool,
    squared: bool,
    has_up_bias: bool,
    has_down_bias: bool,
    wants_l1: bool,
    aligned: bool,
) -> Kernel:
    """``aligned``: C is a multiple of 16."""
    small = few(tile)
    pointers = (*[dtype] * 5, torch.int32, torch.int32, torch.int32, dtype, dtype, torch.float32)
    return Kernel(
        _heavy_kernel,
        (*pointers, ANY, MULTIPLE, MULTIPLE if aligned else ANY, ANY, ANY, MULTIPLE),
        {
            "GATED": gated,
            "SQUARED": squared,
            "HAS_UP_BIAS": has_up_bias,
            "HAS_DOWN_BIAS": has_down_bias,
            "WANTS_L1": wants_l1,
            "BM": tile.BM,
            "BN": tile.BN,
            "BK": tile.BK,
            "FEW": FEW,
            "FEW_BM": small.BM,
            "FEW_BN": small.BN,
            "FEW_BK": small.BK,
            "GROUP_M": 8,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        },
        warps=tile.warps,
        stages=tile.stages,
        cooperative=gated,
    )


def write_heavy_(
    y: Tensor,
    x: Tensor,
    gate: Any,
    bitmap: Any,
    marks: Any,
    w: Weights,
    down: Tensor,
    order: Tensor,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
    l1: Any = None,
) -> None:
    """Write the rows of y [M, D] that belong to heavy tokens, and their sums of abs(h) into ``l1`` [M].

    ``down``: Wd as [F, D]; ``order``: int32 [F], hot neurons first. Overwrites their rows of ``gate``. ``programs``: at
    most the multiprocessors."""
    (M, D), C = x.shape, gate.shape[1]
    if M == 0:
        return
    up, b_up, b_down = w.up, w.up_bias, w.down_bias
    kernel = _kernel(
        x.dtype, tile, up is not None, squared, b_up is not None, b_down is not None, l1 is not None, C % 16 == 0
    )
    weights = 0 if up is None else up, 0 if b_up is None else b_up, down, 0 if b_down is None else b_down
    numbers = M, D, C, order.shape[0] - C, bitmap.shape[1], x.stride(0)
    programs = 1 if INTERPRETED else programs  # the interpreter runs one after the other
    kernel(programs, x, *weights, order, bitmap, marks, gate, y, 0 if l1 is None else l1, *numbers)
