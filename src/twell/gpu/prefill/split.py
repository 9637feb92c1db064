"""The split forward of an FFN: hot neurons and heavy tokens run densely, the tail sparsely. Exact for any plan.

    y = h_hot Wd_hot + y_cold + bd        the hot neurons, for all tokens; the cold ones, by classes of tokens:

    y_cold of a heavy token               h_cold Wd_cold, as rows of GEMMs (``heavy.py``)
    y_cold of every other token           the sum of its active cold neurons, token by token: the tail (``tail.py``)

A plan changes only time. Every step runs on the device, and the host waits for nothing. Rows that kernels want in the
plan's order are gathered in the call (``lay_out``), or were when the layer was frozen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.formats import TwELL
from twell.gpu.prefill.gate import gate_in_twell, hot_activations
from twell.gpu.prefill.heavy import write_heavy_
from twell.gpu.prefill.lists import list_active
from twell.gpu.prefill.tail import write_tail
from twell.gpu.shared.replay import Recorded, Space, beside, signals, waits
from twell.gpu.shared.rows import gathered, transposed
from twell.gpu.shared.tiles import RowTile, Tiles
from twell.plan import PlanTensors, sizes_of
from twell.reference import Weights, is_neuron_major
from twell.saved import COUNTERS, Turns, index_dtype, list_size, turn_sizes

_LONG_TAIL = 48  # threshold for Plan.first: a mean of 20 active cold neurons per token


class SplitSizes(NamedTuple):
    """Numbers of a plan: H hot neurons; ``cap`` and ``first`` as in ``Plan``."""

    n_hot: int
    cap: int
    first: int

    @classmethod
    def of(cls, plan: PlanTensors) -> SplitSizes:
        return cls(*sizes_of(plan))


class Layout(NamedTuple):
    """Rows of weights in a plan's order; H hot, C = F - H cold neurons."""

    hot: Tensor  # [2 H, D]: gate and up rows of the hot neurons, interleaved; plain FFN: [H, D]
    hot_bias: Tensor | None
    hot_down: Tensor  # [H, D] neuron-major
    cold: Tensor  # [C, D]: gate rows of the cold neurons
    cold_bias: Tensor | None


# ---------------------------------------------------------------------------------------------------------
# Weights as kernels want them
# ---------------------------------------------------------------------------------------------------------


def by_rows(w: Weights, down: Tensor | None = None) -> Weights:
    """The weights as kernels read them: contiguous, aligned, Wd as [F, D]. Copies only where necessary. ``down``: an
    existing neuron-major copy of Wd."""
    if down is not None:
        return ready(w._replace(down=down))
    own = ready(w)
    if not is_neuron_major(own.down):
        return own._replace(down=transposed(own.down))
    return own if own.down is w.down else own._replace(down=own.down.t())  # unchanged: kernels go by its address


def ready(w: Weights) -> Weights:
    """The weights as recorded calls take them: contiguous and aligned, Wd row-major or neuron-major."""
    gate, up, down, b_gate, b_up, b_down = w
    if (  # nearly always: one check
        gate.is_contiguous()
        and (up is None or (up.is_contiguous() and up.data_ptr() % 16 == 0))
        and (is_neuron_major(down) or down.is_contiguous())
        and (gate.data_ptr() | down.data_ptr()) % 16 == 0
        and b_gate is None
        and b_up is None
        and b_down is None
    ):
        return w
    if not is_neuron_major(down):
        down = plain(down)
    elif down.data_ptr() % 16:  # keep its layout: the gradient has the same
        down = plain(down.t()).t()
    return Weights(plain(gate), plain(up), down, plain(b_gate), plain(b_up), plain(b_down))


def plain(t: Any) -> Any:
    """``t``, or a copy if it is not contiguous or not aligned to 16 bytes."""
    if t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def aligned(t: Tensor) -> Tensor:
    """``t``, or a copy if TMA cannot read it. TMA can read aligned tensors that are contiguous [..., D], or [n, D] with
    a row stride that is a multiple of 16 elements."""
    apart, step = t.stride()[-2:]
    if t.data_ptr() % 16 == 0 and step == 1:
        if apart == t.shape[-1] and t.is_contiguous():
            return t
        if t.dim() == 2 and apart >= t.shape[1] and apart % 16 == 0:
            return t
    return t.clone(memory_format=torch.contiguous_format)


def lay_out(
    rows: Weights,
    order: Tensor,
    n_hot: int,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    cold: bool = True,
    space: Space | None = None,
) -> Layout:
    """``rows``: see ``by_rows``; ``biases``: see ``biases_of``. A backward needs no cold gate rows (``cold`` False)."""
    if n_hot == 0:
        return Layout(rows.gate[:0], None, rows.gate[:0], rows.gate, rows.gate_bias)
    buffer = gathered(rows.gate, rows.up, rows.down, order, n_hot, cold=cold, space=space)
    n = (2 if rows.up is not None else 1) * n_hot
    return Layout(buffer[:n], biases[0], buffer[n : n + n_hot], buffer[n + n_hot :], biases[1])


def biases_of(w: Weights, order: Tensor, n_hot: int) -> tuple[Tensor | None, Tensor | None]:
    """Biases of the hot neurons, interleaved like their rows, and of the cold ones."""
    b_gate, b_up = w.gate_bias, w.up_bias
    if n_hot == 0 or (b_gate is None and b_up is None):
        return None, b_gate
    hot, cold = order[:n_hot], order[n_hot:]
    zeros = w.gate.new_zeros(len(hot))
    hot_bias = zeros if b_gate is None else b_gate[hot]
    if w.up is not None:
        hot_bias = torch.stack([hot_bias, zeros if b_up is None else b_up[hot]], 1).flatten()
    return hot_bias, None if b_gate is None else b_gate[cold]


# ---------------------------------------------------------------------------------------------------------
# The forward
# ---------------------------------------------------------------------------------------------------------


def tail_tile(tiles: Tiles, x: Tensor, first: int) -> RowTile:
    """Long tails: one row at a time, prefetched; its buffers must leave room for several programs per SM."""
    is_long = first > _LONG_TAIL and x.shape[1] * x.element_size() <= 8192
    return tiles.long_tail if is_long else tiles.tail


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


def given_gate(cold_gate: TwELL | None, order: Tensor) -> tuple[Tensor | None, ...]:
    """Words, counts and counters set to 0 (the gate kernel sets them otherwise), or three times None."""
    if cold_gate is None:
        return None, None, None
    return cold_gate.words, cold_gate.counts, order.new_zeros(COUNTERS)


def room_for_turns(tokens: int, space: Space) -> Turns:
    return Turns(*(space.take(n, dtype=torch.int32) for n in turn_sizes(tokens)))
