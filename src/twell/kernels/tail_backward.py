"""The cold tail's backward, token by token.

    dh = dy . Wd_n + l1 sign(h)     dz = dh u a'(r)     du = dh a     dx = sum over n of dz Wg_n + du Wu_n

(plain FFN: no u; dz = dh a'(r)). It runs as the tail's forward does, gathers three rows a (token, neuron) pair and
leaves dz, du and h in lists by neurons, for ``weight_gradients.py``. Sums are fp32, in the order of a token's neurons.
Bytes, M 16384, D 2048, 10 pairs a token, bf16: 2.0 GB, mostly from L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import can_overlap, ceil_div, launch, power_of_2
from twell.kernels.lists import LONG, Lists, n_early, n_long, n_programs, token_of_program
from twell.kernels.split import Layout
from twell.kernels.tiles import RowTile, bit_of_neuron, start_after
from twell.kernels.transpose import CHUNK, Columns, is_listed, place_of

SPLIT = 512  # pairs of a share, at least: see ``weight_gradients.py``
_MOST_SHARES = 4096  # there may be: room for their sums is 100 MB at D 2048


class Pairs(NamedTuple):
    """By neurons: see ``transpose.py``."""

    tokens: Tensor  # int32 [size]
    factors: Tensor  # [3, size]: dz, du, h
    owners: Tensor  # int32 [shares]: the neurons ("keys") of pairs 0, split, 2 split, ...; split = split_at(size)


def split_at(size: int) -> int:
    """Pairs of a share. A power of 2: kernels are compiled for it."""
    return max(SPLIT, power_of_2(ceil_div(size, _MOST_SHARES)))


@triton.jit
def _tail_backward_kernel(
    i_dy,  # [M, D]
    i_rows,  # [size]
    i_values,  # [size]
    i_saved_up,  # [size] or unused
    i_marks,  # int32, see Lists
    i_l1,  # [] or unused: the gradient of sum |h|
    i_counted,  # [M] bool or unused: tokens whose |h| counts
    i_gate,  # [F, D]
    i_up,  # [F, D] or unused
    i_down,  # [F, D], neuron-major
    i_places,  # [F] int32 or unused: cold neurons among the cold ones
    i_bits,  # see Columns
    i_offsets,
    o_dx,  # [M, D]
    o_tokens,  # see Pairs
    o_factors,
    o_owners,
    M,
    D,
    cap,
    n_early,
    long_start,
    size,
    keys,
    P,
    BD: tl.constexpr,
    WHOLE: tl.constexpr,  # BD == D
    NEURONS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WANTS_DX: tl.constexpr,
    WANTS_PAIRS: tl.constexpr,
    LONG: tl.constexpr,
    N_LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    dtype = o_factors.dtype.element_ty
    token, n, start = token_of_program(tl.program_id(0), i_marks, M, cap, n_early, long_start, LONG, N_LONG)
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
            inside = there[:, None] & in_d[None, :]
            down = tl.load(i_down + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            if WANTS_DX:  # asked for before the sum below, which is a barrier to the loads after it
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
                neuron = row
                if HAS_ORDER:
                    neuron = tl.load(i_places + row, mask=there, other=0)
                place = place_of(i_bits, i_offsets, token, neuron, there, keys, P, CHUNK).to(tl.int64)
                tl.store(o_tokens + place, token + tl.zeros_like(e), mask=there)
                tl.store(o_factors + place, dz.to(dtype), mask=there)
                if GATED:
                    tl.store(o_factors + size.to(tl.int64) + place, du.to(dtype), mask=there)
                tl.store(o_factors + 2 * size.to(tl.int64) + place, h.to(dtype), mask=there)
                key = bit_of_neuron(neuron.to(tl.int32))
                tl.store(o_owners + place // SPLIT, key, mask=there & (place % SPLIT == 0))
        if WANTS_DX:
            tl.store(o_dx + token.to(tl.int64) * D + d, acc.to(o_dx.dtype.element_ty), mask=in_d)
    elif WANTS_DX:
        own = tl.program_id(0) - N_LONG - n_early
        if own >= 0:
            active = -1 - tl.load(i_marks + 4 + own)
            if is_listed(active, i_marks, cap, LONG, N_LONG) == 0:  # heavy: what it adds comes later
                tl.store(o_dx + own.to(tl.int64) * D + d, tl.zeros((BD,), o_dx.dtype.element_ty), mask=in_d)


def write_tail_gradients(
    dx: Tensor | None,
    dy: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    lists: Lists,
    saved_up: Tensor | None,
    layout: Layout,
    columns: Columns | None,
    *,
    squared: bool,
    tile: RowTile,
) -> Pairs | None:
    """Write dx [M, D], zeros for heavy tokens; with ``columns`` return the pairs that the weight gradients want."""
    M, D = dy.shape
    size, up, order = lists.rows.shape[0], layout.up, layout.order
    pairs = None
    if columns is not None:
        tokens = torch.empty(size, dtype=torch.int32, device=dy.device)
        pairs = Pairs(tokens, lists.values.new_empty(3, size), tokens.new_empty(ceil_div(size, split_at(size))))
    if M == 0 or (dx is None and pairs is None):
        return pairs
    wide = power_of_2(D)
    launch(
        _tail_backward_kernel,
        n_programs(M),
        (
            dy,
            lists.rows,
            lists.values,
            dy if saved_up is None else saved_up,
            lists.marks,
            dy if dl1 is None else dl1,
            dy if token_mask is None else token_mask,
            layout.gate,
            dy if up is None else up,
            layout.down,
            lists.marks if order is None else order.places,
            lists.marks if columns is None else columns.bits,
            lists.marks if columns is None else columns.offsets,
            dy if dx is None else dx,
            lists.marks if pairs is None else pairs.tokens,
            dy if pairs is None else pairs.factors,
            lists.marks if pairs is None else pairs.owners,
            M,
            D,
            lists.cap,
            n_early(M),
            M * lists.cap,
            size,
            0 if columns is None else columns.bits.shape[1],
            ceil_div(M, CHUNK),
        ),
        {
            "BD": wide,
            "WHOLE": wide == D,
            "NEURONS": tile.neurons,
            "GATED": up is not None,
            "SQUARED": squared,
            "HAS_ORDER": order is not None,
            "HAS_L1": dl1 is not None,
            "HAS_MASK": token_mask is not None,
            "WANTS_DX": dx is not None,
            "WANTS_PAIRS": pairs is not None,
            "LONG": LONG,
            "N_LONG": n_long(M),
            "CHUNK": CHUNK,
            "SPLIT": split_at(size),
            "STAGES": tile.stages,
            "OVERLAPS": can_overlap(),
        },
        warps=tile.warps_for(wide),
        stages=tile.stages,
    )
    return pairs
