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
from twell.kernels.launch import Workspace, padded, piece
from twell.kernels.lists import Lists, list_active
from twell.kernels.split import Layout, Split, aligned, plain, tail_tile
from twell.kernels.statistics import summed
from twell.kernels.tail_backward import space_for, write_tail_gradients
from twell.kernels.tiles import Tiles
from twell.kernels.transpose import Columns, transpose
from twell.kernels.turn import put_rows_, turned
from twell.kernels.up_down import write_tail
from twell.kernels.weight_gradients import NeuronGradients, write_weight_gradients
from twell.reference import Gradients, Weights
from twell.saved import LEAST, Saved, Sizes, index_dtype, n_long, n_marks


def forward(
    x: Tensor,
    rows: Weights,
    layout: Layout,
    activation: str,
    split: Split,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    *,
    want_stats: bool,
    cold_gate: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """(y [M, D], l1_sum, counts [F], what to keep) for x [M, D]. ``rows``: see ``split.by_rows``.

    ``cold_gate``: what ``gate_and_bitmap`` gives, where it is there already; it is overwritten.
    """
    x = aligned(x)
    M, gated, squared, n_hot = len(x), rows.up is not None, activation == "relu2", split.n_hot
    n_cold, dtype = len(split.order) - n_hot, x.dtype
    sizes = Sizes.of(M, n_cold, split.cap)
    entries = sizes.entries
    kept = Saved(
        sums=x.new_empty(max(LEAST, M * len(layout.hot))),
        integers=x.new_empty(sizes.integers, dtype=torch.int32),
        rows=x.new_empty(entries, dtype=index_dtype(len(split.order))),
        values=x.new_empty((2 if gated else 1) * entries),
    )
    marks = piece(kept.integers, sizes.marks_at, n_marks(M))
    values, up = piece(kept.values, 0, entries), piece(kept.values, entries, entries) if gated else None
    space = Workspace(x, _space_for(M, n_cold, dtype, sizes))
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    if cold_gate is None:
        zeros = not gated
        cold_gate = gate_and_bitmap(x, layout.cold, layout.cold_bias, zeros=zeros, space=space, marks=marks, **common)
    else:  # the backward finds the marks among what is kept
        kept.integers[sizes.marks_at : sizes.marks_at + 4] = 0
    gate, bitmap, _ = cold_gate
    out = kept.rows, values
    lists = list_active(gate, bitmap, marks, split.order, cap=split.cap, first=split.first, out=out)
    y, l1, tile = x.new_empty(x.shape), space.take(M, dtype=torch.float32), tail_tile(tiles, x, split.first)
    write_tail(y, x, lists, rows, rows.down, squared=squared, has_hot=n_hot > 0, tile=tile, saved_up=up, l1=l1)
    write_heavy_(
        y, x, gate, bitmap, marks, rows, rows.down, split.order, squared=squared, tile=tiles.heavy, programs=programs,
        l1=l1 if want_stats else None,
    )  # fmt: skip
    sums = kept.sums[: M * len(layout.hot)].view(M, len(layout.hot))
    if n_hot:
        h = hot_activations(x, layout.hot, layout.hot_bias, gated=gated, squared=squared, sums=sums, **common)
        y.addmm_(h, layout.hot_down)
    offsets = kept.integers[sizes.offsets_at : sizes.offsets_at + sizes.keys * sizes.chunks + 1]
    columns = Columns(piece(kept.integers, 0, (M + 31) // 32, sizes.keys), offsets)
    counts = kept.integers.new_empty(sizes.keys, sizes.chunks)
    seen = space.take(sizes.chunks, n_cold, dtype=torch.int32) if want_stats else None
    transpose(bitmap, lists, n_cold, token_mask, columns, counts, seen)
    if not want_stats:
        return y, *reference.no_statistics(x), kept
    hot = None
    if n_hot:
        _, *hot = activate(sums, None, token_mask, squared=squared, interleaved=gated, wants_h=False)
    return y, *summed(x, hot, (l1, seen), split.order, token_mask), kept


def _space_for(M: int, n_cold: int, dtype: torch.dtype, sizes: Sizes) -> int:
    """Bytes that a forward needs on the way."""
    gate = padded(M * n_cold * dtype.itemsize) + padded(M * sizes.keys // 8)
    return gate + padded(4 * M) + padded(4 * sizes.chunks * n_cold)


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    rows: Weights,
    layout: Layout,
    saved: Saved,
    activation: str,
    split: Split,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    needs: tuple[bool, ...],
) -> Gradients:
    """As ``reference.backward``. Gradients that are not needed come back empty. ``rows``: see ``split.by_rows``."""
    x = aligned(x)
    gated, squared = rows.up is not None, activation == "relu2"
    needs_x, needs_gate, needs_up, needs_down, needs_gate_bias, needs_up_bias, needs_down_bias = needs
    (F, D), (M, n_cold) = rows.gate.shape, (len(x), len(rows.gate) - split.n_hot)
    sizes = Sizes.of(M, n_cold, split.cap)
    entries, integers = sizes.entries, saved.integers
    marks = piece(integers, sizes.marks_at, n_marks(M))
    lists = Lists(saved.rows, piece(saved.values, 0, entries), marks, split.cap)
    out = NeuronGradients(
        gate=x.new_empty(F, D) if needs_gate else None,
        up=x.new_empty(F, D) if gated and needs_up else None,
        down=x.new_empty(F, D) if needs_down else None,
        gate_bias=x.new_empty(F) if needs_gate_bias else None,
        up_bias=x.new_empty(F) if gated and needs_up_bias else None,
    )
    wants_weights = any(g is not None for g in out)
    columns, space = None, None
    if wants_weights:
        bits = piece(integers, 0, (M + 31) // 32, sizes.keys)
        columns = Columns(bits, piece(integers, sizes.offsets_at, sizes.keys * sizes.chunks + 1))
        space = Workspace(x, space_for(entries, x.dtype))
    dx = torch.empty_like(dy) if needs_x else None
    pairs = write_tail_gradients(
        dx,
        dy,
        dl1,
        token_mask,
        lists,
        piece(saved.values, entries, entries) if gated else None,
        rows.gate,
        rows.up,
        rows.down,
        split.places,
        columns,
        squared=squared,
        tile=tiles.tail_backward,
        space=space,
    )
    if pairs is not None and columns is not None:
        write_weight_gradients(out, x, dy, pairs, columns, split.order, n_cold)
    if split.n_hot:
        _add_hot(dx, out, dy, dl1, x, layout, saved.sums, split, token_mask, gated=gated, squared=squared)
    if dx is not None or wants_weights:
        add_heavy_gradients_(
            dx,
            out,
            dy,
            dl1,
            x,
            rows.gate,
            rows.up,
            rows.down,
            rows.gate_bias,
            rows.up_bias,
            plain(split.order[split.n_hot :]) if split.n_hot else None,
            marks,
            token_mask,
            squared=squared,
            n_long=n_long(M),
            programs=programs,
        )

    def given(gradient: Tensor | None) -> Tensor:
        return x.new_empty(0) if gradient is None else gradient

    down = out.down
    if down is not None:
        down = down.t() if reference.is_neuron_major(w.down) else turned(down)
    return Gradients(
        given(dx),
        Weights(
            gate=given(out.gate),
            up=given(out.up) if gated else None,
            down=given(down),
            gate_bias=given(out.gate_bias),
            up_bias=given(out.up_bias) if gated else None,
            down_bias=given(dy.sum(0) if needs_down_bias else None),
        ),
    )


def _add_hot(
    dx: Tensor | None,
    out: NeuronGradients,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    layout: Layout,
    sums: Tensor,
    split: Split,
    token_mask: Tensor | None,
    *,
    gated: bool,
    squared: bool,
) -> None:
    """dx += the hot neurons' part; their rows of the weights' gradients."""
    dh = dy @ layout.hot_down.t()
    sums = sums[: len(x) * len(layout.hot)].view(len(x), len(layout.hot))
    gradients, _, h = activation_gradients_(sums, None, dh, dl1, token_mask, squared=squared, interleaved=gated)
    if dx is not None:
        dx.addmm_(gradients, layout.hot)
    wants_inputs = out.gate is not None or out.up is not None
    if wants_inputs or out.down is not None:
        buffer = x.new_empty(len(layout.hot) + split.n_hot, x.shape[1])
        if wants_inputs:
            torch.mm(gradients.t(), x, out=buffer[: len(layout.hot)])
        if out.down is not None:
            torch.mm(h.t(), dy, out=buffer[len(layout.hot) :])
        put_rows_((out.gate, out.up, out.down), split.order, buffer, split.n_hot, gated=gated)
    if out.gate_bias is not None or out.up_bias is not None:
        hot = split.order[: split.n_hot].long()
        for target, part in zip((out.gate_bias, out.up_bias), _parts(gradients.sum(0), gated), strict=False):
            if target is not None:
                target.index_copy_(0, hot, part)


def _parts(rows: Tensor, gated: bool) -> tuple[Tensor, ...]:
    """Gate and up of rows that interleave them."""
    return rows.unflatten(0, (-1, 2)).unbind(1) if gated else (rows,)
