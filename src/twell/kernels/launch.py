"""Launching kernels with little host time.

Triton's own launch works out a kernel's specialisation from every argument, each time: 35 to 60 us of host time for the
kernels here, and an FFN is six of them. What was compiled is kept under a key that is cheaper to make (10 us), so that
the GPU and not the host is what a batch of 4096 tokens waits for.

Kernels that have a constexpr OVERLAPS may be set up while the one before them ends (``start_after`` in tiles.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from twell.kernels.tiles import device_facts

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    warps: int,
    stages: int,
    registers: int | None = None,
) -> None:
    """Run ``kernel`` on the current device and stream. ``constants``: its constexprs, in the order it takes them.

    ``registers``: the most a thread may have, the same for all launches of a kernel.
    """
    if _INTERPRETED:
        kernel[(programs,)](*arguments, **constants, num_warps=warps, num_stages=stages)
        return
    key = (id(kernel), torch.cuda.current_device(), warps, stages, *constants.values(), *[_kind(a) for a in arguments])
    compiled = _compiled.get(key)
    if compiled is None:
        if kernel.arg_names[len(arguments) :] != list(constants):
            raise TypeError(f"{kernel.__name__} takes {kernel.arg_names}, got constants {list(constants)}")
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": constants.get("OVERLAPS", False)}
        options |= {} if registers is None else {"maxnreg": registers}
        _compiled[key] = kernel[(programs,)](*arguments, **constants, **options)
    else:
        compiled[programs, 1, 1](*arguments, *constants.values())


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel anew for: at least all of it."""
    if type(argument) is int:
        return 1 if argument == 1 else (-2 if argument % 16 else -1) if argument < 1 << 31 else -4 - (argument % 16 > 0)
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.base.dtype, *argument.block_shape  # a tensor descriptor


def can_overlap() -> bool:
    """Whether the current device lets a kernel start while the one before it ends: from Hopper on."""
    return not _INTERPRETED and device_facts(torch.cuda.current_device())[0] >= 90


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv takes 5 us on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least one that is n or more."""
    return 1 << max(0, n - 1).bit_length()
