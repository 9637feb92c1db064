"""Dot products with single rows of a weight, and sums of them, at the active elements of a block.

``down_FD`` is Wd with a neuron as a row. If it is None, neurons are columns of Wd, gathered from slices of Wd."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell.cpu.products import PIECES, silence_csr_beta_warning
from twell.reference import sum_dtype

LONG_SUM = 256  # rows above which a sum is cut into pieces for the threads
SLICE = 512  # rows of Wd whose columns are gathered at once: they stay in the cache, and need no fresh pages


class Entries(NamedTuple):
    """Active elements of a block [m, F], row-major."""

    flat: Tensor  # [nnz] int64: row * F + col
    col: Tensor  # [nnz] int64
    row_start: Tensor  # [m + 1] int64


def list_entries(r: Tensor) -> Entries:
    m, F = r.shape
    flat = r.reshape(-1).nonzero().flatten()
    return Entries(flat, flat % F, row_starts(flat, m, F))


def row_starts(flat: Tensor, m: int, F: int) -> Tensor:
    return torch.searchsorted(flat, torch.arange(m + 1) * F)


def columns(w_down: Tensor, down_FD: Tensor | None, neurons: Tensor) -> Tensor:
    """The columns [D, n] of Wd of these neurons."""
    if down_FD is not None:
        return down_FD.index_select(0, neurons).t()
    return w_down.detach().gather(1, neurons.expand(len(w_down), -1))  # faster than index_select


def _used(col: Tensor, F: int) -> tuple[Tensor, Tensor]:
    """The distinct neurons in ``col``, ascending, and for each entry the index of its neuron among them."""
    is_used = torch.zeros(F, dtype=torch.bool).index_fill_(0, col, True)
    return is_used.nonzero().flatten(), (is_used.cumsum(0) - 1).take(col)


def sampled_dots(a: Tensor, table_FD: Tensor, entries: Entries) -> Tensor:
    """a[row] . table[col] for each entry, in the accumulation dtype of ``a``."""
    _, col, row_start = entries
    acc = sum_dtype(a.dtype)
    if acc != a.dtype:  # sampled_addmm has no 16-bit form: widen only the rows that are used
        used, col = _used(col, len(table_FD))
        a, table_FD = a.to(acc), table_FD.index_select(0, used).to(acc)
    if len(col) == 0:
        return a.new_zeros(0)
    silence_csr_beta_warning()
    where = torch.sparse_csr_tensor(
        row_start, col, a.new_zeros(len(col)), (len(a), len(table_FD)), check_invariants=False
    )
    # beta=0 still adds 0 * value: hence the zeros above
    return torch.sparse.sampled_addmm(where, a.contiguous(), table_FD.t(), beta=0.0).values()


def sampled_neurons(a: Tensor, w_down: Tensor, down_FD: Tensor | None, entries: Entries) -> Tensor:
    """a[row] . Wd[:, col] for each entry, in the accumulation dtype of ``a``."""
    if down_FD is not None:
        return sampled_dots(a, down_FD, entries)
    used, place = _used(entries.col, w_down.shape[1])
    dots = torch.zeros(len(place), dtype=sum_dtype(a.dtype))
    for piece, a_piece in zip(w_down.detach().split(SLICE), a.split(SLICE, 1), strict=True):
        dots += sampled_dots(a_piece, piece.t()[used], entries._replace(col=place))
    return dots


def weighted_rows(table: Tensor, index: Tensor, start: Tensor, weight: Tensor) -> Tensor:
    """Row i of the result: the sum over e in start[i]..start[i+1] of weight[e] * table[index[e]]."""
    return nnf.embedding_bag(index, table, start, mode="sum", per_sample_weights=weight, include_last_offset=True)


def weighted_sum(table: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[1, D]: the sum of weight[e] * table[index[e]], plus the bias; a long sum in pieces, for the threads."""
    n_pieces = PIECES if len(index) > LONG_SUM else 1
    start = torch.arange(n_pieces + 1) * len(index) // n_pieces
    y = weighted_rows(table, index, start, weight)
    y = y if n_pieces == 1 else y.sum(0, keepdim=True)
    return y if bias is None else y.add_(bias)


def weighted_neurons(y: Tensor, w_down: Tensor, down_FD: Tensor | None, entries: Entries, weight: Tensor) -> None:
    """y[row] = the sum over the row's entries of weight * Wd[:, col]."""
    _, col, row_start = entries
    if down_FD is not None:
        y.copy_(weighted_rows(down_FD, col, row_start, weight))
        return
    used, place = _used(col, w_down.shape[1])
    for piece, out in zip(w_down.detach().split(SLICE), y.split(SLICE, 1), strict=True):
        out.copy_(weighted_rows(piece.t()[used], place, row_start, weight))
