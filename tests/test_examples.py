"""The examples run as a reader would run them, in this process: importing torch again would take the most time."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from small_runs import write_text
from twell.hf.loading import SAMPLE_MODEL

EXAMPLES = Path(__file__).parent.parent / "examples"


class Example:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, name: str, *args: str) -> str:
        """What it prints."""
        self.monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return self.capsys.readouterr().out


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Example:
    monkeypatch.chdir(tmp_path)
    return Example(monkeypatch, capsys)


def test_train_sparse(example: Example, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    printed = example("train_sparse.py", "--steps", "3", "--layers", "2", "--data", str(text))
    assert "layer 1:" in printed
    assert "It was a dark night, and" in printed
    assert (tmp_path / "sparse-run" / "model" / "config.json").is_file()


def test_accelerate_checkpoint(example: Example) -> None:
    printed = example("accelerate_checkpoint.py", "--tokens", "64")
    assert "model.layers.3.mlp" in printed and "which is rounding" in printed


def test_accelerate_checkpoint_of_a_model_that_is_sparse_already(example: Example) -> None:
    assert "which is rounding" in example("accelerate_checkpoint.py", str(SAMPLE_MODEL))


def test_own_model(example: Example) -> None:
    printed = example("own_model.py", "--steps", "30").splitlines()
    first, last = (
        line.partition("token ")[2].removesuffix(" of 256").split(", ") for line in (printed[0], printed[-1])
    )
    assert all(int(after) < int(before) for before, after in zip(first, last, strict=True))
    assert float(printed[-1].split()[3].rstrip(",")) < float(printed[0].split()[3].rstrip(","))
