"""Workloads have the sparsity they promise; benchmarks check before they time and refuse wrong results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import weakref
from typing import Any

import pytest
import torch

from twell import ops
from twell.bench import cases, ffn, timing


@pytest.mark.parametrize("name", ["iid29", "iid70", "skew10", "skew100"])
def test_workload_has_its_mean_count(name: str) -> None:
    inputs = cases.make(name, 1024, D=256, F=1024, dtype=torch.float32)
    active = (inputs.x @ inputs.w_gate.T > 0).sum(1).float()
    assert active.mean() == pytest.approx(cases.get_workload(name).mean_nnz, rel=0.1)


def test_skewed_workload_is_uneven_and_has_dead_neurons() -> None:
    inputs = cases.make("skew29", 4096, D=256, F=2048, dtype=torch.float32)
    fired = (inputs.x @ inputs.w_gate.T > 0).sum(0).sort(descending=True).values
    assert fired[:205].sum() > 0.55 * fired.sum()
    assert (fired == 0).float().mean() > 0.25


def test_half_dense_workload_reaches_its_count_despite_the_clip() -> None:
    inputs = cases.make(dataclasses.replace(cases.get_workload("skew29"), mean_nnz=256), 512, D=128, F=512)
    active = (inputs.x.float() @ inputs.w_gate.float().T > 0).sum(1).float()
    assert active.mean() == pytest.approx(256, rel=0.05)


def test_weights_do_not_depend_on_the_token_count_and_seeds_differ() -> None:
    small, large = cases.make("skew29", 3, 64, 256), cases.make("skew29", 300, 64, 256)
    assert torch.equal(small.w_gate, large.w_gate)
    assert torch.equal(small.x, large.x[:3])
    assert not torch.equal(small.w_up, cases.make("skew29", 3, 64, 256, seed=1).w_up)


def test_more_than_the_calibration_tokens_keep_the_weights() -> None:
    few, many = cases.make("skew10", 1, 32, 64), cases.make("skew10", 5000, 32, 64)
    assert torch.equal(few.w_gate, many.w_gate)
    assert torch.equal(few.w_up, many.w_up)


def test_uniform_workload_fires_alike_at_any_count() -> None:
    inputs = cases.make("iid150", 4096, D=256, F=1024, dtype=torch.float32)
    fired = (inputs.x @ inputs.w_gate.T > 0).float().mean(0)
    assert fired.min() > 0.5 * 150 / 1024
    assert fired.max() < 1.5 * 150 / 1024


@pytest.mark.parametrize("name", ["nonsense", "skew", "skew0", "skew-3", "iid", "iid0", "iid-3", "iid3.5"])
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
    todo = [ffn.Case(workload="skew10", M=m, D=64, F=256, gated=gated) for m in (1, 70)]
    rows = list(ffn.run(todo, seconds=0.0))
    assert [row["M"] for row in rows] == [1, 70]
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        assert set(row["dense_ms"]) == set(row["sparse_ms"]) == {"p20", "p50", "p80"}
        assert row["dense_ms"]["p20"] <= row["dense_ms"]["p50"] <= row["dense_ms"]["p80"]
        assert row["speedup"] == round(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], 3)
        assert row["kind"] == ("gated" if gated else "plain")
        assert {"commit", "versions", "cpu", "threads", "device", "time", "error", "mean_active"} <= set(row)


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gated_ffn
    monkeypatch.setattr(ops, "gated_ffn", lambda *a, **k: right(*a, **k) * 1.01)
    monkeypatch.setattr(timing, "compare", lambda *a, **k: pytest.fail("timed a wrong result"))
    with pytest.raises(ffn.WrongResult, match="no speedup is reported"):
        list(ffn.run([ffn.Case(workload="skew10", M=8, D=64, F=256)]))


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


def test_graphs_are_timed_in_turn() -> None:
    run = ffn.in_turn([lambda i=i: torch.tensor(i) for i in range(3)])
    assert [int(run()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_what_a_graph_reads_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None: ...

    for name, fake in (("CUDAGraph", Graph), ("graph", contextlib.nullcontext), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    weight = torch.ones(3)
    alive = weakref.ref(weight)
    replay = ffn.replayed([functools.partial(torch.add, weight, 1)])
    del weight
    gc.collect()
    assert alive() is not None and replay().tolist() == [2, 2, 2]
    del replay
    gc.collect()
    assert alive() is None


def test_a_result_that_changes_while_it_is_timed_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    compare, right, wrong = timing.compare, ops.gated_ffn, []

    def spoil(*args: Any, **kwargs: Any) -> Any:
        wrong.append(True)
        return compare(*args, **kwargs)

    monkeypatch.setattr(timing, "compare", spoil)
    monkeypatch.setattr(ops, "gated_ffn", lambda *a, **k: right(*a, **k) * (1.01 if wrong else 1.0))
    with pytest.raises(ffn.WrongResult, match="before it was timed"):
        list(ffn.run([ffn.Case(workload="skew10", M=8, D=64, F=256)], seconds=0.0))
