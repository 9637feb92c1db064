"""Lists by neurons: which tokens each cold neuron fired for, in the tokens' order.

Both steps are deterministic; what a place is follows from counts alone.

1. ``lists.py`` has set a bit for every entry in a table by neurons, a word for 32 tokens of one neuron. ``count``: how
   often each neuron fired in every chunk of CHUNK tokens. Summed up, neuron by neuron and chunk by chunk, these counts
   are offsets. (The first pass also counts for the statistics, without tokens that do not count there.)
2. ``place_of`` (called by the kernel that has something to put there): the place of the pair (token, neuron) is its
   chunk's offset plus the bits below the token in at most CHUNK / 32 words.

Heavy tokens have no lists. Tokens over cap have set their bits before it was known that they are too many for lists of
their own: these are taken out.
Bytes, M 16384, C 5632: the bits, 12 MB, and a word of offsets a chunk and neuron (1.4 MB).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.formats import TILE
from twell.gpu.prefill.lists import LONG, Lists, active_of, is_listed
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import popcount, start_after
from twell.saved import CHUNK

_CHUNKS_AT_ONCE = 64


class Columns(NamedTuple):
    """K keys: the cold neurons, and as many more as fill the last tile; P = ceil(M / CHUNK) chunks."""

    bits: Tensor  # int32 [ceil(M / 32), K]: bit t of row b: token 32 b + t
    offsets: Tensor  # int32 [P, K + 16]: the pairs before those of a chunk and key; [0, K]: all


@triton.jit
def _bits_of(flags, CHUNK: tl.constexpr):
    """uint32 [CHUNK / 32] of flags [CHUNK]."""
    place = tl.full((CHUNK,), 1, tl.uint32) << (tl.arange(0, CHUNK) % 32).to(tl.uint32)
    return tl.sum(tl.reshape(tl.where(flags, place, 0), (CHUNK // 32, 32)), axis=1)


@triton.jit
def _count_kernel(
    m_bits,  # [ceil(M / 32), keys]
    i_counters,  # see Turns
    i_entries,
    o_counts,  # [P, keys + 16]
    i_counted,  # [M] bool or unused: tokens for the statistics
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
    key = tl.program_id(0) % (keys // KEYS) * KEYS + tl.arange(0, KEYS)
    chunk = tl.program_id(0) // (keys // KEYS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.load(i_entries + token, mask=token < M, other=0)
    listed = is_listed(active_of(n), i_counters, M, cap, LONG)
    block = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    at = m_bits + block[:, None].to(tl.int64) * keys + key[None, :]
    there = (block < tl.cdiv(M, 32))[:, None] & (key < keys)[None, :]
    bits = tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True) & _bits_of(listed, CHUNK)[:, None]
    if tl.min(listed.to(tl.int32), axis=0) == 0:
        tl.store(at, bits.to(tl.int32, bitcast=True), mask=there)
    tl.store(o_counts + chunk * (keys + 16) + key, tl.sum(popcount(bits), axis=0))
    if HAS_STATISTICS:
        if HAS_MASK:
            counted = tl.load(i_counted + token, mask=token < M, other=0) != 0
            bits = bits & _bits_of(counted, CHUNK)[:, None]
        tl.store(o_statistics + chunk * C + key, tl.sum(popcount(bits), axis=0), mask=key < C)


@triton.jit
def _total_kernel(i_counts, o_totals, keys, P, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Of each key, over the chunks: 32 keys a program."""
    start_after(OVERLAPS)
    key = tl.program_id(0) * 32 + tl.arange(0, 32)
    total = tl.zeros((CHUNKS, 32), tl.int32)
    for first in range(0, P, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        total += tl.load(i_counts + chunk * (keys + 16) + key[None, :], mask=chunk < P, other=0)
    tl.store(o_totals + key, tl.sum(total, axis=0))


@triton.jit
def _add_up_kernel(i_totals, m_counts, keys, P, KEYS: tl.constexpr, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Counts become offsets: 32 keys a program, after the sum of all before."""
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
def place_of(i_bits, i_offsets, token, neuron, there, keys, CHUNK: tl.constexpr):
    """Places of the pairs (token, neuron[:]) in the lists by neurons."""
    chunk = token // CHUNK
    block = token // 32
    b = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    before = there[:, None] & (b <= block)[None, :]
    bits = tl.load(i_bits + b[None, :].to(tl.int64) * keys + neuron[:, None], mask=before, other=0)
    bits = bits.to(tl.uint32, bitcast=True)
    below = (tl.full((), 1, tl.uint32) << (token % 32).to(tl.uint32)) - 1
    bits = tl.where((b == block)[None, :], bits & below, bits)
    offset = tl.load(i_offsets + chunk * (keys + 16) + neuron, mask=there, other=0)
    return offset + tl.sum(popcount(bits), axis=1)


@functools.cache
def _kernel(has_statistics: bool, has_mask: bool, overlaps: bool) -> Kernel:
    pointers = (*[torch.int32] * 4, torch.bool, torch.int32)
    constants = {"LONG": LONG, "CHUNK": CHUNK, "KEYS": TILE, "HAS_STATISTICS": has_statistics, "HAS_MASK": has_mask}
    numbers = (ANY, ANY, MULTIPLE, ANY)
    return Kernel(_count_kernel, (*pointers, *numbers), constants | {"OVERLAPS": overlaps}, warps=4)


@functools.cache
def _adders(overlaps: bool) -> tuple[Kernel, Kernel]:
    constants = {"CHUNKS": _CHUNKS_AT_ONCE, "OVERLAPS": overlaps}
    arguments = (torch.int32, torch.int32, MULTIPLE, ANY)
    total = Kernel(_total_kernel, arguments, constants, warps=4)
    return total, Kernel(_add_up_kernel, arguments, {"KEYS": 1024} | constants, warps=4)


def count(
    columns: Columns,
    lists: Lists,
    n_neurons: int,
    token_mask: Tensor | None,
    statistics: Tensor | None = None,
    space: Space | None = None,
) -> None:
    """Write the offsets of ``columns``, whose bits ``list_active`` has set for C neurons, and take out heavy tokens.

    And into ``statistics`` int32 [P, C] for how many of the tokens in ``token_mask`` that have lists each neuron was
    active, chunk by chunk."""
    (bits, offsets), M = columns, lists.turns.entries.shape[0]
    keys, P = bits.shape[1], ceil_div(M, CHUNK)
    if M == 0 or keys == 0:
        return
    mask, seen = 0 if token_mask is None else token_mask, 0 if statistics is None else statistics
    kernel, turns = _kernel(statistics is not None, token_mask is not None, can_overlap()), lists.turns
    numbers = M, n_neurons, keys, lists.cap
    kernel(keys // TILE * P, bits, turns.counters, turns.entries, offsets, mask, seen, *numbers)
    totals = (bits.new_empty if space is None else space.take)(keys, dtype=torch.int32)
    total, add_up = _adders(can_overlap())
    total(keys // 32, offsets, totals, keys, P)
    add_up(keys // 32, totals, offsets, keys, P)
