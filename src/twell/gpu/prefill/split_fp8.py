"""The split forward (split.py) of an FFN with FP8 weights.

    step        in e4m3                                                       in higher precision
    x           rounded row by row, once
    cold gate   x Wg_cold^T on tensor cores, scales in the epilogue           TwELL's values have x's dtype
    heavy       gate and up                                                   y = h Wd in x's dtype
    tail        rows of Wu and Wd                                             fp32 sums, h is not rounded
    hot         gate and up on tensor cores                                   y += h Wd_hot, in x's dtype

Wd exists twice: [D, F], the model's own, for dense batches, and neuron-major. Rows in the plan's order are always kept
(``lay_out``), since FP8 weights are not trained.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.formats import TwELL
from twell.gpu.prefill.heavy_fp8 import write_heavy_fp8_
from twell.gpu.shared.gate import gate_in_twell, hot_activations
from twell.gpu.shared.layout import Fp8Weights, SplitSizes, aligned, given_gate, room_for_turns
from twell.gpu.shared.lists import list_active
from twell.gpu.shared.replay import Recorded, Space, beside, signals, waits
from twell.gpu.shared.round_fp8 import room_for, round_rows
from twell.gpu.shared.tail import write_tail
from twell.gpu.shared.tiles import INTERPRETED, GateTile, RowTile
from twell.plan import PlanTensors
from twell.reference import Weights
from twell.saved import index_dtype, list_size


class Fp8Tiles(NamedTuple):
    gate: GateTile
    heavy: GateTile
    tail: RowTile
    use_tma: bool


_TILES = Fp8Tiles(GateTile(128, 256, 128, 8, 3), GateTile(64, 64, 128, 4, 3), RowTile(2, 4, 1), use_tma=True)
_TILES_INTERPRETED = Fp8Tiles(GateTile(32, 128, 32, 4, 2), GateTile(16, 32, 32, 4, 2), RowTile(4, 4, 2), use_tma=False)


class Fp8Layout(NamedTuple):
    """Rows in a plan's order, as in ``Layout``."""

    hot: Tensor  # e4m3 [2 H, D]: gate and up rows of the hot neurons, interleaved; plain FFN: [H, D]
    hot_scale: Tensor
    hot_down: Tensor  # [H, D] in x's dtype
    cold: Tensor  # e4m3 [C, D]
    cold_scale: Tensor


def lay_out(w: Fp8Weights, plan: PlanTensors, n_hot: int, dtype: torch.dtype) -> Fp8Layout:
    hot, cold = plan.order[:n_hot].long(), plan.order[n_hot:].long()

    def rows(t: Tensor, of: Tensor) -> Tensor:  # index_select does not support e4m3
        return t.view(torch.int8)[of].view(t.dtype)

    assert w.down is not None
    down = rows(w.down, hot).to(torch.float32) * w.down_scale
    of_hot, scale = rows(w.gate, hot), w.gate_scale[hot]
    if w.up is not None and w.up_scale is not None:
        both = [t.view(torch.int8) for t in (of_hot, rows(w.up, hot))]
        of_hot = torch.stack(both, 1).flatten(0, 1).view(w.gate.dtype)
        scale = torch.stack([scale, w.up_scale[hot]], 1).flatten()
    return Fp8Layout(of_hot, scale, down.to(dtype), rows(w.gate, cold), w.gate_scale[cold])


def tiles_for(capability: int) -> Fp8Tiles | None:
    """None where these kernels were not tried (all GPUs but Hopper): layers call their FP8 projections there."""
    if INTERPRETED:
        return _TILES_INTERPRETED
    return _TILES if capability == 90 else None


def forward(
    x: Tensor,
    w: Fp8Weights,
    layout: Fp8Layout,
    order: Tensor,
    places: Tensor,
    split: SplitSizes,
    activation: str,
    tiles: Fp8Tiles,
    programs: int,
    watch: Tensor | None = None,
    cold_gate: TwELL | None = None,
) -> Tensor:
    """y [..., D] for x [..., D] in 16 bits. ``watch``, ``cold_gate`` (only from benchmarks): see ``split.forward``."""
    x = aligned(x)
    y, is_given = x.new_empty(x.shape), cold_gate is not None
    key = (x.shape, x.stride(-2), x.dtype, w.gate.shape[0], split, activation, w.up is None, watch is None, is_given)
    hot, hot_scale, hot_down, cold, cold_scale = layout
    of_gate = given_gate(cold_gate, order)
    tensors = (x, y, *w[:6], hot, hot_scale, cold, cold_scale, order, places, watch, *of_gate)
    given = x, y, w, layout, order, places, watch, of_gate, split, activation == "relu2", tiles, programs
    of_hot = _launch(key, tensors, *given)
    if split.n_hot:
        (y if y.dim() == 2 else y.view(-1, y.shape[-1])).addmm_(of_hot[0], hot_down)
    return y


@Recorded
def _launch(
    space: Space,
    x: Tensor,
    y: Tensor,
    w: Fp8Weights,
    layout: Fp8Layout,
    order: Tensor,
    places: Tensor,
    watch: Tensor | None,
    of_gate: tuple[Tensor | None, ...],
    split: SplitSizes,
    squared: bool,
    tiles: Fp8Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """Everything except the hot neurons' last GEMM, whose h it returns. ``of_gate``: see ``given_gate``."""
    gate, gate_scale, up, up_scale, down, down_scale, _ = w
    assert down is not None
    x, y = x.view(-1, x.shape[-1]) if x.dim() != 2 else x, y.view(-1, y.shape[-1])
    (n_hot, cap, first), (words, counts, counters), cold = split, of_gate, layout.cold
    M = len(x)
    size = list_size(M, cap)
    out = space.take(size, dtype=index_dtype(len(order))), space.take(size, dtype=x.dtype)
    turns = room_for_turns(M, space)
    h = space.take(M, n_hot) if n_hot else None
    q, x_scale = room_for(M, x.shape[1], space.take)
    round_rows(x, (q, x_scale))
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    with space.passing():
        if words is None or counts is None or counters is None:
            given: dict[str, Any] = {"counters": turns.counters, "space": space}
            scales = x_scale, layout.cold_scale
            in_twell = gate_in_twell(q, cold, None, scales=scales, dtype=x.dtype, **given, **common)
        else:
            turns = turns._replace(counters=counters)
            in_twell = TwELL.from_words(words, counts, shape=(M, len(cold)), dtype=x.dtype, check=False)
        with beside(h is not None):  # short, beside the hot neurons' GEMM
            lists = list_active(in_twell, turns, order, cap=cap, first=first, out=out)
            signals()
    with beside():
        rows = (q, x_scale), turns, (gate, gate_scale), (up, up_scale), (down, down_scale), places
        watching = None if watch is None else (watch, cap)
        write_heavy_fp8_(y, *rows, squared=squared, tile=tiles.heavy, programs=programs, space=space, watch=watching)
    if h is not None:
        of_hot: dict[str, Any] = {"gated": up is not None, "squared": squared, "scales": (x_scale, layout.hot_scale)}
        hot_activations(q, layout.hot, None, h, **of_hot, **common)
    waits()
    factors, of_tail = Weights(gate, up, down), (x_scale, up_scale, down_scale)
    write_tail(y, q, lists, factors, squared=squared, has_hot=n_hot > 0, tile=tiles.tail, scales=of_tail)
    return () if h is None else (h,)
