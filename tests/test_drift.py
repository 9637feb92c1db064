"""Plans that no longer suit the text."""

from __future__ import annotations

import copy
import dataclasses
import threading
from unittest import mock

import pytest
import torch

from twell import reference
from twell.nn import GatedSparseFFN, neuron_major_
from twell.plan import Plan, choose_plan, costs_for, gain_left
from twell.plan.drift import EVERY, LAG, Drift
from twell.reference import Weights
from twell.workbench.bench import cases

COSTS = costs_for(torch.device("cpu"))


def a_plan() -> Plan:
    plan = choose_plan(torch.tensor([500] * 256 + [2] * 5376), 1000, COSTS)
    assert plan.tail is not None and not plan.is_dense
    return plan


def run(drift: Drift, calls: int, pairs: int, heavy: int, tokens: int = 1000) -> list[int]:
    """The calls after which it is time to plan anew."""
    found = []
    for call in range(calls):
        room = drift.room(torch.device("cpu"))
        if room is not None:
            assert room.tolist() == [0, 0]
            drift.send(room + torch.tensor([pairs, heavy]), tokens)
        elif drift.is_too_far():
            found.append(call)
    return found


@pytest.mark.parametrize(
    ("pairs", "heavy", "is_far"),
    [(10752, 0, False), (15000, 0, False), (60000, 0, True), (10752, 100, False), (10752, 500, True), (0, 0, False)],
)
def test_plans_are_replaced_when_half_of_the_gain_is_lost(pairs: int, heavy: int, is_far: bool) -> None:
    found = run(Drift(a_plan(), COSTS, gated=True), 2 * EVERY, pairs, heavy)
    assert found == ([LAG, EVERY + LAG] if is_far else [])


def test_gain_left() -> None:
    plan = a_plan()
    assert plan.tail is not None and plan.predicted is not None
    assert gain_left(plan, COSTS, plan.tail, 0.0, gated=True) == 1
    dense, cost = 3 * 5632, 3 * 5632 / plan.predicted
    more = (dense - cost) / COSTS.gather  # pairs that make it as slow as dense
    assert gain_left(plan, COSTS, plan.tail + more, 0.0, gated=True) == pytest.approx(0, abs=1e-9)
    by_hand = dataclasses.replace(plan, predicted=None, tail=None)
    assert gain_left(by_hand, COSTS, 1e6, 1.0, gated=True) == 1  # such a plan stays


def test_it_looks_less_often_after_every_new_plan() -> None:
    found = run(Drift(a_plan(), COSTS, gated=True, replans=2), 8 * EVERY, 60000, 0)
    assert found == [LAG, 4 * EVERY + LAG]


def test_several_threads_keep_their_plan() -> None:
    drift = Drift(a_plan(), COSTS, gated=True)
    assert drift.room(torch.device("cpu")) is not None
    thread = threading.Thread(target=drift.room, args=(torch.device("cpu"),))
    thread.start()
    thread.join()
    assert run(drift, 4 * EVERY, 60000, 0) == []


@pytest.mark.parametrize("how", ["plain", "frozen", "captured"])
def test_a_frozen_layer_in_a_graph_keeps_its_plan(how: str) -> None:
    layer = GatedSparseFFN(64, 256).eval()
    layer.set_plan(dataclasses.replace(a_plan(), n_neurons=256, hot=torch.arange(16)))
    if how != "plain":
        layer.freeze()
        assert layer.frozen is not None
        layer.frozen.is_captured = how == "captured"
    layer._plan_anew()
    assert layer._plans_itself == (how != "captured")
    layer._plans_itself = True  # as if the graph had come after
    if how == "captured":
        with mock.patch("twell.ops.backends.choose_backend", lambda *_: "triton"):
            layer._look_at(torch.randn(300, 64))
        assert not layer._plans_itself


def test_graphs_keep_the_plans_they_read() -> None:
    layer = GatedSparseFFN(64, 256)
    first, second = object(), object()
    for plan in (first, first, second):
        layer._keep_for_graphs(plan)
    assert layer._graph_plans == [first, second] and copy.deepcopy(layer)._graph_plans == []


def test_training_plans_are_the_planners() -> None:
    counts = torch.tensor([500] * 256 + [2] * 5376)
    plan = choose_plan(counts, 1000, costs_for(torch.device("cpu"), training=True))
    assert not plan.is_dense and plan.tail is None


@pytest.mark.gpu
@torch.inference_mode()
def test_a_layer_plans_anew_when_the_text_changes() -> None:
    bf16 = torch.bfloat16
    sparse, dense = (cases.make(name, 4096, dtype=bf16, device="cuda", seed=1) for name in ("skew29", "skew2800"))
    with torch.inference_mode(False):
        layer = GatedSparseFFN(2048, 5632, device="cuda", dtype=bf16).eval().requires_grad_(False)
        weights = [(layer.gate_proj, "w_gate"), (layer.up_proj, "w_up"), (layer.down_proj, "w_down")]
        for linear, name in weights:
            linear.weight.copy_(getattr(sparse, name))
        neuron_major_(layer.down_proj)
    layer(sparse.x)
    first = layer.plan
    assert first is not None and not first.is_dense
    for _ in range(2 * EVERY):
        layer(sparse.x)
    assert layer.plan is first
    assert copy.deepcopy(layer)._drift is not None
    with torch.inference_mode(False):  # other text: here, another gate
        layer.gate_proj.weight.copy_(dense.w_gate)
    w = Weights(dense.w_gate, sparse.w_up, sparse.w_down)
    truth = reference.forward(dense.x.double(), w.to(torch.float64), want_stats=False).y
    calls = 0
    while layer.plan is first and calls < 2 * EVERY + LAG:
        y, calls = layer(dense.x), calls + 1
        assert (y.double() - truth).norm() <= 1e-2 * truth.norm()
    assert layer.plan is not None and len(layer.plan.hot) > 2 * len(first.hot) and calls <= EVERY + LAG + 3
