"""The GPU path of an FFN: by its plan in three parts, or densely. Results do not depend on the plan.

Small batches run densely: below the plan's ``min_tokens`` the parts take longer to start than they save.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import reference, weights
from twell.kernels import dense, hybrid, split
from twell.kernels.tiles import GateTile, RowTile, Tiles, device_facts, tiles_for
from twell.plan import Plan
from twell.reference import Gradients, Weights

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
    if plan is not None and (decoded := plan_for(plan, len(x))) is not None:
        tiles, programs = launch_facts(x)
        return split.forward(x, w, _layout(w, plan), activation, decoded, tiles, programs)
    return _densely(x, w, activation)


def plan_for(encoded: Tensor, tokens: int) -> Plan | None:
    """The plan, or None where it has so many tokens run densely."""
    plan = _decoded(encoded)
    return None if plan.is_dense or tokens < plan.min_tokens else plan


def _order(encoded: Tensor, device: torch.device) -> split.Order | None:
    def make() -> split.Order | None:
        return split.order_of(_decoded(encoded), device)

    return weights.kept(("order", device), [encoded], make, survives_steps=True)


def _decoded(encoded: Tensor) -> Plan:
    return weights.kept("plan", [encoded], lambda: Plan.decode(encoded), survives_steps=True)


def forward_to_train(
    x: Tensor, w: Weights, activation: str, encoded: Tensor, token_mask: Tensor | None, want_stats: bool
) -> tuple[Tensor, Tensor, Tensor, hybrid.Saved]:
    """(y, l1_sum, counts, what the backward needs) by a plan that is not dense."""
    with _on(x):
        plan = _decoded(encoded)
        tiles, programs = launch_facts(x)
        layout = split.lay_out(w, _order(encoded, x.device))  # not kept: 50 MB a layer until the optimiser's step
        return hybrid.forward(x, w, layout, activation, plan, token_mask, tiles, programs, want_stats=want_stats)


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    saved: hybrid.Saved,
    activation: str,
    encoded: Tensor,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    with _on(x):
        plan = _decoded(encoded)
        tiles, _ = launch_facts(x)
        layout = split.lay_out(w, _order(encoded, x.device), for_backward=True)
        return hybrid.backward(dy, dl1, x, w, layout, saved, activation, plan, token_mask, tiles, needs)


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def _densely(x: Tensor, w: Weights, activation: str) -> Tensor:
    z = nnf.linear(x, w.gate, w.gate_bias)
    u = None if w.up is None else nnf.linear(x, w.up, w.up_bias)
    return nnf.linear(dense.activate_(z, u, squared=activation == "relu2"), w.down, w.down_bias)


def _layout(w: Weights, encoded: Tensor) -> split.Layout:
    sources = [encoded, *(t for t in w if t is not None)]
    return weights.kept("split", sources, lambda: split.lay_out(w, _order(encoded, w.gate.device)))


def dense_forward(
    x: Tensor, w: Weights, activation: str, token_mask: Tensor | None, *, want_stats: bool
) -> reference.Forward:
    with _on(x):
        return dense.forward(x, w, activation, token_mask, want_stats=want_stats)


def dense_backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    z: Tensor,
    u: Tensor | None,
    activation: str,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    with _on(x):
        return dense.backward(dy, dl1, x, w, z, u, activation, token_mask, needs)


def launch_facts(x: Tensor) -> tuple[Tiles, int]:
    """Tile sizes for x's dtype and device, and how many programs fill it."""
    if x.device.type == "cpu":
        return _INTERPRETED, 2
    capability, processors = device_facts(torch.cuda.current_device() if x.device.index is None else x.device.index)
    return tiles_for(capability, x.dtype), processors
