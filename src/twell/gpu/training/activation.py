"""The elementwise passes between GEMMs, where neurons run densely in training: h and its statistics, and the backward.

    h = a(r) u      dz = dh u a'(r)      du = dh a(r)         with r = relu(z), dh = dy Wd^T + l1 sign(h)

z and u are two matrices [M, N], or one [M, 2 N] that interleaves them (z0 u0 z1 u1 ...), as for a split's hot neurons;
gradients take the same form, so that one GEMM with interleaved rows serves both. (Plain FFN: z alone.) Statistics come
as partial sums, which ``statistics.py`` adds in a fixed order: the same bits every time.

Bytes, M 16384, N 5632, bf16: forward 3 values of 2 bytes per element, 0.55 GB; backward 6, 1.1 GB (0.13 and 0.28 ms at
4 TB/s). A tenth of that for the 512 hot neurons of a split.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, LONG, LONG_MULTIPLE, MULTIPLE, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import relu, start_after

_ROWS = 32  # tokens per partial sum
_COLUMNS = 512
_STEP = 4  # tokens at once
_BLOCK = 1024


@triton.jit
def _forward_kernel(
    i_z,  # [M, N], INTERLEAVED: [M, 2 N]
    i_u,  # [M, N]; unused if INTERLEAVED or plain
    i_counted,  # bool [M] or unused: tokens for the statistics
    o_h,  # [M, N] or unused
    o_counts,  # [parts, N] or unused
    o_l1,  # [programs] or unused
    M,
    N,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WANTS_H: tl.constexpr,
    WANTS_STATISTICS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    across = tl.cdiv(N, COLUMNS)
    part = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    wide = tl.program_id(0) % across * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)  # z and u
    count = tl.zeros(
        (STEP, COLUMNS), tl.int32
    )  # summed over STEP at the end: inside the loop warps would wait for each other
    l1 = tl.zeros((STEP, COLUMNS), tl.float32)
    for first in range(0, ROWS, STEP):
        row = (part * ROWS + first + tl.arange(0, STEP)).to(tl.int64)
        inside = (row < M)[:, None] & (column < N)[None, :]
        at = row[:, None] * N + column[None, :]
        if INTERLEAVED:
            both = i_z + row[:, None] * (2 * N) + wide[None, :]
            pairs = tl.load(both, mask=(row < M)[:, None] & (wide < 2 * N)[None, :], other=0.0).to(tl.float32)
            z, u = tl.split(tl.reshape(pairs, (STEP, COLUMNS, 2)))
        else:
            z = tl.load(i_z + at, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                u = tl.load(i_u + at, mask=inside, other=0.0).to(tl.float32)
        r = relu(z)
        h = r
        if SQUARED:
            h = r * r
        if GATED:
            h = h * u
        if WANTS_H:
            tl.store(o_h + at, h.to(o_h.dtype.element_ty), mask=inside)
        if WANTS_STATISTICS:
            counted = inside
            if HAS_MASK:
                counted = inside & (tl.load(i_counted + row, mask=row < M, other=0) != 0)[:, None]
            count += ((r != 0) & counted).to(tl.int32)
            l1 += tl.where(counted, tl.abs(h), 0.0)
    if WANTS_STATISTICS:
        tl.store(o_counts + part.to(tl.int64) * N + column, tl.sum(count, axis=0), mask=column < N)
        tl.store(o_l1 + tl.program_id(0), tl.sum(l1))


@triton.jit
def factors(z, u, GATED: tl.constexpr, SQUARED: tl.constexpr):
    """(a, slope, h): dz = dh * slope, du = dh * a. ``u`` is not read in a plain FFN."""
    r = relu(z)
    a = r
    slope = tl.where(r != 0, 1.0, 0.0)
    if SQUARED:
        a = r * r
        slope = 2.0 * r
    h = a
    if GATED:
        h = a * u
        slope = slope * u
    return a, slope, h


@triton.jit
def l1_gradient(i_l1, h):
    """What the gradient of sum |h| adds to dh."""
    l1 = tl.load(i_l1).to(tl.float32)
    return tl.where(h > 0, l1, tl.where(h < 0, -l1, 0.0))


@triton.jit
def _backward_kernel(
    i_z,  # [M, N]
    i_u,  # [M, N]; plain FFN: unused
    m_dh,  # [M, N]: dy Wd^T in, h out
    i_l1,  # [] or unused
    i_counted,  # bool [M] or unused: tokens whose |h| counts
    o_dz,  # [M, N]
    o_du,  # [M, N]; plain FFN: unused
    n,  # M * N
    N,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    dtype = m_dh.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    dh = tl.load(m_dh + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(i_z + at, mask=inside, other=0.0).to(tl.float32)
    u = z
    if GATED:
        u = tl.load(i_u + at, mask=inside, other=0.0).to(tl.float32)
    a, slope, h = factors(z, u, GATED, SQUARED)
    if HAS_L1:
        sign = l1_gradient(i_l1, h)
        if HAS_MASK:
            sign = tl.where(tl.load(i_counted + at // N, mask=inside, other=0) != 0, sign, 0.0)
        dh += sign
    tl.store(o_dz + at, (dh * slope).to(dtype), mask=inside)
    if GATED:
        tl.store(o_du + at, (dh * a).to(dtype), mask=inside)
    tl.store(m_dh + at, h.to(dtype), mask=inside)


@functools.cache
def _kernel(dtype: torch.dtype, aligned: bool, **flags: bool) -> Kernel:
    """``aligned``: N is a multiple of 16. ``flags``: GATED, SQUARED, INTERLEAVED, WANTS_H, WANTS_STATISTICS, HAS_MASK,
    OVERLAPS."""
    return Kernel(
        _forward_kernel,
        (dtype, dtype, torch.bool, dtype, torch.int32, torch.float32, ANY, MULTIPLE if aligned else ANY),
        {**flags, "ROWS": _ROWS, "COLUMNS": _COLUMNS, "STEP": _STEP},
        warps=4,
    )


@functools.cache
def _backward(dtype: torch.dtype, aligned: bool, **flags: bool) -> Kernel:
    """``aligned``: N is a multiple of 16. ``flags``: GATED, SQUARED, HAS_L1, HAS_MASK, OVERLAPS."""
    n, N = (LONG_MULTIPLE, MULTIPLE) if aligned else (LONG, ANY)
    return Kernel(
        _backward_kernel,
        (dtype, dtype, dtype, torch.float32, torch.bool, dtype, dtype, n, N),
        {**flags, "BLOCK": _BLOCK},
        warps=4,
    )


def activate(
    z: Tensor,
    u: Tensor | None,
    token_mask: Tensor | None,
    *,
    squared: bool,
    interleaved: bool = False,
    wants_h: bool = True,
    wants_statistics: bool = True,
    space: Space | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(h [M, N], partial sums of |h| float32 [n], partial counts int32 [parts, N]: see ``write_statistics``).

    Outputs that are not wanted are empty. z, u: contiguous. ``interleaved``: z is [M, 2 N] and holds u, too.
    ``token_mask`` bool [M]: tokens for the statistics."""
    M, N = z.shape[0], z.shape[1] // 2 if interleaved else z.shape[1]
    parts, programs = ceil_div(M, _ROWS), ceil_div(M, _ROWS) * ceil_div(N, _COLUMNS)
    new = z.new_empty if space is None else space.take
    h = new(M if wants_h else 0, N)
    count = new(parts if wants_statistics else 0, N, dtype=torch.int32)
    l1 = new(programs if wants_statistics else 0, dtype=torch.float32)
    if programs:
        kernel = _kernel(
            z.dtype, N % 16 == 0, GATED=interleaved or u is not None, SQUARED=squared, INTERLEAVED=interleaved,
            WANTS_H=wants_h, WANTS_STATISTICS=wants_statistics, HAS_MASK=token_mask is not None, OVERLAPS=can_overlap(),
        )  # fmt: skip
        kernel(programs, z, 0 if u is None else u, 0 if token_mask is None else token_mask, h, count, l1, M, N)
    return h, l1, count


def activation_gradients_(
    z: Tensor,
    u: Tensor | None,
    dh: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    *,
    squared: bool,
    space: Space | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dz, du, h). ``dh`` [M, N] holds dy Wd^T and is overwritten with h. ``dl1``: float32."""
    new = z.new_empty if space is None else space.take
    dz = new(*z.shape)
    du = dz if u is None else new(*z.shape)
    if dh.numel():
        n, N = dh.numel(), dh.shape[1]
        flags = {"GATED": u is not None, "SQUARED": squared, "HAS_L1": dl1 is not None}
        kernel = _backward(z.dtype, N % 16 == 0, **flags, HAS_MASK=token_mask is not None, OVERLAPS=can_overlap())
        optional = (0 if t is None else t for t in (dl1, token_mask))
        kernel(ceil_div(n, _BLOCK), z, 0 if u is None else u, dh, *optional, dz, du, n, N)
    return dz, du, dh
