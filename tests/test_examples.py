"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *args: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_sparse(tmp_path: Path) -> None:
    printed = run_example("train_sparse.py", "--steps", "3", "--layers", "2", cwd=tmp_path)
    assert "layer 1:" in printed
    assert "It was a dark night, and" in printed
    assert (tmp_path / "sparse-run" / "model" / "config.json").is_file()


def test_accelerate_checkpoint(tmp_path: Path) -> None:
    printed = run_example("accelerate_checkpoint.py", "--tokens", "64", cwd=tmp_path)
    assert "model.layers.3.mlp" in printed and "which is rounding" in printed


def test_own_model(tmp_path: Path) -> None:
    printed = run_example("own_model.py", "--steps", "30", cwd=tmp_path).splitlines()
    first, last = (
        line.partition("token ")[2].removesuffix(" of 256").split(", ") for line in (printed[0], printed[-1])
    )
    assert all(int(after) < int(before) for before, after in zip(first, last, strict=True))
    assert float(printed[-1].split()[3].rstrip(",")) < float(printed[0].split()[3].rstrip(","))
