"""Few tokens (M <= 64) of an FFN with FP8 weights: the two kernels of few.py for e4m3; one token on Hopper has those of
hopper_fp8_one.py.

x is rounded row by row, as in a dense FP8 FFN. On Hopper the neurons kernel itself rounds up to 16 tokens; more tokens
are rounded by a launch of their own and multiplied as e4m3. h has x's dtype, sums are fp32.
Bytes, D 2048, F 5632: Wg 11.5 MB, then 4 KB for each neuron that fires; a dense FP8 FFN reads 35 MB.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from twell.gpu.decode.few import Between, kernels_of
from twell.gpu.decode.few_tiles import HopperSumTile, HopperTile, NeuronTile, SumTile, fp8_tiles_of
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.layout import Fp8Weights, aligned
from twell.gpu.shared.replay import Recorded, Space
from twell.gpu.shared.round_fp8 import room_for, round_rows
from twell.plan import MAX_FEW_TOKENS
from twell.reference import E4M3

_Tiles = tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]
_ADD = {"BD": 16, "WARPS": 4}  # hopper_add_kernel: columns of y, warps


def forward(x: Tensor, w: Fp8Weights, activation: str, tiles: _Tiles | None = None, *, settled: bool = False) -> Tensor:
    """y [..., D] for x [..., D], of 1 to 64 tokens. ``w``: with the neuron-major Wd. ``settled``: see few.py."""
    M = x.numel() // x.shape[-1]
    if not 0 < M <= MAX_FEW_TOKENS:
        raise ValueError(f"few_fp8.forward takes 1 to {MAX_FEW_TOKENS} tokens, got {M}")
    x = aligned(x)
    y = torch.empty_like(x)
    key = x.shape, x.stride(-2), x.dtype, w.gate.shape[0], w.up is None, activation, tiles, settled
    _launch(key, (x, y, *w[:6]), x, y, w, activation == "relu2", tiles, settled)
    return y


@Recorded
def _launch(
    space: Space, x: Tensor, y: Tensor, w: Fp8Weights, squared: bool, tiles: _Tiles | None, settled: bool
) -> tuple[Tensor, ...]:
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (M, D), F = x.shape, len(w.gate)
    neurons, sums = tiles or fp8_tiles_of(x, F)
    gate, gate_scale, up, up_scale, down, down_scale = (0 if t is None else t for t in w[:6])
    if M == 1 and isinstance(neurons, HopperTile):
        n_shares = ceil_div(F, neurons.TN)
        a, shares = space.take(F, dtype=torch.float32), space.take(neurons.programs, D, dtype=torch.float32)
        first, second = _kernels_of_one(x.dtype, n_shares, neurons, settled, w.up is not None, squared, can_overlap())
        first(neurons.programs, x, gate, gate_scale, up, up_scale, down, a, shares, D, F)
        second(ceil_div(D, _ADD["BD"]), shares, down_scale, y, D, n_shares)
        return ()
    between, flags = Between.of(space, M, F, neurons), (w.up is not None, squared, False, False)
    first, second = kernels_of(x.dtype, M, D, neurons, sums, settled, False, flags, can_overlap(), E4M3)
    h, words = between.h, between.words
    if isinstance(neurons, HopperTile):
        first(between.programs, x, gate, gate_scale, up, up_scale, down, h, words, M, D, F, x.stride(0))
    else:
        q, x_scale = room_for(M, D, space.take)
        round_rows(x, (q, x_scale))
        scales = x_scale, gate_scale, up_scale
        first(between.programs, q, gate, 0, up, 0, down, h, words, *scales, M, D, F, D)
    if isinstance(sums, HopperSumTile):
        second(ceil_div(D, sums.BD), h, words, down, down_scale, y, M, D, between.n_words)
    else:
        second(ceil_div(D, sums.BD), h, words, down, 0, y, down_scale, M, D, between.n_words, between.last_bits)
    return ()


@functools.cache
def _kernels_of_one(
    dtype: torch.dtype, n_shares: int, tile: HopperTile, settled: bool, gated: bool, squared: bool, overlaps: bool
) -> tuple[Kernel, Kernel]:
    """For one token."""
    from twell.gpu.decode import hopper_fp8_one  # needs Gluon, which the interpreter lacks

    f32, n_tiles = torch.float32, ceil_div(tile.TN, 16)
    fits_twice = n_tiles * 16 * tile.chains * tile.depth <= hopper_fp8_one.FITS_TWICE
    first = Kernel(
        hopper_fp8_one.hopper_one_kernel,
        (dtype, E4M3, f32, E4M3, f32, E4M3, f32, f32, MULTIPLE, MULTIPLE),
        {
            "OVERLAPS": overlaps,
            "EARLY": settled,
            "TN": tile.TN,
            "SUBS": n_tiles,
            "CHAINS": tile.chains,
            "DEPTH": tile.depth,
            "BU": 4,
            "GATED": gated,
            "SQUARED": squared,
        },
        warps=tile.chains,
        registers=hopper_fp8_one.REGISTERS if fits_twice else None,
    )
    constants = {"OVERLAPS": overlaps, "BP": max(32, power_of_2(n_shares)), **_ADD}
    second = Kernel(hopper_fp8_one.hopper_add_kernel, (f32, f32, dtype, MULTIPLE, ANY), constants, warps=_ADD["WARPS"])
    return first, second
