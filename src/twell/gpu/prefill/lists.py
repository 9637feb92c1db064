"""From a bitmap to lists: the active cold neurons of every token, and which tokens have many.

By its number n of active cold neurons a token is

    light    n <= first                   has an entry list of up to ``cap`` neurons; the tail takes it in turn
    early    first < n <= cap             likewise, but the tail starts with it (the first M / 8 such tokens)
    long     cap < n <= LONG              has a list of its own, and the tail starts with it; if at most n_long are
    heavy    all others                   has no list, and runs densely

What a token is changes time, never a result: every token is in exactly one of them.

One warp a token. A word's entries start at the sum of the popcounts before it; every word writes its lowest bit, then
its next one, so that a row takes as many rounds as its fullest word has bits: 2 to 4 for a tail of 10.
Bytes, M 16384, C 5632: the bitmap once (12 MB), 32 a pair for its value, 10 written. (The tail
could read the values itself; it then waits for each of them: 0.49 instead of 0.45 ms at 29 neurons a token, H200.)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, power_of_2
from twell.gpu.shared.tiles import neuron_of_bit, popcount, start_after
from twell.saved import LONG, index_dtype, list_size, n_early, n_long

_CHUNK = 64  # entries that get their values at once


class Lists(NamedTuple):
    """Entries of token m: from m * cap; of the s-th long token: from M * cap + s * LONG.

    marks, int32:
        [0]             heavy tokens with n > LONG
        [1]             tokens with cap < n <= LONG, long or heavy
        [2]             tokens with first < n <= cap
        [4 + m]         n of token m if its turn is its own, else -1 - n
        [4 + M + i]     the tokens of [0] from the front, those of [1] from the back
        [4 + 2 M + i]   the early tokens
    """

    rows: Tensor  # int16 [M cap + n_long LONG]: neurons, by their rows in the model's weights
    values: Tensor  # [M cap + n_long LONG]: of the gate
    marks: Tensor
    cap: int


@triton.jit
def rooms(M):
    """(long tokens, early tokens) that there is room for: ``n_long`` and ``n_early`` of saved.py."""
    return tl.maximum(M // 16, 256), M // 8


@triton.jit
def token_of_program(program, i_marks, M, cap, LONG: tl.constexpr):
    """(token, n, start of its entries) of one of ``n_programs`` programs; n is -1 if there is nothing to do."""
    n_long, n_early = rooms(M)
    token = program - n_long - n_early
    if token >= 0:
        n = tl.load(i_marks + 4 + token)
        start = token.to(tl.int64) * cap
    else:
        n = tl.full((), -1, tl.int32)
        start = tl.full((), 0, tl.int64)
        if program < n_long:
            listed = tl.load(i_marks + 1)
            if (listed <= n_long) & (program < listed):
                token = tl.load(i_marks + 4 + M + (M - 1 - program))
                n = -1 - tl.load(i_marks + 4 + token)
                start = program.to(tl.int64) * LONG + (tl.zeros((), tl.int64) + M) * cap
        elif program - n_long < tl.load(i_marks + 2):
            token = tl.load(i_marks + 4 + 2 * M + (program - n_long))
            n = -1 - tl.load(i_marks + 4 + token)
            start = token.to(tl.int64) * cap
    return token, n, start


def n_programs(tokens: int) -> int:
    """See ``token_of_program``."""
    return n_long(tokens) + n_early(tokens) + tokens


@triton.jit
def _list_kernel(
    i_bitmap,  # [M, words]
    i_gate,  # [M, C]
    i_order,  # int32 [F]: rows of the weights, hot neurons first
    o_rows,  # [size]
    o_values,  # [size]
    m_marks,  # see Lists; starts with zeros
    M,
    C,
    H,
    words,
    first,
    cap,
    BW: tl.constexpr,  # power of 2 >= words
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    n_long, n_early = rooms(M)
    token = tl.program_id(0)
    word = tl.arange(0, BW)
    bits = tl.load(i_bitmap + token.to(tl.int64) * words + word, mask=word < words, other=0).to(tl.uint32, bitcast=True)
    in_word = popcount(bits)
    place = tl.cumsum(in_word, axis=0) - in_word
    n = tl.sum(in_word, axis=0)
    start = token.to(tl.int64) * cap
    has_room = n <= cap
    is_light = n <= first
    if n > first:
        if n <= cap:
            slot = tl.atomic_add(m_marks + 2, 1, sem="relaxed")
            is_light = slot >= n_early
            tl.store(m_marks + 4 + 2 * M + slot, token, mask=slot < n_early)
        elif n > LONG:
            tl.store(m_marks + 4 + M + tl.atomic_add(m_marks, 1, sem="relaxed"), token)
        else:
            slot = tl.atomic_add(m_marks + 1, 1, sem="relaxed")
            tl.store(m_marks + 4 + M + (M - 1 - slot), token)
            has_room = slot < n_long
            start = slot.to(tl.int64) * LONG + (tl.zeros((), tl.int64) + M) * cap
    tl.store(m_marks + 4 + token, tl.where(is_light, n, -1 - n))
    if has_room:
        while tl.max(bits, axis=0) != 0:
            neuron = neuron_of_bit(word, popcount(bits ^ (bits - 1)) - 1)  # of the lowest bit set
            tl.store(o_rows + start + place, neuron, mask=bits != 0)
            place += 1
            bits = bits & (bits - 1)
        tl.debug_barrier()  # the list was written by other lanes
        for chunk in range(0, n, CHUNK):  # values all at once: in the loop above, every round would wait for memory
            e = chunk + tl.arange(0, CHUNK)
            neuron = tl.load(o_rows + start + e, mask=e < n, other=0)
            value = tl.load(i_gate + token.to(tl.int64) * C + neuron, mask=e < n, other=0.0)
            row = tl.load(i_order + H + neuron, mask=e < n, other=0)
            tl.store(o_rows + start + e, row, mask=e < n)
            tl.store(o_values + start + e, value, mask=e < n)


@functools.cache
def _kernel(dtype: torch.dtype, narrow: torch.dtype, BW: int, aligned: bool, overlaps: bool) -> Kernel:
    return Kernel(
        _list_kernel,
        (
            torch.int32,
            dtype,
            torch.int32,
            narrow,
            dtype,
            torch.int32,
            ANY,
            ANY,
            ANY,
            MULTIPLE if aligned else ANY,
            ANY,
            ANY,
        ),
        {"BW": BW, "LONG": LONG, "CHUNK": _CHUNK, "OVERLAPS": overlaps},
        warps=1,
    )


def list_active(
    gate: Any, bitmap: Any, marks: Any, order: Tensor, *, cap: int, first: int, out: tuple[Any, Any] | None = None
) -> Lists:
    """Lists of a gate [M, C] with its bitmap. ``marks``: see ``Lists``, zeros first; ``order``: int32 [F], hot first;
    ``out``: room for rows and values."""
    (M, C), words, F = gate.shape, bitmap.shape[1], order.shape[0]
    if out is None:
        size = list_size(M, cap)
        out = order.new_empty(size, dtype=index_dtype(F)), order.new_empty(size, dtype=gate.dtype)
    rows, values = out
    if M:
        kernel = _kernel(gate.dtype, rows.dtype, power_of_2(words), words % 16 == 0, can_overlap())
        kernel(M, bitmap, gate, order, rows, values, marks, M, C, F - C, words, min(first, cap), cap)
    return Lists(rows, values, marks, cap)
