"""``twell tune``: the costs of a GPU, in the terms of ``plan.Costs``.

The parts of the forward are timed on three workloads; each cost is a slope or a share of these times:

    gate             a cold gate over its elements
    down, hot        hot neurons over their number: the slope, less 2 for gate and up, and the intercept
    gather, token    lists and tail over pairs a token: the slope, and the intercept
    heavy            a GEMM over listed rows, over its elements
    few              the time of few tokens over what an H200's costs predict

Training is timed as a whole: an H200's costs, times the time over what they predict. The unit is the time of an element
of a dense FFN on this GPU. ``twell bench`` checks results; here only times matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.plan import MAX_FEW_TOKENS, Costs, Plan, choose_plan, costs_for, union_of
from twell.plan.choose import FEW_COSTS, FEW_GATE
from twell.progress import Progress, silent
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing, train_ffn
from twell.workbench.bench.parts import Parts

WORKLOADS = ("skew29", "skew100", "iid29")
TOKENS, WIDTH, HIDDEN = 16384, 2048, 5632
_ELEMENT = 5.8e-9  # ms, of an H200: see Costs
_FEW = (1, 8, MAX_FEW_TOKENS)
_LEAST = 0.01  # noise may take a small cost below 0


def measure(
    device: torch.device,
    *,
    workloads: tuple[str, ...] = WORKLOADS,
    tokens: int = TOKENS,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 0.5,
    progress: Progress = silent,
) -> tuple[Costs, Costs]:
    """Costs of inference and of training. ``workloads``: at least one with hot neurons and one without, by an H200's
    costs."""
    known, known_training = (costs_for(torch.device("cpu"), training=t) for t in (False, True))
    gates: list[float] = []
    hots: list[tuple[int, float]] = []
    tails: list[tuple[float, float]] = []
    heavies: list[float] = []
    factors: list[float] = []
    training: list[tuple[float, float, tuple[int, float]]] = []
    elements: list[float] = []
    for done, workload in enumerate(workloads):
        progress(done, len(workloads))
        given = cases.make(workload, tokens, width, hidden, dtype=dtype, device=str(device))
        w = Weights(given.w_gate, given.w_up, given.w_down)
        with torch.no_grad():
            fired = (torch.relu(given.x @ w.gate.T) != 0).sum(0)
        plan = choose_plan(fired, tokens, known, width=width)
        n_hot = len(plan.hot)
        pairs = float(fired.sum() - fired[plan.hot.to(fired.device)].sum()) / tokens
        with torch.no_grad():
            ms = _forward(given, w, plan, seconds)
        element = ms["dense"] / (3 * hidden * tokens)
        per_token = {name: value / tokens / element for name, value in ms.items()}
        elements.append(element)
        gates.append(per_token["cold gate"] / (hidden - n_hot))
        tails.append((pairs, per_token["lists"] + per_token["tail"]))
        heavies.append(ms["heavy"] / element / (3 * (hidden - n_hot) * ms["heavy tokens"]))
        if n_hot:
            hots.append((n_hot, per_token["hot"] + per_token["hot down"]))
        factors += _few(given, fired / tokens, device, seconds) if device.type == "cuda" else []
        dense_ms, sparse_ms, split = _training(given, w, fired, known_training, seconds)
        training.append((dense_ms / tokens / element, sparse_ms / tokens / element, split))
    element = float(np.mean(elements))
    (gather, token), (slope, hot) = _line(tails), _line(hots)
    inference = Costs(
        gate=float(np.mean(gates)),
        down=max(_LEAST, slope - 2),
        gather=gather,
        heavy=float(np.mean(heavies)),
        token=token,
        hot=hot,
        batch=known.batch * _ELEMENT / element,  # a batch takes the same time to start everywhere
        few=max([1.0, *factors]),
    )
    return inference, _of_training(known_training, training, hidden, element)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the line through points, at least ``_LEAST`` each; of one point through the origin."""
    x, y = np.array(points).T
    if len(set(x)) < 2:
        return max(_LEAST, float(np.mean(y / x))), _LEAST
    slope, start = np.polyfit(x, y, 1)
    if start < 0:
        slope, start = float(np.sum(x * y) / np.sum(x * x)), 0.0
    return max(_LEAST, float(slope)), max(_LEAST, float(start))


def _forward(given: cases.FFNInputs, w: Weights, plan: Plan, seconds: float) -> dict[str, float]:
    """ms of a dense FFN and of the parts; the heavy part with half of the tokens."""
    parts = Parts(given.x, w, plan)
    ms = ffn.parts_ms(parts, w, seconds)
    n_heavy = max(1, len(given.x) // 2)  # fewer would not fill the GPU
    parts.pretend_heavy(n_heavy)
    dense = ffn.DenseFFN(given.w_gate, given.w_up, given.w_down).eval()
    runs: dict[str, Callable[[], Any]] = {"dense": functools.partial(dense, given.x)}
    if given.x.device.type == "cuda":
        ffn.forget_compiled(given.x.device)
        runs["compiled"] = functools.partial(torch.compile(dense, fullgraph=True, dynamic=False), given.x)
    dense_ms = min(t.p50 for t in timing.compare(runs, seconds=seconds, device=given.x.device).values())
    heavy = timing.compare(
        {"it": lambda: parts.heavy(parts.tiles.heavy)}, seconds=seconds, device=given.x.device, before=parts.restore
    )["it"].p50
    return {**ms, "dense": dense_ms, "heavy": heavy, "heavy tokens": n_heavy}


def _few(given: cases.FFNInputs, frequency: Tensor, device: torch.device, seconds: float) -> list[float]:
    """For a few numbers of tokens: the time over what an H200's costs predict."""
    F = len(frequency)
    every = torch.arange(F)
    plan = Plan(n_neurons=F, hot=every, cap=0, few_tokens=MAX_FEW_TOKENS, mean_active=float(frequency.sum()))
    found = []
    for M in _FEW:
        D, dtype = given.x.shape[1], given.x.dtype
        case = ffn.Case(workload="", M=M, D=D, F=F, dtype=dtype, device=str(device), graph=True, fp8=False)
        with torch.no_grad():
            runs = ffn.alternatives(case, given, given.x[:M].contiguous(), plan)
            times = timing.compare({n: runs[n] for n in ("dense", "sparse")}, seconds=seconds, device=device)
        start, gather = FEW_COSTS[M]
        said = (start + FEW_GATE * F + 2 * gather * union_of(frequency, M)) / (3 * F)
        found.append(times["sparse"].p50 / times["dense"].p50 / said)
    return found


def _training(
    given: cases.FFNInputs, w: Weights, fired: Tensor, known: Costs, seconds: float
) -> tuple[float, float, tuple[int, float]]:
    """ms of forward and backward with L1, dense and by a training plan; the plan's hot neurons and pairs a token."""
    plan = choose_plan(fired, len(given.x), known, width=given.x.shape[1])
    plan = dataclasses.replace(plan, min_tokens=0)
    problem = train_ffn.Problem.of(given.x, w)
    forwards = {**train_ffn.dense_forwards(given.x.device), "sparse": train_ffn.sparse_forward("triton", plan)}
    runs = {name: functools.partial(problem.solve, forward) for name, forward in forwards.items()}
    times = {name: t.p50 for name, t in timing.compare(runs, seconds=seconds, device=given.x.device).items()}
    pairs = float(fired.sum() - fired[plan.hot.to(fired.device)].sum()) / len(given.x)
    return min(ms for name, ms in times.items() if name != "sparse"), times["sparse"], (len(plan.hot), pairs)


def _of_training(
    known: Costs, measured: list[tuple[float, float, tuple[int, float]]], hidden: int, element: float
) -> Costs:
    dense, factors = float(np.mean([of_dense for of_dense, _, _ in measured])) / (3 * hidden), []
    a_hot_one = 3 * known.dense - 1 + known.down
    for _, sparse, (n_hot, pairs) in measured:
        said = a_hot_one * n_hot + known.gate * (hidden - n_hot) + known.gather * pairs
        factors.append(sparse / (said + known.token + known.hot * (n_hot > 0)))
    times = float(np.mean(factors))
    return Costs(
        gate=times * known.gate,
        down=max(_LEAST, times * a_hot_one - 3 * dense + 1),
        gather=times * known.gather,
        heavy=times * known.heavy,
        token=times * known.token,
        hot=times * known.hot,
        batch=known.batch * _ELEMENT / element,
        dense=dense,
    )
