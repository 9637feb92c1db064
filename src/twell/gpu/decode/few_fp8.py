"""Few tokens (M <= 64) of an FFN with FP8 weights: the two steps of few.py, from e4m3.

x is rounded row by row, as for a dense FP8 FFN: on Hopper by the first kernel itself for up to 16 tokens, otherwise by
a launch of its own, and then e4m3 is multiplied as it is. h has x's dtype, sums are fp32.
Bytes, D 2048, F 5632: Wg 11.5 MB, then 4 KB for each neuron that fires; a dense FP8 FFN reads 35 MB.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from twell.gpu.decode import steps
from twell.gpu.decode.few import BITS
from twell.gpu.decode.tiles import WORDS, HopperSumTile, HopperTile, NeuronTile, SumTile, fp8_tiles_for
from twell.gpu.prefill.split import aligned
from twell.gpu.prefill.split_fp8 import Fp8Weights
from twell.gpu.shared.fp8 import room_for, round_rows
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.replay import INTERPRETED, Recorded, Space
from twell.gpu.shared.tiles import device_facts
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
    if tiles is None:
        capability, processors = (90, 2) if INTERPRETED else device_facts(x.device.index)
        tiles = fp8_tiles_for(M, D, F, capability=capability, processors=processors)
    neurons, sums = tiles
    BM, BN, TN = max(16, power_of_2(M)), neurons.BN, neurons.TN or neurons.BN
    n_tiles = ceil_div(F, TN)
    n_words, programs = ceil_div(n_tiles * BN, 64), max(n_tiles, neurons.programs)
    h, words = space.take(F, BM), space.take(ceil_div(programs * BN, 64), dtype=torch.int64)
    first, second = kernels_of(x.dtype, M, D, neurons, sums, settled, (up is not None, squared), can_overlap())
    if isinstance(neurons, HopperTile):
        weights = (0 if t is None else t for t in (gate, gate_scale, up, up_scale, down))
        first(programs, x, *weights, h, words, M, D, F, x.stride(0))
    else:
        q, x_scale = room_for(M, D, space.take)
        round_rows(x, (q, x_scale))
        scales = x_scale, gate_scale, 0 if up_scale is None else up_scale
        first(programs, q, gate, 0, 0 if up is None else up, 0, down, h, words, *scales, M, D, F, D)
    if isinstance(sums, HopperSumTile):
        second(ceil_div(D, sums.BD), h, words, down, down_scale, y, M, D, n_words)
    else:
        last_bits = n_tiles * BN - 64 * (n_words - 1)
        second(ceil_div(D, sums.BD), h, words, down, 0, y, down_scale, M, D, n_words, last_bits)
    return ()


def kernels_of(
    dtype: torch.dtype,
    M: int,
    D: int,
    neurons: NeuronTile | HopperTile,
    sums: SumTile | HopperSumTile,
    settled: bool,
    flags: tuple[bool, ...],
    overlaps: bool,
) -> tuple[Kernel, Kernel]:
    """The first and the second kernel for M tokens; ``flags``: gated, squared."""
    stride, n_tokens = (neurons.TN or 64) if neurons.BN == 64 else 64, ANY if M % 16 else MULTIPLE
    first = _first_kernel(dtype, D, power_of_2(M), n_tokens, neurons, settled, flags, overlaps)
    return first, _second_kernel(dtype, max(16, power_of_2(M)), n_tokens, stride, sums, overlaps)


@functools.cache
def _first_kernel(
    dtype: torch.dtype,
    D: int,
    tokens: int,
    n_tokens: int,
    tile: NeuronTile | HopperTile,
    settled: bool,
    flags: tuple[bool, ...],
    overlaps: bool,
) -> Kernel:
    gated, squared = flags
    f32, sizes = torch.float32, (n_tokens, MULTIPLE, MULTIPLE, MULTIPLE)
    constants: dict[str, Any]
    if isinstance(tile, HopperTile):
        from twell.gpu.decode import hopper_fp8  # needs Gluon, of which there is none in the interpreter

        constants = {
            "OVERLAPS": overlaps,
            "EARLY": settled,
            "HM": max(16, tokens),
            "BM": max(8, tokens),
            "TOKENS": tokens,
            "TN": tile.TN,
            "SUBS": ceil_div(tile.TN, 16),
            "CHAINS": tile.chains,
            "DEPTH": tile.depth,
            "PREFETCHES": overlaps,
            "GATED": gated,
            "SQUARED": squared,
        }
        arguments: tuple[Any, ...] = (dtype, E4M3, f32, E4M3, f32, E4M3, dtype, BITS[tile.BN], *sizes)
        return Kernel(hopper_fp8.hopper_fp8_neurons_kernel, arguments, constants, warps=tile.chains)
    constants = {
        "SCALED": True,
        "PRECISION": "tf32",  # which says nothing of e4m3
        "OVERLAPS": overlaps,
        "BM": max(16, tokens),
        "TN": tile.TN or tile.BN,
        "BN": tile.BN,
        "BK": min(tile.BK, power_of_2(D)),
        "SLOTS": 0,
        "CHAINS": 1,  # as the next two of SLOTS
        "DEPTH": 16,
        "CHAIN_STAGES": 1,
        "PREFETCHES": overlaps,
        "GATED": gated,
        "SQUARED": squared,
        "HAS_GATE_BIAS": False,
        "HAS_UP_BIAS": False,
    }
    arguments = (E4M3, E4M3, dtype, E4M3, dtype, E4M3, dtype, BITS[tile.BN], f32, f32, f32, *sizes)
    return Kernel(steps.neurons_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


@functools.cache
def _second_kernel(
    dtype: torch.dtype, BM: int, n_tokens: int, stride: int, tile: SumTile | HopperSumTile, overlaps: bool
) -> Kernel:
    f32, constants = torch.float32, dict[str, Any]()
    if isinstance(tile, HopperSumTile):
        from twell.gpu.decode import hopper_fp8

        constants = {
            "STRIDE": stride,
            "OVERLAPS": overlaps,
            "BM": BM,
            "BW": WORDS,
            "BS": tile.BS,
            "BD": tile.BD,
            "CHAINS": tile.chains,
        }
        arguments: tuple[Any, ...] = (dtype, torch.int64, E4M3, f32, dtype, n_tokens, MULTIPLE, ANY)
        return Kernel(hopper_fp8.hopper_fp8_sums_kernel, arguments, constants, warps=tile.chains)
    constants = {
        "STRIDE": stride,
        "SCALED": True,
        "PRECISION": "tf32",
        "OVERLAPS": overlaps,
        "BM": BM,
        "BW": tile.BW,
        "BS": tile.BS,
        "BD": tile.BD,
        "HAS_DOWN_BIAS": False,
        "STAGES": tile.stages,
    }
    arguments = (dtype, torch.int64, E4M3, dtype, dtype, f32, n_tokens, MULTIPLE, ANY, ANY)
    return Kernel(steps.sums_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)
