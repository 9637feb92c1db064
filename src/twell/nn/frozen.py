"""Frozen state: what a layer derives from its weights and keeps, by the user's word that they stay as they are.

``freeze_`` makes it, ``thaw_`` (and ``train()``) let go. It is what kernels read faster than the weights themselves:
gate rows in the plan's order, Wd neuron by neuron, and an int8 copy of the gate that rules neurons out for one token (a
proven bound: results are those of the weights). And a frozen gate may be read before the kernel before it has ended.

Its tensors stay where they are, so that CUDA graphs go on reading them. A change of weights that can be seen (a version
counter, an address) rewrites them in place at the next call. A write through ``.data`` cannot be seen: call
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
    """Of which weights frozen state is. They are held themselves, so that no other takes one's place: weak references
    would keep torch.utils.swap_tensors from working."""

    plan: Plan | None
    ids: list[int]
    held: list[Tensor]
    addresses: list[int]
    counted: list[Tensor]  # of them; tensors of inference mode have no version
    versions: list[int]

    @classmethod
    def of(cls, w: Weights, plan: Plan | None) -> _Seen:
        held = [t for t in w if t is not None]
        counted = [t for t in held if not t.is_inference()]
        return cls(plan, [*map(id, w)], held, [*map(_address, held)], counted, [*map(_version, counted)])


class Frozen:
    """One layer's. ``tensors`` is what operations take: see ``cpu.freeze`` and ``gpu.freeze`` for what they are."""

    def __init__(self, w: Weights, plan: Plan | None, backend: str) -> None:
        self.backend = backend
        self.is_captured = False
        self._tensors = self._make(w, plan)
        self._seen: _Seen | None = None
        self._written(w, plan)

    def tensors(self, w: Weights, plan: Plan | None) -> tuple[Tensor, ...]:
        """Up to date, as far as changes can be seen. (Compiled code is made once: for it registered.py looks.)"""
        return self._tensors if torch.compiler.is_compiling() else self.tensors_now(w, plan, _is_capturing(w))

    def tensors_now(self, w: Weights, plan: Plan | None, captured: bool) -> tuple[Tensor, ...]:
        """The same for an eager call that knows whether a CUDA graph captures it."""
        if not self._is_of(w, plan):
            self.rewrite(w, plan)
        if captured:
            self.is_captured = True
        return self._tensors

    def forget(self) -> None:
        """Rewrite it at the next call: after ``to`` a weight may lie at its old address, with other values."""
        self._seen = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors)

    def rewrite(self, w: Weights, plan: Plan | None) -> None:
        """From the weights as they are, in place. Where sizes have changed, anew, unless a CUDA graph reads the old
        ones."""
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
        if w.gate.device.type == "cuda":  # kernels read it before the one before them has ended
            torch.cuda.current_stream(w.gate.device).synchronize()
        self._seen = _Seen.of(w, plan)
        if self._tensors:
            self._tensors[0].twell_states = w.states()  # type: ignore[attr-defined]

    def _is_of(self, w: Weights, plan: Plan | None) -> bool:
        """Whether no change is to be seen: the same tensors at the same addresses, with their version counters. Every
        call asks."""
        seen = self._seen
        return (
            seen is not None
            and plan is seen.plan
            and [*map(id, w)] == seen.ids
            and [*map(_address, seen.held)] == seen.addresses
            and [*map(_version, seen.counted)] == seen.versions
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of other tensors: it is written anew when first used."""
        return {**self.__dict__, "_seen": None, "is_captured": False}

    def _make(self, w: Weights, plan: Plan | None) -> tuple[Tensor, ...]:
        from twell import cpu
        from twell.ops import backends

        w = Weights._make(None if t is None else t.detach() for t in w)
        chosen = backends.choose_backend(self.backend, w.gate.device)
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be written over
            if chosen == "cpu":
                return cpu.freeze(w)
            if chosen == "triton":
                from twell import gpu

                return gpu.freeze(w, plan)
        return ()


def _is_capturing(w: Weights) -> bool:
    return w.gate.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
