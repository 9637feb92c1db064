"""The demo, with small layers in place of wide ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twell.workbench.cli import demo


def test_the_demo_times_writes_and_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # again in the same folder
        demo.run(tmp_path / "out", width=64, hidden=256, seconds=0.05)
    said = capsys.readouterr().out
    assert len(re.findall(r"^a token: dense .* ms, sparse .* ms: .*x$", said, re.M)) == 2
    assert "$ twell generate sample --prompt 'The old man said' --temperature 0.8 --top-k 40" in said
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 3 + 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '"label": "FFN, skew29, 256 tokens"' in page.replace('":"', '": "') and page.rstrip().endswith("</html>")
    assert "No training log was given" not in page and "Nothing was timed" not in page
