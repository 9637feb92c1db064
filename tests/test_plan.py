"""Plans: hot and heavy follow from frequencies and costs; encoding keeps everything."""

from __future__ import annotations

import math

import pytest
import torch

from twell.plan import _FEW_COSTS, _FEW_GATE, _MIN_GAIN, Costs, Plan, choose_plan, costs_for, dense_plan

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
    assert plan.cap == 32  # the multiple of 16 nearest to 2 * 1.5 * (2048 - 256) / 200 = 26.9
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
    assert plain.cap == 32  # nearest to 1.5 * 1792 / 100


@pytest.mark.parametrize("times", [12, 500, 1000])
def test_what_does_not_pay_runs_densely(times: int) -> None:
    plan = choose_plan(counts_of((2048, times)), 1000, COSTS)
    assert plan.is_dense
    assert plan.predicted == 1


def test_small_batches_do_not_pay() -> None:
    counts = counts_of((256, 500), (1792, 2))
    plan = choose_plan(counts, 1000, COSTS)
    saved = 3 * 2048 - (3 * 256 + 1792 + 200 * 1792 * 0.002)
    assert plan.min_tokens == 4096  # the least, since 1e6 / saved is less
    costly = COSTS._replace(batch=2e7)
    assert choose_plan(counts, 1000, costly).min_tokens == int(2e7 / saved)
    assert choose_plan(counts, 1000, costly, width=1024).min_tokens == int(4e7 / saved)


def test_training_plans_for_a_longer_tail_and_keeps_short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_for(torch.device("cpu"), training=True)
    frequency = 0.2 * torch.exp(-torch.arange(4096) / 500)
    counts = (frequency * 1e6).round()
    plan = choose_plan(counts, 1_000_000, costs)
    tail = frequency[len(plan.hot) :].sum().item()
    assert plan.cap == 16 * math.ceil((6 + 4 * tail) / 16) < costs.heavy * 2 * (4096 - len(plan.hot)) / costs.gather
    monkeypatch.setattr("twell.plan._LATER_TAIL", 1.0)
    assert len(choose_plan(counts, 1_000_000, costs).hot) < len(plan.hot)
    monkeypatch.setattr("twell.plan._MEMORY_MARGIN", 0.0)
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


@pytest.mark.parametrize("n_hot", [0, 128, 512])
def test_encoding(n_hot: int) -> None:
    plan = Plan(n_neurons=512, hot=torch.randperm(512)[:n_hot], cap=77, first=5, min_tokens=9, few_tokens=32)
    encoded = plan.encode()
    assert encoded.shape == (517,) and encoded.dtype == torch.int32
    assert sorted(encoded[5:].tolist()) == list(range(512))
    again = Plan.decode(encoded)
    assert torch.equal(again.hot, plan.hot)
    assert (again.cap, again.first, again.min_tokens, again.few_tokens) == (77, 5, 9, 32)
    assert again.n_neurons == 512 and again.is_dense == (n_hot == 512)


def test_they_say_what_they_are() -> None:
    assert repr(dense_plan(16)) == "Plan(dense, 16 neurons)"
    plan = Plan(n_neurons=512, hot=torch.arange(128), cap=9, predicted=1.5)
    assert repr(plan) == "Plan(128 of 512 neurons hot, tokens heavy above 9, from 4096 tokens on, predicted 1.50x)"


def test_gpus_that_were_not_measured_borrow_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    found = set()
    for capability in ((8, 0), (9, 0), (10, 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found.add(costs_for(cuda))
    assert found == {costs_for(torch.device("cpu"))}


@pytest.mark.parametrize(("hot", "cap"), [([3, 3], 8), ([16], 8), ([-1], 8), ([0], -1)])
def test_plans_that_would_change_a_result_are_refused(hot: list[int], cap: int) -> None:
    with pytest.raises(ValueError, match="a plan needs different hot neurons of 0 to 15"):
        Plan(n_neurons=16, hot=torch.tensor(hot), cap=cap)
    right = Plan(n_neurons=16, hot=torch.tensor([0, 1]), cap=8).encode()
    for wrong in ([2, 8, 4, 0, 0, 5, 5], [17, 8, 4, 0, 0, 0, 1], [-1, 8, 4, 0, 0, 0, 1]):
        encoded = right.clone()
        encoded[:7] = torch.tensor(wrong)
        with pytest.raises(ValueError, match="hot neurons"):
            Plan.decode(encoded)


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
    start, gather = _FEW_COSTS[64]
    assert start + _FEW_GATE * 5632 + 2 * gather * 2600 < 3 * 5632 / _MIN_GAIN  # 64 alone would pay
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
    assert Plan.decode(plan.encode()).few_tokens == 4
    with pytest.raises(ValueError, match="at most 64"):
        dense_plan(512, few_tokens=65)
