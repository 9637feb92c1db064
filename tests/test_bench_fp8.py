"""Dense FFNs in FP8: what they compute, and that they stand beside the dense ones of 16 bits without being one."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from command_line import Twell
from short_benchmarks import spread, timed_once, timed_shortly
from twell.fp8 import Fp8Linear
from twell.nn.quantize import quantize_
from twell.plan import Plan
from twell.reference import Weights, forward, to_fp8
from twell.workbench.bench import cases, ffn, fp8, rows, timing
from twell.workbench.bench.checks import check_fp8
from twell.workbench.cli.bench_table import print_rows

KINDS: list[Any] = [fp8.DenseFp8FFN, fp8.Fp8WeightsFFN]
CASE = ffn.Case(workload="skew10", M=20, D=64, F=256, called=True)


__all__ = ["timed_once", "timed_shortly"]  # fixtures


def weights_of(inputs: cases.FFNInputs, gated: bool) -> Weights:
    return Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)


def in_order(w: Weights) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As the FFNs take them: a plain FFN has no gate."""
    return (None, w.gate, w.down) if w.up is None else (w.gate, w.up, w.down)


# -- What they compute -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values(gated: bool, dtype: torch.dtype) -> None:
    """Of the reference, which does not round h: to 3 bits, rows of 256, it is 2 to 3 % off."""
    inputs = cases.make("skew29", 33, 64, 256, dtype=dtype)
    w, x = weights_of(inputs, gated), inputs.x
    y = fp8.DenseFp8FFN(*in_order(w))(x)
    error = ffn.relative_error(y, fp8.meant("fp8", x, w))
    assert y.dtype == dtype and 1e-3 < error < 0.04
    y = fp8.Fp8WeightsFFN(*in_order(w))(x)
    error = ffn.relative_error(y, fp8.meant("fp8_weights", x, w))
    assert y.dtype == dtype and error < {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]
    truth = forward(x.double(), w.to(torch.float64), want_stats=False).y
    assert 0.02 < ffn.relative_error(y, truth) < 0.2  # what quantisation costs


@pytest.mark.parametrize("gated", [True, False])
def test_x_and_h_are_rounded_row_by_row(gated: bool) -> None:
    inputs = cases.make("skew29", 33, 64, 256, dtype=torch.float32)
    w = weights_of(inputs, gated)
    gate, down = to_fp8(w.gate).to(torch.float64), to_fp8(w.down).to(torch.float64)
    x = to_fp8(inputs.x).to(torch.float64)
    h = torch.relu(x @ gate.T)
    if w.up is not None:
        h *= x @ to_fp8(w.up).to(torch.float64).T
    want = to_fp8(h).to(torch.float64) @ down.T
    assert ffn.relative_error(fp8.DenseFp8FFN(*in_order(w))(inputs.x), want) < 3e-3  # a tie may round the other way


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_token_with_inf_or_nan_is_not_finite_and_leaves_others_alone(kind: Any, bad: float) -> None:
    inputs = cases.make("skew29", 5, 64, 256, dtype=torch.float32)
    layer = kind(inputs.w_gate, inputs.w_up, inputs.w_down)
    x = inputs.x.clone()
    x[2, 7] = bad
    y = layer(x)
    assert not y[2].isfinite().any()
    assert torch.allclose(y[[0, 1, 3, 4]], layer(inputs.x)[[0, 1, 3, 4]], rtol=1e-5, atol=1e-6)
    x[2] = 0
    assert not layer(x)[2].any()


def test_sums_of_weights_in_fp8_stay_in_the_range_of_float16() -> None:
    w = torch.full((1024, 1024), 1e-3, dtype=torch.float16)  # 448 in FP8: sums of 448 * 1024 otherwise
    y = fp8.Fp8WeightsFFN(None, w, w)(torch.ones(1, 1024, dtype=torch.float16))
    assert torch.allclose(y.float(), torch.full((1, 1024), 1.0486), rtol=5e-3)


@pytest.mark.parametrize("M", [1, 16, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
def test_gemms_of_a_gpu_take_these_layouts(M: int, dtype: torch.dtype, gated: bool) -> None:
    """Without memory, what ``_scaled_mm`` asks of its arguments is asked as on a GPU."""
    with torch.device("meta"):
        up, down, x = (torch.empty(*shape, dtype=dtype) for shape in ((96, 64), (64, 96), (M, 64)))
        y = fp8.DenseFp8FFN(up if gated else None, up, down)(x)
    assert y.shape == (M, 64) and y.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_layers_share_what_is_compiled_once(kind: Any) -> None:
    inputs = cases.make("skew10", 4, 32, 64, dtype=torch.float32)
    w = (inputs.w_gate, inputs.w_up, inputs.w_down)
    torch.compiler.reset()
    counter = CompileCounter()
    with torch.no_grad():
        for _ in range(3):
            layer = kind(*(t.clone() for t in w))
            y = torch.compile(layer, fullgraph=True, dynamic=False, backend=counter)(inputs.x)
            assert torch.equal(y, layer(inputs.x))
    assert counter.frame_count == 1


def test_where_fp8_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    bf16 = torch.bfloat16
    assert fp8.applies(gpu, bf16, 2048, 5632) and fp8.applies(gpu, torch.float16, 2048, 5632)
    assert not fp8.applies(cpu, bf16, 2048, 5632) and not fp8.applies(gpu, torch.float32, 2048, 5632)
    assert not fp8.applies(gpu, bf16, 2040, 5632)
    case = ffn.Case(workload="skew29", M=1, dtype=bf16, device="cuda")
    assert case.is_fp8 and not dataclasses.replace(case, fp8=False).is_fp8
    capability[0] = (8, 6)
    assert not case.is_fp8
    assert list(fp8.ways(64)) == ["fp8", "fp8_weights"] and list(fp8.ways(65)) == ["fp8"]


# -- Rows --------------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_changes() -> None:
    inputs = cases.make("skew10", 20, 64, 256, dtype=torch.float32)
    assert list(ffn.make_layers(CASE, inputs, None, 1)) == ["dense", "sparse", "frozen"]
    (row,) = ffn.run([CASE], seconds=0.0)
    assert not [name for name in row if "fp8" in name]
    assert list(row["error"]) == ["dense", "sparse", "frozen"]


@pytest.mark.parametrize("gated", [True, False])
def test_a_row_with_fp8(gated: bool, tmp_path: Path) -> None:
    sizes = [dataclasses.replace(CASE, M=m, gated=gated, fp8=True) for m in (20, 70)]
    few, many = ffn.run(sizes, seconds=0.0)
    for row, names in ((few, ["fp8", "fp8_weights"]), (many, ["fp8"])):
        assert list(row["called_ms"]) == ["dense", *names, "sparse", "frozen"]
        assert [name for name in fp8.NAMES if f"{name}_ms" in row] == names
        assert list(row["error"]) == ["dense", "sparse", "frozen", *names]
        assert 1e-3 < row["error"]["fp8"] < 0.04
        for ratio, times in (
            ("speedup_over_fp8", {name: row[f"{name}_ms"]["p50"] for name in (*names, "sparse", "frozen")}),
            ("speedup_called_over_fp8", {name: of["p50"] for name, of in row["called_ms"].items()}),
        ):
            fastest = min(times[name] for name in names) / min(times["sparse"], times["frozen"])
            assert row[ratio] == pytest.approx(fastest, abs=1e-3)
        rows.append(row, tmp_path / "rows.jsonl")
    assert rows.read([tmp_path / "rows.jsonl"]) == [few, many]
    assert few["error"]["fp8_weights"] < 1e-6


def test_a_row_with_sparse_fp8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a GPU with kernels for it: here the layer computes its projections, slowly."""
    monkeypatch.setattr(ffn.Case, "is_sparse_fp8", property(lambda case: case.is_fp8))
    monkeypatch.setattr(ffn, "quantize_", functools.partial(quantize_, emulate=True))
    monkeypatch.setenv("COLUMNS", "200")
    (row,) = ffn.run([dataclasses.replace(CASE, fp8=True)], seconds=0.0)
    assert [*row["called_ms"]][-1] == "sparse_fp8" and row["error"]["sparse_fp8"] <= 1.06 * row["error"]["fp8"]
    dense = min(row[f"{name}_ms"]["p50"] for name in fp8.NAMES)
    assert row["speedup_fp8"] == pytest.approx(dense / row["sparse_fp8_ms"]["p50"], abs=1e-3)
    assert row["speedup_called_fp8"] > 0
    inputs = cases.make("skew10", 5000, 64, 256, dtype=torch.float32)
    layers = ffn.make_layers(
        dataclasses.replace(CASE, fp8=True), inputs, Plan(n_neurons=256, hot=torch.arange(16), cap=16), 1
    )
    (layer,) = layers["sparse_fp8"]  # with a plan by other tokens and FP8's costs, which stays
    assert layer.plan is not None and layer.plan.mean_active is not None and not layer._plans_itself
    print_rows([row | {"speedup_fp8": 12.3456}])
    assert [line for line in capsys.readouterr().out.splitlines() if "sparse FP8" in line and "12.35x" in line]
    monkeypatch.setattr(Fp8Linear, "forward", lambda self, x: 2 * x.new_ones(*x.shape[:-1], self.out_features))
    with pytest.raises(ffn.WrongResult, match="sparse_fp8 output is wrong"):
        next(ffn.run([dataclasses.replace(CASE, fp8=True)], seconds=0.0))


def test_fp8_is_no_dense_ffn_of_16_bits() -> None:
    times = {name: timing.Spread(ms, ms, ms) for name, ms in (("dense", 8.0), ("compiled", 6.0), ("sparse", 3.0))}
    of_fp8 = {"fp8": timing.Spread(4.0, 4.0, 4.0), "fp8_weights": timing.Spread(5.0, 5.0, 5.0)}
    frozen = {"frozen": timing.Spread(2.0, 2.0, 2.0), "sparse_compiled": timing.Spread(3.0, 3.0, 3.0)}
    both = {**times, **frozen}
    for of in ("sparse", "frozen"):
        assert ffn.speedup({**both, **of_fp8}, of) == ffn.speedup(both, of) == 6.0 / times.get(of, frozen.get(of)).p50
    assert ffn.over_fp8(both) == {} and ffn.over_fp8({**both, **of_fp8})["speedup_over_fp8"] == 2.0
    assert ffn.over_fp8({**both, **of_fp8}, "speedup_called") == {"speedup_called_over_fp8": 2.0}


def test_where_dense_is_compiled_fp8_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def noted(module: Any, **how: Any) -> Any:
        compiled.append((type(module).__name__, how))
        return module

    monkeypatch.setattr(torch, "compile", noted)
    monkeypatch.setattr(ffn, "_compiles", lambda device: True)
    inputs = cases.make("skew10", 20, 64, 256, dtype=torch.float32)
    layers = ffn.make_layers(dataclasses.replace(CASE, fp8=True), inputs, None, 1)
    assert list(layers) == ["dense", "compiled", "fp8", "fp8_weights", "sparse", "frozen"]
    how = {"fullgraph": True, "dynamic": False}
    assert compiled == [
        ("DenseFFN", how),
        ("DenseFp8FFN", how),
        ("Fp8WeightsFFN", {**how, "options": {"coordinate_descent_tuning": True}}),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_broken_fp8_is_not_timed(kind: Any, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: right(self, x) * wrong)
    monkeypatch.setattr(timing, "compare", lambda *a, **k: pytest.fail("timed a wrong result"))
    with pytest.raises(ffn.WrongResult, match=r"fp8\w* output is wrong"):
        list(ffn.run([dataclasses.replace(CASE, fp8=True)]))


def test_a_token_that_fires_nothing_has_no_relative_error() -> None:
    inputs = cases.make("skew10", 1, 64, 256, dtype=torch.float32)
    silent = dataclasses.replace(inputs, x=torch.zeros(1, 64))
    y = torch.zeros(1, 64)
    assert check_fp8(silent.x, silent, True, {"fp8": y}) == {"fp8": 0.0}


# -- The command -------------------------------------------------------------------------------------------


def test_the_printed_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    case = dataclasses.replace(CASE, called=False)
    with_, without = (next(ffn.run([dataclasses.replace(case, fp8=use)], seconds=0.0)) for use in (True, False))
    with_ |= {"sparse_ms": spread(0.3), "frozen_ms": spread(0.2), "speedup_over_fp8": 98.7654}
    print_rows([with_, without])
    text = capsys.readouterr().out
    words = " ".join(text.split())  # the caption is as wide as the table
    assert "over FP8:" in words and words.count("dense FP8 ") == 2 and words.count("FP8 weights") == 1  # one is there
    (line,) = (line for line in text.splitlines() if "98.77x" in line)
    assert "frozen" in line
    print_rows([without])
    assert "FP8" not in capsys.readouterr().out
    called = next(ffn.run([dataclasses.replace(CASE, fp8=True)], seconds=0.0))
    print_rows([called])
    assert "over FP8" in capsys.readouterr().out


def test_the_option(twell: Twell) -> None:
    refused = twell("bench", "ffn", "--fp8", "-m", "4", "-d", "64", "-f", "256")
    assert refused.returncode != 0 and "--fp8 needs a GPU of compute capability 8.9 or newer" in refused.stderr
    done = twell("bench", "ffn", "--no-fp8", "-w", "skew10", "-m", "4", "-d", "64", "-f", "256", "--seconds", "0.01")
    assert done.returncode == 0 and "FP8" not in done.stdout
