"""Time alternatives side by side; machine, versions and commit, as every row of results has them."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROUND_MS = 20.0  # of calls back to back before the clock is read: see as_called
ROUNDS = 15  # of each alternative, at least
_LONG_MS = 100.0  # a call this long needs only a third of the rounds


class Spread(NamedTuple):
    """Milliseconds of one alternative: 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float

    @property
    def relative(self) -> float:
        """Half the distance of the 20th and 80th percentile, as a share of the median."""
        return (self.p80 - self.p20) / 2 / self.p50


Times = Mapping[str, Spread]  # by the name of the alternative


def ms_fields(times: Times) -> dict[str, Any]:
    """Fields of a row: ``dense_ms`` and the like."""
    return {f"{name}_ms": spread._asdict() for name, spread in times.items()}


def by_way(times: Times) -> dict[str, Any]:
    """One field of a row: an object with the spread of each way."""
    return {name: spread._asdict() for name, spread in times.items()}


def shared(times: Times, n: int, digits: int = 5) -> dict[str, Spread]:
    """Times of one of ``n`` equal parts, where all of them were timed at once."""
    return {name: Spread(*(round(t / n, digits) for t in spread)) for name, spread in times.items()}


def compare(
    alternatives: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 3.0,
    min_repeats: int = 5,
    max_repeats: int = 100,
    warmups: int = 2,
    device: torch.device | None = None,
    before: Callable[[], Any] | None = None,
) -> dict[str, Spread]:
    """Time alternatives in turn (a, b, a, b, ...), so that a slow spell of the machine hits all alike.

    ``seconds`` bounds the timed part once there are ``min_repeats``. ``before`` runs untimed before every call.

    On a CUDA ``device`` events take the time, with an L2 cache that other memory was read into. Calls follow each other
    without waiting, as in a model: the host's time shows where it is longer than the GPU's. On other devices calls must
    be synchronous.
    """
    for run in alternatives.values():
        for _ in range(warmups):
            if before is not None:
                before()
            run()
    round_ = _gpu_round(device) if device is not None and device.type == "cuda" else _host_round
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    deadline = time.perf_counter() + seconds
    repeats = 0
    while repeats < max_repeats and (repeats < min_repeats or time.perf_counter() < deadline):
        repeats += round_(alternatives, before, times)
    return {name: spread(t) for name, t in times.items()}


_Runs = Mapping[str, Callable[[], Any]]
_Round = Callable[[_Runs, Callable[[], Any] | None, dict[str, list[float]]], int]


def _host_round(alternatives: _Runs, before: Callable[[], Any] | None, times: dict[str, list[float]]) -> int:
    for name, run in alternatives.items():
        if before is not None:
            before()
        start = time.perf_counter()
        run()
        times[name].append((time.perf_counter() - start) * 1e3)
    return 1


def _gpu_round(device: torch.device) -> _Round:
    """Five repeats of each alternative, then one wait for the GPU."""
    # Several times the L2 cache of any GPU. Read, not written: the timed call would have to write back up to 50 MB of
    # it, as much as four layers read for one token.
    filler = torch.zeros(64 << 20, device=device)

    def round_(alternatives: _Runs, before: Callable[[], Any] | None, times: dict[str, list[float]]) -> int:
        for _ in range(16):  # about 1 ms of work, so that the host is ahead when timing starts
            filler.sum()
        taken = []
        for _, (name, run) in itertools.product(range(5), alternatives.items()):
            if before is not None:
                before()
            filler.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            taken.append((name, start, end))
        torch.cuda.synchronize(device)
        for name, start, end in taken:
            times[name].append(start.elapsed_time(end))
        return 5

    return round_


def as_called(
    alternatives: Mapping[str, Sequence[Callable[[], Any]]], *, seconds: float, device: torch.device
) -> dict[str, Spread]:
    """Milliseconds of a call in a plain loop, as programs call: the host's time or the GPU's, whichever is longer.

    An alternative is one call, or several that are made in turn: the same on other weights, so that a GPU does not find
    them in its L2 cache. A round is at least ``ROUND_MS`` of calls back to back, then one wait for the device. Rounds
    of the alternatives alternate. ``seconds`` bounds the timed part once there are ``ROUNDS`` rounds of each. The
    quieter half of the rounds counts: see ``quiet``.
    """
    cycles = {name: itertools.cycle(calls) for name, calls in alternatives.items()}
    sizes, slowest = {}, 0.0
    for name, calls in alternatives.items():
        _round_ms(cycles[name], 2 * len(calls), device)  # compiles, and fills the allocator's cache
        ms = _round_ms(cycles[name], len(calls), device)
        sizes[name] = max(1, math.ceil(1.1 * ROUND_MS / ms))
        slowest = max(slowest, ms)
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    least = ROUNDS if slowest < _LONG_MS else math.ceil(ROUNDS / 3)
    deadline = time.perf_counter() + seconds
    for done in range(10 * ROUNDS):
        if done >= least and time.perf_counter() > deadline:
            break
        for name, cycle in cycles.items():
            times[name].append(_round_ms(cycle, sizes[name], device))
    return quiet(times)


def quiet(times: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Spreads over the half of the rounds that took the least time, summed over the alternatives.

    Hosts have spells of twice the time, which begin and end between one alternative and the next. The same rounds count
    for every alternative.
    """
    totals = [sum(each) for each in zip(*times.values(), strict=True)]
    kept = sorted(range(len(totals)), key=totals.__getitem__)[: (len(totals) + 1) // 2]
    return {name: spread([each[i] for i in kept]) for name, each in times.items()}


def _round_ms(cycle: Iterator[Callable[[], Any]], n: int, device: torch.device) -> float:
    """Milliseconds of a call, in a round of n calls."""
    calls = list(itertools.islice(cycle, n))
    wait(device)
    start = time.perf_counter()
    for call in calls:
        call()
    wait(device)
    return (time.perf_counter() - start) * 1e3 / n


def host_us(
    alternatives: Mapping[str, Sequence[Callable[[], Any]]],
    *,
    device: torch.device,
    repeats: int = 50,
    after: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Microseconds from a call to its return while the GPU is idle: the host's own time; on a CPU the whole call.

    The median of the quieter half of the repeats. ``after`` runs untimed after every call.
    """
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for i, (name, calls) in itertools.product(range(repeats + 2), alternatives.items()):
        call = calls[i % len(calls)]
        wait(device)
        start = time.perf_counter()
        call()
        taken = (time.perf_counter() - start) * 1e6
        after()
        if i >= 2:  # the first ones warm up
            times[name].append(taken)
    wait(device)
    return {name: round(spread.p50, 1) for name, spread in quiet(times).items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Callable[[], Any], device: torch.device | None = None) -> int:
    """The most bytes that tensors made during ``run`` held at once, on a GPU or on the CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes to the terminal
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))  # < 0: freed
    return max(held, default=0)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(times: list[float]) -> Spread:
    quantiles = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return Spread(*(round(q, 4) for q in quantiles.tolist()))


def environment(device: torch.device) -> dict[str, Any]:
    """Fields of every row: machine, versions, commit and time."""
    from twell import __version__

    facts: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"twell": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": device.type,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["versions"]["triton"] = importlib.metadata.version("triton")
    else:
        facts |= {"cpu": cpu_name(), "threads": torch.get_num_threads()}
    return facts


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this package runs from, marked if it has changes; None when installed."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
