"""Rows of ``twell bench`` as tables: a line for each way to compute, a column for each quantity that a row has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from twell.workbench.bench.timing import Spread
from twell.workbench.cli.common import print_table

Row = dict[str, Any]

WAYS = {  # in the order of their lines; what they are called
    "dense": "dense",
    "compiled": "compiled",
    "fp8": "dense FP8",
    "fp8_weights": "FP8 weights",
    "sparse": "sparse",
    "frozen": "frozen",
    "sparse_compiled": "compiled sparse",
    "sparse_fp8": "sparse FP8",
}
_SPEEDUP = {"sparse": "", "frozen": "_frozen", "sparse_compiled": "_compiled"}  # ends of field names
_DOES = {"decode": "a step of generation", "generate": "model.generate", "train": "training"}


def of(row: Row, field: str, way: str) -> Any:
    """A field of one way, wherever the row has it: as ``dense_ms``, in ``called_ms``, or in ``dense``; else None."""
    if f"{way}_{field}" in row:
        return row[f"{way}_{field}"]
    for outer, inner in ((field, way), (way, field)):
        if isinstance(row.get(outer), dict) and inner in row[outer]:
            return row[outer][inner]
    return None


# ---------------------------------------------------------------------------------------------------------
# Cells: "" for what a row does not have
# ---------------------------------------------------------------------------------------------------------


def _spread(*fields: str) -> Callable[[Row, str], str]:
    def cell(row: Row, way: str) -> str:
        found = next(filter(None, (of(row, field, way) for field in fields)), None)
        if found is None:
            return ""
        spread = Spread(**found)
        digits = 2 if spread.p50 >= 1 else 4 if spread.p50 < 0.1 else 3
        around = f"{spread.relative:.0%}" if spread.relative <= 1 else ">100%"
        return f"{spread.p50:.{digits}f} ±{around}"

    return cell


def _speedup(field: str) -> Callable[[Row, str], str]:
    def cell(row: Row, way: str) -> str:
        ratio = row.get(f"{field}{_SPEEDUP[way]}") if way in _SPEEDUP else None
        return "" if ratio is None else f"[bold]{ratio:.2f}x[/bold]"

    return cell


def _over_fp8(speedup: str, times: str) -> Callable[[Row, str], str]:
    """Of sparse FP8, and of the faster sparse way of 16 bits."""

    def cell(row: Row, way: str) -> str:
        if way == "sparse_fp8" and f"{speedup}_fp8" in row:
            return f"[bold]{row[f'{speedup}_fp8']:.2f}x[/bold]"
        ms = {w: of(row, times, w)["p50"] for w in ("sparse", "frozen") if of(row, times, w)}
        is_faster = way in ms and ms[way] == min(ms.values())
        return f"{row[f'{speedup}_over_fp8']:.2f}x" if is_faster and f"{speedup}_over_fp8" in row else ""

    return cell


def _number(scale: float, *fields: str) -> Callable[[Row, str], str]:
    """The first of the fields that is a number, times ``scale``; ``memory.pass`` is a part of a way's object."""

    def cell(row: Row, way: str) -> str:
        for field in fields:
            name, _, part = field.partition(".")
            value = of(row, name, way)
            if part:
                value = value.get(part) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                return f"{scale * value:.3g}" if scale * value < 1000 else f"{scale * value:,.0f}"
        return ""

    return cell


def _frozen(row: Row, way: str) -> str:
    is_it = way == ("frozen" if "frozen_ms" in row or row["bench"] == "generate" else "sparse")
    return f"{row['frozen_bytes'] / 1e6:,.1f}" if is_it and "frozen_bytes" in row else ""


def _error(row: Row, way: str) -> str:
    error = of(row, "error", way)
    error = max(error.values()) if isinstance(error, dict) else error
    return "" if error is None else f"{error:.1e}"


class Column(NamedTuple):
    head: str
    cell: Callable[[Row, str], str]
    note: str = ""  # below a table that has the column


COLUMNS = [
    Column("ms", _spread("ms", "step_ms"), "ms: median, and half the distance of the 20th and 80th percentile"),
    Column("speedup", _speedup("speedup"), "speedup: over the faster dense way"),
    Column("over FP8", _over_fp8("speedup", "ms"), "over FP8: over the faster dense FP8 one"),
    Column("called ms", _spread("called_ms"), "called: in a plain loop, the host's time included"),
    Column("called", _speedup("speedup_called")),
    Column("called over FP8", _over_fp8("speedup_called", "called_ms")),
    Column("with step ms", _spread("called_with_step_ms"), "with step: of fused AdamW"),
    Column("with step", _speedup("speedup_called_with_step")),
    Column("host us", _number(1, "host_us")),
    Column("first token ms", _spread("first_token_ms")),
    Column(
        "tokens/s",
        lambda row, way: _number(1, "tokens_per_second")(row, way) or _number(1e3, "tokens_per_ms")(row, way),
    ),
    Column("pass MB", _number(1e-6, "memory.pass"), "pass: memory besides weights"),
    Column("held MB", _number(1e-6, "memory.held"), "held: by the model"),
    Column("peak MB", _number(1e-6, "memory.peak", "memory")),
    Column("activations MB", _number(1e-6, "memory.activations")),
    Column("frozen MB", _frozen, "frozen: twell.freeze_"),
    Column("mJ a token", _number(1e3, "joules_per_token")),
    Column("J", _number(1, "joules")),
    Column("error", _error, "error: relative, against float64"),
]


# ---------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------


def print_rows(rows: Sequence[Row]) -> None:
    """A table for each kind of measurement, and below it plans and layers."""
    for title, some in itertools.groupby(rows, _title):
        _print(title, list(some))


def _print(title: str, rows: list[Row]) -> None:
    from rich import box
    from rich.table import Table

    lines = [(row, way) for row in rows for way in WAYS if any(column.cell(row, way) for column in COLUMNS)]
    columns = [column for column in COLUMNS if any(column.cell(*line) for line in lines)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("workload", "tokens", "active", "", *(column.head.replace(" ", "\n", 1) for column in columns)):
        table.add_column(name, justify="left" if name in ("workload", "") else "right", no_wrap=True)
    before = None
    for row, way in lines:
        first = ["", "", ""] if row is before else [str(row["workload"]), tokens(row), _active(row)]
        table.add_row(*first, WAYS[way], *(column.cell(row, way) for column in columns))
        before = row
    print(title)
    print_table(table)
    print("; ".join(column.note for column in columns if column.note))
    for row in rows:
        for line in _below(row):
            print(f"{row['workload']}, {tokens(row)} tokens: {line}")


def _title(row: Row) -> str:
    shape = f"D {row['D']}, F {row['F']}"
    what = row.get("model") or row.get("preset") or f"{row['kind']} FFN"
    how = [word for field, word in (("compiled", "compiled"), ("graph", "CUDA graphs")) if row.get(field) is True]
    machine = row["gpu"] if "gpu" in row else f"{row['cpu']}, {row['threads']} threads"
    return ", ".join([f"{_DOES.get(row['bench'], 'forward')}: {what}", shape, row["dtype"], *how, machine])


def tokens(row: Row) -> str:
    """Of one FFN, or sequences and their lengths."""
    if "M" in row:
        return str(row["M"])
    if "context" in row:
        return f"{row['batch']} after {row['context']}"
    return f"{row['batch']} x {row['length']}" + (f" + {row['new_tokens']}" if "new_tokens" in row else "")


def _active(row: Row) -> str:
    return f"{row['mean_active']:.0f}" if "mean_active" in row else ""


def _below(row: Row) -> Iterator[str]:
    if row.get("parts_ms"):
        parts = ", ".join(f"{name} {ms:.3g}" for name, ms in row["parts_ms"].items())
        yield f"{row['plan']['hot']} hot, long or heavy above {row['plan']['cap']}: {parts}"
    yield from (f"{way} is {row[way]}" for way in ("dense", "sparse") if isinstance(row.get(way), str))  # out of memory
    for layer in row.get("ffns", ()):
        yield f"{layer['name']}: {layer['mean_active']:.0f} active, {layer['speedup']:.2f}x"
