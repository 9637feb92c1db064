"""The faults of tools/mutations.py fit the code: each can be put in, and its tests exist. Running them takes long."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mutations


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("faults") / "src"
    shutil.copytree(mutations.ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "sample"))
    return copy


@pytest.mark.parametrize("fault", mutations.FAULTS, ids=lambda fault: fault.name)
def test_each_fault_fits_the_code(fault: mutations.Fault, source: Path) -> None:
    changed, right = source / "twell" / fault.path, mutations.ROOT / "src" / "twell" / fault.path
    try:
        mutations.apply(fault, source)
        compile(changed.read_text(encoding="utf-8"), fault.path, "exec")
        assert changed.read_text(encoding="utf-8") != right.read_text(encoding="utf-8")
    finally:
        shutil.copy(right, changed)
    for name in fault.tests.split():
        assert (mutations.ROOT / "tests" / f"test_{name}.py").is_file(), name


def test_there_are_forty() -> None:
    assert len({fault.name for fault in mutations.FAULTS}) == 40
