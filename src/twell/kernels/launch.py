"""Launching kernels with little host time.

Triton's own launch works out a kernel's specialisation from every argument, each time: 28 us of host time on the host
of an H200, where ``compiled.run`` with raw pointers takes 7.5. A ``Kernel`` is compiled for declared types, not for the
arguments of a call, so that a call has nothing to work out:

    @functools.cache
    def _kernel(dtype, gated):
        return Kernel(_tail_kernel, (dtype, torch.int32, ANY, MULTIPLE), {"GATED": gated, ...}, warps=4)

    _kernel(x.dtype, True)(programs, x, rows, M, D)

A function that makes kernels sees its own arguments alone, so whatever a kernel is compiled for is part of the cache's
key.

Kernels that have a constexpr OVERLAPS may be set up while the one before them ends (``start_after`` in tiles.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from twell.kernels.tiles import device_facts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHECKED = os.environ.get("TWELL_CHECK_LAUNCHES") == "1"  # compare every argument with its declaration; tests do

_MOST_DESCRIPTIONS = 256
_IS_KNOWN = triton.__version__.startswith("3.6.")
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # there is none in builds without CUDA
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# How a number is declared, by an example of it.
MULTIPLE = 16  # a multiple of 16, at least 16, below 2^31: rows of so many elements are read 16 bytes at a time
ANY = 17  # below 2^31
LONG = (1 << 40) + 1  # any number of 64 bits
LONG_MULTIPLE = 1 << 40  # a multiple of 16 of 64 bits: without it masks at < n keep loads from being wide


class Descriptor(NamedTuple):
    """Declares a tensor descriptor of a matrix, read in such blocks by the copy engine."""

    dtype: torch.dtype
    block: tuple[int, int]


class Matrix:
    """A matrix [rows, columns] with unit stride along its columns, as an argument declared by a ``Descriptor``."""

    __slots__ = ("base", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, t: Any) -> None:
        self.base, self.shape, self.strides = t, t.shape, t.stride()
        self.padding, self.round_f32_to_tf32 = "zero", False  # the names that Triton's launcher asks for


class Piece:
    """A part of a ``Workspace``: what a kernel needs to know of a tensor, a tenth of a tensor's host time."""

    __slots__ = ("address", "dtype", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.address, self.shape, self.dtype = address, shape, dtype

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        """Of a matrix."""
        return self.shape[1], 1


class Workspace:
    """One allocation for all that a call needs on the way: an allocation takes 4 us of host time, a piece of one 0.5.

    Pieces start at multiples of 256 bytes, and live as long as the call that holds the workspace (its memory is reused
    in the order of the stream). In the interpreter they are tensors."""

    def __init__(self, like: Tensor, size: int) -> None:
        self.buffer = like.new_empty(size, dtype=torch.uint8)
        self.start = 0 if INTERPRETED or CHECKED else self.buffer.data_ptr()
        self.used, self.size = 0, size

    def take(self, *shape: int, dtype: torch.dtype) -> Any:
        at, size = self.used, math.prod(shape) * dtype.itemsize
        self.used = at + padded(size)
        if self.used > self.size:
            raise RuntimeError(f"a workspace of {self.size} bytes is too small for {shape} {dtype} after {at}")
        if INTERPRETED or CHECKED:
            return self.buffer[at : at + size].view(dtype).view(shape)
        return Piece(self.start + at, shape, dtype)


def piece(t: Tensor, start: int, *shape: int) -> Any:
    """Part of a one-dimensional tensor, from an element on that kernels find aligned."""
    if INTERPRETED or CHECKED:
        return t[start : start + math.prod(shape)].view(shape)
    return Piece(t.data_ptr() + start * t.itemsize, shape, t.dtype)


def padded(size: int) -> int:
    """Bytes that a piece of so many takes."""
    return (size + 255) & -256


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
        self._compiled: dict[int, Callable[[int, int, list[Any]], None]] = {}
        self._n_matrices = sum(isinstance(a, Descriptor) for a in arguments)  # they come first
        self._descriptions: dict[tuple[Any, ...], list[Any]] = {}
        self._described_as: Any = None

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Run it on the current device and stream: tensors, pieces of a workspace, addresses, 0 where none is used."""
        if INTERPRETED:
            self._interpret(programs, arguments)
            return
        device = _current_device()
        launch = self._compiled.get(device) or self._compile(device)
        if CHECKED:
            self._check(arguments)
        n = self._n_matrices
        if n == 0:
            given = [a if type(a) is int else a.data_ptr() for a in arguments]
        else:
            given = self._described(arguments[:n], device) if _IS_KNOWN else list(arguments[:n])
            given = given + [a if type(a) is int else a.data_ptr() for a in arguments[n:]]
        launch(programs, _current_stream(device), given)

    def _interpret(self, programs: int, arguments: tuple[Any, ...]) -> None:
        if CHECKED:
            self._check(arguments)
        given = [_interpreted(a, declared) for a, declared in zip(arguments, self.arguments, strict=True)]
        self.function[(programs,)](*given, **self.constants, **self.options)

    def compile(self) -> Any:
        """What Triton makes of it for the current device, not yet loaded there."""
        examples = [_example(a) for a in self.arguments]
        return self.function.warmup(*examples, **self.constants, **self.options, grid=(1,))

    def _compile(self, device: int) -> Callable[[int, int, list[Any]], None]:
        compiled = self.compile()
        self._described_as = getattr(compiled.metadata, "tensordesc_meta", None)
        self._compiled[device] = _launcher(compiled, tuple(self.constants.values()), self._n_matrices > 0)
        return self._compiled[device]

    def _described(self, matrices: tuple[Any, ...], device: int) -> list[Any]:
        """What the copy engine is told: addresses and sizes, so that it may be kept whatever is written there."""
        key = (device, *[(m.base.data_ptr(), *m.shape, m.strides[0]) for m in matrices])
        described = self._descriptions.get(key)
        if described is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._descriptions) >= _MOST_DESCRIPTIONS:
                self._descriptions.clear()
            parts = zip(matrices, self._described_as, strict=True)
            described = [part for m, kind in parts for part in make_tensordesc_arg(m, kind)]
            self._descriptions[key] = described
        return described

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


def _launcher(compiled: Any, constants: tuple[Any, ...], has_matrices: bool) -> Callable[[int, int, list[Any]], None]:
    """(programs, stream, arguments) -> a launch, by Triton's C function without the Python around it: 3 us less, and
    15 where there are descriptors to be made. (Of versions whose C function is known; else as Triton has it.)"""
    run, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata  # run loads it
    if run.global_scratch_size or run.profile_scratch_size:
        raise RuntimeError(f"{compiled.name} wants scratch memory, which no kernel here should")
    cooperative, overlaps = run.launch_cooperative_grid, run.launch_pdl
    if not _IS_KNOWN:

        def by_triton(programs: int, stream: int, arguments: list[Any]) -> None:
            run(programs, 1, 1, stream, handle, metadata, None, None, None, *arguments, *constants)

        return by_triton
    launch = run.launch
    if has_matrices:  # Python that makes descriptors, around the function that is wanted
        launch = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents

    def launched(programs: int, stream: int, arguments: list[Any]) -> None:
        launch(
            programs, 1, 1, stream, handle, cooperative, overlaps, None, None, metadata, None, None, None,
            *arguments, *constants,
        )  # fmt: skip

    return launched


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


def can_overlap() -> bool:
    """Whether the current device lets a kernel start while the one before it ends: from Hopper on."""
    return not INTERPRETED and device_facts(_current_device())[0] >= 90


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv takes 5 us on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least one that is n or more."""
    return 1 << max(0, n - 1).bit_length()
