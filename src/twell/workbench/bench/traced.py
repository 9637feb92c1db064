"""``twell bench ffn --trace``: one FFN, dense against sparse, with the activations of a trained model.

A trace holds positions, no values. So the gate is timed on a synthetic input with as many active neurons, then its
output is overwritten, untimed, with random positive values at the trace's positions, and everything after the gate is
timed; a frozen layer's time is the sum of both, and a layer that is not frozen puts its weights in order before.
Positions do not change what a dense FFN takes: it is timed on the synthetic input. The plan comes from the first half
of the trace, the timing from the second, repeated to M tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import gpu
from twell.gpu.prefill import union
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights, to_fp8
from twell.workbench.bench import cases, ffn, timing
from twell.workbench.bench.parts import Fp8Parts, Parts

_CHECKED_ROWS = 256
_IN_GRAPHS = 4096  # tokens: fewer are timed in CUDA graphs, where the host does not matter


class Layer(NamedTuple):
    name: str
    active: Tensor  # bool [tokens, F]


@torch.inference_mode()
def measure(
    layer: Layer,
    M: int,
    D: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = 3.0,
    fp8: bool | None = None,
) -> dict[str, Any]:
    """A JSON-ready row for one layer, as a gated FFN on a GPU (or in Triton's interpreter)."""
    plan, timed = plan_and_rest(layer.active.to(device), M, D)
    plan_fp8, _ = plan_and_rest(layer.active.to(device), M, D, fp8=True)
    mean = max(1, round(timed.sum().item() / M))
    with torch.inference_mode(False):
        inputs = cases.make(f"skew{mean}", M, D, timed.shape[1], dtype=dtype, device=device)
    return _row(layer.name, inputs, timed, plan, plan_fp8, seconds, fp8)


def plan_and_rest(active: Tensor, M: int, D: int, *, fp8: bool = False) -> tuple[Plan, Tensor]:
    """A plan by the first half of ``active`` [tokens, F], and the second half repeated to M tokens: bool [M, F]."""
    half = len(active) // 2
    if half < 1:
        raise ValueError(f"a trace of {len(active)} tokens has no two halves: one to plan by, one to time")
    seen, rest = active[:half], active[half:]
    plan = choose_plan(seen.sum(0), half, costs_for(active.device, fp8=fp8), width=D)
    return plan, rest.repeat(-(-M // len(rest)), 1)[:M]


def _row(
    name: str,
    inputs: cases.FFNInputs,
    active: Tensor,
    plan: Plan,
    plan_fp8: Plan,
    seconds: float,
    fp8: bool | None,
) -> dict[str, Any]:
    x, w = inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    (M, D), F = x.shape, w.gate.shape[0]
    case = ffn.Case(workload=name, M=M, D=D, F=F, dtype=x.dtype, device=x.device.type, backend="triton", fp8=fp8)
    runs: dict[str, Callable[[], Any]] = {
        n: run for n, run in ffn.alternatives(case, inputs, x, plan).items() if n in ffn.DENSE
    }
    parts_ms, error, error_fp8 = {}, None, None
    few, most, least = plan.tokens(captured=True)
    in_graphs = min(least, _IN_GRAPHS) > M and x.device.type == "cuda"
    if in_graphs:
        times = _in_graphs(case, inputs, active, is_union=few < M <= most, seconds=seconds)
    elif not plan.runs_split(M, captured=False):
        runs["sparse"] = lambda: gpu.forward(x, w, "relu", None)
        times = timing.compare(runs, seconds=seconds, device=x.device)
        times["frozen"] = times["sparse"]
    else:
        parts = Parts(x, w, plan)
        error = _check(parts, w, parts.replay(active))
        tiles = parts.tiles
        runs["layout"] = parts.lay_out
        runs["gate"] = lambda: parts.cold_gate(tiles.gate, tiles.use_tma)
        runs["after gate"] = parts.after_gate
        if case.is_sparse_fp8 and plan_fp8.runs_split(M, captured=False):
            in_fp8 = Fp8Parts(x, w, plan_fp8)
            error_fp8 = _check_fp8(in_fp8, in_fp8.replay(active))
            runs |= {"gate in fp8": in_fp8.cold_gate, "after gate in fp8": in_fp8.after_gate}
        elif case.is_sparse_fp8:
            kept = gpu.fp8.keep(to_fp8(inputs.w_gate), to_fp8(inputs.w_up), to_fp8(inputs.w_down), None).w
            runs["sparse_fp8"] = lambda: gpu.fp8.dense(x, kept, "relu")
            apart = ffn.relative_error(runs["sparse_fp8"](), runs["fp8"]().double())
            if not apart <= 0.05:
                raise ffn.WrongResult(f"dense FP8 output is wrong: {apart:.2e} from the compiled one")
        times = timing.compare(runs, seconds=seconds, device=x.device)
        if "gate in fp8" in times:
            times["sparse_fp8"] = added(times.pop("gate in fp8"), times.pop("after gate in fp8"))
        times["frozen"] = added(times["gate"], times["after gate"])
        times["sparse"] = added(times["layout"], times["frozen"])
        parts_ms = ffn.parts_ms(parts, w, seconds)
    return {
        "bench": "ffn",
        "workload": name,
        "kind": "gated",
        "M": M,
        "D": D,
        "F": F,
        "dtype": str(x.dtype).removeprefix("torch."),
        "backend": "triton",
        **({"graph": True, "graph_layers": ffn.GRAPH_LAYERS} if in_graphs else {}),
        "mean_active": round(active.sum().item() / M, 2),
        **{f"{n}_ms": spread._asdict() for n, spread in times.items()},
        "speedup": ffn.speedup(times, "sparse"),
        "speedup_frozen": ffn.speedup(times, "frozen"),
        **ffn.over_fp8(times),
        "error": {"sparse": error} | ({} if error_fp8 is None else {"sparse_fp8": error_fp8}),
        "plan": ffn.plan_facts(plan),
        "parts_ms": parts_ms,
        **timing.environment(x.device),
    }


def _in_graphs(
    case: ffn.Case, inputs: cases.FFNInputs, active: Tensor, *, is_union: bool, seconds: float
) -> dict[str, timing.Spread]:
    """Of batches between few and many tokens: CUDA graphs of several layers, of which each has its own memory."""
    x, case = inputs.x, dataclasses.replace(case, graph=True)
    runs: dict[str, Callable[[], Any]] = {
        n: run for n, run in ffn.alternatives(case, inputs, x, None).items() if n in (*ffn.DENSE, "sparse")
    }
    zs: list[Tensor] = []
    if is_union:
        ws = [
            Weights(inputs.w_gate.clone(), inputs.w_up.clone(), inputs.w_down.t().contiguous().t())
            for _ in range(ffn.GRAPH_LAYERS)
        ]
        clean = (torch.rand(active.shape, dtype=x.dtype, device=x.device) + 0.1) * (2 * active.to(x.dtype) - 1)
        zs += [clean.clone() for _ in ws]
        tiles = gpu.launch_facts(x)[0]
        runs["gate"] = ffn.replayed([functools.partial(nnf.linear, x, w.gate) for w in ws])
        after = [functools.partial(union.after_gate, x, z, w, "relu", tiles) for w, z in zip(ws, zs, strict=True)]
        runs["after gate"] = ffn.replayed(after)
        w = ws[0].to(torch.float64)
        assert w.up is not None
        rows = slice(None, None, max(1, len(x) // _CHECKED_ROWS))
        of_x = x[rows].double()
        truth = (torch.relu(clean[rows].double()) * (of_x @ w.up.T)) @ w.down.T
        zs[0].copy_(clean)
        y = after[0]()[rows]
        if not ffn.relative_error(y, truth) <= 1e-2:
            raise ffn.WrongResult(f"sparse output is wrong: relative error {ffn.relative_error(y, truth):.2e}")
        del runs["sparse"]

    def restore() -> None:
        for z in zs:
            z.copy_(clean)

    times = timing.compare(runs, seconds=seconds, device=x.device, before=restore)
    times = {n: timing.Spread(*(round(t / ffn.GRAPH_LAYERS, 5) for t in of)) for n, of in times.items()}
    if is_union:
        times["sparse"] = added(times["gate"], times["after gate"])
    return {**times, "frozen": times["sparse"]}


def added(*spreads: timing.Spread) -> timing.Spread:
    """Of things that follow each other."""
    return timing.Spread(*(round(sum(of), 5) for of in zip(*spreads, strict=True)))


def _check(parts: Parts, w: Weights, r: Tensor) -> float:
    """Relative error of what follows the cold gate ``r`` [M, C] against float64, on rows spread over x."""
    rows = slice(None, None, max(1, len(parts.x) // _CHECKED_ROWS))
    r = r[rows].double()
    y = parts.after_gate()[rows].double()
    x, layout, cold = parts.x[rows].double(), parts.layout, parts.cold
    assert w.up is not None
    truth = (r * (x @ w.up[cold].double().T)) @ w.down[:, cold].double().T
    if parts.has_hot:
        z, u = (x @ layout.hot.double().T).unflatten(1, (-1, 2)).unbind(2)
        truth += (torch.relu(z) * u) @ layout.hot_down.double()
    dense = nnf.linear(torch.relu(nnf.linear(parts.x[rows], w.gate)) * nnf.linear(parts.x[rows], w.up), w.down)
    true_dense = (torch.relu(x @ w.gate.double().T) * (x @ w.up.double().T)) @ w.down.double().T
    error, allowed = ffn.relative_error(y, truth), 2 * ffn.relative_error(dense, true_dense) + 1e-3
    if not error <= allowed:
        raise ffn.WrongResult(f"sparse output is wrong: relative error {error:.2e}, allowed {allowed:.2e}")
    return float(f"{error:.3g}")


def _check_fp8(parts: Fp8Parts, r: Tensor) -> float:
    """As ``_check``, on tokens that are not heavy. In FP8 no sum of the cold gate is taken, and h is not rounded."""
    light = (r != 0).sum(1) <= parts.split.cap
    light &= ~parts.in_twell.overflowed
    rows = light.nonzero()[:: max(1, len(r) // _CHECKED_ROWS), 0]
    gate, up, down = (t.to(torch.float64) for t in parts.fp8)
    x, cold = to_fp8(parts.x[rows]).to(torch.float64), parts.cold
    y, truth = parts.after_gate()[rows], (r[rows].double() * (x @ up[cold].T)) @ down[:, cold].T
    hot = parts.plan.order[: parts.split.n_hot].long()
    truth += (torch.relu(x @ gate[hot].T) * (x @ up[hot].T)) @ down[:, hot].T
    error = ffn.relative_error(y, truth)
    if not error <= 1e-2:
        raise ffn.WrongResult(f"sparse FP8 output is wrong: relative error {error:.2e}")
    return float(f"{error:.3g}")
