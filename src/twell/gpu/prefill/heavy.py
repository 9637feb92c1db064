"""The heavy tokens, densely on tensor cores: h = a(relu(x Wg^T + bg)) * (x Wu^T + bu) over all cold neurons, then
y = h Wd + bd. (Plain FFN: h = a(relu(x Wg^T + bg)).)

TwELL does not hold all of a heavy token's gate, so it is computed again from x. (A value next to 0 may round the other
way than in TwELL; either is right, and nothing of such a token is taken from there.) One launch, whose programs all run
at the same time (a cooperative launch) and wait for each other between the products. They take the heavy tokens chunk
by chunk, h in a workspace of one chunk, and loop over a count that lives on the device: no host sync, and no capacity.
The list's order may vary between runs; a row's sums do not depend on its place.

Few heavy tokens are the rule. To read the weights once would take 15 us (63 MB at C 5120, D 2048, bf16); 64 tokens take
86 us on an H200, waiting for one depth of the products after the other, though small tiles spread them over the whole
GPU. Many are a GEMM over listed rows: 355 us for 2048. Workspace: [CHUNK, C], 21 MB.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.prefill.lists import LONG, N_WAITING, active_of, count_heavy, heavy_tokens, is_listed
from twell.gpu.shared.launch import ANY, INTERPRETED, MULTIPLE, Kernel
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import GateTile, few, relu, tile_of
from twell.reference import Weights
from twell.saved import Turns

FEW = 128  # heavy tokens
CHUNK = 2048  # at once


@triton.jit
def _product(
    i_x, i_rows, token, neuron, has_row, has_column, D, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BM, BN]: x of the tokens times rows of a weight."""
    acc = tl.zeros((BM, BN), tl.float32)
    rows = i_x + token * x_stride
    columns = i_rows + neuron.to(tl.int64) * D
    for k in range(tl.cdiv(D, BK)):
        d = k * BK + tl.arange(0, BK)
        x = tl.load(rows[:, None] + d[None, :], mask=has_row[:, None] & (d[None, :] < D), other=0.0)
        w = tl.load(columns[None, :] + d[:, None], mask=has_column[None, :] & (d[:, None] < D), other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _h_tiles(
    i_x, i_gate, i_up, i_gate_bias, i_up_bias, i_order, i_heavy, i_counted, n_first, n_heavy, begin, end, o_h, o_counts,
    M, D, C, H, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, GATED: tl.constexpr,
    SQUARED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h [end - begin, C] of the heavy tokens from ``begin`` on. r waits where h will be: no registers for r and u."""
    dtype = o_h.dtype.element_ty
    tiles_m = tl.cdiv(end - begin, BM)
    tiles_n = tl.cdiv(C, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = m * BM + tl.arange(0, BM)
        has_row = begin + row < end
        token = tl.where(has_row, heavy_tokens(i_heavy, begin + row, n_first, n_heavy, M), 0).to(tl.int64)
        cold = n * BN + tl.arange(0, BN)
        neuron = tl.load(i_order + H + cold, mask=cold < C, other=0)
        inside = has_row[:, None] & (cold[None, :] < C)
        place = o_h + row[:, None] * C + cold[None, :]
        z = _product(i_x, i_gate, token, neuron, has_row, cold < C, D, x_stride, BM, BN, BK, PRECISION)
        if HAS_GATE_BIAS:
            z += tl.load(i_gate_bias + cold, mask=cold < C, other=0.0).to(tl.float32)[None, :]
        r = relu(z).to(dtype)
        if COUNTS:
            counts = inside
            if HAS_MASK:
                counts = inside & (tl.load(i_counted + token, mask=has_row, other=0) != 0)[:, None]
            fired = tl.sum(((r != 0) & counts).to(tl.int32), axis=0)
            tl.atomic_add(o_counts + cold, fired, mask=(cold < C) & (fired > 0), sem="relaxed")
        if GATED:
            tl.store(place, r, mask=inside)
            u = _product(i_x, i_up, token, neuron, has_row, cold < C, D, x_stride, BM, BN, BK, PRECISION)
            if HAS_UP_BIAS:
                u += tl.load(i_up_bias + neuron, mask=cold < C, other=0.0).to(tl.float32)[None, :]
            tl.debug_barrier()  # r may have been written by other threads
            r = tl.load(place, mask=inside, other=0.0)
        h = r.to(tl.float32)
        if SQUARED:
            h = h * h
        if GATED:
            h = h * u
        tl.store(place, h.to(dtype), mask=inside)


@triton.jit
def _down_tiles(
    i_h, i_down, i_down_bias, i_order, i_heavy, n_first, n_heavy, begin, end, o_y, M, D, C, H,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(end - begin, BM)
    tiles_n = tl.cdiv(D, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = m * BM + tl.arange(0, BM)
        has_row = begin + row < end
        d = n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(C, BK)):
            cold = k * BK + tl.arange(0, BK)
            inside = has_row[:, None] & (cold[None, :] < C)
            h = tl.load(i_h + row[:, None] * C + cold[None, :], mask=inside, other=0.0)
            neuron = tl.load(i_order + H + cold, mask=cold < C, other=0)
            w = tl.load(
                i_down + neuron[:, None].to(tl.int64) * D + d[None, :],
                mask=(cold[:, None] < C) & (d[None, :] < D),
                other=0.0,
            )
            acc = tl.dot(h, w, acc, input_precision=PRECISION)
        if HAS_DOWN_BIAS:
            acc += tl.load(i_down_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        token = tl.where(has_row, heavy_tokens(i_heavy, begin + row, n_first, n_heavy, M), 0).to(tl.int64)
        inside = has_row[:, None] & (d[None, :] < D)
        tl.store(o_y + token[:, None] * D + d[None, :], acc.to(o_y.dtype.element_ty), mask=inside)


@triton.jit
def _l1_rows(i_h, i_heavy, n_first, n_heavy, begin, end, o_l1, M, C, BC: tl.constexpr):
    for r in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        total = tl.zeros((BC,), tl.float32)
        for first in range(0, C, BC):
            cold = first + tl.arange(0, BC)
            h = tl.load(i_h + (r - begin) * C + cold, mask=cold < C, other=0.0)
            total += tl.abs(h.to(tl.float32))
        tl.store(o_l1 + heavy_tokens(i_heavy, r, n_first, n_heavy, M), tl.sum(total, axis=0))


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
    i_gate,  # [F, D]
    i_up,  # [F, D]; plain FFN: unused
    i_gate_bias,  # [C] or unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    i_order,  # int32 [F]: rows of the weights, hot neurons first
    m_counters,  # int32, see Turns
    i_heavy,  # likewise
    i_counted,  # [M] bool or unused: tokens for ``m_counts``
    m_h,  # [CHUNK, C], for what is computed on the way
    o_y,  # [M, D], heavy rows
    o_l1,  # [M] or unused
    m_counts,  # int32 [C] or unused: of how many tokens each neuron is active; added to
    i_entries,  # see Turns
    m_watch,  # int32 [2] or unused: entries of all lists, and heavy tokens; added to
    M,
    D,
    C,
    H,
    x_stride,
    cap,
    watches,  # 0 or 1: not a constant, which would be another kernel to compile for one of several calls
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
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
    n_first, n_heavy = count_heavy(m_counters, M)
    if watches != 0:
        entries = tl.zeros((1024,), tl.int32)
        for first in range(tl.program_id(0) * 1024, M, tl.num_programs(0) * 1024):
            token = first + tl.arange(0, 1024)
            n = tl.load(i_entries + token, mask=token < M, other=0)
            n = active_of(n)
            entries += tl.where(is_listed(n, m_counters, M, cap, LONG), n, 0)
        tl.atomic_add(m_watch, tl.sum(entries, axis=0), sem="relaxed")
        if tl.program_id(0) == 0:
            tl.atomic_add(m_watch + 1, n_heavy, sem="relaxed")
    if n_heavy > 0:
        arrived = 0
        for begin in range(0, n_heavy, CHUNK):
            end = min(begin + CHUNK, n_heavy)
            if begin > 0:  # the last chunk's h is read no more
                arrived += tl.num_programs(0)
                wait_for_all(m_counters + N_WAITING, arrived)
            few = end - begin <= FEW
            if few:
                _h_tiles(i_x, i_gate, i_up, i_gate_bias, i_up_bias, i_order, i_heavy, i_counted, n_first, n_heavy,
                         begin, end, m_h, m_counts, M, D, C, H, x_stride, FEW_BM, FEW_BN, FEW_BK, GROUP_M, GATED,
                         SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_MASK, HAS_STATISTICS, PRECISION)  # fmt: skip
            else:
                _h_tiles(i_x, i_gate, i_up, i_gate_bias, i_up_bias, i_order, i_heavy, i_counted, n_first, n_heavy,
                         begin, end, m_h, m_counts, M, D, C, H, x_stride, BM, BN, BK, GROUP_M, GATED,
                         SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_MASK, HAS_STATISTICS, PRECISION)  # fmt: skip
            arrived += tl.num_programs(0)
            wait_for_all(m_counters + N_WAITING, arrived)
            if few:
                _down_tiles(m_h, i_down, i_down_bias, i_order, i_heavy, n_first, n_heavy, begin, end, o_y, M, D, C, H,
                            FEW_BM, FEW_BN, FEW_BK, GROUP_M, HAS_DOWN_BIAS, PRECISION)  # fmt: skip
            else:
                _down_tiles(m_h, i_down, i_down_bias, i_order, i_heavy, n_first, n_heavy, begin, end, o_y, M, D, C, H,
                            BM, BN, BK, GROUP_M, HAS_DOWN_BIAS, PRECISION)  # fmt: skip
            if HAS_STATISTICS:
                _l1_rows(m_h, i_heavy, n_first, n_heavy, begin, end, o_l1, M, C, 1024)
        leave_for_all(m_counters + N_WAITING, arrived)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    tile: GateTile,
    gated: bool,
    squared: bool,
    biases: tuple[bool, bool, bool],
    has_mask: bool,
    has_statistics: bool,
    aligned: bool,
    chunk: int,
    long: int,
) -> Kernel:
    """``aligned``: C is a multiple of 16."""
    small = few(tile)
    integers = (torch.int32, torch.int32, torch.int32, torch.bool)
    pointers = (*[dtype] * 7, *integers, dtype, dtype, torch.float32, *[torch.int32] * 3)
    return Kernel(
        _heavy_kernel,
        (*pointers, ANY, MULTIPLE, MULTIPLE if aligned else ANY, ANY, MULTIPLE, ANY, ANY),
        {
            "GATED": gated,
            "SQUARED": squared,
            "HAS_GATE_BIAS": biases[0],
            "HAS_UP_BIAS": biases[1],
            "HAS_DOWN_BIAS": biases[2],
            "HAS_MASK": has_mask,
            "HAS_STATISTICS": has_statistics,
            "LONG": long,
            "CHUNK": chunk,
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
        cooperative=True,
    )


def write_heavy_(
    y: Tensor,
    x: Tensor,
    turns: Turns,
    w: Weights,
    order: Tensor,
    n_hot: int,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
    statistics: tuple[Tensor, Tensor] | None = None,
    token_mask: Tensor | None = None,
    watch: tuple[Tensor, int] | None = None,
    space: Space | None = None,
) -> None:
    """Write the rows of y [M, D] that belong to heavy tokens.

    ``w``: all rows [F, D], Wd too, and the gate's bias of the cold neurons [C]; ``order``: int32 [F], ``n_hot`` hot
    neurons first. ``statistics``: room for sums of abs(h) by tokens [M], and counts of the cold neurons, int32 [C], to
    which those of the tokens in ``token_mask`` are added. ``watch``: int32 [2], to which the numbers of all entries and
    of heavy tokens are added, and the lists' cap. ``programs``: at most the multiprocessors."""
    (M, D), C = x.shape, len(order) - n_hot
    if M == 0:
        return
    biases = w.gate_bias, w.up_bias, w.down_bias
    has_bias = biases[0] is not None, biases[1] is not None, biases[2] is not None
    token_mask = None if statistics is None else token_mask
    has_statistics, has_mask = statistics is not None, token_mask is not None
    flags = w.up is not None, squared, has_bias, has_mask, has_statistics, C % 16 == 0
    kernel = _kernel(x.dtype, tile, *flags, CHUNK, LONG)
    h = (x.new_empty if space is None else space.take)(min(M, CHUNK), C)
    up, b_gate, b_up, b_down, mask = (0 if t is None else t for t in (w.up, *biases, token_mask))
    l1, counts = statistics or (0, 0)
    counted, cap = watch or (0, 0)
    programs = 1 if INTERPRETED else programs  # the interpreter runs one after the other
    weights = w.gate, up, b_gate, b_up, w.down, b_down
    of_turns, outputs = (turns.counters, turns.heavy), (h, y, l1, counts, turns.entries, counted)
    numbers = M, D, C, n_hot, x.stride(0), cap, int(watch is not None)
    kernel(programs, x, *weights, order, *of_turns, mask, *outputs, *numbers)
