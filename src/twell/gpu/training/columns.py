"""From lists by tokens to lists by neurons: the tokens for which each cold neuron fired, in the tokens' order.

All steps are deterministic: the place of an entry in the lists by neurons, its *pair*, follows from counts alone.

 1. ``lists.py`` has set one bit per entry in a table by neurons, a word for 32 tokens of one neuron: int32
    [ceil(M / 32), K], bit t of row b is token 32 b + t. The first kernel counts how often each neuron fired in every
    chunk of CHUNK tokens (and again for the statistics, without masked tokens).
 2. Two kernels sum these counts neuron by neuron and chunk by chunk: they become offsets.
 3. The pair of an entry (token, neuron) is its chunk's offset plus the number of bits below the token in at most
    CHUNK / 32 words. That is a chain of four loads. It has a launch of its own, in which all entries wait at once;
    inside the tail's backward each token would wait once per entry.

Heavy tokens have no lists. Tokens over cap set their bits before it was known that they are too many for lists of their
own: the first kernel clears these bits.
Bytes, M 16384, C 5632: the bits, 12 MB, not needed after this; 4 per entry, and an offset per chunk and neuron (1.4
MB).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.formats import TILE, n_tiles
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div
from twell.gpu.shared.lists import LONG, N_OVER, Lists, active_of, is_listed, rooms
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import popcount, start_after
from twell.saved import CHUNK, n_long

_CHUNKS_AT_ONCE = 64
_KEYS = 256  # per program of _count_kernel
_TOKENS = 16  # per program of _pair_kernel


class Columns(NamedTuple):
    """K keys: the cold neurons, padded to whole tiles of TwELL; P = ceil(M / CHUNK) chunks."""

    offsets: Tensor  # int32 [P, K + 16]: number of pairs before a chunk and key; [0, K]: all pairs
    pair_of: Tensor  # int32 [entries]: the pair of each list entry

    @property
    def keys(self) -> int:
        return self.offsets.shape[1] - 16


def bits_shape(tokens: int, n_neurons: int) -> tuple[int, int]:
    """Shape of the table of bits for C neurons."""
    return ceil_div(tokens, 32), TILE * n_tiles(n_neurons)


@triton.jit
def _bits_of(flags, CHUNK: tl.constexpr):
    """uint32 [CHUNK / 32] of flags [CHUNK]."""
    place = tl.full((CHUNK,), 1, tl.uint32) << (tl.arange(0, CHUNK) % 32).to(tl.uint32)
    return tl.sum(tl.reshape(tl.where(flags, place, 0), (CHUNK // 32, 32)), axis=1)


@triton.jit
def _count_kernel(
    m_bits,  # [ceil(M / 32), keys]
    i_counters,  # see Turns, as i_entries
    i_entries,
    o_counts,  # [P, keys + 16]
    i_counted,  # bool [M] or unused: tokens for the statistics
    o_statistics,  # [P, C] or unused
    M,
    C,
    keys,
    cap,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    across = tl.cdiv(keys, KEYS)
    key = tl.program_id(0) % across * KEYS + tl.arange(0, KEYS)
    chunk = tl.program_id(0) // across
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.load(i_entries + token, mask=token < M, other=0)
    listed = is_listed(active_of(n), i_counters, M, cap, LONG)
    block = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    at = m_bits + block[:, None].to(tl.int64) * keys + key[None, :]
    there = (block < tl.cdiv(M, 32))[:, None] & (key < keys)[None, :]
    bits = tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True) & _bits_of(listed, CHUNK)[:, None]
    if tl.min(listed.to(tl.int32), axis=0) == 0:
        tl.store(at, bits.to(tl.int32, bitcast=True), mask=there)
    tl.store(o_counts + chunk * (keys + 16) + key, tl.sum(popcount(bits), axis=0), mask=key < keys)
    if HAS_STATISTICS:
        if HAS_MASK:
            counted = tl.load(i_counted + token, mask=token < M, other=0) != 0
            bits = bits & _bits_of(counted, CHUNK)[:, None]
        tl.store(o_statistics + chunk * C + key, tl.sum(popcount(bits), axis=0), mask=key < C)


@triton.jit
def _total_kernel(i_counts, o_totals, keys, P, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Sum each key's counts over the chunks: 32 keys per program."""
    start_after(OVERLAPS)
    key = tl.program_id(0) * 32 + tl.arange(0, 32)
    total = tl.zeros((CHUNKS, 32), tl.int32)
    for first in range(0, P, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        total += tl.load(i_counts + chunk * (keys + 16) + key[None, :], mask=chunk < P, other=0)
    tl.store(o_totals + key, tl.sum(total, axis=0))


@triton.jit
def _add_up_kernel(i_totals, m_counts, keys, P, KEYS: tl.constexpr, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Turn counts into offsets: 32 keys per program, starting from the sum of all keys before."""
    start_after(OVERLAPS)
    first_key = tl.program_id(0) * 32
    before = tl.zeros((KEYS,), tl.int32)
    for first in range(0, first_key, KEYS):
        other = first + tl.arange(0, KEYS)
        before += tl.load(i_totals + other, mask=other < first_key, other=0)
    key = first_key + tl.arange(0, 32)
    total = tl.load(i_totals + key)
    start = tl.sum(before, axis=0) + tl.cumsum(total, axis=0) - total
    tl.store(m_counts + keys + 0 * key, start + total, mask=key == keys - 1)
    for first in range(0, P, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        at = m_counts + chunk * (keys + 16) + key[None, :]
        counts = tl.load(at, mask=chunk < P, other=0)
        tl.store(at, start[None, :] + tl.cumsum(counts, axis=0) - counts, mask=chunk < P)
        start += tl.sum(counts, axis=0)


@triton.jit
def _pair_kernel(
    i_bits,  # [ceil(M / 32), keys]
    i_offsets,  # [P, keys + 16]
    i_rows,  # see Lists
    i_places,  # int32 [F]: index of each cold neuron among the cold ones
    i_counters,  # see Turns, as the next two
    i_entries,
    i_heavy,
    o_pair_of,  # int32 [entries]
    M,
    keys,
    cap,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,  # entries of a token at once
    OVERLAPS: tl.constexpr,
):
    """TOKENS tokens per program: first the long ones, then all in turn."""
    start_after(OVERLAPS)
    n_long, _ = rooms(M)
    of_long = tl.cdiv(n_long, TOKENS)
    if tl.program_id(0) < of_long:
        long = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        n_over = tl.load(i_counters + N_OVER)
        there = (long < n_over) & (n_over <= n_long)
        token = tl.load(i_heavy + M - 1 - long, mask=there, other=0)
        n = active_of(tl.load(i_entries + token, mask=there, other=0))
        start = long.to(tl.int64) * LONG + (tl.zeros((), tl.int64) + M) * cap
    else:
        token = (tl.program_id(0) - of_long) * TOKENS + tl.arange(0, TOKENS)
        n = active_of(tl.load(i_entries + token, mask=token < M, other=0))
        n = tl.where(n <= cap, n, 0)
        start = token.to(tl.int64) * cap
    chunk = token // CHUNK
    below = (tl.full((TOKENS,), 1, tl.uint32) << (token % 32).to(tl.uint32)) - 1
    for first in range(0, tl.max(n, axis=0), ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        there = e[None, :] < n[:, None]
        at = start[:, None] + e[None, :]
        neuron = tl.load(i_places + tl.load(i_rows + at, mask=there, other=0).to(tl.int32), mask=there, other=0)
        pair = tl.load(i_offsets + chunk[:, None] * (keys + 16) + neuron, mask=there, other=0)
        for b in tl.static_range(CHUNK // 32):
            block = chunk * (CHUNK // 32) + b
            before = there & (block <= token // 32)[:, None]
            bits = tl.load(i_bits + block[:, None].to(tl.int64) * keys + neuron, mask=before, other=0)
            bits = bits.to(tl.uint32, bitcast=True)
            pair += popcount(tl.where((block == token // 32)[:, None], bits & below[:, None], bits))
        tl.store(o_pair_of + at, pair, mask=there)


@functools.cache
def _kernel(has_statistics: bool, has_mask: bool, overlaps: bool) -> Kernel:
    pointers = (*[torch.int32] * 4, torch.bool, torch.int32)
    constants = {"LONG": LONG, "CHUNK": CHUNK, "KEYS": _KEYS, "HAS_STATISTICS": has_statistics, "HAS_MASK": has_mask}
    numbers = (ANY, ANY, MULTIPLE, ANY)
    return Kernel(_count_kernel, (*pointers, *numbers), constants | {"OVERLAPS": overlaps}, warps=4)


@functools.cache
def _adders(overlaps: bool) -> tuple[Kernel, Kernel]:
    constants = {"CHUNKS": _CHUNKS_AT_ONCE, "OVERLAPS": overlaps}
    arguments = (torch.int32, torch.int32, MULTIPLE, ANY)
    total = Kernel(_total_kernel, arguments, constants, warps=4)
    return total, Kernel(_add_up_kernel, arguments, {"KEYS": 1024} | constants, warps=4)


@functools.cache
def _pairs(narrow: torch.dtype, overlaps: bool) -> Kernel:
    pointers = (torch.int32, torch.int32, narrow, *[torch.int32] * 5)
    constants = {"LONG": LONG, "CHUNK": CHUNK, "TOKENS": _TOKENS, "ENTRIES": 16, "OVERLAPS": overlaps}
    return Kernel(_pair_kernel, (*pointers, ANY, MULTIPLE, ANY), constants, warps=4)


def write_columns(
    columns: Columns,
    bits: Tensor,
    lists: Lists,
    places: Tensor,
    n_neurons: int,
    token_mask: Tensor | None,
    statistics: Tensor | None = None,
    space: Space | None = None,
) -> None:
    """Write ``columns`` of C neurons, for whose entries ``list_active`` has set ``bits``. ``places``: of
    ``PlanTensors``.

    ``statistics`` int32 [P, C], if given, receives chunk by chunk the number of tokens with lists, among those in
    ``token_mask``, for which each neuron was active."""
    (offsets, pair_of), keys, M = columns, columns.keys, lists.turns.entries.shape[0]
    P = ceil_div(M, CHUNK)
    if M == 0 or keys == 0:
        return
    mask, seen = 0 if token_mask is None else token_mask, 0 if statistics is None else statistics
    kernel, turns = _kernel(statistics is not None, token_mask is not None, can_overlap()), lists.turns
    numbers = M, n_neurons, keys, lists.cap
    kernel(ceil_div(keys, _KEYS) * P, bits, turns.counters, turns.entries, offsets, mask, seen, *numbers)
    totals = (bits.new_empty if space is None else space.take)(keys, dtype=torch.int32)
    total, add_up = _adders(can_overlap())
    total(keys // 32, offsets, totals, keys, P)
    add_up(keys // 32, totals, offsets, keys, P)
    programs = ceil_div(n_long(M), _TOKENS) + ceil_div(M, _TOKENS)
    of_lists = lists.rows, places, turns.counters, turns.entries, turns.heavy
    _pairs(lists.rows.dtype, can_overlap())(programs, bits, offsets, *of_lists, pair_of, M, keys, lists.cap)
