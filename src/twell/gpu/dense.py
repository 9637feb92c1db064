"""Layers that run densely: cuBLAS's GEMMs, and kernels for the elementwise parts, which a compiler would fuse.

Inference: h = a(z) * u in place of z in one pass, 3 * M * F elements, 0.55 GB at M 16384, F 5632 in bf16 (0.13 ms on an
H200). Small batches, whose tiles are one wave (M up to 384 at F 5632), compute gate and up in one GEMM with h in its
epilogue: us per layer (compiled): M 64 25.4 (31.4), 128 28.1 (32.1), 192 31.5 (35.1), 256 36.9 (38.0), 384 48.0 (52.2).
Training: nine GEMMs and the two passes of ``activation.py``; z and u are kept, h is computed again.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as nnf
import triton
import triton.language as tl
from torch import Tensor

from twell import reference
from twell.gpu.shared.launch import ANY, INTERPRETED, LONG_MULTIPLE, MULTIPLE, Descriptor, Kernel, can_overlap, ceil_div
from twell.gpu.shared.replay import Matrix, Recorded, Space
from twell.gpu.shared.tiles import GateTile, device_facts, relu, start_after
from twell.gpu.training.activation import activate, activation_gradients_
from twell.gpu.training.statistics import write_statistics
from twell.reference import Gradients, Weights
from twell.saved import saved_length

_BLOCK = 2048
FusedTiles = tuple[tuple[int, GateTile], ...]  # (minimum number of tokens, tile)
_FUSED: FusedTiles = (  # measured on an H200
    (1, GateTile(64, 64, 128, 4, 4)),
    (81, GateTile(128, 64, 64, 4, 6)),
    (1, GateTile(64, 128, 64, 4, 4)),
    (1, GateTile(128, 128, 64, 8, 4)),
)
FUSED_INTERPRETED = GateTile(32, 32, 32, 4, 2)
_THREADS, _INTERPRETED = tl.constexpr(128), tl.constexpr(INTERPRETED)
_QUICK_ROWS = 256  # M is padded to this: cuBLAS's down projection takes 15.5 us for 200 tokens, 12.9 for 256
_SLOW_ROWS = 192  # up to here, padding does not pay


@triton.jit
def _activate_kernel(
    m_z, i_u, n, BLOCK: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr, OVERLAPS: tl.constexpr
):
    start_after(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = relu(tl.load(m_z + at, mask=inside, other=0.0).to(tl.float32))
    if SQUARED:
        a = a * a
    if GATED:
        a = a * tl.load(i_u + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(m_z + at, a.to(m_z.dtype.element_ty), mask=inside)


@functools.cache
def _kernel(dtype: torch.dtype, gated: bool, squared: bool, overlaps: bool) -> Kernel:
    constants = {"BLOCK": _BLOCK, "GATED": gated, "SQUARED": squared, "OVERLAPS": overlaps}
    return Kernel(_activate_kernel, (dtype, dtype, LONG_MULTIPLE), constants, warps=8)


@Recorded
def _launch(space: Space, z: Tensor, u: Tensor | None, squared: bool) -> tuple[Tensor, ...]:
    """z = a(z) * u."""
    n = z.numel()
    _kernel(z.dtype, u is not None, squared, can_overlap())(ceil_div(n, _BLOCK), z, 0 if u is None else u, n)
    return ()


@triton.jit
def _clear(o_counters, n):
    at = tl.program_id(0) * _THREADS + tl.arange(0, _THREADS)
    for first in range(0, n, tl.num_programs(0) * _THREADS):
        tl.store(o_counters + first + at, tl.zeros((_THREADS,), tl.int32), mask=first + at < n)


@triton.jit
def _gate_up_kernel(
    i_x,  # [M, D] descriptor
    i_gate,  # [F, D] descriptor
    i_up,  # [F, D] descriptor
    i_x_scale,  # SCALED: fp32 [M]
    i_gate_scale,  # SCALED: fp32 [F]
    i_up_scale,  # SCALED: fp32 [F]
    o_counters,  # int32 [n_counters], set to 0 for the next kernel
    o_h,  # [M, F]
    M,
    D,
    F,
    n_counters,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SQUARED: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Each program computes a tile of h."""
    start_after(OVERLAPS)
    tiles_m = tl.cdiv(M, BM)
    m, n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    z = tl.zeros((BM, BN), tl.float32)
    u = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        x = i_x.load([m * BM, k])
        gate = i_gate.load([n * BN, k])
        up = i_up.load([n * BN, k])
        if SCALED and _INTERPRETED:  # it cannot multiply e4m3
            x = x.to(tl.float16)
            gate = gate.to(tl.float16)
            up = up.to(tl.float16)
        z = tl.dot(x, gate.T, z)
        u = tl.dot(x, up.T, u)
    dtype = o_h.dtype.element_ty
    row, col = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    _clear(o_counters, n_counters)
    if SCALED:
        x_scale = tl.load(i_x_scale + row, mask=row < M, other=0.0)[:, None]
        z = z * x_scale * tl.load(i_gate_scale + col, mask=col < F, other=0.0)[None, :]
        u = u * x_scale * tl.load(i_up_scale + col, mask=col < F, other=0.0)[None, :]
        u = u.to(dtype).to(tl.float32)  # rounded, as cuBLAS's output
    a = relu(z).to(dtype).to(tl.float32)
    if SQUARED:
        a = a * a
    inside = (row[:, None] < M) & (col[None, :] < F)
    tl.store(o_h + row[:, None].to(tl.int64) * F + col[None, :], (a * u).to(dtype), mask=inside)


@functools.cache
def _gate_up(dtype: torch.dtype, factors: torch.dtype, tile: GateTile, squared: bool, overlaps: bool) -> Kernel:
    """``factors``: the dtype of x and the weights: e4m3, or the dtype of h."""
    BM, BN, BK, warps, stages = tile
    blocks = (Descriptor(factors, (rows, BK)) for rows in (BM, BN, BN))
    tensors = *[torch.float32] * 3, torch.int32, dtype
    scaled = factors != dtype
    constants = {"BM": BM, "BN": BN, "BK": BK, "SQUARED": squared, "SCALED": scaled, "OVERLAPS": overlaps}
    numbers = ANY, MULTIPLE, MULTIPLE, ANY
    return Kernel(_gate_up_kernel, (*blocks, *tensors, *numbers), constants, warps=warps, stages=stages)


def gate_up(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    h: Tensor,
    squared: bool,
    tile: GateTile,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    counters: Tensor | None = None,
) -> None:
    """Write h [M, F] for x [M, D] and weights [F, D].

    ``scales``: of x, gate and up if they are e4m3. ``counters`` (int32) are set to 0."""
    (M, D), F = x.shape, len(gate)
    kernel = _gate_up(h.dtype, x.dtype, tile, squared, can_overlap())
    others = *(scales or (0, 0, 0)), 0 if counters is None else counters
    n = 0 if counters is None else counters.numel()
    programs = ceil_div(M, tile.BM) * ceil_div(F, tile.BN)
    kernel(programs, Matrix(x), Matrix(gate), Matrix(up), *others, h, M, D, F, n)


@Recorded
def _launch_gate_up(
    space: Space, x: Tensor, gate: Tensor, up: Tensor, h: Tensor, squared: bool, tile: GateTile
) -> tuple[Tensor, ...]:
    gate_up(x.view(-1, x.shape[-1]), gate, up, h, squared, tile)
    return ()


def fused_tile(table: FusedTiles, M: int, D: int, F: int, device: int, waves: float = 1.0) -> GateTile | None:
    """The table's first tile for M tokens with which the tiles of h fill at least half of the SMs and all run at once.
    With the table's last tile they may take ``waves`` waves. None if there is no such tile, and for shapes that were
    not measured."""
    capability, processors = device_facts(device)
    if (
        capability != 90 or not 32 * processors <= F <= 64 * processors or not 1024 <= D <= 4096
    ):  # others were not measured
        return None
    for least, tile in table:
        n = ceil_div(M, tile.BM) * ceil_div(F, tile.BN)
        if least <= M and processors // 2 <= n <= processors * (waves if tile is table[-1][1] else 1):
            return tile
    return None


def _fused_tile(x: Tensor, w: Weights) -> GateTile | None:
    """None: gate and up run as separate GEMMs."""
    gate, up = w.gate, w.up
    if up is None or w.gate_bias is not None or w.up_bias is not None or x.element_size() != 2:
        return None
    if not (x.is_contiguous() and gate.is_contiguous() and up.is_contiguous()):
        return None
    if up.dtype != x.dtype or up.shape != gate.shape or up.device != x.device:
        return None
    F, D = gate.shape
    M = x.numel() // D
    if M == 0 or F % 16 or D % 16 or (x.data_ptr() | gate.data_ptr() | up.data_ptr()) % 16:
        return None
    if INTERPRETED:
        return FUSED_INTERPRETED if x.dtype == torch.float16 else None
    return fused_tile(_FUSED, M, D, F, x.device.index)


def infer(x: Tensor, w: Weights, activation: str) -> Tensor:
    """y [..., D] for x [..., D]."""
    gate, up, down, b_gate, b_up, b_down = w
    tile = _fused_tile(x, w)
    if tile is not None:
        F, D = gate.shape
        M = x.numel() // D
        rows = _QUICK_ROWS if _SLOW_ROWS < M < _QUICK_ROWS else M
        h = x.new_empty(rows, F)
        given = x, gate, up, h
        _launch_gate_up((M, x.dtype, F, D, activation), given, *given, activation == "relu2", tile)
        return nnf.linear(h, down, b_down)[:M].view(x.shape)
    z = nnf.linear(x, gate, b_gate)
    u = None if up is None else nnf.linear(x, up, b_up)
    n = z.numel()
    if n:
        _launch((n, z.dtype, up is None, activation), (z, u), z, u, activation == "relu2")
    return nnf.linear(z, down, b_down)


def forward(
    x: Tensor, w: Weights, activation: str, token_mask: Tensor | None, *, want_stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, l1_sum, counts, tensor kept for the backward: see saved.py)."""
    M, F, gated = len(x), len(w.gate), w.up is not None
    kept = x.new_empty(saved_length(M, F, (F, 0, 0), x.dtype, gated=gated, save=True))
    for out, weight, bias in zip(split_in_two(kept, M, F, gated=gated), w[:2], w[3:5], strict=True):
        if out is not None and weight is not None:
            if bias is None:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.addmm(bias, x, weight.t(), out=out)
    if want_stats:
        l1_sum, counts = x.new_empty((), dtype=torch.float32), x.new_empty(F, dtype=torch.int32)
    else:
        l1_sum, counts = reference.no_statistics(x)
    key = (M, F, x.dtype, gated, activation, token_mask is None, want_stats)
    tensors = (kept, l1_sum, counts, token_mask)
    (h,) = _launch_forward(key, tensors, *tensors, M, F, gated, activation == "relu2", want_stats)
    return nnf.linear(h, w.down, w.down_bias), l1_sum, counts, kept


@Recorded
def _launch_forward(
    space: Space,
    kept: Tensor,
    l1_sum: Tensor,
    counts: Tensor,
    token_mask: Tensor | None,
    M: int,
    F: int,
    gated: bool,
    squared: bool,
    want_stats: bool,
) -> tuple[Tensor, ...]:
    """h, and the statistics."""
    z, u = split_in_two(kept, M, F, gated=gated)
    h, *parts = activate(z, u, token_mask, squared=squared, wants_statistics=want_stats, space=space)
    if want_stats:
        write_statistics(l1_sum, counts, parts, None, None, token_mask)
    return (h,)


def split_in_two(kept: Tensor, M: int, F: int, *, gated: bool) -> tuple[Tensor, Tensor | None]:
    """z and u [M, F], as views of the kept tensor."""
    z = kept.as_strided((M, F), (F, 1))
    return z, kept.as_strided((M, F), (F, 1), kept.storage_offset() + M * F) if gated else None


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    kept: Tensor,
    activation: str,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """As ``reference.backward``. ``kept``: see ``forward``."""
    squared, gated = activation == "relu2", w.up is not None
    h = dy @ w.down  # dh; _launch_backward overwrites it with h
    dz = du = h
    if len(x):
        key = (h.shape, h.dtype, gated, activation, dl1 is None, token_mask is None)
        tensors = (h, kept, dl1, token_mask)
        dz, du = _launch_backward(key, tensors, *tensors, gated, squared)

    def dx() -> Tensor:
        gradient = dz @ w.gate
        return gradient if w.up is None else gradient.addmm_(du, w.up)

    def down() -> Tensor:
        return (h.t() @ dy).t() if reference.is_neuron_major(w.down) else dy.t() @ h

    when = functools.partial(reference.gradient_if, x)
    return Gradients(
        when(needs[0], dx),
        Weights(
            gate=when(needs[1], lambda: dz.t() @ x),
            up=when(needs[2], lambda: du.t() @ x) if gated else None,
            down=when(needs[3], down),
            gate_bias=when(needs[4], lambda: dz.sum(0)),
            up_bias=when(needs[5], lambda: du.sum(0)) if gated else None,
            down_bias=when(needs[6], lambda: dy.sum(0)),
        ),
    )


@Recorded
def _launch_backward(
    space: Space,
    dh: Tensor,
    kept: Tensor,
    dl1: Tensor | None,
    token_mask: Tensor | None,
    gated: bool,
    squared: bool,
) -> tuple[Tensor, ...]:
    """Returns dz and du; overwrites dh with h."""
    z, u = split_in_two(kept, *dh.shape, gated=gated)
    dz, du, _ = activation_gradients_(z, u, dh, dl1, token_mask, squared=squared, space=space)
    return dz, du
