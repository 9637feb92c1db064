"""What the formats share: checks of fields and entries, and reading."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import torch
from torch import Tensor

MAX_COLUMNS_16BIT = 1 << 16
LOW_16_BITS = 0xFFFF
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer of the same size

Overflow = Literal["error", "mark"]


class Format:
    """A frozen dataclass of tensors that stand for a matrix [M, F]."""

    shape: tuple[int, int]

    def _tensors(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def overflowed(self) -> Tensor:
        raise NotImplementedError

    def _all_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self._tensors()[0].device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors())

    def entries(self, *, skip_overflowed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """All entries as (row, column, value), sorted by row, then column.

        Raises if rows overflowed, since their entries are not stored; ``skip_overflowed`` leaves them out.
        """
        over = self.overflowed
        if not skip_overflowed and bool(over.any()):
            raise ValueError(
                f"{type(self).__name__}: {int(over.sum())} rows overflowed (first: row {first(over)[0]}), so not all "
                f"their entries are stored; compute these rows another way and read the rest with skip_overflowed=True"
            )
        return self._all_entries()

    def unpack(self, *, skip_overflowed: bool = False) -> Tensor:
        """The dense [M, F] matrix, active elements bit for bit. Raises if rows overflowed, or leaves them zero."""
        row, col, value = self.entries(skip_overflowed=skip_overflowed)
        g = torch.zeros(self.shape, dtype=value.dtype, device=value.device)
        g[row, col] = value
        return g

    def to(self, device: torch.device | str) -> Self:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        moved = {k: t.to(device) for k, t in fields.items() if isinstance(t, Tensor)}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]

    def _in_words(self, parameters: str, counts: Tensor) -> str:
        """For repr."""
        (M, F), n_over = self.shape, int(self.overflowed.sum())
        over = f"{n_over} rows overflowed, " if n_over else ""
        return f"{type(self).__name__}({M} x {F}, {parameters}, {int(counts.sum())} active, {over}{self.nbytes} bytes)"


# -- Checks ----------------------------------------------------------------------------------------------


def require(condition: bool | Tensor, message: str) -> None:
    if not bool(condition):
        raise ValueError(message)


def require_tensor(owner: str, name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    require(isinstance(t, Tensor), f"{owner}: {name} must be a tensor, got {type(t).__name__}")
    require(tuple(t.shape) == shape, f"{owner}: {name} must have shape {shape}, got {tuple(t.shape)}")
    if dtype is not None:
        require(t.dtype == dtype, f"{owner}: {name} must be {dtype}, got {t.dtype}")


def require_float(owner: str, dtype: torch.dtype) -> None:
    require(dtype.is_floating_point, f"{owner}: values must be floating-point, got {dtype}")


def require_same_device(owner: str, tensors: list[Tensor]) -> None:
    devices = sorted({str(t.device) for t in tensors})
    require(len(devices) <= 1, f"{owner}: tensors lie on different devices: {', '.join(devices)}")


def require_dense(owner: str, g: Any) -> None:
    require(isinstance(g, Tensor), f"{owner}: expected a tensor, got {type(g).__name__}")
    require(g.dim() == 2, f"{owner}: expected a matrix [M, F], got shape {tuple(g.shape)}")
    require(g.is_floating_point(), f"{owner}: expected a floating-point matrix, got {g.dtype}")
    require(g.layout == torch.strided, f"{owner}: expected a dense matrix, got layout {g.layout}")


def require_overflow_policy(owner: str, overflow: str) -> None:
    require(overflow in ("error", "mark"), f"{owner}: overflow must be 'error' or 'mark', got {overflow!r}")


def check_lists(owner: str, columns: Tensor, values: Tensor, used: Tensor, low: Tensor, high: Tensor) -> None:
    """Invariants of ELL lists [..., slots]: ``used`` slots hold active values at ascending columns in [low, high),
    the slots behind them zeros. ``low`` and ``high`` broadcast over the lists."""
    inside = (columns >= low.unsqueeze(-1)) & (columns < high.unsqueeze(-1))
    for name, wrong in (
        ("a stored value is zero", used & (values == 0)),
        ("a column index lies outside its range", used & ~inside),
        ("an unused slot is not zero", ~used & (is_not_zero_bits(values) | (columns != 0))),
    ):
        if bool(wrong.any()):
            raise ValueError(f"{owner}: {name}, first at {first(wrong)}")
    falling = used[..., 1:] & (columns[..., 1:] <= columns[..., :-1])
    if bool(falling.any()):
        raise ValueError(f"{owner}: column indices repeat or do not ascend, first at {first(falling)}")


# -- Tensors ---------------------------------------------------------------------------------------------


def first(condition: Tensor) -> list[int]:
    """Index of the first True element."""
    return condition.nonzero()[0].tolist()


def rank_within_group(group: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """For sorted group ids: the rank of each element within its group, and the size of each group."""
    sizes = torch.bincount(group, minlength=n_groups)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(group), device=group.device) - starts[group], sizes


def is_not_zero_bits(values: Tensor) -> Tensor:
    """True also for -0.0, so that equal matrices have equal forms."""
    return values.contiguous().view(BITS[values.element_size()]) != 0


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    bits = BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
