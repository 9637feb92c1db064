"""Neuron-major copies of ``down_proj``: row n is what neuron n adds to the output.

HF stores ``down_proj`` as [D, F]; a sparse down projection reads single neurons, which there are strided
columns. The copy is an in-memory matter: it is kept beside the weight as long as the weight lives and costs
the weight's bytes once more. It is made again when

- the weight's version counter or its storage has moved, or
- any ``torch.optim`` optimiser has stepped since: fused optimisers write without moving version counters, or
- (on the CPU, where looking costs no sync) a sample of the weight differs from the copy.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Copy(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    data_ptr: int
    neuron_major: Tensor


_copies: dict[int, _Copy] = {}  # by id of the weight; an entry goes when its weight does


@functools.cache
def _drop_copies_after_optimizer_steps() -> None:
    register_optimizer_step_post_hook(lambda *_: _copies.clear())


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
    _drop_copies_after_optimizer_steps()
    key = id(w_down)
    fresh = w_down.detach().t().contiguous()
    weight = weakref.ref(w_down, lambda _: _copies.pop(key, None))
    _copies[key] = _Copy(weight, w_down._version, w_down.data_ptr(), fresh)
    return fresh


def copied_bytes() -> int:
    """Bytes held in neuron-major copies, for memory tables."""
    return sum(c.neuron_major.numel() * c.neuron_major.element_size() for c in _copies.values())


def _is_current(w_down: Tensor, copy: _Copy) -> bool:
    if copy.weight() is not w_down or copy.version != w_down._version or copy.data_ptr != w_down.data_ptr():
        return False
    return w_down.device.type != "cpu" or _same_sample(w_down.detach(), copy.neuron_major.t())


def _same_sample(a: Tensor, b: Tensor) -> bool:
    """Compare about 16 elements, the last among them: a guard against writes through ``w.data``.

    They move no version counter. An update of the whole weight cannot pass; a write to a few elements can, and
    no sample could stop it. 0.1 ms in a cold cache. (NaN in the sample means a copy each time: slow, and right.)
    """
    rows, cols = (max(1, n // 4) for n in a.shape)
    sample = (slice((a.shape[0] - 1) % rows, None, rows), slice((a.shape[1] - 1) % cols, None, cols))
    return a[sample].tolist() == b[sample].tolist()
