"""From a bitmap to lists: the active neurons of every token with their values, and the tokens that have too many.

A token with at most ``cap`` active cold neurons is light. Of the others, one with at most LONG is long: its list has a
place of its own, as long as there are no more than N_LONG such tokens, and the tail takes it. All others are heavy.
What a token is changes time, never a result: every token is in exactly one of the three.

One warp a token. A word's entries start at the sum of the popcounts before it; every word writes its lowest bit, then
its next one, so that a row takes as many rounds as its fullest word has bits: 2 to 4 for a tail of 10.
Bytes, M 16384, C 5632: the bitmap once (12 MB), 32 a pair for its value, 10 written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import launch
from twell.kernels.tiles import neuron_of_bit, popcount

LONG = 256  # neurons
N_LONG = 64  # tokens


class Lists(NamedTuple):
    """Entries of token m: from m * cap; of the s-th long token: from M * cap + s * LONG. No [M, cap] as such, for that.

    marks: [0] heavy tokens by their own count, [1] tokens over cap but not over LONG; from 2 on, for every token, n if
    it has n <= cap, else -1 - n; from 2 + M on, the tokens of [0] from the front and those of [1] from the back.
    """

    neurons: Tensor  # int32 [2, M cap + N_LONG LONG]: numbers among the cold neurons; rows in the model's weights
    values: Tensor  # [M cap + N_LONG LONG]: of the gate
    marks: Tensor  # int32 [2 + 2 M]
    cap: int


def new_marks(tokens: int, device: torch.device) -> Tensor:
    return torch.empty(2 + 2 * tokens, dtype=torch.int32, device=device)


@triton.jit
def _list_kernel(
    i_bitmap,  # [M, words]
    i_gate,  # [M, C]
    i_order,  # [C] int32 or unused: rows of the weights
    o_neurons,  # [2, size]
    o_values,  # [size]
    m_marks,  # [2 + 2 M], 0 in the first two
    M,
    C,
    words,
    cap,
    long_start,  # M * cap: where the long tokens' entries are
    size,
    BW: tl.constexpr,  # power of 2 >= words
    HAS_ORDER: tl.constexpr,
    LONG: tl.constexpr,
    N_LONG: tl.constexpr,
):
    token = tl.program_id(0)
    word = tl.arange(0, BW)
    bits = tl.load(i_bitmap + token.to(tl.int64) * words + word, mask=word < words, other=0).to(tl.uint32, bitcast=True)
    in_word = popcount(bits)
    place = tl.cumsum(in_word, axis=0) - in_word
    n = tl.sum(in_word, axis=0)
    start = token.to(tl.int64) * cap
    has_room = n <= cap
    if n > cap:
        tokens = m_marks + 2 + M
        if n > LONG:
            tl.store(tokens + tl.atomic_add(m_marks, 1), token)
        else:
            slot = tl.atomic_add(m_marks + 1, 1)
            tl.store(tokens + (M - 1 - slot), token)
            has_room = slot < N_LONG
            start = slot.to(tl.int64) * LONG + long_start
    tl.store(m_marks + 2 + token, tl.where(n > cap, -1 - n, n))
    if has_room:
        while tl.max(bits, axis=0) != 0:
            there = bits != 0
            neuron = neuron_of_bit(word, popcount(bits ^ (bits - 1)) - 1)  # of the lowest bit set
            value = tl.load(i_gate + token.to(tl.int64) * C + neuron, mask=there, other=0.0)
            tl.store(o_neurons + start + place, neuron, mask=there)
            if HAS_ORDER:
                row = tl.load(i_order + neuron, mask=there, other=0)
                tl.store(o_neurons + size.to(tl.int64) + start + place, row, mask=there)
            tl.store(o_values + start + place, value, mask=there)
            place += 1
            bits = bits & (bits - 1)


def list_active(gate: Tensor, bitmap: Tensor, marks: Tensor, order: Tensor | None, *, cap: int) -> Lists:
    """Lists of a gate [M, C] with its bitmap. ``marks`` starts with two zeros; ``order`` [C]: the neurons' rows."""
    (M, C), words = gate.shape, bitmap.shape[1]
    size = M * cap + N_LONG * LONG
    neurons = torch.empty(1 if order is None else 2, size, dtype=torch.int32, device=gate.device)
    values = gate.new_empty(size)
    if M:
        launch(
            _list_kernel,
            M,
            (bitmap, gate, marks if order is None else order, neurons, values, marks, M, C, words, cap, M * cap, size),
            {
                "BW": max(1, triton.next_power_of_2(words)),
                "HAS_ORDER": order is not None,
                "LONG": LONG,
                "N_LONG": N_LONG,
            },
            warps=1,
            stages=1,
        )
    return Lists(neurons, values, marks, cap)
