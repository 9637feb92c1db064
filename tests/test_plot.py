"""The speedup plot: which rows it draws, where it breaks even, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.image import imread

from command_line import Twell
from twell.plan import costs_for
from twell.workbench.bench import plot, rows

SHAPE = plot.Shape("NVIDIA H200", True, 2048, 5632, "bfloat16", 16384)


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
    monkeypatch.setattr(plot, "_CURVE_POINTS", 10)


def axes_of(rows: list[dict[str, Any]]) -> Axes:
    (axes,) = plot.draw(rows).axes
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
    assert plot.select([*odd, *SKEWED]) == plot.select(SKEWED) == (SHAPE, {"skew": [(29.0, 1.97), (300.5, 1.42)]})


def test_the_shape_with_the_most_rows_is_drawn_then_the_one_with_the_most_tokens() -> None:
    small = [row("skew29", 29.0, 1.7, M=4096), row("skew10", 10.0, 1.8, M=4096)]
    assert plot.select([*SKEWED, *small, row("iid29", 29.0, 1.5, M=4096)])[0].M == 4096
    assert plot.select([*small, *SKEWED])[0].M == plot.select([*SKEWED, *small])[0].M == 16384


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
    points = [plot.Point(10.0 * 2**i, s) for i, s in enumerate(speedups)]
    assert plot.measured_break_even(points) == expected


def test_a_layer_that_ran_densely_does_not_say_where_sparse_stops_paying() -> None:
    dense = row("iid400", 400.0, 1.0) | {"plan": {"hot": SHAPE.F}}
    at, text = break_even(axes_of([row("iid10", 10.0, 2.0), dense])) or pytest.fail("not marked")
    assert at == plot.modelled_break_even(SHAPE) and "predicted" in text


def test_skewed_rows_do_not_set_the_break_even() -> None:
    at, text = break_even(axes_of([row("skew40", 40.0, 1.5), row("skew160", 160.0, 0.5)])) or pytest.fail("not marked")
    assert at == plot.modelled_break_even(SHAPE)
    assert text.endswith("(predicted)")


def test_modelled_break_even_is_where_the_plan_turns_dense() -> None:
    at = plot.modelled_break_even(SHAPE)
    assert at is not None
    assert plot.modelled_speedup(SHAPE, at) > 1
    assert plot.modelled_speedup(SHAPE, at * 1.001) == 1
    assert break_even(axes_of(UNIFORM)) == (at, f"uniform break-even: {at:.0f} (predicted)")


def test_modelled_curve_is_the_cost_model_down_to_1() -> None:
    costs = costs_for(torch.device("cpu"))
    curve = lines(axes_of(UNIFORM))["uniform, predicted"]
    assert curve[0][0] == 10.0  # as far as the rows go
    assert curve[-1] == (plot.modelled_break_even(SHAPE), 1)
    for n, predicted in curve[:-1]:
        assert predicted == pytest.approx(3 * 5632 / (costs.gate * 5632 + costs.gather * n + costs.token), rel=1e-6)


def test_a_batch_too_small_for_the_split_has_an_earlier_break_even_or_none() -> None:
    large, small = (plot.modelled_break_even(SHAPE._replace(M=m)) for m in (16384, 4096))
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


# -- files and errors -------------------------------------------------------------------------------------


def test_png_has_the_size_it_is_laid_out_for(tmp_path: Path) -> None:
    plot.speedup([*UNIFORM, *SKEWED], tmp_path / "speedup.png")
    assert imread(tmp_path / "speedup.png").shape[:2] == (500, 800)


def test_svg_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    for name in ("a.svg", "b.SVG"):
        plot.speedup([*UNIFORM, *SKEWED], tmp_path / name)
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.SVG").read_text()


@pytest.mark.parametrize("name", ["speedup.pdf", "speedup", "png"])
def test_other_file_types_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
        plot.speedup(UNIFORM, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rows", [[], [{}], [row("skew29", 29.0, 1.5, kind="plain"), row("skew29", 29.0, 1.5, graph=True)]]
)
def test_rows_of_which_none_fits_are_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.speedup(rows, tmp_path / "speedup.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install 'twell\[plot\]'"):
        plot.speedup(UNIFORM, tmp_path / "speedup.png")


# -- the command ------------------------------------------------------------------------------------------


def test_command_joins_files(twell: Twell, tmp_path: Path) -> None:
    a, b, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "speedup.svg"
    a.write_text("".join(json.dumps(r) + "\n" for r in UNIFORM) + "\n")
    b.write_text("".join(json.dumps(r) + "\n" for r in SKEWED))
    assert plot.select(rows.read([a, b])) == plot.select([*UNIFORM, *SKEWED])
    assert twell("bench", "plot", str(a), str(b), "--out", str(out)).returncode == 0
    plot.speedup([*UNIFORM, *SKEWED], tmp_path / "expected.svg")
    assert out.read_text() == (tmp_path / "expected.svg").read_text()
    told = twell("bench", "plot", "--help").stdout
    assert "Example: twell bench plot rows.jsonl --out speedup.svg" in " ".join(told.split())


@pytest.mark.parametrize(
    ("text", "out", "message"),
    [
        ("{}\nnonsense\n", "speedup.png", "rows.jsonl, line 2 is no JSON"),
        ("", "speedup.png", "nothing to plot"),
        (json.dumps(UNIFORM[0]), "speedup.gif", "ends in .png or .svg"),
        (json.dumps(UNIFORM[0]), "missing/speedup.png", "No such file or directory"),
        (None, "speedup.png", "No such file or directory"),
    ],
)
def test_bad_input_is_one_clear_line(twell: Twell, tmp_path: Path, text: str | None, out: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    result = twell("bench", "plot", str(file), "--out", str(tmp_path / out))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert message in line
