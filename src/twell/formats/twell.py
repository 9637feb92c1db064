"""``TwELL``: tile-wise ELLPACK."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from twell.formats.common import (
    BITS,
    LOW_16_BITS,
    MAX_COLUMNS_16BIT,
    Format,
    Overflow,
    check_lists,
    first,
    rank_within_group,
    require,
    require_dense,
    require_float,
    require_overflow_policy,
    require_same_device,
    require_tensor,
    same_bits,
    short_name,
)

TILE, SLOTS = 128, 12  # what the GPU kernels write
_WORDS = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TwELL(Format):
    """Tile-wise ELLPACK of an [M, F] matrix: per row and tile of T columns, up to ``slots`` entries.

    Both forms (n_tiles = ceil(F / T)):
        counts   [M, n_tiles]               true number of active elements: uint8 (T <= 255) or int32
    Plain form, any float dtype, F <= 65,536:
        values   [M, n_tiles, slots]        active values, left-aligned, zeros behind
        indices  [M, n_tiles, slots] int16  bits of the uint16 column in 0..F-1, ascending
    Word form, as the GPU kernels write it, T <= 65,536:
        words    [M, n_tiles, slots] int32  value << 16 | column within its tile, for 16-bit values
                                     int64  value << 32 | column within its tile, for float32
    The words of a tile come in any order, and unused slots hold anything.

    A row with a count above ``slots`` is marked in ``overflowed``. Only its counts are read; what else it holds is
    nothing in the plain form and anything in the word form.

    >>> g = torch.tensor([[0, 0, 0, 0, 0, 1.5, 0, 2.0]], dtype=torch.bfloat16)
    >>> t = TwELL.pack(g, tile=4, slots=2, compact=True)
    >>> t.counts.tolist(), [hex(w) for w in t.words.flatten().tolist()]  # bf16 1.5 is 0x3fc0, 2.0 is 0x4000
    ([[0, 2]], ['0x0', '0x0', '0x3fc00001', '0x40000003'])
    >>> t == TwELL.from_words(t.words.flip(-1), t.counts, shape=(1, 8), dtype=g.dtype, tile=4)
    True
    """

    shape: tuple[int, int]
    tile: int
    slots: int
    dtype: torch.dtype
    values: Tensor | None = None
    indices: Tensor | None = None
    counts: Tensor
    words: Tensor | None = None
    check: dataclasses.InitVar[bool] = True

    def __post_init__(self, check: bool) -> None:
        if not check:
            return
        M, F = self.shape
        require(M >= 0, f"TwELL: M must not be negative, got {M}")
        require_float("TwELL", self.dtype)
        _require_form(F, self.tile, self.slots, self.dtype, compact=self.words is not None)
        lists = (M, n_tiles(F, self.tile), self.slots)
        require_tensor("TwELL", "counts", self.counts, lists[:2], None)
        require(
            self.counts.dtype in (torch.int32, _count_dtype(self.tile)),
            f"TwELL: counts must be int32, or uint8 if tile <= 255, got {self.counts.dtype} for tile={self.tile}",
        )
        if self.words is not None:
            require(
                self.values is None and self.indices is None,
                "TwELL: give either words (word form) or values and indices (plain form), not both",
            )
            require_tensor("TwELL", "words", self.words, lists, word_dtype(self.dtype))
        else:
            require_tensor("TwELL", "values", self.values, lists, self.dtype)
            require_tensor("TwELL", "indices", self.indices, lists, torch.int16)
        require_same_device("TwELL", self._tensors())

        starts, counts = self._starts(), self.counts.int()
        ends = (starts + self.tile).clamp(max=F)
        wrong = (counts < 0) | (counts > ends - starts)
        if bool(wrong.any()):
            m, t = first(wrong)
            raise ValueError(
                f"TwELL: row {m}, tile {t} has count {int(counts[m, t])}, expected 0 to {int(ends[t] - starts[t])}"
            )
        check_lists("TwELL", *self._lists(), self._used(), starts, ends)

    # -- building --------------------------------------------------------------------------------------

    @classmethod
    def pack(
        cls, g: Tensor, *, tile: int = TILE, slots: int = SLOTS, compact: bool = False, overflow: Overflow = "error"
    ) -> TwELL:
        """Pack a dense [M, F] matrix; with ``compact`` in the word form, ascending columns, zeros behind.

        With ``overflow="mark"`` rows that do not fit are marked instead, and hold nothing but their counts.
        Counts are uint8 where that holds them, as kernels write them: then ``nbytes`` is the room a kernel takes.
        """
        require_dense("TwELL.pack", g)
        require_overflow_policy("TwELL.pack", overflow)
        M, F = g.shape
        _require_form(F, tile, slots, g.dtype, compact)
        lists = (M, n_tiles(F, tile), slots)
        row, col = (g != 0).nonzero(as_tuple=True)  # row-major, so every list comes out ascending
        rank, counts = rank_within_group(row * lists[1] + col // tile, M * lists[1])
        counts = counts.view(lists[:2])
        over = counts > slots
        if overflow == "error" and bool(over.any()):
            m, t = first(over)
            raise ValueError(
                f"TwELL.pack: row {m}, tile {t} (columns {t * tile} to {min(F, (t + 1) * tile) - 1}) has "
                f"{int(counts[m, t])} active elements, more than slots={slots}; "
                f"the smallest slots that fit are {int(counts.max())}"
            )
        fits = ~over.any(1)[row]
        row, col, rank = row[fits], col[fits], rank[fits]
        values = g.new_zeros(lists)
        columns = torch.zeros(lists, dtype=torch.int64, device=g.device)
        values[row, col // tile, rank] = g[row, col]
        columns[row, col // tile, rank] = col
        return cls(
            shape=(M, F),
            tile=tile,
            slots=slots,
            dtype=g.dtype,
            counts=counts.to(_count_dtype(tile)),
            **_form(columns, values, tile, compact),
        )

    @classmethod
    def from_words(
        cls,
        words: Tensor,
        counts: Tensor,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        tile: int = TILE,
        check: bool = True,
    ) -> TwELL:
        """Wrap words and counts as the gate kernels write them. The check reads them, so it waits for a GPU."""
        if not isinstance(words, Tensor) or words.dim() != 3:
            raise ValueError("TwELL.from_words: words must be a tensor [M, n_tiles, slots]")
        slots = words.shape[2]
        return cls(shape=shape, tile=tile, slots=slots, dtype=dtype, counts=counts, words=words, check=check)

    def compact(self) -> TwELL:
        """The same entries in the word form, as ``pack`` writes it: ascending columns, zeros behind."""
        return dataclasses.replace(self, **_form(*self._lists(), self.tile, compact=True))

    def plain(self) -> TwELL:
        """The same entries in the plain form."""
        return dataclasses.replace(self, **_form(*self._lists(), self.tile, compact=False))

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def columns(self) -> Tensor:
        """Columns of the entries, int64 [M, n_tiles, slots]: as in the plain form, ascending, 0 in unused slots."""
        return self._lists()[0]

    @property
    def overflowed(self) -> Tensor:
        """bool [M]: rows with a tile that holds more active elements than fit."""
        return (self.counts.int() > self.slots).any(dim=1)

    def _all_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        columns, values = self._lists()
        at = self._used().nonzero(as_tuple=True)
        return at[0], columns[at], values[at]

    def __eq__(self, other: object) -> bool:
        """Same form and the same entries, bit for bit; neither the order of words nor the counts' dtype matters."""
        if not isinstance(other, TwELL):
            return NotImplemented
        names = ("shape", "tile", "slots", "dtype", "device")
        return (
            all(getattr(self, name) == getattr(other, name) for name in names)
            and (self.words is None) == (other.words is None)
            and torch.equal(self.counts.int(), other.counts.int())
            and all(same_bits(a, b) for a, b in zip(self._lists(), other._lists(), strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        form = "plain" if self.words is None else "words"
        return self._in_words(f"tile={self.tile}, slots={self.slots}, {short_name(self.dtype)}, {form}", self.counts)

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.counts, self.words, self.values, self.indices) if t is not None]

    def _starts(self) -> Tensor:
        """First column of each tile."""
        return torch.arange(self.counts.shape[1], device=self.device) * self.tile

    def _used(self) -> Tensor:
        """bool [M, n_tiles, slots]: slots that hold an entry, once the unused ones are last."""
        used = torch.arange(self.slots, device=self.device) < self.counts.unsqueeze(-1)
        return used & ~self.overflowed[:, None, None]

    def _lists(self) -> tuple[Tensor, Tensor]:
        """Columns (int64) and values as in the plain form, also of a matrix too wide for it."""
        if self.words is None:
            assert self.values is not None and self.indices is not None
            return self.indices.long() & LOW_16_BITS, self.values
        used, width = self._used(), 8 * self.dtype.itemsize
        columns = self.words.long() & ((1 << width) - 1)
        columns, order = columns.where(used, 1 << 62).sort(-1)  # unused ones last
        words = self.words.gather(-1, order).where(used, 0)
        values = (words >> width).to(BITS[self.dtype.itemsize]).view(self.dtype)
        return (columns + self._starts()[:, None]).where(used, 0), values


def n_tiles(n_columns: Any, tile: int = TILE) -> Any:
    """Tiles of a row; of a number or a compiler's symbol."""
    return (n_columns + tile - 1) // tile


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of an entry: value << 16 | column within its tile, for values of 32 bits value << 32 | column."""
    if dtype not in _WORDS:
        raise ValueError(
            f"TwELL: words hold values of {', '.join(map(short_name, _WORDS))}, got {dtype}; use the plain form"
        )
    return _WORDS[dtype]


def _count_dtype(tile: int) -> torch.dtype:
    return torch.uint8 if tile <= 255 else torch.int32


def _require_form(F: int, tile: int, slots: int, dtype: torch.dtype, compact: bool) -> None:
    require(tile >= 1, f"TwELL: tile must be at least 1, got {tile}")
    require(slots >= 1, f"TwELL: slots must be at least 1, got {slots}")
    require(F >= 0, f"TwELL: F must not be negative, got {F}")
    if compact:
        word_dtype(dtype)  # raises where there is none
        require(tile <= MAX_COLUMNS_16BIT, f"TwELL: words need a tile of at most {MAX_COLUMNS_16BIT}, got {tile}")
    else:
        require(
            F <= MAX_COLUMNS_16BIT,
            f"TwELL: the plain form needs F of at most {MAX_COLUMNS_16BIT}, got {F}; use the word form",
        )


def _form(columns: Tensor, values: Tensor, tile: int, compact: bool) -> dict[str, Any]:
    """The fields of a form, from lists [M, n_tiles, slots]."""
    if not compact:
        return {"values": values, "indices": columns.to(torch.int16), "words": None}
    size = values.element_size()
    bits = values.view(BITS[size]).to(word_dtype(values.dtype))
    return {"values": None, "indices": None, "words": bits << 8 * size | (columns % tile).to(bits.dtype)}
