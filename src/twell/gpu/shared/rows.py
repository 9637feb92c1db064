"""Kernels that copy rows: gather weight rows in a plan's order, scatter gradient rows back, and transpose a matrix (Wd
to neuron-major, and its gradient back).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import start_after

_WIDE = 2048  # elements of a row per program


@triton.jit
def _transpose_kernel(i_t, o_t, rows, columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    start_after(OVERLAPS)
    down = tl.program_id(0) // tl.cdiv(columns, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    across = tl.program_id(0) % tl.cdiv(columns, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = (down < rows)[:, None] & (across < columns)[None, :]
    t = tl.load(i_t + down[:, None].to(tl.int64) * columns + across[None, :], mask=inside, other=0.0)
    tl.store(o_t + across[:, None].to(tl.int64) * rows + down[None, :], t.T, mask=inside.T)


@functools.cache
def _transpose(dtype: torch.dtype, overlaps: bool) -> Kernel:
    constants = {"BLOCK": 64, "OVERLAPS": overlaps}
    return Kernel(_transpose_kernel, (dtype, dtype, MULTIPLE, MULTIPLE), constants, warps=4)


def transposed(t: Tensor, space: Space | None = None, out: Tensor | None = None) -> Tensor:
    """A contiguous transpose of a contiguous matrix whose sides are multiples of 16. 23 MB take 0.02 ms on an H200,
    where ``t.t().contiguous()`` takes 0.07."""
    rows, columns = t.shape
    if out is None:
        out = (t.new_empty if space is None else space.take)(columns, rows)
    if t.numel():
        _transpose(t.dtype, can_overlap())(ceil_div(rows, 64) * ceil_div(columns, 64), t, out, rows, columns)
    return out


@triton.jit
def _put_rows_kernel(
    i_inputs,  # [2 H, D]: rows of gate and up, interleaved; plain FFN: [H, D]
    i_downs,  # [H, D]
    i_order,  # int32 [F]: hot neurons first
    o_gate,  # [F, D] or unused, as o_up and o_down
    o_up,
    o_down,
    D,
    H,
    GATED: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    BD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    row = tl.program_id(0) // tl.cdiv(D, BD)
    d = tl.program_id(0) % tl.cdiv(D, BD) * BD + tl.arange(0, BD)
    EACH: tl.constexpr = 2 if GATED else 1
    if row < EACH * H:
        t = tl.load(i_inputs + row.to(tl.int64) * D + d, mask=d < D, other=0.0)
        at = tl.load(i_order + row // EACH).to(tl.int64) * D + d
        if row % EACH == 0:
            if WANTS_GATE:
                tl.store(o_gate + at, t, mask=d < D)
        elif WANTS_UP:
            tl.store(o_up + at, t, mask=d < D)
    elif WANTS_DOWN:
        t = tl.load(i_downs + (row - EACH * H).to(tl.int64) * D + d, mask=d < D, other=0.0)
        tl.store(o_down + tl.load(i_order + row - EACH * H).to(tl.int64) * D + d, t, mask=d < D)


@functools.cache
def _put(dtype: torch.dtype, gated: bool, wants: tuple[bool, ...], overlaps: bool) -> Kernel:
    wanted = dict(zip(("WANTS_GATE", "WANTS_UP", "WANTS_DOWN"), wants, strict=True))
    constants = {"GATED": gated, **wanted, "BD": _WIDE, "OVERLAPS": overlaps}
    return Kernel(_put_rows_kernel, (dtype, dtype, torch.int32, dtype, dtype, dtype, MULTIPLE, ANY), constants, warps=4)


def put_rows_(
    targets: tuple[Tensor | None, ...], order: Tensor, inputs: Tensor, downs: Tensor, n_hot: int, *, gated: bool
) -> None:
    """Write the hot neurons' rows, of gate and up interleaved (``inputs``) and of down (``downs``), to their places in
    ``targets``: gate, up and down [F, D], or None."""
    n, D = len(inputs) + len(downs), inputs.shape[1]
    if n:
        kernel = _put(inputs.dtype, gated, tuple(t is not None for t in targets), can_overlap())
        kernel(n * ceil_div(D, _WIDE), inputs, downs, order, *(0 if t is None else t for t in targets), D, n_hot)


@triton.jit
def _gather_kernel(
    i_gate,  # [F, D]
    i_up,  # [F, D]; plain FFN: unused
    i_down,  # [F, D]
    i_order,  # int32 [F]: hot neurons first
    o_rows,  # [n, D]
    D,
    H,
    first,
    GATED: tl.constexpr,
    BD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Output rows, of which those from ``first`` on are written: gate and up of the hot neurons, interleaved; down of
    the hot neurons; gate of the cold ones."""
    start_after(OVERLAPS)
    row = first + tl.program_id(0) // tl.cdiv(D, BD)
    d = tl.program_id(0) % tl.cdiv(D, BD) * BD + tl.arange(0, BD)
    EACH: tl.constexpr = 2 if GATED else 1
    source = i_gate
    if row < EACH * H:
        n = row // EACH
        if GATED:
            if row % 2 == 1:
                source = i_up
    elif row < (EACH + 1) * H:
        n = row - EACH * H
        source = i_down
    else:
        n = row - EACH * H
    neuron = tl.load(i_order + n).to(tl.int64)
    t = tl.load(source + neuron * D + d, mask=d < D, other=0.0)
    tl.store(o_rows + (row - first).to(tl.int64) * D + d, t, mask=d < D)


@functools.cache
def _gather(dtype: torch.dtype, gated: bool, overlaps: bool) -> Kernel:
    constants = {"GATED": gated, "BD": _WIDE, "OVERLAPS": overlaps}
    return Kernel(_gather_kernel, (dtype, dtype, dtype, torch.int32, dtype, MULTIPLE, ANY, ANY), constants, warps=4)


def gathered(
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    order: Tensor,
    n_hot: int,
    *,
    hot: bool = True,
    cold: bool = True,
    space: Space | None = None,
) -> Tensor:
    """[2 H + H + C, D] (plain FFN: [H + H + C, D]): gate and up rows of the hot neurons, interleaved; their rows of
    down; the gate rows of the cold ones. ``hot`` or ``cold`` False leaves these rows out. One launch: 20 us for F 5632,
    D 2048, bf16 on an H200."""
    F, D = gate.shape
    n_first = (1 if up is None else 2) * n_hot + n_hot
    first, end = 0 if hot else n_first, n_first + F - n_hot if cold else n_first
    out = (gate.new_empty if space is None else space.take)(end - first, D)
    if end > first:
        kernel, programs = _gather(gate.dtype, up is not None, can_overlap()), (end - first) * ceil_div(D, _WIDE)
        kernel(programs, gate, 0 if up is None else up, down, order, out, D, n_hot, first)
    return out
