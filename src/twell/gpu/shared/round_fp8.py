"""Rows rounded to e4m3, each with its own scale: x of every FP8 FFN, and h of a dense one.

    scale = max(largest |x|, 1e-12) * (1 / 448)    q = x * (1 / scale), rounded to nearest even    (reference.to_fp8)

inf or NaN anywhere in a row makes its scale NaN, and with it every result of that row.
Bytes, M 16384, D 2048, bf16: 67 MB in, 34 MB out, 23 us at 4.3 TB/s.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.tiles import INTERPRETED, relu, start_after
from twell.reference import E4M3

_AT_ONCE = 8192  # elements per program: several short rows, or a long one


@triton.jit
def _to_e4m3(q):
    """Rounds to nearest even. The interpreter's own conversion drops a carry into the exponent: 125 becomes 64, not
    128."""
    if INTERPRETED:
        bits = q.to(tl.int32, bitcast=True)
        usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (q + 24576.0) - 24576.0  # to multiples of 2^-9
        q = tl.where(q != q, q, tl.where(tl.abs(q) < 0.015625, small, usual))
    return q.to(tl.float8e4nv)


@triton.jit
def _round_kernel(
    i_x,  # [M, N]; ACTIVATES: z
    i_u,  # [M, N] or unused
    o_q,  # [M, N]
    o_scale,  # [M]
    M,
    N,
    x_stride,
    ROWS: tl.constexpr,
    BN: tl.constexpr,  # power of 2 >= N
    ACTIVATES: tl.constexpr,  # the rows are a(z) * u, or a(z)
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BN)
    inside = (row < M)[:, None] & (col < N)[None, :]
    at = row[:, None].to(tl.int64) * x_stride + col[None, :]
    x = tl.load(i_x + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATES:
        x = relu(x)
        if SQUARED:
            x = x * x
        if GATED:
            x = x * tl.load(i_u + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(i_x.dtype.element_ty).to(tl.float32)  # a dense FFN rounds h
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-12)
    scale = largest * (1 / 448.0) + tl.sum(x * 0.0, axis=1)
    q = x * tl.div_rn(1.0 + tl.zeros_like(scale), scale)[:, None]
    q = tl.where(q > 448.0, 448.0, tl.where(q < -448.0, -448.0, q))  # min and max would drop NaN
    tl.store(o_q + row[:, None].to(tl.int64) * N + col[None, :], _to_e4m3(q), mask=inside)
    tl.store(o_scale + row, scale, mask=row < M)


@functools.cache
def _kernel(dtype: torch.dtype, N: int, activates: bool, gated: bool, squared: bool, overlaps: bool) -> Kernel:
    BN = power_of_2(N)
    rows = max(1, _AT_ONCE // BN)
    flags = {"ACTIVATES": activates, "GATED": gated, "SQUARED": squared, "OVERLAPS": overlaps}
    arguments = (dtype, dtype, E4M3, torch.float32, ANY, MULTIPLE, MULTIPLE)
    return Kernel(_round_kernel, arguments, {"ROWS": rows, "BN": BN, **flags}, warps=max(4, BN // 1024))


def round_rows(x: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """Write (q [M, D] e4m3, scale [M] fp32) of x [M, D], whose row stride is a multiple of 16 elements."""
    M, D = x.shape
    kernel = _kernel(x.dtype, D, False, False, False, can_overlap())
    kernel(ceil_div(M, kernel.constants["ROWS"]), x, 0, *out, M, D, x.stride(0))


def round_hidden(z: Tensor, u: Tensor | None, squared: bool, out: tuple[Tensor, Tensor]) -> None:
    """Write (q [M, F] e4m3, scale [M] fp32) of h = a(relu(z)) * u, for contiguous z and u [M, F]."""
    M, F = z.shape
    kernel = _kernel(z.dtype, F, True, u is not None, squared, can_overlap())
    kernel(ceil_div(M, kernel.constants["ROWS"]), z, 0 if u is None else u, *out, M, F, F)


def room_for(rows: int, columns: int, new: Any) -> tuple[Tensor, Tensor]:
    """Buffers for q and scale. ``new``: a Space's take, or a tensor's new_empty."""
    return new(rows, columns, dtype=E4M3), new(rows, dtype=torch.float32)
