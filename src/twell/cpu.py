"""Sparse FFN on the CPU, out of PyTorch's own operations; exact, any sparsity, forward and backward.

The gate is a dense GEMM. Its active elements, listed as CSR, then cost one dot product with a row of Wu
(``torch.sparse.sampled_addmm``) and one scaled row of Wd (``embedding_bag``) each. CSR has no capacity, so
nothing can overflow. A block of tokens is cut by cost:

- all dense, where listing and gathering would not pay;
- neurons that fire for many tokens of the block (hot): ``index_select`` of their rows, then GEMM;
- everything else: gathered.

Bytes, fp32, D 2048, F 5632: a dense FFN reads 138 MB of weights, the gate alone 46 MB, an active element
16 KB. So the gate bounds what a sparse layer takes, with one token by its bytes, with many by its FLOPs.
A gathered element costs about as much as 7 elements of a large GEMM (2 cores, AVX-512).

The weights are read as they are at the call; nothing made of them outlives it. Wd [D, F] holds a neuron as a row
where it is neuron-major (``w.t()`` is contiguous). Where it is not, the columns in use are gathered in slices of
Wd, or h is put back into a dense block. ``freeze`` makes what is read faster, for weights that stay as they
are: Wd neuron-major, and for one fp32 token an int8 gate of 11.5 MB that rules most neurons out.

Blocks are small enough for the allocator to reuse their buffers: fresh pages for [M, F] intermediates are
a good part of what a dense FFN of 2048 tokens pays. Legend: m rows of a block, D, F as everywhere.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import int8, reference
from twell.reference import (
    Forward,
    Gradients,
    Weights,
    activate,
    gradient_if,
    has_silent_nan,
    is_finite,
    is_neuron_major,
    no_statistics,
    slope,
    sum_dtype,
)


# Costs in units of one element of a large GEMM (one token, one neuron, up and down): 0.046 us in fp32 and
# 0.021 us in bf16 on 2 cores of an AVX-512 machine, where the other costs were measured too.
class _Gather(NamedTuple):
    """A gathered neuron: what its first token in a block pays (rows from memory), and what every token pays.

    Where a neuron is a column of Wd, it also pays ``column``, and ``read`` for each neuron of its ``line``: a column
    is read in cache lines that hold its neighbours too.
    """

    first: float
    each: float
    column: float
    read: float
    line: int

    def cost(self, n_neurons: int, n_elements: int) -> float:
        return self.first * n_neurons + self.each * n_elements

    def columns(self, n_neurons: int, F: int) -> float:
        return self.column * n_neurons + self.read * min(F, n_neurons * self.line)


_GATHER = _Gather(first=35.0, each=7.0, column=41.0, read=6.0, line=16)
# GEMMs are faster, and gathered rows must be widened
_GATHER_BF16 = _Gather(first=70.0, each=20.0, column=81.0, read=7.2, line=32)
_WEIGHT_READ_ROWS = 18  # a GEMM over m rows costs m + 18: the 18 stand for reading the weights
_MIN_WORK = 20e6  # D * F * (M + 18) below which a dense FFN takes less than the bookkeeping, 0.5 ms
_SMALL = 10  # times _MIN_WORK: small work, where overheads are seen
_DENSE_SHARE = 0.4  # above this share of active elements not even listing them pays
_MARGIN = 0.9  # sparse must promise to be 10 % cheaper than dense

_BLOCK_BYTES = 24 << 20  # of a [m, F] buffer; malloc keeps freed buffers up to 32 MiB
_PARTS = 8  # of a weight, see _linear_in_parts, and of a long sum, see _weighted_sum
_LONG_SUM = 256  # rows
_MIN_HOT_ROWS = 64  # with fewer tokens a hot neuron's rows are read once either way
_MIN_INT8_GATE = 8 << 20  # elements of a gate below which its int8 copy does not pay
_MAX_CANDIDATES = 1 / 16  # share of the neurons above which reading all of the gate is faster than their rows
_FIRST_LOOK = 16  # a sixteenth of the neurons tells whether there are too many
_MAX_COLUMNS = 1 / 28  # of the neurons, for one token: a dense product with Wd is faster than more columns of it
_MAX_ROWS = 2 / 3  # of the neurons, for one token: the same where Wd holds a neuron as a row
_PATIENCE, _ONE_THREAD, _CROWDED = 1e-3, 8e9, 2.0  # s, bytes/s that a thread reads, s until threads are tried again
_SLICE = 512  # rows of Wd whose columns are gathered at once: they stay in the cache, and need no fresh pages
_MIN_TRAIN_ROWS = 64  # below, the bookkeeping of a sparse backward weighs more


class _Entries(NamedTuple):
    """Active elements of a block [m, F], row-major."""

    flat: Tensor  # [nnz] int64: row * F + col
    col: Tensor  # [nnz] int64
    row_start: Tensor  # [m + 1] int64


class _Parts(NamedTuple):
    """A block [m, F] cut by cost."""

    tail: _Entries
    hot: Tensor  # [H] int64
    down_is_dense: bool  # h goes back into a dense block


class _Frozen(NamedTuple):
    """What ``freeze`` makes. Each is an empty tensor where there is none."""

    down_FD: Tensor  # Wd neuron-major; none where Wd itself is
    q_FD: Tensor  # the int8 gate, see ``_Int8Gate``; all three or none
    per_reach_F: Tensor
    per_unit_F: Tensor


def freeze(w: Weights) -> tuple[Tensor, ...]:
    """What ``forward`` reads faster than the weights, for as long as they stay as they are; () if nothing.

    Copies only, in the order of ``_Frozen``: made again, they have the same shapes unless the gate has become one that
    no int8 gate can stand for, or has ceased to be.
    """
    none = w.down.new_empty(0)
    down_FD = none if is_neuron_major(w.down) else w.down.detach().t().contiguous()
    gate = _int8_gate(w.gate.detach())
    frozen = _Frozen(down_FD, *((none, none, none) if gate is None else gate))
    return tuple(frozen) if any(t.numel() for t in frozen) else ()


def fewest_tokens(D: int, F: int) -> int:
    """From how many on a layer of this size is not computed densely right away."""
    return max(0, math.ceil(_MIN_WORK / max(1, D * F)) - _WEIGHT_READ_ROWS)


def forward(
    x: Tensor,
    w: Weights,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    *,
    want_stats: bool = True,
    save: bool = False,
    frozen: Sequence[Tensor] = (),
) -> Forward:
    """Gated or plain FFN of x [M, D] with its statistics; the twin of ``reference.forward``.

    ``save`` also returns the activations the backward needs (u only where r is active, zero elsewhere).
    ``frozen`` is what ``freeze`` made of these weights; with ``save`` it is not read.
    """
    (M, D), F = x.shape, w.gate.shape[0]
    if fewest_tokens(D, F) > M:
        return reference.forward(x, w, activation, token_mask, want_stats=want_stats)
    result = _forward(x, w, activation, token_mask, want_stats, save, frozen)
    if has_silent_nan(x, result.y):  # of a weight: the dense parts take in neurons that are not active
        return reference.forward(x, w, activation, token_mask, want_stats=want_stats)
    return result


def _forward(
    x: Tensor,
    w: Weights,
    activation: str,
    token_mask: Tensor | None,
    want_stats: bool,
    save: bool,
    frozen: Sequence[Tensor],
) -> Forward:
    (M, _), F = x.shape, w.gate.shape[0]
    state = _Frozen(*frozen) if frozen and not save else None
    if M == 1 and not want_stats and not save:
        return Forward(_in_time(x, w, activation, state), *no_statistics(x), x.new_empty(0, F), None)
    down_FD = _down_rows(w.down, state)
    y = x.new_empty(M, w.down.shape[0])
    l1_sum, counts = no_statistics(x)
    if want_stats:
        counts = torch.zeros(F, dtype=torch.int32)
    gate = x.new_empty(M if save else 0, F)
    up = None if w.up is None else torch.zeros_like(gate)

    n_blocks = -(-M * F * x.element_size() // _BLOCK_BYTES)
    step = max(1, -(-M // max(1, n_blocks)))
    for start in range(0, M, step):
        rows = slice(start, start + step)
        block = _Block(x[rows], w, down_FD, activation, None if token_mask is None else token_mask[rows])
        block.run(y[rows], gate[rows] if save else None, up[rows] if save and up is not None else None)
        if want_stats:
            block_l1, block_counts = block.statistics()
            l1_sum += block_l1
            counts += block_counts
    return Forward(y, l1_sum, counts, gate, up)


_crowded_until = 0.0  # by the clock


def _in_time(x: Tensor, w: Weights, activation: str, frozen: _Frozen | None) -> Tensor:
    """``_one_token``, and for a while on one thread where that takes far too long: beside busy processes each operation
    that is divided may wait for a time slice until its other threads get to run, and a token has a dozen of them.
    (A thread of the program that runs its very first operation meanwhile keeps to one thread, too.)"""
    global _crowded_until
    threads, start = torch.get_num_threads(), time.perf_counter()
    if threads > 1 and start < _crowded_until:
        torch.set_num_threads(1)
        try:
            return _one_token(x, w, activation, frozen)
        finally:
            torch.set_num_threads(threads)
    y, now = _one_token(x, w, activation, frozen), time.perf_counter()
    read = w.gate.nbytes if frozen is None or len(frozen.q_FD) == 0 else frozen.q_FD.nbytes
    if threads > 1 and now - start > _PATIENCE + 2 * read / _ONE_THREAD:
        _crowded_until = now + _CROWDED
    return y


def _one_token(x: Tensor, w: Weights, activation: str, frozen: _Frozen | None) -> Tensor:
    """y [1, D] for decoding, in few calls: beside a 1 ms gate, the block's bookkeeping takes 0.3 ms."""
    candidates = None if frozen is None else _candidates(x, w, frozen)
    if candidates is not None:
        z = _dots(x, w.gate, w.gate_bias, candidates)
        active = z.relu_().nonzero().view(-1)
        return _at_neurons(x, w, frozen, candidates.take(active), z.take(active), activation)
    gate = _linear(x, w.gate, w.gate_bias).relu_()
    col = gate.view(-1).nonzero().view(-1)
    if _gather(x.dtype).cost(len(col), len(col)) < _MARGIN * gate.shape[1] * (1 + _WEIGHT_READ_ROWS):
        r = gate.view(-1).take(col)
        if _is_finite_token(x, r):
            return _at_neurons(x, w, frozen, col, r, activation)
    h = activate(gate, activation)
    h = h if w.up is None else h * _linear(x, w.up, w.up_bias)
    down_FD = _down_rows(w.down, frozen)
    if down_FD is not None:
        col = h.view(-1).nonzero().view(-1)  # NaN included
        if len(col) <= _MAX_ROWS * len(down_FD):
            return _weighted_sum(down_FD, col, h.view(-1).take(col), w.down_bias)
    return _linear(h, w.down, w.down_bias)


def _dots(x: Tensor, weight: Tensor, bias: Tensor | None, neurons: Tensor) -> Tensor:
    """x . w + b of one token, for some neurons. Not rounded before a 16-bit bias is added: they may nearly cancel."""
    rows = weight.index_select(0, neurons)
    if bias is None:
        return rows @ x[0]
    if x.element_size() == 2:
        return nnf.linear(x, rows, bias.take(neurons)).view(-1)
    return (rows @ x[0]).add_(bias.take(neurons))


def _at_neurons(x: Tensor, w: Weights, frozen: _Frozen | None, col: Tensor, r: Tensor, activation: str) -> Tensor:
    """y [1, D] of one token whose active neurons are ``col``, with values ``r``."""
    h = activate(r, activation)
    if w.up is not None:
        h = h * _dots(x, w.up, w.up_bias, col)
    down_FD, F = _down_rows(w.down, frozen), w.down.shape[1]
    if down_FD is None and len(col) > _MAX_COLUMNS * F:
        return _linear(x.new_zeros(1, F).index_copy_(1, col, h.unsqueeze(0)), w.down, w.down_bias)
    if down_FD is not None:
        return _weighted_sum(down_FD, col, h, w.down_bias)
    y = (h @ w.down.detach().t().index_select(0, col)).unsqueeze(0)
    return y if w.down_bias is None else y.add_(w.down_bias)


# ---------------------------------------------------------------------------------------------------------
# One token: ruling neurons out by an int8 copy of the gate
# ---------------------------------------------------------------------------------------------------------

_U_BF16 = 2.0**-8  # half the distance of neighbours in bf16, relative
_INT8_WIDTH = 32  # D must be a multiple: _weight_int8pack_mm reads past rows of other widths
_CHUNK_ROWS = 64  # of a weight quantised at once: stays in the L2 cache


class _Int8Gate(NamedTuple):
    """A gate [F, D] as int8 rows q, w = s (q + e), and how far x . q may be from x . w / s, as a multiple of |x|.

    With xb, x rounded to bf16, |xb - x| <= 2^-8 |x|, so, by Cauchy and Schwarz,

        |x . w / s - xb . q| = |x . e + (x - xb) . q| <= |x| (|e| + 2^-8 |q|) =: |x| reach

    to which come the roundings of fp32 sums of D products, in any order, there and in the dense layer. So a neuron
    whose xb . q / reach is at most -|x| cannot fire. The others are candidates: their fp32 rows decide. (Rows of
    zeros always are; their reach stands at 1.)
    """

    q_FD: Tensor  # int8
    per_reach_F: Tensor  # bf16: 1 / reach
    per_unit_F: Tensor  # fp32: 1 / (s reach), which brings a bias to the same scale


def _margin(D: int) -> float:
    """Relative: what the roundings of ``_Int8Gate``'s factors, and of the sum to bf16, can do."""
    return 4 * _U_BF16 + 2 * int8.roundings(D)


def _candidates(x: Tensor, w: Weights, frozen: _Frozen) -> Tensor | None:
    """The neurons that may be active for one token, ascending, or None where all of the gate has to be read."""
    F = len(frozen.q_FD)
    if F == 0 or x.dtype != torch.float32:  # autocast
        return None
    norm = torch.linalg.vector_norm(x).item()
    if not int8.RANGE[0] <= norm <= int8.RANGE[1]:  # NaN is in no range
        return None
    n_first, margin, x_bf16 = F // _FIRST_LOOK, _margin(x.shape[1]), x.to(torch.bfloat16)
    least: Tensor | float = -norm * (1 + margin)  # a neuron fires only if its sum is larger
    least_first = least
    if w.gate_bias is not None:
        least = least - w.gate_bias * frozen.per_unit_F
        least = least.sub_(least.abs(), alpha=margin).nan_to_num_(-math.inf)  # a bias may be anything
        least_first = least[:n_first]
    first = torch._weight_int8pack_mm(x_bf16, frozen.q_FD[:n_first], frozen.per_reach_F[:n_first])
    if len((first > least_first).nonzero()) > _MAX_CANDIDATES * n_first:
        return None
    rest = torch._weight_int8pack_mm(x_bf16, frozen.q_FD[n_first:], frozen.per_reach_F[n_first:])
    candidates = (torch.cat((first, rest), 1).view(-1) > least).nonzero().view(-1)
    return candidates if len(candidates) <= _MAX_CANDIDATES * F else None


def _int8_gate(w_gate: Tensor) -> _Int8Gate | None:
    """None where it would not pay, and for weights that are not finite, or too large or small for the bound."""
    D = w_gate.shape[1]
    pays = w_gate.dtype == torch.float32 and w_gate.numel() >= _MIN_INT8_GATE and _blas_habits().int8_gate
    if not pays or not w_gate.is_contiguous() or D % _INT8_WIDTH:
        return None
    rows = int8.quantise_rows(w_gate, _CHUNK_ROWS)
    if rows is None:
        return None
    rounding = int8.roundings(D)
    reach_F = (rows.e_norm + rows.q_norm * (_U_BF16 + rounding)) * (1 + rounding)
    reach_F.masked_fill_(rows.is_zero, 1)
    return _Int8Gate(rows.q, reach_F.reciprocal().to(torch.bfloat16), rows.per_s / reach_F)


# ---------------------------------------------------------------------------------------------------------
# Many tokens
# ---------------------------------------------------------------------------------------------------------


class _Block:
    """One block of tokens: compute the gate, choose the cheapest way on, and keep what the statistics need."""

    def __init__(
        self, x: Tensor, w: Weights, down_FD: Tensor | None, activation: str, token_mask: Tensor | None
    ) -> None:
        self.x, self.w, self.down_FD, self.activation, self.token_mask = x, w, down_FD, activation, token_mask
        self.gate = _linear(x, w.gate, w.gate_bias).relu_()

    def run(self, y: Tensor, gate_out: Tensor | None, up_out: Tensor | None) -> None:
        """Write the block's y, and r and u where asked for."""
        if gate_out is not None:
            gate_out.copy_(self.gate)
        # A block that is not finite runs densely, so that 0 * inf = NaN as in a dense FFN.
        self.parts = _cut(self.gate, self.x.shape[1], self.down_FD is None) if is_finite(self.x) else None
        if self.parts is None:
            self._run_dense(y, up_out)
        else:
            self._run_sparse(y, self.parts, up_out)

    def _run_dense(self, y: Tensor, up_out: Tensor | None) -> None:
        w = self.w
        self.h = activate(self.gate, self.activation)
        if w.up is not None:
            u = _linear(self.x, w.up, w.up_bias)
            if up_out is not None:
                up_out.copy_(u)
            self.h = u.mul_(self.h)
        y.copy_(_linear(self.h, w.down, w.down_bias))

    def _run_sparse(self, y: Tensor, parts: _Parts, up_out: Tensor | None) -> None:
        w, (tail, hot, down_is_dense) = self.w, parts
        h_tail = activate(self.gate.view(-1).take(tail.flat).to(sum_dtype(self.x.dtype)), self.activation)
        if w.up is not None:
            u = _sampled_dots(self.x, w.up, tail)
            if w.up_bias is not None:
                u += w.up_bias.take(tail.col)
            if up_out is not None:
                up_out.view(-1)[tail.flat] = u.to(up_out.dtype)
            h_tail *= u
        self.h_tail = h_tail.to(self.x.dtype)

        self.h_hot = activate(self.gate.index_select(1, hot), self.activation)
        if w.up is not None and len(hot):
            bias = None if w.up_bias is None else w.up_bias[hot]
            u = nnf.linear(self.x, w.up.index_select(0, hot), bias)
            if up_out is not None:
                up_out.index_copy_(1, hot, u)
            self.h_hot = u.mul_(self.h_hot)

        if down_is_dense:
            h = torch.zeros_like(self.gate)
            h.view(-1)[tail.flat] = self.h_tail
            h.index_copy_(1, hot, self.h_hot)
            y.copy_(_linear(h, w.down, w.down_bias))
            return
        _weighted_neurons(y, w.down, self.down_FD, tail, self.h_tail)
        if len(hot):
            y.addmm_(self.h_hot, _columns(w.down, self.down_FD, hot).t())
        if w.down_bias is not None:
            y += w.down_bias

    def statistics(self) -> tuple[Tensor, Tensor]:
        if self.parts is None:
            return reference.statistics(self.gate, self.h, self.token_mask)
        tail, hot, _ = self.parts
        hot_l1, hot_counts = reference.statistics(self.gate.index_select(1, hot), self.h_hot, self.token_mask)
        col, tail_l1 = tail.col, self.h_tail.abs()
        if self.token_mask is not None:
            counted = self.token_mask.take(tail.flat // self.gate.shape[1])
            col, tail_l1 = col[counted], tail_l1[counted]
        counts = torch.bincount(col, minlength=self.gate.shape[1]).int()
        counts[hot] += hot_counts
        return hot_l1 + tail_l1.sum(dtype=hot_l1.dtype), counts


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
    """The twin of ``reference.backward``: dense for hot neurons, at the active elements for the tail."""
    down_FD, parts = _down_rows(w.down, None), None
    if len(x) >= _MIN_TRAIN_ROWS and is_finite(x) and is_finite(dy):
        parts = _cut(r, x.shape[1], down_FD is None)
    if parts is None or parts.down_is_dense:
        return reference.backward(dy, dl1, x, w, r, u, activation, token_mask, needs)
    tail, hot, _ = parts
    total = _tail_backward(dy.contiguous(), dl1, x.contiguous(), w, down_FD, r, u, tail, activation, token_mask, needs)
    if len(hot):
        hot_w = Weights(
            w.gate.index_select(0, hot),
            None if w.up is None else w.up.index_select(0, hot),
            _columns(w.down, down_FD, hot),
        )
        hot_u = None if u is None else u.index_select(1, hot)
        hot_needs = (*needs[:6], False)  # the bias of the output is no neuron's
        hot_r = r.index_select(1, hot)
        part = reference.backward(dy, dl1, x, hot_w, hot_r, hot_u, activation, token_mask, hot_needs)
        _add_hot(total, hot, part, needs)
    return total


def _add_hot(total: Gradients, hot: Tensor, part: Gradients, needs: tuple[bool, ...]) -> None:
    """Put the hot neurons' gradients where the tail left zeros."""
    if needs[0]:
        total.x.add_(part.x)
    neuron_axis = (0, 0, 1, 0, 0)  # of gate, up, down and the two hidden biases
    for needed, axis, gradient, hot_gradient in zip(needs[1:6], neuron_axis, total.weights, part.weights, strict=False):
        if needed and gradient is not None and hot_gradient is not None:
            gradient.index_copy_(axis, hot, hot_gradient)


def _tail_backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    down_FD: Tensor | None,
    r: Tensor,
    u: Tensor | None,
    tail: _Entries,
    activation: str,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """The gradients the tail's entries give, E of them.

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
    dh_E = _sampled_neurons(dy, w.down, down_FD, tail)
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
        return _weighted_rows(table, token, neuron_start, weight_E[order])

    def per_neuron(weight_E: Tensor) -> Tensor:  # [F]
        return torch.zeros(F, dtype=acc).index_add_(0, col, weight_E.to(acc)).to(x.dtype)

    def dx() -> Tensor:
        gate_part = _weighted_rows(w.gate, col, row_start, dz_E)
        if w.up is None or du_E is None:
            return gate_part
        return gate_part + _weighted_rows(w.up, col, row_start, du_E)

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


# ---------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------


def _is_finite_token(x: Tensor, active: Tensor) -> bool:
    """``is_finite`` of one token, from its active gate values: a single inf or NaN in x leaves no pre-activation
    finite, so one finite active value vouches for all of x."""
    return (len(active) > 0 and math.isfinite(active[0].item())) or is_finite(x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, contiguous; with few rows by the way that is fastest on this vendor's CPUs."""
    habits, y, lies_by_row = _blas_habits(), None, weight.is_contiguous()
    if x.dtype in (torch.float32, torch.float64):
        in_parts = len(x) in habits.rows_in_parts and not any(n % _PARTS for n in weight.shape)
        if in_parts and (lies_by_row or is_neuron_major(weight)) and torch.get_num_threads() > 1:
            y = _linear_in_parts(x, weight) if lies_by_row else _linear_in_parts_by_column(x, weight)
        elif not lies_by_row:
            pass  # the ways below take 20 to 100 times as long
        elif len(x) == 1 and habits.slow_matvec:
            _silence_csr_beta_warning()
            column = _full_column(len(weight), x.dtype)
            y = torch.sparse.sampled_addmm(column, weight, x.t(), beta=0.0).values().view(1, -1)
        elif len(x) in habits.transposed_rows:
            y = torch.mm(weight, x.t()).t().contiguous()
    elif (
        x.dtype == torch.bfloat16
        and bias is None  # which, added to a rounded sum, would be one rounding more
        and len(x) in habits.transposed_bf16_rows
        and lies_by_row
        and weight.shape[1] > weight.shape[0]
    ):
        y = torch.mm(weight, x.t()).t().contiguous()
    if y is None:
        return nnf.linear(x, weight, bias)
    return y if bias is None else y.add_(bias)


def _linear_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T as a batch of products, each with a part of W's rows, among which MKL divides its threads well."""
    (m, D), F = x.shape, len(weight)
    parts = weight.view(_PARTS, F // _PARTS, D)
    if m < 4:
        return torch.bmm(parts, x.t().expand(_PARTS, D, m)).view(F, m).t().contiguous()
    return torch.bmm(x.expand(_PARTS, m, D), parts.transpose(1, 2)).transpose(0, 1).reshape(m, F)


def _linear_in_parts_by_column(x: Tensor, weight: Tensor) -> Tensor:
    """The same for a W that lies column by column: with few rows of x each product takes a part of W's columns."""
    m, (D, F) = len(x), weight.shape
    if m < 4:
        return torch.bmm(x.view(m, _PARTS, -1).transpose(0, 1), weight.t().view(_PARTS, -1, D)).sum(0)
    parts = weight.t().view(F, _PARTS, -1).transpose(0, 1)
    return torch.bmm(x.expand(_PARTS, m, F), parts).transpose(0, 1).reshape(m, D)


class _BlasHabits(NamedTuple):
    """Where the plain x W^T of MKL (fp32) and oneDNN (bf16) is not the fastest product; W 5632 x 2048, ms."""

    slow_matvec: bool = False  # one row: sampled_addmm over all of W is faster
    transposed_rows: Container[int] = range(0)  # these many rows: (W x^T)^T is faster
    transposed_bf16_rows: Container[int] = range(0)  # the same in bf16, for W wider than high
    rows_in_parts: Container[int] = range(0)  # these many rows: parts of W are faster, with several threads
    int8_gate: bool = False  # one row: an int8 W is read faster, by _weight_int8pack_mm


@functools.cache
def _blas_habits() -> _BlasHabits:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            cpuinfo = f.read(4096)
    except OSError:
        return _BlasHabits()
    if "AuthenticAMD" in cpuinfo:
        # 1 thread: 1 row 2.7 against 2.3; transposed 2 rows 5.7 against 3.7, but 8 rows 7.6 against 9.6.
        # 2 threads, in parts: 1 row 2.9 against 1.6, 4 rows 6.5 against 2.6, 16 rows 8.2 against 4.1, 128 rows 25
        # against 17; W by columns 1 row 2.3 against 1.2, 4 rows 6.3 against 2.9, 64 rows 11.4 against 9.7.
        # bf16, W 2048 x 5632, transposed: 16 rows 2.0 against 1.3, 64 rows 4.5 against 3.8.
        # int8, 1 row: 0.6; with 1 thread 1.2.
        return _BlasHabits(
            slow_matvec=True,
            transposed_rows=frozenset((2, 3, *range(32, 65))),
            transposed_bf16_rows=range(8, 65),
            rows_in_parts=range(1, 129),
            int8_gate=hasattr(torch, "_weight_int8pack_mm") and torch.backends.cpu.get_cpu_capability() == "AVX512",
        )
    if "GenuineIntel" in cpuinfo:  # 2 threads: 16 rows 3.8 against 2.6; 16 threads: 1.9 against 0.6
        return _BlasHabits(transposed_rows=range(8, 33))
    return _BlasHabits()


@functools.lru_cache(maxsize=16)
def _full_column(n: int, dtype: torch.dtype) -> Tensor:
    """CSR pattern [n, 1] with every element present."""
    zeros = torch.zeros(n, dtype=torch.int64)
    return torch.sparse_csr_tensor(torch.arange(n + 1), zeros, zeros.to(dtype), (n, 1), check_invariants=False)


def _cut(gate: Tensor, D: int, by_columns: bool) -> _Parts | None:
    """The cold tail and the hot neurons of a block [m, F], or None where dense is cheapest.

    ``by_columns``: a neuron is a column of Wd, so that the down projection alone may be cheaper densely.
    """
    m, F = gate.shape
    gather, dense_neuron = _gather(gate.dtype), m + _WEIGHT_READ_ROWS
    may_be_hot = m >= _MIN_HOT_ROWS
    if D * F * dense_neuron < _SMALL * _MIN_WORK:
        # What an element costs besides its D products weighs more, and so does another look for hot neurons.
        gather, may_be_hot = gather._replace(each=gather.each + 2048 / D - 1), False
    share = _active_share(gate)
    if share > _DENSE_SHARE or (not may_be_hot and gather.each * share * m > dense_neuron):
        return None
    tail = _list_entries(gate)
    per_neuron = torch.bincount(tail.col, minlength=F)
    n_tail_neurons = int(torch.count_nonzero(per_neuron))
    hot = tail.col[:0]
    if may_be_hot:
        is_hot = gather.first + gather.each * per_neuron > dense_neuron
        is_hot &= per_neuron > 0
        hot = is_hot.nonzero().flatten()
        if len(hot):
            flat = tail.flat[~is_hot.take(tail.col)]
            tail = _Entries(flat, flat % F, _row_starts(flat, m, F))
            n_tail_neurons -= len(hot)
    cost = len(hot) * dense_neuron + gather.cost(n_tail_neurons, len(tail.flat))
    down_is_dense = False
    if by_columns:
        cost_down_dense = (cost + F * dense_neuron) / 2  # up and down share alike
        cost += gather.columns(n_tail_neurons + len(hot), F)
        down_is_dense = cost_down_dense < cost
        cost = min(cost, cost_down_dense)
    return None if cost > _MARGIN * F * dense_neuron else _Parts(tail, hot, down_is_dense)


def _active_share(gate: Tensor) -> float:
    """Share of active elements in a sample of about 8192: counting a half-full block takes 3 % of its FFN."""
    flat = gate.reshape(-1)
    sample = flat[:: len(flat) // 8192 | 1]  # an odd step visits all columns of an even F
    return int(torch.count_nonzero(sample)) / max(1, len(sample))


def _gather(dtype: torch.dtype) -> _Gather:
    return _GATHER_BF16 if dtype == torch.bfloat16 else _GATHER


def _list_entries(r: Tensor) -> _Entries:
    m, F = r.shape
    flat = r.reshape(-1).nonzero().flatten()
    return _Entries(flat, flat % F, _row_starts(flat, m, F))


def _row_starts(flat: Tensor, m: int, F: int) -> Tensor:
    return torch.searchsorted(flat, torch.arange(m + 1) * F)


def _sampled_dots(a: Tensor, table_FD: Tensor, entries: _Entries) -> Tensor:
    """a[row] . table[col] for each entry, in the accumulation dtype of ``a``."""
    _, col, row_start = entries
    acc = sum_dtype(a.dtype)
    if acc != a.dtype:  # sampled_addmm has no 16-bit form: widen only the rows that are used
        used, col = _used(col, len(table_FD))
        a, table_FD = a.to(acc), table_FD.index_select(0, used).to(acc)
    if len(col) == 0:
        return a.new_zeros(0)
    _silence_csr_beta_warning()
    where = torch.sparse_csr_tensor(
        row_start, col, a.new_zeros(len(col)), (len(a), len(table_FD)), check_invariants=False
    )
    # beta=0 still adds 0 * value: hence the zeros above
    return torch.sparse.sampled_addmm(where, a.contiguous(), table_FD.t(), beta=0.0).values()


def _weighted_rows(table: Tensor, index: Tensor, start: Tensor, weight: Tensor) -> Tensor:
    """Row i of the result: the sum over e in start[i]..start[i+1] of weight[e] * table[index[e]]."""
    return nnf.embedding_bag(index, table, start, mode="sum", per_sample_weights=weight, include_last_offset=True)


def _weighted_sum(table: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[1, D]: the sum of weight[e] * table[index[e]], plus the bias; a long one in parts, for the threads."""
    n_parts = _PARTS if len(index) > _LONG_SUM else 1
    start = torch.arange(n_parts + 1) * len(index) // n_parts
    y = _weighted_rows(table, index, start, weight)
    y = y if n_parts == 1 else y.sum(0, keepdim=True)
    return y if bias is None else y.add_(bias)


def _used(col: Tensor, F: int) -> tuple[Tensor, Tensor]:
    """The neurons among ``col``, ascending, and the place of each entry's neuron there."""
    is_used = torch.zeros(F, dtype=torch.bool).index_fill_(0, col, True)
    return is_used.nonzero().flatten(), (is_used.cumsum(0) - 1).take(col)


def _down_rows(w_down: Tensor, frozen: _Frozen | None) -> Tensor | None:
    """Wd [D, F] as contiguous [F, D], or None where that would take a copy."""
    if is_neuron_major(w_down):
        return w_down.detach().t()
    if frozen is None or frozen.down_FD.numel() == 0 or frozen.down_FD.dtype != w_down.dtype:  # autocast
        return None
    return frozen.down_FD


def _columns(w_down: Tensor, down_FD: Tensor | None, neurons: Tensor) -> Tensor:
    """Wd [D, n] of these neurons."""
    if down_FD is not None:
        return down_FD.index_select(0, neurons).t()
    return w_down.detach().gather(1, neurons.expand(len(w_down), -1))  # faster than index_select


def _weighted_neurons(y: Tensor, w_down: Tensor, down_FD: Tensor | None, entries: _Entries, weight: Tensor) -> None:
    """y[row] = the sum over the row's entries of weight * Wd[:, col]."""
    _, col, row_start = entries
    if down_FD is not None:
        y.copy_(_weighted_rows(down_FD, col, row_start, weight))
        return
    used, place = _used(col, w_down.shape[1])
    for part, out in zip(w_down.detach().split(_SLICE), y.split(_SLICE, 1), strict=True):
        out.copy_(_weighted_rows(part.t()[used], place, row_start, weight))


def _sampled_neurons(a: Tensor, w_down: Tensor, down_FD: Tensor | None, entries: _Entries) -> Tensor:
    """a[row] . Wd[:, col] for each entry, in the accumulation dtype of ``a``."""
    if down_FD is not None:
        return _sampled_dots(a, down_FD, entries)
    used, place = _used(entries.col, w_down.shape[1])
    dots = torch.zeros(len(place), dtype=sum_dtype(a.dtype))
    for part, a_part in zip(w_down.detach().split(_SLICE), a.split(_SLICE, 1), strict=True):
        dots += _sampled_dots(a_part, part.t()[used], entries._replace(col=place))
    return dots


@functools.cache
def _silence_csr_beta_warning() -> None:
    """torch warns once per process that CSR is in beta; users of this package need not read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int64), torch.zeros(0), (1, 1))
