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
