"""Many tokens: a block of them at a time, each cut into hot neurons and a tail by what things cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import reference
from twell.cpu import products, rows
from twell.cpu.rows import Entries, columns, list_entries, row_starts
from twell.reference import Weights, activate, is_finite, sum_dtype

# Costs are in units of one element of a large GEMM (one token, one neuron, up and down): 0.046 us in fp32 and
# 0.021 us in bf16 on 2 cores of an AVX-512 machine, where the other costs were measured too.
WEIGHT_READ_ROWS = 18  # a GEMM over m rows costs m + 18: the 18 stand for reading the weights
MIN_WORK = 20e6  # D * F * (M + 18) below which a dense FFN takes less than the bookkeeping, 0.5 ms
_SMALL = 10  # times MIN_WORK: small work, where overheads matter
_DENSE_SHARE = 0.4  # share of active elements above which not even listing them pays
MARGIN = 0.9  # sparse must promise to be 10 % cheaper than dense
MIN_HOT_ROWS = 64  # with fewer tokens a hot neuron's rows are read once either way


class GatherCost(NamedTuple):
    """The cost of a gathered neuron: ``first`` once in a block (rows from memory), and ``each`` per token.

    A neuron that is a column of Wd also costs ``column``, and ``read`` for each neuron of its ``line``: columns are
    read in cache lines, which hold neighbouring columns too.
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


GATHER = GatherCost(first=35.0, each=7.0, column=41.0, read=6.0, line=16)
# GEMMs are faster in bf16, and gathered rows must be widened
GATHER_BF16 = GatherCost(first=70.0, each=20.0, column=81.0, read=7.2, line=32)


def gather_cost(dtype: torch.dtype) -> GatherCost:
    return GATHER_BF16 if dtype == torch.bfloat16 else GATHER


def fewest_tokens(D: int, F: int) -> int:
    """The fewest tokens for which a layer of this size is not left to the dense reference."""
    return max(0, math.ceil(MIN_WORK / max(1, D * F)) - WEIGHT_READ_ROWS)


class BlockSplit(NamedTuple):
    """A block [m, F] cut by cost into hot neurons and tail."""

    tail: Entries
    hot: Tensor  # [H] int64
    down_is_dense: bool  # the down projection runs on a dense h


def cut(gate: Tensor, D: int, by_columns: bool) -> BlockSplit | None:
    """The tail and the hot neurons of a block [m, F]; None if dense is cheapest.

    ``by_columns``: a neuron is a column of Wd, so the down projection alone may be cheaper dense.
    """
    m, F = gate.shape
    gather, dense_neuron = gather_cost(gate.dtype), m + WEIGHT_READ_ROWS
    may_be_hot = m >= MIN_HOT_ROWS
    if D * F * dense_neuron < _SMALL * MIN_WORK:
        # The fixed cost of an element weighs more here, and so does the search for hot neurons.
        gather, may_be_hot = gather._replace(each=gather.each + 2048 / D - 1), False
    share = _active_share(gate)
    if share > _DENSE_SHARE or (not may_be_hot and gather.each * share * m > dense_neuron):
        return None
    tail = list_entries(gate)
    per_neuron = torch.bincount(tail.col, minlength=F)
    n_tail_neurons = int(torch.count_nonzero(per_neuron))
    hot = tail.col[:0]
    if may_be_hot:
        is_hot = gather.first + gather.each * per_neuron > dense_neuron
        is_hot &= per_neuron > 0
        hot = is_hot.nonzero().flatten()
        if len(hot):
            flat = tail.flat[~is_hot.take(tail.col)]
            tail = Entries(flat, flat % F, row_starts(flat, m, F))
            n_tail_neurons -= len(hot)
    cost = len(hot) * dense_neuron + gather.cost(n_tail_neurons, len(tail.flat))
    down_is_dense = False
    if by_columns:
        cost_down_dense = (cost + F * dense_neuron) / 2  # up and down cost the same
        cost += gather.columns(n_tail_neurons + len(hot), F)
        down_is_dense = cost_down_dense < cost
        cost = min(cost, cost_down_dense)
    return None if cost > MARGIN * F * dense_neuron else BlockSplit(tail, hot, down_is_dense)


def _active_share(gate: Tensor) -> float:
    """Share of active elements in a sample of about 8192: counting all of a half-full block takes 3 % of its FFN."""
    flat = gate.reshape(-1)
    sample = flat[:: len(flat) // 8192 | 1]  # an odd step visits all columns of an even F
    return int(torch.count_nonzero(sample)) / max(1, len(sample))


class Block:
    """One block of tokens: computes the gate, then the cheapest way to y, and keeps what the statistics need."""

    def __init__(
        self, x: Tensor, w: Weights, down_FD: Tensor | None, activation: str, token_mask: Tensor | None
    ) -> None:
        self.x, self.w, self.down_FD, self.activation, self.token_mask = x, w, down_FD, activation, token_mask
        self.gate = products.linear(x, w.gate, w.gate_bias).relu_()

    def run(self, y: Tensor, gate_out: Tensor | None, up_out: Tensor | None) -> None:
        """Write the block's y, and r and u if outputs for them are given."""
        if gate_out is not None:
            gate_out.copy_(self.gate)
        # A block that is not finite runs densely, so that 0 * inf = NaN as in a dense FFN.
        self.split = cut(self.gate, self.x.shape[1], self.down_FD is None) if is_finite(self.x) else None
        if self.split is None:
            self._run_dense(y, up_out)
        else:
            self._run_sparse(y, self.split, up_out)

    def _run_dense(self, y: Tensor, up_out: Tensor | None) -> None:
        w = self.w
        self.h = activate(self.gate, self.activation)
        if w.up is not None:
            u = products.linear(self.x, w.up, w.up_bias)
            if up_out is not None:
                up_out.copy_(u)
            self.h = u.mul_(self.h)
        y.copy_(products.linear(self.h, w.down, w.down_bias))

    def _run_sparse(self, y: Tensor, split: BlockSplit, up_out: Tensor | None) -> None:
        w, (tail, hot, down_is_dense) = self.w, split
        h_tail = activate(self.gate.view(-1).take(tail.flat).to(sum_dtype(self.x.dtype)), self.activation)
        if w.up is not None:
            u = rows.sampled_dots(self.x, w.up, tail)
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
            y.copy_(products.linear(h, w.down, w.down_bias))
            return
        rows.weighted_neurons(y, w.down, self.down_FD, tail, self.h_tail)
        if len(hot):
            y.addmm_(self.h_hot, columns(w.down, self.down_FD, hot).t())
        if w.down_bias is not None:
            y += w.down_bias

    def statistics(self) -> tuple[Tensor, Tensor]:
        if self.split is None:
            return reference.statistics(self.gate, self.h, self.token_mask)
        tail, hot, _ = self.split
        hot_l1, hot_counts = reference.statistics(self.gate.index_select(1, hot), self.h_hot, self.token_mask)
        col, tail_l1 = tail.col, self.h_tail.abs()
        if self.token_mask is not None:
            counted = self.token_mask.take(tail.flat // self.gate.shape[1])
            col, tail_l1 = col[counted], tail_l1[counted]
        counts = torch.bincount(col, minlength=self.gate.shape[1]).int()
        counts[hot] += hot_counts
        return hot_l1 + tail_l1.sum(dtype=hot_l1.dtype), counts
