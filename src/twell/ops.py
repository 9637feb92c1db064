"""The operations users call, and the one place that registers custom ops and picks a backend.

``twell::gated_ffn`` and ``twell::ffn`` are functional: statistics are outputs, nothing is updated behind the
caller's back. Their backwards are ops of their own. Schema, with M tokens, D model width, F hidden width:

    gated_ffn(x [M, D], w_gate [F, D], w_up [F, D], w_down [D, F], biases?, token_mask? [M] bool, ...)
        -> y [M, D], l1_sum [], counts [F] int32, gate [M, F], up [M, F]

``gate`` and ``up`` are what the backward needs; they are empty unless ``save``. Without them (an op called
directly, or to save memory) the backward computes them again from x.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell import cpu, reference
from twell.plan import encoded_length
from twell.reference import ACTIVATIONS, Weights, sum_dtype

BACKENDS = ("auto", "reference", "cpu", "triton")
_AUTOMATIC = ("cpu", "triton", "reference")  # the first that can run
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Stats(NamedTuple):
    """What one call saw. Tokens that ``token_mask`` leaves out are in none of the three.

    l1_sum: sum over tokens and neurons of |h|, differentiable, float32 (float64 for float64 inputs).
    counts: int32 [F], the tokens for which each neuron was active.
    tokens: int64 scalar tensor, the tokens counted.
    """

    l1_sum: Tensor
    counts: Tensor
    tokens: Tensor


# ---------------------------------------------------------------------------------------------------------
# Backends
# ---------------------------------------------------------------------------------------------------------


def why_unavailable(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run on ``device``, or None if it can."""
    if backend == "cpu" and device.type != "cpu":
        return f"it runs on CPU tensors, and these are on {device}"
    return _why_no_triton(device) if backend == "triton" else None


def _why_no_triton(device: torch.device) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "it runs on GPUs, and these tensors are on the CPU"
    if device.type != "cuda":
        return f"it runs on CUDA tensors, and these are on {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"it needs compute capability 8.0, and this GPU has {capability}"


def choose_backend(requested: str, device: torch.device) -> str:
    """The backend that will run: the requested one, or for "auto" the fastest that can."""
    if requested not in BACKENDS:
        raise ValueError(f"unknown backend {requested!r}: expected one of {', '.join(BACKENDS)}")
    if requested == "auto":
        return next(b for b in _AUTOMATIC if why_unavailable(b, device) is None)
    reason = why_unavailable(requested, device)
    if reason is not None:
        raise ValueError(f"backend {requested!r} is not available: {reason}")
    return requested


def _forward(
    x: Tensor,
    w: Weights,
    token_mask: Tensor | None,
    activation: str,
    backend: str,
    want_stats: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    chosen = choose_backend(backend, x.device)
    if chosen == "cpu":
        out = cpu.forward(x, w, activation, token_mask, want_stats=want_stats, save=save)
    elif chosen == "triton" and _fits_triton(x, w):
        from twell import gpu

        out = gpu.dense_forward(x, w, activation, token_mask, want_stats=want_stats)
    else:
        out = reference.forward(x, w, activation, token_mask, want_stats=want_stats)
    F = w.gate.shape[0]
    gate = out.gate if save else x.new_empty(0, F)
    up = out.up if save and out.up is not None else x.new_empty(0, F)
    return out.y, out.l1_sum, out.counts, gate, up


def _backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    gate: Tensor,
    up: Tensor | None,
    token_mask: Tensor | None,
    activation: str,
    backend: str,
    needs: Sequence[bool],
) -> reference.Gradients:
    if len(gate) != len(x):  # not saved
        again = reference.forward(x, w, activation, want_stats=False)
        gate, up = again.gate, again.up
    chosen = choose_backend(backend, x.device)
    if chosen == "triton" and _fits_triton(x, w):
        from twell import gpu

        return gpu.dense_backward(dy, dl1, x, w, gate, up, activation, token_mask, tuple(needs))
    path = cpu if chosen == "cpu" else reference
    return path.backward(dy, dl1, x, w, gate, up, activation, token_mask, tuple(needs))


# ---------------------------------------------------------------------------------------------------------
# Custom ops: gated
# ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("twell::gated_ffn", mutates_args=())
def _gated_ffn_op(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    activation: str,
    backend: str,
    want_stats: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    w = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    return _forward(x, w, token_mask, activation, backend, want_stats, save)


@_gated_ffn_op.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, token_mask, activation, backend, want_stats, save):
    y, l1_sum, counts, gate = _fake_forward(x, w_gate, w_down, want_stats, save)
    return y, l1_sum, counts, gate, torch.empty_like(gate)


@torch.library.custom_op("twell::gated_ffn_backward", mutates_args=())
def _gated_ffn_backward_op(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    gate: Tensor,
    up: Tensor,
    activation: str,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    w = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    dx, dw = _backward(dy, dl1, x, w, gate, up, token_mask, activation, backend, needs)
    assert dw.up is not None and dw.gate_bias is not None and dw.up_bias is not None and dw.down_bias is not None
    return dx, dw.gate, dw.up, dw.down, dw.gate_bias, dw.up_bias, dw.down_bias


@_gated_ffn_backward_op.register_fake
def _(dy, dl1, x, w_gate, w_up, w_down, b_gate, b_up, b_down, token_mask, gate, up, activation, backend, needs):
    (M, D), F = x.shape, w_gate.shape[0]
    return _fake_gradients(x, ((M, D), (F, D), (F, D), (D, F), (F,), (F,), (D,)), needs)


# ---------------------------------------------------------------------------------------------------------
# Custom ops: plain
# ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("twell::ffn", mutates_args=())
def _ffn_op(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    activation: str,
    backend: str,
    want_stats: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w = Weights(w_up, None, w_down, b_up, None, b_down)
    return _forward(x, w, token_mask, activation, backend, want_stats, save)[:4]


@_ffn_op.register_fake
def _(x, w_up, w_down, b_up, b_down, token_mask, activation, backend, want_stats, save):
    return _fake_forward(x, w_up, w_down, want_stats, save)


@torch.library.custom_op("twell::ffn_backward", mutates_args=())
def _ffn_backward_op(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    gate: Tensor,
    activation: str,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    w = Weights(w_up, None, w_down, b_up, None, b_down)
    n_x, n_up, n_down, n_up_bias, n_down_bias = needs
    all_needs = (n_x, n_up, False, n_down, n_up_bias, False, n_down_bias)
    dx, dw = _backward(dy, dl1, x, w, gate, None, token_mask, activation, backend, all_needs)
    assert dw.gate_bias is not None and dw.down_bias is not None
    return dx, dw.gate, dw.down, dw.gate_bias, dw.down_bias


@_ffn_backward_op.register_fake
def _(dy, dl1, x, w_up, w_down, b_up, b_down, token_mask, gate, activation, backend, needs):
    (M, D), F = x.shape, w_up.shape[0]
    return _fake_gradients(x, ((M, D), (F, D), (D, F), (F,), (D,)), needs)


# ---------------------------------------------------------------------------------------------------------
# Custom ops: training by the GPU kernels, gated and plain
# ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("twell::split_ffn", mutates_args=())
def _split_ffn_op(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    plan: Tensor,
    n_hot: int,
    cap: int,
    activation: str,
    want_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, l1_sum, counts, then what the backward needs: ``hybrid.Saved``. ``n_hot`` and ``cap`` are the plan's."""
    from twell import gpu

    w = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    y, l1_sum, counts, saved = gpu.forward_to_train(x, w, activation, plan, token_mask, want_stats)
    return y, l1_sum, counts, *saved


@_split_ffn_op.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, token_mask, plan, n_hot, cap, activation, want_stats):
    from twell.kernels import hybrid

    y, l1_sum, counts, _ = _fake_forward(x, w_gate, w_down, want_stats, False)
    return y, l1_sum, counts, *hybrid.empty_saved(x, w_gate.shape[0], n_hot, cap, gated=w_up is not None)


@torch.library.custom_op("twell::split_ffn_backward", mutates_args=())
def _split_ffn_backward_op(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    plan: Tensor,
    saved: Sequence[Tensor],
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from twell import gpu
    from twell.kernels import hybrid

    w = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    kept = hybrid.Saved(*saved)
    dx, dw = gpu.backward(dy, dl1, x, w, kept, activation, plan, token_mask, tuple(needs))
    up, up_bias = (x.new_empty(0) if g is None else g for g in (dw.up, dw.up_bias))
    assert dw.gate_bias is not None and dw.down_bias is not None
    return dx, dw.gate, up, dw.down, dw.gate_bias, up_bias, dw.down_bias


@_split_ffn_backward_op.register_fake
def _(dy, dl1, x, w_gate, w_up, w_down, b_gate, b_up, b_down, token_mask, plan, saved, activation, needs):
    (M, D), F = x.shape, w_gate.shape[0]
    return _fake_gradients(x, ((M, D), (F, D), (F, D), (D, F), (F,), (F,), (D,)), needs)


def _setup_split_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, _, _, ctx.activation, _ = inputs
    _, _, *rest = output
    ctx.save_for_backward(*tensors, *rest[1:])
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)


def _split_backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *_: Any) -> tuple:
    everything = ctx.saved_tensors  # once: under checkpointing a second look would compute it all again
    tensors, saved = everything[:9], everything[9:]
    needs = list(ctx.needs_input_grad[:7])
    dy = torch.zeros_like(tensors[0]) if dy is None else dy
    grads = torch.ops.twell.split_ffn_backward(dy, dl1, *tensors, list(saved), ctx.activation, needs)
    return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *[None] * 6)


torch.library.register_autograd("twell::split_ffn", _split_backward, setup_context=_setup_split_context)


# ---------------------------------------------------------------------------------------------------------
# What the registrations share
# ---------------------------------------------------------------------------------------------------------


def _fake_forward(
    x: Tensor, w_gate: Tensor, w_down: Tensor, want_stats: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, F = x.shape[0], w_gate.shape[0]
    return (
        x.new_empty(M, w_down.shape[0]),
        x.new_empty((), dtype=sum_dtype(x.dtype)),
        x.new_empty(F if want_stats else 0, dtype=torch.int32),
        x.new_empty(M if save else 0, F),
    )


def _fake_gradients(x: Tensor, shapes: Sequence[tuple[int, ...]], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(shape if n else (0,)) for shape, n in zip(shapes, needs, strict=True))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.activation, ctx.backend, _, _ = inputs
    _, _, counts, *activations = output
    ctx.save_for_backward(*tensors, *activations)  # the parameters themselves, never views of them
    ctx.mark_non_differentiable(counts, *activations)
    ctx.set_materialize_grads(False)  # an unused l1_sum costs nothing


def _register_autograd(name: str, n_differentiable: int) -> None:
    """``n_differentiable``: x, weights and biases; token_mask and four options follow them."""
    backward_op = getattr(torch.ops.twell, f"{name}_backward")

    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *_: Any) -> tuple:
        needs = list(ctx.needs_input_grad[:n_differentiable])
        dy = torch.zeros_like(ctx.saved_tensors[0]) if dy is None else dy
        grads = backward_op(dy, dl1, *ctx.saved_tensors, ctx.activation, ctx.backend, needs)
        return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *[None] * 5)

    torch.library.register_autograd(f"twell::{name}", backward, setup_context=_setup_context)


_library = torch.library.Library("twell", "FRAGMENT")  # must stay alive: dropping it unregisters


def _register_autocast(name: str, device_type: str, dispatch_key: str) -> None:
    """Under autocast run in the autocast dtype, as F.linear does. (torch's own helper fixes one dtype.)"""
    op = getattr(torch.ops.twell, name)

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return op(*(_cast_for_autocast(a, dtype, device_type) for a in args))

    _library.impl(name, kernel, dispatch_key)


def _cast_for_autocast(arg: Any, dtype: torch.dtype, device_type: str) -> Any:
    eligible = isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64
    return arg.to(dtype) if eligible and arg.device.type == device_type else arg


# y alone, for inference. Registered without torch's custom_op, which costs the host 40 us a call.
def _planned(x: Tensor, w: Weights, activation: str, plan: Tensor | None) -> Tensor:
    from twell import gpu

    return gpu.forward(x, w, activation, plan)


def _few_tokens(x: Tensor, w: Weights, activation: str) -> Tensor:
    """Without the plan: it is on the CPU, and with such an input the compiler captures no CUDA graph."""
    from twell import gpu

    return gpu.few_tokens_forward(x, w, activation)


def _on_the_cpu(x: Tensor, w: Weights, activation: str) -> Tensor:
    return cpu.forward(x, w, activation, want_stats=False).y


def _register_inference(name: str, run: Callable[..., Tensor], dispatch_keys: Sequence[str], more: str = "") -> None:
    _library.define(
        f"{name}(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
        f"str activation{more}) -> Tensor"
    )
    for key in dispatch_keys:
        _library.impl(name, lambda x, *rest: run(x, Weights(*rest[:6]), *rest[6:]), key)
    torch.library.register_fake(f"twell::{name}", lambda x, *_: x.new_empty(x.shape))


_register_inference("planned_ffn", _planned, ("CPU", "CUDA"), ", Tensor? plan")  # CPU: in Triton's interpreter
_register_inference("few_tokens_ffn", _few_tokens, ("CPU", "CUDA"))
_register_inference("cpu_ffn", _on_the_cpu, ("CPU",))

for _name, _n_differentiable in (("gated_ffn", 7), ("ffn", 5)):
    _register_autograd(_name, _n_differentiable)
for _name in ("gated_ffn", "ffn", "planned_ffn", "few_tokens_ffn", "cpu_ffn", "split_ffn"):
    _register_autocast(_name, "cpu", "AutocastCPU")
    _register_autocast(_name, "cuda", "AutocastCUDA")


# ---------------------------------------------------------------------------------------------------------
# The functional front
# ---------------------------------------------------------------------------------------------------------


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
    plan: Tensor | None = None,
    few_tokens: int = 0,
) -> Any:
    """y = (a(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd with a = relu or relu2 (squared ReLU), made fast by sparsity.

    x [..., D]; w_gate, w_up [F, D]; w_down [D, F] (HF layout); biases [F], [F], [D]. Returns y [..., D], or
    (y, Stats) with ``return_stats``. ``token_mask`` [...] marks the tokens that count in the statistics; y
    is computed for all. Equal to the dense FFN within rounding, whatever the sparsity. ``plan`` (``Plan.encode``)
    says how the GPU kernels split the work; it changes time, never the result. ``few_tokens``: the plan's, for compiled
    code, which then captures a CUDA graph for as few.

    >>> x, w_gate, w_up, w_down = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)
    >>> y, stats = gated_ffn(x, w_gate, w_up, w_down, return_stats=True)
    >>> y.shape, stats.counts.shape, int(stats.tokens)
    (torch.Size([2, 3, 8]), torch.Size([16]), 6)
    """
    w = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down, "b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    op = torch.ops.twell.gated_ffn
    return _call(op, "gated_ffn", x, w, activation, token_mask, backend, return_stats, plan, few_tokens)


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
    plan: Tensor | None = None,
    few_tokens: int = 0,
) -> Any:
    """y = a(x Wu^T + bu) Wd^T + bd with a = relu or relu2 (squared ReLU), made fast by sparsity.

    The plain FFN; arguments, shapes and results as in ``gated_ffn``.
    """
    w = {"w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down}
    return _call(torch.ops.twell.ffn, "ffn", x, w, activation, token_mask, backend, return_stats, plan, few_tokens)


def _call(
    op: Callable[..., tuple[Tensor, ...]],
    name: str,
    x: Tensor,
    weights: dict[str, Any],
    activation: str,
    token_mask: Tensor | None,
    backend: str,
    return_stats: bool,
    plan: Tensor | None,
    few_tokens: int,
) -> Any:
    _check(name, x, weights, activation, token_mask)
    _check_plan(name, plan, weights)
    chosen = choose_backend(backend, x.device)  # raises here, with a clean traceback
    x_MD = x.reshape(-1, x.shape[-1])
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights.values()))
    if chosen == "cpu" and not return_stats and not save:
        return torch.ops.twell.cpu_ffn(x_MD, *_weights(**weights), activation).reshape(x.shape)
    if chosen == "triton" and not return_stats and not save and _fits_triton(x, _weights(**weights)):
        if 0 < len(x_MD) <= few_tokens:
            return torch.ops.twell.few_tokens_ffn(x_MD, *_weights(**weights), activation).reshape(x.shape)
        return torch.ops.twell.planned_ffn(x_MD, *_weights(**weights), activation, plan).reshape(x.shape)
    mask_M = None if token_mask is None else token_mask.reshape(-1).to(torch.bool)
    split = None
    if chosen == "triton" and save and plan is not None and _fits_triton(x, _weights(**weights)):
        split = _train_in_parts(x_MD, _weights(**weights), mask_M, activation, plan, return_stats)
    if split is not None:
        y, l1_sum, counts = split
    elif chosen != "cpu" and torch.compiler.is_compiling():
        # Plain torch code all the way: the compiler may look inside, and fuses what an opaque op would not let it.
        y, l1_sum, counts, *_ = reference.forward(
            x_MD, _weights(**weights), activation, mask_M, want_stats=return_stats
        )
    else:
        y, l1_sum, counts, *_ = op(x_MD, *weights.values(), mask_M, activation, backend, return_stats, save)
    y = y.reshape(x.shape)
    if not return_stats:
        return y
    tokens = x_MD.new_full((), x_MD.shape[0], dtype=torch.int64) if mask_M is None else mask_M.sum()
    return y, Stats(l1_sum, counts, tokens)


@torch._disable_dynamo  # its buffers have the plan's sizes, which change. (torch.compiler.disable would import triton)
def _train_in_parts(
    x: Tensor, w: Weights, token_mask: Tensor | None, activation: str, plan: Tensor, want_stats: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(y, l1_sum, counts) that keep little for the backward; None where so many tokens run densely.

    Also None while a CUDA graph is captured: the backward asks the device how many tokens are heavy.
    """
    from twell import gpu

    decoded = gpu.plan_for(plan, len(x))
    if decoded is None or (x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    if len(x) * decoded.cap >= 1 << 31:  # pairs are counted in 32 bits
        return None
    y, l1_sum, counts, *_ = torch.ops.twell.split_ffn(
        x, *w, token_mask, plan, len(decoded.hot), decoded.cap, activation, want_stats
    )
    return y, l1_sum, counts


def _fits_triton(x: Tensor, w: Weights) -> bool:
    D, F = w.down.shape
    return x.dtype != torch.float64 and D % 16 == 0 and F % 16 == 0


def _weights(
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
) -> Weights:
    if w_gate is None:
        return Weights(w_up, None, w_down, b_up, None, b_down)
    return Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)


def _check(name: str, x: Tensor, weights: dict[str, Tensor | None], activation: str, token_mask: Tensor | None) -> None:
    """Raise a ValueError that says what was expected and what came."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
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


def _check_plan(name: str, plan: Tensor | None, weights: dict[str, Tensor | None]) -> None:
    if plan is None:
        return
    F = next(w.shape[0] for w in weights.values() if w is not None)
    if plan.shape != (encoded_length(F),) or plan.dtype != torch.int32 or plan.device.type != "cpu":
        raise ValueError(
            f"{name}: plan must be int32 [{encoded_length(F)}] on the CPU, as Plan.encode() gives it, got {plan.dtype} "
            f"{tuple(plan.shape)} on {plan.device}"
        )
