"""Figures: which rows they show, where sparse breaks even, training runs over each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.image import imread

import break_even as curve
import figures
from test_sweep_table import layer
from test_sweep_table import row as run_of_sweep
from twell.plan import costs_for

SHAPE = curve.Shape("NVIDIA H200", True, 2048, 5632, "bfloat16", 16384)


def row(workload: str, mean_active: float, speedup: float, **other: Any) -> dict[str, Any]:
    made = {
        "bench": "ffn",
        "workload": workload,
        "kind": "gated",
        "M": 16384,
        "D": 2048,
        "F": 5632,
        "dtype": "bfloat16",
        "backend": "triton",
        "graph": False,
        "mean_active": mean_active,
        "speedup": speedup,
        "device": "cuda",
        "gpu": "NVIDIA H200",
    }
    return made | other


UNIFORM = [row("iid29", 29.1, 1.63), row("iid10", 10.0, 2.3)]
SKEWED = [row("skew29", 29.0, 1.97), row("skew300", 300.5, 1.42)]
LAYERS = [{k: v for k, v in row(f"layer {i}", 12.0 + i, 2.0).items() if k != "graph"} for i in range(3)]


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for each of 200 points of a curve takes half a second."""
    monkeypatch.setattr(curve, "_CURVE_POINTS", 10)


def axes_of(rows: list[dict[str, Any]]) -> Axes:
    (axes,) = figures.speedup(rows).axes
    return axes


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its label; what has none is called _child0, _child1, ..."""
    return {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def break_even(axes: Axes) -> tuple[float, str] | None:
    """Position of the vertical line, and its label."""
    at = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    texts = [t.get_text() for t in axes.texts if "break-even" in t.get_text()]
    assert len(at) == len(texts) <= 1
    return (at[0], texts[0]) if at else None


# -- which rows -------------------------------------------------------------------------------------------


def test_each_family_is_a_series_in_order_of_its_counts() -> None:
    axes = axes_of([*UNIFORM, *SKEWED, *LAYERS])
    drawn = lines(axes)
    assert drawn["uniform workloads"] == [(10.0, 2.3), (29.1, 1.63)]
    assert drawn["skewed workloads"] == [(29.0, 1.97), (300.5, 1.42)]
    assert drawn["layers of a trace"] == [(12.0, 2.0), (13.0, 2.0), (14.0, 2.0)]
    assert {y for _, y in drawn["dense"]} == {1}
    assert axes.get_xscale() == "log"
    assert axes.get_title() == "Gated FFN on NVIDIA H200, D 2048, F 5632, bfloat16, M 16384"
    legend = axes.get_legend()
    assert legend is not None
    assert {t.get_text() for t in legend.get_texts()} == {name for name in drawn if not name.startswith("_")}


def test_a_family_without_rows_is_not_drawn() -> None:
    assert "skewed workloads" not in lines(axes_of(UNIFORM))


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "plain"},
        {"graph": True},
        {"bench": "model"},
        {"M": 4096},
        {"D": 4096},
        {"F": 14336},
        {"dtype": "float16"},
        {"gpu": "NVIDIA A100"},
        {"mean_active": 0.0},
    ],
)
def test_other_rows_are_left_out(other: dict[str, Any]) -> None:
    odd = [row("skew77", 77.0, 9.0) | other]
    assert curve.select([*odd, *SKEWED]) == curve.select(SKEWED) == (SHAPE, {"skew": [(29.0, 1.97), (300.5, 1.42)]})


def test_the_shape_with_the_most_rows_is_drawn_then_the_one_with_the_most_tokens() -> None:
    small = [row("skew29", 29.0, 1.7, M=4096), row("skew10", 10.0, 1.8, M=4096)]
    assert curve.select([*SKEWED, *small, row("iid29", 29.0, 1.5, M=4096)])[0].M == 4096
    assert curve.select([*small, *SKEWED])[0].M == curve.select([*SKEWED, *small])[0].M == 16384


def test_speedups_are_written_at_the_highest_point_and_at_each_last() -> None:
    axes = axes_of([*UNIFORM, *SKEWED, row("skew100", 100.0, 1.6)])
    assert sorted(t.get_text() for t in axes.texts if t.get_text().endswith("x")) == ["1.42x", "1.63x", "2.30x"]


# -- break-even -------------------------------------------------------------------------------------------


def test_measured_break_even_is_interpolated_on_the_logarithmic_axis() -> None:
    axes = axes_of([row("iid40", 40.0, 1.5), row("iid160", 160.0, 0.5), *SKEWED])
    at, text = break_even(axes) or pytest.fail("not marked")
    assert at == pytest.approx(80)
    assert text == "uniform break-even: 80 (measured)"


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([2.0, 1.0, 1.1, 0.9], 20.0),  # the first time, and reaching 1 is enough
        ([0.9, 1.2, 1.3], None),  # rising is no break-even
        ([0.9, 0.8], None),
        ([1.5], None),
        ([], None),
    ],
)
def test_measured_break_even_is_the_first_fall_to_1(speedups: list[float], expected: float | None) -> None:
    points = [curve.Point(10.0 * 2**i, s) for i, s in enumerate(speedups)]
    assert curve.measured_break_even(points) == expected


def test_a_layer_that_ran_densely_does_not_say_where_sparse_stops_paying() -> None:
    dense = row("iid400", 400.0, 1.0) | {"plan": {"hot": SHAPE.F}}
    at, text = break_even(axes_of([row("iid10", 10.0, 2.0), dense])) or pytest.fail("not marked")
    assert at == curve.modelled_break_even(SHAPE) and "predicted" in text


def test_skewed_rows_do_not_set_the_break_even() -> None:
    at, text = break_even(axes_of([row("skew40", 40.0, 1.5), row("skew160", 160.0, 0.5)])) or pytest.fail("not marked")
    assert at == curve.modelled_break_even(SHAPE)
    assert text.endswith("(predicted)")


def test_modelled_break_even_is_where_the_plan_turns_dense() -> None:
    at = curve.modelled_break_even(SHAPE)
    assert at is not None
    assert curve.modelled_speedup(SHAPE, at) > 1
    assert curve.modelled_speedup(SHAPE, at * 1.001) == 1
    assert break_even(axes_of(UNIFORM)) == (at, f"uniform break-even: {at:.0f} (predicted)")


def test_modelled_curve_is_the_cost_model_down_to_1() -> None:
    costs = costs_for(torch.device("cpu"))
    drawn = lines(axes_of(UNIFORM))["uniform, predicted"]
    assert drawn[0][0] == 10.0  # as far as the rows go
    assert drawn[-1] == (curve.modelled_break_even(SHAPE), 1)
    for n, predicted in drawn[:-1]:
        assert predicted == pytest.approx(3 * 5632 / (costs.gate * 5632 + costs.gather * n + costs.token), rel=1e-6)


def test_a_batch_too_small_for_the_split_has_an_earlier_break_even_or_none() -> None:
    large, small = (curve.modelled_break_even(SHAPE._replace(M=m)) for m in (16384, 4096))
    assert large is not None
    assert small is not None
    assert small < large
    tiny = axes_of([r | {"M": 16} for r in UNIFORM])
    assert break_even(tiny) is None
    assert "uniform, predicted" not in lines(tiny)


def test_rows_of_a_cpu_have_no_model_but_may_break_even() -> None:
    cpu = {"device": "cpu", "cpu": "Some CPU", "threads": 2}
    rows = [{k: v for k, v in r.items() if k != "gpu"} | cpu for r in [*UNIFORM, row("iid1000", 1000.0, 0.5)]]
    axes = axes_of(rows)
    assert "uniform, predicted" not in lines(axes)
    assert "Some CPU, 2 threads, D 2048" in axes.get_title()
    assert 29.1 < (break_even(axes) or pytest.fail("not marked"))[0] < 1000
    assert break_even(axes_of(rows[:2])) is None


def test_rows_of_which_none_fits_are_refused() -> None:
    for rows in ([], [{}], [row("skew29", 29.0, 1.5, kind="plain"), row("skew29", 29.0, 1.5, graph=True)]):
        with pytest.raises(ValueError, match="nothing to plot"):
            figures.speedup(rows)


# -- sweeps and training runs -----------------------------------------------------------------------------


def test_a_sweep() -> None:
    noisy = [layer(3.0, 1.0, 2.0, 3.0)]
    rows = [run_of_sweep("l1-0.001", 4.1, 20, noisy), run_of_sweep("l1-0", 4.0, 200), run_of_sweep("silu", 3.9)]
    losses, speeds = figures.sweep(rows).axes
    assert [list(values) for values in losses.lines[0].get_data()] == [[20, 200], [4.1, 4.0]]
    assert list(speeds.lines[0].get_ydata()) == [1.5, 1.5]
    assert [path.vertices[:, 1].tolist() for path in speeds.collections[0].get_paths()] == [[1.0, 3.0], [1.5, 1.5]]
    assert {text.get_text() for text in losses.texts} == {"0.001", "0", "silu"}
    assert {text.get_text() for text in speeds.texts} == {"0.001", "0"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def log(loss: float, **more: Any) -> list[dict[str, Any]]:
    logged = [{"step": s, "ce_loss": loss / s, "active_mean": 100 / s, "sparse_layers": s // 20} for s in (10, 20, 30)]
    return [{**row, **more} for row in logged] + [{"step": 30, "eval_loss": 1.0, **more}]


def test_runs_of_folders_files_and_of_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    write(folder / "metrics.jsonl", log(40))
    file = write(tmp_path / "both.jsonl", [*log(41, run="sparse"), *log(40, run="dense")])
    runs = figures.read_runs([folder, file])
    assert list(runs) == ["a run", "sparse", "dense"]
    assert list(runs["sparse"]) == [10, 20, 30]  # and no evaluation
    assert figures.differences(runs["dense"], runs["sparse"]) == {10: 0.025, 20: 0.025, 30: 0.025}
    loss, difference, active, sparse = figures.curves(runs, "dense").axes
    assert [line.get_label() for line in loss.lines] == ["dense", "a run", "sparse"]
    assert difference.lines[1].get_ydata() == pytest.approx([2.5] * 3)
    assert len(active.lines) == len(sparse.lines) == 3
    with pytest.raises(ValueError, match="no run 'other'"):
        figures.curves(runs, "other")
    with pytest.raises(ValueError, match="no logged steps"):
        figures.read_runs([write(tmp_path / "none.jsonl", [{"step": 1}])])


def test_over_minutes(tmp_path: Path) -> None:
    fast, slow = ([{**row, "tokens": 600 * row["step"], "tokens_per_second": v} for row in log(40)] for v in (200, 100))
    both = [{**row, "run": name} for name, run in (("fast", fast), ("slow", slow)) for row in run if "ce_loss" in row]
    figure = figures.curves(figures.read_runs([write(tmp_path / "both.jsonl", both)]), "slow", "minutes")
    loss, speed, *_ = figure.axes
    assert [line.get_xdata()[-1] for line in loss.lines] == pytest.approx([3.0, 1.5])
    assert [line.get_ydata()[0] for line in speed.lines] == [0.1, 0.2]
    assert figure.axes[-1].get_xlabel() == "minutes of training"


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "size"),
    [
        ("speedup", [*UNIFORM, *SKEWED], (500, 800)),
        ("sweep", [run_of_sweep("l1-0", 4.0, 200), run_of_sweep("silu", 3.9)], (450, 1000)),
        ("curves", log(40), (700, 800)),
    ],
)
def test_command(tmp_path: Path, name: str, rows: list[dict[str, Any]], size: tuple[int, int]) -> None:
    file = str(write(tmp_path / "rows.jsonl", rows))
    for out in ("a.png", "a.svg", "b.svg"):
        figures.main([name, file, "--out", str(tmp_path / out)])
    assert imread(tmp_path / "a.png").shape[:2] == size
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
