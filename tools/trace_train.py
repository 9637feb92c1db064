"""``trace_bench.py train``: forward and backward of one FFN with the activations of a trained model.

As in trace_ffn.py the cold gate is timed on a synthetic input, and the rest of forward and backward on random
values at the trace's positions. The row's sparse time is the sum of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from trace_ffn import added, plan_and_rest, replay
from twell.formats import TwELL
from twell.gpu.training import split_training
from twell.plan import Plan
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing, train_ffn
from twell.workbench.bench.parts import Parts

_CHECKED_TOKENS = 512


def measure(
    name: str, recorded: Tensor, M: int, D: int, *, dtype: torch.dtype, device: torch.device, seconds: float = 3.0
) -> dict[str, Any]:
    """A JSON-ready row of one layer, as a gated FFN on a GPU (or in Triton's interpreter).

    ``recorded``: bool [tokens, F], its active neurons.
    """
    plan, timed = plan_and_rest(recorded.to(device), M, D, training=True)
    F, mean = timed.shape[1], timed.sum().item() / M
    inputs = cases.make(f"skew{max(1, round(mean))}", M, D, F, dtype=dtype, device=device)
    p = train_ffn.Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    del inputs
    runs: dict[str, Callable[[], Any]] = {
        way: functools.partial(p.solve, forward) for way, forward in train_ffn.dense_forwards(device).items()
    }
    errors = None
    if not plan.runs_split(M, captured=False):
        runs["sparse"] = functools.partial(p.solve, train_ffn.sparse_forward("triton", None))
        times = timing.compare(runs, seconds=seconds, device=device)
    else:
        errors = _check_replay(p, plan, timed)
        layer = _Replay(p, plan, timed)
        runs |= {"gate": layer.cold_gate, "rest": layer.rest}
        times = timing.compare(runs, seconds=seconds, device=device)
        times["sparse"] = added(times["gate"], times["rest"])
    case = ffn.Case(workload=name, M=M, D=D, F=F, dtype=dtype, device=str(device), backend="triton")
    return train_ffn.make_row(
        case, "triton", plan, mean_active=mean, times=times, error=errors, memory=None, joules=None
    )


class _Replay:
    """Forward and backward of an FFN with recorded positions: its cold gate, and everything else."""

    def __init__(self, p: train_ffn.Problem, plan: Plan, active: Tensor) -> None:
        self.p, self.x = p, p.x.detach()
        self.w = Weights._make(None if t is None else t.detach() for t in p.w)
        self.parts = Parts(self.x, self.w, plan)
        self.r = replay(self.parts, active)

    def cold_gate(self) -> TwELL:
        return self.parts.cold_gate(self.parts.tiles.gate, self.parts.tiles.use_tma)

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        """As ``gpu.train`` and ``gpu.backward``, which lay out the weights in every call."""
        parts, p, x = self.parts, self.p, self.x
        given = parts.order, parts.places, parts.split, "relu", None, parts.tiles, parts.programs
        y, l1, _, kept = split_training.forward(x, self.w, *given, want_stats=True, cold_gate=parts.in_twell)
        gradients = split_training.backward(p.dy, p.dl1, x, self.w, kept, *given, train_ffn.NEEDS)
        dw = gradients.weights
        assert dw.up is not None
        return {"y": y, "l1": l1, "dx": gradients.x, "dw_gate": dw.gate, "dw_up": dw.up, "dw_down": dw.down}


@torch.no_grad()
def _check_replay(p: train_ffn.Problem, plan: Plan, active: Tensor) -> dict[str, dict[str, float]]:
    """Errors of everything after the gate on the first tokens; dense: formulas at the same positions and dtype."""
    few = p._replace(x=p.x[:_CHECKED_TOKENS], dy=p.dy[:_CHECKED_TOKENS])
    layer = _Replay(few, plan, active[:_CHECKED_TOKENS])
    sparse = layer.rest()
    x, w, dy, dl1 = few.x.double(), few.w.to(torch.float64), few.dy.double(), few.dl1.double()
    r = torch.relu(nnf.linear(x, w.gate))  # hot neurons' gate comes from x, cold neurons' from the trace
    r[:, layer.parts.cold] = layer.r.double()

    def both(x: Tensor, w: Weights, dy: Tensor, dl1: Tensor) -> dict[str, Tensor]:
        return train_ffn.formulas(x, w, dy, dl1, r.to(x.dtype))

    return train_ffn.check(both(x, w, dy, dl1), both(few.x, few.w, few.dy, few.dl1), sparse)
