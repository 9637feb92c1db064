"""Rows of a matrix as int8 with bounds on the error: they rule neurons out for half the bytes or less."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

U = 2.0**-24  # half the relative distance of neighbouring fp32 numbers
RANGE = (1e-12, 1e12)  # of each row's largest element, so that no product or sum under- or overflows fp32


class Int8Rows(NamedTuple):
    """w = s (q + e), row by row. Rows of zeros have s = 1."""

    q: Tensor  # int8 [R, D]
    per_s: Tensor  # fp32 [R]: 1 / s
    q_norm: Tensor  # fp32 [R]: |q|
    e_norm: Tensor  # fp32 [R]: |e|
    is_zero: Tensor  # bool [R]


def quantise_rows(w: Tensor, chunk_rows: int) -> Int8Rows | None:
    """Quantise a matrix [R, D], ``chunk_rows`` at a time; None if it is not finite, or too large or small."""
    largest = torch.linalg.vector_norm(w, math.inf, dim=1).float()
    is_zero = largest == 0
    if not bool((((largest >= RANGE[0]) & (largest <= RANGE[1])) | is_zero).all()):
        return None
    per_s = (127 / largest).masked_fill_(is_zero, 1)
    all_q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    q_norms, e_norms = [], []
    for rows, factor, q in zip(*(t.split(chunk_rows) for t in (w, per_s.unsqueeze(1), all_q)), strict=True):
        scaled = rows * factor
        rounded = scaled.round()
        q.copy_(rounded)
        q_norms.append(torch.linalg.vector_norm(rounded, dim=1))
        e_norms.append(torch.linalg.vector_norm(scaled.sub_(rounded), dim=1))
    return Int8Rows(all_q, per_s, torch.cat(q_norms), torch.cat(e_norms), is_zero)


def roundings(D: int) -> float:
    """Bound on the relative rounding error in fp32 of two sums of D products and two norms of D squares, in any order,
    with the steps before and after."""
    return (4 * D + 32) * U
