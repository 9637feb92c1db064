"""``twell bench train --trace``: forward and backward of one FFN with the activations of a trained model.

A trace holds positions, no values: as in ``traced.py`` the cold gate is timed on a synthetic input, everything else of
forward and backward on random values at the trace's positions; the row's sparse time is the sum of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell.formats import TwELL
from twell.gpu.training import split_training
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing, traced, train
from twell.workbench.bench.parts import Parts

_CHECKED_TOKENS = 512


def measure_trace(
    layer: traced.Layer, M: int, D: int, *, dtype: torch.dtype, device: torch.device, seconds: float = 3.0
) -> dict[str, Any]:
    """A JSON-ready row for one layer, as a gated FFN on a GPU (or in Triton's interpreter)."""
    active = layer.active.to(device)
    _, timed = traced.plan_and_rest(active, M, D)
    half = len(active) // 2
    plan = choose_plan(active[:half].sum(0), half, costs_for(device, training=True), width=D)
    F, mean = timed.shape[1], timed.sum().item() / M
    inputs = cases.make(f"skew{max(1, round(mean))}", M, D, F, dtype=dtype, device=device)
    p = train.Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    del inputs
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(p.solve, forward) for name, forward in train.dense_forwards(p).items()
    }
    errors = None
    if not plan.runs_split(M, captured=False):
        runs["sparse"] = functools.partial(p.solve, train.sparse_forward("triton", None))
        times = timing.compare(runs, seconds=seconds, device=device)
    else:
        errors = _check_replay(p, plan, timed)
        replay = _Replay(p, plan, timed)
        runs |= {"gate": replay.cold_gate, "rest": replay.rest}
        times = timing.compare(runs, seconds=seconds, device=device)
        times["sparse"] = traced.added(times["gate"], times["rest"])
    case = ffn.Case(workload=layer.name, M=M, D=D, F=F, dtype=dtype, device=str(device), backend="triton")
    return train.make_row(case, "triton", plan, mean_active=mean, times=times, error=errors, memory=None, joules=None)


class _Replay:
    """Forward and backward of an FFN with recorded positions: its cold gate, and everything else."""

    def __init__(self, p: train.Problem, plan: Plan, active: Tensor) -> None:
        self.p, self.x = p, p.x.detach()
        self.w = Weights._make(None if t is None else t.detach() for t in p.w)
        self.parts = Parts(self.x, self.w, plan)
        self.r = self.parts.replay(active)

    def cold_gate(self) -> TwELL:
        return self.parts.cold_gate(self.parts.tiles.gate, self.parts.tiles.use_tma)

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        """As ``gpu.train`` and ``gpu.backward``, which lay the weights out in every call."""
        parts, p, x = self.parts, self.p, self.x
        given = parts.order, parts.places, parts.split, "relu", None, parts.tiles, parts.programs
        y, l1, _, kept = split_training.forward(x, self.w, *given, want_stats=True, cold_gate=parts.in_twell)
        gradients = split_training.backward(p.dy, p.dl1, x, self.w, kept, *given, train.NEEDS)
        dw = gradients.weights
        assert dw.up is not None
        return {"y": y, "l1": l1, "dx": gradients.x, "dw_gate": dw.gate, "dw_up": dw.up, "dw_down": dw.down}


@torch.no_grad()
def _check_replay(p: train.Problem, plan: Plan, active: Tensor) -> dict[str, dict[str, float]]:
    """Errors of everything after the gate on the first tokens, beside those of dense formulas at the same positions."""
    few = p._replace(x=p.x[:_CHECKED_TOKENS], dy=p.dy[:_CHECKED_TOKENS])
    replay = _Replay(few, plan, active[:_CHECKED_TOKENS])
    sparse = replay.rest()
    x, w, dy, dl1 = few.x.double(), few.w.to(torch.float64), few.dy.double(), few.dl1.double()
    r = torch.relu(nnf.linear(x, w.gate))  # hot neurons' gate follows from x, the cold ones' from the trace
    r[:, replay.parts.cold] = replay.r.double()

    def both(x: Tensor, w: Weights, dy: Tensor, dl1: Tensor) -> dict[str, Tensor]:
        return train.formulas(x, w, dy, dl1, r.to(x.dtype))

    return train.check(both(x, w, dy, dl1), both(few.x, few.w, few.dy, few.dl1), sparse)
