"""The three-part forward of an FFN: hot neurons and heavy tokens densely, the cold tail sparsely. Exact for any split.

    y = h_hot Wd_hot^T  +  tail of the light tokens  +  cold neurons of the heavy tokens densely  +  bd

What a plan changes is time alone. Every step is on the device; nothing waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.kernels.gate import gate_and_bitmap, hot_activations
from twell.kernels.tiles import Tiles
from twell.kernels.up_down import add_heavy_, add_tail_
from twell.reference import Weights


class Layout(NamedTuple):
    """An FFN's weights as the kernels want them, for one choice of hot neurons. H hot, C = F - H cold."""

    hot: Tensor  # [2 H, D]: gate and up rows of the hot neurons, interleaved; plain FFN: [H, D]
    hot_bias: Tensor | None
    hot_down: Tensor  # [H, D]
    cold: Tensor  # [C, D]: gate rows of the cold neurons
    cold_bias: Tensor | None
    cold_neurons: Tensor | None  # [C] int32; None where no neuron is hot: then they are all, in order
    up: Tensor | None  # [F, D]
    down: Tensor  # [F, D] neuron-major


def lay_out(w: Weights, hot: Tensor, down: Tensor) -> Layout:
    """Copies of what the kernels read in another order. ``hot``: int64 [H]; ``down``: Wd neuron-major [F, D]."""
    gate, up = _aligned(w.gate.contiguous()), None if w.up is None else w.up.contiguous()
    if len(hot) == 0:
        return Layout(gate[:0], None, down[:0], gate, w.gate_bias, None, up, down)
    is_cold = torch.ones(gate.shape[0], dtype=torch.bool, device=gate.device)
    is_cold[hot] = False
    cold = is_cold.nonzero()[:, 0]

    def interleaved(of_gate: Tensor, of_up: Tensor | None) -> Tensor:
        return of_gate[hot] if of_up is None else torch.stack([of_gate[hot], of_up[hot]], 1).flatten(0, 1)

    hot_bias = None
    if w.gate_bias is not None or w.up_bias is not None:
        zeros = gate.new_zeros(gate.shape[0])
        up_bias = None if w.up is None else (zeros if w.up_bias is None else w.up_bias)
        hot_bias = interleaved(zeros if w.gate_bias is None else w.gate_bias, up_bias)
    return Layout(
        hot=interleaved(gate, w.up),
        hot_bias=hot_bias,
        hot_down=down[hot],
        cold=gate[cold],
        cold_bias=None if w.gate_bias is None else w.gate_bias[cold],
        cold_neurons=cold.int(),
        up=up,
        down=down,
    )


def _aligned(t: Tensor) -> Tensor:
    """``t`` [n, D], or a copy where the copy engine could not read it: rows lie apart, at multiples of 16 bytes."""
    row = t.stride(0) * t.element_size()
    if t.stride(1) == 1 and t.stride(0) >= t.shape[1] and row % 16 == 0 and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


class Projected(NamedTuple):
    """What is known after the dense part: y of the hot neurons, and the gate of the cold ones."""

    y: Tensor  # [M, D]; holds nothing yet where no neuron is hot
    gate: Tensor  # [M, C]
    bitmap: Tensor  # [M, words]


def forward(x: Tensor, w: Weights, layout: Layout, activation: str, *, cap: int, tiles: Tiles, programs: int) -> Tensor:
    """y [M, D] for x [M, D]. ``cap``: more active cold neurons than this make a token heavy."""
    x = _aligned(x)
    projected = project(x, w, layout, activation, tiles=tiles, programs=programs)
    return add_cold_(projected, x, w, layout, activation, cap=cap, tiles=tiles, programs=programs)


def project(x: Tensor, w: Weights, layout: Layout, activation: str, *, tiles: Tiles, programs: int) -> Projected:
    """The hot neurons wholly, and the gate of the cold ones."""
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    if len(layout.hot_down):
        squared = activation == "relu2"
        h = hot_activations(x, layout.hot, layout.hot_bias, gated=w.up is not None, squared=squared, **common)
        y = h @ layout.hot_down
    else:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return Projected(y, *gate_and_bitmap(x, layout.cold, layout.cold_bias, **common))


def add_cold_(
    projected: Projected,
    x: Tensor,
    w: Weights,
    layout: Layout,
    activation: str,
    *,
    cap: int,
    tiles: Tiles,
    programs: int,
) -> Tensor:
    """Add the tail and the heavy tokens to y, and return it. Overwrites gate rows of heavy tokens."""
    y, gate, bitmap = projected
    squared = activation == "relu2"
    heavy, n_heavy = add_tail_(
        y,
        x,
        gate,
        bitmap,
        layout.up,
        w.up_bias,
        layout.down,
        w.down_bias,
        layout.cold_neurons,
        cap=cap,
        squared=squared,
        is_new=len(layout.hot_down) == 0,
        tile=tiles.tail,
    )
    add_heavy_(
        y,
        x,
        gate,
        heavy,
        n_heavy,
        layout.up,
        w.up_bias,
        layout.down,
        layout.cold_neurons,
        squared=squared,
        tile=tiles.heavy,
        programs=programs,
    )
    return y
