"""From a bitmap by tokens to lists by neurons: which tokens each cold neuron fired for, in the tokens' order.

Two steps, both deterministic: no atomics, and what a place is follows from counts alone.

1. ``transpose``: the bitmap by neurons, a word for 32 tokens of one neuron, and how often each neuron fired in every
   chunk of CHUNK tokens. Summed up, neuron by neuron and chunk by chunk, these counts are offsets. (The first pass
   counts for the statistics: those of other tokens, with the heavy ones and without the ones that do not count.)
2. ``place_of`` (called by the kernel that has something to put there): the place of the pair (token, neuron) is its
   chunk's offset plus the bits below the token in at most CHUNK / 32 words.

Neurons are in the order of the bitmap's bits ("key": 32 * word + bit). Heavy tokens are left out: they have no lists.
Bytes, M 16384, C 5632: the bitmap in and out, 12 MB each, and a word of offsets a chunk and neuron (1.4 MB).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.prefill.lists import LONG, Lists, rooms
from twell.gpu.shared.launch import ANY, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import bit_of_neuron, neuron_of_bit, popcount, start_after
from twell.saved import CHUNK

_CHUNKS_AT_ONCE = 64


class Columns(NamedTuple):
    """K = 32 * words keys, P = ceil(M / CHUNK) chunks."""

    bits: Tensor  # int32 [ceil(M / 32), K]: bit t of row b: token 32 b + t
    offsets: Tensor  # int32 [K P + 1]: the pairs before those of a key and chunk; the last: all


@triton.jit
def is_listed(n, i_marks, M, cap, LONG: tl.constexpr):
    """Whether tokens with n active neurons have a list, which all but heavy ones have."""
    n_long, _ = rooms(M)
    longest = tl.where(tl.load(i_marks + 1) <= n_long, tl.maximum(cap, LONG), cap)
    return n <= longest


@triton.jit
def _transpose_kernel(
    i_bitmap,  # [M, words]
    i_marks,  # int32, see Lists
    o_bits,  # [ceil(M / 32), 32 words]
    o_counts,  # [1 + 32 words P]: 0, then by keys and chunks
    i_counted,  # [M] bool or unused: tokens for the statistics
    o_statistics,  # [P, C] or unused
    M,
    C,
    words,
    cap,
    P,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    if tl.program_id(0) == 0:
        tl.store(o_counts, 0)
    word = tl.program_id(0) % words
    chunk = tl.program_id(0) // words
    bit = tl.arange(0, 32)
    key = 32 * word + bit
    t = tl.arange(0, 32)
    place = tl.full((32,), 1, tl.uint32) << t.to(tl.uint32)
    total = tl.zeros((32,), tl.int32)
    statistics = tl.zeros((32,), tl.int32)
    for block in range(chunk * (CHUNK // 32), min((chunk + 1) * (CHUNK // 32), tl.cdiv(M, 32))):
        token = block * 32 + t
        n = tl.load(i_marks + 4 + token, mask=token < M, other=0)
        listed = is_listed(tl.where(n < 0, -1 - n, n), i_marks, M, cap, LONG)
        row = tl.load(i_bitmap + token.to(tl.int64) * words + word, mask=token < M, other=0).to(tl.uint32, bitcast=True)
        one = (row[:, None] >> bit[None, :].to(tl.uint32)) & 1
        column = tl.sum(one * place[:, None], axis=0)
        if HAS_STATISTICS:
            counted = column
            if HAS_MASK:
                counts = tl.load(i_counted + token, mask=token < M, other=0)
                counted = column & tl.sum(tl.where(counts != 0, place, 0), axis=0)
            statistics += popcount(counted)
        column = column & tl.sum(tl.where(listed, place, 0), axis=0)
        total += popcount(column)
        tl.store(o_bits + (tl.zeros((32,), tl.int64) + block) * (32 * words) + key, column.to(tl.int32, bitcast=True))
    tl.store(o_counts + 1 + key * P + chunk, total)
    if HAS_STATISTICS:
        neuron = neuron_of_bit(word, bit)
        tl.store(o_statistics + chunk * C + neuron, statistics, mask=neuron < C)


@triton.jit
def _total_kernel(i_counts, o_totals, P, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Of each key, over the chunks: 32 keys a program."""
    start_after(OVERLAPS)
    key = tl.program_id(0) * 32 + tl.arange(0, 32)
    total = tl.zeros((32,), tl.int32)
    for first in range(0, P, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        at = i_counts + 1 + key[:, None].to(tl.int64) * P + chunk[None, :]
        total += tl.sum(tl.load(at, mask=(chunk < P)[None, :], other=0), axis=1)
    tl.store(o_totals + key, total)


@triton.jit
def _add_up_kernel(i_totals, m_counts, P, KEYS: tl.constexpr, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
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
    for first in range(0, P, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        at = m_counts + 1 + key[:, None].to(tl.int64) * P + chunk[None, :]
        counts = tl.load(at, mask=(chunk < P)[None, :], other=0)
        tl.store(at, start[:, None] + tl.cumsum(counts, axis=1), mask=(chunk < P)[None, :])
        start += tl.sum(counts, axis=1)


@triton.jit
def place_of(i_bits, i_offsets, token, neuron, there, keys, P, CHUNK: tl.constexpr):
    """Places of the pairs (token, neuron[:]) in the lists by neurons."""
    key = bit_of_neuron(neuron.to(tl.int32))
    chunk = token // CHUNK
    block = token // 32
    b = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    before = there[:, None] & (b <= block)[None, :]
    bits = tl.load(i_bits + b[None, :].to(tl.int64) * keys + key[:, None], mask=before, other=0)
    bits = bits.to(tl.uint32, bitcast=True)
    below = (tl.full((), 1, tl.uint32) << (token % 32).to(tl.uint32)) - 1
    bits = tl.where((b == block)[None, :], bits & below, bits)
    return tl.load(i_offsets + key * P + chunk, mask=there, other=0) + tl.sum(popcount(bits), axis=1)


@functools.cache
def _kernel(has_statistics: bool, has_mask: bool, overlaps: bool) -> Kernel:
    pointers = (torch.int32, torch.int32, torch.int32, torch.int32, torch.bool, torch.int32)
    constants = {"LONG": LONG, "CHUNK": CHUNK, "HAS_STATISTICS": has_statistics, "HAS_MASK": has_mask}
    return Kernel(_transpose_kernel, (*pointers, ANY, ANY, ANY, ANY, ANY), constants | {"OVERLAPS": overlaps}, warps=1)


@functools.cache
def _adders(overlaps: bool) -> tuple[Kernel, Kernel]:
    constants = {"CHUNKS": _CHUNKS_AT_ONCE, "OVERLAPS": overlaps}
    total = Kernel(_total_kernel, (torch.int32, torch.int32, ANY), constants, warps=4)
    return total, Kernel(_add_up_kernel, (torch.int32, torch.int32, ANY), {"KEYS": 1024} | constants, warps=4)


def transpose(
    bitmap: Tensor,
    lists: Lists,
    n_neurons: int,
    token_mask: Tensor | None,
    columns: Columns,
    statistics: Tensor | None = None,
    space: Space | None = None,
) -> None:
    """Write the bitmap [M, words] of C neurons by neurons, less its heavy tokens, into ``columns``.

    And into ``statistics`` int32 [P, C] for how many of the tokens in ``token_mask`` each neuron was active, heavy or
    not, chunk by chunk."""
    M, words = bitmap.shape
    bits, offsets = columns
    if M == 0 or words == 0:
        return
    P = ceil_div(M, CHUNK)
    mask, seen = 0 if token_mask is None else token_mask, 0 if statistics is None else statistics
    kernel = _kernel(statistics is not None, token_mask is not None, can_overlap())
    kernel(words * P, bitmap, lists.marks, bits, offsets, mask, seen, M, n_neurons, words, lists.cap, P)
    totals = (bitmap.new_empty if space is None else space.take)(32 * words, dtype=torch.int32)
    total, add_up = _adders(can_overlap())
    total(words, offsets, totals, P)
    add_up(words, totals, offsets, P)
