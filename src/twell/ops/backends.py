"""The choice of a backend: the reference, the CPU path, or the GPU kernels."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from twell.reference import Weights

BACKENDS = ("auto", "reference", "cpu", "triton")
_AUTOMATIC = ("cpu", "triton", "reference")  # "auto": the first that can run
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported


def why_unavailable(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run on ``device``, or None if it can."""
    if backend == "cpu" and device.type != "cpu":
        return f"it runs on CPU tensors, and these are on {device}"
    return _why_no_triton(device) if backend == "triton" else None


def _why_no_triton(device: torch.device) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "it runs on GPUs, and these tensors are on the CPU"
    if device.type != "cuda":
        return f"it runs on CUDA tensors, and these are on {device}"
    if torch.version.hip is not None:  # torch calls AMD's GPUs cuda, too
        return "its kernels are written for NVIDIA's GPUs (PTX), and this torch is built for AMD's (ROCm)"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"it needs compute capability 8.0, and this GPU has {capability}"


_chosen: dict[tuple[str, torch.device], str] = {}  # a device's abilities do not change


def choose_backend(requested: str, device: torch.device) -> str:
    """The backend that will run: the requested one, or for "auto" the fastest that can run here."""
    chosen = _chosen.get((requested, device))
    if chosen is not None:
        return chosen
    if requested not in BACKENDS:
        raise ValueError(f"unknown backend {requested!r}: expected one of {', '.join(BACKENDS)}")
    if requested == "auto":
        chosen = next(b for b in _AUTOMATIC if why_unavailable(b, device) is None)
    else:
        reason = why_unavailable(requested, device)
        if reason is not None:
            raise ValueError(f"backend {requested!r} is not available: {reason}")
        chosen = requested
    if device.type == "cuda" and not torch.compiler.is_compiling():  # Triton's interpreter may be switched
        _chosen[requested, device] = chosen
    return chosen


def fits_triton(x: Tensor, w: Weights) -> bool:
    return x.dtype != torch.float64 and fits_kernels(*w.down.shape)


def fits_kernels(D: int, F: int) -> bool:
    return D % 16 == 0 and F % 16 == 0 and D * F > 0


@functools.cache
def kernels() -> Any:
    from twell import gpu  # needs Triton

    return gpu
