"""The table and the figure of a sweep, from its rows."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from twell.workbench import cli
from twell.workbench.bench import rows as files
from twell.workbench.bench import swept

MEASURED = Path(__file__).parents[1] / "results" / "sweep-small.jsonl"


def layer(dense: float, *sparse: float) -> dict[str, Any]:
    spread = dict(zip(("p20", "p50", "p80"), sparse or (1.0, 1.0, 1.0), strict=True))
    return {"dense_ms": dict.fromkeys(("p20", "p50", "p80"), dense), "sparse_ms": spread}


def row(
    name: str, loss: float, active: float | None = None, ffns: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    counted = {} if active is None else {"active_mean": active, "active_share": active / 1000, "dead_share": 0.015}
    speed = None if active is None else {"speedup": 1.1, "ffns": ffns or [layer(2.0), layer(1.0)]}
    return {"sweep": name, "validation_loss": loss, "tokens_per_second": 12345.6, **counted, "speed": speed}


def test_table() -> None:
    noisy = [layer(2.0, 0.5, 1.0, 1.5), layer(1.0)]
    lines = swept.table([row("l1-0", 4.0, 200), row("l1-0.001", 4.1, 20, noisy), row("silu", 3.9)])
    assert lines[2:] == [
        "| l1-0 | 4.000 | +0.0 % | 200.0 (20.0 %) | 1.5 % | 1.50x | 1.10x | 12,346 |",
        "| l1-0.001 | 4.100 | +2.5 % | 20.0 (2.0 %) | 1.5 % | 1.50x (1.20 to 2.00) | 1.10x | 12,346 |",
        "| silu | 3.900 | -2.5 % | all |  |  |  | 12,346 |",
    ]
    assert "| l1-0.001 | 4.100 |  | 20.0" in swept.table([row("l1-0.001", 4.1, 20)])[2]  # nothing to relate it to


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    noisy = [layer(3.0, 1.0, 2.0, 3.0)]
    losses, speeds = swept.draw([row("l1-0.001", 4.1, 20, noisy), row("l1-0", 4.0, 200), row("silu", 3.9)]).axes
    assert [list(values) for values in losses.lines[0].get_data()] == [[20, 200], [4.1, 4.0]]
    assert list(speeds.lines[0].get_ydata()) == [1.5, 1.5]
    assert [path.vertices[:, 1].tolist() for path in speeds.collections[0].get_paths()] == [[1.0, 3.0], [1.5, 1.5]]
    assert {text.get_text() for text in losses.texts} == {"0.001", "0", "silu"}
    assert {text.get_text() for text in speeds.texts} == {"0.001", "0"}


@pytest.mark.parametrize("distance", [1.0, 1.05, 1.3])
def test_labels_do_not_cover_each_other(distance: float) -> None:
    """Of the measured sweep, and of points as near to each other as may be."""
    pytest.importorskip("matplotlib")
    near = [row(f"l1-{i / 10000}", 4.0 + i / 1000, 100 * distance**i) for i in range(6)]
    for rows in (files.read([MEASURED]), near):
        figure = swept.draw(rows)
        figure.draw_without_rendering()
        for axes in figure.axes:
            boxes = [text.get_window_extent() for text in axes.texts]
            assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def twell_bench_plot(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["twell", "bench", "plot", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "sweep.jsonl", tmp_path / "sweep.svg"
    made = [row("l1-0", 4.0, 200), row("silu", 3.9)]
    file.write_text("".join(json.dumps(each) + "\n" for each in made))
    assert twell_bench_plot(monkeypatch, file, "--out", out) == 0
    assert "<svg" in out.read_text()
    assert twell_bench_plot(monkeypatch, file, "--out", tmp_path / "sweep.gif") == 2
    assert "ends in .png or .svg" in capsys.readouterr().err


def test_no_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install 'twell\[plot\]'"):
        swept.draw([row("l1-0", 4.0, 200)])
