"""From TwELL to lists: the active cold neurons of every token, and which class each token belongs to.

By its number n of active cold neurons a token is

    light    n <= first          has a list of up to ``cap`` entries; the tail processes it in turn
    early    first < n <= cap    has such a list, too; the tail starts with the first M / 8 of these tokens
    long     cap < n <= LONG     has a list of LONG entries; the tail starts with it (if there are at most n_long)
    heavy    all others          has no list and runs densely; so does a token with more than SLOTS entries in a tile

The class changes time, never a result: every token is in exactly one of them.

A tile's entries start at the sum of the counts before it. All tiles of a program's tokens write their first two entries
at once (nearly always all of them), then the next two.
Bytes, M 16384, C 5632: the counts (44 per token), a 32-byte sector for each tile with entries, 4 written per entry.

In training the kernel also sets one bit per entry in a table by neurons (``columns.py``). These atomics are on
integers, so the result does not depend on their order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.formats import SLOTS, TILE, TwELL, n_tiles, word_dtype
from twell.gpu.shared.launch import ANY, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.tiles import start_after
from twell.saved import LONG, Turns, index_dtype, list_size, n_early, n_long

_TILES = 128  # tiles of TwELL per warp: two tokens of 5632 neurons
_AT_ONCE = 2  # entries of a tile read at once
OVERFULL = tl.constexpr(1 << 30)  # n of a token with more than SLOTS entries in a tile
N_HEAVY, N_OVER, N_EARLY, N_WAITING = (tl.constexpr(i) for i in range(4))  # indices of Turns.counters


class Lists(NamedTuple):
    """Entries of token m start at m * cap, of the s-th long token at M * cap + s * LONG."""

    rows: Tensor  # int16 or int32 [M cap + n_long LONG]: row numbers in the model's weights
    values: Tensor  # [M cap + n_long LONG]: r
    turns: Turns
    cap: int


@triton.jit
def rooms(M):
    """Capacity for (long tokens, early tokens): ``n_long`` and ``n_early`` of saved.py."""
    return tl.maximum(M // 16, 256), M // 8


@triton.jit
def token_of_program(program, i_counters, i_entries, i_heavy, i_early, M, cap, LONG: tl.constexpr):
    """(token, n, start of its entries) for one of ``n_programs`` programs; n is -1 if there is nothing to do."""
    n_long, n_early = rooms(M)
    token = program - n_long - n_early
    if token >= 0:
        n = tl.load(i_entries + token)
        start = token.to(tl.int64) * cap
    else:
        n = tl.full((), -1, tl.int32)
        start = tl.full((), 0, tl.int64)
        if program < n_long:
            n_over = tl.load(i_counters + N_OVER)
            if (n_over <= n_long) & (program < n_over):
                token = tl.load(i_heavy + M - 1 - program)
                n = -1 - tl.load(i_entries + token)
                start = program.to(tl.int64) * LONG + (tl.zeros((), tl.int64) + M) * cap
        elif program - n_long < tl.load(i_counters + N_EARLY):
            token = tl.load(i_early + program - n_long)
            n = -1 - tl.load(i_entries + token)
            start = token.to(tl.int64) * cap
    return token, n, start


@triton.jit
def active_of(entries):
    """n from ``Turns.entries``: the sign only says whether the token's own program processes it."""
    return tl.where(entries < 0, -1 - entries, entries)


@triton.jit
def is_listed(n, i_counters, M, cap, LONG: tl.constexpr):
    """Whether tokens with n active neurons have a list: all but heavy ones do."""
    n_long, _ = rooms(M)
    longest = tl.where(tl.load(i_counters + N_OVER) <= n_long, tl.maximum(cap, LONG), cap)
    return n <= longest


@triton.jit
def count_heavy(i_counters, M):
    """(tokens heavy by their own count, all heavy tokens: with them those over cap, if they are more than n_long)."""
    n_over = tl.load(i_counters + N_OVER)
    n_long, _ = rooms(M)
    n_first = tl.load(i_counters + N_HEAVY)
    return n_first, n_first + tl.where(n_over > n_long, n_over, 0)  # up to n_long: the tail processes them


@triton.jit
def heavy_tokens(i_heavy, r, n_first, n_heavy, M):
    """The heavy tokens number ``r``; M past the last."""
    return tl.load(i_heavy + tl.where(r < n_first, r, M - 1 - (r - n_first)), mask=r < n_heavy, other=M)


@triton.jit
def count_for_drift(m_watch, i_entries, m_counters, n_heavy, M, cap, LONG: tl.constexpr):
    """Add the entries of all lists and the number of heavy tokens to ``m_watch`` int32 [2]: see drift.py."""
    entries = tl.zeros((1024,), tl.int32)
    for first in range(tl.program_id(0) * 1024, M, tl.num_programs(0) * 1024):
        token = first + tl.arange(0, 1024)
        n = tl.load(i_entries + token, mask=token < M, other=0)
        n = active_of(n)
        entries += tl.where(is_listed(n, m_counters, M, cap, LONG), n, 0)
    tl.atomic_add(m_watch, tl.sum(entries, axis=0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.atomic_add(m_watch + 1, n_heavy, sem="relaxed")


def n_programs(tokens: int) -> int:
    """Programs of the tail's kernels: see ``token_of_program``."""
    return n_long(tokens) + n_early(tokens) + tokens


@triton.jit
def _next_places(m_counter, wanted):
    """Reserve consecutive places at the counter for those ``wanted``, and return them."""
    wanted = wanted.to(tl.int32)
    n = tl.sum(wanted, axis=0)
    begin = tl.zeros_like(n)
    if n > 0:
        begin = tl.atomic_add(m_counter, n, sem="relaxed")
    return begin + tl.cumsum(wanted, axis=0) - wanted


@triton.jit
def _list_kernel(
    i_words,  # [M, T, SLOTS]
    i_counts,  # uint8 [M, T]
    i_order,  # int32 [F]: rows of the weights, hot neurons first
    o_rows,  # [size]
    o_values,  # [size]
    m_counters,  # see Turns, as the next three; zeros before the launch
    o_entries,
    o_heavy,
    o_early,
    m_bits,  # MARKS: int32 [ceil(M / 32), TILE T], zeros before the launch
    M,
    T,
    H,
    first,  # at most cap
    cap,
    TOKENS: tl.constexpr,
    BT: tl.constexpr,  # power of 2 >= T
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LONG: tl.constexpr,
    MARKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    n_long, n_early = rooms(M)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tile = tl.arange(0, BT)
    tiles = token[:, None].to(tl.int64) * T + tile[None, :]
    inside = (token < M)[:, None] & (tile < T)[None, :]
    count = tl.load(i_counts + tiles, mask=inside, other=0).to(tl.int32)
    n = tl.where(tl.max(count, axis=1) > SLOTS, OVERFULL, tl.sum(count, axis=1))

    is_over = (n > cap) & (n <= LONG)
    place = _next_places(m_counters + N_OVER, is_over)
    tl.store(o_heavy + M - 1 - place, token, mask=is_over)
    count = tl.where(((n <= cap) | (is_over & (place < n_long)))[:, None], count, 0)  # other tokens have no list
    own = token.to(tl.int64) * cap
    start = tl.where(is_over, place.to(tl.int64) * LONG + (tl.zeros((), tl.int64) + M) * cap, own)
    begin = start[:, None] + tl.cumsum(count, axis=1) - count
    for first_slot in range(0, tl.max(tl.max(count, axis=1), axis=0), AT_ONCE):
        slot = first_slot + tl.arange(0, AT_ONCE)[None, None, :]
        there = slot < count[:, :, None]
        word = tl.load(i_words + tiles[:, :, None] * SLOTS + slot, mask=there, other=0)
        cold = tile[None, :, None] * TILE + (word & (TILE - 1)).to(tl.int32)
        row = tl.load(i_order + H + cold, mask=there, other=0)
        if word.dtype.primitive_bitwidth == 32:
            value = (word >> 16).to(tl.int16).to(o_values.dtype.element_ty, bitcast=True)
        else:
            value = (word >> 32).to(tl.int32).to(o_values.dtype.element_ty, bitcast=True)
        at = begin[:, :, None] + slot
        tl.store(o_rows + at, row.to(o_rows.dtype.element_ty), mask=there)
        tl.store(o_values + at, value, mask=there)
        if MARKS:
            bit = tl.full((TOKENS,), 1, tl.int32) << (token % 32)
            bits = m_bits + (token // 32).to(tl.int64)[:, None, None] * (T * TILE) + cold
            tl.atomic_or(bits, tl.zeros_like(cold) | bit[:, None, None], mask=there, sem="relaxed")

    is_heavy = (n > cap) & (n > LONG)
    place = _next_places(m_counters + N_HEAVY, is_heavy)
    tl.store(o_heavy + place, token, mask=is_heavy)
    is_early = (n > first) & (n <= cap)
    place = _next_places(m_counters + N_EARLY, is_early)  # last: nothing depends on it
    tl.store(o_early + place, token, mask=is_early & (place < n_early))
    has_own_turn = (n <= first) | (is_early & (place >= n_early))
    tl.store(o_entries + token, tl.where(has_own_turn, n, -1 - n), mask=token < M)


def tokens_of_program(BT: int) -> int:
    """Tokens whose tiles fill a warp. ``BT``: power of 2 >= tiles of a token."""
    return min(8, max(1, _TILES // BT))


@functools.cache
def _kernel(dtype: torch.dtype, narrow: torch.dtype, BT: int, marks: bool, overlaps: bool) -> Kernel:
    pointers = (word_dtype(dtype), torch.uint8, torch.int32, narrow, dtype, *[torch.int32] * 5)
    sizes = {"TOKENS": tokens_of_program(BT), "BT": BT, "TILE": TILE, "SLOTS": SLOTS, "AT_ONCE": _AT_ONCE, "LONG": LONG}
    flags = {"MARKS": marks, "OVERLAPS": overlaps}
    return Kernel(_list_kernel, (*pointers, *[ANY] * 5), sizes | flags, warps=max(1, BT // _TILES))


def list_active(
    gate: TwELL,
    turns: Turns,
    order: Tensor,
    *,
    cap: int,
    first: int,
    out: tuple[Tensor, Tensor] | None = None,
    bits: Tensor | None = None,
) -> Lists:
    """Lists of a gate [M, C]. ``turns``: output, its counters 0; ``order``: int32 [F], hot neurons first; ``out``:
    buffers for rows and values; ``bits``: see columns.py, zeros."""
    assert gate.words is not None and (gate.tile, gate.slots, gate.counts.dtype) == (TILE, SLOTS, torch.uint8)
    (M, C), F = gate.shape, order.shape[0]
    if out is None:
        size = list_size(M, cap)
        out = order.new_empty(size, dtype=index_dtype(F)), order.new_empty(size, dtype=gate.dtype)
    rows, values = out
    if M:
        T = n_tiles(C)
        BT = power_of_2(T)
        kernel = _kernel(gate.dtype, rows.dtype, BT, bits is not None, can_overlap())
        marks = 0 if bits is None else bits
        numbers = M, T, F - C, min(first, cap), cap
        kernel(
            ceil_div(M, tokens_of_program(BT)), gate.words, gate.counts, order, rows, values, *turns, marks, *numbers
        )
    return Lists(rows, values, turns, cap)
