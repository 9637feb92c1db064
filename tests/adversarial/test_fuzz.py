"""A bounded number of random cases (``make fuzz``: 100,000), and proof that the fuzz finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fuzz
import pytest
import torch
from torch import Tensor

from twell import cpu, nn


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


def test_random_cases_are_as_near_to_float64_as_dense() -> None:
    what, worst, wrong = fuzz.tried(range(300), "cpu")
    assert wrong == []
    assert set(what["way"]) == set(fuzz.WAYS) and set(what["layout"]) == set(fuzz.LAYOUTS)
    assert set(worst) == {"y", "l1", "dx", "dgate", "dup", "ddown"} and max(worst.values())[0] <= fuzz.MOST_UNITS


def test_a_seed_is_a_case() -> None:
    for seed in range(5):
        case = fuzz.Case.of(seed)
        assert case == fuzz.Case.of(seed) and fuzz.run(case) == fuzz.run(case)


LINEAR, WEIGHTED_SUM, WEIGHTS = cpu.products.linear, cpu.rows.weighted_sum, nn.SparseFFNBase._plain_weights


@pytest.mark.parametrize("seed", [301106, 28736])
def test_a_bias_is_added_before_16_bits_round(seed: int) -> None:
    """To a sum that nearly cancels it: the fuzz's cases in which it was added after."""
    assert fuzz.tried(range(seed, seed + 1), "cpu")[2] == []


def less_one_neuron(table: Tensor, col: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return WEIGHTED_SUM(table, col[:-1], values[:-1], bias)


def of_the_first_call(layer: Any) -> Any:
    w = WEIGHTS(layer)
    assert w is not None
    return layer.__dict__.setdefault("kept", type(w)._make(None if t is None else t.clone() for t in w))


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (cpu.rows, "weighted_sum", less_one_neuron),
        (cpu.products, "linear", lambda *a: LINEAR(*a).to(torch.bfloat16).to(a[0].dtype)),
        (cpu.block, "is_finite", lambda *_: True),
        (nn.SparseFFNBase, "_plain_weights", of_the_first_call),
    ],
    ids=["a neuron is left out", "a rounding too many", "infinite tokens are not looked for", "old weights"],
)
def test_it_finds_what_is_planted(place: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, name, wrong)
    is_about = "poisoned" if name == "is_finite" else "normal"
    seeds = [seed for seed in range(5000) if fuzz.Case.of(seed).values == is_about]
    assert any(fuzz.tried(range(seed, seed + 1), "cpu")[2] for seed in seeds[:400])
