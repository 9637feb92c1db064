"""The tail, token by token: y = sum over a token's listed neurons n of a(r_n) * (Wu_n . x + bu_n) * Wd_n + bd.

One program per token. Those of the long and early tokens, which take longest, start first, so that nothing waits for
them at the end. A program gathers its neurons' rows of Wu and Wd, a few at a time; u and h stay in registers, sums are
fp32. ``heavy.py`` computes the heavy tokens.

A dense FFN multiplies u with the 0 of every inactive neuron, which gives NaN for a token with inf or NaN in x. For a
token without any active or hot neuron the tail adds that NaN: y += 0 * sum(x).

Weights: Wu [F, D] as the model has it, Wd neuron-major [F, D]. FP8: x and both weights are e4m3, with scales of x [M],
of up's rows [F] and of y's columns [D]; sums are fp32, and h is not rounded.
Bytes: two rows of D for each (token, neuron) pair; at 10 cold neurons per token, M 16384, D 2048, bf16: 1.3 GB, mostly
from L2 (about 9 TB/s seen on an H200: 0.15 ms), x once in and y once out (0.13 GB).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, power_of_2
from twell.gpu.shared.lists import LONG, Lists, n_programs, token_of_program
from twell.gpu.shared.tiles import RowTile, start_after
from twell.reference import Weights


@triton.jit
def _tail_kernel(
    i_x,  # [M, D]
    i_rows,  # [size]: row numbers in Wu and Wd
    i_values,  # [size]: r
    i_counters,  # see Turns, as the next three
    i_entries,
    i_heavy,
    i_early,
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    i_x_scale,  # SCALED: fp32 [M]
    i_up_scale,  # SCALED: fp32 [F]
    i_down_scale,  # SCALED: fp32 [D]
    o_y,  # [M, D]
    o_up,  # SAVES, gated: [size], u of every entry
    o_l1,  # SAVES: [M], sum of |h|
    M,
    D,
    cap,
    x_stride,
    BD: tl.constexpr,  # power of 2 >= D
    WHOLE: tl.constexpr,  # BD == D
    NEURONS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    SPOIL: tl.constexpr,  # add 0 * sum(x)
    SAVES: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    LONG: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_after(OVERLAPS)
    token, n, start = token_of_program(tl.program_id(0), i_counters, i_entries, i_heavy, i_early, M, cap, LONG)
    if n >= 0:
        d = tl.arange(0, BD)
        in_d = (d < D) | WHOLE
        x = tl.load(i_x + token.to(tl.int64) * x_stride + d, mask=in_d, other=0.0).to(tl.float32)
        acc = tl.zeros((BD,), tl.float32)
        x_scale = 1.0
        if SCALED:
            x_scale = tl.load(i_x_scale + token)
        l1 = tl.zeros((NEURONS,), tl.float32)
        for first in tl.range(0, n, NEURONS, num_stages=STAGES):
            e = first + tl.arange(0, NEURONS)
            there = e < n
            row = tl.load(i_rows + start + e, mask=there, other=0)
            a = tl.load(i_values + start + e, mask=there, other=0.0).to(tl.float32)
            if SQUARED:
                a = a * a
            inside = there[:, None] & in_d[None, :]
            # Issue both rows' loads before the first is used: the sum over D is a barrier to later loads.
            down = tl.load(i_down + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
            if GATED:
                up = tl.load(i_up + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
                u = tl.sum(up.to(tl.float32) * x[None, :], axis=1)
                if SCALED:
                    u = u * x_scale * tl.load(i_up_scale + row, mask=there, other=0.0)
                if HAS_UP_BIAS:
                    u += tl.load(i_up_bias + row, mask=there, other=0.0).to(tl.float32)
                a = a * u
                if SAVES:
                    tl.store(o_up + start + e, u.to(o_up.dtype.element_ty), mask=there)
            if SAVES:
                l1 += tl.abs(a)
            acc += tl.sum(a[:, None] * down.to(tl.float32), axis=0)
        if SCALED:
            acc = acc * tl.load(i_down_scale + d, mask=in_d, other=0.0)
        if HAS_DOWN_BIAS:
            acc += tl.load(i_down_bias + d, mask=in_d, other=0.0).to(tl.float32)
        y = o_y + token.to(tl.int64) * D + d
        tl.store(y, acc.to(o_y.dtype.element_ty), mask=in_d)
        if SAVES:
            tl.store(o_l1 + token, tl.sum(l1, axis=0))
        if SPOIL:
            if n == 0:  # otherwise u is inf or NaN. A separate store saves registers in the loop
                tl.store(y, (acc + tl.sum(x * x_scale * 0.0, axis=0)).to(o_y.dtype.element_ty), mask=in_d)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    narrow: torch.dtype,
    D: int,
    tile: RowTile,
    factors: torch.dtype,
    **flags: bool,
) -> Kernel:
    """``factors``: the dtype of x and the weights. ``flags``: GATED, SQUARED, SPOIL, SAVES, HAS_UP_BIAS, HAS_DOWN_BIAS,
    OVERLAPS."""
    wide = power_of_2(D)
    weights, f32 = (factors, dtype, factors, dtype), torch.float32
    pointers = (factors, narrow, dtype, *[torch.int32] * 4, *weights, f32, f32, f32, dtype, dtype, f32)
    return Kernel(
        _tail_kernel,
        (*pointers, ANY, MULTIPLE, ANY, MULTIPLE),
        {
            "BD": wide,
            "WHOLE": wide == D,
            "NEURONS": tile.neurons,
            "SCALED": factors != dtype,
            "LONG": LONG,
            "STAGES": tile.stages,
            **flags,
        },
        warps=tile.warps_for(wide),
        stages=tile.stages,
    )


def write_tail(
    y: Tensor,
    x: Tensor,
    lists: Lists,
    w: Weights,
    *,
    squared: bool,
    has_hot: bool,
    tile: RowTile,
    saved_up: Tensor | None = None,
    l1: Tensor | None = None,
    scales: tuple[Tensor, Tensor | None, Tensor] | None = None,
) -> None:
    """Write the rows of y [M, D] that belong to tokens that are not heavy. ``w``: all rows [F, D], Wd too.

    ``l1`` [M], if given, receives the tokens' sums of abs(h), and ``saved_up`` the u of every entry. ``scales``: of x
    [M], up [F] and down [D], where these are e4m3."""
    M, D = x.shape
    if M == 0:
        return
    rows, values, turns, cap = lists
    gated, b_up, b_down = w.up is not None, w.up_bias, w.down_bias
    kernel = _kernel(
        y.dtype, rows.dtype, D, tile, x.dtype, GATED=gated, SQUARED=squared, SPOIL=gated and not has_hot,
        SAVES=l1 is not None, HAS_UP_BIAS=b_up is not None, HAS_DOWN_BIAS=b_down is not None, OVERLAPS=can_overlap(),
    )  # fmt: skip
    optional = (w.up, b_up, w.down, b_down, *(scales or (None,) * 3), y, saved_up, l1)
    tensors = (0 if t is None else t for t in optional)
    kernel(n_programs(M), x, rows, values, *turns, *tensors, M, D, cap, x.stride(0))
