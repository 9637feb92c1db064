"""``GatedSparseFFN`` and ``SparseFFN``: drop-in feed-forward blocks with HF parameter names, and how a call runs.

A layer computes with what its parameters hold at the moment of the call. A call goes from ``forward`` to ``_ffn``,
which chooses: the projections one by one, the FP8 kernels (fp8_layer.py), the GPU kernels at once (gpu/__init__.py), or
the operation (ops/functional.py), which also trains and runs on CPUs."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from twell import reference
from twell.nn.fp8_layer import KERNELS, Fp8Layer, current_device, is_capturing
from twell.nn.parallel import Share
from twell.nn.projections import activation_of
from twell.ops import backends, registered
from twell.ops import functional as ops
from twell.plan import tokens_of
from twell.reference import ACTIVATIONS, Weights

INLINE = "twell_inline_ffn"  # attribute of a block that runs its FFN itself, as OPT's decoder layer does


def _dense(x: Tensor, w: Weights, activation: str) -> Tensor:
    linear = nn.functional.linear
    h = reference.activate(torch.relu(linear(x, w.gate, w.gate_bias)), activation)
    return linear(h if w.up is None else h * linear(x, w.up, w.up_bias), w.down, w.down_bias)


class SparseFFNBase(Fp8Layer):
    """What the two layers share. Its base classes have the rest: projections, plan and frozen state, FP8."""

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
            self.projections = names  # the layer then has the state dict of a block with names of its own
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if backend not in backends.BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(backends.BACKENDS)}, got {backend!r}")
        self.activation = activation
        self.backend = backend
        self.track_counts = track_counts
        for name, linear in zip(self.projections, linears, strict=True):
            setattr(self, name, linear)
        self._start(linears[0].out_features, linears[0].weight.device)

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
        self._place_plan()

    def forward(self, x: Tensor, token_mask: Tensor | None = None, return_stats: bool = False) -> Any:
        """y [..., D] for x [..., D]; (y, Stats) with ``return_stats``."""
        if not (return_stats or self.track_counts):
            return self._ffn(x, token_mask, False)
        y, stats = self._ffn(x, token_mask, True)
        if self.track_counts:
            self.commit(stats)
        return (y, stats) if return_stats else y

    def _ffn(self, x: Tensor, token_mask: Tensor | None, return_stats: bool, own: Weights | None = None) -> Any:
        """``own``: the weights of this process's share of the neurons; the result is then of these neurons alone.

        The exits, in order:
        1. neurons divided over processes: ``_run_share``, which comes back with ``own``
        2. compiled inference between few and many tokens: the projections, or ``_dense`` with ``own``
        3. other compiled inference with FP8 weights: the operation ``twell::fp8_layer``
        4. eager inference with FP8 weights: ``_by_fp8_kernels``, unless it returns None
        5. projections that are more than weights (``why_called``): called one by one
        6. eager inference on a GPU: ``gpu.dense.infer`` where the plan says dense, else ``gpu.infer_here``
        7. everything else: ``ops.run``"""
        is_compiling, index = torch.compiler.is_compiling(), self._kernels_on
        w = own if is_compiling or own is not None else self._plain_weights()
        if w is None and self._number is None:
            share = self.share()
            if share is not None and self._why_called(share) is None:
                return self._run_share(share, x, token_mask, return_stats)
        if is_compiling and index is not None and token_mask is None and not (return_stats or torch.is_grad_enabled()):
            few, _, least = tokens_of(self._plan_eager)  # type: ignore[arg-type]  # symbols: other plans do not recompile
            if few < x.numel() // x.shape[-1] < least:
                # Here a compiler's own dense code is fastest: tiles of tokens reach 0.75x of it, by their host time.
                return self._call_projections(x, None, False) if own is None else _dense(x, own, self.activation)
            is_plain = x.dtype == torch.bfloat16 and not torch.is_autocast_enabled(x.device.type)
            # Not for exported programs, which may run elsewhere. (In dynamo of torch 2.11 is_exporting is always true.)
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
        if (  # inference on a GPU, in few steps of Python: inside a model each costs 3 us of host time
            index is not None
            and not is_compiling  # compilers cannot trace the rest of this branch
            and not (return_stats or self._plans_itself or torch.is_grad_enabled())
            and token_mask is None
            and self.backend in KERNELS
            and type(x) is Tensor
            and x.get_device() == gate.get_device() == index == current_device()
            and x.dtype == gate.dtype != torch.float64
            and x.dim() > 1
            and x.shape[-1] == gate.shape[1]
            and gate.shape[0] == self._plan_neurons
            and registered.nothing_intercepts("cuda")
        ):
            captured, gpu, tokens = is_capturing(), backends.kernels(), x.numel() // gate.shape[1]
            few, most, least = self._plan_tokens[captured]
            if most < tokens < least:
                return gpu.dense.infer(x, w, self.activation)
            kept = () if self.frozen is None else self.frozen.tensors_now(w, self.plan, captured)
            plan, drift = self._plan_captured if captured else self._plan_eager, self._drift
            if captured:
                self._keep_for_graphs(plan)
            if drift is None or captured or tokens < least:
                return gpu.infer_here(x, w, self.activation, plan, few, most, least, kept)
            watch = drift.room(x.device)
            y = gpu.infer_here(x, w, self.activation, plan, few, most, least, kept, watch)
            if watch is not None:
                drift.send(watch, tokens)
            elif drift.is_too_far():
                self._plan_anew()
            return y
        if not isinstance(x, Tensor) or x.dim() == 0:
            got = "one without dimensions" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{type(self).__name__}: x must be a torch.Tensor, got {got}")
        if self._plans_itself and not torch.is_grad_enabled() and not is_compiling:
            self._look_at(x)
        if x.dtype != gate.dtype or x.shape[-1] != gate.shape[1] or x.device != gate.device or token_mask is not None:
            ops.check(type(self).__name__, x, w, self.activation, token_mask)
        if x.device != self._plan_device or len(gate) != self._plan_neurons:  # weights moved alone
            self._place_plan(x.device)
        captured = ops.is_captured(x.device)
        plan = self._plan_captured if captured else self._plan_eager
        if captured and not is_compiling:
            self._keep_for_graphs(plan)
        kept = () if self.frozen is None else self.frozen.tensors(w, self.plan)
        return ops.run(x, w, self.activation, self.backend, plan, kept, token_mask, return_stats)

    def _run_share(self, share: Share, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        if self._plan_neurons != share.n_own:  # the weights were divided since the plan was placed
            self._place_plan()
        whole = self._whole_weights()
        own = share.weights_of_own(whole)
        return share.run(lambda x: self._ffn(x, token_mask, return_stats, own), x, whole.down_bias, return_stats)

    def extra_repr(self) -> str:
        linear = getattr(self, self.projections[0])
        parts = [f"{linear.in_features} -> {linear.out_features} -> {linear.in_features}", self.activation]
        parts.append(f"backend={self.backend}")
        reason = self.why_called()
        if reason is not None:
            is_sharded = reason.endswith("DTensor")  # while FSDP runs the layer its weights are plain
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
