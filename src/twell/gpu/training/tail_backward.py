"""The tail's backward, token by token.

    dh = dy . Wd_n + l1 sign(h)     dz = dh u a'(r)     du = dh a     dx = sum over n of dz Wg_n + du Wu_n

(plain FFN: no u; dz = dh a'(r)). It has the tail's programs, gathers three rows per (token, neuron) pair and stores dz,
du and h in lists by neurons, for ``weight_gradients.py``. Sums are fp32, in the order of a token's neurons.
Bytes, M 16384, D 2048, 10 pairs per token, bf16: 2.0 GB, mostly from L2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.launch import LONG as LONG_NUMBER
from twell.gpu.shared.lists import LONG, Lists, is_listed, n_programs, rooms, token_of_program
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import RowTile, start_after
from twell.gpu.training.columns import Columns

SPLIT = 512  # pairs of a share, at least: see ``weight_gradients.py``
_MOST_SHARES = 4096  # the workspace for their sums is 100 MB at D 2048


class Pairs(NamedTuple):
    """Active (token, cold neuron) pairs in the order of neurons: see ``columns.py``."""

    tokens: Any  # int32 [size]
    factors: Any  # [3, size]: dz, du, h
    owners: Any  # int32 [shares]: neurons ("keys") of the pairs 0, split, 2 split, ...; split = split_at(size)


def split_at(size: int) -> int:
    """Pairs of a share: a power of 2, since kernels are compiled for it."""
    return max(SPLIT, power_of_2(ceil_div(size, _MOST_SHARES)))


@triton.jit
def _tail_backward_kernel(
    i_dy,  # [M, D]
    i_rows,  # [size]: see Lists
    i_values,  # [size]: r
    i_saved_up,  # [size]: u; plain FFN: unused
    i_counters,  # see Turns, as the next three
    i_entries,
    i_heavy,
    i_early,
    i_l1,  # [] or unused: the gradient of sum |h|
    i_counted,  # bool [M] or unused: tokens whose |h| counts
    i_gate,  # [F, D]
    i_up,  # [F, D] or unused
    i_down,  # [F, D], neuron-major
    i_places,  # int32 [F]: index of each cold neuron among the cold ones
    i_pair_of,  # see Columns
    o_dx,  # [M, D]
    o_tokens,  # see Pairs, as the next two
    o_factors,
    o_owners,
    M,
    D,
    cap,
    size,
    BD: tl.constexpr,
    WHOLE: tl.constexpr,  # BD == D
    NEURONS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WANTS_DX: tl.constexpr,
    WANTS_PAIRS: tl.constexpr,
    LONG: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    dtype = i_values.dtype.element_ty
    token, n, start = token_of_program(tl.program_id(0), i_counters, i_entries, i_heavy, i_early, M, cap, LONG)
    d = tl.arange(0, BD)
    in_d = (d < D) | WHOLE
    if n >= 0:
        dy = tl.load(i_dy + token.to(tl.int64) * D + d, mask=in_d, other=0.0).to(tl.float32)
        acc = tl.zeros((BD,), tl.float32)
        if HAS_L1:
            l1 = tl.load(i_l1).to(tl.float32)
            if HAS_MASK:
                l1 = tl.where(tl.load(i_counted + token) != 0, l1, 0.0)
        for first in tl.range(0, n, NEURONS, num_stages=STAGES):
            e = first + tl.arange(0, NEURONS)
            there = e < n
            row = tl.load(i_rows + start + e, mask=there, other=0)
            a = tl.load(i_values + start + e, mask=there, other=0.0).to(tl.float32)
            if WANTS_PAIRS:
                pair = tl.load(i_pair_of + start + e, mask=there, other=0).to(tl.int64)
            inside = there[:, None] & in_d[None, :]
            down = tl.load(i_down + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            if WANTS_DX:  # loaded before the sum below, which is a barrier to later loads
                gate = tl.load(i_gate + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            slope = tl.where(there, 1.0, 0.0)
            if SQUARED:
                slope = 2.0 * a
                a = a * a
            h = a
            if GATED:
                u = tl.load(i_saved_up + start + e, mask=there, other=0.0).to(tl.float32)
                h = a * u
                slope = slope * u
                if WANTS_DX:
                    up = tl.load(i_up + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            dh = tl.sum(down.to(tl.float32) * dy[None, :], axis=1)
            if HAS_L1:
                dh += tl.where(h > 0, l1, tl.where(h < 0, -l1, 0.0))
            dz = dh * slope
            du = dh * a
            if WANTS_DX:
                part = dz[:, None] * gate.to(tl.float32)
                if GATED:
                    part += du[:, None] * up.to(tl.float32)
                acc += tl.sum(part, axis=0)
            if WANTS_PAIRS:
                tl.store(o_tokens + pair, token + tl.zeros_like(e), mask=there)
                tl.store(o_factors + pair, dz.to(dtype), mask=there)
                if GATED:
                    tl.store(o_factors + size + pair, du.to(dtype), mask=there)
                tl.store(o_factors + 2 * size + pair, h.to(dtype), mask=there)
                is_first = there & (pair % SPLIT == 0)  # of a share
                tl.store(o_owners + pair // SPLIT, tl.load(i_places + row, mask=is_first, other=0), mask=is_first)
        if WANTS_DX:
            tl.store(o_dx + token.to(tl.int64) * D + d, acc.to(o_dx.dtype.element_ty), mask=in_d)
    elif WANTS_DX:
        n_long, n_early = rooms(M)
        own = tl.program_id(0) - n_long - n_early
        if own >= 0:
            active = -1 - tl.load(i_entries + own)
            if is_listed(active, i_counters, M, cap, LONG) == 0:  # heavy: heavy_backward.py adds to dx later
                tl.store(o_dx + own.to(tl.int64) * D + d, tl.zeros((BD,), o_dx.dtype.element_ty), mask=in_d)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    narrow: torch.dtype,
    D: int,
    tile: RowTile,
    split: int,
    **flags: bool,
) -> Kernel:
    """``flags``: GATED, SQUARED, HAS_L1, HAS_MASK, WANTS_DX, WANTS_PAIRS, OVERLAPS."""
    wide = power_of_2(D)
    of_lists = (narrow, dtype, dtype, *[torch.int32] * 4)
    of_columns = (torch.int32, torch.int32)
    pointers = (dtype, *of_lists, torch.float32, torch.bool, dtype, dtype, dtype, *of_columns)
    outputs = (dtype, torch.int32, dtype, torch.int32)
    return Kernel(
        _tail_backward_kernel,
        (*pointers, *outputs, ANY, MULTIPLE, ANY, LONG_NUMBER),
        {
            "BD": wide,
            "WHOLE": wide == D,
            "NEURONS": tile.neurons,
            "LONG": LONG,
            "SPLIT": split,
            "STAGES": tile.stages,
            **flags,
        },
        warps=tile.warps_for(wide),
        stages=tile.stages,
    )


def write_tail_gradients(
    dx: Tensor | None,
    dy: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    lists: Lists,
    saved_up: Tensor | None,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    places: Tensor,
    columns: Columns | None,
    *,
    squared: bool,
    tile: RowTile,
    space: Space | None = None,
) -> Pairs | None:
    """Write dx [M, D], zeros for heavy tokens; with ``columns`` return the pairs for the weight gradients.

    ``gate``, ``up``, ``down``: [F, D]; ``places``: of ``PlanTensors``; ``dl1``: float32."""
    (M, D), (rows, values, turns, cap) = dy.shape, lists
    size = rows.shape[0]
    split = split_at(size)
    pairs = None
    if columns is not None:
        new = dy.new_empty if space is None else space.take
        owners = new(ceil_div(size, split), dtype=torch.int32)
        pairs = Pairs(new(size, dtype=torch.int32), new(3, size, dtype=dy.dtype), owners)
    if M == 0 or (dx is None and pairs is None):
        return pairs
    kernel = _kernel(
        dy.dtype, rows.dtype, D, tile, split, GATED=up is not None, SQUARED=squared, HAS_L1=dl1 is not None,
        HAS_MASK=token_mask is not None, WANTS_DX=dx is not None, WANTS_PAIRS=pairs is not None, OVERLAPS=can_overlap(),
    )  # fmt: skip
    given = (0 if t is None else t for t in (saved_up, *turns, dl1, token_mask, gate, up, down, places))
    pair_of = 0 if columns is None else columns.pair_of
    outputs = (0, 0, 0) if pairs is None else pairs
    kernel(n_programs(M), dy, rows, values, *given, pair_of, 0 if dx is None else dx, *outputs, M, D, cap, size)
    return pairs
