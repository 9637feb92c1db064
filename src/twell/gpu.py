"""The GPU path of an FFN: by its plan in three parts, a few tokens by their own kernels, or densely. Results do not
depend on the plan.

Batches between ``few_tokens`` and ``min_tokens`` of a plan run densely: there the parts take longer to start than they
save, and too many neurons fire for one token or another.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import weights
from twell.kernels import decode, dense, hybrid, screen, split
from twell.kernels.tiles import GateTile, RowTile, Tiles, device_facts, tiles_for
from twell.plan import Plan
from twell.reference import Gradients, Weights

P = ParamSpec("P")
R = TypeVar("R")

_INTERPRETED = Tiles(  # tiny, for Triton's interpreter
    gate=GateTile(32, 128, 32, 4, 2),
    heavy=GateTile(16, 32, 32, 4, 2),
    tail=RowTile(4, 4, 2),
    long_tail=RowTile(1, 4, 2),
    tail_backward=RowTile(2, 4, 2),
    use_tma=False,
)
_INTERPRETED_FEW = decode.NeuronTile(16, 32, 4, 2), decode.SumTile(32, 4, 2, BS=2, BW=2)


def forward(x: Tensor, w: Weights, activation: str, plan: Tensor | None) -> Tensor:
    """y [M, D] for x [M, D]. ``plan``: see ``Plan.encode``; None runs densely."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):  # where Triton launches
            return forward(x, w, activation, plan)
    if plan is not None:
        few = _decoded(plan).few_tokens
        if 0 < len(x) <= few:
            return few_tokens_forward(x, w, activation)
        if few and not w.down.is_inference():
            # Made now, by a prompt: in a graph that is captured later it would be in the graph's memory.
            _neuron_major(w)
        if (decoded := plan_for(plan, len(x))) is not None:
            tiles, programs = launch_facts(x)
            return split.forward(x, w, _layout(w, plan), activation, decoded, tiles, programs)
    return _densely(x, w, activation)


def few_tokens_forward(x: Tensor, w: Weights, activation: str) -> Tensor:
    """y [M, D] for x [M, D], 1 to 64 tokens; densely where no copy of a weight could be kept."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return few_tokens_forward(x, w, activation)
    if w.down.is_inference():
        return _densely(x, w, activation)
    down = _neuron_major(w)
    tiles, settled = few_tiles(x, w, down), False
    for_hopper = isinstance(tiles[0], decode.HopperTile)
    most_candidates = screen.MOST_BESIDE_HOPPER if for_hopper else screen.MOST_CANDIDATES
    screened = _screen(x, w, most_candidates) if len(x) == 1 else None
    if screened is None and for_hopper:
        # Seen by an earlier call of that kernel, which lets none start before what came before it has ended.
        settled = weights.kept_already("seen", [w.gate]) is not None
        if not settled:
            weights.kept("seen", [w.gate], lambda: True)
    return decode.forward(x, w, down, activation, tiles, screened, settled=settled)


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


def _where_the_tensors_are(function: Callable[P, R]) -> Callable[P, R]:
    """With the first argument's device as the current one: there Triton launches."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        first = cast(Tensor, args[0])
        with torch.cuda.device(first.device) if first.device.type == "cuda" else contextlib.nullcontext():
            return function(*args, **kwargs)

    return guarded


dense_forward = _where_the_tensors_are(dense.forward)
dense_backward = _where_the_tensors_are(dense.backward)


@_where_the_tensors_are
def forward_to_train(
    x: Tensor, w: Weights, activation: str, encoded: Tensor, token_mask: Tensor | None, want_stats: bool
) -> tuple[Tensor, Tensor, Tensor, hybrid.Saved]:
    """(y, l1_sum, counts, what the backward needs) by a plan that is not dense."""
    tiles, programs = launch_facts(x)
    layout = split.lay_out(w, _order(encoded, x.device))  # not kept: 50 MB a layer until the optimiser's step
    plan = _decoded(encoded)
    return hybrid.forward(x, w, layout, activation, plan, token_mask, tiles, programs, want_stats=want_stats)


@_where_the_tensors_are
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
    tiles, _ = launch_facts(x)
    layout = split.lay_out(w, _order(encoded, x.device), for_backward=True)
    plan = _decoded(encoded)
    return hybrid.backward(dy, dl1, x, w, layout, saved, activation, plan, token_mask, tiles, needs)


def _densely(x: Tensor, w: Weights, activation: str) -> Tensor:
    z = nnf.linear(x, w.gate, w.gate_bias)
    u = None if w.up is None else nnf.linear(x, w.up, w.up_bias)
    return nnf.linear(dense.activate_(z, u, squared=activation == "relu2"), w.down, w.down_bias)


def _layout(w: Weights, encoded: Tensor) -> split.Layout:
    sources = [encoded, *(t for t in w if t is not None)]

    def make() -> split.Layout:
        return split.lay_out(w, _order(encoded, w.gate.device), down=_neuron_major(w))

    return weights.kept("split", sources, make)


def _neuron_major(w: Weights) -> Tensor:
    return weights.kept("down", [w.down], lambda: split.neuron_major(w.down), again=split.neuron_major)


def _screen(x: Tensor, w: Weights, most_candidates: float) -> screen.Screen | None:
    """The gate's int8 copy for one token, or None where it cannot be, or would not help for the token x [1, D].

    That is looked at once for a gate, which waits for the device: not while a graph is captured. When a kernel gets the
    copy, it has long been written.
    """
    if x.element_size() != 2 or w.gate.is_inference() or not w.gate.is_contiguous():
        return None
    kind = "screen", most_candidates
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return weights.kept_already(kind, [w.gate])

    def make() -> screen.Screen | None:
        screened = screen.screen_of(w.gate.detach())
        helps = screened is not None and screen.is_worth_it(screened, x, w.gate_bias, most_candidates)
        return screened if helps else None

    def again(gate: Tensor) -> screen.Screen:
        return screen.screen_of(gate.detach()) or screen.screen_of_all(gate)

    return weights.kept(kind, [w.gate], make, again=again)


def few_tiles(
    x: Tensor, w: Weights, down: Tensor
) -> tuple[decode.NeuronTile | decode.HopperTile, decode.SumTile | decode.HopperSumTile]:
    """For the two kernels of few tokens x [M, D]; ``down``: Wd as [F, D]."""
    if x.device.type == "cpu":
        return _INTERPRETED_FEW
    (M, D), F, (capability, processors) = x.shape, len(w.gate), facts(x)
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (x, w.gate, w.up, down))
    return decode.tiles_for(
        M, D, F, element_size=x.element_size(), capability=capability, processors=processors, aligned=aligned
    )


def launch_facts(x: Tensor) -> tuple[Tiles, int]:
    """Tile sizes for x's dtype and device, and how many programs fill it."""
    if x.device.type == "cpu":
        return _INTERPRETED, 2
    capability, processors = facts(x)
    return tiles_for(capability, x.dtype), processors


def facts(x: Tensor) -> tuple[int, int]:
    """(compute capability, multiprocessors) of x's GPU."""
    return device_facts(torch.cuda.current_device() if x.device.index is None else x.device.index)
