"""Small dense batches of a gated FFN with FP8 weights, in four launches; ``fp8.dense`` runs the others.

    x in e4m3    h = a(x Wg^T) * (x Wu^T), by dense.py    h in e4m3    y = h Wd^T

y has few tiles (32 of 64 columns at D 2048), so several programs share a tile's depth: each writes fp32 sums to a
workspace, and the last program of a tile adds them, always in the same order.

us per layer in CUDA graphs on an H200 (compiled, with cuBLAS's GEMMs): 64 tokens 20.4 (40.4), 128 22.2 (40.9), 512 46.6
(55.8). cuBLAS has 16 programs for the down projection: its tiles have 128 columns, and programs do not share their
depth.
Bytes, D 2048, F 5632: 35 MB of weights, 8.5 us at 4.1 TB/s; sums of 64 tokens in 4 shares 2 MB, in L2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.dense import FUSED_INTERPRETED, FusedTiles, fused_tile, gate_up
from twell.gpu.shared.launch import ANY, INTERPRETED, MULTIPLE, Descriptor, Kernel, can_overlap, ceil_div
from twell.gpu.shared.layout import Fp8Weights
from twell.gpu.shared.replay import Matrix, Recorded, Space
from twell.gpu.shared.round_fp8 import room_for, round_rows
from twell.gpu.shared.tiles import GateTile, device_facts, start_after
from twell.reference import E4M3

_INTERPRETED = tl.constexpr(INTERPRETED)
_MOST_SHARES = 8  # programs that share a tile's depth, at most


class SmallTiles(NamedTuple):
    gate_up: GateTile
    down: GateTile
    programs: int  # of the down projection: as many as run at once


# (minimum number of tokens, tile); measured on an H200.
_GATE_UP: FusedTiles = (
    (1, GateTile(64, 64, 256, 4, 4)),
    (81, GateTile(128, 64, 128, 4, 6)),
    (1, GateTile(64, 128, 128, 4, 5)),
    (1, GateTile(128, 128, 128, 8, 4)),
)
_DOWN: FusedTiles = (
    (193, GateTile(128, 64, 128, 4, 6)),
    (129, GateTile(64, 64, 128, 4, 6)),
    (1, GateTile(64, 32, 256, 4, 6)),
)
_WAVES = 4 / 3  # of gate and up, at most: 512 tokens at F 5632 take 46 us, cuBLAS 53


def tiles_for(M: int, D: int, F: int, device: torch.device) -> SmallTiles | None:
    """None where these kernels do not run."""
    if INTERPRETED:
        return SmallTiles(FUSED_INTERPRETED, FUSED_INTERPRETED, 12)
    tile = fused_tile(_GATE_UP, M, D, F, device.index, _WAVES)
    if tile is None:
        return None
    return SmallTiles(tile, next(t for least, t in _DOWN if least <= M), device_facts(device.index)[1])


@triton.jit
def _down_fp8_kernel(
    i_h,  # e4m3 [M, F] descriptor
    i_down,  # e4m3 [D, F] descriptor
    i_h_scale,  # fp32 [M]
    i_down_scale,  # fp32 [D]
    m_sums,  # fp32 [shares, M, D]; unused if shares is 1
    m_counters,  # int32 [tiles], 0 before the launch; unused if shares is 1
    o_y,  # [M, D]
    M,
    D,
    F,
    shares,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Each program computes a share of the depth of a tile of y."""
    start_after(OVERLAPS)
    tile, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    tiles_m = tl.cdiv(M, BM)
    m, n = tile % tiles_m, tile // tiles_m
    depth = tl.cdiv(tl.cdiv(F, BK), shares) * BK
    y = tl.zeros((BM, BN), tl.float32)
    for k in range(share * depth, min((share + 1) * depth, F), BK):
        h = i_h.load([m * BM, k])
        down = i_down.load([n * BN, k])
        if _INTERPRETED:  # it cannot multiply e4m3
            h = h.to(tl.float16)
            down = down.to(tl.float16)
        y = tl.dot(h, down.T, y)
    row, col = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    inside = (row[:, None] < M) & (col[None, :] < D)
    at = row[:, None].to(tl.int64) * D + col[None, :]
    is_last = shares == 1
    if shares > 1:
        size = M.to(tl.int64) * D
        tl.store(m_sums + share * size + at, y, mask=inside)
        tl.debug_barrier()  # one thread's atomic stands for the program
        is_last = tl.atomic_add(m_counters + tile, 1, sem="acq_rel", scope="gpu") == shares - 1
        if is_last:
            tl.debug_barrier()
            y = tl.zeros((BM, BN), tl.float32)
            for other in range(shares):
                y += tl.load(m_sums + other * size + at, mask=inside, other=0.0)
    if is_last:
        y = y * tl.load(i_h_scale + row, mask=row < M, other=0.0)[:, None]
        y = y * tl.load(i_down_scale + col, mask=col < D, other=0.0)[None, :]
        tl.store(o_y + at, y.to(o_y.dtype.element_ty), mask=inside)


@functools.cache
def _down(dtype: torch.dtype, tile: GateTile, overlaps: bool) -> Kernel:
    BM, BN, BK, warps, stages = tile
    blocks = (Descriptor(E4M3, (rows, BK)) for rows in (BM, BN))
    tensors = *[torch.float32] * 3, torch.int32, dtype
    constants = {"BM": BM, "BN": BN, "BK": BK, "OVERLAPS": overlaps}
    numbers = ANY, MULTIPLE, MULTIPLE, ANY
    return Kernel(_down_fp8_kernel, (*blocks, *tensors, *numbers), constants, warps=warps, stages=stages)


def forward(x: Tensor, w: Fp8Weights, activation: str, tiles: SmallTiles) -> Tensor:
    """y [..., D] for x [..., D], whose row stride is a multiple of 16 elements."""
    y = x.new_empty(x.shape)
    key = (x.shape, x.stride(-2), x.dtype, len(w.gate), activation, tiles)
    _launch(key, (x, y, *w[:4], w.model_down, w.down_scale), x, y, w, activation == "relu2", tiles)
    return y


@Recorded
def _launch(space: Space, x: Tensor, y: Tensor, w: Fp8Weights, squared: bool, tiles: SmallTiles) -> tuple[Tensor, ...]:
    assert w.up is not None and w.up_scale is not None
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (D, F), M, tile = w.model_down.shape, len(x), tiles.down
    n_tiles = ceil_div(M, tile.BM) * ceil_div(D, tile.BN)
    shares = max(1, min(tiles.programs // n_tiles, _MOST_SHARES))
    sums = space.take(shares, M, D, dtype=torch.float32) if shares > 1 else None
    counters = space.take(n_tiles, dtype=torch.int32) if shares > 1 else None
    of_x, of_h, h = room_for(M, D, space.take), room_for(M, F, space.take), space.take(M, F)
    round_rows(x, of_x)
    gate_up(of_x[0], w.gate, w.up, h, squared, tiles.gate_up, (of_x[1], w.gate_scale, w.up_scale), counters)
    round_rows(h, of_h)
    shared = 0 if sums is None else sums, 0 if counters is None else counters
    kernel = _down(y.dtype, tile, can_overlap())
    factors = Matrix(of_h[0]), Matrix(w.model_down), of_h[1], w.down_scale
    kernel(n_tiles * shares, *factors, *shared, y, M, D, F, shares)
    return ()
