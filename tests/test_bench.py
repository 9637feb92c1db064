"""Workloads have the sparsity they promise; benchmarks check before they time and refuse wrong results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import time
import weakref
from typing import Any

import pytest
import torch

from short_benchmarks import not_timed, timed_shortly
from twell import nn
from twell.ops import backends
from twell.ops import functional as ops
from twell.plan import Plan
from twell.workbench.bench import cases, ffn, graphs, timing
from twell.workbench.cli.bench_table import print_rows

__all__ = ["not_timed", "timed_shortly"]  # fixtures


@pytest.mark.parametrize("name", ["iid70", "skew10", "skew100"])
def test_workload_has_its_mean_count(name: str) -> None:
    inputs = cases.make(name, 2048, D=64, F=512, dtype=torch.float32)
    active = (inputs.x @ inputs.w_gate.T > 0).sum(1).float()
    assert active.mean() == pytest.approx(cases.get_workload(name).mean_nnz, rel=0.1)


def test_skewed_workload_is_uneven_and_has_dead_neurons() -> None:
    inputs = cases.make("skew29", 4096, D=64, F=1024, dtype=torch.float32)
    fired = (inputs.x @ inputs.w_gate.T > 0).sum(0).sort(descending=True).values
    assert fired[:102].sum() > 0.5 * fired.sum()
    assert (fired == 0).float().mean() > 0.25


def test_uniform_workload_fires_alike_at_any_count() -> None:
    inputs = cases.make("iid75", 4096, D=128, F=512, dtype=torch.float32)
    fired = (inputs.x @ inputs.w_gate.T > 0).float().mean(0)
    assert fired.min() > 0.5 * 75 / 512 and fired.max() < 1.5 * 75 / 512


def test_half_dense_workload_reaches_its_count_despite_the_clip() -> None:
    inputs = cases.make(dataclasses.replace(cases.get_workload("skew29"), mean_nnz=256), 512, D=128, F=512)
    active = (inputs.x.float() @ inputs.w_gate.float().T > 0).sum(1).float()
    assert active.mean() == pytest.approx(256, rel=0.05)


def test_weights_do_not_depend_on_the_token_count_and_seeds_differ() -> None:
    small, large = cases.make("skew10", 3, 32, 64), cases.make("skew10", 5000, 32, 64)
    assert torch.equal(small.w_gate, large.w_gate) and torch.equal(small.w_up, large.w_up)
    assert torch.equal(small.x, large.x[:3])
    assert not torch.equal(small.w_up, cases.make("skew10", 3, 32, 64, seed=1).w_up)


@pytest.mark.parametrize("name", ["nonsense", "skew", "skew0", "iid-3", "iid3.5"])
def test_unknown_workload_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown workload .*: expected iidN or skewN"):
        cases.get_workload(name)


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 64 neurons"):
        cases.make("skew100", 4, 32, 64)
    with pytest.raises(ValueError, match="expected M >= 1"):
        cases.make("skew10", 0, 32, 64)


@pytest.mark.parametrize("gated", [True, False])
def test_a_row_holds_what_a_reader_needs(gated: bool) -> None:
    todo = [ffn.Case(workload="skew10", M=m, D=64, F=256, gated=gated, called=True) for m in (1, 70)]
    rows = list(ffn.run(todo, seconds=0.0))
    assert [row["M"] for row in rows] == [1, 70]
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        assert set(row["dense_ms"]) == set(row["sparse_ms"]) == {"p20", "p50", "p80"}
        assert row["dense_ms"]["p20"] <= row["dense_ms"]["p50"] <= row["dense_ms"]["p80"]
        assert row["speedup"] == round(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], 3)
        assert row["speedup_frozen"] == round(row["dense_ms"]["p50"] / row["frozen_ms"]["p50"], 3)
        called = row["called_ms"]
        assert list(called) == list(row["host_us"]) == ["dense", "sparse", "frozen"]
        assert row["speedup_called"] == round(called["dense"]["p50"] / called["sparse"]["p50"], 3)
        assert row["speedup_called_frozen"] == round(called["dense"]["p50"] / called["frozen"]["p50"], 3)
        assert min(row["host_us"].values()) > 0 and row["called_layers"] == 4
        assert list(row["error"]) == ["dense", "sparse", "frozen"]
        assert row["kind"] == ("gated" if gated else "plain")
        assert {"commit", "versions", "cpu", "threads", "device", "time", "error", "mean_active"} <= set(row)


def test_where_dense_is_compiled_sparse_is_called_compiled_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU; by a backend that needs no compiler."""
    compiled: list[dict[str, Any]] = []
    original = torch.compile

    def without_inductor(module: Any, **options: Any) -> Any:
        compiled.append(options)
        return original(module, **options, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", without_inductor)
    monkeypatch.setattr(ffn, "_compiles", lambda device: True)
    (row,) = ffn.run([ffn.Case(workload="skew10", M=4, D=64, F=256, called=True)], seconds=0.0)
    assert list(row["called_ms"]) == ["dense", "compiled", "sparse", "frozen", "sparse_compiled"]
    fastest = min(row["called_ms"][name]["p50"] for name in ("dense", "compiled"))
    assert row["speedup_called"] == pytest.approx(fastest / row["called_ms"]["sparse"]["p50"], abs=1e-3)
    assert row["speedup"] == pytest.approx(
        min(row["dense_ms"]["p50"], row["compiled_ms"]["p50"]) / row["sparse_ms"]["p50"], abs=1e-3
    )
    assert row["speedup_called_eager"] > 0 and row["speedup_called_compiled"] > 0
    assert compiled == [{"fullgraph": True, "dynamic": False}] * (1 + 4 + 4)  # one timed alone, four of both as called
    print_rows([row | {"dense_ms": {"p20": 1.0, "p50": 2.0, "p80": 1200.0}}])
    assert "2.00 ±>100%" in capsys.readouterr().out


def test_on_a_cpu_calls_are_timed_where_asked_for() -> None:
    (row,) = ffn.run([ffn.Case(workload="skew10", M=4, D=64, F=256)], seconds=0.0)
    assert "called_ms" not in row and row["speedup_frozen"] > 0
    assert ffn.Case(workload="skew10", M=4, device="cuda").is_called
    assert not ffn.Case(workload="skew10", M=4, device="cuda", called=False).is_called


@pytest.mark.parametrize("way", ["sparse", "frozen"])
def test_wrong_results_are_not_timed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = nn.SparseFFNBase._ffn

    def wrong(self: Any, *args: Any) -> Any:
        return right(self, *args) * (1.01 if (self.frozen is not None) == (way == "frozen") else 1.0)

    monkeypatch.setattr(nn.SparseFFNBase, "_ffn", wrong)
    monkeypatch.setattr(timing, "compare", lambda *a, **k: pytest.fail("timed a wrong result"))
    with pytest.raises(ffn.WrongResult, match="no speedup is reported"):
        list(ffn.run([ffn.Case(workload="skew10", M=8, D=64, F=256)]))


def test_layers_are_as_sparsify_leaves_them_and_share_nothing_with_each_other() -> None:
    inputs = cases.make("skew10", 4, 64, 256, dtype=torch.float32)
    layers = ffn.make_layers(ffn.Case(workload="skew10", M=4, D=64, F=256), inputs, None, 3)
    for dense, sparse, frozen in zip(layers["dense"], layers["sparse"], layers["frozen"], strict=True):
        assert dense.down_proj.weight.is_contiguous() and sparse.down_proj.weight.t().is_contiguous()
        assert not dense.training and not sparse.training and sparse.frozen is None and frozen.frozen is not None
        assert sparse.why_called() is None and not sparse._plans_itself
    for name, each in layers.items():
        addresses = {w.data_ptr() for layer in each for w in layer.parameters()}
        assert len(addresses) == 9, name


def test_as_many_layers_as_outgrow_the_l2_cache() -> None:
    gpu, of_a_layer = torch.device("cuda"), 3 * 2048 * 5632 * 2
    n = ffn.called_layers(of_a_layer, gpu)
    assert n == 7 and n * of_a_layer / 6 > 60e6  # the int8 gate is a sixth
    assert ffn.called_layers(3 * 4096 * 14336 * 2, gpu) == 4 and ffn.called_layers(of_a_layer, torch.device("cpu")) == 4


@pytest.mark.skipif(torch.cuda.is_available() or not backends._HAS_TRITON, reason="the interpreter runs without a GPU")
@pytest.mark.usefixtures("not_timed")
def test_a_row_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from interpreted import shorten_lists

    shorten_lists(monkeypatch.setattr)
    plan = Plan(n_neurons=64, hot=torch.arange(16), cap=16, min_tokens=0, few_tokens_captured=4, predicted=1.5)
    monkeypatch.setattr(ffn, "plan_for", lambda *_, **__: plan)
    monkeypatch.setattr(ffn, "called_layers", lambda *_: 1)
    kind: dict[str, Any] = {"D": 16, "F": 64, "backend": "triton", "called": True}
    (row,) = ffn.run([ffn.Case(workload="skew3", M=2, **kind)], seconds=0)
    tokens = {"min_tokens": 0, "min_tokens_captured": 0, "few_tokens": 0, "few_tokens_captured": 4, "union_tokens": 0}
    assert row["backend"] == "triton" and row["plan"] == {"hot": 16, "cap": 16, **tokens, "predicted": 1.5}
    assert row["frozen_bytes"] == 4 * 16 * (3 * 16 + 48)  # gate, up and down of hot ones, gate of cold ones
    assert max(row["error"].values()) < 2e-6
    assert {"layout", "cold gate", "tail", "heavy tokens"} <= set(row["parts_ms"])


def test_thresholds_of_graphs_are_tried_before_a_capture() -> None:
    layer = nn.GatedSparseFFN(32, 64)
    plan = Plan(n_neurons=64, hot=torch.arange(32), cap=16, min_tokens=4096, min_tokens_captured=8)
    layer.set_plan(plan)
    eager, captured = layer._plan_eager, layer._plan_captured
    layer._plan_tokens = [plan.tokens(captured=False), plan.tokens(captured=True)]  # as on a GPU
    with graphs.as_if_captured(torch.nn.Sequential(layer)):
        assert layer._plan_eager is captured and layer._plan_tokens == [(0, 0, 8), (0, 0, 8)]
    assert layer._plan_eager is eager is not captured and layer._plan_tokens == [(0, 0, 4096), (0, 0, 8)]


@pytest.mark.parametrize("wrong", [float("nan"), 5.0])
def test_one_wrong_row_outside_the_sample_is_found(wrong: float) -> None:
    inputs = cases.make("skew10", 1000, 64, 256, dtype=torch.float32)
    y = ops.gated_ffn(inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)
    bad = y.clone()
    bad[1] += wrong  # rows 0, 3, 6, ... are the sample
    ffn.check(inputs.x, inputs, True, y, y)
    with pytest.raises(ffn.WrongResult):
        ffn.check(inputs.x, inputs, True, y, bad)


def test_compare_takes_turns_and_respects_bounds() -> None:
    calls: list[str] = []
    spreads = timing.compare(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0.0, min_repeats=3, warmups=1
    )
    assert calls == ["a", "b"] + ["a", "b"] * 3
    assert set(spreads) == {"a", "b"}


def test_rounds_of_calls_alternate_and_go_through_all_layers() -> None:
    calls: list[str] = []
    ways = {name: [functools.partial(calls.append, f"{name}{i}") for i in range(n)] for name, n in (("a", 2), ("b", 3))}
    spreads = timing.as_called(ways, seconds=0.0, device=torch.device("cpu"))
    assert set(spreads) == {"a", "b"} and all(s.p20 <= s.p50 <= s.p80 for s in spreads.values())
    for name, n in (("a", 2), ("b", 3)):
        own = [call for call in calls if call.startswith(name)]
        assert own == [f"{name}{i % n}" for i in range(len(own))]
    turns = "".join(name for name, _ in itertools.groupby(call[0] for call in calls))
    assert turns == "ab" + "ab" * 2  # two to warm up, two rounds


def test_a_slow_spell_does_not_count() -> None:
    times = {"a": [1.0, 3.0, 1.2, 1.1, 3.0, 3.1], "b": [2.0, 2.1, 2.2, 2.4, 5.0, 5.5]}
    spreads = timing.quiet(times)  # of rounds 0, 2 and 3
    assert (spreads["a"].p50, spreads["b"].p50) == (1.1, 2.2)


def test_a_round_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUND_MS", 5.0)
    lengths: list[int] = []
    right = timing._round_ms

    def watched(cycle: Any, n: int, device: torch.device) -> float:
        lengths.append(n)
        return right(cycle, n, device)

    monkeypatch.setattr(timing, "_round_ms", watched)
    spreads = timing.as_called({"a": [lambda: time.sleep(0.001)]}, seconds=0.0, device=torch.device("cpu"))
    assert lengths[:2] == [2, 1] and lengths[2:] and min(lengths[2:]) >= 2
    assert spreads["a"].p50 >= 1


def test_host_time_is_of_the_call_alone() -> None:
    order: list[str] = []
    found = timing.host_us(
        {"a": [lambda: order.append("a")]}, device=torch.device("cpu"), after=lambda: time.sleep(0.01)
    )
    assert len(order) == 2 + 2 and found["a"] < 5000


def test_graphs_are_timed_in_turn() -> None:
    run = graphs.in_turn([lambda i=i: torch.tensor(i) for i in range(3)])
    assert [int(run()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_what_a_graph_reads_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None: ...

    for name, fake in (("CUDAGraph", Graph), ("graph", contextlib.nullcontext), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    weight = torch.ones(3)
    alive = weakref.ref(weight)
    replay = graphs.replayed([functools.partial(torch.add, weight, 1)])
    del weight
    gc.collect()
    assert alive() is not None and replay().tolist() == [2, 2, 2]
    del replay
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("timed", ["compare", "as_called"])
def test_a_result_that_changes_while_it_is_timed_is_not_reported(timed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, right, wrong = getattr(timing, timed), nn.SparseFFNBase._ffn, []

    def spoil(*args: Any, **kwargs: Any) -> Any:
        wrong.append(True)
        return measure(*args, **kwargs)

    monkeypatch.setattr(timing, timed, spoil)
    monkeypatch.setattr(nn.SparseFFNBase, "_ffn", lambda *args: right(*args) * (1.01 if wrong else 1.0))
    with pytest.raises(ffn.WrongResult, match="before it was timed"):
        list(ffn.run([ffn.Case(workload="skew10", M=8, D=64, F=256, called=True)], seconds=0.0))
