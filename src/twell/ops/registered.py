"""The operations as PyTorch knows them: ``twell::ffn``, ``ffn_train``, ``ffn_backward`` and ``fp8_layer``.

One family for gated and plain FFNs: a plain one has no ``w_up``, and its up projection is called ``w_gate`` here.
With M tokens, D model width, F neurons:

    twell::ffn           x [M, D], weights, plan, frozen           -> y [M, D]
    twell::ffn_train     x [M, D], weights, token_mask [M], plan   -> y, l1_sum [], counts [F], kept (saved.py)
    twell::ffn_backward  dy [M, D], dl1 [], and all of these       -> dx and six gradients of weights
    twell::fp8_layer     x [..., D], its weights, its number       -> y [..., D]

The first three are functional: statistics are outputs, and nothing is updated in place. The operation itself chooses by
the plan's numbers, which arrive as tensor sizes (``PlanTensors``): ``ffn`` between few tokens, tiles of tokens, the
split and dense, ``ffn_train`` between the split and dense. So a compiled model holds one call per layer for every plan.
Forward-mode AD and double backward raise. ``fp8_layer`` calls the layer object, which may count neurons, plan, and keep
copies of its weights.

An operation is called through PyTorch's dispatcher: autocast (casts the arguments), then autograd (records the
backward), then the device. Eager calls that need none of the stops skip them: ``skips_dispatcher``."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from twell import cpu, reference
from twell.ops.backends import choose_backend, fits_triton, kernels
from twell.plan import PlanTensors, sizes_of, tokens_of
from twell.reference import Weights, sum_dtype
from twell.saved import saved_length

_count_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def skips_dispatcher(x: Tensor) -> bool:
    """Whether a call can go straight to the kernels: autocast and autograd's keys, the dispatcher's two stops before
    the device, would do nothing and cost 25 us of host time."""
    return type(x) is Tensor and x.device.type in ("cuda", "cpu") and nothing_intercepts(x.device.type)


def nothing_intercepts(device_type: str) -> bool:
    """No compiler, tracer, dispatch mode, function transform, forward-mode AD or autocast is active."""
    return (
        not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and _count_modes() == 0
        and _transform() is None
        and _tracing() is None
        and not torch.is_autocast_enabled(device_type)
    )


# -- What runs on a device -------------------------------------------------------------------------------


class Call(NamedTuple):
    """What a training forward takes besides x and the weights, in the operation's order."""

    token_mask: Tensor | None
    order: Tensor | None  # the four tensors of the plan: see PlanTensors
    places: Tensor | None
    sizes: Tensor | None
    tokens: Tensor | None
    activation: str
    backend: str
    want_stats: bool
    save: bool

    @property
    def plan(self) -> PlanTensors | None:
        return None if self.order is None else PlanTensors(*self[1:5])  # type: ignore[arg-type]


def infer(
    x: Tensor, w: Weights, activation: str, backend: str, plan: Sequence[Tensor | None], frozen: Sequence[Tensor]
) -> Tensor:
    """y [..., D] for x [..., D]."""
    chosen = choose_backend(backend, x.device)
    if chosen == "triton" and fits_triton(x, w):
        if x.dim() == 1:
            return infer(x[None], w, activation, backend, plan, frozen)[0]
        return kernels().forward(x, w, activation, None if plan[0] is None else PlanTensors(*plan), frozen)  # type: ignore[arg-type]
    x_MD = x.reshape(-1, x.shape[-1])
    if chosen == "cpu":
        y = cpu.forward(x_MD, w, activation, None, want_stats=False, save=False, frozen=tuple(frozen)).y
    else:
        y = reference.forward(x_MD, w, activation, want_stats=False).y
    return y.view(x.shape)


def _train(x: Tensor, w: Weights, call: Call) -> tuple[Tensor, ...]:
    """y, l1_sum, counts, kept."""
    chosen, (mask, *_, activation, _, want_stats, save) = choose_backend(call.backend, x.device), call
    if chosen == "triton" and fits_triton(x, w):
        return kernels().train(x, w, activation, call.plan, mask, want_stats=want_stats, save=save)
    if chosen == "cpu":
        out = cpu.forward(x, w, activation, mask, want_stats=want_stats, save=save)
    else:
        out = reference.forward(x, w, activation, mask, want_stats=want_stats)
    kept = x.new_empty(0)
    if save:
        pieces = [t.reshape(-1) for t in (out.gate, out.up) if t is not None]
        kept = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out.y, out.l1_sum, out.counts, kept


def _backward(
    dy: Tensor, dl1: Tensor | None, x: Tensor, w: Weights, call: Call, kept: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of x and of the six weights; empty or None where one is not needed."""
    chosen, mask, activation = choose_backend(call.backend, x.device), call.token_mask, call.activation
    if chosen == "triton" and fits_triton(x, w):
        gradients = kernels().backward(dy, dl1, x, w, kept, activation, call.plan, mask, needs)
    else:
        path = cpu.backward if chosen == "cpu" else reference.backward
        r, *u = kept.view(1 if w.up is None else 2, len(x), len(w.gate))
        gradients = path(dy, dl1, x, w, r, u[0] if u else None, activation, mask, needs)
    return gradients.x, *gradients.weights


# -- Schemas and device implementations ------------------------------------------------------------------

_library = torch.library.Library("twell", "DEF")  # must stay alive: its end unregisters the operations
_WEIGHTS = "Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down"
_PLAN = "Tensor? order, Tensor? places, Tensor? sizes, Tensor? tokens"
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)

_library.define(
    f"ffn(Tensor x, {_WEIGHTS}, {_PLAN}, Tensor[] frozen, str activation, str backend) -> Tensor", tags=_TAGS
)
_library.define(
    f"ffn_train(Tensor x, {_WEIGHTS}, Tensor? token_mask, {_PLAN}, str activation, str backend, bool want_stats, "
    "bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    f"ffn_backward(Tensor dy, Tensor? dl1, Tensor x, {_WEIGHTS}, Tensor? token_mask, {_PLAN}, Tensor kept, "
    f"str activation, str backend, bool[] needs) -> ({', '.join(['Tensor'] * 7)})",
    tags=_TAGS,
)
# fp8_layer takes the weights so that compilers see what it reads. It is unsafe in a compiler's CUDA graphs because the
# layer may make copies of its weights, and a plan: in the memory of a graph they would be lost.
_library.define(
    "fp8_layer(Tensor x, Tensor[] weights, Tensor number) -> Tensor", tags=(*_TAGS, torch.Tag.cudagraph_unsafe)
)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1 << 59)  # they arrive as sizes: no other size is as large


def number_of(layer: Any) -> int:
    """A new number by which compiled code calls ``layer.in_fp8``."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def _fp8_layer_op(x: Tensor, weights: Sequence[Tensor], number: Tensor) -> Tensor:
    layer = _layers.get(number.shape[1])
    if layer is None:
        raise RuntimeError(
            "twell::fp8_layer: the layer that this code was compiled for is not in this process; export a model with "
            "FP8 weights by torch.export.export(..., strict=False), or compile it here"
        )
    y: Tensor = layer.in_fp8(x, weights)
    return y.contiguous()


def _infer_op(x: Tensor, *rest: Any) -> Tensor:
    *weights, order, places, sizes, tokens, frozen, activation, backend = rest
    w = Weights(*weights)
    if frozen and getattr(frozen[0], "twell_states", None) != w.states():  # compiled code passes them unchecked
        frozen = ()
    return infer(x, w, activation, backend, (order, places, sizes, tokens), frozen)


def _train_op(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _train(x, Weights(*rest[:6]), Call(*rest[6:]))


def _backward_op(dy: Tensor, dl1: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *weights_mask_plan, kept, activation, backend, needs = rest
    mask, order, places, sizes, tokens = weights_mask_plan[6:]
    call = Call(mask, order, places, sizes, tokens, activation, backend, want_stats=False, save=True)
    gradients = _backward(dy, dl1, x, Weights(*weights_mask_plan[:6]), call, kept, tuple(needs))
    return tuple(x.new_empty(0) if g is None else g for g in gradients)


_OPS = {"ffn": _infer_op, "ffn_train": _train_op, "ffn_backward": _backward_op, "fp8_layer": _fp8_layer_op}
for _name, _function in _OPS.items():
    for _key in ("CPU", "CUDA"):  # CPU: also Triton's interpreter
        _library.impl(_name, _function, _key)


# -- Shapes, for compilers -------------------------------------------------------------------------------


@torch.library.register_fake("twell::fp8_layer")
@torch.library.register_fake("twell::ffn")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("twell::ffn_train")
def _(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    w, call = Weights(*rest[:6]), Call(*rest[6:])
    F, plan, numbers = w.gate.shape[0], call.plan, None
    if choose_backend(call.backend, x.device) == "triton" and fits_triton(x, w):
        numbers = (F, 0, 0) if plan is None else (*sizes_of(plan)[:2], tokens_of(plan)[2])
    length = saved_length(x.shape[0], F, numbers, x.dtype, gated=w.up is not None, save=call.save)
    return (
        x.new_empty(x.shape[0], w.down.shape[0]),
        x.new_empty((), dtype=sum_dtype(x.dtype)),
        x.new_empty(F if call.want_stats else 0, dtype=torch.int32),
        x.new_empty(length),
    )


@torch.library.register_fake("twell::ffn_backward")
def _(dy: Tensor, dl1: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    w, backend, needs = Weights(*rest[:6]), rest[-2], rest[-1]
    (M, D), F = x.shape, w.gate.shape[0]
    shapes = [(M, D), (F, D), (F, D), (D, F), (F,), (F,), (D,)]
    exists = [True, True, w.up is not None, True, True, w.up is not None, True]
    out = [x.new_empty(s if need and e else (0,)) for s, need, e in zip(shapes, needs, exists, strict=True)]
    by_kernels = choose_backend(backend, x.device) == "triton" and fits_triton(x, w)
    if needs[3] and by_kernels and reference.is_neuron_major(w.down):
        out[3] = x.new_empty(F, D).t()
    return tuple(out)


# -- torch.vmap, in inference; PyTorch loops over calls of ffn_train ---------------------------------------------------


def _infer_vmap(info: Any, dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    if dims[0] is not None and all(dim is None for dim in dims[1:7]):
        x = x.movedim(dims[0], 0)
        return torch.ops.twell.ffn.default(x.flatten(0, 1), *rest).view(x.shape), 0
    given = list(zip((x, *rest[:6]), dims[:7], strict=True))  # of an ensemble: every model has weights of its own
    each = [[t if dim is None else t.select(dim, i) for t, dim in given] for i in range(info.batch_size)]
    return torch.stack([torch.ops.twell.ffn.default(*tensors, *rest[6:]) for tensors in each]), 0


torch.library.register_vmap("twell::ffn", _infer_vmap)


# -- Autograd --------------------------------------------------------------------------------------------


def _needs_gradients(args: Sequence[Any]) -> bool:
    """Whether autograd must record the call. Raises under forward-mode AD, whose tangents would silently be lost."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("twell: sparse FFNs have no forward-mode derivative (jvp, jacfwd); use the backward")
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _infer_autograd(*args: Any) -> Tensor:
    if _needs_gradients(args):
        raise NotImplementedError(
            "twell::ffn has no gradient: call twell.gated_ffn or twell.ffn, which train by ffn_train"
        )
    with torch._C._AutoDispatchBelowAutograd():
        if skips_dispatcher(args[0]):  # true for calls from compiled code: the device is the only stop left
            return _infer_op(*args)
        return torch.ops.twell.ffn.default(*args)


class Train(torch.autograd.Function):
    """``ffn_train`` with its backward. (torch.library.register_autograd does the same and costs 300 us more of host
    time.) ``straight``: call the kernels without the dispatcher, and accept x [..., D]: a view made outside would be
    another node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *weights, call, straight = rest
        if straight:
            y, *others = _train(x.reshape(-1, x.shape[-1]), Weights(*weights), call)
            output = y.view(x.shape).data, *others  # not a view: Falcon writes to y in place
        else:
            with torch._C._AutoDispatchBelowAutograd():
                output = torch.ops.twell.ffn_train.default(x, *weights, *call)
        y, l1_sum, counts, kept = output
        ctx.call = call if call.token_mask is None else call._replace(token_mask=None)
        ctx.save_for_backward(x, *weights, call.token_mask, kept)  # the parameters themselves, never views of them
        ctx.mark_non_differentiable(counts, kept)
        ctx.set_materialize_grads(False)  # an unused l1_sum costs nothing
        return y, l1_sum, counts, kept

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *_: Any) -> Any:
        if not ctx.call.save:
            raise RuntimeError("twell::ffn_train was called with save=False: it kept nothing for a backward")
        x, *weights, mask, kept = ctx.saved_tensors  # read once: under checkpointing each read recomputes them all
        call, needs = ctx.call if mask is None else ctx.call._replace(token_mask=mask), ctx.needs_input_grad[:7]
        dy = torch.zeros_like(x) if dy is None else dy
        if skips_dispatcher(dy) and not torch.is_grad_enabled():
            flat = -1, x.shape[-1]
            dx, *others = _backward(dy.reshape(flat), dl1, x.reshape(flat), Weights(*weights), call, kept, needs)
            grads: Any = dx.view(x.shape) if needs[0] and dx is not None else None, *others
        else:
            given = *weights, *call[:5], kept, call.activation, call.backend, list(needs)
            grads = torch.ops.twell.ffn_backward.default(dy, dl1, x, *given)
        return (*[g if n else None for g, n in zip(grads, needs, strict=True)], None, None)


class _OnlyBackward(torch.autograd.Function):
    """``ffn_backward``, whose own derivative raises."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.twell.ffn_backward.default(*inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("twell: sparse FFNs have no second derivative (double backward)")


def _train_autograd(*args: Any) -> Any:
    if _needs_gradients(args):
        return Train.apply(*args[:7], Call(*args[7:]), False)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.twell.ffn_train.default(*args)


def _backward_autograd(*args: Any) -> Any:
    if _needs_gradients(args):
        return _OnlyBackward.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.twell.ffn_backward.default(*args)


_library.impl("ffn", _infer_autograd, "Autograd")
_library.impl("ffn_train", _train_autograd, "Autograd")
_library.impl("ffn_backward", _backward_autograd, "Autograd")


# -- Autocast --------------------------------------------------------------------------------------------


def _register_autocast(name: str, device_type: str, dispatch_key: str) -> None:
    """Run in the autocast dtype, as F.linear does. (torch.library.register_autocast fixes one dtype.)"""
    op = getattr(torch.ops.twell, name)

    def cast(arg: Any, dtype: torch.dtype) -> Any:
        eligible = isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64
        return arg.to(dtype) if eligible and arg.device.type == device_type else arg

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            given = [cast(a, dtype) for a in args]
            return op(*given)  # cast weights are not those of frozen tensors: ``_infer_op`` leaves the frozen ones out

    _library.impl(name, kernel, dispatch_key)


for _name in ("ffn", "ffn_train"):
    _register_autocast(_name, "cpu", "AutocastCPU")
    _register_autocast(_name, "cuda", "AutocastCUDA")
