"""Neuron-major copies of ``down_proj``: row n is what neuron n adds to the output.

HF stores ``down_proj`` as [D, F]; a sparse down projection reads single neurons, which there are strided
columns. The copy is an in-memory matter: it is kept beside the weight as long as the weight lives, made
again when the weight's version counter or storage has moved, and costs the weight's bytes once more.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    data_ptr: int
    neuron_major: Tensor


_copies: dict[int, _Copy] = {}  # by id of the weight; an entry goes when its weight does


def neuron_major(w_down: Tensor) -> Tensor | None:
    """``w_down`` [D, F] as contiguous [F, D], or None where a copy could not be kept up to date.

    A weight that is already neuron-major in memory (``w_down.t()`` is contiguous) is not copied.
    Weights made under ``torch.inference_mode`` count no versions, so no copy of them can be trusted.
    """
    copy = _copies.get(id(w_down))
    if copy is not None and _is_current(w_down, copy):
        return copy.neuron_major
    if w_down.t().is_contiguous():
        return w_down.detach().t()
    if w_down.is_inference():
        return None
    key = id(w_down)
    with torch.no_grad():
        fresh = w_down.detach().t().contiguous()
    weight = weakref.ref(w_down, lambda _: _copies.pop(key, None))
    _copies[key] = _Copy(weight, w_down._version, w_down.data_ptr(), fresh)
    return fresh


def copied_bytes() -> int:
    """Bytes held in neuron-major copies, for memory tables."""
    return sum(c.neuron_major.numel() * c.neuron_major.element_size() for c in _copies.values())


def _is_current(w_down: Tensor, copy: _Copy) -> bool:
    """Same weight, same version, same memory; on the CPU also the same last element.

    Writing through ``w.data`` moves no version counter. The last element catches an update of the whole
    weight, such as an old optimiser's, for 0.03 ms beside a 1 ms gate; no sample could catch every write. (A
    weight whose last element is NaN is copied anew each time: slow, and right.) On a GPU it would be a sync.
    """
    if copy.weight() is not w_down or copy.version != w_down._version or copy.data_ptr != w_down.data_ptr():
        return False
    return w_down.device.type != "cpu" or copy.neuron_major[-1, -1].item() == w_down[-1, -1].item()
