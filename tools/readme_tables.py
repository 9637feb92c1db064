"""The README's tables of speed; for tables.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from speed_tables import (
    OF_FP8,
    OVER_FP8,
    Row,
    by_tokens,
    how,
    is_traced_layer,
    lines_of,
    mean_of,
    over_fp8,
    over_fp8_in_mean,
    plain,
    speedup,
    workload,
)


def speedups(rows: list[Row], *sizes: int, frozen: bool = False, fp8: Sequence[int] = ()) -> list[str]:
    """``frozen``: of a frozen layer, where measured. ``fp8``: see ``by_tokens``."""

    def cell(row: Row) -> str:
        of = "_frozen" if frozen and "speedup_frozen" in row else ""
        called = speedup(row, f"speedup_called{of}")
        return plain(speedup(row, f"speedup{of}")) + ("" if called is None else f", called {plain(called)}")

    def name(row: Row) -> str:
        return f"{re.sub(r'[a-z]+', '', row['workload'])} of {row['F']}"

    return by_tokens(rows, "active neurons a token", name, cell, sizes, fp8)


def gpu(rows: list[Row]) -> list[str]:
    traced = [r for r in rows if is_traced_layer(r)]
    least, most = (f(r["mean_active"] for r in traced) for f in (min, max))
    name = f"{len(traced)} layers of a trained model ({least:.0f} to {most:.0f} active), mean"
    lines = speedups([r for r in rows if not is_traced_layer(r)], 4096, 16384, 131072, fp8=[16384])
    in_fp8 = f" {over_fp8_in_mean(traced)} |" if any(map(over_fp8, rows)) else ""
    return [*lines, f"| {name} | | {plain(mean_of(traced))} | |{in_fp8}"]


def few(rows: list[Row]) -> list[str]:
    return speedups(rows, 1, 8, 16, 32, 64, frozen=True, fp8=[1, 64])


def cpu(rows: list[Row]) -> list[str]:
    return speedups(rows, 1, 16, 256, 2048, frozen=True)


def is_shape(row: Row) -> bool:
    """A row of a model with some of a preset's layers, in one of several shapes."""
    return row["bench"] == "model" and " layers of " in str(row.get("preset"))


def models(rows: list[Row]) -> list[str]:
    """A line for each row of a whole model, then of training; one line for all shapes of a model."""

    def line(row: Row) -> list[str]:
        """What was measured, memory, energy."""
        bench = row["bench"]
        if bench == "model":
            return [f"forward of a model, {how(row)}, {row['workload']}", "", plain(row["joules_ratio"])]
        if bench == "generate":
            return [f"model.generate, {row['preset']}, {row['workload']}", "", ""]
        if bench == "decode":
            of = row["joules_per_token"]
            energy = plain(of["sparse"] / of["dense"] if of["sparse"] else None)
            return [f"generation, a token of a model, {row['workload']}", "", energy]
        if row["level"] == "ffn":
            what = f"training, one FFN, {workload(row)}, {row['M']} tokens"
            return [what, plain(row["memory"]["ratio"]), plain(row["joules"]["sparse"] / row["joules"]["dense"])]
        what = f"training, a step of a model, {row['workload']}"
        return [what, plain(row["peak_ratio"]), plain(row["joules_ratio"])]

    def as_called(row: Row) -> str:
        frozen = speedup(row, "speedup_called_frozen")
        return plain(speedup(row, "speedup_called")) + (f", frozen {plain(frozen)}" if frozen else "")

    in_order = sorted(
        (row for row in rows if not is_shape(row)),
        key=lambda row: (("model", "generate", "decode", "train").index(row["bench"]), row.get("level") != "ffn"),
    )
    lines = []
    for row in in_order:
        what, memory, energy = line(row)
        lines.append([what, plain(speedup(row)), as_called(row), over_fp8(row), memory, energy])
    if shapes := [row for row in rows if is_shape(row)]:
        first = shapes[0]
        sizes = [f"{r['batch']} x {r['length']}" for r in sorted(shapes, key=lambda r: r["batch"] * r["length"])]
        what = f"forward, {first['preset']}, {how(first)}, {sizes[0]} to {sizes[-1]} tokens, {first['workload']}"
        memory = plain(max(row["memory_ratio"] for row in shapes))
        called, *in_fp8 = (extremes(shapes, name) for name in ("speedup_called", *OF_FP8[1]))
        place = sum(row["bench"] == "model" for row in in_order)
        lines.insert(place, [what, "", called, ", ".join(filter(None, in_fp8)), memory, ""])
    head = ["1.5B shape", "speed", "as called", f"over dense FP8: {OVER_FP8}", "memory", "energy"]
    return lines_of(head, lines)


def extremes(rows: Iterable[Row], field: str) -> str:
    found = [value for value in (speedup(row, field) for row in rows) if value is not None]
    return f"{plain(min(found))} to {plain(max(found))}" if found else ""
