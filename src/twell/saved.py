"""What a training forward keeps for its backward, besides x and the weights: one tensor, in the dtype of x.

One tensor for every way to compute: the outputs of an operation cannot change in number, and each further tensor costs
5 us of host time to allocate and more to save. Its length is computed without branches: under a compiler the numbers
are symbols.

    dense    z and u of all neurons, one after the other (CPU and reference: r and u); plain FFN: z
    split    z and u of the hot neurons, interleaved, and the lists of the tail: ``SavedSplit``

Numbers typed Any are ints, or a compiler's symbols.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.formats import TILE, n_tiles

LONG = 256  # entries in a long token's list: see gpu/shared/lists.py
CHUNK = 256  # tokens: see gpu/training/columns.py
COUNTERS = 4  # see Turns
LEAST = 2  # elements: a compiler specialises on sizes 0 and 1
_MOST_BITS = 1 << 34


class Turns(NamedTuple):
    """Which tokens are light, early, long and heavy: see gpu/shared/lists.py."""

    counters: Tensor  # int32 [4]: heavy tokens, tokens over cap, early tokens; programs that wait for each other
    entries: Tensor  # int32 [M]: n >= 0 of token m if its own program handles it; -1 - n if it is handled elsewhere, as
    # long, early and heavy tokens are. n is OVERFULL if a tile has more than SLOTS entries
    heavy: Tensor  # int32 [M]: heavy tokens from the front; tokens over cap (long, or too many for that) from the back
    early: Tensor  # int32 [n_early]


class SavedSplit(NamedTuple):
    """What the split keeps. H hot neurons; K keys and P chunks: see Columns in gpu/training/columns.py."""

    sums: Tensor  # [M, 2 H]: z and u of the hot neurons, interleaved; plain FFN: [M, H], z
    offsets: Tensor  # int32 [P, K + 16], and pair_of, int32 [entries]: Columns
    pair_of: Tensor
    turns: Turns
    rows: Tensor  # int16 or int32 [entries]: see Lists
    values: Tensor  # [entries]: r of every entry
    up: Tensor | None  # [entries]: u of every entry; plain FFN: none

    @classmethod
    def of(cls, kept: Tensor, tokens: int, n_neurons: int, n_hot: int, cap: int, *, gated: bool) -> SavedSplit:
        """Views of the one tensor ``kept``."""
        sizes, item = TailSizes.of(tokens, n_neurons - n_hot, cap), kept.element_size()
        narrow, width, at = index_dtype(n_neurons), (2 if gated else 1) * n_hot, 0

        def take(*shape: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            n = torch.Size(shape).numel() * dtype.itemsize
            start, at = at, at + _padded(n)
            return kept[start // item : (start + n) // item].view(dtype).view(shape)

        return cls(
            take(tokens, width, dtype=kept.dtype),
            take(sizes.chunks, sizes.keys + 16, dtype=torch.int32),
            take(sizes.entries, dtype=torch.int32),
            Turns(*(take(n, dtype=torch.int32) for n in turn_sizes(tokens))),
            take(sizes.entries, dtype=narrow),
            take(sizes.entries, dtype=kept.dtype),
            take(sizes.entries, dtype=kept.dtype) if gated else None,
        )


class TailSizes(NamedTuple):
    """Sizes of what is kept of the tail."""

    keys: Any  # cold neurons, rounded up to whole tiles
    chunks: Any
    entries: Any  # of all lists

    @classmethod
    def of(cls, tokens: Any, n_cold: Any, cap: Any) -> TailSizes:
        keys, chunks = TILE * n_tiles(n_cold), (tokens + CHUNK - 1) // CHUNK
        return cls(keys, chunks, (list_size(tokens, cap) + 15) // 16 * 16)


def _padded(size: Any) -> Any:
    """Bytes rounded up, so that each piece starts where kernels may read 16 bytes at a time."""
    return (size + 255) // 256 * 256


def n_long(tokens: Any) -> Any:
    """Room for long tokens."""
    return max(256, tokens // 16) if type(tokens) is int else torch.sym_max(256, tokens // 16)


def n_early(tokens: Any) -> Any:
    """Room for early tokens."""
    return tokens // 8


def turn_sizes(tokens: Any) -> tuple[Any, Any, Any, Any]:
    """Elements of each tensor of ``Turns``."""
    return COUNTERS, tokens, tokens, n_early(tokens)


def list_size(tokens: Any, cap: Any) -> Any:
    """Entries of all lists."""
    return tokens * cap + n_long(tokens) * LONG


def index_dtype(n_neurons: int) -> torch.dtype:
    """The dtype of a neuron's index in a list."""
    return torch.int16 if n_neurons <= 1 << 15 else torch.int32


def trains_split(tokens: Any, n_neurons: int, n_hot: Any, cap: Any, min_tokens: Any) -> Any:
    """1 if a batch runs by the split, else 0: if the plan is dense, if the tokens are fewer than ``min_tokens``, or if
    they are so many that 32 bits could not count the pairs, or the words that hold a bit a token and neuron."""
    bits = tokens * (n_neurons - n_hot)
    if type(tokens) is int and type(n_hot) is int and type(cap) is int:
        is_counted = tokens < (1 << 31) // (cap + 16) and bits < _MOST_BITS
        return int(n_hot < n_neurons and max(1, min_tokens) <= tokens and is_counted)
    is_split = torch.sym_min(1, n_neurons - n_hot)
    enough = torch.sym_min(1, torch.sym_max(0, tokens - torch.sym_max(1, min_tokens) + 1))
    not_too_many = torch.sym_min(1, torch.sym_max(0, (1 << 31) // (cap + 16) - tokens))
    few_bits = torch.sym_min(1, torch.sym_max(0, _MOST_BITS - bits))
    return is_split * enough * not_too_many * few_bits


def saved_length(
    tokens: Any, n_neurons: int, plan: tuple[Any, Any, Any] | None, dtype: torch.dtype, *, gated: bool, save: bool
) -> Any:
    """Elements of the kept tensor. ``plan``: H, cap and min_tokens on a GPU, else None."""
    each, item, narrow = 2 if gated else 1, dtype.itemsize, index_dtype(n_neurons).itemsize
    if not save:
        return 0
    if plan is None:
        return each * tokens * n_neurons
    n_hot, cap, min_tokens = plan
    split = trains_split(tokens, n_neurons, n_hot, cap, min_tokens)
    n_hot = n_neurons - split * (n_neurons - n_hot)
    sizes = TailSizes.of(tokens, n_neurons - n_hot, cap)
    numbers = (sizes.chunks * (sizes.keys + 16), sizes.entries, *turn_sizes(tokens))
    lists = _padded(sizes.entries * narrow) + each * _padded(sizes.entries * item)
    tail = split * (sum(_padded(4 * n) for n in numbers) + lists)
    return torch.sym_max(LEAST, (_padded(each * tokens * n_hot * item) + tail) // item)
