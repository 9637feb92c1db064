"""The backward: dense for hot neurons, at the active elements for the tail."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from twell import reference
from twell.cpu.block import cut
from twell.cpu.frozen import down_rows
from twell.cpu.rows import Entries, columns, sampled_neurons, weighted_rows
from twell.reference import Gradients, Weights, activate, gradient_if, is_finite, slope, sum_dtype

MIN_TRAIN_ROWS = 64  # with fewer tokens the bookkeeping of a sparse backward weighs more


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    r: Tensor,
    u: Tensor | None,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    needs: tuple[bool, ...] = (True,) * 7,
) -> Gradients:
    """The twin of ``reference.backward``."""
    down_FD, split = down_rows(w.down, None), None
    if len(x) >= MIN_TRAIN_ROWS and is_finite(x) and is_finite(dy):
        split = cut(r, x.shape[1], down_FD is None)
    if split is None or split.down_is_dense:
        return reference.backward(dy, dl1, x, w, r, u, activation, token_mask, needs)
    tail, hot, _ = split
    total = tail_backward(dy.contiguous(), dl1, x.contiguous(), w, down_FD, r, u, tail, activation, token_mask, needs)
    if len(hot):
        hot_w = Weights(
            w.gate.index_select(0, hot),
            None if w.up is None else w.up.index_select(0, hot),
            columns(w.down, down_FD, hot),
        )
        hot_u = None if u is None else u.index_select(1, hot)
        hot_needs = (*needs[:6], False)  # down's bias belongs to no neuron
        hot_r = r.index_select(1, hot)
        part = reference.backward(dy, dl1, x, hot_w, hot_r, hot_u, activation, token_mask, hot_needs)
        _add_hot(total, hot, part, needs)
    return total


def _add_hot(total: Gradients, hot: Tensor, part: Gradients, needs: tuple[bool, ...]) -> None:
    """Add the hot neurons' gradients, for which the tail left zeros."""
    if needs[0]:
        total.x.add_(part.x)
    neuron_axis = (0, 0, 1, 0, 0)  # of gate, up, down and the two hidden biases
    for needed, axis, gradient, hot_gradient in zip(needs[1:6], neuron_axis, total.weights, part.weights, strict=False):
        if needed and gradient is not None and hot_gradient is not None:
            gradient.index_copy_(axis, hot, hot_gradient)


def tail_backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    down_FD: Tensor | None,
    r: Tensor,
    u: Tensor | None,
    tail: Entries,
    activation: str,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """Gradients of the tail's E entries.

    Token-major: dh by sampled dots of dy with Wd's rows, dx by weighted rows of Wu and Wg. Neuron-major, after
    one stable sort: dWu, dWg, dWd by weighted rows of x and dy.
    """
    F = r.shape[1]
    flat, col, row_start = tail
    acc = sum_dtype(x.dtype)
    r_E = r.reshape(-1).take(flat).to(acc)
    a_E = activate(r_E, activation)
    u_E = None if u is None else u.reshape(-1).take(flat).to(acc)
    h_E = a_E if u_E is None else a_E * u_E
    dh_E = sampled_neurons(dy, w.down, down_FD, tail)
    row = flat // F
    if dl1 is not None:
        sign = h_E.sign() * dl1.to(acc)
        dh_E += sign if token_mask is None else sign.where(token_mask.take(row), 0)
    dz_E = ((dh_E if u_E is None else dh_E * u_E) * slope(r_E, activation)).to(x.dtype)
    du_E = None if u_E is None else (dh_E * a_E).to(x.dtype)
    h_E = h_E.to(x.dtype)

    order = torch.argsort(col, stable=True)
    token = row[order]
    neuron_start = torch.searchsorted(col[order], torch.arange(F + 1))

    def by_neuron(table: Tensor, weight_E: Tensor) -> Tensor:  # [F, D]
        return weighted_rows(table, token, neuron_start, weight_E[order])

    def per_neuron(weight_E: Tensor) -> Tensor:  # [F]
        return torch.zeros(F, dtype=acc).index_add_(0, col, weight_E.to(acc)).to(x.dtype)

    def dx() -> Tensor:
        gate_part = weighted_rows(w.gate, col, row_start, dz_E)
        if w.up is None or du_E is None:
            return gate_part
        return gate_part + weighted_rows(w.up, col, row_start, du_E)

    when = functools.partial(gradient_if, x)

    return Gradients(
        when(needs[0], dx),
        Weights(
            gate=when(needs[1], lambda: by_neuron(x, dz_E)),
            up=None if du_E is None else when(needs[2], lambda: by_neuron(x, du_E)),
            down=when(needs[3], lambda: by_neuron(dy, h_E).t().contiguous()),
            gate_bias=when(needs[4], lambda: per_neuron(dz_E)),
            up_bias=None if du_E is None else when(needs[5], lambda: per_neuron(du_E)),
            down_bias=when(needs[6], lambda: dy.sum(0)),
        ),
    )
