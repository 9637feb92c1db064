"""Training in three parts: the forward of ``split.py`` that keeps what a backward needs, and that backward.

What is kept, besides x and the weights, per token: z and u of the H hot neurons; for the cold tail a narrow list of
16-bit neurons, r and u (``lists.py``), and the bitmap by neurons (C / 8 bytes). At H 512 and lists of 96 this is
3.5 kB, where a dense FFN keeps r, u and h of all neurons: 34 kB.

A heavy token keeps nothing: its cold neurons are computed again from x. Only their number is needed on the host. The
forward sends it there, so that in the backward the host does not wait for the GPU, nor the GPU for the host to hear it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import host, reference
from twell.kernels import split
from twell.kernels.activation import activate, activation_gradients_
from twell.kernels.gate import gate_and_bitmap, hot_activations
from twell.kernels.lists import LONG, Lists, index_dtype, list_active, n_long, new_marks
from twell.kernels.split import Layout
from twell.kernels.tail_backward import write_tail_gradients
from twell.kernels.tiles import Tiles, bitmap_words
from twell.kernels.transpose import CHUNK, Columns, transpose
from twell.kernels.turn import put_rows_, turned
from twell.kernels.weight_gradients import NeuronGradients, write_weight_gradients
from twell.plan import Plan
from twell.reference import Gradients, Weights

_HEAVY_TOKENS = 4096  # computed again at once


class Saved(NamedTuple):
    """What the backward needs of the forward."""

    sums: Tensor  # [M, 2 H]: z and u of the hot neurons, interleaved; plain FFN: z, [M, H]
    bits: Tensor  # see Columns
    offsets: Tensor
    rows: Tensor  # see Lists
    values: Tensor
    up: Tensor  # u of every entry; plain FFN: empty
    marks: Tensor
    heavy: Tensor  # int32 [2] on the host: the first two of marks, as host.send has them


def empty_saved(x: Tensor, n_neurons: int, n_hot: int, cap: int, *, gated: bool) -> Saved:
    """Tensors of the right shapes."""
    M, n_cold = len(x), n_neurons - n_hot
    size = M * cap + n_long(M) * LONG
    narrow = index_dtype(n_neurons)
    words, chunks = bitmap_words(n_cold), -(-M // CHUNK)
    return Saved(
        sums=x.new_empty(M, 2 * n_hot if gated else n_hot),
        bits=x.new_empty(-(-M // 32), 32 * words, dtype=torch.int32),
        offsets=x.new_empty(32 * words * chunks + 1, dtype=torch.int32),
        rows=x.new_empty(size, dtype=narrow),
        values=x.new_empty(size),
        up=x.new_empty(size if gated else 0),
        marks=new_marks(M, x.device),
        heavy=torch.empty(2, dtype=torch.int32),
    )


def forward(
    x: Tensor,
    w: Weights,
    layout: Layout,
    activation: str,
    plan: Plan,
    token_mask: Tensor | None,
    tiles: Tiles,
    programs: int,
    *,
    want_stats: bool,
    cold_gate: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """(y [M, D], l1_sum, counts [F], what to keep) for x [M, D].

    ``cold_gate``: what ``gate_and_bitmap`` gives, where it is there already; it is overwritten.
    """
    x = split.aligned(x)
    M, gated, squared = len(x), w.up is not None, activation == "relu2"
    common: dict[str, Any] = {"tile": tiles.gate, "programs": programs, "use_tma": tiles.use_tma}
    if cold_gate is None:
        cold_gate = gate_and_bitmap(x, layout.cold, layout.cold_bias, zeros=not gated, **common)
    gate, bitmap, marks = cold_gate
    lists = list_active(gate, bitmap, marks, layout.cold_rows, plan)
    heavy = host.send(marks[:2])
    y, l1 = x.new_empty(x.shape), x.new_empty(M, dtype=torch.float32)
    up = lists.values.new_empty(lists.values.shape if gated else (0,))
    split.write_cold_(
        y,
        x,
        w,
        layout,
        gate,
        bitmap,
        lists,
        plan,
        tiles,
        programs,
        squared=squared,
        saved_up=up if gated else None,
        tail_l1=l1,
        heavy_l1=l1 if want_stats else None,
    )
    sums = x.new_empty(M, len(layout.hot))
    if len(layout.hot):
        h = hot_activations(x, layout.hot, layout.hot_bias, gated=gated, squared=squared, sums=sums, **common)
        y.addmm_(h, layout.hot_down)
    l1_sum, counts = reference.no_statistics(x)
    columns, cold = transpose(bitmap, lists, len(layout.cold), token_mask, want_statistics=want_stats)
    if want_stats:
        l1_sum = (l1 if token_mask is None else l1.where(token_mask, 0)).sum()
        assert cold is not None
        counts = cold
        if layout.order is not None:
            _, hot_l1, hot = activate(sums, None, token_mask, squared=squared, interleaved=gated, wants_h=False)
            l1_sum = l1_sum + hot_l1
            counts = cold.new_empty(plan.n_neurons)
            counts[layout.order.cold] = cold
            counts[layout.order.hot] = hot
    return y, l1_sum, counts, Saved(sums, *columns, lists.rows, lists.values, up, marks, heavy)


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    layout: Layout,
    saved: Saved,
    activation: str,
    plan: Plan,
    token_mask: Tensor | None,
    tiles: Tiles,
    needs: tuple[bool, ...],
) -> Gradients:
    """As ``reference.backward``. Gradients that are not needed come back empty."""
    x, dy = split.aligned(x), dy.contiguous()
    gated, squared = w.up is not None, activation == "relu2"
    needs_x, needs_gate, needs_up, needs_down, needs_gate_bias, needs_up_bias, needs_down_bias = needs
    lists = Lists(saved.rows, saved.values, saved.marks, plan.cap)
    F = w.gate.shape[0]
    out = NeuronGradients(
        gate=torch.empty_like(w.gate, memory_format=torch.contiguous_format) if needs_gate else None,
        up=x.new_empty(F, x.shape[1]) if gated and needs_up else None,
        down=x.new_empty(F, x.shape[1]) if needs_down else None,
        gate_bias=x.new_empty(F) if needs_gate_bias else None,
        up_bias=x.new_empty(F) if gated and needs_up_bias else None,
    )
    wants_weights = any(g is not None for g in out)
    columns = Columns(saved.bits, saved.offsets) if wants_weights else None
    dx = torch.empty_like(dy) if needs_x else None
    pairs = write_tail_gradients(
        dx,
        dy,
        dl1,
        token_mask,
        lists,
        saved.up if gated else None,
        layout,
        columns,
        squared=squared,
        tile=tiles.tail_backward,
    )
    if pairs is not None and columns is not None:
        write_weight_gradients(out, x, dy, pairs, columns, layout.cold_rows, plan.n_neurons - len(plan.hot))
    if layout.order is not None:
        _add_hot(dx, out, dy, dl1, x, layout, saved.sums, token_mask, gated=gated, squared=squared)
    for tokens in _heavy_tokens(saved, len(x)).split(_HEAVY_TOKENS):
        _add_heavy(dx, out, dy, dl1, x, w, layout, activation, token_mask, tokens)

    def given(gradient: Tensor | None) -> Tensor:
        return x.new_empty(0) if gradient is None else gradient

    return Gradients(
        given(dx),
        Weights(
            gate=given(out.gate),
            up=given(out.up) if gated else None,
            down=given(None if out.down is None else turned(out.down)),
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
    token_mask: Tensor | None,
    *,
    gated: bool,
    squared: bool,
) -> None:
    """dx += the hot neurons' part; their rows of the weights' gradients."""
    assert layout.order is not None
    dh = dy @ layout.hot_down.t()
    gradients, _, h = activation_gradients_(sums, None, dh, dl1, token_mask, squared=squared, interleaved=gated)
    if dx is not None:
        dx.addmm_(gradients, layout.hot)
    hot = layout.order.hot
    if out.gate is not None or out.up is not None:
        rows = gradients.t() @ x
        for target, part in zip((out.gate, out.up), _parts(rows, gated), strict=False):
            if target is not None:
                put_rows_(target, hot, part)
    if out.down is not None:
        put_rows_(out.down, hot, h.t() @ dy)
    if out.gate_bias is not None or out.up_bias is not None:
        for target, part in zip((out.gate_bias, out.up_bias), _parts(gradients.sum(0), gated), strict=False):
            if target is not None:
                target.index_copy_(0, hot, part)


def _parts(rows: Tensor, gated: bool) -> tuple[Tensor, ...]:
    """Gate and up of rows that interleave them."""
    return rows.unflatten(0, (-1, 2)).unbind(1) if gated else (rows,)


def _heavy_tokens(saved: Saved, M: int) -> Tensor:
    """int64, ascending: what is summed over them must not depend on how they came into the list."""
    n_first, n_over = host.receive(saved.heavy, saved.marks[:2]) if M else (0, 0)
    n_over = n_over if n_over > n_long(M) else 0  # else the tail has them
    listed = saved.marks[4 + M : 4 + 2 * M]
    if n_first + n_over == 0:
        return listed[:0]
    return torch.cat([listed[:n_first], listed[M - n_over :]]).long().sort().values


def _add_heavy(
    dx: Tensor | None,
    out: NeuronGradients,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    layout: Layout,
    activation: str,
    token_mask: Tensor | None,
    tokens: Tensor,
) -> None:
    """Add what the cold neurons of heavy tokens give, densely and from x."""
    if len(tokens) == 0:
        return
    rows = slice(None) if layout.order is None else layout.order.cold
    gate, down = w.gate[rows], layout.down[rows]
    up = None if w.up is None else w.up[rows]
    x, dy, mask = x[tokens], dy[tokens], None if token_mask is None else token_mask[tokens]
    z = nnf.linear(x, gate, None if w.gate_bias is None else w.gate_bias[rows])
    u = None if up is None else nnf.linear(x, up, None if w.up_bias is None else w.up_bias[rows])
    dz, du, h = activation_gradients_(z, u, dy @ down.t(), dl1, mask, squared=activation == "relu2")
    if dx is not None:
        part = dz @ gate
        put_rows_(dx, tokens, part if up is None else part.addmm_(du, up), add=True)
    for target, factor, of in ((out.gate, dz, x), (out.up, du, x), (out.down, h, dy)):
        if target is not None and layout.order is None:
            target += factor.t() @ of
        elif target is not None and layout.order is not None:
            put_rows_(target, layout.order.cold, factor.t() @ of, add=True)
    for target, factor in ((out.gate_bias, dz), (out.up_bias, du)):
        if target is not None:
            target[rows] += factor.sum(0)
