"""``Hybrid``: short lists for ordinary rows, a dense backup for the few long ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from twell.formats.common import (
    LOW_16_BITS,
    MAX_COLUMNS_16BIT,
    Format,
    Overflow,
    check_lists,
    first,
    is_not_zero_bits,
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Hybrid(Format):
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
        require(M >= 0 and F >= 0, f"Hybrid: shape must not be negative, got {self.shape}")
        require_tensor("Hybrid", "values", self.values, (M, cap), None)
        require_float("Hybrid", self.values.dtype)
        require_tensor("Hybrid", "indices", self.indices, (M, cap), _index_dtype(F))
        require_tensor("Hybrid", "counts", self.counts, (M,), torch.int32)
        require_tensor("Hybrid", "backup", self.backup, (n_backup, F), self.values.dtype)
        require_tensor("Hybrid", "backup_rows", self.backup_rows, (n_backup,), torch.int32)
        require_tensor("Hybrid", "row_backup", self.row_backup, (M,), torch.int32)
        require_same_device("Hybrid", self._tensors())

        wrong = (self.counts < 0) | (self.counts > F)
        if bool(wrong.any()):
            [m] = first(wrong)
            raise ValueError(f"Hybrid: row {m} has count {int(self.counts[m])}, expected 0 to {F}")
        self._check_backup()
        low = torch.zeros((), dtype=torch.int64, device=self.device)
        check_lists("Hybrid", self.columns, self.values, self._used(), low, low + F)

    def _check_backup(self) -> None:
        """The counts and the number of backup rows leave no choice: which rows are there, and where."""
        maps = dict(
            zip(("backup_rows", "row_backup"), _backup_maps(self.counts, self.cap, len(self.backup)), strict=True)
        )
        for name, expected in maps.items():
            wrong = getattr(self, name) != expected
            if bool(wrong.any()):
                [i] = first(wrong)
                raise ValueError(
                    f"Hybrid: {name}[{i}] must be {int(expected[i])}, got {int(getattr(self, name)[i])} (the first "
                    f"rows with more than cap={self.cap} active elements have backup rows, in row order)"
                )
        expected = torch.zeros(len(self.backup), dtype=torch.int64, device=self.device)
        used = self.backup_rows >= 0
        expected[used] = self.counts[self.backup_rows[used].long()].long()
        true_counts = (self.backup != 0).sum(1)
        if not torch.equal(true_counts, expected):
            [b] = first(true_counts != expected)
            raise ValueError(
                f"Hybrid: backup row {b} has {int(true_counts[b])} active elements, counts say {int(expected[b])}"
            )
        require(not bool((is_not_zero_bits(self.backup) & (self.backup == 0)).any()), "Hybrid: the backup holds -0.0")

    # -- building --------------------------------------------------------------------------------------

    @classmethod
    def pack(cls, g: Tensor, *, cap: int = 128, backup: int | None = None, overflow: Overflow = "error") -> Hybrid:
        """Pack a dense [M, F] matrix; ``backup`` defaults to ceil(M / 8) rows.

        With ``overflow="mark"`` rows that find no backup row are marked instead of raising.
        """
        require_dense("Hybrid.pack", g)
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
        require_overflow_policy("Hybrid.pack", overflow)
        M, F = shape
        n_backup = -(-M // 8) if backup is None else backup
        require(cap >= 0, f"Hybrid.pack: cap must not be negative, got {cap}")
        require(n_backup >= 0, f"Hybrid.pack: backup must not be negative, got {n_backup}")
        device = value.device
        rank, counts = rank_within_group(row, M)

        long_rows = (counts > cap).nonzero().flatten()
        if overflow == "error" and len(long_rows) > n_backup:
            m = int(long_rows[n_backup])
            smallest_cap = int(counts.sort(descending=True).values[n_backup])
            raise ValueError(
                f"Hybrid.pack: row {m} has {int(counts[m])} active elements, more than cap={cap}, and finds no backup "
                f"row: {len(long_rows)} rows are over the cap, backup={n_backup}; the smallest backup that fits is "
                f"{len(long_rows)}, or with this backup the smallest cap {smallest_cap}"
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
    def columns(self) -> Tensor:
        """Column of every ELL entry, int64 [M, cap]; 0 in unused slots."""
        return self.indices.long() & LOW_16_BITS if self.indices.dtype == torch.int16 else self.indices.long()

    @property
    def overflowed(self) -> Tensor:
        """bool [M]: rows over ``cap`` that found no backup row."""
        return (self.counts > self.cap) & (self.row_backup < 0)

    def _all_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        row, slot = self._used().nonzero(as_tuple=True)
        b, b_col = (self.backup != 0).nonzero(as_tuple=True)
        rows = torch.cat([row, self.backup_rows[b].long()])
        cols = torch.cat([self.columns[row, slot], b_col])
        values = torch.cat([self.values[row, slot], self.backup[b, b_col]])
        order = torch.argsort(rows, stable=True)
        return rows[order], cols[order], values[order]

    def __eq__(self, other: object) -> bool:
        """Field by field, bit for bit, so that NaN equals the same NaN."""
        if not isinstance(other, Hybrid):
            return NotImplemented
        same = (same_bits(a, b) for a, b in zip(self._tensors(), other._tensors(), strict=True))
        return self.shape == other.shape and all(same)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        used = f"{int((self.backup_rows >= 0).sum())} of {len(self.backup_rows)} backup rows"
        return self._in_words(f"cap={self.cap}, {used}, {short_name(self.dtype)}", self.counts)

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
