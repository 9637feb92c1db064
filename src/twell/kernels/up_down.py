"""The cold tail, token by token, and the heavy tokens that do not belong in it.

``add_tail_``: for every token, y += sum over its active cold neurons n of a(r_n) * (Wu_n . x + bu_n) * Wd_n. One
program a token: it lists the set bits of the token's bitmap row, then gathers the neurons' rows of Wu and Wd a few at a
time. u and h stay in registers; sums are fp32. A token with more than ``cap`` active cold neurons, or with inf or NaN
in x, is not computed but put on the list of heavy tokens.

``add_heavy_``: the listed tokens, densely on tensor cores: h = a(r) * (x Wu^T + bu) over all cold neurons, in place of
r, then y += h Wd. Both loop over a count that lives on the device: no host sync, and any number of heavy tokens fits.
The list's order may vary between runs; a row's sums do not depend on its place in it.

Weights: Wu [F, D] as the model has it, Wd neuron-major [F, D]; ``order`` [C] gives the rows of the cold neurons.
Bytes of the tail: two rows of D a (token, neuron) pair; at 10 cold neurons a token, M 16384, D 2048, bf16: 1.3 GB,
mostly from L2 (about 9 TB/s seen on an H200: 0.15 ms), and y once in and out (0.13 GB).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.tiles import GateTile, RowTile, neuron_of_bit, popcount, tile_of


@triton.jit
def _tail_kernel(
    i_x,  # [M, D]
    i_gate,  # [M, C]
    i_bitmap,  # [M, words]
    i_up,  # [F, D] or unused
    i_up_bias,  # [F] or unused
    i_down,  # [F, D]
    i_down_bias,  # [D] or unused
    i_order,  # [C] int32 or unused
    m_list,  # [M, cap] int32: the active neurons of each token
    o_heavy,  # [M] int32: heavy tokens
    o_n_heavy,  # [1] int32
    y,  # [M, D], added to or, with NEW, written
    D,
    C,
    words,
    cap,
    x_stride,
    BD: tl.constexpr,  # power of 2 >= D
    BW: tl.constexpr,  # power of 2 >= words
    NEURONS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    NEW: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    in_d = d < D
    word = tl.arange(0, BW)
    bits = tl.load(i_bitmap + token * words + word, mask=word < words, other=0).to(tl.uint32, bitcast=True)
    x = tl.load(i_x + token * x_stride + d, mask=in_d, other=0.0).to(tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    if not NEW:
        acc += tl.load(y + token * D + d, mask=in_d, other=0.0).to(tl.float32)
    if HAS_DOWN_BIAS:
        acc += tl.load(i_down_bias + d, mask=in_d, other=0.0).to(tl.float32)

    in_word = popcount(bits)
    n = tl.sum(in_word, axis=0)
    is_finite = tl.max((x - x != 0).to(tl.int32), axis=0) == 0  # inf - inf and NaN - NaN are NaN, which is not 0
    if (n > cap) | (is_finite == 0):
        slot = tl.atomic_add(o_n_heavy, 1)
        tl.store(o_heavy + slot, token.to(tl.int32))
    else:
        # List the neurons: every word stores its lowest bit, then its next one, each at its own place.
        place = tl.cumsum(in_word, axis=0) - in_word
        mine = m_list + token * cap
        while tl.max(bits, axis=0) != 0:
            bit = popcount(bits ^ (bits - 1)) - 1  # of the lowest one set
            tl.store(mine + place, neuron_of_bit(word, bit), mask=bits != 0)
            place += 1
            bits = bits & (bits - 1)
        tl.debug_barrier()  # the list was written by other threads of this program
        for first in tl.range(0, n, NEURONS, num_stages=STAGES):
            e = first + tl.arange(0, NEURONS)
            there = e < n
            cold = tl.load(mine + e, mask=there, other=0)
            a = tl.load(i_gate + token * C + cold, mask=there, other=0.0).to(tl.float32)
            if SQUARED:
                a = a * a
            if HAS_ORDER:
                cold = tl.load(i_order + cold, mask=there, other=0)
            start = cold[:, None].to(tl.int64) * D + d[None, :]
            inside = there[:, None] & in_d[None, :]
            if GATED:
                up = tl.load(i_up + start, mask=inside, other=0.0).to(tl.float32)
                u = tl.sum(up * x[None, :], axis=1)
                if HAS_UP_BIAS:
                    u += tl.load(i_up_bias + cold, mask=there, other=0.0).to(tl.float32)
                a = a * u
            down = tl.load(i_down + start, mask=inside, other=0.0).to(tl.float32)
            acc += tl.sum(a[:, None] * down, axis=0)
    tl.store(y + token * D + d, acc.to(y.dtype.element_ty), mask=in_d)


@triton.jit
def _heavy_up_kernel(
    i_x,  # [M, D]
    i_up,  # [F, D]
    i_up_bias,  # [F] or unused
    i_order,  # [C] int32 or unused
    i_heavy,  # [M] int32
    i_n_heavy,  # [1] int32
    m_gate,  # [M, C]: r in, h out, in heavy rows
    D,
    C,
    x_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n_heavy = tl.load(i_n_heavy)
    tiles_m = tl.cdiv(n_heavy, BM)
    tiles_n = tl.cdiv(C, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        r = m * BM + tl.arange(0, BM)
        token = tl.load(i_heavy + r, mask=r < n_heavy, other=0).to(tl.int64)
        cold = n * BN + tl.arange(0, BN)
        neuron = cold
        if HAS_ORDER:
            neuron = tl.load(i_order + cold, mask=cold < C, other=0)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(D, BK)):
            d = k * BK + tl.arange(0, BK)
            x = tl.load(
                i_x + token[:, None] * x_stride + d[None, :], mask=(r[:, None] < n_heavy) & (d[None, :] < D), other=0.0
            )
            w = tl.load(
                i_up + neuron[None, :].to(tl.int64) * D + d[:, None],
                mask=(cold[None, :] < C) & (d[:, None] < D),
                other=0.0,
            )
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if HAS_UP_BIAS:
            acc += tl.load(i_up_bias + neuron, mask=cold < C, other=0.0).to(tl.float32)[None, :]
        place = m_gate + token[:, None] * C + cold[None, :]
        inside = (r[:, None] < n_heavy) & (cold[None, :] < C)
        a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if SQUARED:
            a = a * a
        tl.store(place, (a * acc).to(m_gate.dtype.element_ty), mask=inside)


@triton.jit
def _heavy_down_kernel(
    i_h,  # [M, C]
    i_down,  # [F, D]
    i_order,  # [C] int32 or unused
    i_heavy,  # [M] int32
    i_n_heavy,  # [1] int32
    y,  # [M, D], added to in heavy rows
    D,
    C,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n_heavy = tl.load(i_n_heavy)
    tiles_m = tl.cdiv(n_heavy, BM)
    tiles_n = tl.cdiv(D, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        r = m * BM + tl.arange(0, BM)
        token = tl.load(i_heavy + r, mask=r < n_heavy, other=0).to(tl.int64)
        d = n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(C, BK)):
            cold = k * BK + tl.arange(0, BK)
            neuron = cold
            if HAS_ORDER:
                neuron = tl.load(i_order + cold, mask=cold < C, other=0)
            h = tl.load(
                i_h + token[:, None] * C + cold[None, :], mask=(r[:, None] < n_heavy) & (cold[None, :] < C), other=0.0
            )
            if SQUARED:  # a plain FFN: what is stored is r
                h = (h.to(tl.float32) * h.to(tl.float32)).to(h.dtype)
            w = tl.load(
                i_down + neuron[:, None].to(tl.int64) * D + d[None, :],
                mask=(cold[:, None] < C) & (d[None, :] < D),
                other=0.0,
            )
            acc = tl.dot(h, w, acc, input_precision=PRECISION)
        place = y + token[:, None] * D + d[None, :]
        inside = (r[:, None] < n_heavy) & (d[None, :] < D)
        acc += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, acc.to(y.dtype.element_ty), mask=inside)


def add_tail_(
    y: Tensor,
    x: Tensor,
    gate: Tensor,
    bitmap: Tensor,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    order: Tensor | None,
    *,
    cap: int,
    squared: bool,
    is_new: bool,
    tile: RowTile,
) -> tuple[Tensor, Tensor]:
    """Add the tail of every light token to y; returns the list of heavy tokens [M] and their number [1], on the device.

    ``is_new``: y holds nothing yet and is written instead.
    """
    (M, D), (C, words) = x.shape, (gate.shape[1], bitmap.shape[1])
    n_heavy = torch.zeros(1, dtype=torch.int32, device=x.device)
    heavy = torch.empty(M, dtype=torch.int32, device=x.device)
    lists = torch.empty(M, cap, dtype=torch.int32, device=x.device)
    if M:
        _tail_kernel[(M,)](
            x,
            gate,
            bitmap,
            x if up is None else up,
            x if up_bias is None else up_bias,
            down,
            x if down_bias is None else down_bias,
            n_heavy if order is None else order,
            lists,
            heavy,
            n_heavy,
            y,
            D,
            C,
            words,
            cap,
            x.stride(0),
            BD=triton.next_power_of_2(D),
            BW=max(1, triton.next_power_of_2(words)),
            NEURONS=tile.neurons,
            GATED=up is not None,
            SQUARED=squared,
            HAS_UP_BIAS=up_bias is not None,
            HAS_DOWN_BIAS=down_bias is not None,
            HAS_ORDER=order is not None,
            NEW=is_new,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return heavy, n_heavy


def add_heavy_(
    y: Tensor,
    x: Tensor,
    gate: Tensor,
    heavy: Tensor,
    n_heavy: Tensor,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    order: Tensor | None,
    *,
    squared: bool,
    tile: GateTile,
    programs: int,
) -> None:
    """Add the cold neurons of the heavy tokens to y. Overwrites their rows of ``gate``."""
    (M, D), C = x.shape, gate.shape[1]
    if M == 0 or C == 0:
        return
    common = {
        "BM": tile.BM,
        "BN": tile.BN,
        "BK": tile.BK,
        "GROUP_M": 8,
        "HAS_ORDER": order is not None,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    some_order = n_heavy if order is None else order
    if up is not None:
        _heavy_up_kernel[(programs,)](
            x,
            up,
            x if up_bias is None else up_bias,
            some_order,
            heavy,
            n_heavy,
            gate,
            D,
            C,
            x.stride(0),
            SQUARED=squared,
            HAS_UP_BIAS=up_bias is not None,
            **common,
        )
    _heavy_down_kernel[(programs,)](
        gate, down, some_order, heavy, n_heavy, y, D, C, SQUARED=squared and up is None, **common
    )
