"""The projections of a sparse FFN: what is known of them, and the weights that a call reads from them.

A layer reads the weight of a plain ``nn.Linear``. Where a projection does more than multiply by its weight (an adapter,
a hook, a subclass), the layer calls its projections one by one, as the dense block would: ``why_called``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from twell import reference
from twell.fp8 import Fp8Linear
from twell.nn.parallel import Share, share_of, stock_forward
from twell.ops import Stats
from twell.reference import Weights

# Activation modules and functions by name, as PyTorch and transformers call them.
_KNOWN_ACTIVATIONS = {
    "ReLU": "relu",
    "relu": "relu",
    "ReLUSquaredActivation": "relu2",
    "relu2": "relu2",
    "relu_squared": "relu2",
}
PARAMETERS_AND_HOOKS = operator.itemgetter(  # of a module's __dict__
    "_parameters", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
FP8_WEIGHTS = "FP8 weights (without biases, Hopper GPUs run few and many tokens sparsely)"


def why_called(linear: nn.Module, name: str, known_forward: Any = None, is_share: bool = False) -> str | None:
    """Why a projection must be called instead of read; None for a plain ``nn.Linear``.

    ``known_forward``: a replaced forward that the layer stands in for. ``is_share``: the weight is a DTensor of which
    the layer takes this process's shard.
    """
    kind = type(linear)
    if kind is Fp8Linear:
        return FP8_WEIGHTS
    if kind is not nn.Linear:  # PEFT's class is called Linear, too
        called = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"
        return f"{name} is {called}, not a plain nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return f"{name} has hooks"
    own = linear.__dict__.get("forward")
    if own is not known_forward and own != nn.Linear.forward.__get__(linear):  # accelerate leaves the class's forward
        return f"{name} has a forward of its own"
    weight = linear._parameters.get("weight")
    if weight is None:
        return f"{name} computes its weight"
    if type(weight) not in (nn.Parameter, Tensor) and not is_share:
        return f"{name} has a weight of type {type(weight).__name__}"
    return None


def neuron_major_(linear: nn.Linear) -> None:
    """Lay the weight [D, F] of a down projection out neuron by neuron: same parameter, shape and values, other strides.

    A sparse layer then reads single neurons without a copy, and F.linear is as fast. Not for training with FSDP, DDP or
    NCCL, which need contiguous parameters: see ``restore_layout_``."""
    with torch.no_grad():
        linear.weight.data = linear.weight.data.t().contiguous().t()


def find_activation(mlp: nn.Module) -> tuple[str, str] | None:
    """(attribute, name) of a dense block's activation module or function; None if it has none under a known name."""
    for attribute in ("act_fn", "activation_fn", "act", "gelu_impl"):  # the last is Bloom's
        function = getattr(mlp, attribute, None)
        if function is not None:
            return attribute, getattr(function, "__name__", type(function).__name__)
    return None


def activation_of(mlp: nn.Module) -> str:
    """relu or relu2, by the name of a dense block's activation; raises for any other."""
    found = find_activation(mlp)
    if found is None:
        raise ValueError(f"{type(mlp).__name__} does not name its activation; pass activation='relu' or 'relu2'")
    attribute, name = found
    if name not in _KNOWN_ACTIVATIONS:
        raise ValueError(
            f"{type(mlp).__name__}.{attribute} is {name}: a sparse FFN computes relu or relu2; "
            f"changing the activation changes the model, so pass activation=... only if you mean it"
        )
    return _KNOWN_ACTIVATIONS[name]


class Projections(nn.Module):
    """A module with two or three projections: input projections first, the output projection last."""

    projections: tuple[str, ...]
    activation: str
    neuron_counts: Tensor

    def why_called(self) -> str | None:
        """Why this layer calls its projections one by one, densely, instead of running its operation; None if it runs
        the operation."""
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
        """The neurons of this process if the layer is tensor parallel, else None: see parallel.py."""
        down: Any = self._modules[self.projections[-1]]
        if type(down._parameters.get("weight")) is nn.Parameter:
            return None
        return share_of([getattr(self, name) for name in self.projections])

    def _has_fp8(self) -> bool:
        return all(type(self._modules[name]) is Fp8Linear for name in self.projections)

    def _plain_weights(self) -> Weights | None:
        """The weights if all projections are plain, else None. A short ``why_called``: every eager call runs it."""
        if torch_module._has_any_global_hook():
            return None
        modules, weights, biases = self._modules, [], []
        for name in self.projections:
            linear: Any = modules[name]
            if type(linear) is not nn.Linear:
                return None
            own = linear.__dict__
            parameters, a, b, c, d = PARAMETERS_AND_HOOKS(own)
            weight = parameters.get("weight")
            if a or b or c or d or "forward" in own or type(weight) is not nn.Parameter:
                return None
            weights.append(weight)
            biases.append(parameters["bias"])
        if len(weights) == 2:  # no up projection
            return Weights(weights[0], None, weights[1], biases[0], None, biases[1])
        return Weights(*weights, *biases)

    def _weights(self) -> Weights:
        """The weights that this process computes with."""
        share = self.share()
        return self._whole_weights() if share is None else share.weights_of_own(self._whole_weights())

    def _whole_weights(self) -> Weights:
        gate, *up, down = (self._modules[name]._parameters for name in self.projections)  # type: ignore[union-attr]
        w = Weights(gate["weight"], None, down["weight"], gate["bias"], None, down["bias"])  # type: ignore[arg-type]
        return w._replace(up=up[0]["weight"], up_bias=up[0]["bias"]) if up else w

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
            raise ValueError(
                f"statistics need all {n_neurons} neurons of the layer, but {self.projections[0]} returned {F}"
            )
        mask = None if token_mask is None else token_mask.reshape(-1).to(torch.bool)
        l1_sum, counts = reference.statistics(r.reshape(-1, F), h.reshape(-1, F), mask)
        tokens = counts.new_full((), r[..., 0].numel(), dtype=torch.int64) if mask is None else mask.sum()
        stats = Stats(l1_sum, counts, tokens)
        return y, stats if share is None or n_neurons == F else share.stats_of_all(stats)
