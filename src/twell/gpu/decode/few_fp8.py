"""Few tokens of an FFN with FP8 weights: x is rounded, then the two steps of few.py by the kernels of steps.py.

Bytes, D 2048, F 5632: Wg 12 MB, then 4 KB for each neuron that fires for any token; dense FP8 reads 35 MB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.gpu.decode.few import kernels_of
from twell.gpu.decode.tiles import NeuronTile, SumTile, divided
from twell.gpu.prefill.split import aligned
from twell.gpu.prefill.split_fp8 import Fp8Weights
from twell.gpu.shared.fp8 import E4M3, room_for, round_rows
from twell.gpu.shared.launch import can_overlap, ceil_div, power_of_2
from twell.gpu.shared.replay import INTERPRETED, Recorded, Space
from twell.gpu.shared.tiles import device_facts

_SUMS = {16: SumTile(16, 4, 4, BS=2), 64: SumTile(16, 4, 4, BS=2)}  # by the most tokens


def tiles_of(x: Tensor, F: int) -> tuple[NeuronTile, SumTile]:
    """For x [M, D]."""
    if INTERPRETED:
        return NeuronTile(16, 32, 4, 2), SumTile(32, 4, 2, BS=2, BW=2)
    return tiles_for(len(x), F, device_facts(x.device.index)[1])


def tiles_for(M: int, F: int, processors: int) -> tuple[NeuronTile, SumTile]:
    TN, programs = divided(F, 64, processors)
    neurons = NeuronTile(64, 256, 4, 4, 16, TN, programs) if M <= 16 else NeuronTile(64, 128, 8, 6, 0, TN, programs)
    return neurons, next(tile for most, tile in _SUMS.items() if M <= most)


def forward(x: Tensor, w: Fp8Weights, activation: str, tiles: tuple[NeuronTile, SumTile] | None = None) -> Tensor:
    """y [..., D] for x [..., D] in 16 bits, of 1 to 64 tokens."""
    x = aligned(x)
    y = x.new_empty(x.shape)
    key = (x.shape, x.stride(-2), x.dtype, len(w.gate), activation, w.up is None, tiles)
    _launch(key, (x, y, *w[:6]), activation == "relu2", tiles)
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
    tiles: tuple[NeuronTile, SumTile] | None,
) -> tuple[Tensor, ...]:
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (M, D), F = x.shape, len(gate)
    neurons, sums = tiles or tiles_of(x, F)
    BM, BN, TN = max(16, power_of_2(M)), neurons.BN, neurons.TN or neurons.BN
    n_tiles = ceil_div(F, TN)
    n_words, programs = ceil_div(n_tiles * BN, 64), max(n_tiles, neurons.programs)
    h, words = space.take(F, BM), space.take(ceil_div(programs * BN, 64), dtype=torch.int64)
    q, x_scale = room_for(M, D, space.take)
    round_rows(x, (q, x_scale))
    flags = up is not None, squared, False, False
    first, second = kernels_of(x.dtype, M, D, neurons, sums, False, False, flags, can_overlap(), E4M3)
    of_up = (0, 0) if up is None or up_scale is None else (up, up_scale)
    first(programs, q, gate, 0, of_up[0], 0, down, x_scale, gate_scale, of_up[1], h, words, M, D, F, D)
    last_bits = n_tiles * BN - 64 * (n_words - 1)
    second(ceil_div(D, sums.BD), h, words, down, 0, down_scale, y, M, D, n_words, last_bits)
    return ()
