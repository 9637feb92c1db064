"""The three-part forward of an FFN: hot neurons and heavy tokens densely, the cold tail sparsely. Exact for any split.

    y = tail of the light tokens  |  cold neurons of the heavy tokens densely,   +  bd  +  h_hot Wd_hot

What a plan changes is time alone. Every step is on the device; nothing waits for it. What kernels want in another order
than the weights have it is gathered in the call (``lay_out``), or was when the layer was frozen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.kernels.gate import gate_and_bitmap, hot_activations
from twell.kernels.heavy import write_heavy_
from twell.kernels.launch import Workspace, padded
from twell.kernels.lists import list_active
from twell.kernels.tiles import RowTile, Tiles
from twell.kernels.turn import gathered, turned
from twell.kernels.up_down import write_tail
from twell.plan import PlanTensors, sizes_of
from twell.reference import Weights, is_neuron_major
from twell.saved import bitmap_words, index_dtype, list_size, n_marks

_LONG_TAIL = 48  # of Plan.first: 20 cold neurons a token in the mean


class Split(NamedTuple):
    """A plan's numbers."""

    order: Tensor  # see PlanTensors
    places: Tensor
    n_hot: int
    cap: int
    first: int

    @classmethod
    def of(cls, plan: PlanTensors) -> Split:
        return cls(plan.order, plan.places, *sizes_of(plan))


class Layout(NamedTuple):
    """Rows of weights in a plan's order. H hot, C = F - H cold."""

    hot: Tensor  # [2 H, D]: gate and up rows of the hot neurons, interleaved; plain FFN: [H, D]
    hot_bias: Tensor | None
    hot_down: Tensor  # [H, D] neuron-major
    cold: Tensor  # [C, D]: gate rows of the cold neurons
    cold_bias: Tensor | None


def by_rows(w: Weights, down: Tensor | None = None) -> Weights:
    """The weights with all rows where kernels find them: contiguous, aligned, Wd as [F, D]. Copies only what is not.

    ``down``: a neuron-major copy of Wd, where there is one already.
    """
    gate, up, own_down, b_gate, b_up, b_down = w
    if down is None:  # one that lies neuron by neuron is taken as it is: kernels go by its address
        is_ready = is_neuron_major(own_down) and own_down.data_ptr() % 16 == 0
        down = own_down if is_ready else turned(plain(own_down))
    return Weights(plain(gate), plain(up), down, plain(b_gate), plain(b_up), plain(b_down))


def plain(t: Any) -> Any:
    """``t``, or a copy of it where it is not contiguous or not at a multiple of 16 bytes."""
    if t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def aligned(t: Tensor) -> Tensor:
    """``t`` [n, D], or a copy where the copy engine could not read it: rows lie apart, at multiples of 16 elements."""
    if t.stride(1) == 1 and t.stride(0) >= t.shape[1] and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def lay_out(rows: Weights, split: Split, *, cold: bool = True) -> Layout:
    """``rows``: see ``by_rows``. A backward needs no gate rows of the cold neurons."""
    order, n_hot = split.order, split.n_hot
    if n_hot == 0:
        return Layout(rows.gate[:0], None, rows.gate[:0], rows.gate, rows.gate_bias)
    buffer = gathered(rows.gate, rows.up, rows.down, order, n_hot, cold=cold)
    n = (2 if rows.up is not None else 1) * n_hot
    hot_bias, cold_bias = biases_of(rows, split)
    return Layout(buffer[:n], hot_bias, buffer[n : n + n_hot], buffer[n + n_hot :], cold_bias)


def biases_of(rows: Weights, split: Split) -> tuple[Tensor | None, Tensor | None]:
    """Of the hot neurons, interleaved as their rows are, and of the cold ones."""
    b_gate, b_up = rows.gate_bias, rows.up_bias
    if b_gate is None and b_up is None:
        return None, None
    hot, cold = split.order[: split.n_hot], split.order[split.n_hot :]
    zeros = rows.gate.new_zeros(len(hot))
    hot_bias = zeros if b_gate is None else b_gate[hot]
    if rows.up is not None:
        hot_bias = torch.stack([hot_bias, zeros if b_up is None else b_up[hot]], 1).flatten()
    return hot_bias, None if b_gate is None else b_gate[cold]


def tail_tile(tiles: Tiles, x: Tensor, first: int) -> RowTile:
    """One row at a time, fetched ahead, suits long tails; its buffers must leave room for several programs."""
    is_long = first > _LONG_TAIL and x.shape[1] * x.element_size() <= 8192
    return tiles.long_tail if is_long else tiles.tail


def space_for(M: int, n_cold: int, dtype: torch.dtype, n_neurons: int, cap: int) -> int:
    """Bytes of a cold gate, its bitmap and marks, and lists."""
    each, size = dtype.itemsize, list_size(M, cap)
    lists = padded(size * index_dtype(n_neurons).itemsize) + padded(size * each)
    return padded(M * n_cold * each) + padded(M * bitmap_words(n_cold) * 4) + padded(n_marks(M) * 4) + lists


def forward(
    x: Tensor, rows: Weights, layout: Layout, activation: str, split: Split, tiles: Tiles, programs: int
) -> Tensor:
    """y [M, D] for x [M, D]."""
    x = aligned(x)
    gated, squared, n_hot = rows.up is not None, activation == "relu2", split.n_hot
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    space = Workspace(x, space_for(len(x), len(layout.cold), x.dtype, len(split.order), split.cap))
    gate, bitmap, marks = gate_and_bitmap(x, layout.cold, layout.cold_bias, zeros=not gated, space=space, **common)
    size = list_size(len(x), split.cap)
    out = space.take(size, dtype=index_dtype(len(split.order))), space.take(size, dtype=x.dtype)
    lists = list_active(gate, bitmap, marks, split.order, cap=split.cap, first=split.first, out=out)
    y = x.new_empty(x.shape)
    tile = tail_tile(tiles, x, split.first)
    write_tail(y, x, lists, rows, rows.down, squared=squared, has_hot=n_hot > 0, tile=tile)
    write_heavy_(
        y, x, gate, bitmap, marks, rows, rows.down, split.order, squared=squared, tile=tiles.heavy, programs=programs
    )
    if n_hot:  # last, so that a GEMM reads y again and not the tail, which is bound by bytes
        h = hot_activations(x, layout.hot, layout.hot_bias, gated=gated, squared=squared, **common)
        y.addmm_(h, layout.hot_down)
    return y
