"""Batches between few and many tokens: of up and down only the neurons that fire for any token of a tile of tokens.

    gate             z = x Wg^T + bg                                            by cuBLAS
    marks kernel     r = relu(z), neuron-major, and one bit per neuron that fires for any of a tile's TM tokens
    up kernel        h = a(r) * (x Wu^T + bu) for those U neurons: a GEMM over gathered rows; and their list
    down kernel      y = h Wd + bd over the listed neurons: another GEMM over gathered rows

A token fires 30 of 5632 neurons, 64 tokens together 950 (skew29): 0.45 of a dense FFN's work is left. The plan does not
matter here, there is no capacity to overflow, and the weights are read as the model has them: freezing is not needed.

A token with inf or NaN in x has z = inf, -inf or NaN everywhere. -inf counts as firing: h = 0 * u is NaN, as in a dense
FFN, where u is inf or NaN.

Legend: M tokens, D model width, F neurons, TM tokens of a tile, U neurons that fire for any of them.
Weights: Wg, Wu [F, D] as the model has them, Wd neuron-major [F, D].
Bytes, M 1024, D 2048, U 950, bf16: gathered rows 125 MB, x and h for every tile of neurons or columns 120 MB, all from
L2: 33 us at 7 TB/s, as long as the gate takes.
Memory: z, r and h (it replaces z), 2 M F elements, as in a dense FFN.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.gate import load_tile
from twell.gpu.shared.launch import ANY, INTERPRETED, MULTIPLE, Descriptor, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.layout import aligned, ready
from twell.gpu.shared.replay import Matrix, Recorded, Space
from twell.gpu.shared.tiles import Tiles, nth_neurons, popcount, relu, start_after
from twell.reference import Weights


class MarksTile(NamedTuple):
    """Neurons (32 or more), warps."""

    BN: int
    warps: int


class UpTile(NamedTuple):
    """Neurons and depth, warps, stages."""

    BN: int
    BK: int
    warps: int
    stages: int


class DownTile(NamedTuple):
    """Columns of y, neurons at once, warps, stages."""

    BD: int
    BK: int
    warps: int
    stages: int


class UnionTiles(NamedTuple):
    """Tiles for a batch. ``TM``: tokens per tile of tokens."""

    TM: int
    marks: MarksTile
    up: UpTile
    down: DownTile


_ON_HOPPER: dict[int, UnionTiles] = {  # key: the largest M
    128: UnionTiles(64, MarksTile(32, 4), UpTile(16, 128, 4, 4), DownTile(32, 128, 4, 7)),
    256: UnionTiles(64, MarksTile(64, 4), UpTile(32, 128, 4, 4), DownTile(64, 128, 4, 7)),
    512: UnionTiles(64, MarksTile(64, 4), UpTile(32, 128, 4, 4), DownTile(64, 64, 4, 7)),
    1024: UnionTiles(64, MarksTile(64, 4), UpTile(64, 64, 4, 5), DownTile(128, 64, 4, 5)),
    1 << 30: UnionTiles(64, MarksTile(64, 4), UpTile(128, 64, 4, 4), DownTile(128, 64, 4, 5)),
}
_ELSEWHERE = UnionTiles(64, MarksTile(64, 4), UpTile(32, 64, 4, 3), DownTile(64, 64, 4, 3))  # 48 KiB of shared memory
_INTERPRETED = UnionTiles(16, MarksTile(32, 4), UpTile(16, 32, 4, 2), DownTile(32, 16, 4, 2))


# ---------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def _marks_kernel(
    i_z,  # [M, F]
    o_r,  # [tiles, F, TM]: rows of the neurons that fire
    o_bits,  # int32 [tiles, n_words]: one bit per neuron, set if it fires for any token
    M,
    F,
    n_words,
    TM: tl.constexpr,
    BN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    tiles_n = tl.cdiv(F, BN)
    m, n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    t = tl.arange(0, TM)
    token = m * TM + t
    neuron = n * BN + tl.arange(0, BN)
    inside = (token[:, None] < M) & (neuron[None, :] < F)
    z = tl.load(i_z + token[:, None].to(tl.int64) * F + neuron[None, :], mask=inside, other=0.0)
    r = relu(z).to(o_r.dtype.element_ty)
    fired = tl.max(((r != 0) | (z == float("-inf"))).to(tl.uint32), axis=0)
    bits = tl.sum(tl.reshape(fired, (BN // 32, 32)) << tl.arange(0, 32).to(tl.uint32)[None, :], axis=1)
    word = n * (BN // 32) + tl.arange(0, BN // 32)
    tl.store(o_bits + m * n_words + word, bits.to(tl.int32, bitcast=True), mask=word < n_words)
    at = (m.to(tl.int64) * F + neuron[:, None]) * TM + t[None, :]
    tl.store(o_r + at, r.T, mask=(fired > 0)[:, None] & (neuron[:, None] < F))


@triton.jit
def _up_kernel(
    i_x,  # [M, D] descriptor or pointer
    i_r,  # [tiles, F, TM]
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    i_bits,  # int32 [tiles, n_words]
    o_h,  # [M, width]: a tile's U neurons, then zeros up to a multiple of PAD
    o_list,  # int32 [tiles, width]: a tile's U neurons, then 0 up to a multiple of PAD
    M,
    D,
    F,
    n_words,
    width,
    x_stride,
    TM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,  # power of 2 >= n_words
    PAD: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    tiles_m = tl.cdiv(M, TM)
    m, n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    word = tl.arange(0, BW)
    bits = tl.load(i_bits + m * n_words + word, mask=word < n_words, other=0)
    counts = popcount(bits.to(tl.uint32, bitcast=True))
    total = tl.sum(counts, axis=0)
    if n * BN < tl.cdiv(total, PAD) * PAD:
        slot = n * BN + tl.arange(0, BN)
        there = slot < total
        neuron = nth_neurons(bits, counts, n * BN, total, BW, BN)
        tl.store(o_list + m * width + slot, neuron)
        t = tl.arange(0, TM)
        r = tl.load(i_r + (m.to(tl.int64) * F + neuron[:, None]) * TM + t[None, :], mask=there[:, None], other=0.0)
        h = r.T.to(tl.float32)
        if SQUARED:
            h = h * h
        if GATED:
            u = tl.zeros((TM, BN), tl.float32)
            rows = i_up + neuron.to(tl.int64) * D
            for start in range(0, D, BK):
                k = start + tl.arange(0, BK)
                x = load_tile(i_x, m * TM, start, M, D, x_stride, TM, BK, USE_TMA)
                w = tl.load(rows[:, None] + k[None, :], mask=there[:, None] & (k[None, :] < D), other=0.0)
                u = tl.dot(x, w.T, u, input_precision=PRECISION)
            if HAS_UP_BIAS:
                u += tl.load(i_up_bias + neuron, mask=there, other=0.0).to(tl.float32)[None, :]
            h = tl.where(there[None, :], h * u, 0.0)
        token = m * TM + t
        at = o_h + token[:, None].to(tl.int64) * width + slot[None, :]
        tl.store(at, h.to(o_h.dtype.element_ty), mask=token[:, None] < M)


@triton.jit
def _down_kernel(
    i_h,  # [M, width] descriptor or pointer
    i_list,  # int32 [tiles, width]
    i_bits,  # int32 [tiles, n_words]
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    o_y,  # [M, D]
    M,
    D,
    n_words,
    width,
    TM: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    tiles_d = tl.cdiv(D, BD)
    m = tl.program_id(0) // tiles_d
    d = tl.program_id(0) % tiles_d * BD + tl.arange(0, BD)
    word = tl.arange(0, BW)
    bits = tl.load(i_bits + m * n_words + word, mask=word < n_words, other=0)
    total = tl.sum(popcount(bits.to(tl.uint32, bitcast=True)), axis=0)
    acc = tl.zeros((TM, BD), tl.float32)
    for start in range(0, total, BK):
        neuron = tl.load(i_list + m * width + start + tl.arange(0, BK)).to(tl.int64)
        h = load_tile(i_h, m * TM, start, M, width, width, TM, BK, USE_TMA)
        w = tl.load(i_down + neuron[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
        acc = tl.dot(h, w, acc, input_precision=PRECISION)
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    token = m * TM + tl.arange(0, TM)
    inside = (token[:, None] < M) & (d[None, :] < D)
    tl.store(o_y + token[:, None].to(tl.int64) * D + d[None, :], acc.to(o_y.dtype.element_ty), mask=inside)


@functools.cache
def _kernels(
    dtype: torch.dtype,
    tiles: UnionTiles,
    BW: int,
    use_tma: bool,
    has_down_bias: bool,
    overlaps: bool,
    **flags: bool,
) -> tuple[Kernel, Kernel, Kernel]:
    """Of marks, up and down. ``flags``: GATED, SQUARED, HAS_UP_BIAS."""
    TM, marks, up, down = tiles
    i32 = torch.int32
    common = {
        "TM": TM,
        "BW": BW,
        "USE_TMA": use_tma,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # no effect on 16 bits
        "OVERLAPS": overlaps,
    }
    numbers = ANY, MULTIPLE, MULTIPLE, ANY, MULTIPLE, MULTIPLE
    return (
        Kernel(
            _marks_kernel,
            (dtype, dtype, i32, ANY, MULTIPLE, ANY),
            {"TM": TM, "BN": marks.BN, "OVERLAPS": overlaps},
            warps=marks.warps,
        ),
        Kernel(
            _up_kernel,
            (_block(dtype, TM, up.BK, use_tma), dtype, dtype, dtype, i32, dtype, i32, *numbers),
            {"BN": up.BN, "BK": up.BK, "PAD": down.BK, **flags, **common},
            warps=up.warps,
            stages=up.stages,
        ),
        Kernel(
            _down_kernel,
            (_block(dtype, TM, down.BK, use_tma), i32, i32, dtype, dtype, dtype, ANY, MULTIPLE, ANY, MULTIPLE),
            {"BD": down.BD, "BK": down.BK, "HAS_DOWN_BIAS": has_down_bias, **common},
            warps=down.warps,
            stages=down.stages,
        ),
    )


def _block(dtype: torch.dtype, rows: int, columns: int, use_tma: bool) -> Any:
    return Descriptor(dtype, (rows, columns)) if use_tma else dtype


# ---------------------------------------------------------------------------------------------------------
# The forward
# ---------------------------------------------------------------------------------------------------------


def tiles_for(tokens: int, of_gpu: Tiles) -> UnionTiles:
    if INTERPRETED:
        return _INTERPRETED
    if not of_gpu.use_tma:
        return _ELSEWHERE
    return next(tiles for most, tiles in _ON_HOPPER.items() if tokens <= most)


def forward(
    x: Tensor,
    w: Weights,
    activation: str,
    of_gpu: Tiles,
    down: Tensor | None = None,
    tiles: UnionTiles | None = None,
) -> Tensor:
    """y [..., D] for x [..., D] with at least one token. ``down``: a neuron-major copy of Wd, unless w.down is
    neuron-major."""
    x, w = aligned(x), ready(w)
    return after_gate(x, nnf.linear(x, w.gate, w.gate_bias), w, activation, of_gpu, down, tiles)


def after_gate(
    x: Tensor,
    z: Tensor,
    w: Weights,
    activation: str,
    of_gpu: Tiles,
    down: Tensor | None = None,
    tiles: UnionTiles | None = None,
) -> Tensor:
    """As ``forward``, from x and weights that kernels can read and the gate's z [..., F], which is overwritten."""
    w = w if down is None else w._replace(down=down)
    _, up, down, _, b_up, b_down = w
    y = x.new_empty(x.shape)
    key = (
        x.shape, x.stride(-2), x.dtype, z.shape[-1], activation, tiles, up is None, b_up is None, b_down is None
    )  # fmt: skip
    _launch(key, (x, y, z, up, down, b_up, b_down), x, y, z, w, activation == "relu2", of_gpu, tiles)
    return y


@Recorded
def _launch(
    space: Space,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    w: Weights,
    squared: bool,
    of_gpu: Tiles,
    tiles: UnionTiles | None,
) -> tuple[Tensor, ...]:
    (M, D), F = x.view(-1, x.shape[-1]).shape, z.shape[-1]
    x = x if x.dim() == 2 else x.view(M, D)
    tiles, use_tma = tiles or tiles_for(M, of_gpu), of_gpu.use_tma
    tiles_m, tiles_d, n_words = ceil_div(M, tiles.TM), ceil_div(D, tiles.down.BD), ceil_div(F, 32)
    width = ceil_div(F, max(tiles.up.BN, tiles.down.BK)) * max(tiles.up.BN, tiles.down.BK)
    r, bits = space.take(tiles_m, F, tiles.TM), space.take(tiles_m, n_words, dtype=torch.int32)
    h = z.view(M, F) if width == F else space.take(M, width)  # z is not needed any more
    listed = space.take(tiles_m, width, dtype=torch.int32)
    mark, up_, down_ = _kernels(
        x.dtype, tiles, power_of_2(n_words), use_tma, w.down_bias is not None, can_overlap(), GATED=w.up is not None,
        SQUARED=squared, HAS_UP_BIAS=w.up_bias is not None,
    )  # fmt: skip
    mark(tiles_m * ceil_div(F, tiles.marks.BN), z, r, bits, M, F, n_words)
    blocks = (Matrix(x), Matrix(h)) if use_tma else (x, h)
    up, b_up, b_down = (0 if t is None else t for t in (w.up, w.up_bias, w.down_bias))
    up_(tiles_m * (width // tiles.up.BN), blocks[0], r, up, b_up, bits, h, listed, M, D, F, n_words, width, x.stride(0))
    down_(tiles_m * tiles_d, blocks[1], listed, bits, w.down, b_down, y, M, D, n_words, width)
    return ()
