"""The functions users call: ``gated_ffn`` and ``ffn``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.ops.backends import choose_backend
from twell.ops.registered import Call, Train, infer, skips_dispatcher
from twell.plan import Plan
from twell.reference import ACTIVATIONS, Weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NO_PLAN = (None, None, None, None)


class Stats(NamedTuple):
    """Statistics of one call. Tokens that ``token_mask`` leaves out count in none of the three."""

    l1_sum: Tensor  # sum over tokens and neurons of |h|, differentiable, float32 (float64 for float64 inputs)
    counts: Tensor  # int32 [F], the tokens for which each neuron was active
    tokens: Tensor  # int64 scalar tensor, the tokens counted


def gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    backend: str = "auto",
    return_stats: bool = False,
    plan: Plan | None = None,
) -> Any:
    """y = (a(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd with a = relu or relu2 (squared ReLU), made fast by sparsity.

    x [..., D]; w_gate, w_up [F, D]; w_down [D, F] (HF layout); biases [F], [F], [D]. Returns y [..., D], or
    (y, Stats) with ``return_stats``. ``token_mask`` [...] marks the tokens that count in the statistics; y
    is computed for all tokens. The result equals the dense FFN's within rounding, whatever the sparsity.

    ``plan`` sets how the GPU kernels split the work; it changes time, never the result. **Without a plan a call on a
    GPU runs densely**, because which neurons fire often is not known. The CPU decides in the call and needs no plan.

    >>> x, w_gate, w_up, w_down = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)
    >>> y, stats = gated_ffn(x, w_gate, w_up, w_down, return_stats=True)
    >>> y.shape, stats.counts.shape, int(stats.tokens)
    (torch.Size([2, 3, 8]), torch.Size([16]), 6)
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down, "b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    _check("gated_ffn", x, weights, activation, token_mask, plan)
    w = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    return run(x, w, activation, backend, _tensors_of(plan, x), (), token_mask, return_stats)


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    backend: str = "auto",
    return_stats: bool = False,
    plan: Plan | None = None,
) -> Any:
    """y = a(x Wu^T + bu) Wd^T + bd with a = relu or relu2 (squared ReLU), made fast by sparsity.

    The plain FFN; arguments, shapes and results as in ``gated_ffn``.
    """
    weights = {"w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down}
    _check("ffn", x, weights, activation, token_mask, plan)
    w = Weights(w_up, None, w_down, b_up, None, b_down)
    return run(x, w, activation, backend, _tensors_of(plan, x), (), token_mask, return_stats)


def _tensors_of(plan: Plan | None, x: Tensor) -> Sequence[Tensor | None]:
    return NO_PLAN if plan is None else plan.on(x.device, captured=is_captured(x.device))


def is_captured(device: torch.device) -> bool:
    """Whether a call is captured in a CUDA graph, which replays it without the host.

    False under a compiler, so compiled code has the plan's thresholds for eager calls: unless a graph is made of it
    later (``mode="reduce-overhead"``), it takes as much host time.
    """
    if torch.compiler.is_compiling():
        return False
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def run(
    x: Tensor,
    w: Weights,
    activation: str,
    backend: str,
    plan: Sequence[Tensor | None],
    frozen: Sequence[Tensor],
    token_mask: Tensor | None,
    return_stats: bool,
) -> Any:
    """``gated_ffn`` or ``ffn`` with checked arguments. ``plan``: ``PlanTensors``, or four times None."""
    straight = skips_dispatcher(x)
    if not straight and not torch.compiler.is_compiling():  # under a compiler the choice would be a guard
        choose_backend(backend, x.device)  # raises here, with a clean traceback
    save = torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in w))
    if not save and not return_stats:
        if straight:
            return infer(x, w, activation, backend, plan, frozen)
        return torch.ops.twell.ffn.default(x.reshape(-1, x.shape[-1]), *w, *plan, frozen, activation, backend).view(
            x.shape
        )
    mask = None if token_mask is None else token_mask.reshape(-1).to(torch.bool)
    order, places, sizes, n_tokens = plan
    call = Call(mask, order, places, sizes, n_tokens, activation, backend, return_stats, save)
    if save and straight:
        y, l1_sum, counts, _ = Train.apply(x, *w, call, True)
    else:
        y, l1_sum, counts, _ = torch.ops.twell.ffn_train.default(x.reshape(-1, x.shape[-1]), *w, *call)
        y = y.view(x.shape)
    if not return_stats:
        return y
    tokens = counts.new_full((), x.numel() // x.shape[-1], dtype=torch.int64) if mask is None else mask.sum()
    return y, Stats(l1_sum, counts, tokens)


def check(name: str, x: Tensor, w: Weights, activation: str, token_mask: Tensor | None) -> None:
    """Raise a ValueError that says what was expected and what was given."""
    if w.up is None:
        weights = {"w_up": w.gate, "w_down": w.down, "b_up": w.gate_bias, "b_down": w.down_bias}
    else:
        weights = {"w_gate": w.gate, "w_up": w.up, "w_down": w.down}
        weights |= {"b_gate": w.gate_bias, "b_up": w.up_bias, "b_down": w.down_bias}
    _check(name, x, weights, activation, token_mask, None)


def _check(
    name: str, x: Tensor, weights: dict[str, Any], activation: str, token_mask: Tensor | None, plan: Plan | None
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    for key, t in (("x", x), *weights.items(), ("token_mask", token_mask)):
        if not isinstance(t, Tensor) and (t is not None or key == "x"):
            raise ValueError(f"{name}: {key} must be a torch.Tensor, got {type(t).__name__}")
    if x.dim() == 0:
        raise ValueError(f"{name}: x must be [..., D], got a scalar")
    w_first = next(iter(weights.values()))
    if w_first is None or w_first.dim() != 2:
        got = "None" if w_first is None else tuple(w_first.shape)
        raise ValueError(f"{name}: {next(iter(weights))} must be [F, D], got {got}")
    D, F = x.shape[-1], w_first.shape[0]
    expected = {"w_gate": (F, D), "w_up": (F, D), "w_down": (D, F), "b_gate": (F,), "b_up": (F,), "b_down": (D,)}
    device_type = x.device.type
    autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)  # meta has no autocast to ask for
    for key, t in {"x": x, **weights}.items():
        if t is None:
            if key.startswith("w_"):
                raise ValueError(f"{name}: {key} must be a tensor, got None")
            continue
        if key != "x" and tuple(t.shape) != expected[key]:
            raise ValueError(
                f"{name}: {key} must have shape {expected[key]} (D={D} from x, F={F} from "
                f"{next(iter(weights))}), got {tuple(t.shape)}"
            )
        if t.dtype not in DTYPES:
            raise ValueError(f"{name}: {key} must be float32, bfloat16, float16 or float64, got {t.dtype}")
        if t.dtype != x.dtype and not autocast:
            raise ValueError(f"{name}: {key} is {t.dtype} but x is {x.dtype}; cast one, or use torch.autocast")
        if t.device != x.device:
            raise ValueError(f"{name}: {key} is on {t.device} but x is on {x.device}")
    if token_mask is not None:
        if token_mask.shape != x.shape[:-1]:
            raise ValueError(f"{name}: token_mask must have shape {tuple(x.shape[:-1])}, got {tuple(token_mask.shape)}")
        if token_mask.is_floating_point():
            raise ValueError(f"{name}: token_mask must be bool or integer, got {token_mask.dtype}")
        if token_mask.device != x.device:
            raise ValueError(f"{name}: token_mask is on {token_mask.device} but x is on {x.device}")
    if plan is not None and not (isinstance(plan, Plan) and plan.n_neurons == F):
        got = f"one for {plan.n_neurons}" if isinstance(plan, Plan) else type(plan).__name__
        raise ValueError(f"{name}: plan must be a twell.Plan for {F} neurons, got {got}")
