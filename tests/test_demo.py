"""The demo, with a training of two steps in place of its two minutes."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from twell.workbench import demo


def test_demo_packs_and_splits(capsys) -> None:
    console = Console(width=80, record=True)
    demo._show_packing(console)
    demo._show_layer(console)
    text = console.export_text()
    assert "Unpacked bit for bit: True" in text
    assert max(map(len, text.splitlines())) <= 80


def test_demo_trains_and_compares(tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    demo._show_training(console, tmp_path, steps=2)
    text = console.export_text()
    assert "guessing by word frequency" in text
    assert "1,024 of 1,024 as dense" in text
    assert "The old man said" in text
    (out,) = tmp_path.iterdir()
    assert (out / "model" / "config.json").is_file()
    assert out.name in text.replace("\n", "")  # a long path may be broken
    page = (out / "report.html").read_text()
    (speedup,) = re.findall(r"speedup\W+[\d.]+x\W+([\d.]+x)", text)  # of the whole model
    assert f"measured speedup</dt><dd><b>{speedup}</b>" in page  # one measurement, on the terminal and on the page
    assert "held-out text" in page and page.rstrip().endswith("</html>")
