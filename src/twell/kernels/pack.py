"""From a gate to TwELL words, and from its bitmap to counts. Neither is in the way of the fast path.

``twell_words`` equals ``TwELL.pack(gate, compact=True, overflow="mark").words`` bit for bit. Bytes: the gate once, and
the words written. ``neuron_counts`` reads the bitmap once: 1 / 16 of a bf16 gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import ceil_div, power_of_2
from twell.kernels.tiles import GROUP, WORDS_PER_GROUP, bitmap_words, neuron_of_bit

_ROWS = 8
_COUNT_ROWS = 1024  # tokens one program counts


@triton.jit
def _words_kernel(i_gate, o_words, M, F, n_tiles, slots, TILE: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    in_tile = tl.arange(0, BT)
    col = tile * TILE + in_tile
    inside = (row[:, None] < M) & (in_tile[None, :] < TILE) & (col[None, :] < F)
    r = tl.load(i_gate + row[:, None].to(tl.int64) * F + col[None, :], mask=inside, other=0.0)
    active = (r != 0).to(tl.int32)
    slot = tl.cumsum(active, axis=1)  # of an active element: 1, 2, ...; slot 0 holds the count
    out = o_words + (row.to(tl.int64) * n_tiles + tile) * slots
    bits = r.to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(out[:, None] + slot, bits | col[None, :], mask=inside & (active != 0) & (slot < slots))
    tl.store(out, tl.sum(active, axis=1), mask=row < M)


@triton.jit
def _counts_kernel(i_bitmap, o_counts, M, C, words, ROWS: tl.constexpr, STEP: tl.constexpr):
    word = tl.program_id(0)
    bit = tl.arange(0, 32)
    total = tl.zeros((32,), tl.int32)
    for first in range(0, ROWS, STEP):
        row = (tl.program_id(1) * ROWS + first + tl.arange(0, STEP)).to(tl.int64)
        w = tl.load(i_bitmap + row * words + word, mask=row < M, other=0)
        total += tl.sum((w[:, None] >> bit[None, :]) & 1, axis=0)
    neuron = neuron_of_bit(word, bit)
    tl.store(o_counts + tl.program_id(1) * C + neuron, total, mask=neuron < C)


def twell_words(gate: Tensor, *, tile: int = 256, slots: int = 32) -> Tensor:
    """int32 [M, n_tiles * slots] of a 16-bit gate [M, F]: see ``TwELL``. Counts are true even beyond the slots."""
    if gate.element_size() != 2:
        raise ValueError(f"TwELL words hold 16-bit values, got {gate.dtype}")
    gate = gate.contiguous()
    M, F = gate.shape
    n_tiles = -(-F // tile)
    words = torch.zeros(M, n_tiles * slots, dtype=torch.int32, device=gate.device)
    if words.numel():
        _words_kernel[(ceil_div(M, _ROWS), n_tiles)](
            gate, words, M, F, n_tiles, slots, TILE=tile, BT=power_of_2(tile), ROWS=_ROWS
        )
    return words


def bitmap_of(active: Tensor) -> Tensor:
    """int32 [M, words] of a bool [M, C], in plain torch: for recorded positions, where no gate was computed."""
    M, C = active.shape
    words = bitmap_words(C)
    padded = torch.nn.functional.pad(active, (0, 32 * words - C))
    parts = padded.view(M, -1, GROUP // 8, WORDS_PER_GROUP, 2).permute(0, 1, 3, 4, 2).reshape(M, words, 32)
    weights = 1 << torch.arange(32, device=active.device)
    rows = 1 + (1 << 22) // max(1, words)  # a few at a time: the products are 64 times the bitmap
    return torch.cat([(part.long() * weights).sum(-1).int() for part in parts.split(rows)])


def neuron_counts(bitmap: Tensor, n_neurons: int) -> Tensor:
    """int32 [C]: the tokens for which each of the bitmap's neurons was active."""
    M, words = bitmap.shape
    parts = ceil_div(M, _COUNT_ROWS)
    counts = torch.zeros(parts, n_neurons, dtype=torch.int32, device=bitmap.device)
    if counts.numel():
        _counts_kernel[(words, parts)](bitmap, counts, M, n_neurons, words, ROWS=_COUNT_ROWS, STEP=128)
    return counts.sum(0, dtype=torch.int32)
