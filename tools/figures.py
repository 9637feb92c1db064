"""The figures of docs/, from rows in results/ or from runs of your own.

python tools/figures.py speedup results/ffn-h200.jsonl --out docs/ffn-speedup.png
python tools/figures.py sweep my-sweep/sweep.jsonl --out sweep.svg
python tools/figures.py curves dense-run sparse-run --over minutes --out curves.png
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogFormatter, ScalarFormatter

import break_even as curve
from training_tables import durations
from twell.workbench.bench import rows as result_files
from twell.workbench.bench import sweep_table
from twell.workbench.bench.rows import Row

STYLES = {  # colour, marker, line: none for layers of a trace, which are no curve
    "iid": ("tab:blue", "o", "-"),
    "skew": ("tab:orange", "s", "-"),
    "trace": ("tab:green", "^", ""),
}
_COLOURS = ("tab:gray", "tab:orange", "tab:blue", "tab:green", "tab:red")  # of training runs
OVER = {"steps": "step", "tokens": "million tokens", "minutes": "minutes of training"}  # axes and their labels

Run = dict[int, Row]  # the logged rows by step


def save(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "twell"}):  # the same rows give the same file
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _tidy(*several: Axes) -> None:
    for axes in several:
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


# -- bench ffn ----------------------------------------------------------------------------------------------


def speedup(rows: list[dict[str, Any]]) -> Figure:
    """Speedup against mean active neurons, with the count at which sparse breaks even: of gated FFNs without CUDA
    graphs, of the shape with the most rows."""
    shape, families = curve.select(rows)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log")
    axes.axhline(1, color="black", linewidth=1, label="dense")
    for family, points in families.items():
        (colour, marker, line), (x, y) = STYLES[family], zip(*points, strict=True)
        axes.plot(x, y, color=colour, marker=marker, linestyle=line, markersize=5, label=curve.FAMILIES[family])
    found = curve.break_even(rows, shape, families)
    if found.predicted:
        counts, speedups = zip(*found.predicted, strict=True)
        axes.plot(counts, speedups, color="tab:blue", linewidth=0.8, linestyle="--", label="uniform, predicted")
    axes.margins(x=0.08, y=0.1)
    axes.set_ylim(bottom=min(0.7, axes.get_ylim()[0]))
    _write_speedups(axes, families)
    if found.at is not None:
        _mark_break_even(axes, found.at, "measured" if found.is_measured else "predicted")

    axes.set_title(f"Gated FFN on {shape}", fontsize=11)
    axes.set_xlabel("mean active neurons per token")
    axes.set_ylabel("speedup over the faster dense")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))  # labels where an axis is short
    _tidy(axes)
    axes.legend(edgecolor="none", loc="upper right")
    return figure


def _write_speedups(axes: Axes, families: dict[str, list[curve.Point]]) -> None:
    """Write the speedup at the highest point of all, and at the last of each family."""
    highest = max(itertools.chain(*families.values()), key=lambda p: p.speedup)
    for family, points in families.items():
        for point in {points[-1], highest} & set(points):
            away = (5, 4) if point.speedup >= 1 else (5, -12)  # off the line at 1
            _note(axes, f"{point.speedup:.2f}x", point, away, STYLES[family][0])


def _mark_break_even(axes: Axes, mean_active: float, how: str) -> None:
    axes.axvline(mean_active, color="0.4", linewidth=0.8, linestyle=":")
    text, at = f"uniform break-even: {mean_active:.0f} ({how})", (mean_active, axes.get_ylim()[0])
    is_left = mean_active < math.sqrt(math.prod(axes.get_xlim()))
    _note(axes, text, at, (5 if is_left else -5, 6), "0.3", side="left" if is_left else "right")


def _note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    away: tuple[float, float],
    colour: str,
    side: Literal["left", "right"] = "left",
) -> None:
    axes.annotate(text, at, xytext=away, textcoords="offset points", ha=side, fontsize=9, color=colour)


# -- twell sweep --------------------------------------------------------------------------------------------


def _loss(row: Row) -> tuple[float, float, float]:
    return (row["validation_loss"],) * 3


def sweep(rows: list[Row]) -> Figure:
    """Validation loss, and speed of the FFNs, against the mean active count; l1 beside the points.

    Bars: see ``sweep_table.Speedup``.
    """
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    counted = sorted((row for row in rows if "active_mean" in row), key=lambda row: row["active_mean"])
    for axes, of, name in (
        (losses, _loss, "validation cross-entropy"),
        (speeds, lambda row: sweep_table.ffn_speedup(row["speed"]), "speed of the FFNs over dense"),
    ):
        # Labels are slanted: of runs with l1 to the right above their points, of others to the left below.
        for is_l1, line, colour, away in ((True, "o-", "tab:blue", (2, 3)), (False, "s", "tab:orange", (-2, -3))):
            points = [row for row in counted if row["sweep"].startswith("l1-") == is_l1]
            x, y = [row["active_mean"] for row in points], [of(row) for row in points]
            axes.plot(x, [value for value, _, _ in y], line, color=colour, markersize=5)
            axes.vlines(x, [least for _, least, _ in y], [most for _, _, most in y], colour, linewidth=1)
            how: Any = {"ha": "left", "va": "bottom"} if is_l1 else {"ha": "right", "va": "top"}
            how |= {"textcoords": "offset points", "color": colour, "fontsize": 8, "rotation": 45}
            how |= {"rotation_mode": "anchor", "path_effects": [withStroke(linewidth=2, foreground="white")]}
            for row, at, (value, _, _) in zip(points, x, y, strict=True):
                axes.annotate(row["sweep"].removeprefix("l1-"), (at, value), xytext=away, **how)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.margins(x=0.1, y=0.12)
        axes.set_xlabel("mean active neurons a token (l1 beside the points)")
        axes.set_ylabel(name)
        _tidy(axes)
    for row in rows:
        if "active_mean" not in row:
            losses.axhline(row["validation_loss"], color="0.4", linewidth=1, linestyle="--")
            where: Any = ("axes fraction", "data")
            losses.annotate(row["sweep"], (0.01, row["validation_loss"]), xycoords=where, va="bottom", fontsize=8)
    speeds.axhline(1, color="black", linewidth=1)
    return figure


# -- logs of training runs ----------------------------------------------------------------------------------


def read_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Runs by name: of folders with a ``metrics.jsonl``, or of such files."""
    runs: dict[str, Run] = {}
    for path in paths:
        file = path / "metrics.jsonl" if path.is_dir() else path
        name = path.name if path.is_dir() else path.stem
        for row in result_files.read([file]):
            if "ce_loss" in row and "step" in row:
                runs.setdefault(str(row.get("run", name)), {})[int(row["step"])] = row
    if not runs:
        raise ValueError("no logged steps there: expected rows of a run's metrics.jsonl")
    return runs


def differences(first: Run, other: Run) -> dict[int, float]:
    """How much larger the cross-entropy of ``other`` is, relatively, at the steps that both logged.

    >>> differences({10: {"ce_loss": 4.0}, 20: {"ce_loss": 3.0}}, {10: {"ce_loss": 4.02}})
    {10: 0.005}
    """
    return {step: round(other[step]["ce_loss"] / row["ce_loss"] - 1, 6) for step, row in first.items() if step in other}


def positions(run: Run, over: str) -> list[float]:
    """Where each row of a run is on the axis.

    >>> run = {10: {"tokens": 6e5, "tokens_per_second": 1e4}, 20: {"tokens": 12e5, "tokens_per_second": 2e4}}
    >>> [positions(run, over) for over in OVER]
    [[10, 20], [0.6, 1.2], [1.0, 1.5]]
    """
    steps = sorted(run)
    if over == "steps":
        return list(steps)
    tokens = [run[step]["tokens"] for step in steps]
    if over == "tokens":
        return [n / 1e6 for n in tokens]
    return [t / 60 for t in itertools.accumulate(durations([run[step] for step in steps]))]


def curves(runs: dict[str, Run], first: str | None = None, over: str = "steps") -> Figure:
    """Cross-entropy, its difference from the run ``first``, active neurons and the layers that train sparsely.

    Over minutes, where one place on the axis is not one step: tokens a second instead of the difference.
    """
    first = next(iter(runs)) if first is None else first
    if first not in runs:
        raise ValueError(f"there is no run {first!r}: expected one of {', '.join(runs)}")
    figure = Figure(figsize=(8, 7), layout="constrained")
    loss, difference, active, sparse = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 2, 1))
    for i, (name, run) in enumerate(sorted(runs.items(), key=lambda item: item[0] != first)):
        colour, steps, x = _COLOURS[i % len(_COLOURS)], sorted(run), positions(run, over)
        loss.plot(x, [run[s]["ce_loss"] for s in steps], color=colour, label=name)
        active.plot(x, [run[s].get("active_mean", float("nan")) for s in steps], color=colour)
        sparse.step(x, [run[s].get("sparse_layers", 0) for s in steps], color=colour, where="post")
        if over == "minutes":
            difference.plot(x, [run[s]["tokens_per_second"] / 1e3 for s in steps], color=colour)
        elif name != first:
            by_step = differences(runs[first], run)
            there = [(place, 100 * by_step[s]) for place, s in zip(x, steps, strict=True) if s in by_step]
            difference.plot(*zip(*there, strict=True), color=colour, marker=".", markersize=4)
    loss.set_ylabel("cross-entropy")
    loss.legend(edgecolor="none")
    if over == "minutes":
        difference.set_ylabel("1000 tokens/s")
    else:
        difference.axhline(0, color=_COLOURS[0], linewidth=1)
        difference.set_ylabel(f"% from {first}")
    active.set_ylabel("active neurons")
    active.set_yscale("log")
    sparse.set_ylabel("sparse\nlayers")
    sparse.set_xlabel(OVER[over])
    _tidy(loss, difference, active, sparse)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("speedup", "sweep", "curves"))
    parser.add_argument("files", type=Path, nargs="+", help="files of rows; curves: folders of runs, or their logs")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg file")
    parser.add_argument("--first", help="curves: the run that others are compared with")
    parser.add_argument("--over", choices=OVER, default="steps", help="curves: the axis")
    given = parser.parse_args(arguments)
    if given.figure == "curves":
        figure = curves(read_runs(given.files), given.first, given.over)
    else:
        figure = (speedup if given.figure == "speedup" else sweep)(result_files.read(given.files))
    save(figure, given.out)


if __name__ == "__main__":
    main()
