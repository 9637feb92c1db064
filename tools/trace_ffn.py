"""``trace_bench.py ffn``: the forward of one FFN, dense against sparse, with the activations of a trained model.

A trace has positions and no values. So the gate is timed on a synthetic input with as many active neurons. Then its
output is overwritten, untimed, with random positive values at the trace's positions, and everything after the gate is
timed. A frozen layer's time is the sum of both; a layer that is not frozen also lays out its weights first. A dense FFN
takes the same time at any positions: it is timed on the synthetic input. The first half of the trace makes the plan;
the second half is timed, repeated to M tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import gpu
from twell.formats import TwELL
from twell.gpu.prefill import split_fp8, union
from twell.gpu.shared import gate
from twell.gpu.shared.layout import SplitSizes
from twell.gpu.shared.round_fp8 import room_for, round_rows
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights, to_fp8
from twell.workbench.bench import cases, ffn, parts, timing
from twell.workbench.bench import fp8 as fp8_ways
from twell.workbench.bench.checks import WrongResult, check_fp8, relative_error
from twell.workbench.bench.graphs import replayed
from twell.workbench.bench.parts import Parts

_CHECKED_ROWS = 256
_IN_GRAPHS = 4096  # fewer tokens are timed in CUDA graphs, where the host does not matter


@torch.inference_mode()
def measure(
    name: str,
    recorded: Tensor,
    M: int,
    D: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = 3.0,
    fp8: bool | None = None,
) -> dict[str, Any]:
    """A JSON-ready row of one layer, as a gated FFN on a GPU (or in Triton's interpreter).

    ``recorded``: bool [tokens, F], its active neurons.
    """
    plan, active = plan_and_rest(recorded.to(device), M, D)
    plan_fp8, _ = plan_and_rest(recorded.to(device), M, D, fp8=True)
    with torch.inference_mode(False):
        mean, F = max(1, round(active.sum().item() / M)), active.shape[1]
        inputs = cases.make(f"skew{mean}", M, D, F, dtype=dtype, device=device)
    x, w = inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    case = ffn.Case(workload=name, M=M, D=D, F=F, dtype=x.dtype, device=x.device.type, backend="triton", fp8=fp8)
    runs: dict[str, Callable[[], Any]] = {
        n: run for n, run in ffn.alternatives(case, inputs, x, plan).items() if n in ffn.DENSE
    }
    parts_ms, error = {}, None
    few, most, least = plan.tokens(captured=True)
    in_graphs = min(least, _IN_GRAPHS) > M and x.device.type == "cuda"
    if in_graphs:
        case = dataclasses.replace(case, graph=True)
        few_fp8, _, least_fp8 = plan_fp8.tokens(captured=True)
        names = [*ffn.DENSE, "sparse", *([fp8_ways.SPARSE] if few_fp8 < M < least_fp8 else [])]  # which runs densely
        times, errors = _in_graphs(case, inputs, active, names, is_union=few < M <= most, seconds=seconds)
    else:
        errors = _errors_in_fp8(inputs, runs)
        if case.is_sparse_fp8 and plan_fp8.runs_split(M, captured=False):
            in_fp8 = Fp8Parts(x, w, plan_fp8)
            errors[fp8_ways.SPARSE] = _check_fp8(in_fp8, in_fp8.replay(active))
            runs |= {"gate in fp8": in_fp8.cold_gate, "after gate in fp8": in_fp8.after_gate}
        elif case.is_sparse_fp8:
            kept = gpu.fp8.keep(to_fp8(inputs.w_gate), to_fp8(inputs.w_up), to_fp8(inputs.w_down), None).w
            runs[fp8_ways.SPARSE] = lambda: gpu.fp8.dense(x, kept, "relu")
            errors = _errors_in_fp8(inputs, runs)
        if plan.runs_split(M, captured=False):
            split = Parts(x, w, plan)
            error = _check(split, w, replay(split, active))
            runs["layout"] = split.lay_out
            runs["gate"] = functools.partial(split.cold_gate, split.tiles.gate, split.tiles.use_tma)
            runs["after gate"] = split.after_gate
            parts_ms = ffn.parts_ms(split, w, seconds)
        else:
            runs["sparse"] = lambda: gpu.forward(x, w, "relu", None)
        times = timing.compare(runs, seconds=seconds, device=x.device)
        if "gate in fp8" in times:
            times[fp8_ways.SPARSE] = added(times.pop("gate in fp8"), times.pop("after gate in fp8"))
        times["frozen"] = added(times["gate"], times["after gate"]) if "gate" in times else times["sparse"]
        times["sparse"] = added(times["layout"], times["frozen"]) if "gate" in times else times["sparse"]
    return {
        **ffn.fields(case, "ffn", "triton", active.sum().item() / M, times),
        **({"graph_layers": ffn.GRAPH_LAYERS} if in_graphs else {}),
        **ffn.ratios(times),
        "error": {"sparse": error, **errors},
        "plan": ffn.plan_facts(plan),
        **({"plan_fp8": ffn.plan_facts(plan_fp8)} if case.is_sparse_fp8 else {}),
        "parts_ms": parts_ms,
    }


def added(*spreads: timing.Spread) -> timing.Spread:
    """Of calls that follow each other."""
    return timing.Spread(*(round(sum(of), 5) for of in zip(*spreads, strict=True)))


def plan_and_rest(recorded: Tensor, M: int, D: int, **costs: bool) -> tuple[Plan, Tensor]:
    """A plan from the first half of ``recorded`` [tokens, F], and the second half repeated to M tokens: bool [M, F]."""
    half = len(recorded) // 2
    if half < 1:
        raise ValueError(f"a trace of {len(recorded)} tokens has no two halves: one to plan by, one to time")
    seen, rest = recorded[:half], recorded[half:]
    plan = choose_plan(seen.sum(0), half, costs_for(recorded.device, **costs), width=D)
    return plan, rest.repeat(-(-M // len(rest)), 1)[:M]


def _errors_in_fp8(inputs: cases.FFNInputs, runs: Mapping[str, Callable[[], Tensor]]) -> dict[str, float | None]:
    """Of those of the ways that compute whole FFNs in FP8."""
    ways = {name: run().clone() for name, run in runs.items() if name in (*fp8_ways.NAMES, fp8_ways.SPARSE)}
    return check_fp8(inputs.x, inputs, True, ways)


def _in_graphs(
    case: ffn.Case, inputs: cases.FFNInputs, active: Tensor, names: Sequence[str], *, is_union: bool, seconds: float
) -> tuple[dict[str, timing.Spread], dict[str, float | None]]:
    """Between few and many tokens: CUDA graphs of several layers, each with its own weights. Times of the ways
    ``names``, and errors in FP8."""
    x = inputs.x
    runs: dict[str, Callable[[], Any]] = {
        n: run for n, run in ffn.alternatives(case, inputs, x, None).items() if n in names
    }
    errors = _errors_in_fp8(inputs, runs)
    zs: list[Tensor] = []
    if is_union:
        ws = [
            Weights(inputs.w_gate.clone(), inputs.w_up.clone(), inputs.w_down.t().contiguous().t())
            for _ in range(ffn.GRAPH_LAYERS)
        ]
        clean = (torch.rand(active.shape, dtype=x.dtype, device=x.device) + 0.1) * (2 * active.to(x.dtype) - 1)
        zs += [clean.clone() for _ in ws]
        tiles = gpu.launch_facts(x)[0]
        runs["gate"] = replayed([functools.partial(nnf.linear, x, w.gate) for w in ws])
        after = [functools.partial(union.after_gate, x, z, w, "relu", tiles) for w, z in zip(ws, zs, strict=True)]
        runs["after gate"] = replayed(after)
        w = ws[0].to(torch.float64)
        assert w.up is not None
        rows = slice(None, None, max(1, len(x) // _CHECKED_ROWS))
        of_x = x[rows].double()
        truth = (torch.relu(clean[rows].double()) * (of_x @ w.up.T)) @ w.down.T
        zs[0].copy_(clean)
        y = after[0]()[rows]
        if not relative_error(y, truth) <= 1e-2:
            raise WrongResult(f"sparse output is wrong: relative error {relative_error(y, truth):.2e}")
        del runs["sparse"]

    def restore() -> None:
        for z in zs:
            z.copy_(clean)

    times = timing.compare(runs, seconds=seconds, device=x.device, before=restore)
    times = timing.shared(times, ffn.GRAPH_LAYERS)
    if is_union:
        times["sparse"] = added(times["gate"], times["after gate"])
    return {**times, "frozen": times["sparse"]}, errors


def replay(split: Parts, active: Tensor) -> Tensor:
    """As if the neurons ``active`` [M, F] (bool) had fired. Only cold ones count: hot ones run densely.

    Returns the cold gate [M, C].
    """
    return split.replace_gate(active[:, split.cold])


def _check(split: Parts, w: Weights, r: Tensor) -> float:
    """Relative error of what follows the cold gate ``r`` [M, C] against float64, on rows spread over x."""
    rows = slice(None, None, max(1, len(split.x) // _CHECKED_ROWS))
    r = r[rows].double()
    y = split.after_gate()[rows].double()
    x, layout, cold = split.x[rows].double(), split.layout, split.cold
    assert w.up is not None
    truth = (r * (x @ w.up[cold].double().T)) @ w.down[:, cold].double().T
    if split.has_hot:
        z, u = (x @ layout.hot.double().T).unflatten(1, (-1, 2)).unbind(2)
        truth += (torch.relu(z) * u) @ layout.hot_down.double()
    dense = nnf.linear(torch.relu(nnf.linear(split.x[rows], w.gate)) * nnf.linear(split.x[rows], w.up), w.down)
    true_dense = (torch.relu(x @ w.gate.double().T) * (x @ w.up.double().T)) @ w.down.double().T
    error, allowed = relative_error(y, truth), 2 * relative_error(dense, true_dense) + 1e-3
    if not error <= allowed:
        raise WrongResult(f"sparse output is wrong: relative error {error:.2e}, allowed {allowed:.2e}")
    return float(f"{error:.3g}")


def _check_fp8(parts: Fp8Parts, r: Tensor) -> float:
    """As ``_check``, on tokens that are not heavy; the truth rounds x and weights to FP8, and not h."""
    light = (r != 0).sum(1) <= parts.split.cap
    light &= ~parts.in_twell.overflowed
    rows = light.nonzero()[:: max(1, len(r) // _CHECKED_ROWS), 0]
    gate, up, down = (t.to(torch.float64) for t in parts.fp8)
    x, cold = to_fp8(parts.x[rows]).to(torch.float64), parts.cold
    y, truth = parts.after_gate()[rows], (r[rows].double() * (x @ up[cold].T)) @ down[:, cold].T
    hot = parts.plan.order[: parts.split.n_hot].long()
    truth += (torch.relu(x @ gate[hot].T) * (x @ up[hot].T)) @ down[:, hot].T
    error = relative_error(y, truth)
    if not error <= 1e-2:
        raise WrongResult(f"sparse FP8 output is wrong: relative error {error:.2e}")
    return float(f"{error:.3g}")


class Fp8Parts:
    """The cold gate of a layer with FP8 weights, and everything after it. Gated, relu, no biases."""

    def __init__(self, x: Tensor, w: Weights, plan: Plan) -> None:
        assert w.up is not None
        self.x, self.plan = x, plan.on(x.device)
        self.fp8 = to_fp8(w.gate), to_fp8(w.up), to_fp8(w.down)
        self.w, layout = gpu.fp8.keep(*self.fp8, self.plan, x.dtype)
        tiles = split_fp8.tiles_for(90)
        assert layout is not None and tiles is not None
        self.layout, self.tiles, self.split = layout, tiles, SplitSizes.of(self.plan)
        self.programs = gpu.launch_facts(x)[1]
        self.cold = self.plan.order[self.split.n_hot :].long()
        self.q, self.scale = room_for(x.shape[0], x.shape[1], x.new_empty)
        round_rows(x, (self.q, self.scale))
        self.in_twell = self.cold_gate()

    def cold_gate(self) -> TwELL:
        """From the rounded x; rounding it is timed with the part after the gate."""
        tiles, scales = self.tiles, (self.scale, self.layout.cold_scale)
        facts: dict[str, Any] = {"tile": tiles.gate, "programs": self.programs, "use_tma": tiles.use_tma}
        return gate.gate_in_twell(self.q, self.layout.cold, None, scales=scales, dtype=self.x.dtype, **facts)

    def replay(self, active: Tensor) -> Tensor:
        """As ``replay``. Returns the cold gate [M, C], but the kernels compute heavy tokens' gate from x."""
        r = torch.rand(len(active), len(self.cold), dtype=self.x.dtype, device=self.x.device) + 0.1
        r = r * active[:, self.cold]
        self.in_twell = TwELL.pack(r, slots=parts.SLOTS, compact=True, overflow="mark")
        return r

    def after_gate(self) -> Tensor:
        order, places, *_ = self.plan
        given = order, places, self.split, "relu", self.tiles, self.programs
        return split_fp8.forward(self.x, self.w, self.layout, *given, cold_gate=self.in_twell)
