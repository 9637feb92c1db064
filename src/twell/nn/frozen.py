"""Frozen state: copies derived from a layer's weights, kept because the user declared that the weights stay.

``freeze_`` makes them, ``thaw_`` and ``train()`` drop them. Kernels read them faster than the weights: gate rows in the
plan's order, Wd neuron by neuron, and an int8 copy of the gate that rules neurons out for one token (a proven bound:
results are those of the weights). A kernel may also read a frozen gate before the kernel ahead of it has ended.

The tensors stay at their addresses, so that CUDA graphs go on reading them. A visible change of weights (a version
counter, an address) rewrites them in place at the next call. A write through ``.data`` is invisible: call
``refresh_`` after it."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.plan import Plan
from twell.reference import Weights

_address, _version = Tensor.data_ptr, operator.attrgetter("_version")


class _Seen(NamedTuple):
    """The weights that frozen state was made from. It holds them, so that no other tensor takes over an id; weak
    references would break torch.utils.swap_tensors."""

    plan: Plan | None
    ids: list[int]
    held: list[Tensor]
    addresses: list[int]
    counted: list[Tensor]  # those with a version counter: tensors of inference mode have none
    versions: list[int]

    @classmethod
    def of(cls, w: Weights, plan: Plan | None) -> _Seen:
        held = [t for t in w if t is not None]
        counted = [t for t in held if not t.is_inference()]
        return cls(plan, [*map(id, w)], held, [*map(_address, held)], counted, [*map(_version, counted)])


class FrozenState:
    """Frozen state of one layer. ``tensors`` is what operations take: see ``cpu.freeze`` and ``gpu.freeze``."""

    def __init__(self, w: Weights, plan: Plan | None, backend: str) -> None:
        self.backend = backend
        self.is_captured = False
        self._tensors = self._make(w, plan)
        self._seen: _Seen | None = None
        self._written(w, plan)

    def tensors(self, w: Weights, plan: Plan | None) -> tuple[Tensor, ...]:
        """Up to date with visible changes. (Code under a compiler is traced once: registered.py checks for it.)"""
        return self._tensors if torch.compiler.is_compiling() else self.tensors_now(w, plan, _is_capturing(w))

    def tensors_now(self, w: Weights, plan: Plan | None, captured: bool) -> tuple[Tensor, ...]:
        """``tensors`` for an eager call that knows whether a CUDA graph captures it."""
        if not self._is_of(w, plan):
            self.rewrite(w, plan)
        if captured:
            self.is_captured = True
        return self._tensors

    def forget(self) -> None:
        """Rewrite at the next call: after ``to`` a weight may have other values at its old address."""
        self._seen = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors)

    def rewrite(self, w: Weights, plan: Plan | None) -> None:
        """Rewrite in place from the present weights. If sizes have changed, make new tensors, unless a CUDA graph reads
        the old ones."""
        if _is_capturing(w):
            raise RuntimeError(
                "a frozen layer's weights or plan have changed: call it, or refresh_, before it is captured"
            )
        new = self._make(w, plan)
        fits = len(new) == len(self._tensors) and all(
            (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            for a, b in zip(self._tensors, new, strict=True)
        )
        if fits:
            with torch.no_grad():
                for old, value in zip(self._tensors, new, strict=True):
                    old.copy_(value)
        elif self.is_captured:
            raise RuntimeError(
                "a frozen layer was captured in a CUDA graph, and its plan, device, dtype or screen has changed since: "
                "call twell.thaw_, then freeze and capture it again"
            )
        else:
            self._tensors = new
        self._written(w, plan)

    def _written(self, w: Weights, plan: Plan | None) -> None:
        if w.gate.device.type == "cuda":  # kernels read the tensors before the kernel ahead of them has ended
            torch.cuda.current_stream(w.gate.device).synchronize()
        self._seen = _Seen.of(w, plan)
        if self._tensors:
            self._tensors[0].twell_states = w.states()  # type: ignore[attr-defined]

    def _is_of(self, w: Weights, plan: Plan | None) -> bool:
        """Whether no change is visible: same tensors, addresses and version counters. Every call asks."""
        seen = self._seen
        return (
            seen is not None
            and plan is seen.plan
            and [*map(id, w)] == seen.ids
            and [*map(_address, seen.held)] == seen.addresses
            and [*map(_version, seen.counted)] == seen.versions
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other weights: it is rewritten when first used."""
        return {**self.__dict__, "_seen": None, "is_captured": False}

    def _make(self, w: Weights, plan: Plan | None) -> tuple[Tensor, ...]:
        from twell import cpu
        from twell.ops import backends

        w = Weights._make(None if t is None else t.detach() for t in w)
        chosen = backends.choose_backend(self.backend, w.gate.device)
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode cannot be rewritten
            if chosen == "cpu":
                return cpu.freeze(w)
            if chosen == "triton":
                from twell import gpu

                return gpu.freeze(w, plan)
        return ()


def _is_capturing(w: Weights) -> bool:
    return w.gate.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
