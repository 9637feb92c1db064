"""Firing clocks, dead neurons, fresh starts, L1 warm-up; with two processes too."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twell import GatedSparseFFN, SparseFFN, Stats
from twell.sparsity import FiringClock, l1_warmup, restart_neurons_


def stats(counts: list[int], tokens: int) -> Stats:
    return Stats(torch.tensor(0.0), torch.tensor(counts, dtype=torch.int32), torch.tensor(tokens))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, [1, 1, 1, 1]),
        (None, 10, [0, 0.5, 1, 1]),
        (5, 10, [0, 0, 1, 1]),
        (5, 5, [0, 1, 1, 1]),
        (5, None, [1, 1, 1, 1]),
    ],
)
def test_l1_warmup(start: int | None, end: int | None, expected: list[float]) -> None:
    assert [l1_warmup(step, start, end) for step in (0, 5, 10, 100)] == expected


def test_clock_counts_tokens_since_the_last_firing() -> None:
    clock = FiringClock(4)
    clock.advance(stats([3, 0, 1, 0], 7))
    clock.advance(stats([0, 0, 1, 0], 4))
    clock.advance(stats([0, 2, 0, 0], 2))
    assert clock.tokens_since_fired.tolist() == [6, 0, 2, 13]
    assert clock.dead(after_tokens=6).tolist() == [True, False, False, True]
    clock.restart(torch.tensor([False, False, False, True]))
    assert clock.tokens_since_fired.tolist() == [6, 0, 2, 0]


def test_clock_goes_on_from_its_saved_state() -> None:
    clock = FiringClock(3)
    clock.advance(stats([1, 0, 0], 1 << 40))  # far beyond 32 bits
    twin = FiringClock(3)
    twin.load_state_dict(copy.deepcopy(clock.state_dict()))
    for c in (clock, twin):
        c.advance(stats([0, 1, 0], 5))
    assert twin.tokens_since_fired.tolist() == clock.tokens_since_fired.tolist() == [5, 0, (1 << 40) + 5]
    with pytest.raises(ValueError, match="has 3 neurons, the layer 4"):
        FiringClock(4).load_state_dict(clock.state_dict())


def test_clock_of_real_statistics() -> None:
    layer = SparseFFN(8, 16, bias=True)
    with torch.no_grad():
        layer.up_proj.bias[:4] = -100.0
    clock = FiringClock(16)
    _, seen = layer(torch.randn(50, 8), return_stats=True)
    clock.advance(seen)
    assert clock.dead(after_tokens=50)[:4].all()
    assert not clock.dead(after_tokens=50)[4:].any()


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


PROCESS = """
import sys, torch, torch.distributed as dist
from twell import Stats
from twell.sparsity import FiringClock, sum_over_processes
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
clock = FiringClock(3)
for counts, tokens in (([1, 0, 0], 4), ([0, 0, 0], 3)) if rank == 0 else (([0, 1, 0], 6), ([0, 1, 0], 2)):
    stats = Stats(torch.tensor(1.0 + rank), torch.tensor(counts, dtype=torch.int32), torch.tensor(tokens))
    wider = Stats(torch.tensor(0.5), torch.tensor([7, rank, 0, 0], dtype=torch.int32), torch.tensor(tokens))
    first, second = sum_over_processes([stats, wider])
    clock.advance(first)
print(clock.tokens_since_fired.tolist(), float(first.l1_sum), second.counts.tolist(), int(second.tokens))
dist.destroy_process_group()
"""


def test_clocks_agree_over_two_processes(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'rendezvous'}"
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(r), address], stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    outputs = [p.communicate(timeout=120)[0].strip() for p in processes]
    assert outputs == ["[5, 0, 15] 3.0 [14, 1, 0, 0] 5"] * 2
