"""The GPU path of an FFN: by its plan in three parts, or densely. Results do not depend on the plan.

Small batches run densely: below the plan's ``min_tokens`` the parts take longer to start than they save.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import weights
from twell.kernels import split
from twell.kernels.dense import activate_
from twell.kernels.tiles import GateTile, RowTile, Tiles, device_facts, tiles_for
from twell.plan import Plan
from twell.reference import Weights

_INTERPRETED = Tiles(  # tiny, for Triton's interpreter
    gate=GateTile(32, 128, 32, 4, 2),
    heavy=GateTile(16, 32, 32, 4, 2),
    tail=RowTile(4, 4, 2),
    long_tail=RowTile(1, 4, 2),
    tail_backward=RowTile(2, 4, 2),
    use_tma=False,
)


def forward(x: Tensor, w: Weights, activation: str, plan: Tensor | None) -> Tensor:
    """y [M, D] for x [M, D]. ``plan``: see ``Plan.encode``; None runs densely."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):  # where Triton launches
            return forward(x, w, activation, plan)
    if plan is not None:
        decoded = weights.kept("plan", [plan], lambda: Plan.decode(plan))
        if not decoded.is_dense and x.shape[0] >= decoded.min_tokens:
            return _in_parts(x, w, activation, plan, decoded)
    return _densely(x, w, activation)


def _densely(x: Tensor, w: Weights, activation: str) -> Tensor:
    z = nnf.linear(x, w.gate, w.gate_bias)
    u = None if w.up is None else nnf.linear(x, w.up, w.up_bias)
    return nnf.linear(activate_(z, u, squared=activation == "relu2"), w.down, w.down_bias)


def _in_parts(x: Tensor, w: Weights, activation: str, encoded: Tensor, plan: Plan) -> Tensor:
    sources = [encoded, *(t for t in w if t is not None)]
    layout = weights.kept("split", sources, lambda: split.lay_out(w, plan.hot.to(x.device)))
    tiles, programs = launch_facts(x)
    return split.forward(x, w, layout, activation, plan, tiles, programs)


def launch_facts(x: Tensor) -> tuple[Tiles, int]:
    """Tile sizes for x's dtype and device, and how many programs fill it."""
    if x.device.type == "cpu":
        return _INTERPRETED, 2
    capability, processors = device_facts(torch.cuda.current_device() if x.device.index is None else x.device.index)
    return tiles_for(capability, x.dtype), processors
