"""Few tokens (M <= 64) of an FFN with FP8 weights: the two steps of few.py, from e4m3.

x is rounded row by row, as for a dense FP8 FFN: on Hopper by the first kernel itself for up to 16 tokens, otherwise by
a launch of its own, and then e4m3 is multiplied as it is. h has x's dtype, sums are fp32.
Bytes, D 2048, F 5632: Wg 11.5 MB, then 4 KB for each neuron that fires; a dense FP8 FFN reads 35 MB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.gpu.decode.few import Between, kernels_of
from twell.gpu.decode.tiles import HopperSumTile, HopperTile, NeuronTile, SumTile, fp8_tiles_of
from twell.gpu.prefill.split import aligned
from twell.gpu.prefill.split_fp8 import Fp8Weights
from twell.gpu.shared.fp8 import room_for, round_rows
from twell.gpu.shared.launch import can_overlap, ceil_div
from twell.gpu.shared.replay import Recorded, Space
from twell.plan import MAX_FEW_TOKENS
from twell.reference import E4M3

_Tiles = tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]


def forward(x: Tensor, w: Fp8Weights, activation: str, tiles: _Tiles | None = None, *, settled: bool = False) -> Tensor:
    """y [..., D] for x [..., D], of 1 to 64 tokens. ``w``: with Wd neuron by neuron. ``settled``: see few.py."""
    M = x.numel() // x.shape[-1]
    if not 0 < M <= MAX_FEW_TOKENS:
        raise ValueError(f"few_fp8.forward takes 1 to {MAX_FEW_TOKENS} tokens, got {M}")
    x = aligned(x)
    y = torch.empty_like(x)
    key = x.shape, x.stride(-2), x.dtype, w.gate.shape[0], w.up is None, activation, tiles, settled
    _launch(key, (x, y, *w[:6]), activation == "relu2", tiles, settled)
    return y


@Recorded
def _launch(
    space: Space,
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor | None,
    up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    squared: bool,
    tiles: _Tiles | None,
    settled: bool,
) -> tuple[Tensor, ...]:
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (M, D), F = x.shape, len(gate)
    neurons, sums = tiles or fp8_tiles_of(x, F)
    between, flags = Between.of(space, M, F, neurons), (up is not None, squared, False, False)
    first, second = kernels_of(x.dtype, M, D, neurons, sums, settled, False, flags, can_overlap(), E4M3)
    h, words = between.h, between.words
    of_up, of_up_scale = (0 if t is None else t for t in (up, up_scale))
    if isinstance(neurons, HopperTile):
        first(between.programs, x, gate, gate_scale, of_up, of_up_scale, down, h, words, M, D, F, x.stride(0))
    else:
        q, x_scale = room_for(M, D, space.take)
        round_rows(x, (q, x_scale))
        scales = x_scale, gate_scale, of_up_scale
        first(between.programs, q, gate, 0, of_up, 0, down, h, words, *scales, M, D, F, D)
    if isinstance(sums, HopperSumTile):
        second(ceil_div(D, sums.BD), h, words, down, down_scale, y, M, D, between.n_words)
    else:
        second(ceil_div(D, sums.BD), h, words, down, 0, y, down_scale, M, D, between.n_words, between.last_bits)
    return ()
