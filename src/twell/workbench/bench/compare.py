"""``twell compare``: the same measurements in several files, or at several commits in one file, side by side.

Rows match where they measured the same (``KEY``). Each quantity of a row is judged against the first side's:

- noise: the intervals from the 20th to the 80th percentile overlap, or the medians differ by less than a floor.
  Speedups are single numbers; their intervals follow from the times they were computed from. Where no interval is
  known, the floor alone decides.
- better or worse: all other differences.
- other machine: times of different machines say nothing about the code; ratios inside a row do.
- unknown: only one side has the quantity, or its value is not a positive number.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twell.workbench.bench import rows
from twell.workbench.bench.rows import Row, is_number

if TYPE_CHECKING:
    from rich.table import Table

_NAMES = ("bench", "level", "preset", "model", "case", "workload", "kind", "backend")
_SIZES = ("layers", "batch", "length", "new_tokens", "M", "D", "F")
KEY = (*_NAMES, *_SIZES, "dtype", "graph", "graph_layers", "compiled")  # the fields of these that a row has
FLOOR = 0.02  # medians closer than this are noise
THRESHOLD = 0.05  # a check fails beyond it
CHECKED = ("speedup", "sparse_ms", "sparse.step_ms")

_DENSE, _FP8 = ("dense", "compiled"), ("fp8", "fp8_weights")
_OVER = {  # by the end of a speedup's name: over the fastest of which ways, and of which way (the first that is there)
    "": (_DENSE, ("sparse",)),
    "_eager": (("dense",), ("sparse",)),
    "_frozen": (_DENSE, ("frozen",)),
    "_compiled": (("compiled",), ("sparse_compiled",)),
    "_over_fp8": (_FP8, ("frozen", "sparse")),
    "_fp8": (_FP8, ("sparse_fp8",)),
}
_PLACES = {  # of the times, by the start of the name
    "speedup": ("{}_ms", "{}.step_ms"),
    "speedup_called": ("called_ms.{}",),
    "speedup_called_with_step": ("called_with_step_ms.{}",),
}
SPEEDUPS = {  # the times that each was computed from
    start + end: [[place.format(way) for way in ways for place in places] for ways in sides]
    for start, places in _PLACES.items()
    for end, sides in _OVER.items()
}
_RATIOS = (*SPEEDUPS, "peak_ratio", "activations_ratio", "joules_ratio", "memory.ratio", "memory_ratio")

Verdict = Literal["noise", "better", "worse", "other machine", "unknown"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A median and the interval around it; an interval of no length where none is known."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value

    def __str__(self) -> str:
        width = f" ±{self.half_width:.0%}" if self.high > self.low else ""
        return (f"{self.value:#.4g}".rstrip(".") if self.value < 1e4 else f"{self.value:,.0f}") + width


@dataclasses.dataclass(frozen=True)
class Difference:
    """One quantity of one row: in the first side, and in another."""

    key: dict[str, Any]
    quantity: str
    side: str
    before: Measured | None
    after: Measured | None
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """After over before."""
        return None if self.before is None or self.after is None else self.after.value / self.before.value

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"ratio": None if self.ratio is None else round(self.ratio, 4)}


@dataclasses.dataclass(frozen=True)
class RowComparison:
    """Each side but the first, compared with the first."""

    sides: list[str]
    matched: int  # pairs of rows
    differences: list[Difference]
    unmatched: list[dict[str, Any]]  # rows that one side lacks: key, only_in, not_in
    left_out: list[str]  # how many rows were not compared, in words

    def to_json(self) -> list[dict[str, Any]]:
        return [*(d.to_json() for d in self.differences), *(u | {"verdict": "unmatched"} for u in self.unmatched)]


# ---------------------------------------------------------------------------------------------------------
# Sides
# ---------------------------------------------------------------------------------------------------------


def compare_files(
    paths: Sequence[Path], *, by: str | None = None, first: str | None = None, floor: float = FLOOR
) -> RowComparison:
    """Each file is a side. With ``by``, a field such as ``commit`` or ``versions.torch``, each of its values is a side.

    ``first``: the side that the others are compared with; by default the first to come.
    """
    if by is not None:
        return compare(split(_read(paths), by), without=by, first=first, floor=floor)
    if len(paths) < 2:
        raise ValueError("expected two files or more to compare, or a field to tell the rows of one file apart")
    names = [path.name for path in paths]
    names = names if len(set(names)) == len(names) else list(map(str, paths))
    return compare({name: _read([path]) for name, path in zip(names, paths, strict=True)}, first=first, floor=floor)


def _read(paths: Sequence[Path]) -> list[Row]:
    return [rows.measured(row) for row in rows.read(paths)]


def split(rows_: Sequence[Row], by: str) -> dict[str, list[Row]]:
    """Rows by the value of a field, in the order the values come.

    >>> split([{"M": 1, "versions": {"torch": "2.11"}}, {"M": 2}], "versions.torch")
    {'2.11': [{'M': 1, 'versions': {'torch': '2.11'}}], 'no versions.torch': [{'M': 2}]}
    """
    sides: dict[str, list[Row]] = {}
    for row in rows_:
        value: Any = row
        for part in by.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        sides.setdefault(f"no {by}" if value is None else str(value), []).append(row)
    if len(sides) < 2:
        raise ValueError(f"nothing to compare: expected several values of {by}, got {', '.join(sides) or 'no rows'}")
    return sides


def compare(
    sides: Mapping[str, Sequence[Row]], *, without: str | None = None, first: str | None = None, floor: float = FLOOR
) -> RowComparison:
    """Compare named sides with the ``first``. ``without``: a field that the sides differ in, left out of keys."""
    if len(sides) < 2:
        raise ValueError("expected two sides or more to compare")
    if not floor >= 0:
        raise ValueError(f"expected a noise floor of 0 or more, got {floor}")
    first = next(iter(sides)) if first is None else first
    if first not in sides:
        raise ValueError(f"there is no side {first!r}: expected one of {', '.join(sides)}")
    newest = {name: _newest(sides[name], without) for name in (first, *(name for name in sides if name != first))}
    more = {name: len(sides[name]) - len(found) for name, found in newest.items()}
    left_out = [f"{name}: {n} rows of older measurements, or of none, left out" for name, n in more.items() if n]
    base = newest.pop(first)
    matched = 0
    differences: list[Difference] = []
    unmatched: list[dict[str, Any]] = []
    for name, others in newest.items():
        for key in base | others:
            if key in base and key in others:
                matched += 1
                differences += _differences(json.loads(key), name, base[key], others[key], floor)
            else:
                has, lacks = (first, name) if key in base else (name, first)
                unmatched.append({"key": json.loads(key), "only_in": has, "not_in": lacks})
    return RowComparison([first, *newest], matched, differences, unmatched, left_out)


def _newest(rows_: Sequence[Row], without: str | None) -> dict[str, Row]:
    """The newest row of each key, as JSON; of rows of the same time the last. Rows without ``bench`` have no key."""
    newest: dict[str, Row] = {}
    for row in rows_:
        if "bench" in row:
            # A flag that is off is left out: older rows do not have it. "paper" was a name of --shape 64x2048.
            there = [name for name in KEY if name != without and row.get(name) not in (None, False, "paper")]
            key = json.dumps({name: row[name] for name in there})
            if key not in newest or str(row.get("time", "")) >= str(newest[key].get("time", "")):
                newest[key] = row
    return newest


# ---------------------------------------------------------------------------------------------------------
# Quantities
# ---------------------------------------------------------------------------------------------------------


def quantities(row: Row) -> dict[str, Measured | None]:
    """What a row measured, by dotted name; None for a value that is not a usable number."""
    found = {name: _measured(value) for name, value in _leaves(row)}
    known = {name: m for name, m in found.items() if m is not None}
    return found | {name: _with_interval(name, m, known) for name, m in known.items()}


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of all quantities: spreads, and numbers known by their names."""
    for field, inner in value.items():
        name = prefix + field
        if isinstance(inner, dict) and not inner.keys() >= {"p20", "p50", "p80"}:
            yield from _leaves(inner, f"{name}.")
        elif isinstance(inner, dict) or (inner is not None and _is_quantity(name)):
            yield name, inner


def _is_quantity(name: str) -> bool:
    return name in _RATIOS or name.startswith("host_us.")


def _measured(value: Any) -> Measured | None:
    low, median, high = (value[name] for name in ("p20", "p50", "p80")) if isinstance(value, dict) else [value] * 3
    is_usable = all(is_number(number) and number > 0 for number in (low, median, high))
    return Measured(median, low, high) if is_usable else None


def _with_interval(name: str, m: Measured, known: Mapping[str, Measured]) -> Measured:
    """A speedup with the interval that follows from its times; all else, or where these are not known, as it is."""
    dense_names, sparse_names = SPEEDUPS.get(name, ((), ()))
    dense = min((known[n] for n in dense_names if n in known), key=lambda time: time.value, default=None)
    sparse = next((known[n] for n in sparse_names if n in known), None)
    if dense is None or sparse is None:
        return m
    width = math.hypot(dense.half_width, sparse.half_width)
    return Measured(m.value, max(0.0, m.value * (1 - width)), m.value * (1 + width))


def _differences(key: dict[str, Any], side: str, before: Row, after: Row, floor: float) -> Iterator[Difference]:
    machine = ("device", "gpu", "cpu", "threads")
    is_other_machine = any(before.get(name) != after.get(name) for name in machine)
    a, b = quantities(before), quantities(after)
    for name in a | b:
        judged = judge(name, a.get(name), b.get(name), floor)
        if is_other_machine and judged != "unknown" and name not in _RATIOS:
            judged = "other machine"
        yield Difference(key, name, side, a.get(name), b.get(name), judged)


def judge(quantity: str, before: Measured | None, after: Measured | None, floor: float = FLOOR) -> Verdict:
    """Judge two values from one machine. Speedups should be high; times, memory and energy low.

    >>> judge("sparse_ms", Measured(1.0, 0.99, 1.01), Measured(1.1, 1.08, 1.12))
    'worse'
    >>> judge("speedup", Measured(2.0, 1.9, 2.1), Measured(2.15, 2.05, 2.25))
    'noise'
    """
    if before is None or after is None:
        return "unknown"
    overlap = before.low <= after.high and after.low <= before.high
    if overlap or _change(before, after) < floor:
        return "noise"
    return "better" if (after.value > before.value) == (quantity in SPEEDUPS) else "worse"


def _change(a: Measured, b: Measured) -> float:
    """The larger value over the smaller one, less 1: the same in both directions."""
    return max(a.value, b.value) / min(a.value, b.value) - 1


# ---------------------------------------------------------------------------------------------------------
# Check and table
# ---------------------------------------------------------------------------------------------------------


def verdict(comparison: RowComparison, names: Sequence[str] | None = None, threshold: float = THRESHOLD) -> int:
    """The exit code of a check: 1 where there are ``failures``. Raises where nothing can be judged, so that a check of
    nothing does not pass."""
    first, *others = comparison.sides
    if comparison.matched == 0:
        raise ValueError(f"nothing to compare: no row of {first} is also in {' or '.join(others)}")
    for name in names or ():
        if not any(_is_named(d.quantity, [name]) for d in comparison.differences):
            raise ValueError(f"nothing to check: no compared row has a quantity {name}")
    if failures(comparison, names, threshold):
        return 1
    checked = [d for d in comparison.differences if _is_named(d.quantity, names or CHECKED)]
    if all(d.verdict in ("other machine", "unknown") for d in checked):
        raise ValueError(
            f"nothing to check: {', '.join(names or CHECKED)} of {first} cannot be judged against {' or '.join(others)}"
        )
    return 0


def failures(
    comparison: RowComparison, names: Sequence[str] | None = None, threshold: float = THRESHOLD
) -> list[Difference]:
    """Named quantities (patterns; default ``CHECKED``) that are worse by more than ``threshold``, or that only the
    first side has: what no longer runs does not pass."""
    if not threshold >= 0:
        raise ValueError(f"expected a threshold of 0 or more, got {threshold}")
    return [d for d in comparison.differences if _is_named(d.quantity, names or CHECKED) and _fails(d, threshold)]


def _fails(d: Difference, threshold: float) -> bool:
    if d.before is None or d.after is None:
        return d.before is not None
    return d.verdict == "worse" and _change(d.before, d.after) > threshold


def _is_named(quantity: str, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(quantity, name) for name in names)


def table(comparison: RowComparison) -> Table:
    """A line for each quantity of each matched row and side."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    first, *others = comparison.sides
    keys = [d.key for d in comparison.differences]
    shared = {name: value for name, value in (keys or [{}])[0].items() if all(key.get(name) == value for key in keys)}
    made = Table(title=Text(label(shared)), box=box.SIMPLE)
    for head in ("row", "quantity", first, others[0] if len(others) == 1 else "other", "ratio", "verdict", "other is"):
        if head != "other is" or len(others) > 1:
            made.add_column(Text(head), justify="right" if head == "ratio" else "left", no_wrap=True)
    row_above = None
    for d in comparison.differences:
        style = {"better": "green", "worse": "red"}.get(d.verdict, "dim")
        ratio = "" if d.ratio is None else f"{d.ratio:.3f}"
        cells = ["" if d.key == row_above else label(d.key, shared), d.quantity, str(d.before or "-")]
        cells += [str(d.after or "-"), ratio]
        made.add_row(*map(Text, cells), Text(d.verdict, style), *([Text(d.side)] if len(others) > 1 else []))
        row_above = d.key
    return made


def notes(comparison: RowComparison) -> list[str]:
    """Lines below the table."""
    said = ["±: half the distance of the 20th and 80th percentile; ratio: to the first"]
    unmatched = [f"only in {u['only_in']}, not in {u['not_in']}: {label(u['key'])}" for u in comparison.unmatched]
    return [*said, *comparison.left_out, *unmatched]


def label(key: Mapping[str, Any], without: Mapping[str, Any] | None = None) -> str:
    """A key in words, less the fields that all rows share.

    >>> label({"bench": "ffn", "workload": "skew29", "M": 4096, "graph": True}, {"bench": "ffn"})
    'skew29, M 4096, graph'
    """
    return ", ".join(
        name if value is True else value if isinstance(value, str) else f"{name} {value}"
        for name, value in key.items()
        if name not in (without or {})
    )
