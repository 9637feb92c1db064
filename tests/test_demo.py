"""The demo, with small layers in place of wide ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twell.workbench import demo

SMALL = demo.Size(
    D=64, F=256, workload="skew8", layer_tokens=(1, 32), layers=2, heads=2, prefill=32, context=16, seconds=0.05
)


def test_one_measurement_serves_terminal_and_page(tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    demo.run_demo(tmp_path / "out", SMALL, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for part in ("1. A sparse activation", "2. One feed-forward", "3. A model of 2", "4. What the", "What it comes to"):
        assert part in text
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "text held out of its training" in page and page.rstrip().endswith("</html>")
    assert '"label": "FFN, skew8, 32 tokens"' in page.replace('":"', '": "')
    assert "No training log was given" not in page and "Nothing was timed" not in page


def test_without_transformers_a_layer_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "twell.train.run", None)
    console = Console(width=80, record=True)
    demo.run_demo(tmp_path, SMALL, console)
    text = " ".join(console.export_text().split())
    assert "for 32 tokens." in text and "pip install 'twell[train]'" in text


def row(dense: tuple[float, float, float], sparse: tuple[float, float, float]) -> dict[str, Any]:
    names = ("p20", "p50", "p80")
    return {"dense_ms": dict(zip(names, dense, strict=True)), "sparse_ms": dict(zip(names, sparse, strict=True))}


def test_a_busy_machine_is_named() -> None:
    assert demo.busy_while([row((9.9, 10, 10.1), (4.9, 5, 5.1))]) is None
    assert "±50%" in str(demo.busy_while([row((9.9, 10, 10.1), (4.9, 5, 5.1)), row((5, 10, 15), (4.9, 5, 5.1))]))
