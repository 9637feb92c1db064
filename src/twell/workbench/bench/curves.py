"""``twell bench curves``: the logs of training runs in one figure, and their distance from the first run.

Rows are those of ``metrics.jsonl``. Where one file holds several runs, the field ``run`` tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.bench import plot, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (8, 7)
_COLOURS = ("tab:gray", "tab:orange", "tab:blue", "tab:green", "tab:red")

OVER = {"steps": "step", "tokens": "million tokens", "minutes": "minutes of training"}  # axes and their labels

Run = dict[int, dict[str, Any]]  # the logged rows by step


def read_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Runs by name: of folders with a ``metrics.jsonl``, or of such files."""
    runs: dict[str, Run] = {}
    for path in paths:
        file = path / "metrics.jsonl" if path.is_dir() else path
        name = path.name if path.is_dir() else path.stem
        for row in rows.read([file]):
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
    needed = ("tokens",) if over == "tokens" else ("tokens", "tokens_per_second")
    if missing := {name for step in steps for name in needed if name not in run[step]}:
        raise ValueError(f"these rows have no {' and no '.join(sorted(missing))}: --over {over} needs it")
    tokens = [run[step]["tokens"] for step in steps]
    if over == "tokens":
        return [n / 1e6 for n in tokens]
    seconds = [(n - m) / run[s]["tokens_per_second"] for s, m, n in zip(steps, [0, *tokens], tokens, strict=False)]
    return [t / 60 for t in itertools.accumulate(seconds)]


def draw(runs: dict[str, Run], first: str | None = None, over: str = "steps") -> Figure:
    """Cross-entropy, its difference from the run ``first``, active neurons and the layers that train sparsely.

    Over minutes, where one place on the axis is not one step: tokens a second instead of the difference.
    """
    first = next(iter(runs)) if first is None else first
    if first not in runs:
        raise ValueError(f"there is no run {first!r}: expected one of {', '.join(runs)}")
    if over not in OVER:
        raise ValueError(f"unknown axis {over!r}: expected one of {', '.join(OVER)}")
    figure = plot.new_figure(*_INCHES)
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
    plot.tidy(loss, difference, active, sparse)
    return figure
