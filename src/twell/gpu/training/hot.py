"""GEMMs of the hot neurons in training; ``gate.hot_activations`` is the forward's first.

    add_product_           out += a b                                   y += h Wd_hot;  dx += [dz du] W_hot
    hot_gradients          dh = dy Wd_hot^T  ->  [dz du] and h          from z and u, which the forward has kept

A GEMM by PyTorch takes 15 to 40 us of host time and would split a call's launches in two; these kernels are repeated
with all others (``replay.py``). hot_gradients also saves a pass over dh, z and u.

Legend: M tokens, D model width, H hot neurons; BM, BN, BK block sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.gate import GROUP_M, load_tile
from twell.gpu.shared.launch import ANY, MULTIPLE, Descriptor, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Matrix, Space
from twell.gpu.shared.tiles import GateTile, start_after, tile_of
from twell.gpu.training.activation import factors, l1_gradient


@triton.jit
def _add_half(m_out, row, col, values):
    """Add by TMA: 5 us less at M 16384, D 2048 than by pointers."""
    before = m_out.load([row, col])
    m_out.store([row, col], (values + before.to(tl.float32)).to(before.dtype))


@triton.jit
def _add_kernel(
    i_a,  # [M, K] descriptor or pointer
    i_b,  # [K, N] descriptor or pointer
    m_half,  # ``m_out`` as a descriptor with blocks of half a tile, or a pointer
    m_out,  # [M, N]
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=USE_TMA):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = load_tile(i_a, m * BM, k * BK, M, K, K, BM, BK, USE_TMA)
            b = load_tile(i_b, k * BK, n * BN, K, N, N, BK, BN, USE_TMA)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if USE_TMA:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            _add_half(m_half, m * BM, n * BN, first)
            _add_half(m_half, m * BM, n * BN + BN // 2, second)
        else:
            row = m * BM + tl.arange(0, BM)
            col = n * BN + tl.arange(0, BN)
            inside = (row[:, None] < M) & (col[None, :] < N)
            at = m_out + row[:, None].to(tl.int64) * N + col[None, :]
            acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, acc.to(m_out.dtype.element_ty), mask=inside)


@triton.jit
def _load_pairs(i_pairs, at, inside):
    """The numbers at 2 * at and 2 * at + 1, in float32. Two 16-bit numbers are loaded as one word: no exchange between
    threads."""
    dtype = i_pairs.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        words = tl.load(i_pairs.to(tl.pointer_type(tl.uint32)) + at, mask=inside, other=0)
        first = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    else:
        first = tl.load(i_pairs + 2 * at, mask=inside, other=0.0)
        second = tl.load(i_pairs + 2 * at + 1, mask=inside, other=0.0)
    return first, second


@triton.jit
def _store_pairs(o_pairs, at, first, second, inside):
    """The inverse of ``_load_pairs``."""
    dtype = o_pairs.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        low = first.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = second.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        tl.store(o_pairs.to(tl.pointer_type(tl.uint32)) + at, low | (high << 16), mask=inside)
    else:
        tl.store(o_pairs + 2 * at, first, mask=inside)
        tl.store(o_pairs + 2 * at + 1, second, mask=inside)


@triton.jit
def _store_gradients(
    dh, first_col, row, i_sums, i_l1, i_counted, o_gradients, o_h, M, H,
    COLS: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_L1: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Store gradients and h of the columns from ``first_col`` on."""
    dtype = o_h.dtype.element_ty
    col = first_col + tl.arange(0, COLS)
    inside = (row[:, None] < M) & (col[None, :] < H)
    at = row[:, None].to(tl.int64) * H + col[None, :]
    if GATED:
        z, u = _load_pairs(i_sums, at, inside)
    else:
        z = tl.load(i_sums + at, mask=inside, other=0.0).to(tl.float32)
        u = z
    a, slope, h = factors(z, u, GATED, SQUARED)
    if HAS_L1:
        sign = l1_gradient(i_l1, h)
        if HAS_MASK:
            counts = tl.load(i_counted + row, mask=row < M, other=0) != 0
            sign = tl.where(counts[:, None], sign, 0.0)
        dh += sign
    if GATED:
        _store_pairs(o_gradients, at, dh * slope, dh * a, inside)
    else:
        tl.store(o_gradients + at, (dh * slope).to(dtype), mask=inside)
    tl.store(o_h + at, h.to(dtype), mask=inside)


@triton.jit
def _gradient_kernel(
    i_dy,  # [M, D] descriptor or pointer
    i_down,  # [H, D] descriptor or pointer
    i_sums,  # [M, 2 H]: z and u, interleaved; plain FFN: [M, H]
    i_l1,  # [] or unused: the gradient of sum |h|
    i_counted,  # bool [M] or unused: tokens whose |h| counts
    o_gradients,  # as sums
    o_h,  # [M, H]
    M,
    D,
    H,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(H, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=USE_TMA):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        dh = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(D, BK)):
            dy = load_tile(i_dy, m * BM, k * BK, M, D, D, BM, BK, USE_TMA)
            w = load_tile(i_down, n * BN, k * BK, H, D, D, BN, BK, USE_TMA)
            dh = tl.dot(dy, w.T, dh, input_precision=PRECISION)
        row = m * BM + tl.arange(0, BM)
        halves = tl.permute(tl.reshape(dh, (BM, 2, BN // 2)), (0, 2, 1))  # one after the other, to save registers
        first, second = tl.split(halves)
        _store_gradients(first, n * BN, row, i_sums, i_l1, i_counted, o_gradients, o_h, M, H, BN // 2, GATED, SQUARED,
                         HAS_L1, HAS_MASK)  # fmt: skip
        _store_gradients(second, n * BN + BN // 2, row, i_sums, i_l1, i_counted, o_gradients, o_h, M, H, BN // 2, GATED,
                         SQUARED, HAS_L1, HAS_MASK)  # fmt: skip


def _constants(tile: GateTile, use_tma: bool, dtype: torch.dtype, overlaps: bool) -> dict[str, Any]:
    precision = "ieee" if dtype == torch.float32 else "tf32"
    blocks = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP_M": GROUP_M}
    return blocks | {"USE_TMA": use_tma, "PRECISION": precision, "OVERLAPS": overlaps}


@functools.cache
def _adder(dtype: torch.dtype, tile: GateTile, use_tma: bool, aligned: bool, overlaps: bool) -> Kernel:
    """``aligned``: K is a multiple of 16."""
    of_a, of_b = Descriptor(dtype, (tile.BM, tile.BK)), Descriptor(dtype, (tile.BK, tile.BN))
    half = Descriptor(dtype, (tile.BM, tile.BN // 2))
    matrices: tuple[Any, ...] = (of_a, of_b, half) if use_tma else (dtype, dtype, dtype)
    arguments = (*matrices, dtype, ANY, MULTIPLE, MULTIPLE if aligned else ANY)
    constants = _constants(tile, use_tma, dtype, overlaps)
    return Kernel(_add_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


@functools.cache
def _gradient(
    dtype: torch.dtype,
    tile: GateTile,
    use_tma: bool,
    aligned: bool,
    overlaps: bool,
    **flags: bool,
) -> Kernel:
    """``aligned``: H is a multiple of 16. ``flags``: GATED, SQUARED, HAS_L1, HAS_MASK."""
    of_dy, of_down = Descriptor(dtype, (tile.BM, tile.BK)), Descriptor(dtype, (tile.BN, tile.BK))
    matrices: tuple[Any, ...] = (of_dy, of_down) if use_tma else (dtype, dtype)
    arguments = (*matrices, dtype, torch.float32, torch.bool, dtype, dtype, ANY, MULTIPLE, MULTIPLE if aligned else ANY)
    constants = flags | _constants(tile, use_tma, dtype, overlaps)
    return Kernel(_gradient_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


def _can_use_tma(use_tma: bool, *widths: int) -> bool:
    """Whether TMA can be used: rows must start at multiples of 16 bytes."""
    return use_tma and all(width % 8 == 0 for width in widths)


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, tile: GateTile, programs: int, use_tma: bool) -> None:
    """out [M, N] += a [M, K] b [K, N], all contiguous and of one dtype."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or K == 0:
        return
    use_tma = _can_use_tma(use_tma, K, N)
    kernel = _adder(a.dtype, tile, use_tma, K % 16 == 0, can_overlap())
    matrices = (Matrix(a), Matrix(b), Matrix(out)) if use_tma else (a, b, out)
    kernel(min(programs, ceil_div(M, tile.BM) * ceil_div(N, tile.BN)), *matrices, out, M, N, K)


def hot_gradients(
    dy: Tensor,
    down: Tensor,
    sums: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    *,
    gated: bool,
    squared: bool,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    space: Space | None = None,
) -> tuple[Tensor, Tensor]:
    """(gradients of z and u, laid out as ``sums``; h [M, H]) for dy [M, D] and the hot rows of Wd [H, D].

    ``sums``: z and u of the hot neurons, interleaved, [M, 2 H]; plain FFN: z [M, H]. ``dl1``: float32; ``token_mask``:
    bool [M]."""
    (M, D), H = dy.shape, len(down)
    new = dy.new_empty if space is None else space.take
    gradients, h = new(*sums.shape), new(M, H)
    if M and H:
        use_tma = _can_use_tma(use_tma, D)
        flags = {"GATED": gated, "SQUARED": squared, "HAS_L1": dl1 is not None, "HAS_MASK": token_mask is not None}
        kernel = _gradient(dy.dtype, tile, use_tma, H % 16 == 0, can_overlap(), **flags)
        matrices = (Matrix(dy), Matrix(down)) if use_tma else (dy, down)
        optional = (0 if t is None else t for t in (dl1, token_mask))
        tiles = ceil_div(M, tile.BM) * ceil_div(H, tile.BN)
        kernel(min(programs, tiles), *matrices, sums, *optional, gradients, h, M, D, H)
    return gradients, h
