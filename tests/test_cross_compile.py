"""All kernels compile for several architectures, which need not be present, within their shared memory and without
spills.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from twell import gpu

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHAPE, LARGE_SHAPE = (2048, 5632), (8192, 28672)  # D and F of a 1.5B and of a 70B model
CASES = [(90, "bfloat16", SHAPE), (86, "bfloat16", SHAPE)]  # with TMA, wgmma and Gluon; with the least shared memory
SLOW = [(capability, "bfloat16", SHAPE) for capability in (80, 89, 100, 120)]
SLOW += [(90, "bfloat16", LARGE_SHAPE), (90, "float32", SHAPE), (90, "float16", SHAPE)]
SLOW += [(capability, "float32", SHAPE) for capability in (80, 86)]
ONLY_16_BITS = {"screened_neurons_kernel", "sum_kernel", "_marks_kernel", "_up_kernel", "_down_kernel"}
SPILLED = {  # bytes allowed
    "neurons_kernel": 32,  # so that another program fits an SM, as in the next three
    "screened_neurons_kernel": 128,
    "hopper_fp8_sums_kernel": 8,
    "hopper_one_kernel": 16,
    "_heavy_backward_kernel": 192,  # numbers that all of the kernel uses, outside of its innermost loops
}
CONVERTS = {"sums_kernel", "_heavy_fp8_kernel"}  # e4m3 weights to 16 bits, between two products
SPILLED_IN_FLOAT32 = {"_heavy_kernel": 24, "_tail_kernel": 4, "_heavy_backward_kernel": 192}
SPILLED_ONLY_ON = {"_heavy_kernel": (80, 86, 89), "_tail_kernel": (80,)}  # capabilities


@pytest.mark.parametrize(
    ("capability", "dtype", "shape"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_kernels_compile(capability: int, dtype: str, shape: tuple[int, int], tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cross_compile.py")), str(capability), dtype, *map(str, shape)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,  # minutes, if the machine is busy
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {row["kernel"] for row in rows}
    on_hopper = capability == 90 and dtype != "float32"
    assert ("hopper_sums_kernel" in kernels) == ("_gate_up_kernel" in kernels) == on_hopper
    assert ("hopper_neurons_kernel" in kernels) == (on_hopper and shape == SHAPE)
    in_fp8 = {"_heavy_fp8_kernel", "_round_kernel", "_down_fp8_kernel", "hopper_fp8_sums_kernel"}
    assert (in_fp8 <= kernels) == (capability == 90 and dtype == "bfloat16")
    narrow = {"hopper_fp8_neurons_kernel", "hopper_one_kernel", "hopper_add_kernel"}
    assert narrow & kernels == (narrow if in_fp8 <= kernels and shape == SHAPE else set())
    some = {"hopper_sums_kernel", "hopper_neurons_kernel", "_gate_up_kernel", *narrow, *in_fp8}
    assert kernels - some == in_source() - some - (ONLY_16_BITS if dtype == "float32" else set())
    spilled = SPILLED_IN_FLOAT32 if dtype == "float32" else SPILLED
    spilled = {name: n for name, n in spilled.items() if capability in SPILLED_ONLY_ON.get(name, SHARED_KIB)}
    for row in rows:
        assert row["shared"] <= SHARED_KIB[capability] * 1024, row
        assert row["scratch"] == 0, row  # launch.py provides none
        assert row["spilled"] <= spilled.get(row["kernel"], 0), row
        assert not row["serialized"], row  # wgmmas that wait for each other
        assert not row["waits_for_each"] or row["kernel"] in CONVERTS, row
        assert row["launched_early"] == row["waits"] == row["overlaps"], row
        assert capability >= 90 or not row["overlaps"], row


def in_source() -> set[str]:
    """Names of all Triton kernels."""
    return set(re.findall(r"^@triton\.jit\ndef (\w+_kernel)\(", sources(), re.MULTILINE))


def sources() -> str:
    return "".join(f.read_text(encoding="utf-8") for f in Path(gpu.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("table", [gpu.__doc__, Path(__file__, "../../docs/kernels.md").resolve().read_text("utf-8")])
def test_the_tables_of_what_runs_name_every_kernel(table: str) -> None:
    in_gluon = re.findall(r"^@gluon\.jit\ndef (\w+_kernel)\(", sources(), re.MULTILINE)
    assert set(re.findall(r"\b(\w+_kernel)\b", table)) == in_source() | set(in_gluon)
