"""Dense products x W^T, computed in the way that is fastest on this vendor's CPUs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Container
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell.reference import is_neuron_major

PIECES = 8  # of a weight, or a long sum, among which the threads are divided


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, contiguous."""
    habits, y, by_row = blas_habits(), None, weight.is_contiguous()
    if x.dtype in (torch.float32, torch.float64):
        in_pieces = len(x) in habits.rows_in_pieces and not any(n % PIECES for n in weight.shape)
        if in_pieces and (by_row or is_neuron_major(weight)) and torch.get_num_threads() > 1:
            y = linear_in_pieces(x, weight) if by_row else _linear_in_pieces_by_column(x, weight)
        elif not by_row:
            pass  # the branches below take 20 to 100 times as long
        elif len(x) == 1 and habits.slow_matvec:
            silence_csr_beta_warning()
            column = full_column(len(weight), x.dtype)
            y = torch.sparse.sampled_addmm(column, weight, x.t(), beta=0.0).values().view(1, -1)
        elif len(x) in habits.transposed_rows:
            y = torch.mm(weight, x.t()).t().contiguous()
    elif (
        x.dtype == torch.bfloat16
        and bias is None  # added after the product it would cost one more rounding
        and len(x) in habits.transposed_bf16_rows
        and by_row
        and weight.shape[1] > weight.shape[0]
    ):
        y = torch.mm(weight, x.t()).t().contiguous()
    if y is None:
        return nnf.linear(x, weight, bias)
    return y if bias is None else y.add_(bias)


def linear_in_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T as a batch of products with pieces of W's rows: MKL divides its threads well among these."""
    (m, D), F = x.shape, len(weight)
    pieces = weight.view(PIECES, F // PIECES, D)
    if m < 4:
        return torch.bmm(pieces, x.t().expand(PIECES, D, m)).view(F, m).t().contiguous()
    return torch.bmm(x.expand(PIECES, m, D), pieces.transpose(1, 2)).transpose(0, 1).reshape(m, F)


def _linear_in_pieces_by_column(x: Tensor, weight: Tensor) -> Tensor:
    """``linear_in_pieces`` for a W that lies column by column: with few rows of x, pieces are of W's columns."""
    m, (D, F) = len(x), weight.shape
    if m < 4:
        return torch.bmm(x.view(m, PIECES, -1).transpose(0, 1), weight.t().view(PIECES, -1, D)).sum(0)
    pieces = weight.t().view(F, PIECES, -1).transpose(0, 1)
    return torch.bmm(x.expand(PIECES, m, F), pieces).transpose(0, 1).reshape(m, D)


class BlasHabits(NamedTuple):
    """Where the plain x W^T of MKL (fp32) or oneDNN (bf16) is not the fastest. Containers hold numbers of rows of x."""

    slow_matvec: bool = False  # one row: sampled_addmm over all of W is faster
    transposed_rows: Container[int] = range(0)  # (W x^T)^T is faster
    transposed_bf16_rows: Container[int] = range(0)  # the same in bf16, for W wider than high
    rows_in_pieces: Container[int] = range(0)  # pieces of W are faster, with several threads
    int8_gate: bool = False  # one row: an int8 W is faster, by _weight_int8pack_mm


@functools.cache
def blas_habits() -> BlasHabits:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            cpuinfo = f.read(4096)
    except OSError:
        return BlasHabits()
    if "AuthenticAMD" in cpuinfo:
        # ms, plain against the other way; W 5632 x 2048. 1 thread: 1 row 2.7 against 2.3; transposed 2 rows 5.7 against
        # 3.7, but 8 rows 7.6 against 9.6. 2 threads, in pieces: 1 row 2.9 against 1.6, 4 rows 6.5 against 2.6, 16 rows
        # 8.2 against 4.1, 128 rows 25 against 17; W by columns 1 row 2.3 against 1.2, 4 rows 6.3 against 2.9, 64 rows
        # 11.4 against 9.7.
        # bf16, W 2048 x 5632, transposed: 16 rows 2.0 against 1.3, 64 rows 4.5 against 3.8.
        # int8, 1 row: 0.6; with 1 thread 1.2.
        return BlasHabits(
            slow_matvec=True,
            transposed_rows=frozenset((2, 3, *range(32, 65))),
            transposed_bf16_rows=range(8, 65),
            rows_in_pieces=range(1, 129),
            int8_gate=hasattr(torch, "_weight_int8pack_mm") and torch.backends.cpu.get_cpu_capability() == "AVX512",
        )
    if "GenuineIntel" in cpuinfo:  # 2 threads: 16 rows 3.8 against 2.6; 16 threads: 1.9 against 0.6
        return BlasHabits(transposed_rows=range(8, 33))
    return BlasHabits()


@functools.lru_cache(maxsize=16)
def full_column(n: int, dtype: torch.dtype) -> Tensor:
    """CSR matrix [n, 1] with every element present."""
    zeros = torch.zeros(n, dtype=torch.int64)
    return torch.sparse_csr_tensor(torch.arange(n + 1), zeros, zeros.to(dtype), (n, 1), check_invariants=False)


@functools.cache
def silence_csr_beta_warning() -> None:
    """torch warns once per process that CSR is in beta; provoke and drop the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int64), torch.zeros(0), (1, 1))
