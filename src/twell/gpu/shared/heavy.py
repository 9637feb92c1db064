"""The heavy tokens, densely on tensor cores: h = a(relu(x Wg^T + bg)) * (x Wu^T + bu) over all neurons, 0 for hot ones,
then y = h Wd + bd. (Plain FFN: h = a(relu(x Wg^T + bg)).)

TwELL does not hold all of a heavy token's gate, so the gate is computed again from x. (A value next to 0 may round the
other way than in TwELL. Either is right, and nothing else of a heavy token comes from TwELL.) This is one cooperative
launch: all programs run at the same time and wait for each other between the products. They process the heavy tokens
chunk by chunk, with h in a workspace of one chunk, and loop up to a count that lives on the device: no host
synchronisation, and no capacity. The list's order may vary between runs; a row's sums do not depend on its place.

Hot neurons run along, so that TMA reads the weights as they are stored; on Hopper x of a chunk is packed for TMA, too.
Every product is a pair of two 128 x 128 tiles: gate and up, or neighbouring columns of y.

Up to FEW tokens, pairs of 64 x 64 tiles read x by pointers: 88 pairs for 5632 neurons. If the tiles of y fill at most
half a wave, narrow tiles share the depth (up to SHARES shares), whose sums are added in order.

F 5632, D 2048, bf16: the weights are 69 MB, 16 us; FLOPs of 16384 tokens 1.13e12, 1.5 ms at 750 TFLOP/s. Measured for
16384 tokens on an H200: 1.80 ms (docs/log.md).
Workspace: h [CHUNK, F], 23 MB, and x [CHUNK, D] or shares of sums, 9 MB.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.cooperative import leave_for_all, wait_for_all
from twell.gpu.shared.gate import GROUP_M
from twell.gpu.shared.heavy_steps import l1_rows, pack_rows, product_tiles, sum_shares, wait_with_tma
from twell.gpu.shared.launch import ANY, MULTIPLE, Descriptor, Kernel
from twell.gpu.shared.lists import LONG, N_WAITING, count_for_drift, count_heavy
from twell.gpu.shared.replay import Matrix, Space
from twell.gpu.shared.tiles import INTERPRETED, GateTile, narrowed
from twell.reference import Weights
from twell.saved import Turns

FEW = 128  # heavy tokens, up to which tiles are narrow
CHUNK = 2048  # heavy tokens at once
SHARES = 16  # of a sum, at most


class HeavyFFN(NamedTuple):
    """What the kernel is compiled for: the kind of FFN, which biases it has, and whether tokens are counted."""

    gated: bool
    squared: bool
    gate_bias: bool
    up_bias: bool
    down_bias: bool
    mask: bool
    statistics: bool


@triton.jit
def _heavy_kernel(
    i_x,  # [M, D]
    i_few_gate,  # [F, D] descriptor with few tokens' blocks, or pointer
    i_few_up,  # [F, D], as i_few_gate; plain FFN: Wg again
    i_few_down,  # [F, D], as i_few_gate
    i_packed,  # USE_TMA: descriptor of m_packed, else i_x
    i_gate,  # [F, D] descriptor or pointer
    i_up,  # [F, D] descriptor or pointer; plain FFN: Wg again
    i_down,  # [F, D] descriptor or pointer
    i_h,  # descriptor of m_h, or m_h
    i_gate_bias,  # [C] or unused
    i_up_bias,  # [F] or unused
    i_down_bias,  # [D] or unused
    i_places,  # int32 [F]: index of each cold neuron among the cold ones; -1: hot
    m_counters,  # int32, see Turns
    i_heavy,  # int32, see Turns
    i_counted,  # bool [M] or unused: tokens that ``m_counts`` counts
    m_packed,  # x of a chunk [CHUNK, D], or shares of sums in float32: see _size_of_packed
    m_h,  # [CHUNK, F]
    o_y,  # [M, D], heavy rows
    o_l1,  # [M] or unused
    m_counts,  # int32 [C] or unused: the number of tokens for which each neuron is active is added
    i_entries,  # see Turns
    m_watch,  # int32 [2] or unused: the entries of all lists and the heavy tokens are added
    M,
    D,
    F,
    x_stride,
    wanted,  # tiles that fill the GPU
    cap,
    watches,  # 0 or 1; a constexpr would mean a second kernel to compile, for a few calls
    FFN: tl.constexpr,  # HeavyFFN
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,  # GateTile
    FEW: tl.constexpr,
    FEW_TILE: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    FEW_BM: tl.constexpr = FEW_TILE.BM
    FEW_BN: tl.constexpr = FEW_TILE.BN
    n_first, n_heavy = count_heavy(m_counters, M)
    if watches != 0:
        count_for_drift(m_watch, i_entries, m_counters, n_heavy, M, cap, LONG)
    if n_heavy > 0:
        waiting = m_counters + N_WAITING
        sums = m_packed.to(tl.pointer_type(tl.float32))
        biases = i_gate_bias, i_up_bias, i_down_bias
        out = m_h, m_counts, o_y, sums
        sizes = M, D, F, x_stride
        chunk = tl.cdiv(tl.cdiv(n_heavy, tl.cdiv(n_heavy, CHUNK)), BM) * BM  # all but the last have this size
        narrow = (n_heavy <= FEW) | ((n_heavy <= chunk) & (2 * tl.cdiv(n_heavy, BM) * tl.cdiv(D, 2 * BN) <= wanted))
        for begin in tl.range(0, n_heavy, chunk, disable_licm=True):  # hoisted values would need too many registers
            end = min(begin + chunk, n_heavy)
            tokens = i_places, i_heavy, i_counted, n_first, begin, end
            packs = USE_TMA & (n_heavy > FEW)
            if packs:
                pack_rows(i_x, i_heavy, n_first, begin, end, m_packed, M, D, x_stride, BM, 2 * BN)
            if packs | (begin > 0):  # after it nobody reads the last chunk's h
                wait_with_tma(waiting, USE_TMA)
            if n_heavy <= FEW:
                product_tiles(i_x, i_few_gate, i_few_up, biases, tokens, 1, out, sizes, FFN, FEW_TILE,
                              GROUP_M, PRECISION, USE_TMA, False, False, False)  # fmt: skip
                wait_for_all(waiting)
            else:
                product_tiles(i_packed, i_gate, i_up, biases, tokens, 1, out, sizes, FFN, TILE,
                              GROUP_M, PRECISION, USE_TMA, False, False, USE_TMA)  # fmt: skip
                wait_with_tma(waiting, USE_TMA)
                if narrow == 0:
                    product_tiles(i_h, i_down, i_down, biases, tokens, 1, out, sizes, FFN, TILE,
                                  GROUP_M, PRECISION, USE_TMA, True, False, USE_TMA)  # fmt: skip
            if narrow:
                shares = wanted // (tl.cdiv(n_heavy, FEW_BM) * tl.cdiv(D, 2 * FEW_BN))
                shares = tl.minimum(tl.maximum(shares, 1), SHARES)
                product_tiles(m_h, i_few_down, i_few_down, biases, tokens, shares, out, sizes, FFN,
                              FEW_TILE, GROUP_M, PRECISION, USE_TMA, True, True, False)  # fmt: skip
                wait_for_all(waiting)
                sum_shares(sums, i_down_bias, i_heavy, n_first, begin, end, shares, o_y, M, D, FFN.down_bias, SHARES,
                           1024)  # fmt: skip
            if FFN.statistics:
                l1_rows(m_h, i_heavy, n_first, begin, end, o_l1, M, F, 4, 2048)
        leave_for_all(waiting)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    tile: GateTile,
    use_tma: bool,
    chunk: int,
    long: int,
    ffn: HeavyFFN,
) -> Kernel:
    small, (BM, BN, BK, *_) = narrowed(tile), tile
    of_few = (small.BN, small.BK), (small.BN, small.BK), (small.BK, small.BN)
    blocks = *of_few, (BM, BK), (BN, BK), (BN, BK), (BK, BN), (BM, BK)
    tiles = (Descriptor(dtype, block) if use_tma else dtype for block in blocks)
    integers = (torch.int32, torch.int32, torch.int32, torch.bool)
    outputs = (dtype, dtype, dtype, torch.float32, *[torch.int32] * 3)
    return Kernel(
        _heavy_kernel,
        (dtype, *tiles, *[dtype] * 3, *integers, *outputs, ANY, MULTIPLE, MULTIPLE, MULTIPLE, ANY, ANY, ANY),
        {
            "FFN": ffn,
            "LONG": long,
            "CHUNK": chunk,
            "SHARES": SHARES,
            "TILE": tile,
            "FEW": FEW,
            "FEW_TILE": small,
            "GROUP_M": GROUP_M,
            "USE_TMA": use_tma,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        },
        warps=tile.warps,
        stages=tile.stages,
        registers=255 if dtype.itemsize == 2 else None,  # ptxas would spill to fit a second program, which never runs
        cooperative=True,
    )


def _size_of_packed(rows: int, D: int, tile: GateTile, programs: int, dtype: torch.dtype) -> int:
    """Elements of ``m_packed``: room for x of a chunk, or for shares of sums: of half as many wide tiles as there are
    programs (as many narrow tiles do not exceed that), or of all few tokens."""
    return max(rows * D, max(programs * tile.BM * tile.BN, min(rows, FEW) * D) * 4 // dtype.itemsize)


def write_heavy_(
    y: Tensor,
    x: Tensor,
    turns: Turns,
    w: Weights,
    places: Tensor,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
    use_tma: bool,
    statistics: tuple[Tensor, Tensor] | None = None,
    token_mask: Tensor | None = None,
    watch: tuple[Tensor, int] | None = None,
    space: Space | None = None,
) -> None:
    """Write the rows of y [M, D] that belong to heavy tokens.

    ``w``: all rows [F, D], Wd too, and the gate's bias of the cold neurons [C]; ``places``: of ``PlanTensors``.
    ``statistics``: outputs, sums of abs(h) by tokens [M], and counts of the cold neurons int32 [C], to which the counts
    of the tokens in ``token_mask`` are added. ``watch``: int32 [2], to which the numbers of all entries and of heavy
    tokens are added, and the lists' cap. ``programs``: at most the number of SMs."""
    (M, D), F = x.shape, len(places)
    if M == 0:
        return
    token_mask = None if statistics is None else token_mask
    ffn = HeavyFFN(
        gated=w.up is not None,
        squared=squared,
        gate_bias=w.gate_bias is not None,
        up_bias=w.up_bias is not None,
        down_bias=w.down_bias is not None,
        mask=token_mask is not None,
        statistics=statistics is not None,
    )
    kernel = _kernel(x.dtype, tile, use_tma, CHUNK, LONG, ffn)
    new, rows = x.new_empty if space is None else space.take, min(M, CHUNK)
    packed, h = new(_size_of_packed(rows, D, tile, programs, x.dtype)), new(rows, F)
    b_gate, b_up, b_down, mask = (0 if t is None else t for t in (w.gate_bias, w.up_bias, w.down_bias, token_mask))
    down = w.down if w.down.is_contiguous() else w.down.t()  # neuron-major as a [D, F] view or as [F, D]
    weights = w.gate, w.gate if w.up is None else w.up, down
    matrices: tuple[Any, ...] = (*weights, x, *weights, h)
    if use_tma:
        matrices = tuple(Matrix(t) for t in (*weights, packed[: rows * D].view(rows, D), *weights, h))
    l1, counts = statistics or (0, 0)
    counted, cap = watch or (0, 0)
    of_turns, outputs = (turns.counters, turns.heavy), (packed, h, y, l1, counts, turns.entries, counted)
    numbers = M, D, F, x.stride(0), programs, cap, int(watch is not None)
    programs = 1 if INTERPRETED else programs  # the interpreter runs programs one after the other
    kernel(programs, x, *matrices, b_gate, b_up, b_down, places, *of_turns, mask, *outputs, *numbers)
