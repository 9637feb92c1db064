"""Numbers that are not finite: in the weights of neurons that are not active, and in gradients of fp16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from twell import cpu, reference
from twell.reference import Weights

D, F, ODD = 32, 96, 7  # ODD: the neuron whose weights are not finite
each_kind = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def layer(gated: bool, value: float, where: str, share: float) -> tuple[Weights, Weights]:
    """Weights with which about ``share`` of the neurons fire, ODD for tokens with x[0] > 0; and the same weights, but
    finite."""
    gate, up, down = torch.randn(F, D), torch.randn(F, D), torch.randn(D, F)
    bias = torch.full((F,), -math.sqrt(2 * D) * torch.erfinv(torch.tensor(1 - 2 * share)).item())
    gate[ODD], bias[ODD] = 0, 0
    gate[ODD, 0] = 1
    finite = Weights(gate, up if gated else None, down, bias, None, torch.randn(D))
    odd = Weights._make(None if t is None else t.clone() for t in finite)
    if where == "up":
        odd.up[ODD, 3] = value  # type: ignore[index]
    else:
        odd.down[2, ODD] = value
    return odd, finite


@each_kind
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "inf"])
@pytest.mark.parametrize("where", ["up", "down"])
@pytest.mark.parametrize("share", [0.03, 0.5], ids=["sparse", "half"])
@pytest.mark.parametrize("n_tokens", [1, 4, 100, 300])
def test_weights_of_silent_neurons_reach_no_result(
    gated: bool, value: float, where: str, share: float, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of tokens and any CPU path; tokens that fire the neuron are not finite."""
    if where == "up" and not gated:
        pytest.skip("a plain FFN has no up projection")
    odd, finite = layer(gated, value, where, share)
    x = torch.randn(n_tokens, D)
    x[:, 0] = -x[:, 0].abs()
    x[3::4, 0] *= -1  # so that a quarter wakes the neuron; of one token none
    x[:, 3] = 1.0  # inf * 1
    wakes = x[:, 0] > 0
    dy, dl1 = torch.randn(n_tokens, D), torch.tensor(0.1)
    want = reference.forward(x, finite)
    for min_work in (0, 1e12):  # the CPU's sparse code, and what small layers take
        monkeypatch.setattr(cpu.block, "MIN_WORK", min_work)
        for run in (cpu.forward, reference.forward):
            assert_reaches_only(run(x, odd, want_stats=False).y, want.y, wakes)  # type: ignore[operator]
            got: Any = run(x, odd, token_mask=~wakes)  # type: ignore[operator]
            assert_reaches_only(got.y, want.y, wakes)
            torch.testing.assert_close(got.l1_sum, reference.forward(x, finite, token_mask=~wakes).l1_sum)
    for forward, backward in ((cpu.forward, cpu.backward), (reference.forward, reference.backward)):
        kept = {"save": True} if forward is cpu.forward else {}
        ours: Any = forward(x, odd, **kept)  # type: ignore[operator]
        gradients = backward(dy, dl1, x, odd, ours.gate, ours.up)
        expected = reference.backward(dy, dl1, x, finite, want.gate, want.up)
        assert_reaches_only(gradients.x, expected.x, wakes, must_reach=False)
        others = torch.arange(F) != ODD
        torch.testing.assert_close(gradients.weights.down[:, others], expected.weights.down[:, others])
        torch.testing.assert_close(gradients.weights.gate[others], expected.weights.gate[others])


def assert_reaches_only(got: Tensor, want: Tensor, wakes: Tensor, must_reach: bool = True) -> None:
    torch.testing.assert_close(got[~wakes], want[~wakes], rtol=1e-4, atol=1e-3)
    assert not must_reach or not got[wakes].isfinite().all(1).any()


@each_kind
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_fp16_gradients_that_overflow_stay_at_active_neurons(gated: bool, activation: str) -> None:
    """A scaled loss makes dh or dl1 inf; gradients are 0 where dense ones are."""
    half = torch.float16
    x = torch.tensor([[1.0] * 16, [-1.0] * 16], dtype=half)  # the second token wakes no neuron
    w = Weights(torch.ones(32, 16, dtype=half), torch.ones(32, 16, dtype=half) if gated else None, torch.ones(16, 32))
    w = w._replace(down=w.down.to(half))
    forward = reference.forward(x, w, activation)
    dy = torch.tensor([[0.0] * 16, [6e4] * 16], dtype=half)
    for dl1 in (None, torch.tensor(1e6)):
        masked = torch.tensor([False, True])
        got = reference.backward(dy, dl1, x, w, forward.gate, forward.up, activation, masked)
        for name, gradient in zip(("x", *Weights._fields[:3]), (got.x, *got.weights[:3]), strict=True):
            assert gradient is None or not gradient.isnan().any(), name
        assert not got.x[1].any()


def test_what_is_no_tensor_is_refused() -> None:
    ffn: Any = twell.SparseFFN(16, 32)
    x, up, down = torch.randn(2, 16), ffn.up_proj.weight.detach(), ffn.down_proj.weight.detach()
    call: Any = twell.ffn
    for refused, what in (
        (lambda: ffn(x.numpy()), "x must be a torch.Tensor, got ndarray"),
        (lambda: call(x.numpy(), up, down), "x must be a torch.Tensor, got ndarray"),
        (lambda: call(x, up.numpy(), down), "w_up must be a torch.Tensor, got ndarray"),
        (lambda: call(x, up, down.tolist()), "w_down must be a torch.Tensor, got list"),
        (lambda: call(x, up, down, token_mask=[True, True]), "token_mask must be a torch.Tensor, got list"),
    ):
        with pytest.raises(ValueError, match=what):
            refused()
