"""``twell tune``: time the kernels with other tile sizes, to fill the table in ``gpu/shared/tiles.py``.

For up to 64 tokens see tune_few.py.

Every candidate is checked against the kernel's usual tiles before it is timed; one that does not compile, or does not
fit the GPU's shared memory, is left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.formats import TwELL
from twell.gpu.shared.tiles import GateTile, RowTile
from twell.plan import MAX_FEW_TOKENS, choose_plan, costs_for
from twell.reference import Weights
from twell.workbench.bench import cases, timing, tune_few
from twell.workbench.bench.parts import Parts

KERNELS = ("tail", "gate", "hot", "heavy")


class Trial(NamedTuple):
    """One candidate of one kernel, in ms; ``times`` compares it with what the table has now."""

    kernel: str
    tile: GateTile | RowTile | tune_few.Neurons | tune_few.Sums
    use_tma: bool
    ms: float
    times: float


def gate_candidates() -> Iterator[tuple[GateTile, bool]]:
    for (bm, bn, warps), bk, stages, tma in itertools.product(
        ((128, 256, 8), (128, 128, 4), (128, 128, 8), (256, 128, 8), (64, 256, 4)), (32, 64, 128), (3, 4), (True, False)
    ):
        yield GateTile(bm, bn, bk, warps, stages), tma


def heavy_candidates() -> Iterator[GateTile]:
    for (bm, bn, warps), bk, stages in itertools.product(
        ((64, 64, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8), (32, 128, 4)), (32, 64), (3, 4)
    ):
        yield GateTile(bm, bn, bk, warps, stages)


def tail_candidates() -> Iterator[RowTile]:
    for neurons, warps, stages in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4)):
        yield RowTile(neurons, warps, stages)


@torch.inference_mode()
def tune(
    workload: str,
    M: int,
    D: int,
    F: int,
    dtype: torch.dtype,
    device: torch.device,
    only: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda tried, total: None,
) -> Iterator[Trial]:
    """Trials of the kernels named in ``only``, or of all that so many tokens have, one after the other."""
    known = tune_few.KERNELS if M <= MAX_FEW_TOKENS else KERNELS
    for name in only:
        if name not in known:
            raise ValueError(f"unknown kernel {name!r}: {M} tokens have {', '.join(known)}")
    only = only or known
    if M <= MAX_FEW_TOKENS:
        for name, tile, ms, times in tune_few.tune(workload, M, D, F, dtype, device, only, progress):
            yield Trial(name, tile, False, ms, times)
        return
    inputs = cases.make(workload, M, D, F, dtype=dtype, device=device)
    w = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    r = torch.relu(inputs.x @ w.gate.T)
    measured = costs_for(torch.device("cpu"))  # also on a GPU whose own costs are not known
    plan = choose_plan((r != 0).sum(0), M, measured, width=D)
    if plan.is_dense:
        raise ValueError(f"{workload} runs densely at {F} neurons: there is nothing to tune")
    parts = Parts(inputs.x, w, plan)
    parts.pretend_heavy(max(1, M // 32))  # as many as a trained model has
    tiles = parts.tiles
    kernels: list[tuple[str, Callable[[Any, bool], Tensor | TwELL], Any, list[tuple[Any, bool]]]] = [
        ("tail", lambda tile, _: parts.tail(tile), parts.tail_tile, [(t, False) for t in tail_candidates()]),
        ("gate", lambda tile, tma: parts.cold_gate(tile, tma), tiles.gate, list(gate_candidates())),
        ("hot", parts.hot, tiles.gate, list(gate_candidates())),
        ("heavy", lambda tile, _: parts.heavy(tile), tiles.heavy, [(t, tiles.heavy_tma) for t in heavy_candidates()]),
    ]
    chosen = [k for k in kernels if k[0] in only and (k[0] != "hot" or len(plan.hot))]
    tried, total = 0, sum(len(candidates) for *_, candidates in chosen)
    for name, run, usual, candidates in chosen:
        for trial in _try(name, run, usual, tiles.use_tma, candidates, parts.restore, device):
            if trial is not None:
                yield trial
            progress(tried := min(tried + 1, total), total)


def _try(
    name: str,
    run: Callable[[Any, bool], Tensor | TwELL],
    usual: Any,
    use_tma: bool,
    candidates: list[tuple[Any, bool]],
    restore: Callable[[], None],
    device: torch.device,
) -> Iterator[Trial | None]:
    """The usual tile first; None for a candidate that cannot run."""
    restore()
    expected = _dense_result(run, usual, use_tma).clone()
    base = _time(run, usual, use_tma, restore, device)
    yield Trial(name, usual, use_tma, base, 1.0)
    for tile, tma in candidates:
        restore()
        result = tune_few.result_of(functools.partial(_dense_result, run, tile, tma), device)
        if result is None:
            yield None
            continue
        tune_few.require_same(result, expected, f"the {name} kernel gives another result with {tile}")
        ms = _time(run, tile, tma, restore, device)
        yield Trial(name, tile, tma, ms, ms / base)


def _dense_result(run: Callable[[Any, bool], Tensor | TwELL], tile: Any, tma: bool) -> Tensor:
    result = run(tile, tma)
    return result.unpack(skip_overflowed=True) if isinstance(result, TwELL) else result


def _time(
    run: Callable[[Any, bool], Any], tile: Any, tma: bool, restore: Callable[[], None], device: torch.device
) -> float:
    times = timing.compare(
        {"it": lambda: run(tile, tma)}, seconds=0.05, min_repeats=5, warmups=1, device=device, before=restore
    )
    return times["it"].p50
