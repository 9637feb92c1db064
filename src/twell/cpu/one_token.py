"""One token, as in decoding: in few calls, since beside a 1 ms gate the bookkeeping of a block takes 0.3 ms."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell.cpu import products, rows
from twell.cpu.block import MARGIN, WEIGHT_READ_ROWS, gather_cost
from twell.cpu.frozen import FrozenTensors, down_rows, find_candidates
from twell.reference import Weights, activate, is_finite

MAX_COLUMNS = 1 / 28  # share of the neurons above which a dense product with Wd is faster than gathering columns
_MAX_ROWS = 2 / 3  # the same where Wd holds a neuron as a row
_PATIENCE, _ONE_THREAD, CROWDED = 1e-3, 8e9, 2.0  # s, bytes/s that a thread reads, s until threads are tried again

crowded_until = 0.0  # by time.perf_counter


def in_time(x: Tensor, w: Weights, activation: str, frozen: FrozenTensors | None) -> Tensor:
    """``one_token``; after a call that took far too long, on one thread for a while. Beside busy processes each
    multi-threaded operation may wait a time slice for its other threads, and a token runs a dozen operations. (Other
    threads of the program that run their first operation meanwhile stay on one thread, too.)"""
    global crowded_until
    threads, start = torch.get_num_threads(), time.perf_counter()
    if threads > 1 and start < crowded_until:
        torch.set_num_threads(1)
        try:
            return one_token(x, w, activation, frozen)
        finally:
            torch.set_num_threads(threads)
    y, now = one_token(x, w, activation, frozen), time.perf_counter()
    read = w.gate.nbytes if frozen is None or len(frozen.q_FD) == 0 else frozen.q_FD.nbytes
    if threads > 1 and now - start > _PATIENCE + 2 * read / _ONE_THREAD:
        crowded_until = now + CROWDED
    return y


def one_token(x: Tensor, w: Weights, activation: str, frozen: FrozenTensors | None) -> Tensor:
    """y [1, D]."""
    candidates = None if frozen is None else find_candidates(x, w, frozen)
    if candidates is not None:
        z = _dots(x, w.gate, w.gate_bias, candidates)
        active = z.relu_().nonzero().view(-1)
        return at_neurons(x, w, frozen, candidates.take(active), z.take(active), activation)
    gate = products.linear(x, w.gate, w.gate_bias).relu_()
    col = gate.view(-1).nonzero().view(-1)
    if gather_cost(x.dtype).cost(len(col), len(col)) < MARGIN * gate.shape[1] * (1 + WEIGHT_READ_ROWS):
        r = gate.view(-1).take(col)
        if _is_finite_token(x, r):
            return at_neurons(x, w, frozen, col, r, activation)
    h = activate(gate, activation)
    h = h if w.up is None else h * products.linear(x, w.up, w.up_bias)
    down_FD = down_rows(w.down, frozen)
    if down_FD is not None:
        col = h.view(-1).nonzero().view(-1)  # NaN included
        if len(col) <= _MAX_ROWS * len(down_FD):
            return rows.weighted_sum(down_FD, col, h.view(-1).take(col), w.down_bias)
    return products.linear(h, w.down, w.down_bias)


def _dots(x: Tensor, weight: Tensor, bias: Tensor | None, neurons: Tensor) -> Tensor:
    """x . w + b of one token, for some neurons. A 16-bit bias is added before rounding: both may nearly cancel."""
    chosen = weight.index_select(0, neurons)
    if bias is None:
        return chosen @ x[0]
    if x.element_size() == 2:
        return nnf.linear(x, chosen, bias.take(neurons)).view(-1)
    return (chosen @ x[0]).add_(bias.take(neurons))


def at_neurons(x: Tensor, w: Weights, frozen: FrozenTensors | None, col: Tensor, r: Tensor, activation: str) -> Tensor:
    """y [1, D] of one token whose active neurons are ``col``, with values ``r``."""
    h = activate(r, activation)
    if w.up is not None:
        h = h * _dots(x, w.up, w.up_bias, col)
    down_FD, F = down_rows(w.down, frozen), w.down.shape[1]
    if down_FD is None and len(col) > MAX_COLUMNS * F:
        return products.linear(x.new_zeros(1, F).index_copy_(1, col, h.unsqueeze(0)), w.down, w.down_bias)
    if down_FD is not None:
        return rows.weighted_sum(down_FD, col, h, w.down_bias)
    y = (h @ w.down.detach().t().index_select(0, col)).unsqueeze(0)
    return y if w.down_bias is None else y.add_(w.down_bias)


def _is_finite_token(x: Tensor, active: Tensor) -> bool:
    """``is_finite`` of one token from its active gate values: a single inf or NaN in x leaves no pre-activation finite,
    so one finite active value proves that x is finite."""
    return (len(active) > 0 and math.isfinite(active[0].item())) or is_finite(x)
