"""The gate projection: one GEMM kernel with two epilogues.

    cold neurons:  r = relu(x Wg^T + bg)                       -> TwELL: words [M, T, SLOTS], counts [M, T]
    hot neurons:   h = a(relu(x Wg^T + bg)) * (x Wu^T + bu)    -> h [M, H]           (plain FFN: h = a(r))

With FP8 weights x and the rows are e4m3, and the epilogue starts with acc * x_scale * scale.

``gate_in_twell`` runs over the gate rows [C, D] of the cold neurons (its epilogue: ``words.py``). ``hot_activations``
runs over the hot neurons' gate and up rows, interleaved (g0 u0 g1 u1 ...), so that a tile holds both factors of h and
multiplies them in its epilogue. They are two launches: with a branch between the epilogues Triton cannot overlap one
tile's epilogue with the next tile's loads. A last wave of tiles that would leave half of the GPU idle (44 of 132 SMs
busy at M 16384, C 5632) runs as half tiles on twice as many SMs: 10 us less.

Legend: M tokens, D model width, H hot and C cold neurons, T = C / 128 tiles of TwELL, N rows of a launch (2 H or C);
BM, BN, BK block sizes.
Bytes, M 16384, D 2048, C 5632, bf16: x 67 MB, rows 23 MB, words up to 15 MB (one 32-byte sector per entry; 35 MB are
allocated), counts 1 MB, for 378 GFLOP: limited by the tensor cores (0.48 ms at 790 TFLOP/s).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.formats import SLOTS, TILE, TwELL, n_tiles, word_dtype
from twell.gpu.shared.launch import ANY, INTERPRETED, MULTIPLE, Descriptor, Kernel, can_overlap, capability, ceil_div
from twell.gpu.shared.replay import Matrix, Space
from twell.gpu.shared.tiles import GateTile, relu, relu_pairs, start_after, tile_of
from twell.gpu.shared.words import is_laid_out, store_columns, store_pairs
from twell.saved import COUNTERS

GROUP_M = 8
_TILE, _COUNTERS, _INTERPRETED = tl.constexpr(TILE), tl.constexpr(COUNTERS), tl.constexpr(INTERPRETED)
_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def load_tile(source, row, col, n_rows, n_cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, USE_TMA: tl.constexpr):
    """[ROWS, COLS] at (row, col), zero outside. ``source``: a tensor descriptor or a pointer."""
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
    acc, o_words, o_counts, row, n, M, C, T,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr, BY_REGISTERS: tl.constexpr,
):  # fmt: skip
    tile = n * (BN // _TILE) + tl.arange(0, BN // _TILE)
    inside = (row[:, None] < M) & ((tile[None, :] < T) | WHOLE)
    place = tl.where(inside, row[:, None] * T + tile[None, :], -1)
    if BY_REGISTERS:
        pairs = relu_pairs(acc, DTYPE, BM, BN)
        if not WHOLE:  # rows past C are zeros, and 0 * NaN is NaN
            pair = n * (BN // 2) + tl.arange(0, BN // 2)
            pairs = tl.where(pair[None, :] < C // 2, pairs, 0)
        store_pairs(pairs, place, o_words, o_counts, BM, BN)
    else:
        neuron = n * BN + tl.arange(0, BN)
        r = tl.where(neuron[None, :] < C, relu(acc), 0.0).to(DTYPE)
        store_columns(r, place, o_words, o_counts, BM, BN)


@triton.jit
def _write_tile(
    m, n,
    i_x, i_rows, i_bias, i_x_scale, i_scale, o_values, o_counts, o_sums, M, D, N, width, x_stride,
    DTYPE: tl.constexpr, HOT: tl.constexpr, SAVES: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr, BY_REGISTERS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile at row m * BM and column n * BN: product and epilogue."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(D, BK)):
        x = load_tile(i_x, m * BM, k * BK, M, D, x_stride, BM, BK, USE_TMA)
        w = load_tile(i_rows, n * BN, k * BK, N, D, D, BN, BK, USE_TMA)
        if SCALED and _INTERPRETED:  # it cannot multiply e4m3
            x = x.to(tl.float16)
            w = w.to(tl.float16)
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
    row = m * BM + tl.arange(0, BM)
    col = n * BN + tl.arange(0, BN)
    if SCALED:
        x_scale = tl.load(i_x_scale + row, mask=row < M, other=0.0)
        acc = acc * x_scale[:, None] * tl.load(i_scale + col, mask=(col < N) | WHOLE, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(i_bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if HOT:
        _store_hot(acc, o_values, o_sums, row, n, M, N, width, BM, BN, GATED, SQUARED, SAVES)
    else:
        _store_cold(acc, o_values, o_counts, row, n, M, N, width, DTYPE, BM, BN, WHOLE, BY_REGISTERS)


@triton.jit
def _gate_kernel(
    i_x,  # [M, D] descriptor or pointer
    i_rows,  # [N, D] descriptor or pointer
    i_half_rows,  # the same rows; descriptor with blocks of BN / 2 rows
    i_bias,  # [N] or unused
    i_x_scale,  # SCALED: fp32 [M], scales of x in e4m3
    i_scale,  # SCALED: fp32 [N], scales of the rows
    o_values,  # HOT: h [M, width], else words [M, width, SLOTS]
    o_counts,  # uint8 [M, width], unused if HOT
    o_counters,  # int32 [COUNTERS], set to 0; unused if HOT
    o_bits,  # int32 [n_bits], set to 0; unused if HOT
    o_sums,  # SAVES: x rows^T + bias [M, N], else unused
    M,
    D,
    N,
    width,  # H, or T
    n_bits,
    x_stride,
    DTYPE: tl.constexpr,
    HOT: tl.constexpr,
    SAVES: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,  # BN divides N
    BY_REGISTERS: tl.constexpr,  # see words.py
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,  # a last wave of tiles for at most half of the programs runs as half tiles
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    if not HOT:
        if tl.program_id(0) == 0:
            tl.store(o_counters + tl.arange(0, _COUNTERS), tl.zeros((_COUNTERS,), tl.int32))
        for first in range(tl.program_id(0) * 1024, n_bits, tl.num_programs(0) * 1024):
            at = first + tl.arange(0, 1024)
            tl.store(o_bits + at, tl.zeros((1024,), tl.int32), mask=at < n_bits)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    n_halved = (tiles_m * tiles_n) % tl.num_programs(0)
    n_halved = n_halved * (HALVES & (2 * n_halved <= tl.num_programs(0)))
    n_whole = tiles_m * tiles_n - n_halved
    for tile in tl.range(tl.program_id(0), n_whole, tl.num_programs(0), flatten=USE_TMA):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        _write_tile(m, n, i_x, i_rows, i_bias, i_x_scale, i_scale, o_values, o_counts, o_sums, M, D, N, width, x_stride,
                    DTYPE, HOT, SAVES, GATED, SQUARED, HAS_BIAS, SCALED, WHOLE, BY_REGISTERS, BM, BN, BK, USE_TMA,
                    PRECISION)  # fmt: skip
    if HALVES:
        for half in range(tl.program_id(0), 2 * n_halved, tl.num_programs(0)):
            m, n = tile_of(n_whole + half // 2, tiles_m, tiles_n, GROUP_M)
            n = 2 * n + half % 2
            _write_tile(m, n, i_x, i_half_rows, i_bias, i_x_scale, i_scale, o_values, o_counts, o_sums, M, D, N, width,
                        x_stride, DTYPE, HOT, SAVES, GATED, SQUARED, HAS_BIAS, SCALED, WHOLE, BY_REGISTERS, BM, BN // 2,
                        BK, USE_TMA, PRECISION)  # fmt: skip


@functools.cache
def _kernel(
    dtype: torch.dtype, factors: torch.dtype, tile: GateTile, use_tma: bool, aligned: bool, **flags: bool
) -> Kernel:
    """``factors``: the dtype of x and the rows. ``aligned``: N is a multiple of 16, and for hot neurons the width.
    ``flags``: HOT, SAVES, GATED, SQUARED, HAS_BIAS, WHOLE, BY_REGISTERS, OVERLAPS."""
    hot = flags["HOT"]
    blocks: tuple[Any, ...] = (factors,) * 3
    can_halve = tile.BN >= 2 * TILE
    if use_tma:
        half = (tile.BN // 2 if can_halve else tile.BN, tile.BK)
        shapes = (tile.BM, tile.BK), (tile.BN, tile.BK), half
        blocks = tuple(Descriptor(factors, shape) for shape in shapes)
    n = MULTIPLE if aligned else ANY
    scales = torch.float32, torch.float32
    outputs = (dtype if hot else word_dtype(dtype), torch.uint8, torch.int32, torch.int32, dtype)
    kernel = Kernel(
        _gate_kernel,
        (*blocks, dtype, *scales, *outputs, ANY, MULTIPLE, n, n if hot else ANY, ANY, MULTIPLE),
        {
            **flags,
            "DTYPE": _TRITON_TYPES[dtype],
            "SCALED": factors != dtype,
            "BM": tile.BM,
            "BN": tile.BN,
            "BK": tile.BK,
            "GROUP_M": GROUP_M,
            "USE_TMA": use_tma,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "HALVES": can_halve,
            "OVERLAPS": hot and flags["OVERLAPS"],  # slower for the cold gate: waiting programs take room beside it
        },
        warps=tile.warps,
        stages=tile.stages,
    )
    if flags["BY_REGISTERS"] and not is_laid_out(kernel.compile().asm["ttgir"]):
        return _kernel(dtype, factors, tile, use_tma, aligned, **(flags | {"BY_REGISTERS": False}))
    return kernel


def gate_in_twell(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    *,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    space: Space | None = None,
    counters: Tensor | None = None,
    bits: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> TwELL:
    """relu(x rows^T + bias) in TwELL, for x [M, D] (unit stride along D) and gate rows [C, D].

    ``scales``: of x [M] and rows [C], which are e4m3 then; TwELL's values have ``dtype``. ``counters`` (of ``Turns``)
    and ``bits`` (int32, see columns.py) are set to 0 for the kernels that follow."""
    M, C, dtype = x.shape[0], rows.shape[0], dtype or x.dtype
    new = x.new_empty if space is None else space.take
    T = n_tiles(C)
    words, counts = new(M, T, SLOTS, dtype=word_dtype(dtype)), new(M, T, dtype=torch.uint8)
    counters = new(COUNTERS, dtype=torch.int32) if counters is None else counters
    outputs = words, counts, counters, 0 if bits is None else bits, 0
    n_bits = 0 if bits is None else bits.numel()
    flags = {"HOT": False, "SAVES": False, "GATED": False, "SQUARED": False}
    _launch(x, rows, bias, scales, dtype, outputs, T, n_bits, tile, programs, use_tma, flags)
    return TwELL.from_words(words, counts, shape=(M, C), dtype=dtype, check=False)


def hot_activations(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    h: Tensor,
    *,
    gated: bool,
    squared: bool,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    sums: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write h [M, H] for x [M, D] and rows [2 H, D], gate and up interleaved (plain FFN: [H, D]).

    ``sums`` [M, 2 H] receives x rows^T + bias, for a backward that needs it."""
    outputs = h, 0, 0, 0, 0 if sums is None else sums
    flags = {"HOT": True, "SAVES": sums is not None, "GATED": gated, "SQUARED": squared}
    _launch(x, rows, bias, scales, h.dtype, outputs, h.shape[1], 0, tile, programs, use_tma, flags)


def _launch(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    outputs: tuple[Any, ...],
    width: int,
    n_bits: int,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    flags: dict[str, bool],
) -> None:
    """``outputs``: values, counts, counters, bits, sums."""
    (M, D), N, hot = x.shape, rows.shape[0], flags["HOT"]
    if M == 0 or N == 0:
        return
    aligned = N % 16 == 0 and (not hot or width % 16 == 0)
    by_registers = not hot and not INTERPRETED and dtype.itemsize == 2 and capability() == 90
    flags |= {"HAS_BIAS": bias is not None, "WHOLE": N % tile.BN == 0, "BY_REGISTERS": by_registers}
    kernel = _kernel(dtype, x.dtype, tile, use_tma, aligned, **flags, OVERLAPS=can_overlap())
    if use_tma:
        matrix = Matrix(rows)
        matrices: tuple[Any, ...] = (Matrix(x), matrix, matrix)
    else:
        matrices = (x, rows, rows)
    tiles = ceil_div(M, tile.BM) * ceil_div(N, tile.BN) * (2 if tile.BN >= 2 * TILE else 1)
    given = 0 if bias is None else bias, *(scales or (0, 0))
    kernel(min(programs, tiles), *matrices, *given, *outputs, M, D, N, width, n_bits, x.stride(0))
