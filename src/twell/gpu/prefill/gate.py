"""The gate projection with the sparse form in its epilogue: one GEMM, two epilogues.

    cold neurons:  r = relu(x Wg^T + bg)                       -> gate [M, C], bitmap [M, C / 32]
    hot neurons:   h = a(relu(x Wg^T + bg)) * (x Wu^T + bu)    -> h [M, H]           (plain FFN: h = a(r))

``gate_and_bitmap`` runs over the gate rows [C, D] of the cold neurons, ``hot_activations`` over those of the hot ones,
gate and up rows interleaved (g0 u0 g1 u1 ...), so that a tile holds both factors of h and multiplies them in its
epilogue. They are two launches: with a branch between the epilogues Triton cannot overlap one tile's epilogue with the
next tile's loads. A last wave of tiles that would leave half of the GPU idle (44 of 132 processors busy at M 16384, C
5632) runs as half tiles, on twice as many processors: 10 us less.

Legend: M tokens, D model width, H hot and C cold neurons, N rows of a launch; BM, BN, BK block sizes.
Bytes, M 16384, D 2048, C 5632, bf16: x 67 MB, rows 23 MB, gate 185 MB, bitmap 12 MB, against 378 GFLOP: bound by the
tensor cores (0.48 ms at 790 TFLOP/s), with the stores (0.05 ms) behind them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, MULTIPLE, Descriptor, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Matrix, Space
from twell.gpu.shared.tiles import (
    GateTile,
    pack_bits,
    pack_pairs,
    relu,
    relu_pairs,
    start_after,
    tile_of,
)
from twell.saved import GROUP, bitmap_words, n_marks

GROUP_M = 8


@triton.jit
def load_tile(source, row, col, n_rows, n_cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, USE_TMA: tl.constexpr):
    """[ROWS, COLS] at (row, col), zero outside. ``source`` is a tensor descriptor or a pointer."""
    if USE_TMA:
        tile = source.load([row, col])
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        inside = (r[:, None] < n_rows) & (c[None, :] < n_cols)
        tile = tl.load(source + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _store_hot(
    acc, o_h, o_sums, row, n, M, N, H,
    BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    dtype = o_h.dtype.element_ty
    if SAVES:
        col = n * BN + tl.arange(0, BN)
        inside = (row[:, None] < M) & (col[None, :] < N)
        tl.store(o_sums + row[:, None].to(tl.int64) * N + col[None, :], acc.to(dtype), mask=inside)
    if GATED:
        z, u = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        a = relu(z).to(dtype).to(tl.float32)
        neuron = n * (BN // 2) + tl.arange(0, BN // 2)
    else:
        a = relu(acc).to(dtype).to(tl.float32)
        neuron = n * BN + tl.arange(0, BN)
    if SQUARED:
        a = a * a
    h = a * u if GATED else a
    inside = (row[:, None] < M) & (neuron[None, :] < H)
    tl.store(o_h + row[:, None].to(tl.int64) * H + neuron[None, :], h.to(dtype), mask=inside)


@triton.jit
def _store_cold(
    acc, o_gate, o_bitmap, row, n, M, C, words,
    BM: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    dtype = o_gate.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        pairs = relu_pairs(acc, dtype, BM, BN)
        pair = n * (BN // 2) + tl.arange(0, BN // 2)
        if not WHOLE:  # beyond C lie zero rows, and 0 * NaN is NaN
            pairs = tl.where(pair[None, :] < C // 2, pairs, 0)
        bits = pack_pairs(pairs, BM, BN)
        inside = (row[:, None] < M) & ((pair[None, :] < C // 2) | WHOLE)
        if not ZEROS:
            inside = inside & (pairs != 0)
        place = o_gate.to(tl.pointer_type(tl.uint32)) + row[:, None].to(tl.int64) * (C // 2) + pair[None, :]
        tl.store(place, pairs, mask=inside)
    else:
        r = relu(acc)
        neuron = n * BN + tl.arange(0, BN)
        inside = (row[:, None] < M) & (neuron[None, :] < C)
        if not ZEROS:
            inside = inside & (r != 0)
        bits = pack_bits((r != 0) & (neuron[None, :] < C), BM, BN)
        tl.store(o_gate + row[:, None].to(tl.int64) * C + neuron[None, :], r, mask=inside)
    word = n * (BN // 32) + tl.arange(0, BN // 32)
    inside = (row[:, None] < M) & ((word[None, :] < words) | WHOLE)
    tl.store(o_bitmap + row[:, None].to(tl.int64) * words + word[None, :], bits.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _write_tile(
    m, n,
    i_x, i_rows, i_bias, o_values, o_bitmap, o_sums, M, D, N, width, words, x_stride,
    HOT: tl.constexpr, SAVES: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr, ZEROS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows m * BM and columns n * BN on: product and epilogue."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(D, BK)):
        x = load_tile(i_x, m * BM, k * BK, M, D, x_stride, BM, BK, USE_TMA)
        w = load_tile(i_rows, n * BN, k * BK, N, D, D, BN, BK, USE_TMA)
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
    row = m * BM + tl.arange(0, BM)
    if HAS_BIAS:
        col = n * BN + tl.arange(0, BN)
        acc += tl.load(i_bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if HOT:
        _store_hot(acc, o_values, o_sums, row, n, M, N, width, BM, BN, GATED, SQUARED, SAVES)
    else:
        _store_cold(acc, o_values, o_bitmap, row, n, M, width, words, BM, BN, WHOLE, ZEROS)


@triton.jit
def _gate_kernel(
    i_x,  # [M, D] descriptor or pointer
    i_rows,  # [N, D] likewise
    i_half_rows,  # likewise, for BN / 2 of them
    i_bias,  # [N] or unused
    o_values,  # HOT: h [M, width], else r [M, width]
    o_bitmap,  # [M, words], unused if HOT
    o_marks,  # int32, the first four set to 0; unused if HOT
    o_sums,  # SAVES: x rows^T + bias [M, N], else unused
    M,
    D,
    N,
    width,
    words,
    x_stride,
    HOT: tl.constexpr,
    SAVES: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # BN divides N
    ZEROS: tl.constexpr,  # write r where it is 0, too
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,  # a last wave of tiles that is for at most half of the programs runs as half tiles
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    if not HOT:
        if tl.program_id(0) == 0:
            tl.store(o_marks + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    n_halved = (tiles_m * tiles_n) % tl.num_programs(0)
    n_halved = n_halved * (HALVES & (2 * n_halved <= tl.num_programs(0)))
    n_whole = tiles_m * tiles_n - n_halved
    for tile in tl.range(tl.program_id(0), n_whole, tl.num_programs(0), flatten=USE_TMA):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        _write_tile(m, n, i_x, i_rows, i_bias, o_values, o_bitmap, o_sums, M, D, N, width, words, x_stride, HOT, SAVES,
                    GATED, SQUARED, HAS_BIAS, WHOLE, ZEROS, BM, BN, BK, USE_TMA, PRECISION)  # fmt: skip
    if HALVES:
        for half in range(tl.program_id(0), 2 * n_halved, tl.num_programs(0)):
            m, n = tile_of(n_whole + half // 2, tiles_m, tiles_n, GROUP_M)
            n = 2 * n + half % 2
            _write_tile(m, n, i_x, i_half_rows, i_bias, o_values, o_bitmap, o_sums, M, D, N, width, words, x_stride,
                        HOT, SAVES, GATED, SQUARED, HAS_BIAS, WHOLE, ZEROS, BM, BN // 2, BK, USE_TMA,
                        PRECISION)  # fmt: skip


@functools.cache
def _kernel(
    dtype: torch.dtype,
    tile: GateTile,
    use_tma: bool,
    hot: bool,
    saves: bool,
    gated: bool,
    squared: bool,
    has_bias: bool,
    whole: bool,
    zeros: bool,
    aligned: bool,
    overlaps: bool,
) -> Kernel:
    """``whole``: tiles have no columns beyond the last; ``aligned``: N, width and words are multiples of 16."""
    blocks: tuple[Any, ...] = (dtype, dtype, dtype)
    can_halve = tile.BN >= 2 * GROUP
    if use_tma:
        half = (tile.BN // 2 if can_halve else tile.BN, tile.BK)
        shapes = (tile.BM, tile.BK), (tile.BN, tile.BK), half
        blocks = tuple(Descriptor(dtype, shape) for shape in shapes)
    n = MULTIPLE if aligned else ANY
    n_words = ANY if hot else n
    return Kernel(
        _gate_kernel,
        (*blocks, dtype, dtype, torch.int32, torch.int32, dtype, ANY, MULTIPLE, n, n, n_words, MULTIPLE),
        {
            "HOT": hot,
            "SAVES": saves,
            "GATED": gated,
            "SQUARED": squared,
            "HAS_BIAS": has_bias,
            "WHOLE": whole,
            "ZEROS": zeros or has_bias or not whole,  # all of it at once takes too many registers
            "BM": tile.BM,
            "BN": tile.BN,
            "BK": tile.BK,
            "GROUP_M": GROUP_M,
            "USE_TMA": use_tma,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "HALVES": can_halve,
            "OVERLAPS": hot and overlaps,  # the cold gate loses: what waits takes room beside it
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def gate_and_bitmap(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    *,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    zeros: bool = True,
    space: Space | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """r [M, C] and its bitmap, int32 [M, words], for x [M, D] (unit stride along D) and gate rows [C, D].

    Without ``zeros`` r may be written only where it is not 0; the rest may hold anything: a tenth of the stores. And
    the marks that ``list_active`` wants: their zeros cost no launch of their own here. In ``space`` and ``marks``, if
    given."""
    M, C = x.shape[0], rows.shape[0]
    new = x.new_empty if space is None else space.take
    gate = new(M, C, dtype=x.dtype)
    bitmap = new(M, bitmap_words(C), dtype=torch.int32)
    marks = new(n_marks(M), dtype=torch.int32) if marks is None else marks
    outputs = gate, bitmap, marks, 0
    _launch(x, rows, bias, outputs, bitmap.shape[1], tile, programs, use_tma, (False, False, False, False), zeros)
    return gate, bitmap, marks


def hot_activations(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    squared: bool,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    sums: Tensor | None = None,
    space: Space | None = None,
) -> Tensor:
    """h [M, H] for x [M, D] and rows [2 H, D], gate and up interleaved (plain FFN: [H, D]).

    What h is made of, x rows^T + bias, goes into ``sums`` [M, 2 H] for a backward that wants it.
    """
    new = x.new_empty if space is None else space.take
    h = new(x.shape[0], rows.shape[0] // 2 if gated else rows.shape[0])
    outputs = h, 0, 0, 0 if sums is None else sums
    _launch(x, rows, bias, outputs, 0, tile, programs, use_tma, (True, sums is not None, gated, squared), True)
    return h


def _launch(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    outputs: tuple[Any, ...],
    words: int,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    options: tuple[bool, bool, bool, bool],
    zeros: bool,
) -> None:
    """``outputs``: values, bitmap, marks, sums; ``options``: HOT, SAVES, GATED, SQUARED."""
    (M, D), N, width = x.shape, rows.shape[0], outputs[0].shape[1]
    if M == 0 or N == 0:
        return
    aligned = (N | width | words) % 16 == 0
    kernel = _kernel(
        x.dtype, tile, use_tma, *options, bias is not None, N % tile.BN == 0, zeros, aligned, can_overlap()
    )
    if use_tma:
        matrix = Matrix(rows)
        matrices: tuple[Any, ...] = (Matrix(x), matrix, matrix)
    else:
        matrices = (x, rows, rows)
    tiles = ceil_div(M, tile.BM) * ceil_div(N, tile.BN) * (2 if tile.BN >= 2 * GROUP else 1)
    kernel(min(programs, tiles), *matrices, 0 if bias is None else bias, *outputs, M, D, N, width, words, x.stride(0))
