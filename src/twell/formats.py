"""The two sparse formats, TwELL and Hybrid: packing, unpacking and their invariants.

Both hold a matrix [M, F] of activations, M tokens by F neurons, of which few are *active*: not equal to
zero, NaN included. Neither ever lies: counts are the true counts, and what does not fit either raises
(``overflow="error"``) or leaves the row marked (``overflow="mark"``), to be handled another way.

TwELL (tile-wise ELLPACK) cuts the F columns into tiles of T. A row keeps a short list per tile, so that a
matrix product which computes one tile at a time can write the lists itself. Hybrid keeps rows of at most
``cap`` entries in one narrow list each, and the few longer rows densely in a backup.

>>> g = torch.tensor([[0.0, 5.0, 0.0, 0.0, 6.0, 7.0], [0.0, 0.0, 0.0, 8.0, 0.0, 0.0]])
>>> t = TwELL.pack(g, tile=3, slots=2)
>>> t
TwELL(2 x 6, tile=3, slots=2, float32, plain, 4 active, 52 bytes)
>>> t.counts.tolist()
[[1, 2], [0, 1]]
>>> t.columns.tolist()
[[[1, 0], [4, 5]], [[0, 0], [3, 0]]]
>>> torch.equal(t.unpack(), g)
True

Column indices are stored in 16 bits. torch has few operations on uint16, so the bits live in an int16
tensor (TwELL's plain form, Hybrid) or below the value (TwELL's words); ``.columns`` gives them as int64.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

TILE, SLOTS = 128, 12  # of the TwELL that the GPU kernels write
MAX_COLUMNS_16BIT = 1 << 16
_LOW_16_BITS = 0xFFFF
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer of the same size
_WORDS = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}

Overflow = Literal["error", "mark"]


# ---------------------------------------------------------------------------------------------------------
# Helpers shared by the formats
# ---------------------------------------------------------------------------------------------------------


def _require(condition: bool | Tensor, message: str) -> None:
    if not bool(condition):
        raise ValueError(message)


def _require_tensor(owner: str, name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    _require(isinstance(t, Tensor), f"{owner}: {name} must be a tensor, got {type(t).__name__}")
    _require(tuple(t.shape) == shape, f"{owner}: {name} must have shape {shape}, got {tuple(t.shape)}")
    if dtype is not None:
        _require(t.dtype == dtype, f"{owner}: {name} must be {dtype}, got {t.dtype}")


def _require_float(owner: str, dtype: torch.dtype) -> None:
    _require(dtype.is_floating_point, f"{owner}: values must be floating-point, got {dtype}")


def _require_same_device(owner: str, tensors: list[Tensor]) -> None:
    devices = sorted({str(t.device) for t in tensors})
    _require(len(devices) <= 1, f"{owner}: tensors lie on different devices: {', '.join(devices)}")


def _require_dense(owner: str, g: Any) -> None:
    _require(isinstance(g, Tensor), f"{owner}: expected a tensor, got {type(g).__name__}")
    _require(g.dim() == 2, f"{owner}: expected a matrix [M, F], got shape {tuple(g.shape)}")
    _require(g.is_floating_point(), f"{owner}: expected a floating-point matrix, got {g.dtype}")
    _require(g.layout == torch.strided, f"{owner}: expected a dense matrix, got layout {g.layout}")


def _require_overflow_policy(owner: str, overflow: str) -> None:
    _require(overflow in ("error", "mark"), f"{owner}: overflow must be 'error' or 'mark', got {overflow!r}")


def _first(condition: Tensor) -> list[int]:
    """Index of the first True element."""
    return condition.nonzero()[0].tolist()


def _rank_within_group(group: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """For sorted group ids: the rank of each element within its group, and the size of each group."""
    sizes = torch.bincount(group, minlength=n_groups)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(group), device=group.device) - starts[group], sizes


def _require_complete(owner: str, overflowed: Tensor, skip_overflowed: bool) -> None:
    if not skip_overflowed and bool(overflowed.any()):
        raise ValueError(
            f"{owner}: {int(overflowed.sum())} rows overflowed (first: row {_first(overflowed)[0]}), so not all "
            f"their entries are stored; compute these rows another way and read the rest with skip_overflowed=True"
        )


def _dense(shape: tuple[int, int], entries: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    row, col, value = entries
    g = torch.zeros(shape, dtype=value.dtype, device=value.device)
    g[row, col] = value
    return g


def _is_not_zero_bits(values: Tensor) -> Tensor:
    """True also for -0.0, so that equal matrices have equal forms."""
    return values.contiguous().view(_BITS[values.element_size()]) != 0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _moved(form: Any, device: torch.device | str) -> Any:
    tensors = {f.name: getattr(form, f.name) for f in dataclasses.fields(form)}
    return dataclasses.replace(form, **{k: t.to(device) for k, t in tensors.items() if isinstance(t, Tensor)})


def _check_lists(owner: str, columns: Tensor, values: Tensor, used: Tensor, low: Tensor, high: Tensor) -> None:
    """Invariants of ELL lists [..., slots]: ``used`` slots hold active values at ascending columns in [low, high),
    the slots behind them zeros. ``low`` and ``high`` broadcast over the lists."""
    inside = (columns >= low.unsqueeze(-1)) & (columns < high.unsqueeze(-1))
    for name, wrong in (
        ("a stored value is zero", used & (values == 0)),
        ("a column index lies outside its range", used & ~inside),
        ("an unused slot is not zero", ~used & (_is_not_zero_bits(values) | (columns != 0))),
    ):
        if bool(wrong.any()):
            raise ValueError(f"{owner}: {name}, first at {_first(wrong)}")
    falling = used[..., 1:] & (columns[..., 1:] <= columns[..., :-1])
    if bool(falling.any()):
        raise ValueError(f"{owner}: column indices repeat or do not ascend, first at {_first(falling)}")


# ---------------------------------------------------------------------------------------------------------
# TwELL
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TwELL:
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
        _require(M >= 0, f"TwELL: M must not be negative, got {M}")
        _require_float("TwELL", self.dtype)
        _require_form(F, self.tile, self.slots, self.dtype, compact=self.words is not None)
        lists = (M, n_tiles(F, self.tile), self.slots)
        _require_tensor("TwELL", "counts", self.counts, lists[:2], None)
        _require(
            self.counts.dtype in (torch.int32, _count_dtype(self.tile)),
            f"TwELL: counts must be int32, or uint8 if tile <= 255, got {self.counts.dtype} for tile={self.tile}",
        )
        if self.words is not None:
            _require(
                self.values is None and self.indices is None,
                "TwELL: give either words (word form) or values and indices (plain form), not both",
            )
            _require_tensor("TwELL", "words", self.words, lists, word_dtype(self.dtype))
        else:
            _require_tensor("TwELL", "values", self.values, lists, self.dtype)
            _require_tensor("TwELL", "indices", self.indices, lists, torch.int16)
        _require_same_device("TwELL", self._tensors())

        starts, counts = self._starts(), self.counts.int()
        ends = (starts + self.tile).clamp(max=F)
        wrong = (counts < 0) | (counts > ends - starts)
        if bool(wrong.any()):
            m, t = _first(wrong)
            raise ValueError(
                f"TwELL: row {m}, tile {t} has count {int(counts[m, t])}, expected 0 to {int(ends[t] - starts[t])}"
            )
        _check_lists("TwELL", *self._lists(), self._used(), starts, ends)

    # -- building --------------------------------------------------------------------------------------

    @classmethod
    def pack(
        cls,
        g: Tensor,
        *,
        tile: int = TILE,
        slots: int = SLOTS,
        compact: bool = False,
        overflow: Overflow = "error",
    ) -> TwELL:
        """Pack a dense [M, F] matrix; with ``compact`` in the word form, ascending columns, zeros behind.

        With ``overflow="mark"`` rows that do not fit are marked instead, and hold nothing but their counts.
        Counts are uint8 where that holds them, as kernels write them: then ``nbytes`` is the room a kernel takes.
        """
        _require_dense("TwELL.pack", g)
        _require_overflow_policy("TwELL.pack", overflow)
        M, F = g.shape
        _require_form(F, tile, slots, g.dtype, compact)
        lists = (M, n_tiles(F, tile), slots)
        row, col = (g != 0).nonzero(as_tuple=True)  # row-major, so every list comes out ascending
        rank, counts = _rank_within_group(row * lists[1] + col // tile, M * lists[1])
        counts = counts.view(lists[:2])
        over = counts > slots
        if overflow == "error" and bool(over.any()):
            m, t = _first(over)
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

    @property
    def nbytes(self) -> int:
        return _nbytes(self._tensors())

    def entries(self, *, skip_overflowed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """All entries as (row, column, value), sorted by row, then column.

        Raises if rows overflowed, since their entries are not all here; ``skip_overflowed`` leaves them out.
        """
        _require_complete("TwELL", self.overflowed, skip_overflowed)
        columns, values = self._lists()
        at = self._used().nonzero(as_tuple=True)
        return at[0], columns[at], values[at]

    def unpack(self, *, skip_overflowed: bool = False) -> Tensor:
        """The dense [M, F] matrix, active elements bit for bit. Raises if rows overflowed, or leaves them zero."""
        return _dense(self.shape, self.entries(skip_overflowed=skip_overflowed))

    @property
    def device(self) -> torch.device:
        return self.counts.device

    def to(self, device: torch.device | str) -> TwELL:
        return _moved(self, device)

    def __eq__(self, other: object) -> bool:
        """Same form and the same entries, bit for bit; neither the order of words nor the counts' dtype matters."""
        if not isinstance(other, TwELL):
            return NotImplemented
        names = ("shape", "tile", "slots", "dtype", "device")
        return (
            all(getattr(self, name) == getattr(other, name) for name in names)
            and (self.words is None) == (other.words is None)
            and torch.equal(self.counts.int(), other.counts.int())
            and all(_same_bits(a, b) for a, b in zip(self._lists(), other._lists(), strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        M, F = self.shape
        n_over = int(self.overflowed.sum())
        return (
            f"TwELL({M} x {F}, tile={self.tile}, slots={self.slots}, {_short(self.dtype)}, "
            f"{'plain' if self.words is None else 'words'}, {int(self.counts.sum())} active, "
            f"{f'{n_over} rows overflowed, ' if n_over else ''}{self.nbytes} bytes)"
        )

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
            return self.indices.long() & _LOW_16_BITS, self.values
        used, width = self._used(), 8 * self.dtype.itemsize
        columns = self.words.long() & ((1 << width) - 1)
        columns, order = columns.where(used, 1 << 62).sort(-1)  # unused ones last
        words = self.words.gather(-1, order).where(used, 0)
        values = (words >> width).to(_BITS[self.dtype.itemsize]).view(self.dtype)
        return (columns + self._starts()[:, None]).where(used, 0), values


def n_tiles(n_columns: Any, tile: int = TILE) -> Any:
    """Tiles of a row; of a number or a compiler's symbol."""
    return (n_columns + tile - 1) // tile


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of an entry: value << 16 | column within its tile, for values of 32 bits value << 32 | column."""
    if dtype not in _WORDS:
        raise ValueError(
            f"TwELL: words hold values of {', '.join(map(_short, _WORDS))}, got {dtype}; use the plain form"
        )
    return _WORDS[dtype]


def _count_dtype(tile: int) -> torch.dtype:
    return torch.uint8 if tile <= 255 else torch.int32


def _require_form(F: int, tile: int, slots: int, dtype: torch.dtype, compact: bool) -> None:
    _require(tile >= 1, f"TwELL: tile must be at least 1, got {tile}")
    _require(slots >= 1, f"TwELL: slots must be at least 1, got {slots}")
    _require(F >= 0, f"TwELL: F must not be negative, got {F}")
    if compact:
        word_dtype(dtype)  # raises where there is none
        _require(tile <= MAX_COLUMNS_16BIT, f"TwELL: words need a tile of at most {MAX_COLUMNS_16BIT}, got {tile}")
    else:
        _require(
            F <= MAX_COLUMNS_16BIT,
            f"TwELL: the plain form needs F of at most {MAX_COLUMNS_16BIT}, got {F}; use the word form",
        )


def _form(columns: Tensor, values: Tensor, tile: int, compact: bool) -> dict[str, Any]:
    """The fields of a form, from lists [M, n_tiles, slots]."""
    if not compact:
        return {"values": values, "indices": columns.to(torch.int16), "words": None}
    size = values.element_size()
    bits = values.view(_BITS[size]).to(word_dtype(values.dtype))
    return {"values": None, "indices": None, "words": bits << 8 * size | (columns % tile).to(bits.dtype)}


# ---------------------------------------------------------------------------------------------------------
# Hybrid
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Hybrid:
    """Narrow ELL for ordinary rows, a dense backup for the few long ones. The saved form of training.

        values      [M, cap]                active values of a row, left-aligned, zeros behind
        indices     [M, cap]                their columns, ascending: int16 bits (F <= 65,536) or int32
        counts      [M] int32               true number of active elements
        backup      [B, F]                  rows with more than ``cap`` active elements, in row order
        backup_rows [B] int32               the row each backup row belongs to, -1 where unused
        row_backup  [M] int32               the backup row of each row, -1 where it has none

    A row over ``cap`` that found no backup row is marked in ``overflowed`` and stores nothing but its count.

    >>> g = torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]])
    >>> h = Hybrid.pack(g, cap=1, backup=1)
    >>> h
    Hybrid(2 x 3, cap=1, 1 of 1 backup rows, float32, 4 active, 44 bytes)
    >>> h.row_backup.tolist(), h.backup_rows.tolist(), h.columns.tolist()
    ([0, -1], [0], [[0], [1]])
    >>> torch.equal(h.transpose(cap=2, backup=0).unpack(), g.T)
    True
    """

    shape: tuple[int, int]
    values: Tensor
    indices: Tensor
    counts: Tensor
    backup: Tensor
    backup_rows: Tensor
    row_backup: Tensor

    def __post_init__(self) -> None:
        M, F = self.shape
        cap = self.values.shape[-1] if isinstance(self.values, Tensor) and self.values.dim() == 2 else 0
        n_backup = self.backup_rows.numel() if isinstance(self.backup_rows, Tensor) else 0
        _require(M >= 0 and F >= 0, f"Hybrid: shape must not be negative, got {self.shape}")
        _require_tensor("Hybrid", "values", self.values, (M, cap), None)
        _require_float("Hybrid", self.values.dtype)
        _require_tensor("Hybrid", "indices", self.indices, (M, cap), _index_dtype(F))
        _require_tensor("Hybrid", "counts", self.counts, (M,), torch.int32)
        _require_tensor("Hybrid", "backup", self.backup, (n_backup, F), self.values.dtype)
        _require_tensor("Hybrid", "backup_rows", self.backup_rows, (n_backup,), torch.int32)
        _require_tensor("Hybrid", "row_backup", self.row_backup, (M,), torch.int32)
        _require_same_device("Hybrid", self._tensors())

        wrong = (self.counts < 0) | (self.counts > F)
        if bool(wrong.any()):
            [m] = _first(wrong)
            raise ValueError(f"Hybrid: row {m} has count {int(self.counts[m])}, expected 0 to {F}")
        self._check_backup()
        low = torch.zeros((), dtype=torch.int64, device=self.device)
        _check_lists("Hybrid", self.columns, self.values, self._used(), low, low + F)

    def _check_backup(self) -> None:
        """The counts and the number of backup rows leave no choice: which rows are there, and where."""
        maps = dict(
            zip(("backup_rows", "row_backup"), _backup_maps(self.counts, self.cap, len(self.backup)), strict=True)
        )
        for name, expected in maps.items():
            wrong = getattr(self, name) != expected
            if bool(wrong.any()):
                [i] = _first(wrong)
                raise ValueError(
                    f"Hybrid: {name}[{i}] must be {int(expected[i])}, got {int(getattr(self, name)[i])} (the first "
                    f"rows with more than cap={self.cap} active elements have backup rows, in row order)"
                )
        expected = torch.zeros(len(self.backup), dtype=torch.int64, device=self.device)
        used = self.backup_rows >= 0
        expected[used] = self.counts[self.backup_rows[used].long()].long()
        true_counts = (self.backup != 0).sum(1)
        if not torch.equal(true_counts, expected):
            [b] = _first(true_counts != expected)
            raise ValueError(
                f"Hybrid: backup row {b} has {int(true_counts[b])} active elements, counts say {int(expected[b])}"
            )
        _require(not bool((_is_not_zero_bits(self.backup) & (self.backup == 0)).any()), "Hybrid: the backup holds -0.0")

    # -- building --------------------------------------------------------------------------------------

    @classmethod
    def pack(cls, g: Tensor, *, cap: int = 128, backup: int | None = None, overflow: Overflow = "error") -> Hybrid:
        """Pack a dense [M, F] matrix; ``backup`` defaults to ceil(M / 8) rows.

        With ``overflow="mark"`` rows that find no backup row are marked instead of raising.
        """
        _require_dense("Hybrid.pack", g)
        M, F = g.shape
        row, col = (g != 0).nonzero(as_tuple=True)
        return cls._from_entries(row, col, g[row, col], (M, F), cap, backup, overflow)

    @classmethod
    def _from_entries(
        cls,
        row: Tensor,
        col: Tensor,
        value: Tensor,
        shape: tuple[int, int],
        cap: int,
        backup: int | None,
        overflow: str,
    ) -> Hybrid:
        """Build from entries sorted by row, then column."""
        _require_overflow_policy("Hybrid.pack", overflow)
        M, F = shape
        n_backup = -(-M // 8) if backup is None else backup
        _require(cap >= 0, f"Hybrid.pack: cap must not be negative, got {cap}")
        _require(n_backup >= 0, f"Hybrid.pack: backup must not be negative, got {n_backup}")
        device = value.device
        rank, counts = _rank_within_group(row, M)

        long_rows = (counts > cap).nonzero().flatten()
        if overflow == "error" and len(long_rows) > n_backup:
            m = int(long_rows[n_backup])
            smallest_cap = int(counts.sort(descending=True).values[n_backup])
            raise ValueError(
                f"Hybrid.pack: row {m} has {int(counts[m])} active elements, more than cap={cap}, and finds "
                f"no backup row: {len(long_rows)} rows are over the cap, backup={n_backup}; the smallest "
                f"backup that fits is {len(long_rows)}, or with this backup the smallest cap {smallest_cap}"
            )
        backup_rows, row_backup = _backup_maps(counts, cap, n_backup)
        dense = torch.zeros(n_backup, F, dtype=value.dtype, device=device)
        to_backup = row_backup[row] >= 0
        dense[row_backup[row[to_backup]].long(), col[to_backup]] = value[to_backup]

        values = torch.zeros(M, cap, dtype=value.dtype, device=device)
        columns = torch.zeros(M, cap, dtype=torch.int64, device=device)
        to_ell = counts[row] <= cap
        values[row[to_ell], rank[to_ell]] = value[to_ell]
        columns[row[to_ell], rank[to_ell]] = col[to_ell]
        return cls(
            shape=(M, F),
            values=values,
            indices=columns.to(_index_dtype(F)),
            counts=counts.int(),
            backup=dense,
            backup_rows=backup_rows,
            row_backup=row_backup,
        )

    def transpose(self, *, cap: int = 128, backup: int | None = None, overflow: Overflow = "error") -> Hybrid:
        """The neuron-major form [F, M], from the entries alone; what weight gradients read."""
        row, col, value = self.entries()
        order = torch.argsort(col, stable=True)  # entries come by row, so rows stay ascending
        M, F = self.shape
        return Hybrid._from_entries(col[order], row[order], value[order], (F, M), cap, backup, overflow)

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def cap(self) -> int:
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def columns(self) -> Tensor:
        """Column of every ELL entry, int64 [M, cap]; 0 in unused slots."""
        return self.indices.long() & _LOW_16_BITS if self.indices.dtype == torch.int16 else self.indices.long()

    @property
    def overflowed(self) -> Tensor:
        """bool [M]: rows over ``cap`` that found no backup row."""
        return (self.counts > self.cap) & (self.row_backup < 0)

    @property
    def nbytes(self) -> int:
        return _nbytes(self._tensors())

    def entries(self, *, skip_overflowed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """All entries as (row, column, value), sorted by row, then column.

        Raises if rows overflowed, since their entries are not stored; ``skip_overflowed`` leaves them out.
        """
        _require_complete("Hybrid", self.overflowed, skip_overflowed)
        row, slot = self._used().nonzero(as_tuple=True)
        b, b_col = (self.backup != 0).nonzero(as_tuple=True)
        rows = torch.cat([row, self.backup_rows[b].long()])
        cols = torch.cat([self.columns[row, slot], b_col])
        values = torch.cat([self.values[row, slot], self.backup[b, b_col]])
        order = torch.argsort(rows, stable=True)
        return rows[order], cols[order], values[order]

    def unpack(self, *, skip_overflowed: bool = False) -> Tensor:
        """The dense [M, F] matrix, active elements bit for bit. Raises if rows overflowed, or leaves them zero."""
        return _dense(self.shape, self.entries(skip_overflowed=skip_overflowed))

    def to(self, device: torch.device | str) -> Hybrid:
        return _moved(self, device)

    def __eq__(self, other: object) -> bool:
        """Field by field, bit for bit, so that NaN equals the same NaN."""
        if not isinstance(other, Hybrid):
            return NotImplemented
        same = (_same_bits(a, b) for a, b in zip(self._tensors(), other._tensors(), strict=True))
        return self.shape == other.shape and all(same)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        M, F = self.shape
        n_over = int(self.overflowed.sum())
        used = int((self.backup_rows >= 0).sum())
        return (
            f"Hybrid({M} x {F}, cap={self.cap}, {used} of {len(self.backup_rows)} backup rows, "
            f"{_short(self.dtype)}, {int(self.counts.sum())} active, "
            f"{f'{n_over} rows overflowed, ' if n_over else ''}{self.nbytes} bytes)"
        )

    def _used(self) -> Tensor:
        """bool [M, cap]: slots that hold an entry."""
        counts = self.counts.unsqueeze(1)
        return (torch.arange(self.cap, device=self.device) < counts) & (counts <= self.cap)

    def _tensors(self) -> list[Tensor]:
        return [self.values, self.indices, self.counts, self.backup, self.backup_rows, self.row_backup]


def _backup_maps(counts: Tensor, cap: int, n_backup: int) -> tuple[Tensor, Tensor]:
    """backup_rows [n_backup] and row_backup [M]: the first rows over ``cap`` have backup rows, in row order."""
    placed = (counts > cap).nonzero().flatten()[:n_backup]
    backup_rows = torch.full((n_backup,), -1, dtype=torch.int32, device=counts.device)
    backup_rows[: len(placed)] = placed.int()
    row_backup = torch.full((len(counts),), -1, dtype=torch.int32, device=counts.device)
    row_backup[placed] = torch.arange(len(placed), dtype=torch.int32, device=counts.device)
    return backup_rows, row_backup


def _index_dtype(n_columns: int) -> torch.dtype:
    return torch.int16 if n_columns <= MAX_COLUMNS_16BIT else torch.int32
