"""The table and the figure of a sweep, from its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import Twell
from twell.workbench.bench import sweep_results

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
    lines = sweep_results.table([row("l1-0", 4.0, 200), row("l1-0.001", 4.1, 20, noisy), row("silu", 3.9)])
    assert lines[2:] == [
        "| l1-0 | 4.000 | +0.0 % | 200.0 (20.0 %) | 1.5 % | 1.50x | 1.10x | 12,346 |",
        "| l1-0.001 | 4.100 | +2.5 % | 20.0 (2.0 %) | 1.5 % | 1.50x (1.20 to 2.00) | 1.10x | 12,346 |",
        "| silu | 3.900 | -2.5 % | all |  |  |  | 12,346 |",
    ]
    assert (
        "| l1-0.001 | 4.100 |  | 20.0" in sweep_results.table([row("l1-0.001", 4.1, 20)])[2]
    )  # nothing to relate it to


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    noisy = [layer(3.0, 1.0, 2.0, 3.0)]
    losses, speeds = sweep_results.draw([row("l1-0.001", 4.1, 20, noisy), row("l1-0", 4.0, 200), row("silu", 3.9)]).axes
    assert [list(values) for values in losses.lines[0].get_data()] == [[20, 200], [4.1, 4.0]]
    assert list(speeds.lines[0].get_ydata()) == [1.5, 1.5]
    assert [path.vertices[:, 1].tolist() for path in speeds.collections[0].get_paths()] == [[1.0, 3.0], [1.5, 1.5]]
    assert {text.get_text() for text in losses.texts} == {"0.001", "0", "silu"}
    assert {text.get_text() for text in speeds.texts} == {"0.001", "0"}


def test_command(twell: Twell, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "sweep.jsonl", tmp_path / "sweep.svg"
    made = [row("l1-0", 4.0, 200), row("silu", 3.9)]
    file.write_text("".join(json.dumps(each) + "\n" for each in made))
    assert twell("bench", "plot", str(file), "--out", str(out)).returncode == 0
    assert "<svg" in out.read_text()
    wrong = twell("bench", "plot", str(file), "--out", str(tmp_path / "sweep.gif"))
    assert wrong.returncode == 2 and "ends in .png or .svg" in wrong.stderr


def test_no_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install 'twell\[plot\]'"):
        sweep_results.draw([row("l1-0", 4.0, 200)])
