"""Traces as files, and benchmarks on recorded activations, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("triton")

import trace_bench
import trace_ffn
import trace_model
import trace_train
import traces
from interpreted import shorten_lists
from short_benchmarks import not_timed, timed_shortly
from small_models import named_trace_of
from twell.gpu.training import split_training
from twell.plan import costs_for
from twell.train import recipes
from twell.workbench.bench import cases, ffn, fp8, timing
from twell.workbench.bench import model as model_bench

__all__ = ["not_timed", "timed_shortly"]  # fixtures
CPU, f16, f32 = torch.device("cpu"), torch.float16, torch.float32
in_the_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@pytest.fixture(autouse=True)
def few_tokens_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are timed once, since the interpreter takes its time."""
    for name in ("_MIN_TOKENS", "_MIN_TOKENS_TRAINING"):
        monkeypatch.setattr(f"twell.plan.choose.{name}", 0)
    training = costs_for(CPU, training=True)._replace(gather=150.0, heavy=1.4, token=0, hot=0, batch=0)
    monkeypatch.setattr("twell.plan.costs._TRAINING_COSTS", {90: training})
    monkeypatch.setattr("twell.plan.costs._COSTS", {90: costs_for(CPU)._replace(batch=0)})
    monkeypatch.setattr("twell.plan.costs._FP8_COSTS", {90: costs_for(CPU, fp8=True)._replace(batch=0)})
    monkeypatch.setattr(cases, "_TOKEN_BLOCK", 256)
    monkeypatch.setattr(ffn, "PLAN_TOKENS", 256)
    compare, once = timing.compare, {"seconds": 0, "min_repeats": 1, "warmups": 0}
    monkeypatch.setattr(timing, "compare", lambda runs, **options: compare(runs, **options | once))
    shorten_lists(monkeypatch.setattr)
    torch.manual_seed(0)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    patterns = [np.random.default_rng(i).random((9, 40)) < 0.3 for i in range(2)]
    trace, path = named_trace_of(*patterns), tmp_path / "trace.npz"
    traces.save(trace, path)
    again = traces.load(path, hidden=0)
    assert (again.names, again.hidden_sizes) == (trace.names, [40, 40])
    assert all(np.array_equal(again.pattern(i).numpy(), pattern) for i, pattern in enumerate(patterns))
    np.savez(path, counts_0=trace.counts[0], neurons_0=trace.neurons[0])  # as others recorded it
    again = traces.load(path, hidden=64)
    assert (again.names, again.hidden_sizes) == (["layer 0"], [64]) and again.pattern(0).sum() == patterns[0].sum()
    np.savez(path, counts_0=trace.counts[0], neurons_0=trace.neurons[0][1:])
    with pytest.raises(ValueError, match=r"trace\.npz is no trace, or damaged"):
        traces.load(path, hidden=64)


@in_the_interpreter
def test_forward_of_layers() -> None:
    """A layer that splits, with hot neurons, long and heavy tokens, and one that runs densely."""
    sparse = torch.rand(40, 2048) < 0.003
    sparse[:, :200], sparse[30, :1500], sparse[35, :800] = torch.rand(40, 200) < 0.9, True, True
    measure = functools.partial(trace_ffn.measure, M=20, D=32, dtype=f32, device=CPU, seconds=0)
    row = measure("first", sparse)
    assert row["plan"]["hot"] == 256 and row["error"]["sparse"] < 1e-6 and row["parts_ms"]["heavy tokens"] == 2
    frozen = row["gate_ms"]["p50"] + row["after gate_ms"]["p50"]
    assert row["frozen_ms"]["p50"] == pytest.approx(frozen, abs=1e-3)
    assert row["sparse_ms"]["p50"] == pytest.approx(frozen + row["layout_ms"]["p50"], abs=1e-3)
    assert row["mean_active"] == pytest.approx(sparse[20:].sum().item() / 20, abs=0.01)
    dense = torch.rand(40, 2048) < 0.5
    row = measure("last", dense, fp8=True)
    assert row["plan"]["hot"] == 2048 and row["parts_ms"] == {}
    assert {"fp8_ms", "fp8_weights_ms", "speedup_over_fp8"} <= set(row)
    assert row["speedup"] == pytest.approx(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], abs=1e-3)
    with pytest.raises(ValueError, match="no two halves"):
        measure("short", dense[:1])


@in_the_interpreter
def test_forward_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffn.Case, "is_sparse_fp8", property(lambda case: case.is_fp8))
    monkeypatch.setattr(ffn, "parts_ms", lambda *_: {})  # of 16 bits
    active = torch.rand(24, 2048) < 0.003
    active[:, :200], active[20, :1500] = torch.rand(24, 200) < 0.9, True
    how: dict[str, Any] = {"dtype": f16, "device": CPU, "seconds": 0, "fp8": True}
    row = trace_ffn.measure("first", active, 12, 32, **how)
    assert list(row["error"]) == ["sparse", "fp8", "fp8_weights", "sparse_fp8"] and row["error"]["fp8"] < 0.04
    assert row["plan_fp8"]["hot"] < 2048
    assert row["error"]["sparse_fp8"] < 2e-3 and row["sparse_fp8_ms"]["p50"] > 0 and row["speedup_fp8"] > 0
    monkeypatch.setattr("twell.gpu.prefill.split_fp8.write_tail", lambda *_, **__: None)
    with pytest.raises(ffn.WrongResult, match="sparse FP8 output is wrong"):
        trace_ffn.measure("first", active, 12, 32, **how)


@in_the_interpreter
def test_training_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    active = torch.rand(16, 384) < 0.01
    active[:, :100], active[9, 200:240], active[12, 200:220] = torch.rand(16, 100) < 0.9, True, True
    measure = functools.partial(trace_train.measure, M=8, D=16, dtype=f32, device=CPU, seconds=0)
    row = measure("first", active)
    assert row["plan"]["hot"] == 128 and row["workload"] == "first"
    assert max(row["error"]["sparse"].values()) < 2e-6
    assert list(row["error"]["sparse"]) == ["y", "l1", "dx", "dw_gate", "dw_up", "dw_down"]
    assert row["sparse_ms"]["p50"] == pytest.approx(row["gate_ms"]["p50"] + row["rest_ms"]["p50"], abs=1e-3)
    assert row["mean_active"] == pytest.approx(active[8:].sum().item() / 8, abs=0.01)
    row = measure("last", torch.rand(16, 128) < 0.9)
    assert row["plan"]["hot"] == 128 and row["error"] is None and "rest_ms" not in row
    right = split_training.backward
    monkeypatch.setattr(split_training, "backward", lambda *args: right(*args)._replace(x=torch.zeros_like(args[0])))
    with pytest.raises(ffn.WrongResult, match="sparse dx is wrong"):
        measure("wrong", torch.rand(16, 128) < 0.02)


SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 2048, "layers": 2, "heads": 2, "vocab_size": 64}


@in_the_interpreter
@pytest.mark.usefixtures("not_timed")
def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(recipes.preset("tiny"), **SHAPE)
    patterns = [torch.rand(20, 2048) < 0.004, torch.rand(20, 2048) < 0.6]
    dense = LlamaForCausalLM(cases.llama_config(recipe, 8)).eval()
    monkeypatch.setattr(fp8, "applies", lambda *_: True)
    monkeypatch.setattr(fp8, "applies_sparsely", lambda *_: True)
    subject = trace_model.traced(dense, patterns, (2, 8), backend="triton")
    assert list(subject.models) == ["dense", "sparse", "fp8", "fp8_weights"]
    row = model_bench.measure(subject, torch.randint(64, (2, 8)), seconds=0)
    assert row["workload"] == "trace" and row["difference"] is None and row["error"]["fp8"] < 0.1
    assert [plan["hot"] == 2048 for plan in row["plans"]] == [False, True]  # the second layer runs densely
    first, second = (layer.mlp for layer in subject.sparse.model.layers)
    assert first.parts is not None and second.parts is None


@in_the_interpreter
@pytest.mark.usefixtures("not_timed")
@pytest.mark.parametrize("what", ["ffn", "train"])
def test_the_command(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces.save(named_trace_of(np.random.default_rng(0).random((8, 256)) < 0.02), tmp_path / "trace.npz")
    given = f"--trace {tmp_path}/trace.npz --device cpu -m 4 -d 32 --seconds 0 --out {tmp_path}/rows.jsonl".split()
    trace_bench.main([what, *given])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["bench"], row["workload"], row["M"]) == (what, "layers.0.mlp", 4)
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == row


def test_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 40)
    given = f"--text {tmp_path}/text.txt --tokens 64 --length 32 --out {tmp_path}/trace.npz".split()
    trace_bench.main(["record", "sample", *given])
    trace = traces.load(tmp_path / "trace.npz", hidden=0)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert trace.tokens == 64 and [layer["mean"] for layer in said] == pytest.approx([c.mean() for c in trace.counts])
