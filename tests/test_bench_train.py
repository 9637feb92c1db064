"""Benchmarks of training: rows hold what they promise, and wrong gradients are refused before anything is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from command_line import Twell
from interpreted import shorten_lists
from short_benchmarks import not_timed, timed_once, timed_shortly
from twell import cpu, energy, nn, reference
from twell.ops import backends
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing, train_ffn, train_model

__all__ = ["not_timed", "timed_once", "timed_shortly"]  # fixtures
CPU = torch.device("cpu")
SMALL = ["--width", "64", "--hidden", "256", "--seconds", "0", "--device", "cpu"]
GRADIENTS = ["dx", "dw_gate", "dw_up", "dw_down"]

pytestmark = pytest.mark.usefixtures("timed_once")
in_the_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or not backends._HAS_TRITON, reason="the interpreter runs where there is no GPU"
)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens go through the kernels, with few programs."""
    from twell.plan import costs_for

    shorten_lists(monkeypatch.setattr)
    cheap = costs_for(CPU, training=True)._replace(gather=150.0, heavy=1.4, token=0, hot=0, batch=0)
    monkeypatch.setattr("twell.plan.costs._TRAINING_COSTS", {90: cheap})
    for name in ("_MIN_TOKENS", "_MIN_TOKENS_TRAINING"):
        monkeypatch.setattr(f"twell.plan.choose.{name}", 0)
    monkeypatch.setattr(ffn, "PLAN_TOKENS", 256)


def case(**changes: Any) -> ffn.Case:
    return ffn.Case(**{"workload": "skew10", "M": 70, "D": 64, "F": 256, **changes})


# -- one FFN ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_a_row_holds_what_a_reader_needs(gated: bool) -> None:
    rows = list(train_ffn.run([case(M=m, gated=gated, called=True) for m in (1, 70)], seconds=0))
    assert [row["M"] for row in rows] == [1, 70]
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        assert (row["bench"], row["level"], row["backend"]) == ("train", "ffn", "cpu")
        assert row["kind"] == ("gated" if gated else "plain")
        assert set(row["dense_ms"]) == set(row["sparse_ms"]) == set(row["optimizer_ms"]) == {"p20", "p50", "p80"}
        for name in ("called_ms", "called_with_step_ms", "host_us"):
            assert list(row[name]) == ["dense", "sparse"]
        called, stepped, step = row["called_ms"], row["called_with_step_ms"], row["optimizer_ms"]["p50"]
        for side in ("dense", "sparse"):
            assert called[side]["p50"] == pytest.approx(max(stepped[side]["p50"] - step, 1e-3), abs=2e-4)
        assert row["speedup_called"] == pytest.approx(called["dense"]["p50"] / called["sparse"]["p50"], abs=1e-3)
        assert row["speedup_called_with_step"] == pytest.approx(
            stepped["dense"]["p50"] / stepped["sparse"]["p50"], abs=1e-3
        )
        assert row["speedup"] == row["speedup_eager"]
        assert row["speedup"] == pytest.approx(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], abs=1e-3)
        checked = ["y", "l1", *(name for name in GRADIENTS if gated or name != "dw_up")]
        assert list(row["error"]["dense"]) == list(row["error"]["sparse"]) == checked
        assert max(row["error"]["sparse"].values()) < 2e-6
        assert {"commit", "versions", "cpu", "threads", "device", "time"} <= set(row)
    memory = rows[1]["memory"]
    bytes_of_gradients = 4 * 64 * (70 + 256 * (3 if gated else 2))
    assert min(memory["dense"], memory["sparse"]) >= bytes_of_gradients
    assert memory["ratio"] == pytest.approx(memory["sparse"] / memory["dense"], rel=1e-3)
    assert rows[1]["mean_active"] == pytest.approx(10, rel=0.3)


@pytest.mark.parametrize("wrong", ["gate", "up", "down", "x"])
def test_wrong_gradients_are_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.backward

    def backward(*args: Any) -> reference.Gradients:
        gradients = right(*args)
        if wrong == "x":
            return gradients._replace(x=1.01 * gradients.x)
        gradient = 1.01 * getattr(gradients.weights, wrong)
        return gradients._replace(weights=gradients.weights._replace(**{wrong: gradient}))

    monkeypatch.setattr(cpu, "backward", backward)
    monkeypatch.setattr(timing, "compare", lambda *a, **k: pytest.fail("timed a wrong result"))
    name = "dx" if wrong == "x" else f"dw_{wrong}"
    with pytest.raises(ffn.WrongResult, match=f"sparse {name} is wrong.*no speedup is reported"):
        list(train_ffn.run([case()]))


def test_results_that_change_while_they_are_timed_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, right = timing.as_called, cpu.backward

    def spoil(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(cpu, "backward", lambda *a: right(*a)._replace(x=1.01 * right(*a).x))
        return measure(*args, **kwargs)

    monkeypatch.setattr(timing, "as_called", spoil)
    with pytest.raises(ffn.WrongResult, match="before it was timed"):
        list(train_ffn.run([case(called=True)], seconds=0))


def test_a_step_is_made_between_calls_and_changes_nothing() -> None:
    inputs = cases.make("skew10", 20, 64, 256, dtype=torch.float32)
    p = train_ffn.Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    for name, loop in train_ffn._loops(p, "auto", None).items():
        before, first = {k: w.clone() for k, w in loop.weights.items()}, loop.results()
        loop.iteration()
        assert all(state["step"] == 1 for state in loop.optimizer.state.values()) and len(loop.optimizer.state) == 3
        assert all(torch.equal(w, before[k]) and w.grad is None for k, w in loop.weights.items()), name
        assert loop.x.grad is None
        again = loop.results()
        assert list(again) == ["y", "l1", *GRADIENTS] and all(torch.equal(again[k], v) for k, v in first.items())


def test_a_missing_l1_gradient_shows_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda dy, dl1, *args: right(dy, None, *args))
    with pytest.raises(ffn.WrongResult):
        list(train_ffn.run([case(dtype=torch.bfloat16)], seconds=0))


def test_one_wrong_token_of_many_is_found() -> None:
    inputs = cases.make("skew10", 3000, 64, 256, dtype=torch.bfloat16)
    p = train_ffn.Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    truth, _ = train_ffn._truth(p)
    right = p.results(train_ffn.dense_forward)
    train_ffn.check(truth, right, right)
    wrong = right | {"y": right["y"].clone()}
    wrong["y"][1234] += 0.2 / 8 * right["y"].norm(dim=1).median()  # a fifth of a row's norm
    with pytest.raises(ffn.WrongResult, match="token 1234"):
        train_ffn.check(truth, right, wrong)


def test_float64_in_chunks_equals_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_ffn, "_TRUTH_TOKENS", 32)
    inputs = cases.make("skew10", 70, 64, 256, dtype=torch.float64)
    p = train_ffn.Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    truth, counts = train_ffn._truth(p)
    by_autograd = p.results(train_ffn.dense_forward)
    assert truth.keys() == by_autograd.keys()
    for name, expected in by_autograd.items():
        torch.testing.assert_close(truth[name], expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(counts, (p.x @ p.w.gate.T > 0).sum(0))


@pytest.mark.parametrize("gated", [True, False])
def test_dense_compiles_in_one_graph(gated: bool) -> None:
    inputs = cases.make("skew10", 8, 64, 256, dtype=torch.bfloat16)
    p = train_ffn.Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down))
    dense = train_ffn.dense_forward
    compiled = p.results(torch.compile(dense, fullgraph=True, dynamic=False, backend="aot_eager"))
    for name, expected in p.results(dense).items():
        torch.testing.assert_close(compiled[name], expected)


def test_tokens_at_a_kink_are_replaced() -> None:
    x, w_gate = torch.randn(6, 4), torch.eye(4)
    x[2, 1] = 1e-8
    cleared = train_ffn._clear_of_zero(x, w_gate)
    assert torch.equal(cleared[2], x[0])
    assert torch.equal(cleared[[0, 1, 3, 4, 5]], x[[0, 1, 3, 4, 5]])
    assert torch.equal(train_ffn._clear_of_zero(x[2:3], w_gate), x[2:3])  # nothing to replace it by


@in_the_interpreter
@pytest.mark.usefixtures("small_splits", "not_timed")
@pytest.mark.parametrize("gated", [True, False])
def test_ffn_by_the_kernels(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from twell.gpu.training import split_training

    (row,) = train_ffn.run([case(workload="skew3", M=4, D=16, F=128, gated=gated, backend="triton")], seconds=0)
    assert row["backend"] == "triton" and row["plan"]["hot"] == 0
    assert max(row["error"]["sparse"].values()) < 2e-6
    right = split_training.backward
    monkeypatch.setattr(split_training, "backward", lambda *args: right(*args)._replace(x=torch.zeros_like(args[0])))
    with pytest.raises(ffn.WrongResult, match="sparse dx is wrong"):  # so it were the kernels that ran
        list(train_ffn.run([case(workload="skew3", M=4, D=16, F=128, gated=gated, backend="triton")]))


# -- models -----------------------------------------------------------------------------------------------


def tiny_config(F: int = 256, layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=F,
        num_hidden_layers=layers,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        hidden_act="relu",
    )


def measure_steps(config: LlamaConfig, workload: str = "skew10", batch: int = 2, length: int = 8, **how: Any) -> Any:
    setup = train_model.Setup(config, workload, batch, length, 1e-3, torch.float32, CPU, **how)
    return train_model.measure(setup, seconds=0)


def test_steps_of_a_model() -> None:
    row = measure_steps(tiny_config())
    assert json.loads(json.dumps(row)) == row
    assert (row["bench"], row["level"], row["layers"], row["backend"]) == ("train", "model", 2, "cpu")
    parameters = sum(p.numel() for p in LlamaForCausalLM(tiny_config()).parameters())
    for name in ("dense", "sparse"):
        of = row[name]
        assert of["tokens_per_ms"] == pytest.approx(16 / of["step_ms"]["p50"], rel=0.01, abs=0.01)
        assert of["memory"]["weights"] == 4 * parameters
        assert of["memory"]["optimizer"] >= 8 * parameters
        memory = of["memory"]
        assert memory["peak"] == memory["activations"] + 2 * memory["weights"] + memory["optimizer"]
        assert of["joules"] is None
    assert row["speedup"] == pytest.approx(row["dense"]["step_ms"]["p50"] / row["sparse"]["step_ms"]["p50"], abs=1e-3)
    assert {"peak_ratio", "activations_ratio"} <= set(row)


def test_out_of_memory_is_part_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train_ffn, "dense_forward", no_room)
    row = measure_steps(tiny_config())
    assert row["dense"] == "out of memory" and row["sparse"]["step_ms"]["p50"] > 0 and "speedup" not in row


def test_a_model_that_computes_something_else_has_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    right = nn.SparseFFNBase._ffn

    def wrong(self: Any, x: torch.Tensor, token_mask: Any, return_stats: bool) -> Any:
        y, stats = right(self, x, token_mask, True)
        return (y, stats._replace(l1_sum=1.1 * stats.l1_sum)) if return_stats else y

    monkeypatch.setattr(nn.SparseFFNBase, "_ffn", wrong)
    with pytest.raises(ffn.WrongResult, match="first l1 is"):
        measure_steps(tiny_config())


def test_gradients_pass_through_ffns_and_weights_are_as_sparse_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and sparse models have the same gradients, below the FFNs too."""
    gradients: list[dict[str, torch.Tensor]] = []
    right = train_model._Training.learn_from

    def learn_from(self: Any, *losses: torch.Tensor) -> None:
        (losses[0] + self.l1 * losses[1]).backward(retain_graph=True)
        named = self.model.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        self.optimizer.zero_grad(set_to_none=True)
        right(self, *losses)

    monkeypatch.setattr(train_model._Training, "learn_from", learn_from)
    measure_steps(tiny_config())
    dense, sparse = gradients[0], gradients[len(gradients) // 2]
    assert dense.keys() == sparse.keys()
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert dense[name].norm() > 0
    for name, gradient in dense.items():
        torch.testing.assert_close(sparse[name], gradient, rtol=1e-3, atol=1e-6)


@in_the_interpreter
@pytest.mark.usefixtures("small_splits")
def test_steps_of_a_model_by_the_kernels() -> None:
    config = tiny_config(F=128, layers=1)
    row = measure_steps(config, workload="skew3", batch=1, length=6, backend="triton")
    assert row["backend"] == "triton" and row["sparse"]["plan"]["hot"] == 0


# -- energy -----------------------------------------------------------------------------------------------


class FakeNVML:
    """Counts 3 J a call."""

    class NVMLError(Exception):
        pass

    calls = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> None:
        raise self.NVMLError

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        return address

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "00000000:1b:00.0"
        return 3000 * self.calls


def test_no_energy_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    assert energy.joules(lambda: calls.append(1), CPU) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert energy.joules(lambda: calls.append(1), torch.device("cuda")) is None
    assert not calls


def test_energy_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        uuid, pci_domain_id, pci_bus_id, pci_device_id = "abc", 0, 0x1B, 0

    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Facts)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)

    def run() -> None:
        nvml.calls += 1

    assert energy.joules(run, torch.device("cuda", 0), seconds=0.01) == 3.0
    assert nvml.calls > 1
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(FakeNVML.NVMLError()))
    assert energy.joules(run, torch.device("cuda", 0), seconds=0) is None


# -- the command ------------------------------------------------------------------------------------------


def test_command_prints_and_appends_rows(twell: Twell, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result = twell("bench", "train", "-w", "skew10", "-m", "1", "-m", "70", *SMALL, "--json", "--out", str(out))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["workload"], row["M"]) for row in rows] == [("skew10", 1), ("skew10", 70)]
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows


def test_command_prints_a_table(twell: Twell) -> None:
    result = twell("bench", "train", "-w", "skew10", "-m", "8", "--plain", "--called", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "with step: of fused AdamW" in result.stdout and "host" in result.stdout
    assert "training: plain FFN, D 64, F 256, float32" in result.stdout and "skew10" in result.stdout


def test_command_measures_a_model(twell: Twell) -> None:
    model = ("--model", "--preset", "tiny", "--batch", "1", "--length", "8", "-w", "skew10", *SMALL)
    result = twell("bench", "train", *model)
    assert result.returncode == 0, result.stderr
    assert "training: tiny, D 128, F 512, float32" in result.stdout and "activations" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-w", "nonsense"], "unknown workload 'nonsense'"),
        (["-m", "0"], "must be at least 1"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--backend", "triton"], "backend 'triton' is not available"),
        (["--model", "--plain"], "--model has gated FFNs"),
        (["--model", "--preset", "huge"], "unknown preset 'huge'"),
    ],
)
@pytest.mark.usefixtures("without_the_interpreter")
def test_bad_input_is_one_clear_line(twell: Twell, args: list[str], message: str) -> None:
    result = twell("bench", "train", *args, "--device", "cpu")
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
