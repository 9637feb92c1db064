"""Training runs over each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.image import imread

from command_line import Twell
from twell.workbench.bench import curves


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(loss: float, **more: Any) -> list[dict[str, Any]]:
    logged = [{"step": s, "ce_loss": loss / s, "active_mean": 100 / s, "sparse_layers": s // 20} for s in (10, 20, 30)]
    return [{**row, **more} for row in logged] + [{"step": 30, "eval_loss": 1.0, **more}]


def test_runs_of_folders_files_and_of_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    write(folder / "metrics.jsonl", rows(40))
    file = write(tmp_path / "both.jsonl", [*rows(41, run="sparse"), *rows(40, run="dense")])
    runs = curves.read_runs([folder, file])
    assert list(runs) == ["a run", "sparse", "dense"]
    assert list(runs["sparse"]) == [10, 20, 30]  # and no evaluation
    assert curves.differences(runs["dense"], runs["sparse"]) == {10: 0.025, 20: 0.025, 30: 0.025}


def test_the_picture(tmp_path: Path) -> None:
    file = write(tmp_path / "both.jsonl", [*rows(41, run="sparse"), *rows(40, run="dense")])
    figure = curves.draw(curves.read_runs([file]), "dense")
    loss, difference, active, sparse = figure.axes
    assert [line.get_label() for line in loss.lines] == ["dense", "sparse"]
    assert difference.lines[0].get_ydata() == pytest.approx([2.5] * 3)
    assert len(active.lines) == len(sparse.lines) == 2


def test_over_minutes(tmp_path: Path) -> None:
    fast, slow = (
        [{**row, "tokens": 600 * row["step"], "tokens_per_second": v} for row in rows(40)] for v in (200, 100)
    )
    both = [{**row, "run": name} for name, run in (("fast", fast), ("slow", slow)) for row in run if "ce_loss" in row]
    figure = curves.draw(curves.read_runs([write(tmp_path / "both.jsonl", both)]), "slow", "minutes")
    loss, speed, *_ = figure.axes
    assert [line.get_xdata()[-1] for line in loss.lines] == pytest.approx([3.0, 1.5])
    assert [line.get_ydata()[0] for line in speed.lines] == [0.1, 0.2] and figure.axes[
        -1
    ].get_xlabel() == "minutes of training"


def test_the_command(twell: Twell, tmp_path: Path) -> None:
    file = write(tmp_path / "both.jsonl", [*rows(41, run="sparse"), *rows(40, run="dense")])
    out = tmp_path / "curves.png"
    assert twell("bench", "curves", str(file), "--first", "dense", "--out", str(out)).returncode == 0
    assert imread(out).shape[:2] == (700, 800)
    assert twell("bench", "curves", str(file), "--out", str(tmp_path / "x.jpg")).returncode == 2


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ([{"step": 1}], [], "no logged steps"),
        (rows(3), ["--first", "other"], "no run 'other'"),
        (rows(3), ["--over", "hours"], "unknown axis 'hours'"),
        (rows(3), ["--over", "minutes"], "no tokens and no tokens_per_second"),
    ],
)
def test_bad_input(
    twell: Twell, tmp_path: Path, content: list[dict[str, Any]], arguments: list[str], message: str
) -> None:
    file = write(tmp_path / "rows.jsonl", content)
    result = twell("bench", "curves", str(file), *arguments, "--out", str(tmp_path / "x.png"))
    assert result.returncode == 2 and message in result.stderr
