"""``twell bench plot``: the speedup of an FFN against its mean active neurons, from rows of ``twell bench ffn``."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from twell.plan import choose_plan, costs_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_INCHES, _DPI = (8, 5), 100
_CURVE_POINTS = 200
_NEEDED = {"workload", "M", "D", "F", "dtype", "mean_active", "speedup"}


class Point(NamedTuple):
    mean_active: float
    speedup: float


class Shape(NamedTuple):
    """What all rows of one plot share."""

    machine: str
    on_gpu: bool
    D: int
    F: int
    dtype: str
    M: int

    def __str__(self) -> str:
        return f"{self.machine}, D {self.D}, F {self.F}, {self.dtype}, M {self.M}"


class Style(NamedTuple):
    label: str
    colour: str
    marker: str
    line: str  # "" for layers of a trace, which are no curve


STYLES = {
    "iid": Style("uniform workloads", "tab:blue", "o", "-"),
    "skew": Style("skewed workloads", "tab:orange", "s", "-"),
    "trace": Style("layers of a trace", "tab:green", "^", ""),
}


def speedup(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot rows of ``twell bench ffn`` into a .png or .svg file."""
    check_suffix(path)
    save(draw(rows), path)


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: expected a file that ends in {' or '.join(SUFFIXES)}")


def save(figure: Figure, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "twell"}):  # the same rows give the same file
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=_DPI, metadata=metadata)


def new_figure(width: float, height: float) -> Figure:
    """In inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"plots need another package ({error}): pip install 'twell[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def tidy(*several: Axes) -> None:
    for axes in several:
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Plot the gated rows without CUDA graphs that have the most frequent shape."""
    shape, families = select(rows)
    figure = new_figure(*_INCHES)
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    axes = figure.add_subplot(xscale="log")
    axes.axhline(1, color="black", linewidth=1, label="dense")
    for family, points in families.items():
        style, (x, y) = STYLES[family], zip(*points, strict=True)
        axes.plot(x, y, color=style.colour, marker=style.marker, linestyle=style.line, markersize=5, label=style.label)
    found = break_even(rows, shape, families)
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
    tidy(axes)
    axes.legend(edgecolor="none", loc="upper right")
    return figure


def select(rows: list[dict[str, Any]]) -> tuple[Shape, dict[str, list[Point]]]:
    """The shape with the most rows that can be drawn (of equals the one with the most tokens), and its points by
    family, in order of their mean active count."""
    by_shape: dict[Shape, list[dict[str, Any]]] = {}
    for row in rows:
        if _fits(row):
            by_shape.setdefault(_shape(row), []).append(row)
    if not by_shape:
        raise ValueError("nothing to plot: no row of a gated FFN that was timed without --graph and has active neurons")
    shape = max(by_shape, key=lambda s: (len(by_shape[s]), s.M))
    points: dict[str, list[Point]] = {family: [] for family in STYLES}
    for row in by_shape[shape]:
        points[_family(row["workload"])].append(Point(row["mean_active"], row["speedup"]))
    return shape, {family: sorted(of_family) for family, of_family in points.items() if of_family}


def _fits(row: dict[str, Any]) -> bool:
    if row.get("bench") != "ffn" or row.get("kind") != "gated" or row.get("graph") or not row.keys() >= _NEEDED:
        return False
    return row["mean_active"] > 0


class BreakEven(NamedTuple):
    """Where sparse stops paying for neurons that all fire alike: as measured, else as predicted."""

    at: float | None
    is_measured: bool
    predicted: list[Point]  # the curve; empty without a cost model


def break_even(rows: list[dict[str, Any]], shape: Shape, families: dict[str, list[Point]]) -> BreakEven:
    # Layers that the plan runs densely are at 1x, whatever the sparse path would give.
    ran_densely = {r.get("mean_active") for r in rows if (r.get("plan") or {}).get("hot") == r.get("F")}
    measured_at = measured_break_even([p for p in families.get("iid", []) if p.mean_active not in ran_densely])
    predicted_at, curve = modelled_break_even(shape), []
    if predicted_at is not None:
        lowest = min(p.mean_active for points in families.values() for p in points)
        curve = modelled_curve(shape, min(lowest, predicted_at / 2), predicted_at)
    is_measured = measured_at is not None
    return BreakEven(measured_at if is_measured else predicted_at, is_measured, curve)


def _shape(row: dict[str, Any]) -> Shape:
    machine = row.get("gpu") or f"{row.get('cpu', 'CPU')}, {row.get('threads', '?')} threads"
    return Shape(machine, "gpu" in row, *(row[name] for name in ("D", "F", "dtype", "M")))


def _family(workload: str) -> str:
    stem = workload.rstrip("0123456789")
    return stem if stem in STYLES else "trace"


def measured_break_even(points: list[Point]) -> float | None:
    """The mean active count at which ``points``, in order, first fall to 1, interpolated on a logarithmic axis.

    >>> measured_break_even([Point(10, 2.0), Point(1000, 0.0)])
    100.0
    """
    for left, right in itertools.pairwise(points):
        if left.speedup > 1 >= right.speedup:
            share = (left.speedup - 1) / (left.speedup - right.speedup)
            return left.mean_active * (right.mean_active / left.mean_active) ** share
    return None


def modelled_speedup(shape: Shape, mean_active: float) -> float:
    """A plan's prediction for neurons that all fire with the same probability; 1 where it runs the batch densely."""
    same_machine = torch.cuda.is_available() and torch.cuda.get_device_name() == shape.machine
    costs = costs_for(torch.device("cuda" if same_machine else "cpu"))
    counts = torch.full((shape.F,), mean_active, dtype=torch.float64)
    plan = choose_plan(counts, shape.F, costs, width=shape.D)
    return 1.0 if plan.is_dense or plan.min_tokens > shape.M else plan.predicted or 1.0


def modelled_break_even(shape: Shape) -> float | None:
    """The mean active count at which the plan for uniform firing turns dense; None on a CPU, which has no cost model,
    and where the plan is always dense."""
    sparse, dense = 1e-3, float(shape.F)
    if not shape.on_gpu or modelled_speedup(shape, sparse) == 1 or modelled_speedup(shape, dense) > 1:
        return None
    while dense / sparse > 1 + 1e-4:
        middle = math.sqrt(sparse * dense)
        sparse, dense = (middle, dense) if modelled_speedup(shape, middle) > 1 else (sparse, middle)
    return sparse


def modelled_curve(shape: Shape, start: float, break_even: float) -> list[Point]:
    """Predictions for uniform firing up to where the plan turns dense and the curve falls to 1."""
    step = (break_even / start) ** (1 / (_CURVE_POINTS - 1))
    counts = [*(start * step**i for i in range(_CURVE_POINTS - 1)), break_even]
    return [*(Point(n, modelled_speedup(shape, n)) for n in counts), Point(break_even, 1.0)]


def _write_speedups(axes: Axes, families: dict[str, list[Point]]) -> None:
    """Write the speedup at the highest point of all, and at the last of each family."""
    highest = max(itertools.chain(*families.values()), key=lambda p: p.speedup)
    for family, points in families.items():
        for point in {points[-1], highest} & set(points):
            away = (5, 4) if point.speedup >= 1 else (5, -12)  # off the line at 1
            _note(axes, f"{point.speedup:.2f}x", point, away, STYLES[family].colour)


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
