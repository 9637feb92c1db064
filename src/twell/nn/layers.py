"""Modules: drop-in feed-forward blocks with HF parameter names, backed by the operations of ``ops``.

A layer computes with what its parameters hold at the moment of the call. Where a projection does more than multiply by
its weight (an adapter, a hook, a subclass), the layer calls its projections one by one, as the dense block would:
``why_called``."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from twell import reference
from twell.fp8 import Fp8Linear
from twell.nn.frozen import Frozen
from twell.nn.parallel import Share, bind_forwards_, share_of, stock_forward
from twell.ops import backends, registered
from twell.ops import functional as ops
from twell.plan import MAX_FEW_TOKENS, Plan, as_size, choose_plan, costs_for, dense_plan, sizes_of, tokens_of
from twell.plan.drift import Drift
from twell.reference import ACTIVATIONS, Weights, is_neuron_major

# Activation modules and functions by name, as PyTorch and transformers call them.
_KNOWN_ACTIVATIONS = {
    "ReLU": "relu",
    "relu": "relu",
    "ReLUSquaredActivation": "relu2",
    "relu2": "relu2",
    "relu_squared": "relu2",
}


LOOK_TOKENS = 4096  # what a layer sees before it plans by itself
LOOK_AT_LEAST = 256  # in a batch: to look costs another gate, which decoding should not pay
FIRST_LOOK = MAX_FEW_TOKENS  # what it sees before it plans for few tokens
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # there are none in builds without CUDA
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_PARAMETERS_AND_HOOKS = operator.itemgetter(  # of a module's __dict__
    "_parameters", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_KERNELS = ("auto", "triton")  # backends that are the kernels on a GPU
FP8_WEIGHTS = "FP8 weights (without biases, Hopper GPUs run few and many tokens sparsely)"
INLINE = "twell_inline_ffn"  # attribute of a block that runs its FFN itself, as OPT's decoder layer does


# ---------------------------------------------------------------------------------------------------------
# Projections
# ---------------------------------------------------------------------------------------------------------


def why_called(linear: nn.Module, name: str, known_forward: Any = None, is_share: bool = False) -> str | None:
    """Why a projection has to be called instead of read, or None where it is a plain ``nn.Linear``.

    ``known_forward``: one in the place of the class's for which the layer stands in. ``is_share``: of its weight the
    layer takes this process's part.
    """
    kind = type(linear)
    if kind is Fp8Linear:
        return FP8_WEIGHTS
    if kind is not nn.Linear:  # PEFT's is called Linear, too
        called = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"
        return f"{name} is {called}, not a plain nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return f"{name} has hooks"
    own = linear.__dict__.get("forward")
    if own is not known_forward and own != nn.Linear.forward.__get__(linear):  # the class's, which accelerate leaves
        return f"{name} has a forward of its own"
    weight = linear._parameters.get("weight")
    if weight is None:
        return f"{name} computes its weight"
    if type(weight) not in (nn.Parameter, Tensor) and not is_share:
        return f"{name} has a weight of type {type(weight).__name__}"
    return None


def neuron_major_(linear: nn.Linear) -> None:
    """Lay the weight [D, F] of a down projection out neuron by neuron: same parameter, shape and values, other strides.

    Then a sparse layer reads single neurons without a copy, and F.linear is as fast. Not for training with FSDP, DDP or
    NCCL, which want contiguous parameters: see ``restore_layout_``."""
    with torch.no_grad():
        linear.weight.data = linear.weight.data.t().contiguous().t()


def restore_layout_(model: nn.Module) -> int:
    """Make the weights contiguous again that ``sparsify_`` has laid out neuron by neuron; returns how many were."""
    changed = 0
    for _, ffn in sparse_ffns(model):
        for weight in getattr(ffn, ffn.projections[-1]).parameters():  # of the linear, or of what an adapter wraps
            if weight.dim() == 2 and not weight.is_contiguous() and is_neuron_major(weight):
                weight.data = weight.data.contiguous()
                changed += 1
    return changed


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = "; load it first: AutoModelForCausalLM.from_pretrained(...)" if isinstance(model, str) else ""
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")


def sparse_ffns(model: nn.Module) -> Iterator[tuple[str, SparseFFNBase]]:
    """(name, FFN) of every sparse FFN, in the model's order; also of those that a block runs itself, as OPT's does."""
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, SparseFFNBase):
            yield name, module
        elif INLINE in module.__dict__:
            yield name, module.__dict__[INLINE]


# ---------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------


def _dense(x: Tensor, w: Weights, activation: str) -> Tensor:
    linear = nn.functional.linear
    h = reference.activate(torch.relu(linear(x, w.gate, w.gate_bias)), activation)
    return linear(h if w.up is None else h * linear(x, w.up, w.up_bias), w.down, w.down_bias)


def _with_weight(linear: Any, weight: Tensor, scale: Tensor, x: Tensor) -> Any:
    return torch.func.functional_call(linear, {"weight": weight, "weight_scale": scale}, (x,))


class SparseFFNBase(nn.Module):
    """What the two modules share: plan, frozen state, running counts, conversion from a dense block, repr."""

    projections: tuple[str, ...]  # input projections first, output projection last
    neuron_counts: Tensor
    tokens_seen: Tensor
    plan: Plan | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "relu",
        bias: bool = False,
        backend: str = "auto",
        track_counts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        widths = [(hidden_size, intermediate_size)] * (len(self.projections) - 1) + [(intermediate_size, hidden_size)]
        linears = [nn.Linear(n_in, n_out, bias=bias, device=device, dtype=dtype) for n_in, n_out in widths]
        self._build(linears, activation, backend, track_counts)

    def _build(
        self,
        linears: list[nn.Linear],
        activation: str,
        backend: str,
        track_counts: bool,
        names: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        if names is not None and names != self.projections:
            self.projections = names  # of this layer: its state dict is that of a block with names of its own
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if backend not in backends.BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(backends.BACKENDS)}, got {backend!r}")
        self.activation = activation
        self.backend = backend
        self.track_counts = track_counts
        self.plan = None
        self.frozen: Frozen | None = None
        self._first_batches: tuple[Tensor, int] | None = None  # counts and tokens, until there are enough to plan by
        self._plans_itself = True
        self._replans = 0
        self._graph_plans: list[Any] = []
        # States of FP8 weights, the plan's order, and what kernels keep of both; None where they cannot.
        self._fp8: tuple[list[Any], Tensor, Any] | None = None
        self._own_number: int | None = None  # among layers with FP8 weights, for compiled code
        for name, linear in zip(self.projections, linears, strict=True):
            setattr(self, name, linear)
        first = linears[0].weight
        counts = torch.zeros(linears[0].out_features, dtype=torch.int64, device=first.device)
        self.register_buffer("neuron_counts", counts, persistent=False)
        self.register_buffer("tokens_seen", counts.new_zeros(()), persistent=False)
        self._place_plan()

    @classmethod
    def from_dense(
        cls,
        mlp: nn.Module,
        *,
        names: tuple[str, ...] | None = None,
        activation: str | None = None,
        backend: str = "auto",
        track_counts: bool = False,
    ) -> Self:
        """Wrap a dense block, sharing its ``nn.Linear``s (no copy; training one trains the other).

        ``names`` are the block's projections where they differ from HF's, e.g. ("fc1", "fc2") for OPT.
        ``activation`` is read from the block's ``act_fn`` / ``activation_fn`` / ``act`` unless given.
        A projection that is more than a plain ``nn.Linear`` keeps what it does: see ``why_called``.
        """
        names = names or cls.projections
        if len(names) != len(cls.projections):
            raise ValueError(
                f"{cls.__name__}.from_dense: names must be {len(cls.projections)} names, for "
                f"{', '.join(cls.projections)}, got {names}"
            )
        linears = []
        for name in names:
            linear = getattr(mlp, name, None)
            if not isinstance(linear, nn.Linear):
                raise ValueError(
                    f"{cls.__name__}.from_dense: expected {type(mlp).__name__}.{name} to be an nn.Linear, "
                    f"got {type(linear).__name__}; pass names=(...) for other projection names"
                )
            linears.append(linear)
        new = cls.__new__(cls)
        new._build(linears, activation or activation_of(mlp), backend, track_counts)
        new.train(mlp.training)
        return new

    def set_projection(self, name: str, linear: nn.Module) -> None:
        """Put another module in the place of a projection, here and in the dense block that ``sparsify_`` has kept."""
        setattr(self, name, linear)
        dense = self.__dict__.get("dense_block")
        if dense is not None:
            setattr(dense, name, linear)
            self.__dict__["dense_projections"] = tuple(getattr(self, projection) for projection in self.projections)
        self._place_plan()

    # -- running counts --------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, stats: ops.Stats) -> None:
        """Add one call's statistics to the running counts.

        Call it once per forward and outside checkpointed blocks, which run twice; or set ``track_counts`` and
        the forward does it.
        """
        self.neuron_counts += stats.counts
        self.tokens_seen += stats.tokens

    @torch.no_grad()
    def reset_counts(self) -> None:
        self.neuron_counts.zero_()
        self.tokens_seen.zero_()

    @property
    def mean_active(self) -> float | None:
        """Mean active neurons per counted token, or None before any was counted."""
        tokens = int(self.tokens_seen)
        return int(self.neuron_counts.sum()) / tokens if tokens else None

    # -- plan ------------------------------------------------------------------------------------------

    def set_plan(self, plan: Plan | None) -> None:
        """How the GPU kernels split this layer's work from now on; None: densely. Changes time, never a result. A plan
        that was made from counts, here or by ``twell calibrate``, lasts until the text no longer suits it (drift.py);
        ``dataclasses.replace(plan, tail=None)`` stays.

        A layer for which this was never called plans by what it sees: how to run a few tokens, as in generation, by the
        first 64; how to run many by its first batches of at least 256, 4096 tokens in all.
        """
        self._plans_itself, self._first_batches = False, None
        self._set_plan(plan)

    def _set_plan(self, plan: Plan | None) -> None:
        n_own, n_neurons = self._n_own(), len(self.neuron_counts)
        if plan is not None and plan.n_neurons != n_own:
            here = f", {n_own} of them in this process" if n_own != n_neurons else ""
            raise ValueError(f"the plan is for {plan.n_neurons} neurons, the layer has {n_neurons}{here}")
        before, self.plan = self.plan, plan
        try:
            self.refresh()
        except RuntimeError:  # a CUDA graph reads what is frozen
            self.plan = before
            raise
        self._place_plan()

    def _has_fp8(self) -> bool:
        return all(type(self._modules[name]) is Fp8Linear for name in self.projections)

    def _place_plan(self, device: torch.device | None = None) -> None:
        """Have the plan's tensors on the layer's device. A layer without one takes those of a dense plan on a GPU, so
        that compiled code is the same whatever the plan."""
        device = self.neuron_counts.device if device is None else device
        self._plan_device, self._plan_neurons = device, self._n_own()
        if self.plan is not None and self.plan.n_neurons != self._plan_neurons:
            self.plan = None  # it was made before the neurons were shared out
        self._plan_eager: Sequence[Tensor | None] = ops.NO_PLAN
        self._plan_captured: Sequence[Tensor | None] = ops.NO_PLAN
        self._kernels_on: int | None = None  # the GPU on which all calls go to the kernels
        self._drift: Drift | None = None
        self._fp8 = None
        self._number: Tensor | None = None  # as compiled code takes it; None: there are no kernels
        if device.type != "meta" and backends.why_unavailable("triton", device) is None:
            plan = self.plan or dense_plan(self._plan_neurons)
            self._plan_eager, self._plan_captured = plan.on(device), plan.on(device, captured=True)
            down: Any = getattr(self, self.projections[-1])
            if device.type == "cuda" and backends.fits_kernels(down.weight.shape[0], self._plan_neurons):
                self._kernels_on, self._plan_tokens = device.index, [plan.tokens(captured=c) for c in (False, True)]
                if self._has_fp8() and backends.kernels().fp8.why_not(device) is None:
                    if self._own_number is None:
                        self._own_number = registered.number_of(self)
                    with torch.inference_mode(False):
                        self._number = as_size(self._own_number, device)
                if not plan.is_dense and plan.tail is not None:
                    costs = costs_for(device, fp8=self._has_fp8())
                    self._drift = Drift(plan, costs, gated=len(self.projections) == 3, replans=self._replans)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._place_plan()
        if self.frozen is not None:
            self.frozen.forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        bind_forwards_([getattr(self, name) for name in self.projections])
        # Drift may wait for a copy on its way to the host; graphs are of this layer alone.
        return {**self.__dict__, "_drift": None, "_graph_plans": [], "_fp8": None, "_own_number": None, "_number": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._place_plan()

    def plan_from_counts(
        self, counts: Tensor | None = None, tokens: int | None = None, *, training: bool = False
    ) -> Plan:
        """Set the plan that suits neurons which fired ``counts`` times in ``tokens`` tokens, and return it.

        Without them the running counts are read: that waits for the device. ``training``: what suits forward and
        backward together. Where the neurons are shared out over processes the plan is for those of this one.
        """
        counts, share = self.neuron_counts if counts is None else counts, self.share()
        counts = counts if share is None else share.counts_of_own(counts)
        plan = self._plan_for(counts, int(self.tokens_seen) if tokens is None else tokens, training=training)
        self.set_plan(plan)
        return plan

    def _plan_for(self, counts: Tensor, tokens: int, *, training: bool = False) -> Plan:
        return choose_plan(
            counts,
            tokens,
            costs_for(self.neuron_counts.device, training=training, fp8=self._has_fp8()),
            width=getattr(self, self.projections[0]).in_features,
            gated=len(self.projections) == 3,
        )

    def _look_at(self, x: Tensor) -> None:
        """Count one of the first batches; once enough tokens were seen, plan, which waits for the device."""
        x_MD = x.reshape(-1, x.shape[-1])
        counts, tokens = (0, 0) if self._first_batches is None else self._first_batches
        is_small = len(x_MD) < LOOK_AT_LEAST and tokens >= FIRST_LOOK
        if is_small or len(x_MD) == 0 or backends.choose_backend(self.backend, x.device) != "triton":
            return
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self.frozen is not None and self.frozen.is_captured:  # its plan stays
            self._plans_itself = False
            return
        x_MD = x_MD[:LOOK_TOKENS]
        if self._has_fp8():
            z = getattr(self, self.projections[0])(x_MD)
        else:
            w = self._weights()
            z = nn.functional.linear(x_MD, w.gate, w.gate_bias)
        fired = (torch.relu(z) != 0).sum(0)
        seen_before, counts, tokens = tokens, counts + fired, tokens + len(x_MD)
        if tokens >= LOOK_TOKENS:
            self.plan_from_counts(counts, tokens)
            return
        if seen_before < FIRST_LOOK <= tokens:
            plan = self._plan_for(counts, tokens)
            self._set_plan(dense_plan(len(fired), plan.few_tokens, plan.mean_active, plan.union_tokens))
        self._first_batches = counts, tokens

    def _plan_anew(self) -> None:
        """By the next tokens. Not where a CUDA graph reads what is frozen for this plan."""
        if self.frozen is None or not self.frozen.is_captured:
            self._plans_itself, self._first_batches, self._drift = True, None, None
            self._replans += 1

    def _keep_for_graphs(self, plan: Any) -> None:
        """A CUDA graph reads the plan's tensors for as long as it lives, and nobody tells when that ends."""
        if not any(plan is kept for kept in self._graph_plans):
            self._graph_plans.append(plan)

    # -- frozen state: see frozen.py -------------------------------------------------------------------

    @torch.no_grad()  # parts of distributed weights are the same tensors every time
    def freeze(self) -> None:
        """Take the user's word that the weights stay: see ``twell.freeze_``."""
        if self.frozen is None and self.why_called() is None:
            self.frozen = Frozen(self._weights(), self.plan, self.backend)

    @torch.no_grad()
    def refresh(self) -> None:
        """Write frozen state over, from the weights as they are now: see ``twell.refresh_``."""
        if self.frozen is not None:
            self.frozen.rewrite(self._weights(), self.plan)

    def refresh_fp8(self) -> bool:
        """Likewise what is kept of FP8 weights, if anything is."""
        found, plan = self._fp8, self._plan_eager
        if found is None:
            return False
        self._fp8 = [], found[1], found[2]
        self._kept_of_fp8(self._fp8_tensors(), plan, is_sparse=False, captured=False)
        return True

    def forget_counted_plan(self) -> None:
        """Where the weights' type has changed, and with it what things cost: plan anew, unless the plan was made by
        hand."""
        if self.plan is not None and self.plan.mean_active is not None:
            self._plans_itself, self._first_batches = True, None
            self._set_plan(None)

    def frozen_bytes(self) -> int:
        if self._fp8 is not None and self._fp8[2] is not None:
            return sum(t.nbytes for t in self._fp8[2].derived())
        return 0 if self.frozen is None else self.frozen.nbytes

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.frozen = None
        return super().train(mode)

    # -- forward and repr ------------------------------------------------------------------------------

    def why_called(self) -> str | None:
        """Why this layer calls its projections one by one, densely, instead of running its operation; None: it does
        not."""
        return self._why_called(self.share())

    def _why_called(self, share: Share | None) -> str | None:
        if torch_module._has_any_global_hook():
            return "there are global hooks on modules"
        for name in self.projections:
            linear: Any = self._modules[name]
            stands_in = () if share is None else (stock_forward(linear), share.is_whole)
            reason = why_called(linear, name, *stands_in)
            if reason is not None:
                return reason
        return None

    def share(self) -> Share | None:
        """The neurons of this process, where the layer's are shared out over several (tensor parallel): see
        parallel.py."""
        down: Any = self._modules[self.projections[-1]]
        if type(down._parameters.get("weight")) is nn.Parameter:
            return None
        return share_of([getattr(self, name) for name in self.projections])

    def _n_own(self) -> int:
        share = self.share()
        return len(self.neuron_counts) if share is None else share.n_own

    def _plain_weights(self) -> Weights | None:
        """The weights, if no projection has anything that ``why_called`` would look at: for every eager call."""
        if torch_module._has_any_global_hook():
            return None
        modules, weights, biases = self._modules, [], []
        for name in self.projections:
            linear: Any = modules[name]
            if type(linear) is not nn.Linear:
                return None
            own = linear.__dict__
            parameters, a, b, c, d = _PARAMETERS_AND_HOOKS(own)
            weight = parameters.get("weight")
            if a or b or c or d or "forward" in own or type(weight) is not nn.Parameter:
                return None
            weights.append(weight)
            biases.append(parameters["bias"])
        if len(weights) == 2:  # no up projection
            return Weights(weights[0], None, weights[1], biases[0], None, biases[1])
        return Weights(*weights, *biases)

    def _weights(self) -> Weights:
        """What this process computes with."""
        share = self.share()
        return self._whole_weights() if share is None else share.weights_of_own(self._whole_weights())

    def _whole_weights(self) -> Weights:
        gate, *up, down = (self._modules[name]._parameters for name in self.projections)  # type: ignore[union-attr]
        w = Weights(gate["weight"], None, down["weight"], gate["bias"], None, down["bias"])  # type: ignore[arg-type]
        return w._replace(up=up[0]["weight"], up_bias=up[0]["bias"]) if up else w

    def forward(self, x: Tensor, token_mask: Tensor | None = None, return_stats: bool = False) -> Any:
        """y [..., D] for x [..., D]; (y, Stats) with ``return_stats``."""
        if not (return_stats or self.track_counts):
            return self._ffn(x, token_mask, False)
        y, stats = self._ffn(x, token_mask, True)
        if self.track_counts:
            self.commit(stats)
        return (y, stats) if return_stats else y

    def _ffn(self, x: Tensor, token_mask: Tensor | None, return_stats: bool, own: Weights | None = None) -> Any:
        """``own``: the weights of a share of the neurons, of which alone the result is."""
        is_compiling, index = torch.compiler.is_compiling(), self._kernels_on
        w = own if is_compiling or own is not None else self._plain_weights()
        if w is None and self._number is None:
            share = self.share()
            if share is not None and self._why_called(share) is None:
                return self._run_share(share, x, token_mask, return_stats)
        if is_compiling and index is not None and token_mask is None and not (return_stats or torch.is_grad_enabled()):
            few, _, least = tokens_of(self._plan_eager)  # type: ignore[arg-type]  # as symbols: others compile nothing anew
            if few < x.numel() // x.shape[-1] < least:
                # A compiler makes the best of a dense layer. By tiles of tokens it would take 0.75x: the host's time.
                return self._call_projections(x, None, False) if own is None else _dense(x, own, self.activation)
            is_plain = x.dtype == torch.bfloat16 and not torch.is_autocast_enabled(x.device.type)
            # Exported programs may run elsewhere. (To dynamo of torch 2.11 torch.compiler.is_exporting is always true.)
            if self._number is not None and is_plain and torch.compiler.is_dynamo_compiling():
                return torch.ops.twell.fp8_layer.default(x, self._fp8_tensors(), self._number)
        if w is None:
            if index is not None and not (is_compiling or return_stats or token_mask is not None):
                y = self._by_fp8_kernels(x, index)
                if y is not None:
                    return y
            if self.why_called() is not None:
                return self._call_projections(x, token_mask, return_stats)
            w = self._weights()
        gate = w.gate
        if (  # inference on a GPU, in few steps: inside a model each takes 3 us of host time
            index is not None
            and not is_compiling  # compilers cannot follow what comes next
            and not (return_stats or self._plans_itself or torch.is_grad_enabled())
            and token_mask is None
            and self.backend in _KERNELS
            and type(x) is Tensor
            and x.get_device() == gate.get_device() == index == _current_device()
            and x.dtype == gate.dtype != torch.float64
            and x.dim() > 1
            and x.shape[-1] == gate.shape[1]
            and gate.shape[0] == self._plan_neurons
            and registered.nothing_stands_before("cuda")
        ):
            captured, gpu, tokens = _is_capturing(), backends.kernels(), x.numel() // gate.shape[1]
            few, most, least = self._plan_tokens[captured]
            if most < tokens < least:
                return gpu.dense.infer(x, w, self.activation)
            kept = () if self.frozen is None else self.frozen.tensors_now(w, self.plan, captured)
            plan, drift = self._plan_captured if captured else self._plan_eager, self._drift
            if captured:
                self._keep_for_graphs(plan)
            if drift is None or captured or tokens < least:
                return gpu.forward_here(x, w, self.activation, plan, few, most, least, kept)
            watch = drift.room(x.device)
            y = gpu.forward_here(x, w, self.activation, plan, few, most, least, kept, watch)
            if watch is not None:
                drift.send(watch, tokens)
            elif drift.is_too_far():
                self._plan_anew()
            return y
        if not isinstance(x, Tensor):
            raise ValueError(f"{type(self).__name__}: x must be a torch.Tensor, got {type(x).__name__}")
        if self._plans_itself and not torch.is_grad_enabled() and not is_compiling:
            self._look_at(x)
        if x.dtype != gate.dtype or x.shape[-1] != gate.shape[1] or x.device != gate.device or token_mask is not None:
            ops.check(type(self).__name__, x, w, self.activation, token_mask)
        if x.device != self._plan_device or len(gate) != self._plan_neurons:  # moved one by one, or shared out before
            self._place_plan(x.device)
        captured = ops.is_captured(x.device)
        plan = self._plan_captured if captured else self._plan_eager
        if captured and not is_compiling:
            self._keep_for_graphs(plan)
        kept = () if self.frozen is None else self.frozen.tensors(w, self.plan)
        return ops.run(x, w, self.activation, self.backend, plan, kept, token_mask, return_stats)

    def _run_share(self, share: Share, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        if self._plan_neurons != share.n_own:  # they were shared out since
            self._place_plan()
        whole = self._whole_weights()
        own = share.weights_of_own(whole)
        return share.run(lambda x: self._ffn(x, token_mask, return_stats, own), x, whole.down_bias, return_stats)

    def in_fp8(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """y of a layer whose projections are all ``Fp8Linear``, for compiled code. ``weights``: see ``_fp8_tensors``;
        copies, where that code has written to them and the layer does not have it yet."""
        index, linears = self._kernels_on, [self._modules[name] for name in self.projections]
        if index is None or not self._has_fp8():
            return self._call_projections(x, None, False)
        if any(a.data_ptr() != b.data_ptr() for a, b in zip(weights, self._fp8_tensors(), strict=True)):
            given = zip(linears, weights[::2], weights[1::2], strict=True)
            gate, *up, down = [functools.partial(_with_weight, linear, q, scale) for linear, q, scale in given]
            h = reference.activate(torch.relu(gate(x)), self.activation)
            return down(h * up[0](x) if up else h)
        y = self._by_fp8_kernels(x, index)
        return self._call_projections(x, None, False) if y is None else y

    def _plain_fp8(self) -> list[Tensor] | None:
        """As ``_fp8_tensors``, if the projections do nothing but multiply by them: for every eager call."""
        modules, tensors = self._modules, list[Tensor]()
        for name in self.projections:
            linear: Any = modules[name]
            own = linear.__dict__
            if type(linear) is not Fp8Linear or own["emulate"] or "forward" in own:
                return None
            parameters, a, b, c, d = _PARAMETERS_AND_HOOKS(own)
            if a or b or c or d or parameters["bias"] is not None:
                return None
            tensors += parameters["weight"], parameters["weight_scale"]
        return tensors

    def _by_fp8_kernels(self, x: Tensor, index: int) -> Tensor | None:
        """y of a layer whose projections are all ``Fp8Linear``; None where they are to be called."""
        tensors = None if self._number is None or torch_module._has_any_global_hook() else self._plain_fp8()
        if (
            tensors is None
            or torch.is_grad_enabled()
            or type(x) is not Tensor
            or x.dtype != torch.bfloat16
            or x.dim() < 2
            or x.shape[-1] != tensors[0].shape[1]
            or not x.get_device() == tensors[0].get_device() == index == _current_device()
            or self.backend not in _KERNELS
            or not registered.nothing_stands_before("cuda")
        ):
            return None
        captured = _is_capturing()
        if self._plans_itself and not captured:
            self._look_at(x)
        plan: Any = self._plan_captured if captured else self._plan_eager  # read once: another thread may change it
        (few, _, least), drift, tokens = self._plan_tokens[captured], self._drift, x.numel() // x.shape[-1]
        is_sparse = captured and (
            0 < tokens <= few or (tokens >= least and sizes_of(plan)[0] < len(self.neuron_counts))
        )
        before, kept = self._fp8, self._kept_of_fp8(tensors, plan, is_sparse=is_sparse, captured=captured)
        if kept is None:
            return None
        if captured:
            self._keep_for_graphs(plan)
            self._keep_for_graphs(kept)
        watch = None if drift is None or captured or tokens < least else drift.room(x.device)
        given = kept.w, self.activation, plan, few, least, kept.layout, watch
        y: Tensor = backends.kernels().fp8.forward(x, *given, settled=before is self._fp8 and before is not None)
        if watch is not None and drift is not None:
            drift.send(watch, tokens)
        elif drift is not None and not captured and tokens >= least and drift.is_too_far():
            self._plan_anew()
        return y

    def _kept_of_fp8(self, tensors: list[Tensor], plan: Any, *, is_sparse: bool, captured: bool) -> Any:
        """What kernels read, made anew where a weight or the plan is another; None where they cannot read them.
        ``is_sparse``: this batch is, of those that are captured."""
        found, states = self._fp8, [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]
        if found is not None and found[0] == states and found[1] is plan.order:
            return found[2]
        kernels = backends.kernels().fp8
        gate, *up, down = weights = [linear.fp8() for linear in (getattr(self, name) for name in self.projections)]
        if not kernels.can_read(*weights):
            kept = None
        elif captured:  # a graph would own what is made here, but dense batches need nothing
            if is_sparse:
                raise RuntimeError("FP8 weights are new or have changed: call the layer once before capturing it")
            return kernels.keep(gate, up[0] if up else None, down, None)
        else:
            with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be written over
                kept = kernels.keep(gate, up[0] if up else None, down, plan)
            if found is not None and found[1] is plan.order and found[2] is not None:
                found[2].rewrite_(kept)  # where graphs read it, too
                kept = type(kept)(kept.w._replace(down=found[2].w.down), found[2].layout)
        self._fp8 = states, plan.order, kept
        return kept

    def _fp8_tensors(self) -> list[Tensor]:
        """Weights and scales of projections that are all ``Fp8Linear``."""
        linears: list[Any] = [self._modules[name] for name in self.projections]
        return [t for linear in linears for t in (linear.weight, linear.weight_scale)]

    def runs_in_parts(self) -> bool:
        """Whether FP8 weights are laid out for the kernels for many tokens, as since the first call with this plan."""
        return self._fp8 is not None and self._fp8[2] is not None and self._fp8[2].layout is not None

    def _call_projections(self, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        *inputs, down = (getattr(self, name) for name in self.projections)
        r = torch.relu(inputs[0](x))
        h = reference.activate(r, self.activation)
        for up in inputs[1:]:
            h = h * up(x)
        y = down(h)
        if not return_stats:
            return y
        F, n_neurons, share = r.shape[-1], len(self.neuron_counts), self.share()
        if F not in (n_neurons, n_neurons if share is None else share.n_own):
            raise ValueError(f"{self.projections[0]} gave {F} of {n_neurons} neurons: no statistics of a part")
        mask = None if token_mask is None else token_mask.reshape(-1).to(torch.bool)
        l1_sum, counts = reference.statistics(r.reshape(-1, F), h.reshape(-1, F), mask)
        tokens = counts.new_full((), r[..., 0].numel(), dtype=torch.int64) if mask is None else mask.sum()
        stats = ops.Stats(l1_sum, counts, tokens)
        return y, stats if share is None or n_neurons == F else share.stats_of_all(stats)

    def extra_repr(self) -> str:
        linear = getattr(self, self.projections[0])
        parts = [f"{linear.in_features} -> {linear.out_features} -> {linear.in_features}", self.activation]
        parts.append(f"backend={self.backend}")
        reason = self.why_called()
        if reason is not None:
            is_sharded = reason.endswith("DTensor")  # which is plain while FSDP runs the layer
            parts.append("its weights are sharded" if is_sharded else f"runs densely: {reason}")
        share = self.share()
        if share is not None:
            parts.append(f"neurons {share.own.start} to {share.own.stop - 1} here")
        if self.neuron_counts.device.type == "meta":
            return ", ".join(parts)
        mean = self.mean_active
        if mean is not None:
            silent = int((self.neuron_counts == 0).sum())
            parts.append(
                f"{mean:.1f} of {linear.out_features} active over {int(self.tokens_seen):,} tokens, {silent} never"
            )
        elif self.track_counts:
            parts.append("counting, no tokens yet")
        if self.plan is not None:
            parts.append(repr(self.plan))
        if self.frozen is not None:
            parts.append(f"frozen, {self.frozen.nbytes / 1e6:.1f} MB")
        return ", ".join(parts)


class GatedSparseFFN(SparseFFNBase):
    """y = down_proj(a(gate_proj(x)) * up_proj(x)), a = relu or relu2, made fast by sparsity.

    >>> layer = GatedSparseFFN(64, 256, track_counts=True)
    >>> sorted(layer.state_dict())
    ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
    >>> layer(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    >>> int(layer.tokens_seen)
    10
    """

    projections = ("gate_proj", "up_proj", "down_proj")
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class SparseFFN(SparseFFNBase):
    """y = down_proj(a(up_proj(x))), a = relu or relu2, made fast by sparsity.

    >>> SparseFFN(64, 256, activation="relu2", bias=True)
    SparseFFN(
      64 -> 256 -> 64, relu2, backend=auto
      (up_proj): Linear(in_features=64, out_features=256, bias=True)
      (down_proj): Linear(in_features=256, out_features=64, bias=True)
    )
    """

    projections = ("up_proj", "down_proj")
    up_proj: nn.Linear
    down_proj: nn.Linear


# ---------------------------------------------------------------------------------------------------------
# Freezing a model
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FreezeReport:
    """What ``freeze_`` did; prints as one line."""

    layers: int
    bytes: int
    skipped: tuple[tuple[str, str], ...]  # name and reason

    def __str__(self) -> str:
        line = f"{self.layers} feed-forward layers frozen, {self.bytes / 1e6:,.1f} MB beside their weights"
        return line + (f"; {len(self.skipped)} not: {self.skipped[0][1]}" if self.skipped else "")


def freeze_(model: nn.Module) -> FreezeReport:
    """Take the user's word that the weights of a model's sparse FFNs stay, and keep beside them what kernels read
    faster.

    Writes through ``.data`` need ``refresh_`` from now on; other changes are seen. Not for layers in training.
    """
    layers, skipped = list(sparse_ffns(model)), []
    if any(ffn.training for _, ffn in layers):
        raise ValueError("freeze_: the model is in training mode; call model.eval() first")
    for name, ffn in layers:
        reason = ffn.why_called()
        if reason is None:
            ffn.freeze()
        else:
            skipped.append((name, reason))
    frozen = [ffn for _, ffn in layers if ffn.frozen is not None]
    return FreezeReport(len(frozen), sum(ffn.frozen_bytes() for ffn in frozen), tuple(skipped))


def thaw_(model: nn.Module) -> int:
    """Let go of what ``freeze_`` made, and of what is kept of FP8 weights, until they run sparsely again; returns how
    many layers were frozen."""
    frozen = [ffn for _, ffn in list(sparse_ffns(model)) if ffn.frozen is not None]
    for ffn in frozen:
        ffn.frozen = None
    for _, ffn in list(sparse_ffns(model)):
        ffn._fp8 = None
    return len(frozen)


def refresh_(model: nn.Module) -> int:
    """Write frozen state, and what is kept of FP8 weights, over in place, from the weights as they are now; returns how
    many layers have either."""
    refreshed = 0
    for _, ffn in list(sparse_ffns(model)):
        has_fp8 = ffn.refresh_fp8()
        if ffn.frozen is not None:
            ffn.refresh()
        refreshed += has_fp8 or ffn.frozen is not None
    return refreshed


# ---------------------------------------------------------------------------------------------------------
# Dense blocks
# ---------------------------------------------------------------------------------------------------------


def find_activation(mlp: nn.Module) -> tuple[str, str] | None:
    """(attribute, name) of a dense block's activation module or function, or None where it tells none."""
    for attribute in ("act_fn", "activation_fn", "act", "gelu_impl"):  # the last is Bloom's
        function = getattr(mlp, attribute, None)
        if function is not None:
            return attribute, getattr(function, "__name__", type(function).__name__)
    return None


def activation_of(mlp: nn.Module) -> str:
    """relu or relu2, by the name of a dense block's activation; an error for any other."""
    found = find_activation(mlp)
    if found is None:
        raise ValueError(f"{type(mlp).__name__} does not tell its activation; pass activation='relu' or 'relu2'")
    attribute, name = found
    if name not in _KNOWN_ACTIVATIONS:
        raise ValueError(
            f"{type(mlp).__name__}.{attribute} is {name}: a sparse FFN computes relu or relu2; "
            f"changing the activation changes the model, so pass activation=... only if you mean it"
        )
    return _KNOWN_ACTIVATIONS[name]
