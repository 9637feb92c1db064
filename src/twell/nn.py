"""Modules: drop-in feed-forward blocks with HF parameter names, backed by ``twell.gated_ffn`` and ``twell.ffn``."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from twell import ops
from twell.plan import MAX_FEW_TOKENS, Plan, choose_plan, costs_for, dense_plan
from twell.reference import ACTIVATIONS

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


class SparseFFNBase(nn.Module):
    """What the two modules share: backend, running counts, conversion from a dense block, repr."""

    projections: ClassVar[tuple[str, ...]]  # input projections first, output projection last
    neuron_counts: Tensor
    tokens_seen: Tensor

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

    def _build(self, linears: list[nn.Linear], activation: str, backend: str, track_counts: bool) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if backend not in ops.BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(ops.BACKENDS)}, got {backend!r}")
        self.activation = activation
        self.backend = backend
        self.track_counts = track_counts
        self.plan: Tensor | None = None  # encoded, on the CPU: no buffer, since those move with the module
        self.few_tokens = 0  # the plan's
        self._first_batches: tuple[Tensor, int] | None = None  # counts and tokens, until there are enough to plan by
        self._plans_itself = True
        for name, linear in zip(self.projections, linears, strict=True):
            setattr(self, name, linear)
        first = linears[0].weight
        counts = torch.zeros(first.shape[0], dtype=torch.int64, device=first.device)
        self.register_buffer("neuron_counts", counts, persistent=False)
        self.register_buffer("tokens_seen", counts.new_zeros(()), persistent=False)

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
        """How the GPU kernels split this layer's work from now on; None: densely. Changes time, never a result.

        A layer for which this was never called plans by what it sees: how to run a few tokens, as in generation, by the
        first 64; how to run many by its first batches of at least 256, 4096 tokens in all.
        """
        self._plans_itself, self._first_batches = False, None
        self._set_plan(plan)

    def _set_plan(self, plan: Plan | None) -> None:
        n_neurons = len(self.neuron_counts)
        if plan is not None and plan.n_neurons != n_neurons:
            raise ValueError(f"the plan is for {plan.n_neurons} neurons, the layer has {n_neurons}")
        with torch.inference_mode(False):  # what is made in inference mode cannot be kept
            self.plan = None if plan is None else plan.encode()
        self.few_tokens = 0 if plan is None else plan.few_tokens

    def plan_from_counts(
        self, counts: Tensor | None = None, tokens: int | None = None, *, training: bool = False
    ) -> Plan:
        """Set the plan that suits neurons which fired ``counts`` times in ``tokens`` tokens, and return it.

        Without them the running counts are read: that waits for the device. ``training``: what suits forward and
        backward together.
        """
        counts = self.neuron_counts if counts is None else counts
        plan = self._plan_for(counts, int(self.tokens_seen) if tokens is None else tokens, training=training)
        self.set_plan(plan)
        return plan

    def _plan_for(self, counts: Tensor, tokens: int, *, training: bool = False) -> Plan:
        return choose_plan(
            counts,
            tokens,
            costs_for(self.neuron_counts.device, training=training),
            width=getattr(self, self.projections[0]).in_features,
            gated=len(self.projections) == 3,
        )

    def _look_at(self, x: Tensor) -> None:
        """Count one of the first batches; once enough tokens were seen, plan, which waits for the device."""
        x_MD = x.reshape(-1, x.shape[-1])
        counts, tokens = (0, 0) if self._first_batches is None else self._first_batches
        is_small = len(x_MD) < LOOK_AT_LEAST and tokens >= FIRST_LOOK
        if is_small or len(x_MD) == 0 or ops.choose_backend(self.backend, x.device) != "triton":
            return
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        x_MD = x_MD[:LOOK_TOKENS]
        first = getattr(self, self.projections[0])
        fired = (torch.relu(nn.functional.linear(x_MD, first.weight, first.bias)) != 0).sum(0)
        seen_before, counts, tokens = tokens, counts + fired, tokens + len(x_MD)
        if tokens >= LOOK_TOKENS:
            self.plan_from_counts(counts, tokens)
            return
        if seen_before < FIRST_LOOK <= tokens:
            self._set_plan(dense_plan(len(fired), self._plan_for(counts, tokens).few_tokens))
        self._first_batches = counts, tokens

    def _few_tokens_of(self, x: Tensor) -> int:
        """The plan's, where it may matter: compiled code is compiled anew for every value that it has read."""
        return self.few_tokens if x.numel() <= MAX_FEW_TOKENS * x.shape[-1] else 0

    # -- forward and repr ------------------------------------------------------------------------------

    def forward(self, x: Tensor, token_mask: Tensor | None = None, return_stats: bool = False) -> Any:
        """y [..., D] for x [..., D]; (y, Stats) with ``return_stats``."""
        if self._plans_itself and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._look_at(x)
        want_stats = return_stats or self.track_counts
        result = self._ffn(x, token_mask, want_stats)
        if not want_stats:
            return result
        y, stats = result
        if self.track_counts:
            self.commit(stats)
        return (y, stats) if return_stats else y

    def _ffn(self, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        raise NotImplementedError

    def extra_repr(self) -> str:
        linear = getattr(self, self.projections[0])
        parts = [f"{linear.in_features} -> {linear.out_features} -> {linear.in_features}", self.activation]
        parts.append(f"backend={self.backend}")
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
            parts.append(repr(Plan.decode(self.plan)))
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

    def _ffn(self, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        return ops.gated_ffn(
            x,
            gate.weight,
            up.weight,
            down.weight,
            gate.bias,
            up.bias,
            down.bias,
            activation=self.activation,
            token_mask=token_mask,
            backend=self.backend,
            return_stats=return_stats,
            plan=self.plan,
            few_tokens=self._few_tokens_of(x),
        )


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

    def _ffn(self, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        up, down = self.up_proj, self.down_proj
        return ops.ffn(
            x,
            up.weight,
            down.weight,
            up.bias,
            down.bias,
            activation=self.activation,
            token_mask=token_mask,
            backend=self.backend,
            return_stats=return_stats,
            plan=self.plan,
            few_tokens=self._few_tokens_of(x),
        )


def find_activation(mlp: nn.Module) -> tuple[str, str] | None:
    """(attribute, name) of a dense block's activation module or function, or None where it tells none."""
    for attribute in ("act_fn", "activation_fn", "act"):
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
