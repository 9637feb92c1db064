"""Kernels that are compiled for declared argument types.

Triton's own launch derives a kernel's specialisation from every argument of every call: 28 us of host time on the host
of an H200. A ``Kernel`` is compiled for declared types instead:

    @functools.cache
    def _kernel(dtype, **flags):
        return Kernel(_tail_kernel, (dtype, torch.int32, ANY, MULTIPLE), {"BM": 64, **flags}, warps=4)

    _kernel(x.dtype, GATED=True)(programs, x, rows, M, D)

A function that makes a kernel sees only its own arguments, so everything a kernel is compiled for is part of the
cache's key. The launches of a call are recorded and later repeated without this Python code: see ``replay.py``.

A kernel with a constexpr OVERLAPS uses programmatic dependent launch: it may start while the preceding kernel ends
(``start_after`` in tiles.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.gpu.shared.replay import CHECKED, INTERPRETED, Matrix, current_device, current_stream, recording
from twell.gpu.shared.tiles import device_facts

# Declarations of integer arguments: examples from which Triton derives the specialisation.
MULTIPLE = 16  # a multiple of 16, at least 16, below 2^31: rows of this length allow 16-byte loads
ANY = 17  # below 2^31
LONG = (1 << 40) + 1  # any 64-bit number
LONG_MULTIPLE = 1 << 40  # a 64-bit multiple of 16: without it, masks (at < n) prevent wide loads


class Descriptor(NamedTuple):
    """Declares a matrix that the kernel reads block by block through a tensor descriptor (TMA)."""

    dtype: torch.dtype
    block: tuple[int, int]


class Compiled:
    """A kernel for one device."""

    def __init__(self, by_triton: Any, declared: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self.name, self.metadata, self.declared = by_triton.name, by_triton.metadata, declared
        self._run, self.function = by_triton.run, by_triton.function  # reading them loads the kernel
        self._packed, self._constants = by_triton.packed_metadata, constants
        if self._run.global_scratch_size or self._run.profile_scratch_size:
            raise RuntimeError(f"{self.name} needs scratch memory, which launches do not provide")
        self.param_sizes = [size for d in declared for size in _param_sizes(d)] + [8, 8]  # the last two: scratch memory
        self.matches: bool | None = None  # the compiled parameters' sizes: see _is_as_declared in replay.py

    def __call__(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        given = [a if type(a) is int or type(a) is Matrix else a.data_ptr() for a in arguments]
        self._run(
            programs, 1, 1, stream, self.function, self._packed, None, None, None, *given, *self._constants
        )  # fmt: skip


def _param_sizes(declared: torch.dtype | Descriptor | int) -> list[int]:
    """Bytes of the parameters that an argument becomes. A matrix: tensor map, two sizes, two strides."""
    if isinstance(declared, Descriptor):
        return [128, 4, 4, 8, 8]
    return [4 if declared in (ANY, MULTIPLE) else 8]


class Kernel:
    """A Triton function with its constants, compiled once per device for declared arguments.

    ``arguments``: for each argument that is not a constexpr a dtype (a tensor, aligned to 16 bytes), a ``Descriptor``,
    or one of MULTIPLE, ANY, LONG and LONG_MULTIPLE. ``constants``: the constexprs, in any order. ``registers``: the
    maximum per thread. ``cooperative``: all programs run at the same time and may wait for each other."""

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
        names = function.arg_names[len(arguments) :]
        if sorted(names) != sorted(constants):
            raise TypeError(
                f"{function.__name__} takes {function.arg_names}, got {len(arguments)} arguments and {list(constants)}"
            )
        self.name, self.function, self.arguments = function.__name__, function, tuple(arguments)
        self.constants = {name: constants[name] for name in names}
        self.options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        if not INTERPRETED:
            self.options["launch_pdl"] = bool(constants.get("OVERLAPS", False))
            self.options |= {} if registers is None else {"maxnreg": registers}
            self.options |= {"launch_cooperative_grid": True} if cooperative else {}
        self._compiled: dict[int, Compiled] = {}

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch on the current device and stream. Arguments: tensors, matrices, numbers; 0 for an unused tensor."""
        if CHECKED:
            self._check(arguments)
        if INTERPRETED:
            if recording.log is not None:
                recording.log.add(self, programs, arguments)
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
            if not recording.log.launches_now:
                return
        compiled(programs, current_stream(device), arguments)

    def compile(self) -> Any:
        """The result of Triton's compiler for the current device; not yet loaded there."""
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
                both_integers = not (got.is_floating_point() or declared.is_floating_point)  # masks
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
    """The argument for the interpreter, which goes by a tensor's own dtype, not by the declared one."""
    if isinstance(declared, Descriptor):
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(argument.base, list(argument.shape), list(argument.strides), list(declared.block))
    is_other = isinstance(argument, Tensor) and isinstance(declared, torch.dtype) and argument.dtype != declared
    return argument.view(declared) if is_other else argument


def capability() -> int:
    """Compute capability of the current device: 10 * major + minor."""
    return device_facts(current_device())[0]


def can_overlap() -> bool:
    """Whether the device has programmatic dependent launch (Hopper and newer)."""
    return not INTERPRETED and capability() >= 90


def ceil_div(a: int, b: int) -> int:
    """Python integers only: triton.cdiv takes 5 us on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()
