"""Sparse FFNs inside blocks that do more than an FFN and so stay: OPT's decoder layer runs fc1 and fc2 itself, Bloom's
block adds the residual, GPT-J's has dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from twell import reference
from twell.hf.hooks import has_hooks, share_hooks
from twell.hf.known import KNOWN, PartNames, class_name
from twell.nn import INLINE, SparseFFN, why_called
from twell.ops import Stats


class InlineFFN(SparseFFN):
    """The FFN of a layer whose own forward calls the parts, for example fc1, activation_fn and fc2.

    The layer holds it as an attribute, not as a submodule, so the state dict stays the same. fc1's forward computes the
    whole FFN; the activation and fc2 pass its result on. Each of the three first asks ``why_called``, and if there is a
    reason it computes what it did before. So an adapter or a hook on any of them acts as in the dense model.
    """

    layer: Any
    parts: PartNames
    steps: tuple[Any, Any, Any]  # replace the forwards of fc1 and fc2, and the activation

    def belong_to(self, layer: Any) -> None:
        object.__setattr__(self, "layer", layer)  # not a submodule: the layer holds the FFN
        self.parts = KNOWN[class_name(type(layer))]
        before = getattr(layer, self.parts.activation)
        self.steps = _FirstStep(self), _LastStep(self), _InlineActivation(self, before)

    def put_in(self) -> None:
        for linear, step in zip((self.up_proj, self.down_proj), self.steps, strict=False):
            vars(linear)["forward"] = step
        self._set_activation(self.steps[2])
        self.layer.__dict__[INLINE] = self

    def set_projection(self, name: str, linear: nn.Module) -> None:
        """A projection that is no plain linear keeps its forward, and the layer calls it."""
        super().set_projection(name, linear)
        i = self.projections.index(name)
        setattr(self.layer, self.parts.projections[i], linear)
        if type(linear) is nn.Linear:
            vars(linear)["forward"] = self.steps[i]

    def take_out(self) -> None:
        """Undo ``put_in``. A step that something still calls, such as a wrapper of fc1's forward, computes densely."""
        del self.layer.__dict__[INLINE]
        for linear, step in zip((self.up_proj, self.down_proj), self.steps, strict=False):
            if vars(linear).get("forward") is step:
                del linear.forward
        if getattr(self.layer, self.parts.activation) is self.steps[2]:
            self._set_activation(self.steps[2].before)

    def _set_activation(self, function: Any) -> None:
        if not isinstance(function, nn.Module):
            delattr(self.layer, self.parts.activation)  # or a function could not replace a module
        setattr(self.layer, self.parts.activation, function)

    def _plain_weights(self) -> None:
        """None: only ``why_called`` can tell."""

    def share(self) -> None:
        """None: such blocks do not run on sharded weights."""

    def why_called(self) -> str | None:
        modules = self.layer._modules
        if self.layer.__dict__.get(INLINE) is not self:
            return "it is not in its layer"
        if _has_any_global_hook():
            return "there are global hooks on modules"
        for name, own, step in zip(self.parts.projections, self.projections, self.steps[:2], strict=True):
            linear: Any = modules[name]
            if linear is not self._modules[own] and type(linear) is nn.Linear:
                return f"{name} is another linear"
            reason = why_called(linear, name, step)
            if reason is not None:
                return reason
        return self.why_activation_called()

    def why_activation_called(self) -> str | None:
        """Why the layer's activation may compute more than the ReLU it was; None if it does not."""
        name, activation = self.parts.activation, self.steps[2]
        if self.layer._modules.get(name) is not activation:
            return f"{name} is another one"
        return f"{name} has hooks" if has_hooks(activation) else None


class _FirstStep:
    """fc1's forward: the whole FFN. An object, so that a deep copy refers to the copied FFN."""

    def __init__(self, ffn: InlineFFN) -> None:
        self.ffn = ffn

    def __call__(self, x: Tensor) -> Tensor:
        if self.ffn.why_called() is None:
            return self.ffn(x)
        linear = self.ffn.up_proj
        return type(linear).forward(linear, x)


class _LastStep:
    """fc2's forward: returns y."""

    def __init__(self, ffn: InlineFFN) -> None:
        self.ffn = ffn

    def __call__(self, h: Tensor) -> Tensor:
        if self.ffn.why_called() is None:
            return h
        linear = self.ffn.down_proj
        return type(linear).forward(linear, h)


class _InlineActivation(nn.Module):
    """The layer's activation: returns y. ``train`` and ``to`` of the layer reach the FFN through it."""

    def __init__(self, ffn: InlineFFN, before: Any) -> None:
        super().__init__()
        object.__setattr__(self, "ffn", ffn)
        object.__setattr__(self, "before", before)
        if isinstance(before, nn.Module):
            share_hooks(before, self)

    def forward(self, z: Tensor) -> Tensor:
        ffn: InlineFFN = self.__dict__["ffn"]
        if ffn.why_called() is None:
            return z
        before = self.__dict__["before"]
        h = before.forward(z) if isinstance(before, nn.Module) else before(z)  # hooks are shared: not twice
        if ffn.track_counts:
            l1_sum, counts = reference.statistics(torch.relu(z).flatten(0, -2), h.flatten(0, -2), None)
            ffn.commit(Stats(l1_sum, counts, counts.new_full((), z[..., 0].numel(), dtype=torch.int64)))
        return h

    def train(self, mode: bool = True) -> _InlineActivation:
        self.__dict__["ffn"].train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _InlineActivation:
        self.__dict__["ffn"]._apply(fn, recurse=False)  # its counts; the layer moves the weights
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"of a SparseFFN, {self.__dict__['ffn'].extra_repr()}"
