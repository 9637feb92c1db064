"""Numbers on their way from a device to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host. Making it waits for nothing; ``value`` waits for what was queued before it."""

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


def send(counts: Tensor) -> Tensor:
    """A copy of ``counts`` (integers, none negative) on the host, -1 until they are there: a tensor and nothing else,
    which an operator may return and autograd keep. Waits for nothing."""
    if counts.device.type != "cuda":
        return counts.clone()
    copy = torch.full(counts.shape, -1, dtype=counts.dtype, pin_memory=True)
    return copy.copy_(counts, non_blocking=True)


def receive(copy: Tensor, counts: Tensor) -> list[int]:
    """What ``send(counts)`` has brought, once it is there.

    Looks at the memory it comes to. (An event would have to travel with the tensor.) A hook on saved tensors may have
    copied that too early: then ``counts`` are asked.
    """
    while counts.device.type == "cuda" and bool((copy < 0).any()):
        if torch.cuda.current_stream(counts.device).query():  # all that was queued is done; raises what went wrong
            return (copy if bool((copy >= 0).all()) else counts).tolist()
        time.sleep(2e-5)
    return copy.tolist()
