"""Kernels, compiled for declared arguments.

Triton's own launch works out a kernel's specialisation from every argument, each time: 28 us of host time on the host
of an H200. A ``Kernel`` is compiled for declared types, not for the arguments of a call:

    @functools.cache
    def _kernel(dtype, gated):
        return Kernel(_tail_kernel, (dtype, torch.int32, ANY, MULTIPLE), {"GATED": gated, ...}, warps=4)

    _kernel(x.dtype, True)(programs, x, rows, M, D)

A function that makes kernels sees its own arguments alone, so whatever a kernel is compiled for is part of the cache's
key. What a call launches is recorded and then repeated without this Python: see ``replay.py``.

Kernels that have a constexpr OVERLAPS may be set up while the one before them ends (``start_after`` in tiles.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.gpu.shared.replay import CHECKED, INTERPRETED, Matrix, current_device, current_stream, recording
from twell.gpu.shared.tiles import device_facts

# How a number is declared, by an example of it.
MULTIPLE = 16  # a multiple of 16, at least 16, below 2^31: rows of so many elements are read 16 bytes at a time
ANY = 17  # below 2^31
LONG = (1 << 40) + 1  # any number of 64 bits
LONG_MULTIPLE = 1 << 40  # a multiple of 16 of 64 bits: without it masks at < n keep loads from being wide


class Descriptor(NamedTuple):
    """Declares a tensor descriptor of a matrix, read in such blocks by the copy engine."""

    dtype: torch.dtype
    block: tuple[int, int]


class Compiled:
    """A kernel for one device."""

    def __init__(self, by_triton: Any, declared: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.name, self.metadata, self.declared = by_triton.name, by_triton.metadata, declared
        self._run, self.function = by_triton.run, by_triton.function  # which loads it
        self._packed, self._constants = by_triton.packed_metadata, constants
        if self._run.global_scratch_size or self._run.profile_scratch_size:
            raise RuntimeError(f"{self.name} wants scratch memory, which no kernel here should")
        self.param_sizes = [size for d in declared for size in _param_sizes(d)] + [8, 8]  # and scratch memory's two
        self.matches: bool | None = None  # what Triton made of them: see replay.py

    def __call__(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        given = [a if type(a) is int or type(a) is Matrix else a.data_ptr() for a in arguments]
        self._run(
            programs, 1, 1, stream, self.function, self._packed, None, None, None, *given, *self._constants
        )  # fmt: skip


def _param_sizes(declared: torch.dtype | Descriptor | int) -> list[int]:
    """Bytes: of a matrix its tensor map, shape and strides."""
    if isinstance(declared, Descriptor):
        return [128, 4, 4, 8, 8]
    return [4 if declared in (ANY, MULTIPLE) else 8]


class Kernel:
    """A Triton function with its constants, compiled once a device for declared arguments.

    ``arguments``: for each argument that is no constant a dtype (a tensor, aligned to 16 bytes), a ``Descriptor``, or
    one of MULTIPLE, ANY and LONG. ``constants``: the constexprs, in the order the function takes them. ``registers``:
    the most a thread may have. ``cooperative``: all programs run at the same time, and may wait for each other."""

    def __init__(
        self,
        function: Any,
        arguments: Sequence[torch.dtype | Descriptor | int],
        constants: dict[str, Any],
        *,
        warps: int,
        stages: int = 1,
        registers: int | None = None,
        cooperative: bool = False,
    ) -> None:
        if list(function.arg_names[len(arguments) :]) != list(constants):
            raise TypeError(
                f"{function.__name__} takes {function.arg_names}, got {len(arguments)} arguments and {list(constants)}"
            )
        self.function, self.arguments, self.constants = function, tuple(arguments), constants
        self.options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        if not INTERPRETED:
            self.options["launch_pdl"] = bool(constants.get("OVERLAPS", False))
            self.options |= {} if registers is None else {"maxnreg": registers}
            self.options |= {"launch_cooperative_grid": True} if cooperative else {}
        self._compiled: dict[int, Compiled] = {}

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Run it on the current device and stream: tensors, matrices, numbers, 0 where a tensor is not used."""
        if CHECKED:
            self._check(arguments)
        if INTERPRETED:
            given = [_interpreted(a, declared) for a, declared in zip(arguments, self.arguments, strict=True)]
            self.function[(programs,)](*given, **self.constants, **self.options)
            return
        device = current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            compiled = Compiled(self.compile(), self.arguments, tuple(self.constants.values()))
            self._compiled[device] = compiled
        if recording.log is not None:
            recording.log.add(compiled, programs, arguments)
        compiled(programs, current_stream(device), arguments)

    def compile(self) -> Any:
        """What Triton makes of it for the current device, not yet loaded there."""
        examples = [_example(a) for a in self.arguments]
        return self.function.warmup(*examples, **self.constants, **self.options, grid=(1,))

    def _check(self, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != len(self.arguments):
            raise TypeError(
                f"{self.function.__name__}: {len(self.arguments)} arguments declared, {len(arguments)} given"
            )
        for name, declared, got in zip(self.function.arg_names, self.arguments, arguments, strict=False):
            if isinstance(declared, Descriptor):
                fits = isinstance(got, Matrix) and got.base.dtype == declared.dtype and got.base.data_ptr() % 16 == 0
            elif isinstance(declared, int):
                in_range = 0 <= got < (1 << 31 if declared in (ANY, MULTIPLE) else 1 << 63)
                fits = type(got) is int and in_range and (declared in (ANY, LONG) or (got % 16 == 0 and got > 0))
            elif isinstance(got, Tensor):
                both_integers = not (got.is_floating_point() or declared.is_floating_point)  # words of bits
                fits = (got.dtype == declared or both_integers) and got.data_ptr() % 16 == 0
            else:
                fits = type(got) is int and got % 16 == 0
            if not fits:
                raise TypeError(f"{self.function.__name__}: {name} is declared as {declared}, got {got!r:.200}")


def _example(declared: torch.dtype | Descriptor | int) -> Any:
    if not isinstance(declared, Descriptor):
        return declared
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns = declared.block
    t = torch.empty(rows, columns, dtype=declared.dtype, device="meta")
    return TensorDescriptor(t, [rows, columns], [columns, 1], [rows, columns])


def _interpreted(argument: Any, declared: torch.dtype | Descriptor | int) -> Any:
    """The interpreter goes by a tensor's own dtype."""
    if isinstance(declared, Descriptor):
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(argument.base, list(argument.shape), list(argument.strides), list(declared.block))
    is_other = isinstance(argument, Tensor) and isinstance(declared, torch.dtype) and argument.dtype != declared
    return argument.view(declared) if is_other else argument


def capability() -> int:
    """Of the current device: 10 * major + minor."""
    return device_facts(current_device())[0]


def can_overlap() -> bool:
    """Whether the current device lets a kernel start while the one before it ends: from Hopper on."""
    return not INTERPRETED and capability() >= 90


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv takes 5 us on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least one that is n or more."""
    return 1 << max(0, n - 1).bit_length()
