"""Recorded launches: a repetition launches what was recorded, with other addresses. The driver is a fake."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from twell.gpu.shared import replay
from twell.gpu.shared.launch import ANY, LONG, Descriptor
from twell.gpu.shared.replay import Matrix, Recorded, Space, beside, signals, waits

# Every launch becomes a line: function, programs, threads, shared memory, flags, stream and parameters, of which those
# of 128 bytes show what stands for an address in a tensor map here: its first eight bytes. So does an event that is
# recorded (1) or waited for (2): event and stream.
FAKE_DRIVER = r"""
#include <cuda.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static const size_t sizes[] = {8, 8, 4, 8, 8, 8};
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  if ((uintptr_t)f == 99) return 1;
  FILE *log = fopen(LOG, "a");
  int overlaps = 0, cooperative = 0;
  for (unsigned i = 0; i < c->numAttrs; i++) {
    overlaps |= c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    cooperative |= c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  }
  fprintf(log, "%lu %u %u %u %d %d %lu", (uintptr_t)f, c->gridDimX, c->blockDimX, c->sharedMemBytes, cooperative,
          overlaps, (uintptr_t)c->hStream);
  int n = (uintptr_t)f == 7 ? 9 : 6;
  for (int i = 0; i < n; i++) fprintf(log, " %lu", *(uint64_t *)params[i]);
  fprintf(log, "\n");
  fclose(log);
  return 0;
}
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) { memcpy(map, &address, 8); return 0; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave a, CUtensorMapSwizzle b, CUtensorMapL2promotion c, CUtensorMapFloatOOBfill d) {
  memset(map, 0, sizeof *map); memcpy(map, &address, 8); return 0;
}
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
  if (i >= 6) return 1;
  *offset = 8 * i; *size = sizes[i];
  return 0;
}
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "as it was told to"; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return 0; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) { return 0; }
static uintptr_t made = 1000;
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  if (flags != CU_STREAM_NON_BLOCKING) return 1;
  if (getenv("TWELL_TEST_NO_STREAMS")) return 2;
  *stream = (CUstream)made++;
  return 0;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) { *event = (CUevent)made++; return 0; }
static CUresult say(uintptr_t what, void *event, void *stream) {
  FILE *log = fopen(LOG, "a");
  fprintf(log, "%lu %lu %lu\n", what, (uintptr_t)event, (uintptr_t)stream);
  fclose(log);
  return 0;
}
CUresult cuEventRecord(CUevent event, CUstream stream) { return say(1, event, stream); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) { return say(2, event, stream); }
"""
SIZES = [8, 8, 4, 8, 8, 8]  # of the fake kernel: two pointers, a number, a long one, and scratch memory's two


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    import triton.backends.nvidia
    from triton.runtime.build import compile_module_from_src

    folder = tmp_path_factory.mktemp("driver")
    (folder / "fake.c").write_text(FAKE_DRIVER)
    include = str(Path(triton.backends.nvidia.__file__).parent / "include")
    log = folder / "launches"
    define = f'-DLOG="{log}"'
    command = ["gcc", "-shared", "-fPIC", define, f"-I{include}", str(folder / "fake.c"), "-o", str(folder / "fake.so")]
    subprocess.run(command, check=True)
    source = Path(replay.__file__).with_suffix(".c").read_text()
    built = compile_module_from_src(source, "twell_replay", include_dirs=[include])
    built.load(str(folder / "fake.so"))
    return SimpleNamespace(built=built, log=log)


@pytest.fixture
def launches(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[list[int]]]]:
    """The launches since the last question, as numbers."""
    module.log.write_text("")
    monkeypatch.setattr(replay, "_module", lambda: module.built)
    monkeypatch.setattr(replay, "_replay", lambda: module.built.replay)
    monkeypatch.setattr(replay, "INTERPRETED", False)
    monkeypatch.setattr(replay, "CHECKED", False)
    monkeypatch.setattr(replay, "current_device", lambda: 0)
    monkeypatch.setattr(replay, "current_stream", lambda _: 5)

    def read() -> list[list[int]]:
        lines = module.log.read_text().splitlines()
        module.log.write_text("")
        return [[int(n) for n in line.split()] for line in lines]

    yield read


def compiled(function: int = 3, **changes: Any) -> Any:
    metadata = SimpleNamespace(num_warps=4, shared=1024, launch_cooperative_grid=False, launch_pdl=True)
    declared = (torch.float32, torch.float32, ANY, LONG)
    fields = {"function": function, "declared": declared, "metadata": metadata, "param_sizes": SIZES}
    return SimpleNamespace(name="fake", started=[], **fields | {"matches": None} | changes)


def launch(kernel: Any, programs: int, *arguments: Any) -> None:
    """As ``Kernel.__call__``; a kernel that the function itself starts is noted in ``kernel.started``."""
    assert replay.recording.log is not None
    replay.recording.log.add(kernel, programs, arguments)
    if replay.recording.log.launches_now:
        kernel.started.append(programs)


def call(function: Recorded, key: Any, tensors: tuple[Tensor | None, ...], *rest: Any) -> tuple[Tensor, ...]:
    return function(key, tensors, *tensors, *rest)


def function_of(kernel: Any, runs: list[int] | None = None) -> Recorded:
    @Recorded
    def function(space: Space, x: Tensor, y: Tensor | None, n: int) -> tuple[Tensor, ...]:
        if runs is not None:
            runs.append(n)
        part, wanted = space.take(3), space.take(4, 5)
        launch(kernel, n, x[2:], wanted[1], n, 1 << 40)
        launch(kernel, n + 1, part, 0 if y is None else y, n, 7)
        return wanted.t(), part

    return function


def test_a_second_call_launches_the_same_with_its_own_addresses(launches: Callable[[], list[list[int]]]) -> None:
    runs: list[int] = []
    kernel = compiled()
    function = function_of(kernel, runs)
    for size in (8, 100):  # the first call runs the function, which launches nothing
        x, y = torch.zeros(size), torch.zeros(size)
        wanted, part = call(function, "key", (x, y), 6)
        assert runs == [6] and wanted.shape == (5, 4) and wanted.stride() == (1, 5) and part.shape == (3,)
        start = part.data_ptr()
        assert wanted.data_ptr() == start + 256
        assert launches() == [
            [3, 6, 128, 1024, 0, 1, 5, x.data_ptr() + 8, start + 256 + 20, 6, 1 << 40, 0, 0],
            [3, 7, 128, 1024, 0, 1, 5, start, y.data_ptr(), 6, 7, 0, 0],
        ]
    for _ in range(2):
        call(function, "another key", (x, None), 9)
        assert runs == [6, 9] and launches()[1][-5] == 0
    assert kernel.started == []


def parallel(kernel: Any) -> Recorded:
    @Recorded
    def function(space: Space, x: Tensor) -> tuple[Tensor, ...]:
        for programs in range(1, 7):
            if programs == 4:
                waits()
            with beside() if programs in (2, 3, 5) else contextlib.nullcontext():
                launch(kernel, programs, x, x, 1, 1)
            if programs == 2:
                signals()
        return ()

    return function


def test_launches_beside_others_are_joined(
    launches: Callable[[], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = parallel(compiled())
    streams: dict[int, tuple[int, ...]] = {}
    for stream in (5, 6, 5):
        monkeypatch.setattr(replay, "current_stream", lambda _, stream=stream: stream)
        call(function, "key", (torch.zeros(8),))
        said = launches()
        short = [line if len(line) == 3 else [line[1], line[6]] for line in said]
        second, forked, joined = short[2][2], short[1][1], short[4][1]
        fork, signal, wait = [[1, forked, stream], [2, forked, second]], [1, joined, second], [2, joined, stream]
        assert short == [
            [1, stream], *fork, [2, second], signal, [3, second], wait, [4, stream], *fork, [5, second], [6, stream],
            signal, wait,
        ]  # fmt: skip
        assert streams.setdefault(stream, (second, forked, joined)) == (second, forked, joined)
    assert len({name for each in streams.values() for name in each}) == 6


def test_without_a_second_stream_launches_are_in_order(
    launches: Callable[[], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "current_stream", lambda _: 77)
    monkeypatch.setenv("TWELL_TEST_NO_STREAMS", "1")
    call(parallel(compiled()), "key", (torch.zeros(8),))
    assert [line[1:7:5] for line in launches()] == [[n, 77] for n in range(1, 7)]


def test_results_may_be_empty(launches: Callable[[], list[list[int]]]) -> None:
    @Recorded
    def function(space: Space, x: Tensor) -> tuple[Tensor, ...]:
        return (space.take(0, 7),)

    for _ in range(2):  # as for no tokens
        (empty,) = call(function, "key", (torch.zeros(0, 3),))
        assert empty.shape == (0, 7)
    assert launches() == []


def test_passing_reuses_memory(launches: Callable[[], list[list[int]]]) -> None:
    kernel = compiled()

    @Recorded
    def function(space: Space, x: Tensor) -> tuple[Tensor, ...]:
        stays = space.take(8)
        for n in (100, 200, 50):
            with space.passing():
                launch(kernel, n, stays, space.take(n), 1, 1)
        last = space.take(60)
        launch(kernel, 1, stays, last, 1, 1)
        return stays, last

    stays, last = call(function, "key", (torch.zeros(8),))
    assert [line[8] - line[7] for line in launches()] == [256] * 4 and last.data_ptr() == stays.data_ptr() + 256
    assert function._programs[0, "key"].size == (256 + 1024) // 4


def test_a_matrix_has_its_address_in_a_tensor_map(launches: Callable[[], list[list[int]]]) -> None:
    metadata = SimpleNamespace(num_warps=8, shared=0, launch_cooperative_grid=True, launch_pdl=False)
    metadata.tensordesc_meta = [{"block_size": [8, 8], "swizzle": 0}]
    declared = (Descriptor(torch.float16, (8, 8)), torch.float32, ANY)
    sizes = [128, 4, 4, 8, 8, 8, 4, 8, 8]
    kernel = compiled(7, declared=declared, metadata=metadata, param_sizes=sizes, matches=True)

    @Recorded
    def function(space: Space, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        launch(kernel, 2, Matrix(w[4:]), x, 17)
        return ()

    kept = []  # so that the second tensors have other addresses
    for _ in range(2):
        x, w = torch.zeros(4), torch.zeros(16, 8, dtype=torch.float16)
        kept += [x, w]
        call(function, 1, (x, w))
        (said,) = launches()
        address, *numbers = said[7:]
        assert said[:7] == [7, 2, 256, 0, 1, 0, 5] and address == w.data_ptr() + 64
        as_told = [n & 0xFFFFFFFF for n in (numbers[0], numbers[1])] + numbers[2:]
        assert as_told == [12, 8, 8, 1, x.data_ptr(), 17, 0, 0]


def test_overlapping_tensors_are_not_recorded(launches: Callable[[], list[list[int]]]) -> None:
    kernel = compiled()
    function, x = function_of(kernel), torch.zeros(64)
    for _ in range(2):
        call(function, "key", (x, x[16:]), 1)  # which overlap
    assert kernel.started == [1, 2] * 2 and launches() == []
    for _ in range(2):
        call(function, "key", (x, torch.zeros(3)), 1)
    assert kernel.started == [1, 2] * 2 and len(launches()) == 4


def test_an_unknown_address_is_not_recorded(
    launches: Callable[[], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, kernel = torch.zeros(9), compiled()

    @Recorded
    def function(space: Space, x: Tensor) -> tuple[Tensor, ...]:
        launch(kernel, 1, x, elsewhere, 1, 1)
        return ()

    for _ in range(2):
        call(function, "key", (torch.zeros(5),))
    assert kernel.started == [1, 1] and launches() == []
    monkeypatch.setattr(replay, "CHECKED", True)
    with pytest.raises(AssertionError, match="an address outside all tensors"):
        call(function, "key", (torch.zeros(5),))


def test_an_incomplete_key_is_found(launches: Callable[[], list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CHECKED", True)
    function = function_of(compiled())
    for _ in range(4):  # recorded, repeated, compared, repeated
        call(function, "key", (torch.zeros(8), torch.zeros(8)), 1)
    assert len(launches()) == 8
    with pytest.raises(AssertionError, match="other kernels for the same key"):
        call(function, "key", (torch.zeros(8), torch.zeros(8)), 2)


def test_kernels_with_other_parameters_are_launched_by_triton(launches: Callable[[], list[list[int]]]) -> None:
    kernel = compiled(param_sizes=[8, 8, 8, 8, 8, 8])
    function = function_of(kernel)
    with pytest.warns(UserWarning, match="other parameters than expected"):
        call(function, "key", (torch.zeros(8), torch.zeros(8)), 1)
    call(function, "key", (torch.zeros(8), torch.zeros(8)), 1)
    assert kernel.started == [1, 2] * 2 and launches() == []


def test_a_recorded_function_calls_no_other(launches: Callable[[], list[list[int]]]) -> None:
    inner = function_of(compiled())

    @Recorded
    def outer(space: Space, x: Tensor) -> tuple[Tensor, ...]:
        return call(inner, "key", (x, None), 1)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="must not call another one"):
            call(outer, "key", (torch.zeros(8),))
    assert launches() == [] and replay.recording.log is None


def test_faults(launches: Callable[[], list[list[int]]]) -> None:
    function = function_of(compiled(99))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CUDA error 1, as it was told to"):
            call(function, "key", (torch.zeros(8), torch.zeros(8)), 1)
    fine = function_of(compiled())
    call(fine, "key", (torch.zeros(8), torch.zeros(8)), 1)
    assert len(launches()) == 2
    odd = torch.zeros(8), torch.zeros(9)[1:]
    assert fine.repeat("key", odd) is None and launches() == []
    with pytest.raises(ValueError, match="tensor 1 is not aligned"):
        call(fine, "key", odd, 1)


def test_the_number_of_programs_is_bounded(
    launches: Callable[[], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_MOST_PROGRAMS", 4)
    function = function_of(compiled())
    for n in range(10):
        call(function, n, (torch.zeros(8), torch.zeros(8)), 1)
    assert len(function._programs) <= 4


def test_the_c_code_and_python_agree_on_sizes() -> None:
    assert replay._HEAD.size == 8 and replay._LAUNCH.size == 32 and replay._PARAM.size == 16
