"""Firing clocks, dead neurons, fresh starts, the L1 coefficient; with two processes too."""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from twell import GatedSparseFFN, SparseFFN, Stats
from twell.sparsity import L1Steering, advance_clock, l1_warmup, restart_neurons_, sum_over_processes


def stats(counts: list[int], tokens: int) -> Stats:
    return Stats(torch.tensor(0.0), torch.tensor(counts, dtype=torch.int32), torch.tensor(tokens))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 0, [1, 1, 1, 1]), (0, 10, [0, 0.5, 1, 1]), (5, 10, [0, 0, 1, 1]), (5, 5, [0, 1, 1, 1])],
)
def test_l1_warmup(start: int, end: int, expected: list[float]) -> None:
    assert [l1_warmup(step, start, end) for step in (0, 5, 10, 100)] == expected


def l1_stats(active: float, l1_sum: float = 20.0, tokens: int = 10_000) -> list[Stats]:
    """Of two layers, one with all the active neurons of a token."""
    total = torch.tensor([round(2 * active * tokens), 0])
    return [
        Stats(torch.tensor(2 * l1_sum * tokens), total, torch.tensor(tokens)),
        Stats(torch.tensor(0.0), total * 0, torch.tensor(tokens)),
    ]


class Plant:
    """A simulated model: active neurons fall by themselves, and by a power of l1 within ``lag`` steps, by a
    learning rate that rises and falls."""

    def __init__(self, steps: int, lag: float, power: float) -> None:
        self.steps, self.lag, self.power, self.x = steps, lag, power, 0.0

    def step(self, t: int, l1: float) -> float:
        rests = -1.5 * (1 - math.exp(-20 * t / self.steps)) - self.power * math.log1p(l1 / 1e-5)
        rate = min(1.0, 10 * t / self.steps) * (1 + math.cos(math.pi * t / self.steps)) / 2
        self.x += (rests - self.x) * min(1.0, rate / self.lag)
        return 2048 * math.exp(self.x) * (1 + 0.03 * math.sin(37.0 * t))  # of 4096 neurons at first; texts differ


@pytest.mark.parametrize("power", [0.7, 1.0, 1.6])
@pytest.mark.parametrize(("steps", "lag"), [(300, 15), (1500, 50), (5000, 100)])
def test_steering_reaches_its_target_by_a_third_of_the_steps(steps: int, lag: float, power: float) -> None:
    target = 40.96
    steering, plant = L1Steering(target, steps), Plant(steps, lag, power)
    active, most = [], 0.0
    for t in range(steps):
        active.append(plant.step(t, steering.l1))
        steering.advance(l1_stats(active[-1]))
        most = max(most, steering.l1)
    means = [
        sum(active[t : t + steps // 30]) / (steps // 30) / target
        for t in range(steps // 3, steps - steps // 30, steps // 30)
    ]
    assert all(0.9 < mean < 1.1 for mean in means), means
    assert most <= 1 / 20


def test_steering_is_bounded_and_goes_on_from_its_saved_state() -> None:
    stuck = L1Steering(target=1, steps=100)
    for _ in range(60):
        stuck.advance(l1_stats(500.0, l1_sum=4.0))
    assert stuck.l1 == 1 / 4  # a nat
    sparse = L1Steering(target=400, steps=100)
    for _ in range(60):
        sparse.advance(l1_stats(100.0, l1_sum=4.0))
    assert sparse.l1 == pytest.approx(1e-5 / 4)
    twin = L1Steering(target=1, steps=100)
    twin.load_state_dict(copy.deepcopy(stuck.state_dict()))
    for steering in (stuck, twin):
        for active in (2.0, 0.5, 0.0, 0.9):
            steering.advance(l1_stats(active))
    assert 0 < twin.l1 == stuck.l1 < 1 / 4
    moving, again = L1Steering(target=50, steps=100), L1Steering(target=50, steps=100)
    for active in (400.0, 300.0, 350.0, 280.0):
        moving.advance(l1_stats(active))
    again.load_state_dict(copy.deepcopy(moving.state_dict()))
    for active in (260.0, 240.0, 250.0):
        for steering in (moving, again):
            steering.advance(l1_stats(active))
        assert again.l1 == moving.l1


def test_a_longer_run_does_not_ask_for_more_neurons_again() -> None:
    """Resumed with more steps, what steering aims at goes on from where it was."""
    short, plant = L1Steering(target=40.96, steps=300), Plant(300, 15, 1.0)
    for t in range(300):
        short.advance(l1_stats(plant.step(t, short.l1)))
    longer = L1Steering(target=40.96, steps=3000)
    longer.load_state_dict(copy.deepcopy(short.state_dict()))
    plant.steps = 3000  # its learning rate rises again
    active = []
    for t in range(300, 900):
        active.append(plant.step(t, longer.l1))
        longer.advance(l1_stats(active[-1]))
    assert max(active) < 1.25 * 40.96


def test_steering_starts_from_a_coefficient() -> None:
    for given, expected in ((1e-3, 1e-3), (5.0, 1 / 4), (0.0, 1e-2 / 4)):  # at most a nat
        steering = L1Steering(target=5, steps=100, l1=given)
        assert steering.l1 == given
        for _ in range(2):
            steering.advance(l1_stats(50.0, l1_sum=4.0))
        assert steering.l1 == pytest.approx(expected)


def test_steering_acts_one_step_later_and_only_by_what_was_counted() -> None:
    steering = L1Steering(target=5, steps=100)
    steering.advance(l1_stats(50.0, l1_sum=4.0))
    assert steering.l1 == 0  # nothing has come to the host yet
    steering.advance(l1_stats(45.0))
    first = steering.l1
    assert first == pytest.approx(1e-2 / 4)
    steering.advance(l1_stats(0.0, tokens=0))  # all labels masked
    kept = steering.l1
    steering.advance(l1_stats(40.0, l1_sum=math.nan))
    assert steering.l1 == kept != first
    steering.advance(l1_stats(40.0))
    assert steering.l1 == kept
    for target, steps in ((0.0, 5), (math.nan, 5), (math.inf, 5), (5.0, 0), (5.0, 1.5), (5.0, math.nan)):
        with pytest.raises(ValueError, match=r"L1Steering: (target|steps) must be"):
            L1Steering(target, steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="L1Steering: no statistics of a layer"):
        steering.advance([])


def test_clock_counts_tokens_since_the_last_firing() -> None:
    clock = torch.zeros(4, dtype=torch.int64)
    for counts, tokens in (([3, 0, 1, 0], 7), ([0, 0, 1, 0], 4), ([0, 2, 0, 0], 1 << 40)):  # far beyond 32 bits
        clock = advance_clock(clock, stats(counts, tokens))
    assert clock.tolist() == [(1 << 40) + 4, 0, 1 << 40, (1 << 40) + 11]


def test_clock_of_real_statistics() -> None:
    layer = SparseFFN(8, 16, bias=True)
    with torch.no_grad():
        layer.up_proj.bias[:4] = -100.0
    _, seen = layer(torch.randn(50, 8), return_stats=True)
    clock = advance_clock(torch.zeros(16, dtype=torch.int64), seen)
    assert (clock[:4] == 50).all() and (clock[4:] < 50).all()


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9)])
@pytest.mark.parametrize("layer_class", [GatedSparseFFN, SparseFFN])
def test_fresh_start_changes_the_chosen_gate_rows_alone(layer_class: type, make_optimizer) -> None:
    layer = layer_class(8, 16, bias=True)
    optimizer = make_optimizer(layer.parameters())
    layer(torch.randn(20, 8)).square().sum().backward()
    optimizer.step()
    gate = getattr(layer, layer.projections[0])
    chosen = torch.zeros(16, dtype=torch.bool)
    chosen[[2, 5]] = True
    before = {n: p.clone() for n, p in layer.named_parameters()}
    moments = {p: {k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for p, s in optimizer.state.items()}
    restart_neurons_(layer, chosen, std=0.02, seed=1, optimizer=optimizer)
    for name, p in layer.named_parameters():
        changed = p is gate.weight or p is gate.bias
        assert torch.equal(p[~chosen] if changed else p, before[name][~chosen] if changed else before[name])
        for key, old in moments[p].items():
            new = optimizer.state[p][key]
            if changed and new.shape == p.shape:
                assert not new[chosen].any()
                assert torch.equal(new[~chosen], old[~chosen])
            else:
                assert torch.equal(new, old)
    assert not gate.bias[chosen].any()
    assert 0 < gate.weight[chosen].abs().max() < 0.1


def test_fresh_weights_depend_on_the_seed_alone() -> None:
    one, two, three = (GatedSparseFFN(8, 16) for _ in range(3))
    some, more = torch.zeros(16, dtype=torch.bool), torch.zeros(16, dtype=torch.bool)
    some[3], more[[3, 7]] = True, True
    restart_neurons_(one, some, std=0.02, seed=5)
    restart_neurons_(two, more, std=0.02, seed=5)
    restart_neurons_(three, some, std=0.02, seed=6)
    assert torch.equal(one.gate_proj.weight[3], two.gate_proj.weight[3])
    assert not torch.equal(one.gate_proj.weight[3], three.gate_proj.weight[3])


def test_wrong_masks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"neurons must be bool \[16\]"):
        restart_neurons_(GatedSparseFFN(8, 16), torch.arange(16), std=0.02, seed=0)


def test_clocks_agree_over_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand in for the processes; test_distributed.py has real ones."""
    barrier, sent = threading.Barrier(2), list[torch.Tensor]()

    def all_reduce(t: torch.Tensor) -> None:
        sent.append(t.clone())
        barrier.wait(60)
        t.copy_(sent[-1] + sent[-2])
        barrier.wait(60)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def process(rank: int) -> str:
        clock = torch.zeros(3, dtype=torch.int64)
        for counts, tokens in (([1, 0, 0], 4), ([0, 0, 0], 3)) if rank == 0 else (([0, 1, 0], 6), ([0, 1, 0], 2)):
            own = Stats(torch.tensor(1.0 + rank), torch.tensor(counts, dtype=torch.int32), torch.tensor(tokens))
            wider = Stats(torch.tensor(0.5), torch.tensor([7, rank, 0, 0], dtype=torch.int32), torch.tensor(tokens))
            first, second = sum_over_processes([own, wider])
            clock = advance_clock(clock, first)
        return f"{clock.tolist()} {first.l1_sum} {second.counts.tolist()} {second.tokens}"

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(process, (0, 1))) == ["[5, 0, 15] 3.0 [14, 1, 0, 0] 5"] * 2
