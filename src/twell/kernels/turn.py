"""Matrices turned over (the down projection neuron by neuron, and its gradient back), and rows put among others."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import can_overlap, ceil_div, launch
from twell.kernels.tiles import start_after


@triton.jit
def _turn_kernel(i_t, o_t, rows, columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    start_after(OVERLAPS)
    down = tl.program_id(0) // tl.cdiv(columns, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    across = tl.program_id(0) % tl.cdiv(columns, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = (down < rows)[:, None] & (across < columns)[None, :]
    t = tl.load(i_t + down[:, None].to(tl.int64) * columns + across[None, :], mask=inside, other=0.0)
    tl.store(o_t + across[:, None].to(tl.int64) * rows + down[None, :], t.T, mask=inside.T)


def turned(t: Tensor) -> Tensor:
    """A contiguous transpose: 0.02 ms for 23 MB on an H200, where ``t.t().contiguous()`` takes 0.07."""
    rows, columns = t.shape
    out = t.new_empty(columns, rows)
    if t.numel():
        launch(
            _turn_kernel,
            ceil_div(rows, 64) * ceil_div(columns, 64),
            (t, out, rows, columns),
            {"BLOCK": 64, "OVERLAPS": can_overlap()},
            warps=4,
            stages=1,
        )
    return out


@triton.jit
def _put_rows_kernel(m_t, i_rows, i_part, D, stride, BD: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr):
    start_after(OVERLAPS)
    n = tl.program_id(0) // tl.cdiv(D, BD)
    d = tl.program_id(0) % tl.cdiv(D, BD) * BD + tl.arange(0, BD)
    at = m_t + tl.load(i_rows + n).to(tl.int64) * D + d
    t = tl.load(i_part + n.to(tl.int64) * stride + d, mask=d < D, other=0.0)
    if ADDS:
        t = t.to(tl.float32) + tl.load(at, mask=d < D, other=0.0).to(tl.float32)
    tl.store(at, t.to(m_t.dtype.element_ty), mask=d < D)


def put_rows_(t: Tensor, rows: Tensor, part: Tensor, *, add: bool = False) -> None:
    """t[rows] = part [n, D], or += part, in one pass. ``rows`` [n]: all different; ``part``: unit stride along D."""
    if part.numel():
        D = t.shape[1]
        launch(
            _put_rows_kernel,
            len(rows) * ceil_div(D, 1024),
            (t, rows, part, D, part.stride(0)),
            {"BD": 1024, "ADDS": add, "OVERLAPS": can_overlap()},
            warps=4,
            stages=1,
        )
