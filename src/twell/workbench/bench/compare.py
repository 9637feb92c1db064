"""``twell compare``: the same measurements of several files, or of several commits in one file, side by side.

Rows are matched by what was measured (``KEY``), and each quantity of a row is judged against the first side's:

- noise: the intervals from the 20th to the 80th percentile overlap, or the medians differ by less than a floor.
  Speedups and rates are single numbers; their intervals follow from those of the times they were made from. Where no
  interval is known, the floor alone decides.
- better or worse, otherwise.
- other machine: times and rates of different machines say nothing of the code; ratios inside a row still do.
- unknown: only one side has the quantity, or it is no usable number.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twell.workbench.bench import rows, swept
from twell.workbench.bench.rows import Row

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_NAMES = ("bench", "level", "preset", "model", "case", "workload", "kind", "backend")
_SIZES = ("layers", "batch", "length", "new_tokens", "M", "D", "F")
KEY = (*_NAMES, *_SIZES, "dtype", "graph", "graph_layers", "compiled")  # those that a row has
FLOOR = 0.02  # medians closer than this are noise
THRESHOLD = 0.05  # what fails a check
CHECKED = ("speedup", "sparse_ms", "sparse.step_ms")

_MACHINE = ("device", "gpu", "cpu", "threads")
_PERCENTILES = ("p20", "p50", "p80")
_DENSE = ("dense_ms", "compiled_ms", "dense.step_ms")
_CALLED = ("called_ms.dense", "called_ms.compiled")
_STEPS = ("called_with_step_ms.dense", "called_with_step_ms.compiled")
_SPEEDUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # the times they are made from, where a row has them
    "speedup": (_DENSE, ("sparse_ms", "sparse.step_ms")),
    "speedup_eager": (("dense_ms",), ("sparse_ms",)),
    "speedup_frozen": (_DENSE, ("frozen_ms",)),
    "speedup_over_fp8": (("fp8_ms", "fp8_weights_ms"), ("frozen_ms", "sparse_ms")),
    "speedup_fp8": (("fp8_ms", "fp8_weights_ms"), ("sparse_fp8_ms",)),
    "speedup_called": (_CALLED, ("called_ms.sparse",)),
    "speedup_called_frozen": (_CALLED, ("called_ms.frozen",)),
    "speedup_called_eager": (("called_ms.dense",), ("called_ms.sparse",)),
    "speedup_called_compiled": (("called_ms.compiled",), ("called_ms.sparse_compiled",)),
    "speedup_called_over_fp8": (
        ("called_ms.fp8", "called_ms.fp8_weights"),
        ("called_ms.frozen", "called_ms.sparse"),
    ),
    "speedup_called_fp8": (("called_ms.fp8", "called_ms.fp8_weights"), ("called_ms.sparse_fp8",)),
    "speedup_called_with_step": (_STEPS, ("called_with_step_ms.sparse",)),
}
_RATIOS = (*_SPEEDUPS, "peak_ratio", "activations_ratio", "kept_ratio", "joules_ratio", "memory.ratio", "memory_ratio")
_HOST = "host_us."
_RATE = "tokens_per_ms"

Verdict = Literal["noise", "better", "worse", "other machine", "unknown"]
_STYLES: dict[Verdict, str] = {"better": "green", "worse": "red"}  # others are dim


@dataclasses.dataclass(frozen=True)
class Measured:
    """A median and the interval around it; an interval of no length where none is known."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Of the interval, relative; the value must not be 0."""
        return (self.high - self.low) / 2 / self.value

    def __str__(self) -> str:
        width = f" ±{self.half_width:.0%}" if self.high > self.low and self.value else ""
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
        if self.before is None or self.after is None or self.before.value == 0:
            return None
        return self.after.value / self.before.value

    @property
    def change(self) -> float:
        """How many times the smaller value the larger one is, less 1: the same in both directions."""
        if self.before is None or self.after is None:
            return math.nan
        return _change(self.before.value, self.after.value)

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio
        return dataclasses.asdict(self) | {"ratio": None if ratio is None else round(ratio, 4)}


@dataclasses.dataclass(frozen=True)
class Unmatched:
    """A row of one side that another one lacks."""

    key: dict[str, Any]
    only_in: str
    not_in: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"verdict": "unmatched"}


@dataclasses.dataclass(frozen=True)
class Side:
    """How many rows of a side are compared, how many gave way to newer ones, how many are no benchmark's."""

    name: str
    rows: int
    superseded: int
    ignored: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of each side but the first with the first."""

    sides: list[Side]
    matched: int  # pairs of rows
    differences: list[Difference]
    unmatched: list[Unmatched]

    def to_json(self) -> list[dict[str, Any]]:
        """Differences, then unmatched rows."""
        return [*(d.to_json() for d in self.differences), *(u.to_json() for u in self.unmatched)]


# ---------------------------------------------------------------------------------------------------------
# Sides
# ---------------------------------------------------------------------------------------------------------


def compare_files(
    paths: Sequence[Path], *, by: str | None = None, first: str | None = None, floor: float = FLOOR
) -> Comparison:
    """Files with each other; with ``by``, a field such as ``commit``, ``gpu`` or ``versions.torch``, the rows of all
    files by its value. ``first``: the side the others are compared with, if not the first to come."""
    if by is not None:
        return compare(split(_read(paths), by), without=by, first=first, floor=floor)
    if len(paths) < 2:
        raise ValueError("expected two files or more to compare, or a field to tell the rows of one file apart")
    names = _names(paths)
    return compare({name: _read([path]) for name, path in zip(names, paths, strict=True)}, first=first, floor=floor)


def _read(paths: Sequence[Path]) -> list[Row]:
    return [swept.measured(row) for row in rows.read(paths)]


def split(rows_: Sequence[Row], by: str) -> dict[str, list[Row]]:
    """Rows by the value of a field, values in the order they come.

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


def _names(paths: Sequence[Path]) -> list[str]:
    """Short ones that tell the files apart; a file given twice is numbered."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    nth = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if n == 1 else f"{name} ({n})" for name, n in zip(names, nth, strict=True)]


def compare(
    sides: Mapping[str, Sequence[Row]], *, without: str | None = None, first: str | None = None, floor: float = FLOOR
) -> Comparison:
    """Named sides with the ``first`` of them. ``without``: a field that is no part of a row's key, because the sides
    differ in it."""
    if len(sides) < 2:
        raise ValueError("expected two sides or more to compare")
    if not floor >= 0:
        raise ValueError(f"expected a noise floor of 0 or more, got {floor}")
    first = next(iter(sides)) if first is None else first
    if first not in sides:
        raise ValueError(f"there is no side {first!r}: expected one of {', '.join(sides)}")
    newest = {name: _newest(of, without) for name, of in sides.items()}
    base = newest.pop(first)
    matched = 0
    differences: list[Difference] = []
    unmatched: list[Unmatched] = []
    for key, before in base.items():
        for name, others in newest.items():
            if key in others:
                matched += 1
                differences += _differences(_key(before, without), name, before, others[key], floor)
            else:
                unmatched.append(Unmatched(_key(before, without), first, name))
    for name, others in newest.items():
        unmatched += [Unmatched(_key(row, without), name, first) for key, row in others.items() if key not in base]
    facts = [_side(first, sides[first], base), *(_side(name, sides[name], others) for name, others in newest.items())]
    return Comparison(facts, matched, differences, unmatched)


def _side(name: str, all_rows: Sequence[Row], compared: Mapping[str, Row]) -> Side:
    ignored = sum("bench" not in row for row in all_rows)
    return Side(name, len(compared), len(all_rows) - ignored - len(compared), ignored)


def _key(row: Row, without: str | None) -> dict[str, Any]:
    """A flag that is off is left out: older rows do not have it."""
    there = [name for name in KEY if name != without and row.get(name) is not None and row[name] is not False]
    return {name: row[name] for name in there}


def _newest(rows_: Sequence[Row], without: str | None) -> dict[str, Row]:
    """The newest row of each key; of several at the same time the last. Training logs and the like have no key."""
    newest: dict[str, Row] = {}
    for row in rows_:
        if "bench" in row:
            key = json.dumps(_key(row, without))
            if key not in newest or _time(row) >= _time(newest[key]):
                newest[key] = row
    return newest


def _time(row: Row) -> float:
    """In seconds; before all others where a row has none."""
    try:
        time = datetime.datetime.fromisoformat(row["time"])
    except (KeyError, TypeError, ValueError):
        return -math.inf
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


# ---------------------------------------------------------------------------------------------------------
# Quantities
# ---------------------------------------------------------------------------------------------------------


def quantities(row: Row) -> dict[str, Measured | None]:
    """What a row measured, by dotted name; None where the value is there and no usable number."""
    found: dict[str, Measured | None] = {}
    for name, value in _leaves(row):
        if isinstance(value, dict):
            found[name] = _of_percentiles(value)
        else:
            found[name] = Measured(value, value, value) if _is_number(value) else None
    known = {name: m for name, m in found.items() if m is not None}
    return found | {name: _with_interval(name, m, known) for name, m in known.items()}


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of all quantities: spreads, and numbers known by their names."""
    for field, inner in value.items():
        name = prefix + field
        if isinstance(inner, dict) and not inner.keys() >= set(_PERCENTILES):
            yield from _leaves(inner, f"{name}.")
        elif inner is not None and (isinstance(inner, dict) or name in _RATIOS or _is_rate(name) or _is_host(name)):
            yield name, inner


def _of_percentiles(spread: Mapping[str, Any]) -> Measured | None:
    low, value, high = (spread[name] for name in _PERCENTILES)
    if not _is_number(value):
        return None
    if not _is_number(low) or not _is_number(high):
        return Measured(value, value, value)
    return Measured(value, min(low, value), max(high, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_rate(name: str) -> bool:
    return _RATE in name.split(".")


def _is_host(name: str) -> bool:
    """The host's time of a call: a median alone."""
    return name.startswith(_HOST)


def _with_interval(name: str, m: Measured, known: Mapping[str, Measured]) -> Measured:
    """What the times that a rate or a speedup was made from say of its interval; ``m`` as it is where they are not
    known, and of other quantities."""
    if _is_rate(name):
        of_step = name.endswith(_RATE)
        time = known.get(name.replace(_RATE, "step_ms") if of_step else f"{name.removeprefix(f'{_RATE}.')}_ms")
        if time is not None and time.low > 0 and m.low == m.high:
            return Measured(m.value, m.value * time.value / time.high, m.value * time.value / time.low)
    if name in _SPEEDUPS:
        dense_names, sparse_names = _SPEEDUPS[name]
        dense = min((known[n] for n in dense_names if n in known), key=lambda time: time.value, default=None)
        sparse = next((known[n] for n in sparse_names if n in known), None)
        if dense is not None and sparse is not None and dense.value > 0 and sparse.value > 0:
            width = math.hypot(dense.half_width, sparse.half_width)
            return Measured(m.value, max(0.0, m.value * (1 - width)), m.value * (1 + width))
    return m


def _differences(key: dict[str, Any], side: str, before: Row, after: Row, floor: float) -> Iterator[Difference]:
    is_other_machine = _differ_in_machine(before, after)
    a, b = quantities(before), quantities(after)
    for name in [*a, *(name for name in b if name not in a)]:
        judged = judge(name, a.get(name), b.get(name), floor)
        if is_other_machine and judged != "unknown" and name not in _RATIOS:
            judged = "other machine"
        yield Difference(key, name, side, a.get(name), b.get(name), judged)


def _differ_in_machine(a: Row, b: Row) -> bool:
    hosts = {row["host"] for row in (a, b) if row.get("host") is not None}
    return len(hosts) > 1 or any(a.get(name) != b.get(name) for name in _MACHINE)


def judge(quantity: str, before: Measured | None, after: Measured | None, floor: float = FLOOR) -> Verdict:
    """Of two values of one machine. More is better for speedups and rates, less for times, memory and energy.

    >>> judge("sparse_ms", Measured(1.0, 0.99, 1.01), Measured(1.1, 1.08, 1.12))
    'worse'
    >>> judge("speedup", Measured(2.0, 1.9, 2.1), Measured(2.15, 2.05, 2.25))
    'noise'
    """
    if before is None or after is None:
        return "unknown"
    if before.low <= after.high and after.low <= before.high:
        return "noise"
    if _change(before.value, after.value) < floor:
        return "noise"
    is_more_better = quantity in _SPEEDUPS or _is_rate(quantity)
    return "better" if (after.value > before.value) == is_more_better else "worse"


def _change(a: float, b: float) -> float:
    small, large = sorted((a, b))
    if small == 0:
        return math.inf if large else 0.0
    return large / small - 1


# ---------------------------------------------------------------------------------------------------------
# Check and table
# ---------------------------------------------------------------------------------------------------------


def verdict(comparison: Comparison, names: Sequence[str] | None = None, threshold: float = THRESHOLD) -> int:
    """The exit code of a check: 1 if there are ``failures``, else 0. Raises where nothing can be judged: a check of
    nothing must not pass."""
    first, *others = (side.name for side in comparison.sides)
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
    comparison: Comparison, names: Sequence[str] | None = None, threshold: float = THRESHOLD
) -> list[Difference]:
    """Named quantities (patterns; by default ``CHECKED``) that are worse, beyond noise, by more than ``threshold``, or
    that the first side has and another one lacks: what no longer runs is no pass."""
    if not threshold >= 0:
        raise ValueError(f"expected a threshold of 0 or more, got {threshold}")
    return [
        d
        for d in comparison.differences
        if _is_named(d.quantity, names or CHECKED)
        and ((d.verdict == "worse" and d.change > threshold) or (d.before is not None and d.after is None))
    ]


def _is_named(quantity: str, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(quantity, name) for name in names)


def table(comparison: Comparison) -> Table:
    """A line for each quantity of each row, two columns for each side but the first; then the unmatched rows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    keys = [*(d.key for d in comparison.differences), *(u.key for u in comparison.unmatched)]
    shared = {n: v for n, v in (keys[0] if keys else {}).items() if all(key.get(n) == v for key in keys)}
    first, *others = (side.name for side in comparison.sides)
    made = Table(title=Text(label(shared)), caption=Text(_caption(comparison)), box=box.SIMPLE)
    made.add_column("row")
    made.add_column("quantity", no_wrap=True)
    made.add_column(Text(first), justify="right")
    for name in others:
        made.add_column(Text(name), justify="right")
        made.add_column("ratio", no_wrap=True)

    lines: dict[tuple[str, str], dict[str, Difference]] = {}
    for d in comparison.differences:
        lines.setdefault((json.dumps(d.key), d.quantity), {})[d.side] = d
    row_above = None
    for (row, quantity), by_side in lines.items():
        some = next(iter(by_side.values()))
        cells = [Text(_text(some.before))]
        for name in others:
            cells += _cells(by_side[name]) if name in by_side else [Text(), Text()]
        made.add_row(Text("" if row == row_above else label(some.key, shared)), Text(quantity), *cells)
        row_above = row
    for u in comparison.unmatched:
        sides = [Text("missing" if name == u.not_in else "", "yellow") for name in (first, *others)]
        made.add_row(Text(label(u.key, shared)), "", sides[0], *(c for side in sides[1:] for c in (side, Text())))
    return made


def label(key: Mapping[str, Any], without: Mapping[str, Any] | None = None) -> str:
    """A key in words, less the fields that all rows share.

    >>> label({"bench": "ffn", "workload": "skew29", "M": 4096, "graph": True}, {"bench": "ffn"})
    'skew29, M 4096, graph'
    """
    words = []
    for name, value in key.items():
        if name not in (without or {}):
            words.append(name if value is True else value if isinstance(value, str) else f"{name} {value}")
    return ", ".join(words)


def _cells(d: Difference) -> list[Text]:
    from rich.text import Text

    ratio = "" if d.ratio is None else f"{d.ratio:.3f} "
    return [Text(_text(d.after)), Text.assemble(ratio, (d.verdict, _STYLES.get(d.verdict, "dim")))]


def _text(m: Measured | None) -> str:
    return "-" if m is None else str(m)


def _caption(comparison: Comparison) -> str:
    said = ["±: half the distance of the 20th and 80th percentile; ratio: to the first"]
    for side in comparison.sides:
        if side.superseded:
            said.append(f"{side.name}: {side.superseded} older rows of the same measurements left out")
        if side.ignored:
            said.append(f"{side.name}: {side.ignored} rows of no benchmark left out")
    return "\n".join(said)
