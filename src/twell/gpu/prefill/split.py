"""The split forward of an FFN: hot neurons and heavy tokens run densely, the tail sparsely. Exact for any plan.

    y = h_hot Wd_hot + y_cold + bd        the hot neurons, for all tokens; the cold ones, by classes of tokens:

    y_cold of a heavy token               h_cold Wd_cold, as rows of GEMMs (``heavy.py``)
    y_cold of every other token           the sum of its active cold neurons, token by token: the tail (``tail.py``)

A plan changes only time. Every step runs on the device, and the host waits for nothing. Rows that kernels want in the
plan's order are gathered in the call (``lay_out``), or were when the layer was frozen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twell.formats import TwELL
from twell.gpu.shared.gate import gate_in_twell, hot_activations
from twell.gpu.shared.heavy import write_heavy_
from twell.gpu.shared.layout import (
    Layout,
    SplitSizes,
    aligned,
    biases_of,
    given_gate,
    lay_out,
    ready,
    room_for_turns,
    tail_tile,
)
from twell.gpu.shared.lists import list_active
from twell.gpu.shared.replay import Recorded, Space, beside, signals, waits
from twell.gpu.shared.rows import transposed
from twell.gpu.shared.tail import write_tail
from twell.gpu.shared.tiles import Tiles
from twell.reference import Weights, is_neuron_major
from twell.saved import index_dtype, list_size


def forward(
    x: Tensor,
    w: Weights,
    order: Tensor,
    places: Tensor,
    split: SplitSizes,
    activation: str,
    tiles: Tiles,
    programs: int,
    down: Tensor | None = None,
    layout: Layout | None = None,
    watch: Tensor | None = None,
    cold_gate: TwELL | None = None,
) -> Tensor:
    """y [..., D] for x [..., D]. ``down``, ``layout``: a frozen layer's neuron-major Wd and layout. ``watch``: int32
    [2], to which the numbers of list entries and of heavy tokens are added. ``cold_gate``: the result of
    ``gate_in_twell``, if it exists already; only benchmarks pass it."""
    x, w = aligned(x), ready(w)
    y, transposes = x.new_empty(x.shape), down is None and not is_neuron_major(w.down)
    w = w if down is None else w._replace(down=down)
    gate, up, down, b_gate, b_up, b_down = w
    kept: tuple[Tensor | None, ...] = (None, None, None)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if layout is not None:
        kept, biases = (layout.hot, layout.hot_down, layout.cold), (layout.hot_bias, layout.cold_bias)
    elif b_gate is not None or b_up is not None:
        biases = biases_of(w, order, split.n_hot)
    key = (
        x.shape, x.stride(-2), x.dtype, gate.shape[0], split, activation, transposes, layout is None, up is None,
        b_up is None, b_down is None, biases[0] is None, biases[1] is None, watch is None, cold_gate is None,
    )  # fmt: skip
    of_gate = given_gate(cold_gate, order)
    tensors = (x, y, gate, up, down, b_up, b_down, order, places, *kept, *biases, watch, *of_gate)
    given = x, y, w, biases, layout, order, places, watch, of_gate, split, activation == "relu2", transposes
    hot = _launch(key, tensors, *given, tiles, programs)
    if split.n_hot:  # last: a GEMM has the bandwidth to read y again, the tail has not
        h, hot_down = hot if layout is None else (*hot, layout.hot_down)
        (y if y.dim() == 2 else y.view(h.shape[0], -1)).addmm_(h, hot_down)
    return y


@Recorded
def _launch(
    space: Space,
    x: Tensor,
    y: Tensor,
    w: Weights,
    biases: tuple[Tensor | None, Tensor | None],
    frozen: Layout | None,
    order: Tensor,
    places: Tensor,
    watch: Tensor | None,
    of_gate: tuple[Tensor | None, ...],
    split: SplitSizes,
    squared: bool,
    transposes: bool,
    tiles: Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """Everything except the hot neurons' last GEMM. Returns the GEMM's h, and Wd_hot unless it is frozen. ``biases``:
    see ``biases_of``; ``of_gate``: see ``given_gate``."""
    x, y = x.view(-1, x.shape[-1]) if x.dim() != 2 else x, y.view(-1, y.shape[-1])
    gated, (n_hot, cap, first), (words, counts, counters) = w.up is not None, split, of_gate
    rows = w._replace(down=transposed(w.down, space) if transposes else w.down, gate_bias=biases[1])
    layout = lay_out(rows, order, n_hot, biases, space=space) if frozen is None else frozen
    M = len(x)
    size = list_size(M, cap)
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    out = space.take(size, dtype=index_dtype(len(order))), space.take(size, dtype=x.dtype)
    turns = room_for_turns(M, space)
    h = space.take(M, n_hot) if n_hot else None
    of_heavy: dict[str, Any] = {"tile": tiles.heavy, "programs": programs, "use_tma": tiles.heavy_tma, "space": space}
    watching = None if watch is None else (watch, cap)
    with space.passing():
        if words is None or counts is None or counters is None:
            in_twell = gate_in_twell(x, layout.cold, layout.cold_bias, counters=turns.counters, space=space, **common)
        else:
            turns = turns._replace(counters=counters)
            in_twell = TwELL.from_words(words, counts, shape=(M, len(order) - n_hot), dtype=x.dtype, check=False)
        with beside(h is not None):  # short, beside the hot neurons' GEMM
            lists = list_active(in_twell, turns, order, cap=cap, first=first, out=out)
            signals()
    with beside():
        write_heavy_(y, x, turns, rows, places, squared=squared, watch=watching, **of_heavy)
    if h is not None:
        hot_activations(x, layout.hot, layout.hot_bias, h, gated=gated, squared=squared, **common)
    waits()
    write_tail(y, x, lists, rows, squared=squared, has_hot=n_hot > 0, tile=tail_tile(tiles, x, first))
    if h is None:
        return ()
    return (h, layout.hot_down) if frozen is None else (h,)
