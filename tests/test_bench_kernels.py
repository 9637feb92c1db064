"""Benchmarks and tuning of the Triton kernels at tiny shapes, in Triton's interpreter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import tune_few_tiles as tune_few
import tune_tiles as tuning
from interpreted import shorten_lists

pytest.importorskip("triton")

from twell import gpu
from twell.gpu.decode import few, few_tiles
from twell.gpu.shared import tail, tiles
from twell.nn.quantize import quantize_
from twell.plan import costs_for
from twell.workbench.bench import cases, timing
from twell.workbench.bench import ffn as ffn_bench
from twell.workbench.bench import model as model_bench

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

f32 = torch.float32


@pytest.fixture(autouse=True)
def few_tokens_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.plan.choose._MIN_TOKENS", 0)
    monkeypatch.setattr("twell.plan.costs._COSTS", {90: costs_for(torch.device("cpu"))._replace(batch=0)})
    monkeypatch.setattr(cases, "_TOKEN_BLOCK", 256)
    shorten_lists(monkeypatch.setattr)


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and its times mean nothing."""
    compare, once = timing.compare, {"seconds": 0, "min_repeats": 1, "warmups": 0}
    monkeypatch.setattr(timing, "compare", lambda runs, **options: compare(runs, **options | once))
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "ROUND_MS", 0.0)
    monkeypatch.setattr(timing, "host_us", functools.partial(timing.host_us, repeats=1))


@pytest.mark.usefixtures("timed_once")
def test_bench_times_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffn_bench.Case, "is_sparse_fp8", property(lambda case: case.is_fp8))
    monkeypatch.setattr(ffn_bench, "quantize_", functools.partial(quantize_, emulate=True))
    case = ffn_bench.Case(workload="skew10", M=4, D=32, F=2048, backend="triton", dtype=f32, fp8=True)
    (row,) = ffn_bench.run([case], seconds=0)
    assert row["plan"]["hot"] % 256 == 0 and row["plan_fp8"].keys() == row["plan"].keys()
    assert row["plan_fp8"] != row["plan"]
    assert {"dense gate", "cold gate", "tail", "heavy", "heavy tokens"} <= row["parts_ms"].keys()
    assert row["error"]["sparse"] < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("timed_once")
def test_tune_tries_candidates_and_checks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiles.GateTile(16, 128, 16, 4, 2)
    monkeypatch.setattr(tuning, "MAX_FEW_TOKENS", 0)
    monkeypatch.setattr(tuning, "gate_candidates", lambda: [(other, False), (other, True)])
    monkeypatch.setattr(tuning, "tail_candidates", lambda: [tiles.RowTile(2, 1, 1)])
    monkeypatch.setattr(tuning, "heavy_candidates", lambda: [tiles.GateTile(16, 16, 24, 4, 2)])  # no power of 2
    arguments = ("skew10", 4, 32, 2048, f32, torch.device("cpu"))
    seen: list[tuple[int, int]] = []
    trials = list(tuning.tune(*arguments, progress=lambda tried, total: seen.append((tried, total))))
    assert seen[-1] == (6, 6)  # candidates, with the one that cannot run
    assert [t.kernel for t in trials] == ["tail", "tail", "gate", "gate", "gate", "hot", "hot", "hot", "heavy"]
    assert all(t.ms > 0 for t in trials)
    assert [t.kernel for t in tuning.tune(*arguments, only=["tail"])] == ["tail", "tail"]
    with pytest.raises(ValueError, match="unknown kernel 'up'"):
        next(tuning.tune(*arguments, only=["up"]))
    right = tail.write_tail

    def wrong(y: Tensor, *args: object, tile: tiles.RowTile, **kwargs: object) -> object:
        result = right(y, *args, tile=tile, **kwargs)
        if tile.neurons == 2:
            y += 1
        return result

    monkeypatch.setattr(tail, "write_tail", wrong)
    with pytest.raises(RuntimeError, match="the tail kernel gives another result"):
        list(tuning.tune(*arguments, only=["tail"]))


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        hidden_act="relu",
    )
    return LlamaForCausalLM(config).eval()


def bench_of(workload: str) -> dict[str, Any]:
    model = tiny_llama()
    ids = torch.randint(model.config.vocab_size, (2, 8))
    return model_bench.measure(model_bench.synthetic(model, workload, (2, 8), backend="triton"), ids, seconds=0)


@pytest.mark.usefixtures("timed_once")
def test_bench_of_a_model() -> None:
    row = bench_of("skew10")
    assert row["layers"] == 2 and row["difference"] < 1e-3 and len(row["plans"]) == 1
    assert row["plans"][0]["hot"] < 2048  # the sparse model ran sparsely
    assert row["speedup"] == pytest.approx(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], abs=1e-3)


def test_a_model_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu.forward
    monkeypatch.setattr(gpu, "forward", lambda *args: 1.5 * right(*args))
    with pytest.raises(ffn_bench.WrongResult, match="logits differ"):
        bench_of("skew10")


@pytest.mark.usefixtures("timed_once")
def test_tune_of_few_tokens_tries_tiles_and_checks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons, sums = few_tiles.NeuronTile(32, 16, 4, 2), few_tiles.SumTile(16, 4, 2, BW=4)
    impossible = few_tiles.NeuronTile(24, 16, 4, 2)
    monkeypatch.setattr(tune_few, "neuron_candidates", lambda *_, **__: [neurons, impossible])
    monkeypatch.setattr(tune_few, "sum_candidates", lambda **_: [sums])
    arguments = ("skew10", 4, 32, 96, f32, torch.device("cpu"))
    seen: list[tuple[int, int]] = []
    trials = list(tuning.tune(*arguments, progress=lambda tried, total: seen.append((tried, total))))
    usual = few_tiles.tiles_of(torch.empty(1, 16), 16)
    assert [(t.kernel, t.tile) for t in trials] == [
        ("neurons", usual[0]),
        ("neurons", neurons),
        ("sums", usual[1]),
        ("sums", sums),
    ]
    assert all(t.ms > 0 for t in trials) and seen[-1] == (3, 3)
    with pytest.raises(ValueError, match="unknown kernel 'tail': 4 tokens have neurons, sums"):
        next(tuning.tune(*arguments, only=["tail"]))
    forward = few.forward

    def wrong(*a: object, settled: bool) -> Tensor:
        return forward(*a, settled=settled) + (a[3][1] == sums)

    monkeypatch.setattr(few, "forward", wrong)
    with pytest.raises(RuntimeError, match="another result with"):
        list(tuning.tune(*arguments, only=["sums"]))
