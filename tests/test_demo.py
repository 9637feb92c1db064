"""The demo, with small layers in place of wide ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from twell.workbench.cli import demo


def test_one_measurement_serves_terminal_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # again in the same folder
        demo.run(tmp_path / "out", width=64, hidden=256, seconds=0.05)
    said = capsys.readouterr().out
    for part in (
        "A layer, D 64, F 256",
        "decoding a token",
        "$ twell generate sample",
        "What it comes to",
    ):
        assert said.count(part) >= 2
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 3 + 2
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '"label": "FFN, skew29, 256 tokens"' in page.replace('":"', '": "') and page.rstrip().endswith("</html>")
    assert "No training log was given" not in page and "Nothing was timed" not in page
