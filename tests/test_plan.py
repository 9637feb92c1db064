"""Plans: hot and heavy follow from frequencies and costs; what is saved and what operations take keep everything."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twell.plan import Costs, Plan, choose_plan, costs_are, costs_for, dense_plan, sizes_of, tokens_of, tuned
from twell.plan.choose import (
    _MIN_GAIN,
    _MIN_TOKENS,
    _MIN_TOKENS_CAPTURED,
    _MIN_TOKENS_TRAINING,
    _MIN_TOKENS_TRAINING_CAPTURED,
    FEW_COSTS,
    FEW_GATE,
)
from twell.plan.plan import _TOKENS
from twell.workbench.bench import cases

COSTS = Costs(gate=1.0, down=1.0, gather=200.0, heavy=1.5, token=0.0, hot=0.0, batch=1e6)


def counts_of(*groups: tuple[int, int]) -> torch.Tensor:
    """(neurons, times each fired) ..., shuffled by a fixed permutation."""
    counts = torch.cat([torch.full((n,), times) for n, times in groups])
    return counts[torch.randperm(len(counts), generator=torch.Generator().manual_seed(0))]


def test_frequent_neurons_are_hot() -> None:
    counts = counts_of((256, 500), (1024, 9), (768, 0))
    plan = choose_plan(counts, 1000, COSTS)  # hot above 1 % of the tokens
    assert len(plan.hot) == 256
    assert (counts[plan.hot] == 500).all()
    assert plan.cap == 48  # the multiple of 16 nearest to 3 * 1.5 * (2048 - 256) / 200 = 40.3
    cost = 3 * 256 + 1792 + 200 * 1024 * 0.009
    assert plan.predicted == pytest.approx(3 * 2048 / cost)


@pytest.mark.parametrize(("F", "expected"), [(2048, 256), (2000, 208), (2064, 272)])
def test_cold_neurons_fill_whole_tiles(F: int, expected: int) -> None:
    plan = choose_plan(counts_of((130, 500), (70, 5), (F - 200, 1)), 1000, COSTS)
    assert len(plan.hot) == expected
    assert len(set(plan.hot.tolist())) == expected


def test_long_tokens_start_first() -> None:
    assert choose_plan(counts_of((512, 20), (1536, 1)), 1000, COSTS).first == 16  # nearest to 8 + 2 * 1.5


def test_a_plain_ffn_gathers_one_row_and_saves_one_projection() -> None:
    counts = counts_of((256, 500), (1792, 2))
    gated, plain = (choose_plan(counts, 1000, COSTS, gated=g) for g in (True, False))
    assert gated.predicted == pytest.approx(3 * 2048 / (3 * 256 + 1792 + 200 * 1792 * 0.002))
    assert plain.predicted == pytest.approx(2 * 2048 / (2 * 256 + 1792 + 100 * 1792 * 0.002))
    assert plain.cap == 48  # nearest to 2 * 1.5 * 1792 / 100


def test_training_takes_the_smallest_hot_set_that_is_nearly_as_fast() -> None:
    counts = counts_of((256, 500), (256, 29), (1536, 1))  # as hot neurons the second group saves 0.2 % of the time
    costs = COSTS._replace(dense=3.0)  # forward and backward
    assert len(choose_plan(counts, 1000, costs).hot) == 256
    assert len(choose_plan(counts_of((256, 500), (256, 40), (1536, 1)), 1000, costs).hot) == 512


@pytest.mark.parametrize("times", [12, 500, 1000])
def test_layers_run_densely_if_sparsity_does_not_pay(times: int) -> None:
    plan = choose_plan(counts_of((2048, times)), 1000, COSTS)
    assert plan.is_dense
    assert plan.predicted == 1


def test_small_batches_do_not_pay() -> None:
    counts = counts_of((256, 500), (1792, 2))
    plan = choose_plan(counts, 1000, COSTS)
    saved = 3 * 2048 - (3 * 256 + 1792 + 200 * 1792 * 0.002)
    least = _MIN_TOKENS, _MIN_TOKENS_CAPTURED  # since 1e6 / saved is less
    assert (plan.min_tokens, plan.min_tokens_captured) == least
    costly = COSTS._replace(batch=2e7)
    assert choose_plan(counts, 1000, costly).min_tokens == int(2e7 / saved)
    assert choose_plan(counts, 1000, costly, width=1024).min_tokens_captured == int(4e7 / saved)
    training = choose_plan(counts, 1000, costs_for(torch.device("cpu"), training=True))
    least = _MIN_TOKENS_TRAINING, _MIN_TOKENS_TRAINING_CAPTURED
    assert (training.min_tokens, training.min_tokens_captured) >= least


def test_training_plans_for_a_longer_tail_and_keeps_short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_for(torch.device("cpu"), training=True)
    frequency = 0.2 * torch.exp(-torch.arange(4096) / 500)
    counts = (frequency * 1e6).round()
    plan = choose_plan(counts, 1_000_000, costs)
    tail = frequency[len(plan.hot) :].sum().item()
    assert plan.cap == 16 * math.ceil((6 + 4 * tail) / 16) < costs.heavy * 2 * (4096 - len(plan.hot)) / costs.gather
    monkeypatch.setattr("twell.plan.choose._LATER_TAIL", 1.0)
    assert len(choose_plan(counts, 1_000_000, costs).hot) < len(plan.hot)
    monkeypatch.setattr("twell.plan.choose._MEMORY_MARGIN", 0.0)
    fastest = choose_plan(counts, 1_000_000, costs)
    assert (fastest.predicted or 0) > (plan.predicted or 0) * 0.99  # what it costs where the text stays the same


def test_hot_neurons_must_pay_for_their_second_pass_over_y() -> None:
    counts = counts_of((256, 20), (1792, 0))
    assert len(choose_plan(counts, 1000, COSTS).hot) == 256
    assert len(choose_plan(counts, 1000, COSTS._replace(hot=1000.0)).hot) == 0


def test_a_silent_layer_has_no_hot_neurons() -> None:
    plan = choose_plan(torch.zeros(512), 10, COSTS)
    assert len(plan.hot) == 0 and not plan.is_dense
    assert plan.predicted == pytest.approx(3)


def test_counts_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        choose_plan(torch.zeros(512), 0, COSTS)


def test_repr_of_plans() -> None:
    assert repr(dense_plan(16)) == "Plan(dense, 16 neurons)"
    plan = Plan(n_neurons=512, hot=torch.arange(128), cap=9, predicted=1.5)
    assert repr(plan) == (
        f"Plan(128 of 512 neurons hot, tokens long or heavy above 9, from {_MIN_TOKENS} tokens on, predicted 1.50x)"
    )
    plan = Plan(n_neurons=16, hot=torch.arange(2), cap=9, min_tokens=7, min_tokens_captured=5, few_tokens_captured=3)
    assert "from 7 tokens on (5 in graphs)" in repr(plan) and repr(plan).endswith(" (3 in graphs))")


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], processors: int, **memory: int):
    facts = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], multi_processor_count=processors, **memory
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    return torch.device("cuda")


H200_MEMORY = {"memory_clock_rate": 3_201_000, "memory_bus_width": 6144}


@pytest.mark.parametrize("training", [False, True])
def test_an_h200_uses_its_measured_costs(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    expected = costs_for(torch.device("cpu"), training=training)
    for memory in (H200_MEMORY, {}):  # whatever torch tells of its memory
        h200 = pretend(monkeypatch, "NVIDIA H200", (9, 0), 132, **memory)
        assert costs_for(h200, training=training) is expected
    assert costs_are(h200) == "measured costs of sm_90"


def test_other_hopper_gpus_scale_costs_by_processors_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = costs_for(torch.device("cpu"))
    pcie = {"memory_clock_rate": 1_593_000, "memory_bus_width": 5120}  # 2.04 TB/s
    h100 = pretend(monkeypatch, "NVIDIA H100 PCIe", (9, 0), 114, **pcie)
    scaled, slower = costs_for(h100), (114 / 132) / (2.03904 / 4.8)
    assert (scaled.gate, scaled.down, scaled.heavy, scaled.dense) == (*measured[:2], measured.heavy, 1.0)
    assert scaled.gather / measured.gather == pytest.approx(slower) == pytest.approx(scaled.token / measured.token)
    assert scaled.batch == pytest.approx(measured.batch * 114 / 132)
    assert "86% of its multiprocessors and 42% of its bandwidth: a guess" in costs_are(h100)
    untold = costs_for(pretend(monkeypatch, "NVIDIA H100", (9, 0), 114))  # where torch tells no bandwidth: the least
    assert untold.gather == pytest.approx(measured.gather * (114 / 132) / (2.0 / 4.8))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_gpus_that_were_not_measured_run_densely(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], training: bool
) -> None:
    device = pretend(monkeypatch, "another", capability, 108)
    for counts in (torch.zeros(5632), torch.full((5632,), 3.0)):
        plan = choose_plan(counts, 1000, costs_for(device, training=training))
        assert plan.is_dense and plan.few_tokens == 0
    assert costs_are(device).startswith("none, so layers run densely")


@pytest.mark.parametrize(
    ("hot", "numbers"),
    [
        ([3, 3], {}),
        ([14, 16], {}),
        ([-1, 0], {}),
        ([0, 1], {"cap": -1}),
        ([0, 1], {"first": -1}),
        ([0, 1], {"min_tokens": -1}),
        ([0, 1], {"min_tokens_captured": -1}),
        ([0, 1], {"few_tokens": -1}),
        ([0, 1], {"few_tokens_captured": -1}),
    ],
)
def test_plans_that_would_change_a_result_are_refused(hot: list[int], numbers: dict[str, int]) -> None:
    state = {"n_neurons": 16, "hot": torch.tensor(hot), "cap": 8} | numbers
    with pytest.raises(ValueError, match="a plan needs different hot neurons of 0 to 15 and numbers of at least 0"):
        Plan(**state)
    with pytest.raises(ValueError, match="a plan needs different hot neurons"):
        Plan.from_state_dict(state)


def test_numbers_too_large_for_a_shape_are_refused() -> None:
    for numbers in ({"n_neurons": 1 << 18}, {"cap": 1 << 18}, {"first": 1 << 18}):
        with pytest.raises(ValueError, match="less than 262,144"):
            Plan(**({"n_neurons": 16, "hot": torch.arange(2), "cap": 8} | numbers))


def test_an_odd_number_of_hot_neurons_is_refused() -> None:
    """Two neurons share a word of the gate."""
    with pytest.raises(ValueError, match="even number of hot neurons"):
        Plan(n_neurons=16, hot=torch.arange(3), cap=8)


# -- few tokens -------------------------------------------------------------------------------------------


def test_few_tokens_pay_while_few_neurons_fire_for_any_of_them() -> None:
    rare, often = torch.full((5632,), 3.0), torch.full((5632,), 100.0)  # of 1000 tokens
    assert choose_plan(rare, 1000, COSTS).few_tokens == 64  # 17 % of the neurons fire for one of 64
    assert choose_plan(often, 1000, COSTS).few_tokens == 4  # 34 % for one of four, 57 % for one of eight
    assert choose_plan(torch.full((5632,), 700.0), 1000, COSTS).few_tokens == 0
    uneven = torch.cat([torch.full((512,), 900.0), torch.full((5120,), 1.0)])
    assert choose_plan(uneven, 1000, COSTS).few_tokens == 64


def test_few_tokens_pay_for_every_smaller_batch() -> None:
    """A gathered row costs less for 64 tokens, and these neurons fire for any number of tokens."""
    always = torch.cat([torch.full((2600,), 999.0), torch.zeros(3032)])
    start, gather = FEW_COSTS[64]
    assert start + FEW_GATE * 5632 + 2 * gather * 2600 < 3 * 5632 / _MIN_GAIN  # 64 alone would pay
    assert choose_plan(always, 1000, COSTS).few_tokens == 0


def test_not_more_tokens_than_were_seen() -> None:
    assert [choose_plan(torch.zeros(5632), n, COSTS).few_tokens for n in (1, 3, 40, 64, 500)] == [1, 2, 32, 64, 64]


def test_small_layers_and_plain_ones_save_less() -> None:
    sizes = (5632, 4096, 2048, 512, 256)  # a kernel takes as long to start
    assert [choose_plan(torch.full((F,), 3.0), 1000, COSTS).few_tokens for F in sizes] == [64, 64, 32, 8, 0]
    at_limit = torch.full((5632,), 30.0)  # 39 % of the neurons fire for one of 16
    gated, plain = (choose_plan(at_limit, 1000, COSTS, gated=g).few_tokens for g in (True, False))
    assert (gated, plain) == (16, 8)


def test_a_dense_layer_may_be_sparse_for_few_tokens() -> None:
    plan = choose_plan(torch.full((5632,), 100.0), 1000, COSTS)
    assert plan.is_dense and repr(plan) == "Plan(dense, 5632 neurons, sparse up to 4 tokens)"
    for numbers in ({"few_tokens": 65}, {"few_tokens_captured": 65}):
        with pytest.raises(ValueError, match="at most 64"):
            Plan(n_neurons=512, hot=torch.arange(2), cap=8, **numbers)


# -- between few and many ---------------------------------------------------------------------------------


def test_tiles_of_tokens_pay_while_few_neurons_fire_for_any_of_them() -> None:
    rare, often = torch.full((5632,), 3.0), torch.full((5632,), 100.0)  # of 1000 tokens
    plan = choose_plan(rare, 1000, COSTS)
    assert (plan.union_tokens, plan.min_tokens_captured) == (4095, _MIN_TOKENS)  # 17 % fire for one of 64
    assert "by tiles up to 4095" in repr(plan)
    assert choose_plan(often, 1000, COSTS).union_tokens == 0  # nearly all do
    between = torch.cat([torch.full((2150,), 900.0), torch.zeros(3482)])  # 38 %: for 256 tokens, not for 512
    assert choose_plan(between, 1000, COSTS).union_tokens == 256
    assert choose_plan(rare, 63, COSTS).union_tokens == 0  # of 64 tokens nothing is known
    assert [choose_plan(rare, 1000, COSTS, width=D).union_tokens for D in (2048, 1024, 512)] == [4095, 0, 0]


@pytest.mark.parametrize("tokens", [-1, 1 << 14])
def test_union_tokens_out_of_range(tokens: int) -> None:
    with pytest.raises(ValueError, match="union_tokens must be"):
        Plan(n_neurons=512, hot=torch.arange(2), cap=8, union_tokens=tokens)


# -- what is kept, and what operations take ---------------------------------------------------------------


def some_plan(n_hot: int = 6) -> Plan:
    return Plan(
        n_neurons=16,
        hot=torch.randperm(16)[:n_hot],
        cap=77,
        first=5,
        min_tokens=900,
        few_tokens=32,
        union_tokens=200,
        min_tokens_captured=300,
        few_tokens_captured=64,
        predicted=1.5,
        mean_active=2.25,
    )


def assert_same(a: Plan, b: Plan) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert torch.equal(ours.pop("hot"), theirs.pop("hot")) and ours == theirs


@pytest.mark.parametrize("n_hot", [0, 6, 16])
def test_the_whole_plan_is_saved(n_hot: int) -> None:
    plan, file = some_plan(n_hot), io.BytesIO()
    torch.save(plan.state_dict(), file)
    file.seek(0)
    again = Plan.from_state_dict(torch.load(file, weights_only=True))  # numbers and one tensor
    assert_same(again, plan)
    assert again.is_dense == (n_hot == 16)


def through_pickle(plan: Plan) -> Any:
    file = io.BytesIO()
    torch.save(plan, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_pickle])
def test_copies_make_their_own_tensors(copied: Any) -> None:
    """A copy may be for another device."""
    plan, cpu = some_plan(), torch.device("cpu")
    tensors = plan.on(cpu)
    again = copied(plan)
    assert_same(again, plan)
    assert again.on(cpu).order is not tensors.order and torch.equal(again.on(cpu).order, tensors.order)


@pytest.mark.parametrize("n_hot", [0, 6, 16])
def test_tensors_hold_the_order_of_neurons_and_places(n_hot: int) -> None:
    plan = some_plan(n_hot)
    order, places, *_ = plan.on(torch.device("cpu"))
    assert (order.dtype, places.dtype) == (torch.int32, torch.int32)
    assert order[:n_hot].tolist() == plan.hot.tolist()
    cold = sorted(set(range(16)) - set(plan.hot.tolist()))
    assert order[n_hot:].tolist() == cold
    assert [int(places[n]) for n in cold] == list(range(16 - n_hot)) and (places[plan.hot] == -1).all()


def test_large_numbers_travel_as_shapes() -> None:
    plan = Plan(n_neurons=1 << 17, hot=torch.arange(1 << 16), cap=(1 << 18) - 1, first=4097, min_tokens=5000)
    assert sizes_of(plan.on(torch.device("cpu"))) == (1 << 16, (1 << 18) - 1, 4097)


def test_numbers_travel_as_shapes_without_memory() -> None:
    plan, cpu = some_plan(), torch.device("cpu")
    eager, captured = plan.on(cpu), plan.on(cpu, captured=True)
    assert sizes_of(eager) == sizes_of(captured) == (6, 77, 5)
    assert (tokens_of(eager), tokens_of(captured)) == ((32, 200, 900), (64, 200, 300))
    assert (plan.tokens(captured=False), plan.tokens(captured=True)) == ((32, 200, 900), (64, 200, 300))
    assert {t.untyped_storage().nbytes() for t in (eager.sizes, eager.tokens)} == {0}
    assert eager.sizes.clone().shape == eager.sizes.shape
    sizes = [t.shape[1] for t in (*eager[2:], *captured[2:])]
    assert min(sizes) > 1 << 59  # not 0 or 1, and no tensor's size: a compiler would treat those apart
    assert tokens_of(Plan(n_neurons=16, hot=torch.arange(2), cap=0, min_tokens=1 << 60).on(cpu)) == (0, 0, _TOKENS - 1)


def test_tensors_are_made_once_per_device() -> None:
    plan, cpu, meta = some_plan(), torch.device("cpu"), torch.device("meta")
    eager, captured = plan.on(cpu), plan.on(cpu, captured=True)
    assert plan.on(cpu) is eager and plan.on(cpu, captured=True) is captured
    assert eager.order is captured.order and eager.places is captured.places
    assert plan.on(meta).order.device == meta


def test_tensors_ignore_inference_mode_and_the_default_device() -> None:
    with torch.inference_mode(), torch.device("meta"):
        plan = dense_plan(16)
        tensors = plan.on(torch.device("cpu"))
    assert not any(t.is_inference() or t.device.type == "meta" for t in tensors)
    assert plan.hot.device.type == "cpu"


def test_captured_calls_have_their_own_thresholds() -> None:
    plan = some_plan()
    assert [plan.runs_split(n, captured=False) for n in (299, 300, 899, 900)] == [False, False, False, True]
    assert [plan.runs_split(n, captured=True) for n in (299, 300, 899, 900)] == [False, True, True, True]
    assert not some_plan(16).runs_split(10_000, captured=True)
    same = Plan(n_neurons=16, hot=torch.arange(2), cap=8, min_tokens=9, few_tokens=4)
    assert same.tokens(captured=False) == same.tokens(captured=True) == (4, 4, 9)


# -- Costs that twell tune has measured ------------------------------------------------------------------


def test_measured_costs_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend(monkeypatch, "NVIDIA L40S (48 GB)", (8, 9), 142)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S (48 GB)")
    assert "twell tune has not measured this GPU; it takes a minute" in costs_are(device)
    own = [costs_for(torch.device("cpu"), training=training)._replace(gather=200.0) for training in (False, True)]
    path = tuned.write(device, {"inference": own[0]._asdict(), "training": own[1]._asdict()}, date="2026-01-02")
    assert path.name == "costs-nvidia-l40s-48-gb-142-sm89.json" and [*path.parent.iterdir()] == [path]
    assert [costs_for(device), costs_for(device, training=True)] == own
    assert costs_are(device) == f"costs of this GPU that twell tune has measured on 2026-01-02 ({path})"
    other = pretend(monkeypatch, "NVIDIA L40S (48 GB)", (8, 9), 100)
    assert costs_are(other).startswith("none, so layers run densely")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace('"torch": "', '"torch": "9'), "was written by other versions"),
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: text.replace('"gather"', '"gathers"'), "is damaged"),
        (lambda text: text.replace('"few": 1.0', '"few": NaN'), "is damaged (costs out of range)"),
        (lambda text: text.replace('"few": 1.0', '"few": -1'), "is damaged (costs out of range)"),
        (lambda text: "[]", "was written by other versions"),
    ],
    ids=["versions", "cut", "names", "nan", "negative", "list"],
)
def test_measured_costs_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str], why: str
) -> None:
    device = pretend(monkeypatch, "another", (8, 9), 108)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    costs = costs_for(torch.device("cpu"))._asdict()
    path = tuned.write(device, {"inference": costs, "training": costs})
    path.write_text(change(path.read_text()))
    with contextlib.nullcontext() if "versions" in why else pytest.warns(UserWarning, match="run twell tune again"):
        assert choose_plan(torch.full((5632,), 3.0), 1000, costs_for(device)).is_dense
    assert why in costs_are(device)


def test_tune_recovers_the_costs_behind_simulated_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times computed from other costs than the known ones."""
    pytest.importorskip("triton")
    from twell.workbench.bench import costs as measuring

    M, F, element = 512, 4096, 7e-9
    of = Costs(gate=1.2, down=0.9, gather=300.0, heavy=2.0, token=900.0, hot=200.0, batch=1.2e7 * 5.8 / 7, few=1.5)
    known = costs_for(torch.device("cpu"), training=True)
    a_hot_one = 3 * known.dense - 1 + known.down

    def make(workload: str, *shape: Any, **how: Any) -> cases.FFNInputs:
        n_hot = {"skew29": 256, "skew100": 768, "iid29": 0}[workload]  # which fire half of the time, others hardly
        x, gate = torch.randn(M, 32), torch.randn(F, 32) / 6
        x[:, 0], gate[:, 0] = 1, -2.2
        gate[:n_hot, 0] = 0
        return cases.FFNInputs(x=x, w_gate=gate, w_up=gate, w_down=gate.t())

    def split(given: cases.FFNInputs, plan: Plan) -> tuple[int, float]:
        fired = (torch.relu(given.x @ given.w_gate.T) != 0).sum(0)
        return len(plan.hot), (fired.sum() - fired[plan.hot].sum()).item() / M

    def forward(given: cases.FFNInputs, w: Any, plan: Plan, seconds: float) -> dict[str, float]:
        H, pairs = split(given, plan)
        elements = {
            "dense": 3 * F, "cold gate": of.gate * (F - H), "lists": of.token, "tail": of.gather * pairs,
            "hot": 2 * H + of.hot, "hot down": of.down * H, "heavy": 3 * (F - H) * of.heavy / 16,
        }  # fmt: skip
        return {name: n * M * element for name, n in elements.items()} | {"heavy tokens": M / 16}

    def training(given: cases.FFNInputs, w: Any, fired: Any, known: Costs, seconds: float) -> Any:
        H, pairs = split(given, choose_plan(fired, M, known, width=32))
        sparse = a_hot_one * H + known.gate * (F - H) + known.gather * pairs + known.token + known.hot * (H > 0)
        dense = 3 * F * known.dense
        return dense * M * element, 1.25 * sparse * M * element, (H, pairs)

    monkeypatch.setattr(cases, "make", make)
    monkeypatch.setattr(measuring, "_forward", forward)
    monkeypatch.setattr(measuring, "_training", training)
    how: dict[str, Any] = {"tokens": M, "width": 32, "hidden": F, "dtype": torch.float32}
    inference, trained = measuring.measure(torch.device("cpu"), **how)
    assert inference._replace(few=1.5) == pytest.approx(of)
    assert trained.gather == pytest.approx(1.25 * known.gather) and trained.dense == pytest.approx(known.dense)
    assert 3 * trained.dense - 1 + trained.down == pytest.approx(1.25 * a_hot_one)
