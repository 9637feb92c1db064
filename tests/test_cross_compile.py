"""The kernels compile for architectures that are not here, within their shared memory and without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CASES = [(capability, "bfloat16") for capability in SHARED_KIB] + [(90, "float32"), (86, "float32"), (90, "float16")]


@pytest.mark.parametrize(("capability", "dtype"), CASES)
def test_kernels_compile(capability: int, dtype: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cross_compile.py")), str(capability), dtype],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == (8 if dtype == "float32" else 9)
    for row in rows:
        assert row["shared"] <= SHARED_KIB[capability] * 1024, row
        assert row["spilled"] == 0, row
