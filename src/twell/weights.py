"""Copies of weights in the order that kernels read them, kept beside the weights as long as those live.

HF stores ``down_proj`` as [D, F]; a sparse down projection reads single neurons, which there are strided columns. So
``neuron_major`` keeps a copy [F, D], and ``kept`` any other arrangement. They cost memory: ``copied_bytes``.
A copy is made again when

- a weight's version counter or its storage has moved, or
- any ``torch.optim`` optimiser has stepped since: fused optimisers write without moving version counters, or
- (``sampled`` copies on the CPU, where looking costs no sync) a sample of the weight has changed.

A CUDA graph that was captured with a copy goes on reading it where it was. So such copies live as long as their
weights, stay in place, and are written over when they are made again; after an optimiser's step at once (if ``again``
says how), since a replay asks for nothing. What is not all tensors is not written over: such a graph, of large batches,
has to be captured again when weights change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Copy(NamedTuple):
    weights: tuple[weakref.ref[Tensor], ...]
    state: tuple[tuple[int, int], ...]  # version and address of each weight
    value: Any
    survives_steps: bool
    samples: list[Any]
    again: Callable[..., Any] | None  # makes it of the weights

    def is_of(self, weights: Sequence[Tensor], state: tuple[tuple[int, int], ...]) -> bool:
        return self.state == state and all(r() is w for r, w in zip(self.weights, weights, strict=True))


_copies: dict[tuple[Hashable, ...], _Copy] = {}  # by kind and ids of the weights; an entry goes when a weight does
_in_graphs: dict[tuple[Hashable, ...], list[Any]] = {}  # values that graphs read, by the same keys


def _key(kind: Hashable, weights: Sequence[Tensor]) -> tuple[Hashable, ...]:
    return kind, *map(id, weights)


def _state(weights: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((w._version, w.data_ptr()) for w in weights)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _drop_copies_after_optimizer_steps() -> None:
    def drop(*_: Any) -> None:
        for key, copy in [(key, copy) for key, copy in _copies.items() if not copy.survives_steps]:
            weights = [w for r in copy.weights if (w := r()) is not None]
            if copy.again is None or len(weights) < len(copy.weights) or not _is_in_a_graph(key, copy.value):
                del _copies[key]
            else:
                value = _written_over(copy, copy.again(*weights))
                _copies[key] = copy._replace(state=_state(weights), value=value)

    register_optimizer_step_post_hook(drop)


def _is_in_a_graph(key: tuple[Hashable, ...], value: Any) -> bool:
    return any(v is value for v in _in_graphs.get(key, ()))


def _note_if_captured(key: tuple[Hashable, ...], value: Any) -> None:
    if _is_capturing() and value is not None and not _is_in_a_graph(key, value):
        _in_graphs.setdefault(key, []).append(value)


def _written_over(copy: _Copy, new: Any) -> Any:
    """``copy``'s value with ``new``'s numbers, for graphs that read it; ``new`` itself where that cannot be."""
    old = copy.value
    olds, news = (v if isinstance(v, tuple) else (v,) for v in (old, new))
    pairs = list(zip(olds, news, strict=False))
    if len(olds) != len(news) or not all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        for a, b in pairs
    ):
        return new
    addresses = {address for _, address in copy.state}  # of the weights: what is not copied is their own memory
    with torch.no_grad():
        for a, b in pairs:
            if a.data_ptr() not in addresses:
                a.copy_(b)
    return old


def _forget(key: tuple[Hashable, ...]) -> None:
    _copies.pop(key, None)
    _in_graphs.pop(key, None)


def kept(
    kind: Hashable,
    weights: Sequence[Tensor],
    make: Callable[[], Any],
    *,
    survives_steps: bool = False,
    sampled: bool = False,
    again: Callable[..., Any] | None = None,
) -> Any:
    """``make()``, or what it returned the last time for this kind and these weights if none of them has changed since.

    ``survives_steps``: they are nothing that an optimiser changes. ``sampled``: look at a sample of each (matrices).
    ``again``: of the weights makes the same, whatever ``make`` would decide now, without holding them; for what graphs
    read.
    Weights made under ``torch.inference_mode`` count no versions, so nothing made of them can be trusted or kept. What
    is made while a graph is captured is not kept either: only a replay fills it.
    """
    if any(w.is_inference() for w in weights):
        return make()
    key, state, samples = _key(kind, weights), _state(weights), [_sample(w) for w in weights] if sampled else []
    copy = _copies.get(key)
    if copy is not None and copy.samples == samples and copy.is_of(weights, state):
        _note_if_captured(key, copy.value)
        return copy.value
    if _is_capturing():
        return make()
    _drop_copies_after_optimizer_steps()
    if copy is not None and _is_in_a_graph(key, copy.value):
        value = _written_over(copy, make() if again is None else again(*weights))
    else:
        value = make()
    references = tuple(weakref.ref(w, lambda _: _forget(key)) for w in weights)
    _copies[key] = _Copy(references, state, value, survives_steps, samples, again)
    return value


def kept_already(kind: Hashable, weights: Sequence[Tensor]) -> Any:
    """What ``kept`` would return without making it anew, or None. (Of copies that are not ``sampled``.)"""
    key = _key(kind, weights)
    copy = _copies.get(key)
    if copy is None or not copy.is_of(weights, _state(weights)):
        return None
    _note_if_captured(key, copy.value)
    return copy.value


def neuron_major(w_down: Tensor) -> Tensor | None:
    """``w_down`` [D, F] as contiguous [F, D], or None where a copy could not be kept up to date.

    A weight that is already neuron-major in memory (``w_down.t()`` is contiguous) is not copied.
    """
    if w_down.t().is_contiguous():
        return w_down.detach().t()
    if w_down.is_inference():
        return None
    on_cpu = w_down.device.type == "cpu"
    return kept("neuron-major", [w_down], lambda: w_down.detach().t().contiguous(), sampled=on_cpu)


def copied_bytes() -> int:
    """Bytes held in copies, for memory tables. What a copy shares with another, or with a weight, is counted once."""
    storages = {}
    for copy in _copies.values():
        own = {w.untyped_storage().data_ptr() for r in copy.weights if (w := r()) is not None}
        for t in copy.value if isinstance(copy.value, tuple) else (copy.value,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in own:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(storages.values())


def _sample(w: Tensor) -> list[Any]:
    """About 16 elements, the last among them: a guard against writes through ``w.data``.

    They move no version counter. An update of the whole weight cannot pass; a write to a few elements can, and
    no sample could stop it. (NaN in the sample means a copy each time: slow, and right.)
    """
    rows, cols = (max(1, n // 4) for n in w.shape)
    return w.detach()[(w.shape[0] - 1) % rows :: rows, (w.shape[1] - 1) % cols :: cols].tolist()
