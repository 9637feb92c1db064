"""Batches between few and many tokens in Triton's interpreter: the dense result, for any shape and sparsity."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import twell
from twell import gpu, reference
from twell.gpu.prefill import union
from twell.plan import Plan, dense_plan
from twell.reference import Weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

TILES = gpu._INTERPRETED
f16, f32 = torch.float16, torch.float32


def problem(
    M: int, D: int, F: int, dtype: torch.dtype, *, gated: bool, bias: bool, share: float
) -> tuple[Tensor, Weights]:
    """About a ``share`` of all gates is positive."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape) / 4

    w = Weights(
        normal(F, D), normal(F, D) if gated else None, normal(F, D).t(), normal(F) if bias else None,
        normal(F) if bias and gated else None, normal(D) if bias else None,
    )  # fmt: skip
    x = torch.randn(M, D)
    x[:, 0] = 4
    w.gate[:, 0] = torch.special.ndtri(torch.tensor(share)) * D**0.5 / 16
    return x.to(dtype), w.to(dtype)._replace(down=w.down.t().to(dtype).t())


def assert_right(y: Tensor, x: Tensor, w: Weights, activation: str) -> None:
    truth = reference.forward(x.double(), w.to(torch.float64), activation, want_stats=False).y
    eager = reference.forward(x, w, activation, want_stats=False).y
    error, allowed = ((t.double() - truth).norm() for t in (y, eager))
    assert error <= 2 * allowed + 1e-5 * truth.norm()


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_dense_result(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    M, D, F, gated, bias = (
        rng.choice([1, 15, 16, 40]),
        16 * rng.randint(1, 4),
        16 * rng.randint(1, 9),
        seed % 2 == 0,
        seed % 3 == 0,
    )
    x, w = problem(M, D, F, rng.choice([f16, f32]), gated=gated, bias=bias, share=rng.choice([0.001, 0.03, 0.5]))
    activation, tiles = rng.choice(["relu", "relu2"]), TILES._replace(use_tma=rng.random() < 0.5)
    y = union.forward(x, w, activation, tiles, w.down.t())
    assert_right(y, x, w, activation)
    assert torch.equal(union.forward(x, w, activation, tiles, w.down.t()), y)


def test_empty_full_and_poisoned_tokens() -> None:
    """Tiles of 16 tokens: in the first none fires, in the second all neurons do, the third has inf, -inf and NaN."""
    x, w = problem(48, 32, 64, f32, gated=True, bias=False, share=0.5)
    w.gate.abs_()
    x[:16], x[16:32] = -x[:16].abs(), x[16:32].abs()
    x[33, 3], x[34, 4], x[35, 5] = float("inf"), float("-inf"), float("nan")
    y = union.forward(x, w, "relu", TILES, w.down.t())
    expected = reference.forward(x, w, want_stats=False).y
    assert (y[:16] == 0).all()
    assert torch.equal(y.isfinite(), expected.isfinite()) and y.isfinite().all(1).sum() == 45
    finite = expected.isfinite().all(1)
    assert (y - expected)[finite].norm() <= 1e-5 * expected[finite].norm()


def test_tokens_that_turn_every_neuron_off_by_minus_infinity() -> None:
    """Dense: 0 * u with u = inf or NaN is NaN, though no neuron is active."""
    x, w = problem(16, 32, 64, f32, gated=True, bias=False, share=0.5)
    w.gate.abs_()
    x[:] = -x.abs()
    x[3, 7] = float("-inf")
    y = union.forward(x, w, "relu", TILES, w.down.t())
    assert y[3].isnan().all() and (y[torch.arange(16) != 3] == 0).all()


def test_plans_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above few tokens and below the split; not in 32 bits, nor where Wd would have to be transposed."""
    calls: list[int] = []
    forward = union.forward
    monkeypatch.setattr(union, "forward", lambda x, *rest: calls.append(len(x)) or forward(x, *rest))
    plan = Plan(n_neurons=64, hot=torch.arange(16), cap=8, few_tokens=2, union_tokens=20, min_tokens=18)
    for dtype, is_neuron_major in ((f16, True), (f32, True), (f16, False)):
        x, w = problem(24, 32, 64, dtype, gated=True, bias=False, share=0.1)
        w = w if is_neuron_major else w._replace(down=w.down.contiguous())
        for M in (2, 3, 17, 18, 21):
            assert_right(gpu.forward(x[:M], w, "relu", plan.on(x.device)), x[:M], w, "relu")
    assert calls == [3, 17]


def test_layers_and_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = twell.GatedSparseFFN(32, 64, dtype=f16, backend="triton").eval()
    twell.nn.neuron_major_(layer.down_proj)
    layer.set_plan(dense_plan(64, union_tokens=64))
    x, calls, launch = torch.randn(2, 3, 32, dtype=f16), [], union._launch
    monkeypatch.setattr(union, "_launch", lambda *given: calls.append(1) or launch(*given))
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(layer(x.view(6, 32)).view(2, 3, 32), y)
        expected = layer.down_proj(torch.relu(layer.gate_proj(x)) * layer.up_proj(x))
    assert len(calls) == 2 and (y - expected).norm() <= 1e-2 * expected.norm()
