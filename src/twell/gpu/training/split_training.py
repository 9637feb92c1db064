"""Training with the split: the forward of ``prefill/split.py``, which also keeps what a backward needs, and the
backward.

Kept per token, besides x and the weights: z and u of the H hot neurons; for the tail ``cap`` places of 10 bytes, for a
16-bit neuron number, r and u (``lists.py``) and the place among the pairs by neurons (``columns.py``). At H 512, cap
48 and F 5632 this is 2.5 kB, and 2.8 with long lists, the pairs' offsets and the tokens' classes, where a dense FFN
keeps r, u and h of all neurons: 34 kB.

A heavy token keeps nothing: its cold neurons are computed again from x. Only the device knows how many there are; the
host never asks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell import reference
from twell.formats import TwELL
from twell.gpu.shared.gate import gate_in_twell, hot_activations
from twell.gpu.shared.heavy import write_heavy_
from twell.gpu.shared.layout import SplitSizes, aligned, biases_of, lay_out, ready, tail_tile
from twell.gpu.shared.lists import Lists, list_active
from twell.gpu.shared.replay import Recorded, Space, beside, signals, waits
from twell.gpu.shared.rows import gathered, put_rows_, transposed
from twell.gpu.shared.tail import write_tail
from twell.gpu.shared.tiles import Tiles
from twell.gpu.training.activation import activate
from twell.gpu.training.columns import Columns, bits_shape, write_columns
from twell.gpu.training.heavy_backward import add_heavy_gradients_
from twell.gpu.training.hot import add_product_, hot_gradients
from twell.gpu.training.statistics import write_statistics
from twell.gpu.training.tail_backward import write_tail_gradients
from twell.gpu.training.weight_gradients import NeuronGradients, write_weight_gradients
from twell.reference import Gradients, Weights, is_neuron_major
from twell.saved import SavedSplit, TailSizes, saved_length

# y += h Wd_hot and dx += [dz du] W_hot: our kernel takes 15 % longer than cuBLAS's (2 % of a step), but 30 us less host
# time, which limits smaller batches.
_BY_CUBLAS = 8192  # tokens, from which on cuBLAS runs

# ---------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Weights,
    order: Tensor,
    places: Tensor,
    split: SplitSizes,
    activation: str,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    *,
    want_stats: bool,
    cold_gate: TwELL | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y [M, D], l1_sum, counts [F], tensor to keep) for x [M, D]. ``cold_gate``: the result of ``gate_in_twell``, if
    it exists already; only benchmarks pass it."""
    x, w = aligned(x), ready(w)
    gate, up, down, b_gate, b_up, b_down = w
    (M, _), F, (n_hot, cap, _) = x.shape, gate.shape[0], split
    y = x.new_empty(x.shape)
    kept = x.new_empty(saved_length(M, F, (n_hot, cap, 0), x.dtype, gated=up is not None, save=True))
    if want_stats:
        l1_sum, counts = x.new_empty((), dtype=torch.float32), order.new_empty(F)
    else:
        l1_sum, counts = reference.no_statistics(x)
    transposes, has_bias = not is_neuron_major(down), b_gate is not None or b_up is not None
    biases = biases_of(w, order, n_hot) if has_bias else (None, None)
    of_gate: tuple[Tensor | None, ...] = None, None, None
    if cold_gate is not None:  # otherwise the gate kernel sets counters and bits to 0
        SavedSplit.of(kept, M, F, n_hot, cap, gated=up is not None).turns.counters.zero_()
        of_gate = cold_gate.words, cold_gate.counts, order.new_zeros(*bits_shape(M, F - n_hot))
    key = (
        x.shape, x.stride(0), x.dtype, F, split, activation, transposes, up is None, b_up is None, b_down is None,
        biases[0] is None, biases[1] is None, token_mask is None, want_stats, cold_gate is None,
    )  # fmt: skip
    results = y, kept, l1_sum, counts
    tensors = (x, *results, gate, up, down, b_up, b_down, order, places, *biases, token_mask, *of_gate)
    given = x, *results, w, biases, order, places, token_mask, of_gate, split, activation == "relu2", transposes
    hot = _launch_forward(key, tensors, *given, want_stats, tiles, programs)
    if hot:
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
    w: Weights,
    biases: tuple[Tensor | None, Tensor | None],
    order: Tensor,
    places: Tensor,
    token_mask: Tensor | None,
    of_gate: tuple[Tensor | None, ...],
    split: SplitSizes,
    squared: bool,
    transposes: bool,
    want_stats: bool,
    tiles: Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """``biases``: see ``biases_of``. ``of_gate``: words and counts of a given gate, and zeros of ``bits_shape``."""
    M, F, gated, (n_hot, cap, first) = len(x), len(w.gate), w.up is not None, split
    words, counts_in_tiles, bits = of_gate
    parts = SavedSplit.of(kept, M, F, n_hot, cap, gated=gated)
    cold = gathered(*w[:3], order, n_hot, hot=False, space=space) if n_hot else w.gate
    with beside():  # the cold gate's GEMM
        rows = w._replace(down=transposed(w.down, space) if transposes else w.down, gate_bias=biases[1])
        layout = lay_out(rows, order, n_hot, biases, cold=False, space=space)._replace(cold=cold)
        signals()
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    l1, tile = space.take(M, dtype=torch.float32), tail_tile(tiles, x, first)
    seen = space.take(TailSizes.of(M, F - n_hot, cap).chunks, F - n_hot, dtype=torch.int32) if want_stats else None
    if bits is None:
        bits = space.take(*bits_shape(M, F - n_hot), dtype=torch.int32)
    h = space.take(M, n_hot) if n_hot else None
    with space.passing():
        if words is None or counts_in_tiles is None:
            outputs: dict[str, Any] = {"counters": parts.turns.counters, "bits": bits, "space": space}
            in_twell = gate_in_twell(x, layout.cold, layout.cold_bias, **outputs, **common)
        else:
            in_twell = TwELL.from_words(words, counts_in_tiles, shape=(M, F - n_hot), dtype=x.dtype, check=False)
        out = parts.rows, parts.values
        lists = list_active(in_twell, parts.turns, order, cap=cap, first=first, out=out, bits=bits)
    write_columns(Columns(parts.offsets, parts.pair_of), bits, lists, places, F - n_hot, token_mask, seen, space)
    waits()
    hot = None
    if h is not None:
        given: dict[str, Any] = {"gated": gated, "squared": squared, "sums": parts.sums}
        hot_activations(x, layout.hot, layout.hot_bias, h, **given, **common)
        if seen is not None:
            given = {"squared": squared, "interleaved": gated, "wants_h": False, "space": space}
            _, *hot = activate(parts.sums, None, token_mask, **given)
    write_heavy_(
        y, x, parts.turns, rows, places, squared=squared, tile=tiles.heavy, programs=programs, space=space,
        use_tma=tiles.heavy_tma, statistics=None if seen is None else (l1, seen[0]), token_mask=token_mask,
    )  # fmt: skip
    write_tail(y, x, lists, rows, squared=squared, has_hot=n_hot > 0, tile=tile, saved_up=parts.up, l1=l1)
    if h is not None and M < _BY_CUBLAS:
        add_product_(y, h, layout.hot_down, **common)
    if seen is not None:
        write_statistics(l1_sum, counts, hot, (l1, seen), order, token_mask)
    return (h, layout.hot_down) if h is not None and M >= _BY_CUBLAS else ()


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
    split: SplitSizes,
    activation: str,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    needs: tuple[bool, ...],
) -> Gradients:
    """As ``reference.backward``, but None where a gradient is not needed."""
    x, w = aligned(x), ready(w)
    (M, D), F, n_hot, gated, squared = x.shape, len(w.gate), split.n_hot, w.up is not None, activation == "relu2"
    new, transposes = x.new_empty, not is_neuron_major(w.down)
    needs_x, needs_gate, needs_up, needs_down, needs_gate_bias, needs_up_bias, needs_down_bias = needs
    dx = new(M, D) if needs_x else None
    out = NeuronGradients(
        gate=new(F, D) if needs_gate else None,
        up=new(F, D) if gated and needs_up else None,
        down=new(F, D) if needs_down else None,
        gate_bias=new(F) if needs_gate_bias else None,
        up_bias=new(F) if gated and needs_up_bias else None,
    )
    key = (
        x.shape, x.stride(0), x.dtype, F, split, activation, transposes, w.up is None, w.gate_bias is None,
        w.up_bias is None, token_mask is None, dl1 is None, needs,
    )  # fmt: skip
    tensors = dy, dl1, token_mask, x, *w[:5], order, places, kept, dx, *out
    given = dy, dl1, token_mask, x, w, order, places, kept, dx, out, split, squared, transposes, tiles, programs
    hot = _launch_backward(key, tensors, *given)
    inputs = downs = None
    if hot:
        gradients, h, inputs, downs, *by_cublas = hot
        if dx is not None and by_cublas:
            dx.addmm_(gradients.t(), by_cublas[0])
        if out.gate is not None or out.up is not None:
            torch.mm(gradients, x, out=inputs)
        if out.down is not None:
            torch.mm(h, dy, out=downs)
        if out.gate_bias is not None or out.up_bias is not None:
            _put_bias_gradients(out.gate_bias, out.up_bias, gradients, order[:n_hot], gated=gated)
    turned_down = new(D, F) if transposes and needs_down else None
    if hot or turned_down is not None:
        last = order, inputs, downs, turned_down
        _launch_last(key, (x, *out[:3], *last), out[:3], *last, n_hot, gated)
    d_down = out.down.t() if out.down is not None and not transposes else turned_down
    d_down_bias = dy.sum(0) if needs_down_bias else None
    return Gradients(dx, Weights(out.gate, out.up, d_down, out.gate_bias, out.up_bias, d_down_bias))  # type: ignore[arg-type]


@Recorded
def _launch_backward(
    space: Space,
    dy: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    x: Tensor,
    w: Weights,
    order: Tensor,
    places: Tensor,
    kept: Tensor,
    dx: Tensor | None,
    out: NeuronGradients,
    split: SplitSizes,
    squared: bool,
    transposes: bool,
    tiles: Tiles,
    programs: int,
) -> tuple[Tensor, ...]:
    """Write dx, and the cold neurons' rows of ``out``.

    Returns operands and outputs of the hot neurons' GEMMs: gradients of z and u, interleaved [2 H, M], h [H, M], and
    buffers [2 H, D] and [H, D]; in large batches also the hot neurons' rows (see Layout), whose part of dx is still to
    be added."""
    M, (F, D), gated, (n_hot, cap, _) = len(x), w.gate.shape, w.up is not None, split
    w = w._replace(down=transposed(w.down, space)) if transposes else w
    gate, up, down, gate_bias, up_bias, _ = w
    parts = SavedSplit.of(kept, M, F, n_hot, cap, gated=gated)
    columns = Columns(parts.offsets, parts.pair_of) if any(g is not None for g in out) else None
    lists = Lists(parts.rows, parts.values, parts.turns, cap)
    with space.passing():
        pairs = write_tail_gradients(
            dx, dy, dl1, token_mask, lists, parts.up, gate, up, down, places, columns,
            squared=squared, tile=tiles.tail_backward, space=space,
        )  # fmt: skip
        if pairs is not None and columns is not None:
            write_weight_gradients(out, x, dy, pairs, columns, order, F - n_hot, space)
    with space.passing():
        add_heavy_gradients_(
            dx, out, dy, dl1, x, gate, up, down, gate_bias, up_bias, order, n_hot, parts.turns, token_mask,
            squared=squared, programs=programs, space=space,
        )  # fmt: skip
    if n_hot == 0:
        return ()
    layout = lay_out(w, order, n_hot, cold=False, space=space)
    common: dict[str, Any] = {"programs": programs, "use_tma": tiles.use_tma}
    given: dict[str, Any] = {"gated": gated, "squared": squared, "tile": tiles.heavy, "space": space}
    gradients, h = hot_gradients(dy, layout.hot_down, parts.sums, dl1, token_mask, **given, **common)
    hot = gradients.t(), h.t(), space.take(gradients.shape[1], D), space.take(n_hot, D)
    if dx is not None and M >= _BY_CUBLAS:
        return *hot, layout.hot
    if dx is not None:
        add_product_(dx, gradients, layout.hot, tile=tiles.gate, **common)
    return hot


def _put_bias_gradients(
    d_gate_bias: Tensor | None, d_up_bias: Tensor | None, gradients: Tensor, neurons: Tensor, *, gated: bool
) -> None:
    sums, at = gradients.sum(1), neurons.long()
    parts = sums.unflatten(0, (-1, 2)).unbind(1) if gated else (sums,)
    for target, part in zip((d_gate_bias, d_up_bias), parts, strict=False):
        if target is not None:
            target.index_copy_(0, at, part)


@Recorded
def _launch_last(
    space: Space,
    targets: tuple[Tensor | None, ...],
    order: Tensor,
    inputs: Tensor | None,
    downs: Tensor | None,
    turned_down: Tensor | None,
    n_hot: int,
    gated: bool,
) -> tuple[Tensor, ...]:
    """Put the hot neurons' rows into their places in ``targets``, the gradients of gate, up and down; and transpose the
    last if Wd is not neuron-major."""
    if inputs is not None and downs is not None:
        put_rows_(targets, order, inputs, downs, n_hot, gated=gated)
    if turned_down is not None and targets[2] is not None:
        transposed(targets[2], out=turned_down)
    return ()
