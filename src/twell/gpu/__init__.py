"""The GPU path of an FFN: few tokens by their own kernels, more by the neurons that fire for any of a tile of tokens,
many in three parts by the plan, or densely. Results do not depend on the plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from twell.gpu import dense
from twell.gpu import fp8 as fp8
from twell.gpu.decode import few as few_tokens
from twell.gpu.decode import screen
from twell.gpu.prefill import split, union
from twell.gpu.prefill.split import Split
from twell.gpu.shared.tiles import GateTile, RowTile, Tiles, device_facts, tiles_for
from twell.gpu.training import hybrid
from twell.plan import Plan, PlanTensors, sizes_of, tokens_of
from twell.reference import Gradients, Weights, is_neuron_major
from twell.saved import runs_split

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


class Frozen(NamedTuple):
    """What ``freeze`` makes of a layer's weights; empty where there is nothing to keep."""

    down: Tensor  # [F, D]: Wd neuron by neuron, unless it lies so
    hot: Tensor  # see Layout; likewise the four after it
    hot_bias: Tensor
    hot_down: Tensor
    cold: Tensor
    cold_bias: Tensor
    q: Tensor  # see Screen
    scale: Tensor
    reach: Tensor


def _where_the_tensors_are(function: Callable[P, R]) -> Callable[P, R]:
    """With the first argument's device as the current one: there Triton launches."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        device = cast(Tensor, args[0]).device
        if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return guarded


# ---------------------------------------------------------------------------------------------------------
# Inference
# ---------------------------------------------------------------------------------------------------------


@_where_the_tensors_are
def forward(x: Tensor, w: Weights, activation: str, plan: PlanTensors | None, frozen: Sequence[Tensor] = ()) -> Tensor:
    """y [..., D] for x [..., D]. Without a plan densely. ``frozen``: see ``Frozen``, or empty."""
    if plan is None:
        return dense.infer(x, w, activation)
    return forward_here(x, w, activation, plan, *tokens_of(plan), frozen)


def forward_here(
    x: Tensor,
    w: Weights,
    activation: str,
    plan: PlanTensors,
    few: int,
    most: int,
    least: int,
    frozen: Sequence[Tensor],
    watch: Tensor | None = None,
) -> Tensor:
    """On the current device, with the plan's numbers of tokens: up to ``few`` and ``most`` and from ``least`` on it is
    sparse. ``watch``: see ``split.forward``."""
    M = x.numel() // x.shape[-1]
    kept = (frozen if type(frozen) is Frozen else Frozen(*frozen)) if frozen else None
    down = kept.down if kept is not None and kept.down.numel() else None
    by_neurons = down is not None or is_neuron_major(w.down)  # else to turn Wd would take as long as dense
    if 0 < M <= few and by_neurons:
        screened = None
        if kept is not None and M == 1 and kept.q.numel():
            screened = screen.Screen(kept.q, kept.scale, kept.reach)
        rows = w if down is None else w._replace(down=down)
        return few_tokens.forward(x, rows, activation, None, screened, settled=kept is not None)
    if few < M <= most and M < least and by_neurons and x.element_size() == 2:
        return union.forward(x, w, activation, launch_facts(x)[0], down)
    parts = Split.of(plan)
    if least > M or M == 0 or parts.n_hot == w.gate.shape[0]:
        return dense.infer(x, w, activation)
    layout = None
    if kept is not None and kept.cold.numel():
        layout = split.Layout(*(t if t.numel() else None for t in kept[1:6]))  # type: ignore[arg-type]
    return split.forward(x, w, plan.order, plan.places, parts, activation, *launch_facts(x), down, layout, watch)


def freeze(w: Weights, plan: Plan | None) -> tuple[Tensor, ...]:
    """``Frozen`` for weights that stay, where kernels would have use for it."""
    (D, F), gate = w.down.shape, w.gate
    if plan is None or gate.dtype == torch.float64 or D % 16 or F % 16:
        return ()
    with torch.cuda.device(gate.device) if gate.device.type == "cuda" else contextlib.nullcontext():
        nothing = gate.new_empty(0)
        rows = split.by_rows(w)
        kept = Frozen(nothing if is_neuron_major(w.down) else rows.down, *[nothing] * 8)
        n_hot = len(plan.hot)
        if 0 < n_hot < F:
            order = plan.on(gate.device).order
            layout = split.lay_out(rows, order, n_hot, split.biases_of(rows, order, n_hot))
            kept = Frozen._make([kept.down, *(nothing if t is None else t for t in layout), *kept[6:]])
        if max(plan.few_tokens, plan.few_tokens_captured or 0) and screen.is_worth_it(plan, gate.dtype):
            screened = screen.screen_of(rows.gate)
            kept = kept if screened is None else kept._replace(**screened._asdict())
    return kept


# ---------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------


@_where_the_tensors_are
def train(
    x: Tensor,
    w: Weights,
    activation: str,
    plan: PlanTensors | None,
    token_mask: Tensor | None,
    *,
    want_stats: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, l1_sum, counts, what the backward needs: saved.py)."""
    token_mask = split.plain(token_mask)
    given: Sequence[Tensor]
    if plan is not None and _runs_split(len(x), len(w.gate), plan):
        facts = plan.order, plan.places, Split.of(plan), activation, token_mask, *launch_facts(x)
        *given, kept = hybrid.forward(x, w, *facts, want_stats=want_stats)
    else:
        *given, kept = dense.forward(x, w, activation, token_mask, want_stats=want_stats)
    return *given, kept if save else x.new_empty(0)  # type: ignore[return-value]


def _runs_split(tokens: int, n_neurons: int, plan: PlanTensors) -> bool:
    n_hot, cap, _ = sizes_of(plan)
    return bool(runs_split(tokens, n_neurons, n_hot, cap, tokens_of(plan)[2]))


@_where_the_tensors_are
def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    kept: Tensor,
    activation: str,
    plan: PlanTensors | None,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """Empty or None where a gradient is not needed."""
    dy, dl1, token_mask = split.plain(dy), split.plain(dl1), split.plain(token_mask)
    if plan is not None and _runs_split(len(x), len(w.gate), plan):
        given = plan.order, plan.places, Split.of(plan), activation, token_mask, *launch_facts(x), needs
        return hybrid.backward(dy, dl1, x, w, kept, *given)
    return dense.backward(dy, dl1, x, w, kept, activation, token_mask, needs)


# ---------------------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------------------


def launch_facts(x: Tensor) -> tuple[Tiles, int]:
    """Tile sizes for x's dtype and device, and how many programs fill it."""
    if x.device.type == "cpu":
        return _INTERPRETED, 2
    capability, processors = device_facts(x.device.index)
    return tiles_for(capability, x.dtype), processors
