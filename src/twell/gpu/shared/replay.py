"""Kernel launches, recorded once and repeated by one call into C.

In Python a launch takes 10 us or more of host time: functions compute sizes, allocate, look up kernels and pass
arguments on. For one layer and one number of tokens only the addresses change between calls. So a function that does
nothing but launch kernels runs once per key, and nothing is launched then. Its launches are kept, with every address as
"this tensor plus an offset in bytes". This call and later ones with the same key pass their tensors to ``replay.c``: 4
to 7 us per launch, nearly all of it the driver's.

    @Recorded
    def _launch(space, x, w, y, tile): ...                   # returns tensors of space

    (h,) = _launch((M, tile), (x, *w, y), x, w, y, tile)     # key, tensors, the function's arguments

The key must contain everything that the function's launches depend on, and the tensors (or None) everything outside
space that its kernels read or write: a launch with another address is not kept. With TWELL_CHECK_LAUNCHES=1 such an
address is an error, and every other call records again and compares. Where the C module cannot be built, or a kernel's
parameters are not as expected, functions run as they are.

Launches inside ``with beside():`` go to a second stream: after all launches before them, and at the same time as those
after them, up to one that ``waits()``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHECKED = os.environ.get("TWELL_CHECK_LAUNCHES") == "1"  # also compares every argument with its declaration

_MOST_PROGRAMS = 512  # kept per function: numbers of tokens differ from call to call
_ALIGNMENT = 256  # bytes, of tensors in a Space
_HEAD, _LAUNCH, _PARAM = struct.Struct("<II"), struct.Struct("<QIIIII4x"), struct.Struct("<QiI")  # as in replay.c
_COOPERATIVE, _OVERLAPS, _BESIDE, _SIGNALS, _WAITS = 1, 2, 4, 8, 16  # flags, as in replay.c
_DATA_TYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # missing in builds without CUDA
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Matrix:
    """A matrix [rows, columns] with unit stride along its columns, for kernels that read it by TMA."""

    __slots__ = ("base", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, t: Tensor) -> None:
        self.base, self.shape, self.strides = t, t.shape, t.stride()
        self.padding, self.round_f32_to_tf32 = "zero", False  # attributes that Triton's launcher reads


class Launch(NamedTuple):
    """One launch, as ``Kernel`` reports it: the compiled (or interpreted) kernel and the arguments of the call."""

    compiled: Any
    programs: int
    arguments: tuple[Any, ...]
    how: int  # a combination of _BESIDE, _SIGNALS and _WAITS


class _Log:
    """The launches so far of a call that is being recorded. ``launches_now``: kernels also start."""

    def __init__(self, launches_now: bool) -> None:
        self.launches_now = launches_now
        self.launches: list[Launch] = []
        self.how = 0  # flags of the next launch

    def add(self, compiled: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        self.launches.append(Launch(compiled, programs, arguments, self.how))
        self.how &= _BESIDE


class Space:
    """The workspace of a call. A recording allocates tensor by tensor; a repetition allocates one block for all of
    them."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._used, self.size = like, 0, 0
        self.taken: list[tuple[Tensor, int]] = []  # tensors and their offsets in bytes

    def take(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        t = self._like.new_empty(shape, dtype=dtype)
        self.taken.append((t, self._used))
        self._used += -(-t.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.size = max(self.size, self._used)
        return t

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Tensors taken inside give up their place at the end: later ones may overlap them, and are written only after
        the last read of the earlier ones."""
        before = self._used
        yield
        self._used = before


class _Program(NamedTuple):
    code: bytes
    head: int  # bytes before the tensor maps, which contain addresses of the recorded call
    size: int  # of the workspace, in elements of the first tensor's dtype
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]  # shape, strides, offset in the workspace

    def is_like(self, other: _Program) -> bool:
        return self[1:] == other[1:] and self.code[: self.head] == other.code[: self.head]

    def launch(self, replay: Any, device: int, tensors: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """The results; None if a tensor is not aligned to 16 bytes."""
        space = tensors[0].new_empty(self.size) if self.size or self.results else None  # results may be empty
        if not replay(self.code, current_stream(device), space, *tensors):
            return None
        return tuple([space.as_strided(*at) for at in self.results]) if self.results else ()  # type: ignore[union-attr]


class _Recording(threading.local):
    log: _Log | None = None  # while this thread records

    @contextlib.contextmanager
    def into(self, log: _Log) -> Iterator[None]:
        if self.log is not None:
            raise RuntimeError("a recorded function must not call another one")
        self.log = log
        try:
            yield
        finally:
            self.log = None


recording = _Recording()


@contextlib.contextmanager
def beside(pays: bool = True) -> Iterator[None]:
    """Put launches on a second stream: after all launches before them, and at the same time as the following ones, up
    to one that ``waits()`` or the end of the call. ``pays``: False makes this a no-op."""
    log = recording.log
    if log is None or not pays:
        yield
        return
    log.how |= _BESIDE
    try:
        yield
    finally:
        log.how &= ~_BESIDE


def signals() -> None:
    """Mark the last launch, if it is beside: a later launch that ``waits()`` waits for it."""
    log = recording.log
    if log is not None and log.launches and log.launches[-1].how & _BESIDE:
        log.launches[-1] = log.launches[-1]._replace(how=_BESIDE | _SIGNALS)


def waits() -> None:
    """Make the next launch wait for the launch marked by ``signals()``, if there is one."""
    log = recording.log
    if log is not None and any(launch.how & _SIGNALS for launch in log.launches):
        log.how |= _WAITS


class Recorded:
    """Decorates a function that launches kernels: its launches are recorded once per key, then repeated."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function
        self._programs: dict[Any, _Program] = {}
        self._repeated: set[Any] = set()
        functools.update_wrapper(self, function)

    def __call__(self, key: Any, tensors: tuple[Tensor | None, ...], *arguments: Any) -> tuple[Tensor, ...]:
        found = self.repeat(key, tensors)
        return self.record(key, tensors, *arguments) if found is None else found

    def repeat(self, key: Any, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        """None where there is no recording for the key, or a tensor is not aligned to 16 bytes."""
        replay = None if INTERPRETED else _replay()
        if replay is None:
            return None
        device = current_device()
        program = self._programs.get((device, key))
        if program is None or (CHECKED and not self._is_in_turn((device, key))):
            return None
        return program.launch(replay, device, tensors)

    def _is_in_turn(self, key: Any) -> bool:
        """True every other time; the calls between are recorded again and compared."""
        self._repeated ^= {key}
        return key in self._repeated

    def record(self, key: Any, tensors: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, ...]:
        """Run the function without launching anything, keep its launches, then launch them. Where they cannot be kept,
        only run the function."""
        replay = None if INTERPRETED else _replay()
        if replay is None:
            return self._run(tensors, arguments)
        odd = [i for i, t in enumerate(tensors) if t is not None and t.data_ptr() % 16]
        if odd:
            raise ValueError(f"tensor {odd[0]} is not aligned to 16 bytes")
        program, device = self._program_for(tensors, arguments), current_device()
        if program is None:
            return self._run(tensors, arguments)
        if CHECKED and not program.is_like(self._programs.setdefault((device, key), program)):
            raise AssertionError(f"{self._function.__qualname__} launched other kernels for the same key {key}")
        if len(self._programs) >= _MOST_PROGRAMS:
            self._programs.clear()
        self._programs[device, key] = program
        results = program.launch(replay, device, tensors)
        assert results is not None  # the tensors are aligned
        return results

    def _run(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        space, log = Space(tensors[0]), _Log(launches_now=True)
        with recording.into(log):
            results = self._function(space, *arguments)
        if CHECKED:
            _check_addresses(log.launches, _spans_of(space, tensors))
        return results

    def _program_for(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> _Program | None:
        """Its workspace is free again when this returns."""
        space, log = Space(tensors[0]), _Log(launches_now=False)
        with recording.into(log):
            results = self._function(space, *arguments)
        return _program_of(log.launches, space, tensors, results)


# ---------------------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------------------


Spans = list[tuple[int, int, int, int]]  # addresses from and to, the number of a tensor (0: space), its place in space


def _spans_of(space: Space, tensors: tuple[Tensor | None, ...]) -> Spans:
    known = [(t, 0, at) for t, at in space.taken]
    known += [(t, i + 1, 0) for i, t in enumerate(tensors) if t is not None]
    return sorted((t.data_ptr(), t.data_ptr() + _extent(t), i, at) for t, i, at in known if t.numel())


def _check_addresses(launches: list[Launch], spans: Spans) -> None:
    for launch in launches:
        given = (a.base if isinstance(a, Matrix) else a for a in launch.arguments)
        addresses = [t.data_ptr() for t in given if isinstance(t, Tensor) and t.numel()]
        if not all(any(begin <= at < end for begin, end, *_ in spans) for at in addresses):
            raise AssertionError(f"{launch.compiled.name} was given an address outside all tensors of the call")


def _program_of(
    launches: list[Launch], space: Space, tensors: tuple[Tensor | None, ...], results: tuple[Tensor, ...]
) -> _Program | None:
    """None where an address is unknown or ambiguous (tensors overlap), or a kernel's parameters are not as declared."""
    spans = _spans_of(space, tensors)
    if CHECKED:
        _check_addresses(launches, spans)
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        return None
    if any(t.dtype != tensors[0].dtype for t in results):  # type: ignore[union-attr]
        raise TypeError("a recorded function must return tensors of the dtype of its first tensor")
    head = _HEAD.size + sum(_LAUNCH.size + _PARAM.size * len(launch.compiled.param_sizes) for launch in launches)
    maps, parts = b"", []
    for launch in launches:
        if not _is_as_declared(launch.compiled):
            return None
        params = []
        for value, matrix, described in _values_of(launch):
            tensor, offset, map_at = -1, value, 0
            if matrix is not None or described is _ADDRESS:
                found = next(((i, at + value - start) for start, end, i, at in spans if start <= value < end), None)
                if found is None and value:
                    return None
                tensor, offset = found or (-1, 0)
            if matrix is not None:
                map_at = head + len(maps)
                maps += _map_of(matrix, described)
            params.append(_PARAM.pack(offset, tensor, map_at))
        facts = launch.compiled.metadata
        flags = _COOPERATIVE * facts.launch_cooperative_grid | _OVERLAPS * facts.launch_pdl
        numbers = launch.programs, 32 * facts.num_warps, facts.shared, len(params), flags | launch.how
        parts += [_LAUNCH.pack(launch.compiled.function, *numbers), *params]
    code = _HEAD.pack(len(launches), any(launch.how & _BESIDE for launch in launches)) + b"".join(parts) + maps
    item = tensors[0].element_size()  # type: ignore[union-attr]
    starts = [(a, b, at - a) for a, b, i, at in spans if i == 0]
    places = [next((t.data_ptr() + d for a, b, d in starts if a <= t.data_ptr() < b), 0) for t in results]  # 0: empty
    views = tuple((tuple(t.shape), t.stride(), at // item) for t, at in zip(results, places, strict=True))
    return _Program(code, head, space.size // item, views)


_ADDRESS = object()


def _values_of(launch: Launch) -> list[tuple[int, Any, Any]]:
    """(number, matrix or None, the matrix's description or _ADDRESS or None) for each parameter of a kernel."""
    declared = launch.compiled.declared
    values: list[tuple[int, Any, Any]] = []
    described = iter(getattr(launch.compiled.metadata, "tensordesc_meta", None) or ())
    for argument, kind in zip(launch.arguments, declared, strict=True):
        if isinstance(argument, Matrix):
            values.append((argument.base.data_ptr(), argument, next(described)))
            values += [(n, None, None) for n in (*argument.shape, *argument.strides)]
        elif type(argument) is int:
            values.append((argument, None, None if type(kind) is int else _ADDRESS))
        else:
            values.append((argument.data_ptr(), None, _ADDRESS))
    return [*values, (0, None, None), (0, None, None)]  # scratch memory: none


def _is_as_declared(compiled: Any) -> bool:
    """Whether Triton compiled the parameters that ``_values_of`` returns."""
    if compiled.matches is None:
        module = _module()
        compiled.matches = module is not None and module.param_sizes(compiled.function) == compiled.param_sizes
        if not compiled.matches:
            warnings.warn(
                f"twell: {compiled.name} has other parameters than expected from this version of Triton; "
                f"its launches take more host time",
                stacklevel=2,
            )
    return compiled.matches


def _map_of(matrix: Matrix, described: dict[str, Any]) -> bytes:
    rows, columns = matrix.shape
    t = matrix.base
    return _module().tensor_map(
        _DATA_TYPES[t.dtype], t.element_size(), t.data_ptr(), rows, columns, matrix.strides[0],
        *described["block_size"], described["swizzle"],
    )  # fmt: skip


def _extent(t: Tensor) -> int:
    """Bytes from the first to the last element."""
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


# ---------------------------------------------------------------------------------------------------------
# The C module
# ---------------------------------------------------------------------------------------------------------


@functools.cache
def _module() -> Any:
    """``replay.c``, built by the compiler that Triton uses for its own launchers; None where that fails."""
    try:
        import triton.backends.nvidia
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_suffix(".c").read_text(encoding="utf-8")
        include = str(Path(triton.backends.nvidia.__file__).parent / "include")
        module = compile_module_from_src(source, "twell_replay", include_dirs=[include])
        module.load("libcuda.so.1")
    except Exception as error:  # no compiler, no headers, another Triton, an old driver
        warnings.warn(f"twell: launches cannot be recorded and take more host time ({error})", stacklevel=2)
        return None
    return module


@functools.cache
def _replay() -> Any:
    module = _module()
    return None if module is None else module.replay
