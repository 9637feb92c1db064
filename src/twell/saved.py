"""What a training forward keeps for its backward, besides x and the weights.

One form for all ways, so that one operation can choose among them without its outputs changing in number. Lengths
follow from numbers alone, without a branch: under a compiler they are symbols.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LONG = 256  # neurons of a long token's list: see kernels/lists.py
CHUNK = 256  # tokens, see kernels/transpose.py
GROUP = 128  # neurons of four bitmap words, see kernels/tiles.py
LEAST = 2  # elements of what a plan's sizes are in: a compiler treats 0 and 1 apart, and would compile for either


class Saved(NamedTuple):
    """Few tensors, each with several parts: an allocation takes 4 us of host time.

    In parts (three, of a plan): z and u of the hot neurons, and the cold tail's lists. Densely ``sums`` is z and u of
    all neurons, one after the other (CPU and reference: r and u), and the rest is empty."""

    sums: Tensor  # [M 2 H]: z and u of the hot neurons, interleaved; plain FFN: [M H], z
    integers: Tensor  # int32: bits and offsets (Columns in kernels/transpose.py), marks (Lists in kernels/lists.py)
    rows: Tensor  # int16 or int32 [size]: see Lists
    values: Tensor  # [2 size]: r of every entry, then u; plain FFN: [size]


class Sizes(NamedTuple):
    """Of what is kept of the cold tail: numbers of elements, and where the parts of ``Saved.integers`` start."""

    keys: Any  # 32 bits a bitmap word
    chunks: Any
    offsets_at: Any
    marks_at: Any
    integers: Any
    entries: Any  # of all lists, a multiple of 16

    @classmethod
    def of(cls, tokens: Any, n_cold: Any, cap: Any) -> Sizes:
        keys, chunks = 32 * bitmap_words(n_cold), (tokens + CHUNK - 1) // CHUNK
        offsets_at = (tokens + 31) // 32 * keys
        marks_at = offsets_at + (keys * chunks + 4) // 4 * 4  # one more than counts, at a multiple of 16 bytes
        entries = (list_size(tokens, cap) + 15) // 16 * 16
        return cls(keys, chunks, offsets_at, marks_at, marks_at + n_marks(tokens), entries)


def n_long(tokens: Any) -> Any:
    """Room for long tokens."""
    return max(256, tokens // 16) if type(tokens) is int else torch.sym_max(256, tokens // 16)


def n_early(tokens: Any) -> Any:
    """Room for early tokens."""
    return tokens // 8


def n_marks(tokens: Any) -> Any:
    return 4 + 2 * tokens + n_early(tokens)


def list_size(tokens: Any, cap: Any) -> Any:
    """Entries of all lists."""
    return tokens * cap + n_long(tokens) * LONG


def bitmap_words(n_neurons: Any) -> Any:
    """32-bit words a row of the bitmap has."""
    return (n_neurons + GROUP - 1) // GROUP * 4


def index_dtype(n_neurons: int) -> torch.dtype:
    """Of neurons in lists."""
    return torch.int16 if n_neurons <= 1 << 15 else torch.int32


def runs_in_parts(tokens: Any, n_neurons: int, n_hot: Any, cap: Any, min_tokens: Any) -> Any:
    """1, or 0 where all of a plan's batches run densely, so few tokens do, or so many that pairs would not be counted
    in 32 bits."""
    if type(tokens) is int and type(n_hot) is int and type(cap) is int:
        return int(n_hot < n_neurons and max(1, min_tokens) <= tokens < (1 << 31) // (cap + 16))
    is_split = torch.sym_min(1, n_neurons - n_hot)
    enough = torch.sym_min(1, torch.sym_max(0, tokens - torch.sym_max(1, min_tokens) + 1))
    not_too_many = torch.sym_min(1, torch.sym_max(0, (1 << 31) // (cap + 16) - tokens))
    return is_split * enough * not_too_many


def saved_shapes(
    tokens: Any, n_neurons: int, plan: tuple[Any, Any, Any] | None, *, gated: bool, save: bool
) -> list[tuple[Any, torch.dtype | None]]:
    """Length and dtype (None: that of x) of what ``Saved`` holds. ``plan``: H, cap and min_tokens, on a GPU."""
    narrow, each = index_dtype(n_neurons), 2 if gated else 1
    if not save:
        lengths: tuple[Any, ...] = (0, 0, 0, 0)
    elif plan is None:
        lengths = (each * tokens * n_neurons, 0, 0, 0)
    else:
        n_hot, cap, min_tokens = plan
        in_parts = runs_in_parts(tokens, n_neurons, n_hot, cap, min_tokens)
        n_hot = n_neurons - in_parts * (n_neurons - n_hot)
        sizes = Sizes.of(tokens, n_neurons - n_hot, cap)
        entries = in_parts * sizes.entries
        lengths = (each * tokens * n_hot, in_parts * sizes.integers, entries, each * entries)
        lengths = tuple(torch.sym_max(LEAST, n) for n in lengths)
    return list(zip(lengths, (None, torch.int32, narrow, None), strict=True))
