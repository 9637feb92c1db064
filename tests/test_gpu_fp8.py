"""Dense FFNs in FP8 on a GPU that has it: compiled, right, and in the rows of ``twell bench ffn``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twell.bench import cases, ffn, fp8
from twell.reference import Weights

pytestmark = pytest.mark.gpu
SHAPE: dict[str, Any] = {"workload": "skew29", "D": 256, "F": 768, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.fixture(autouse=True)
def fp8_gpu() -> None:
    if not fp8.applies(torch.device("cuda"), torch.bfloat16, 256, 768):
        pytest.skip("needs a GPU with FP8")


def test_rows() -> None:
    few, many = ffn.run([ffn.Case(**SHAPE, M=16, graph=True), ffn.Case(**SHAPE, M=4096)], seconds=0.1)
    for row, names in ((few, ["fp8", "fp8_weights"]), (many, ["fp8"])):
        ways = ["dense", "compiled", *names, "sparse", "frozen"]
        assert [name.removesuffix("_ms") for name in row if name.removesuffix("_ms") in (*ways, *fp8.NAMES)] == ways
        assert list(row["called_ms"]) == [*ways, "sparse_compiled"]
        ms = {way: row[f"{way}_ms"]["p50"] for way in ways}
        assert row["speedup"] == pytest.approx(min(ms["dense"], ms["compiled"]) / ms["sparse"], abs=1e-3)
        ratio = min(ms[name] for name in names) / min(ms["sparse"], ms["frozen"])
        assert row["speedup_over_fp8"] == pytest.approx(ratio, abs=1e-3) and row["speedup_called_over_fp8"] > 0
        assert row["error"]["fp8"] < 0.1 and row["quantisation_error"]["fp8"] < 0.2
        assert row["fp8_accumulation"] == "fast"
    assert few["error"]["fp8_weights"] < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1, 64])
def test_compiled_values(dtype: torch.dtype, gated: bool, M: int) -> None:
    inputs = cases.make("skew100", M, 256, 768, dtype=dtype, device="cuda")
    w = Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    in_order = (w.gate, w.up, w.down) if gated else (None, w.gate, w.down)
    torch.compiler.reset()
    for name, (kind, how) in fp8.ways(M).items():
        with torch.no_grad():
            y = torch.compile(kind(*in_order), fullgraph=True, dynamic=False, **how)(inputs.x)
        assert ffn.relative_error(y, fp8.meant(name, inputs.x, w)) < (0.1 if name == "fp8" else 0.01)
