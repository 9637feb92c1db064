"""Speedup against mean active neurons, from rows of ``twell bench ffn``, and where sparse stops paying."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from twell.plan import choose_plan, costs_for

FAMILIES = {"iid": "uniform workloads", "skew": "skewed workloads", "trace": "layers of a trace"}
_CURVE_POINTS = 200
_NEEDED = {"workload", "M", "D", "F", "dtype", "mean_active", "speedup"}


class Point(NamedTuple):
    mean_active: float
    speedup: float


class Shape(NamedTuple):
    """What all rows of one figure share."""

    machine: str
    on_gpu: bool
    D: int
    F: int
    dtype: str
    M: int

    def __str__(self) -> str:
        return f"{self.machine}, D {self.D}, F {self.F}, {self.dtype}, M {self.M}"


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
    points: dict[str, list[Point]] = {family: [] for family in FAMILIES}
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
    return stem if stem in FAMILIES else "trace"


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
