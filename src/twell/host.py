"""Copies of tensors to the host that do not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor to the host. Making it does not wait; ``value`` waits for the work queued before it."""

    def __init__(self, t: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = t
        if t.device.type == "cuda":
            self._copy = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self._copy.copy_(t, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
