"""``twell bench curves``: the logs of training runs over each other, and how far they are from the first one.

Rows are those of ``metrics.jsonl``. Where one file holds several runs, the field ``run`` tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.bench import rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (8, 7)
_COLOURS = ("tab:gray", "tab:orange", "tab:blue", "tab:green", "tab:red")

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
    """How much larger the cross-entropy of ``other`` is, at the steps that both logged.

    >>> differences({10: {"ce_loss": 4.0}, 20: {"ce_loss": 3.0}}, {10: {"ce_loss": 4.02}})
    {10: 0.005}
    """
    return {step: round(other[step]["ce_loss"] / row["ce_loss"] - 1, 6) for step, row in first.items() if step in other}


def draw(runs: dict[str, Run], first: str | None = None) -> Figure:
    """Cross-entropy, its difference from the run ``first``, active neurons and the layers that train sparsely."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"plots need another package ({error}): pip install 'twell[plot]'") from None

    first = next(iter(runs)) if first is None else first
    if first not in runs:
        raise ValueError(f"there is no run {first!r}: expected one of {', '.join(runs)}")
    figure = Figure(figsize=_INCHES, layout="constrained")
    loss, difference, active, sparse = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 2, 1))
    for i, (name, run) in enumerate(sorted(runs.items(), key=lambda item: item[0] != first)):
        colour, steps = _COLOURS[i % len(_COLOURS)], sorted(run)
        loss.plot(steps, [run[s]["ce_loss"] for s in steps], color=colour, label=name)
        active.plot(steps, [run[s].get("active_mean", float("nan")) for s in steps], color=colour)
        sparse.step(steps, [run[s].get("sparse_layers", 0) for s in steps], color=colour, where="post")
        if name != first:
            by_step = differences(runs[first], run)
            percents = [100 * by_step[s] for s in sorted(by_step)]
            difference.plot(sorted(by_step), percents, color=colour, marker=".", markersize=4)
    loss.set_ylabel("cross-entropy")
    loss.legend(edgecolor="none")
    difference.axhline(0, color=_COLOURS[0], linewidth=1)
    difference.set_ylabel(f"% from {first}")
    active.set_ylabel("active neurons")
    active.set_yscale("log")
    sparse.set_ylabel("sparse\nlayers")
    sparse.set_xlabel("step")
    for axes in (loss, difference, active, sparse):
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
