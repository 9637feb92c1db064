"""Training in three parts: the forward of ``split.py`` that keeps what a backward needs, and that backward.

What is kept, besides x and the weights, per token: z and u of the H hot neurons; for the cold tail a narrow list of
16-bit neurons, r and u (``lists.py``), and the bitmap by neurons (C / 8 bytes). At H 512 and lists of 96 this is
3.5 kB, where a dense FFN keeps r, u and h of all neurons: 34 kB.

A heavy token keeps nothing: its cold neurons are computed again from x. How many there are the device alone knows, and
needs to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell import reference
from twell.kernels.activation import activate, activation_gradients_
from twell.kernels.gate import gate_and_bitmap, hot_activations
from twell.kernels.heavy import write_heavy_
from twell.kernels.heavy_backward import add_heavy_gradients_
from twell.kernels.lists import Lists, list_active
from twell.kernels.replay import Recorded, Space
from twell.kernels.split import Split, aligned, biases_of, lay_out, ready, tail_tile
from twell.kernels.statistics import write_statistics
from twell.kernels.tail_backward import write_tail_gradients
from twell.kernels.tiles import Tiles
from twell.kernels.transpose import Columns, transpose
from twell.kernels.turn import put_rows_, turned
from twell.kernels.up_down import write_tail
from twell.kernels.weight_gradients import NeuronGradients, write_weight_gradients
from twell.reference import Gradients, Weights, is_neuron_major
from twell.saved import Parts, Sizes, counts_in, n_long, saved_length

# ---------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Weights,
    order: Tensor,
    split: Split,
    activation: str,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    *,
    want_stats: bool,
    cold_gate: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y [M, D], l1_sum, counts [F], what to keep) for x [M, D].

    ``cold_gate``: r and bitmap of ``gate_and_bitmap``, where they are there already; r is overwritten.
    """
    x, w = aligned(x), ready(w)
    gate, up, down, b_gate, b_up, b_down = w
    (M, _), F, (n_hot, cap, _) = x.shape, gate.shape[0], split
    y = x.new_empty(x.shape)
    kept = x.new_empty(saved_length(M, F, (n_hot, cap, 0), x.dtype, gated=up is not None, save=True))
    if want_stats:
        l1_sum, counts = x.new_empty((), dtype=torch.float32), order.new_empty(F)
    else:
        l1_sum, counts = reference.no_statistics(x)
    turns, has_bias = not is_neuron_major(down), b_gate is not None or b_up is not None
    biases = biases_of(w, order, n_hot) if has_bias else (None, None)
    r, bitmap = (None, None) if cold_gate is None else cold_gate
    if cold_gate is not None:  # which else sets these to 0
        Parts.of(kept, M, F, n_hot, cap, gated=up is not None).marks[:4] = 0
    key = (
        x.shape, x.stride(0), x.dtype, F, split, activation, turns, up is None, b_up is None, b_down is None,
        biases[0] is None, biases[1] is None, token_mask is None, want_stats, r is None,
    )  # fmt: skip
    tensors = (x, y, kept, l1_sum, counts, gate, up, down, b_up, b_down, order, *biases, token_mask, r, bitmap)
    hot = _launch_forward(key, tensors, split, activation == "relu2", turns, want_stats, tiles, programs)
    counts_in(kept, M, F, n_hot, cap, gated=up is not None).cumsum_(0)  # offsets from now on
    if n_hot:
        y.addmm_(*hot)
    return y, l1_sum, counts, kept


@Recorded
def _launch_forward(
    space: Space,
    x: Tensor,
    y: Tensor,
    kept: Tensor,
    l1_sum: Tensor,
    counts: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: Tensor,
    hot_bias: Tensor | None,
    cold_bias: Tensor | None,
    token_mask: Tensor | None,
    r: Tensor | None,
    bitmap: Tensor | None,
    split: Split,
    squared: bool,
    turns: bool,
    want_stats: bool,
    tiles: Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """Everything but the hot neurons' last GEMM, for which it returns h and Wd_hot, and sums of counts."""
    M, F, gated, (n_hot, cap, first) = len(x), len(gate), up is not None, split
    parts = Parts.of(kept, M, F, n_hot, cap, gated=gated)
    rows = Weights(gate, up, turned(down, space) if turns else down, cold_bias, up_bias, down_bias)
    layout = lay_out(rows, order, n_hot, (hot_bias, cold_bias), space=space)
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma, "space": space}
    if r is None or bitmap is None:
        r, bitmap, _ = gate_and_bitmap(x, layout.cold, layout.cold_bias, zeros=not gated, marks=parts.marks, **common)
    out = parts.rows, parts.values
    lists = list_active(r, bitmap, parts.marks, order, cap=cap, first=first, out=out)
    l1, tile = space.take(M, dtype=torch.float32), tail_tile(tiles, x, first)
    write_tail(y, x, lists, rows, rows.down, squared=squared, has_hot=n_hot > 0, tile=tile, saved_up=parts.up, l1=l1)
    write_heavy_(
        y, x, r, bitmap, parts.marks, rows, rows.down, order, squared=squared, tile=tiles.heavy, programs=programs,
        l1=l1 if want_stats else None,
    )  # fmt: skip
    seen = space.take(Sizes.of(M, F - n_hot, cap).chunks, F - n_hot, dtype=torch.int32) if want_stats else None
    transpose(bitmap, lists, F - n_hot, token_mask, Columns(parts.bits, parts.offsets), seen)
    h = None
    if n_hot:
        options: dict[str, Any] = {"gated": gated, "squared": squared, "sums": parts.sums}
        h = hot_activations(x, layout.hot, layout.hot_bias, **options, **common)
    if seen is not None:
        hot = None
        if n_hot:
            options = {"squared": squared, "interleaved": gated, "wants_h": False, "space": space}
            _, *hot = activate(parts.sums, None, token_mask, **options)
        write_statistics(l1_sum, counts, hot, (l1, seen), order, token_mask)
    return () if h is None else (h, layout.hot_down)


# ---------------------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------------------


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    kept: Tensor,
    order: Tensor,
    places: Tensor,
    split: Split,
    activation: str,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    needs: tuple[bool, ...],
) -> Gradients:
    """As ``reference.backward``. Gradients that are not needed come back empty."""
    x, own = aligned(x), ready(w)
    gate, up, down, b_gate, b_up, _ = own
    (M, D), (F, _), n_hot, gated = x.shape, gate.shape, split.n_hot, up is not None
    needs_x, needs_gate, needs_up, needs_down, needs_gate_bias, needs_up_bias, needs_down_bias = needs
    dx = x.new_empty(M, D) if needs_x else None
    out = NeuronGradients(
        gate=x.new_empty(F, D) if needs_gate else None,
        up=x.new_empty(F, D) if gated and needs_up else None,
        down=x.new_empty(F, D) if needs_down else None,
        gate_bias=x.new_empty(F) if needs_gate_bias else None,
        up_bias=x.new_empty(F) if gated and needs_up_bias else None,
    )
    turns = not is_neuron_major(down)
    key = (
        x.shape, x.stride(0), x.dtype, F, split, activation, turns, up is None, b_gate is None, b_up is None,
        token_mask is None, dl1 is None, needs,
    )  # fmt: skip
    given = split, activation == "relu2", turns, tiles, programs
    common = dy, dl1, token_mask, x, gate, up, down, order, kept, dx, *out
    copies = _launch_tail(key, (*common, places), *given)
    buffer = None
    if n_hot:
        hot, hot_down = copies[-2:]
        dh = dy @ hot_down.t()
        (gradients,) = _launch_hot(key, (dh, dl1, token_mask, kept), gated, activation == "relu2")
        buffer = _hot_gradients(dx, out, dy, x, order, gradients, dh, hot, n_hot, gated=gated)
    d_down = x.new_empty(D, F) if turns and needs_down else None
    _launch_rest(key, (*common, b_gate, b_up, copies[0] if turns else None, buffer, d_down), *given)
    if needs_down and not turns:
        d_down = out.down.t()  # type: ignore[union-attr]

    def given_or_empty(gradient: Tensor | None) -> Tensor:
        return x.new_empty(0) if gradient is None else gradient

    return Gradients(
        given_or_empty(dx),
        Weights(
            gate=given_or_empty(out.gate),
            up=given_or_empty(out.up) if gated else None,
            down=given_or_empty(d_down),
            gate_bias=given_or_empty(out.gate_bias),
            up_bias=given_or_empty(out.up_bias) if gated else None,
            down_bias=given_or_empty(dy.sum(0) if needs_down_bias else None),
        ),
    )


@Recorded
def _launch_tail(
    space: Space,
    dy: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    order: Tensor,
    kept: Tensor,
    dx: Tensor | None,
    d_gate: Tensor | None,
    d_up: Tensor | None,
    d_down: Tensor | None,
    d_gate_bias: Tensor | None,
    d_up_bias: Tensor | None,
    places: Tensor,
    split: Split,
    squared: bool,
    turns: bool,
    tiles: Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """What the listed tokens' cold neurons give. Returns Wd neuron by neuron, if it is not so already, and the hot
    neurons' rows: see Layout."""
    M, F, gated, (n_hot, cap, _) = len(x), len(gate), up is not None, split
    parts, down = Parts.of(kept, M, F, n_hot, cap, gated=gated), turned(down, space) if turns else down
    out = NeuronGradients(d_gate, d_up, d_down, d_gate_bias, d_up_bias)
    columns = Columns(parts.bits, parts.offsets) if any(g is not None for g in out) else None
    lists = Lists(parts.rows, parts.values, parts.marks, cap)
    pairs = write_tail_gradients(
        dx, dy, dl1, token_mask, lists, parts.up, gate, up, down, places, columns,
        squared=squared, tile=tiles.tail_backward, space=space,
    )  # fmt: skip
    if pairs is not None and columns is not None:
        write_weight_gradients(out, x, dy, pairs, columns, order, F - n_hot, space)
    copies = (down,) if turns else ()
    if n_hot == 0:
        return copies
    layout = lay_out(Weights(gate, up, down, None, None, None), order, n_hot, cold=False, space=space)
    return *copies, layout.hot, layout.hot_down


@Recorded
def _launch_hot(
    space: Space,
    dh: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    kept: Tensor,
    gated: bool,
    squared: bool,
) -> tuple[Tensor, ...]:
    """Gradients of z and u of the hot neurons, interleaved; h takes the place of dh."""
    M, width = len(dh), (2 if gated else 1) * dh.shape[1]
    sums = kept[: M * width].view(M, width)  # see Parts
    gradients, *_ = activation_gradients_(
        sums, None, dh, dl1, token_mask, squared=squared, interleaved=gated, space=space
    )
    return (gradients,)


def _hot_gradients(
    dx: Tensor | None,
    out: NeuronGradients,
    dy: Tensor,
    x: Tensor,
    order: Tensor,
    gradients: Tensor,
    h: Tensor,
    hot: Tensor,
    n_hot: int,
    *,
    gated: bool,
) -> Tensor | None:
    """dx += the hot neurons' part, and their gradients of biases; returns those of the weights, as ``put_rows_`` takes
    them."""
    if dx is not None:
        dx.addmm_(gradients, hot)
    if out.gate_bias is not None or out.up_bias is not None:
        at, sums = order[:n_hot].long(), gradients.sum(0)
        parts = sums.unflatten(0, (-1, 2)).unbind(1) if gated else (sums,)
        for target, part in zip((out.gate_bias, out.up_bias), parts, strict=False):
            if target is not None:
                target.index_copy_(0, at, part)
    wants_inputs = out.gate is not None or out.up is not None
    if not wants_inputs and out.down is None:
        return None
    buffer = x.new_empty(len(hot) + n_hot, x.shape[1])
    if wants_inputs:
        torch.mm(gradients.t(), x, out=buffer[: len(hot)])
    if out.down is not None:
        torch.mm(h.t(), dy, out=buffer[len(hot) :])
    return buffer


@Recorded
def _launch_rest(
    space: Space,
    dy: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    order: Tensor,
    kept: Tensor,
    dx: Tensor | None,
    d_gate: Tensor | None,
    d_up: Tensor | None,
    d_down: Tensor | None,
    d_gate_bias: Tensor | None,
    d_up_bias: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_by_rows: Tensor | None,
    hot_gradients: Tensor | None,
    turned_down: Tensor | None,
    split: Split,
    squared: bool,
    turns: bool,
    tiles: Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """The hot neurons' gradients into their places, what heavy tokens give, and Wd's gradient as Wd lies."""
    M, F, gated, (n_hot, cap, _) = len(x), len(gate), up is not None, split
    if hot_gradients is not None:
        put_rows_((d_gate, d_up, d_down), order, hot_gradients, n_hot, gated=gated)
    out = NeuronGradients(d_gate, d_up, d_down, d_gate_bias, d_up_bias)
    marks = Parts.of(kept, M, F, n_hot, cap, gated=gated).marks
    down = down if down_by_rows is None else down_by_rows
    add_heavy_gradients_(
        dx, out, dy, dl1, x, gate, up, down, gate_bias, up_bias, order, n_hot, marks, token_mask,
        squared=squared, n_long=n_long(M), programs=programs, space=space,
    )  # fmt: skip
    if turned_down is not None and d_down is not None:
        turned(d_down, out=turned_down)
    return ()
