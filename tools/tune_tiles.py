"""Time the kernels with other tile sizes, to fill the table in src/twell/gpu/shared/tiles.py.

    python tools/tune_tiles.py -w skew29 -m 16384                  # on a GPU; needs twell installed, or PYTHONPATH=src
    python tools/tune_tiles.py -m 8 --kernel neurons --json        # up to 64 tokens: see tune_few_tiles.py

Every candidate is checked against the kernel's usual tile before it is timed. A candidate that does not compile, or
does not fit the GPU's shared memory, is left out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tune_few_tiles
from twell.formats import TwELL
from twell.gpu.shared.tiles import GateTile, RowTile
from twell.plan import MAX_FEW_TOKENS, choose_plan, costs_for
from twell.progress import Progress, silent
from twell.reference import Weights
from twell.workbench.bench import cases, timing
from twell.workbench.bench.parts import Parts

KERNELS = ("tail", "gate", "hot", "heavy")


class Trial(NamedTuple):
    """One candidate tile of one kernel. ``times``: its ms in terms of the ms of the tile in the table."""

    kernel: str
    tile: GateTile | RowTile | tune_few_tiles.Neurons | tune_few_tiles.Sums
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
    progress: Progress = silent,
) -> Iterator[Trial]:
    """Trials of the kernels named in ``only``, one kernel after the other; by default of all that M tokens run."""
    known = tune_few_tiles.KERNELS if M <= MAX_FEW_TOKENS else KERNELS
    for name in only:
        if name not in known:
            raise ValueError(f"unknown kernel {name!r}: {M} tokens have {', '.join(known)}")
    only = only or known
    if M <= MAX_FEW_TOKENS:
        for name, tile, ms, times in tune_few_tiles.tune(workload, M, D, F, dtype, device, only, progress):
            yield Trial(name, tile, False, ms, times)
        return
    inputs = cases.make(workload, M, D, F, dtype=dtype, device=device)
    w = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    r = torch.relu(inputs.x @ w.gate.T)
    known_costs = costs_for(torch.device("cpu"))  # an H200's, so that it also runs on a GPU of unknown costs
    plan = choose_plan((r != 0).sum(0), M, known_costs, width=D)
    if plan.is_dense:
        raise ValueError(f"{workload} runs densely at {F} neurons: there is nothing to tune")
    parts = Parts(inputs.x, w, plan)
    parts.pretend_heavy(max(1, M // 32))  # a trained model's share
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
        result = tune_few_tiles.result_of(functools.partial(_dense_result, run, tile, tma), device)
        if result is None:
            yield None
            continue
        tune_few_tiles.require_same(result, expected, f"the {name} kernel gives another result with {tile}")
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--workload", default="skew29", help="iidN or skewN, N active neurons a token")
    parser.add_argument("-m", "--tokens", type=int, default=16384)
    parser.add_argument("-d", "--width", type=int, default=2048, help="model width D")
    parser.add_argument("-f", "--hidden", type=int, default=5632, help="hidden width F")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kernel", action="append", help=f"{', '.join(KERNELS + tune_few_tiles.KERNELS)}; repeatable")
    parser.add_argument("--best", type=int, default=5, help="candidates to show of each kernel")
    parser.add_argument("--json", action="store_true", help="every trial, as JSON lines")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tiles are timed on a GPU, and torch sees none here", file=sys.stderr)
        return 2
    shape = given.tokens, given.width, given.hidden, getattr(torch, given.dtype), torch.device("cuda")
    trials: dict[str, list[Trial]] = {}
    for trial in tune(given.workload, *shape, given.kernel or ()):
        trials.setdefault(trial.kernel, []).append(trial)
        if given.json:
            print(json.dumps({**trial._asdict(), "tile": trial.tile._asdict()}), flush=True)
    for name, (usual, *others) in trials.items() if not given.json else ():
        print(f"{name}: now {usual.ms:.5f} ms with {usual.tile}")
        for trial in sorted(others, key=lambda trial: trial.ms)[: given.best]:
            print(f"    {trial.ms:.5f} ms ({trial.times:.3f}) with {trial.tile}{', TMA' if trial.use_tma else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
