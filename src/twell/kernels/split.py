"""The three-part forward of an FFN: hot neurons and heavy tokens densely, the cold tail sparsely. Exact for any split.

    y = tail of the light tokens  |  cold neurons of the heavy tokens densely,   +  bd  +  h_hot Wd_hot

What a plan changes is time alone. Every step is on the device; nothing waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.kernels.gate import gate_and_bitmap, hot_activations
from twell.kernels.heavy import write_heavy_
from twell.kernels.lists import Lists, list_active
from twell.kernels.tiles import RowTile, Tiles
from twell.kernels.turn import turned
from twell.kernels.up_down import write_tail
from twell.plan import Plan
from twell.reference import Weights

_LONG_TAIL = 48  # of Plan.first: 20 cold neurons a token in the mean


class Order(NamedTuple):
    """Where hot and cold neurons are in the model's weights."""

    hot: Tensor  # int64 [H]
    cold: Tensor  # int64 [C]
    rows: Tensor  # int32 [C], as ``cold``
    places: Tensor  # int32 [F]: of a cold neuron among the cold ones; 0 for hot ones


def order_of(plan: Plan, device: torch.device) -> Order | None:
    """None where no neuron is hot: then every place is its row."""
    if len(plan.hot) == 0:
        return None
    order = plan.order()
    hot, cold = order[: len(plan.hot)], order[len(plan.hot) :]
    places = torch.zeros(plan.n_neurons, dtype=torch.int32)
    places[cold] = torch.arange(len(cold), dtype=torch.int32)
    return Order(*(t.to(device) for t in (hot, cold, cold.int(), places)))


class Layout(NamedTuple):
    """An FFN's weights as the kernels want them, for one choice of hot neurons. H hot, C = F - H cold."""

    order: Order | None
    hot: Tensor  # [2 H, D]: gate and up rows of the hot neurons, interleaved; plain FFN: [H, D]
    hot_bias: Tensor | None
    hot_down: Tensor  # [H, D] neuron-major
    cold: Tensor  # [C, D]: gate rows of the cold neurons
    cold_bias: Tensor | None
    gate: Tensor  # [F, D] as the model has it
    up: Tensor | None  # [F, D] likewise
    down: Tensor  # [F, D] neuron-major

    @property
    def cold_rows(self) -> Tensor | None:
        """int32 [C]; None where no neuron is hot."""
        return None if self.order is None else self.order.rows


def lay_out(w: Weights, order: Order | None, *, down: Tensor | None = None, for_backward: bool = False) -> Layout:
    """Copies of what the kernels read in another order. A backward needs no gate rows of the cold neurons.

    ``down``: ``neuron_major(w.down)``, where there is one already.
    What is not copied is another tensor than the weight all the same: a layout must not keep a weight alive.
    """
    w = Weights._make(None if t is None else t.detach() for t in w)
    gate, up = aligned(w.gate.contiguous()), None if w.up is None else w.up.contiguous()
    down = neuron_major(w.down) if down is None else down
    if order is None:
        return Layout(None, gate[:0], None, down[:0], gate, w.gate_bias, gate, up, down)

    def interleaved(of_gate: Tensor, of_up: Tensor | None) -> Tensor:
        rows = of_gate[order.hot]
        return rows if of_up is None else torch.stack([rows, of_up[order.hot]], 1).flatten(0, 1)

    hot_bias = None
    if w.gate_bias is not None or w.up_bias is not None:
        zeros = gate.new_zeros(gate.shape[0])
        up_bias = None if w.up is None else (zeros if w.up_bias is None else w.up_bias)
        hot_bias = interleaved(zeros if w.gate_bias is None else w.gate_bias, up_bias)
    return Layout(
        order=order,
        hot=interleaved(gate, up),
        hot_bias=hot_bias,
        hot_down=down[order.hot],
        cold=gate[:0] if for_backward else gate[order.cold],
        cold_bias=None if w.gate_bias is None else w.gate_bias[order.cold],
        gate=gate,
        up=up,
        down=down,
    )


def neuron_major(down: Tensor) -> Tensor:
    """Wd [D, F] as contiguous [F, D], copied unless it lies so."""
    down = down.detach()
    return down.t() if down.t().is_contiguous() else turned(down.contiguous())


def aligned(t: Tensor) -> Tensor:
    """``t`` [n, D], or a copy where the copy engine could not read it: rows lie apart, at multiples of 16 bytes."""
    row = t.stride(0) * t.element_size()
    if t.stride(1) == 1 and t.stride(0) >= t.shape[1] and row % 16 == 0 and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def tail_tile(tiles: Tiles, x: Tensor, plan: Plan) -> RowTile:
    """One row at a time, fetched ahead, suits long tails; its buffers must leave room for several programs."""
    is_long = plan.first > _LONG_TAIL and x.shape[1] * x.element_size() <= 8192
    return tiles.long_tail if is_long else tiles.tail


def write_cold_(
    y: Tensor,
    x: Tensor,
    w: Weights,
    layout: Layout,
    gate: Tensor,
    bitmap: Tensor,
    lists: Lists,
    plan: Plan,
    tiles: Tiles,
    programs: int,
    *,
    squared: bool,
    saved_up: Tensor | None = None,
    tail_l1: Tensor | None = None,
    heavy_l1: Tensor | None = None,
) -> None:
    """Write what the cold neurons give and bd into y [M, D]: the tail, then heavy tokens. Overwrites ``gate``.

    The rest, for training: see ``write_tail`` and ``write_heavy_``.
    """
    write_tail(
        y,
        x,
        lists,
        layout.up,
        w.up_bias,
        layout.down,
        w.down_bias,
        squared=squared,
        has_hot=len(layout.hot_down) > 0,
        tile=tail_tile(tiles, x, plan),
        saved_up=saved_up,
        l1=tail_l1,
    )
    write_heavy_(
        y,
        x,
        gate,
        bitmap,
        lists,
        layout.up,
        w.up_bias,
        layout.down,
        w.down_bias,
        layout.cold_rows,
        squared=squared,
        tile=tiles.heavy,
        programs=programs,
        l1=heavy_l1,
    )


def forward(x: Tensor, w: Weights, layout: Layout, activation: str, plan: Plan, tiles: Tiles, programs: int) -> Tensor:
    """y [M, D] for x [M, D]."""
    x = aligned(x)
    squared = activation == "relu2"
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    gate, bitmap, marks = gate_and_bitmap(x, layout.cold, layout.cold_bias, zeros=w.up is None, **common)
    lists = list_active(gate, bitmap, marks, layout.cold_rows, plan)
    y = x.new_empty(x.shape)
    write_cold_(y, x, w, layout, gate, bitmap, lists, plan, tiles, programs, squared=squared)
    if len(layout.hot_down):  # last, so that a GEMM reads y again and not the tail, which is bound by bytes
        h = hot_activations(x, layout.hot, layout.hot_bias, gated=w.up is not None, squared=squared, **common)
        y.addmm_(h, layout.hot_down)
    return y
