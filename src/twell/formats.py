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
TwELL(2 x 6, tile=3, slots=2, float32, plain, 4 active, 64 bytes)
>>> t.counts.tolist()
[[1, 2], [0, 1]]
>>> t.columns.tolist()
[[[1, 0], [4, 5]], [[0, 0], [3, 0]]]
>>> torch.equal(t.unpack(), g)
True

Column indices are stored in 16 bits. torch has few operations on uint16, so the bits live in an int16
tensor; ``.columns`` gives them as int64.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

MAX_COLUMNS_16BIT = 1 << 16
_LOW_16_BITS = 0xFFFF
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer of the same size

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


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _equal_fields(a: Any, b: Any) -> bool:
    """Field by field, tensors bit for bit (so that NaN equals the same NaN)."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if not _same_bits(x, y):
                return False
        elif isinstance(x, Tensor) or isinstance(y, Tensor) or x != y:
            return False
    return True


def _moved(form: Any, device: torch.device | str) -> Any:
    tensors = {f.name: getattr(form, f.name) for f in dataclasses.fields(form)}
    return dataclasses.replace(form, **{k: t.to(device) for k, t in tensors.items() if isinstance(t, Tensor)})


def _check_lists(owner: str, columns: Tensor, values: Tensor, stored: Tensor, low: Tensor, high: Tensor) -> None:
    """Invariants of ELL lists [..., slots]: ``stored`` leading slots hold active values at ascending columns
    in [low, high); the slots behind them are zero. ``stored``, ``low``, ``high`` broadcast over the lists."""
    slot = torch.arange(columns.shape[-1], device=columns.device)
    used = slot < stored.unsqueeze(-1)
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
        raise ValueError(f"{owner}: column indices do not ascend, first at {_first(falling)}")


# ---------------------------------------------------------------------------------------------------------
# TwELL
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TwELL:
    """Tile-wise ELLPACK of an [M, F] matrix: per row and tile of T columns, up to ``slots`` words.

    Plain form, any float dtype (n_tiles = ceil(F / T)):
        values   [M, n_tiles, slots]         active values, left-aligned, zeros behind
        indices  [M, n_tiles, slots] int16   bits of the uint16 column in 0..F-1, ascending
        counts   [M, n_tiles] int32          true number of active elements
    Compact form, 16-bit dtypes only:
        words    [M, n_tiles * slots] int32  per tile: the true count, then value << 16 | column

    A (row, tile) whose count exceeds ``capacity`` holds its first ``capacity`` entries and marks its row
    in ``overflowed``. ``slots`` counts words: 32 compact slots hold 31 entries.

    >>> g = torch.tensor([[0, 1.5, 0, 2.0]], dtype=torch.bfloat16)
    >>> t = TwELL.pack(g, tile=4, slots=4, compact=True)
    >>> [hex(w) for w in t.words[0].tolist()]      # bf16 1.5 is 0x3fc0, 2.0 is 0x4000
    ['0x2', '0x3fc00001', '0x40000003', '0x0']
    """

    shape: tuple[int, int]
    tile: int
    slots: int
    dtype: torch.dtype
    values: Tensor | None = None
    indices: Tensor | None = None
    counts: Tensor
    words: Tensor | None = None

    def __post_init__(self) -> None:
        M, F = self.shape
        n_tiles = _n_tiles(F, self.tile, self.slots)
        _require(M >= 0, f"TwELL: M must not be negative, got {M}")
        _require_float("TwELL", self.dtype)
        _require_tensor("TwELL", "counts", self.counts, (M, n_tiles), torch.int32)
        tensors = [self.counts]
        if self.words is not None:
            _require(
                self.values is None and self.indices is None,
                "TwELL: give either words (compact form) or values and indices (plain form), not both",
            )
            _require_16bit_values(self.dtype)
            _require_tensor("TwELL", "words", self.words, (M, n_tiles * self.slots), torch.int32)
            tensors.append(self.words)
        else:
            lists = (M, n_tiles, self.slots)
            _require_tensor("TwELL", "values", self.values, lists, self.dtype)
            _require_tensor("TwELL", "indices", self.indices, lists, torch.int16)
            assert self.values is not None and self.indices is not None
            tensors += [self.values, self.indices]
        _require_same_device("TwELL", tensors)
        if self.words is not None and self.words.numel():
            in_words = self.words.view(M, n_tiles, self.slots)[..., 0]
            _require(torch.equal(in_words, self.counts), "TwELL: counts differ from the words' first entries")

        starts = torch.arange(n_tiles, device=self.counts.device) * self.tile
        ends = (starts + self.tile).clamp(max=F)
        wrong = (self.counts < 0) | (self.counts > ends - starts)
        if bool(wrong.any()):
            m, t = _first(wrong)
            raise ValueError(
                f"TwELL: row {m}, tile {t} has count {int(self.counts[m, t])}, expected 0 to {int(ends[t] - starts[t])}"
            )
        stored = self.counts.clamp(max=self.capacity)
        _check_lists("TwELL", self.columns, self._list_values(), stored, starts, ends)

    # -- building --------------------------------------------------------------------------------------

    @classmethod
    def pack(
        cls,
        g: Tensor,
        *,
        tile: int = 256,
        slots: int = 32,
        compact: bool = False,
        overflow: Overflow = "error",
    ) -> TwELL:
        """Pack a dense [M, F] matrix. With ``overflow="mark"`` rows that do not fit are marked instead."""
        _require_dense("TwELL.pack", g)
        _require_overflow_policy("TwELL.pack", overflow)
        M, F = g.shape
        n_tiles = _n_tiles(F, tile, slots)
        if compact:
            _require_16bit_values(g.dtype)
        row, col = (g != 0).nonzero(as_tuple=True)  # row-major, so every list comes out ascending
        rank, counts = _rank_within_group(row * n_tiles + col // tile, M * n_tiles)
        counts = counts.view(M, n_tiles).int()
        capacity = slots - 1 if compact else slots
        if overflow == "error" and bool((counts > capacity).any()):
            m, t = _first(counts > capacity)
            raise ValueError(
                f"TwELL.pack: row {m}, tile {t} (columns {t * tile} to {min(F, (t + 1) * tile) - 1}) has "
                f"{int(counts[m, t])} active elements, but slots={slots} hold {capacity}"
                f"{' in the compact form' if compact else ''}; "
                f"the smallest slots that fit are {int(counts.max()) + (slots - capacity)}"
            )
        fits = rank < capacity
        row, col, rank = row[fits], col[fits], rank[fits]
        values = g.new_zeros(M, n_tiles, slots)
        columns = torch.zeros(M, n_tiles, slots, dtype=torch.int64, device=g.device)
        values[row, col // tile, rank] = g[row, col]
        columns[row, col // tile, rank] = col
        form: dict[str, Any] = {"shape": (M, F), "tile": tile, "slots": slots, "dtype": g.dtype, "counts": counts}
        if compact:
            return cls(**form, words=_to_words(values[..., :capacity], columns[..., :capacity], counts))
        return cls(**form, values=values, indices=columns.to(torch.int16))

    @classmethod
    def from_words(cls, words: Tensor, *, shape: tuple[int, int], tile: int, dtype: torch.dtype) -> TwELL:
        """Wrap a compact word matrix [M, n_tiles * slots] int32, as the gate kernels write it."""
        M, F = shape
        n_tiles = _n_tiles(F, tile, 1)
        _require(
            isinstance(words, Tensor) and words.dim() == 2 and words.shape[0] == M,
            f"TwELL.from_words: expected words of shape [{M}, n_tiles * slots]",
        )
        divides = words.shape[1] == 0 if n_tiles == 0 else words.shape[1] > 0 and words.shape[1] % n_tiles == 0
        _require(divides, f"TwELL.from_words: {words.shape[1]} words a row do not divide into {n_tiles} tiles")
        slots = words.shape[1] // n_tiles if n_tiles else 1
        counts = words.view(M, n_tiles, slots)[..., 0].contiguous()
        return cls(shape=(M, F), tile=tile, slots=slots, dtype=dtype, counts=counts, words=words)

    def compact(self) -> TwELL:
        """The same entries in the compact form; one slot more than the plain form, for the count word."""
        if self.words is not None:
            return self
        _require_16bit_values(self.dtype)
        assert self.values is not None
        return dataclasses.replace(
            self,
            slots=self.slots + 1,
            values=None,
            indices=None,
            words=_to_words(self.values, self.columns, self.counts),
        )

    def plain(self) -> TwELL:
        """The same entries in the plain form; one slot fewer than the compact form."""
        if self.words is None:
            return self
        _require(self.slots > 1, "TwELL.plain: a compact form of 1 slot holds no entries")
        return dataclasses.replace(
            self,
            slots=self.slots - 1,
            values=self._list_values(),
            indices=self.columns.to(torch.int16),
            words=None,
        )

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Entries a (row, tile) can hold."""
        return self.slots if self.words is None else self.slots - 1

    @property
    def columns(self) -> Tensor:
        """Global column of every entry, int64 [M, n_tiles, capacity]; 0 in unused slots."""
        lists = self.indices if self.words is None else self._word_lists()
        assert lists is not None
        return lists.long() & _LOW_16_BITS

    @property
    def overflowed(self) -> Tensor:
        """bool [M]: rows with a tile that holds more active elements than fit."""
        return (self.counts > self.capacity).any(dim=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form (the compact form's counts live inside its words)."""
        return _nbytes(self.words) if self.words is not None else _nbytes(self.values, self.indices, self.counts)

    def entries(self, *, skip_overflowed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """All entries as (row, column, value), sorted by row, then column.

        Raises if rows overflowed, since their entries are not all here; ``skip_overflowed`` leaves them out.
        """
        _require_complete("TwELL", self.overflowed, skip_overflowed)
        used = torch.arange(self.capacity, device=self.device) < self.counts.unsqueeze(-1)
        used &= ~self.overflowed[:, None, None]
        row, tile, slot = used.nonzero(as_tuple=True)
        return row, self.columns[row, tile, slot], self._list_values()[row, tile, slot]

    def unpack(self, *, skip_overflowed: bool = False) -> Tensor:
        """The dense [M, F] matrix, active elements bit for bit. Raises if rows overflowed, or leaves them zero."""
        return _dense(self.shape, self.entries(skip_overflowed=skip_overflowed))

    @property
    def device(self) -> torch.device:
        return self.counts.device

    def to(self, device: torch.device | str) -> TwELL:
        return _moved(self, device)

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other) if isinstance(other, TwELL) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        M, F = self.shape
        n_over = int(self.overflowed.sum())
        return (
            f"TwELL({M} x {F}, tile={self.tile}, slots={self.slots}, {_short(self.dtype)}, "
            f"{'plain' if self.words is None else 'compact'}, {int(self.counts.sum())} active, "
            f"{f'{n_over} rows overflowed, ' if n_over else ''}{self.nbytes} bytes)"
        )

    def _word_lists(self) -> Tensor:
        """The words behind the count words, [M, n_tiles, slots - 1]."""
        assert self.words is not None
        return self.words.view(self.shape[0], self.counts.shape[1], self.slots)[..., 1:]

    def _list_values(self) -> Tensor:
        if self.words is None:
            assert self.values is not None
            return self.values
        return (self._word_lists() >> 16).to(torch.int16).view(self.dtype)


def _n_tiles(F: int, tile: int, slots: int) -> int:
    _require(tile >= 1, f"TwELL: tile must be at least 1, got {tile}")
    _require(slots >= 1, f"TwELL: slots must be at least 1, got {slots}")
    _require(0 <= F <= MAX_COLUMNS_16BIT, f"TwELL: F must be 0 to {MAX_COLUMNS_16BIT}, got {F}")
    return -(-F // tile)


def _require_16bit_values(dtype: torch.dtype) -> None:
    _require(
        dtype in (torch.bfloat16, torch.float16),
        f"TwELL: the compact form packs 16-bit values, got {dtype}; use the plain form",
    )


def _to_words(values: Tensor, columns: Tensor, counts: Tensor) -> Tensor:
    """Compact words [M, n_tiles * (capacity + 1)] from lists [M, n_tiles, capacity]."""
    bits = values.contiguous().view(torch.int16).int() << 16
    words = torch.cat([counts.unsqueeze(-1), bits | columns.int()], dim=-1)
    return words.flatten(1) if words.numel() else words.new_zeros(words.shape[0], words.shape[1] * words.shape[2])


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
        tensors = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "shape"]
        _require_same_device("Hybrid", tensors)

        wrong = (self.counts < 0) | (self.counts > F)
        if bool(wrong.any()):
            [m] = _first(wrong)
            raise ValueError(f"Hybrid: row {m} has count {int(self.counts[m])}, expected 0 to {F}")
        self._check_backup()
        stored = torch.where(self.counts <= cap, self.counts, 0)
        low = torch.zeros((), dtype=torch.int64, device=self.device)
        _check_lists("Hybrid", self.columns, self.values, stored, low, low + F)

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
        return _nbytes(self.values, self.indices, self.counts, self.backup, self.backup_rows, self.row_backup)

    def entries(self, *, skip_overflowed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """All entries as (row, column, value), sorted by row, then column.

        Raises if rows overflowed, since their entries are not stored; ``skip_overflowed`` leaves them out.
        """
        _require_complete("Hybrid", self.overflowed, skip_overflowed)
        ell = torch.arange(self.cap, device=self.device) < self.counts.unsqueeze(1)
        ell &= self.counts.unsqueeze(1) <= self.cap
        row, slot = ell.nonzero(as_tuple=True)
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
        return _equal_fields(self, other) if isinstance(other, Hybrid) else NotImplemented

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
