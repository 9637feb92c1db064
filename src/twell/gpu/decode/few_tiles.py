"""Tile sizes of the kernels for few tokens, and where the Gluon kernels for Hopper can run."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from twell.gpu.shared.launch import ceil_div, power_of_2
from twell.gpu.shared.replay import INTERPRETED
from twell.gpu.shared.tiles import device_facts
from twell.plan import MAX_FEW_TOKENS

_SHARED_KIB = {80: 163, 90: 227, 100: 227}  # per program; 99 elsewhere
_GLUON = ("3.6.", "3.7.")  # versions of Triton with which hopper.py was tested
HOPPER_CHAINS = 8  # warps of hopper_neurons_kernel, each with a share of D
_CHAINS_FP8 = {1: 8, 8: 16, 16: 8}  # hopper_one_kernel and hopper_fp8_neurons_kernel; key: the largest M
WORDS = 128  # mask words that a sums kernel processes at once


class NeuronTile(NamedTuple):
    """Neurons (16, 32 or 64) and depth of a tile, warps, stages.

    slots: how many neurons that fire compute u at once (16, not in fp32); 0: all of the tile's
    TN: neurons of a program, if fewer than BN; 0: BN
    programs: the minimum"""

    BN: int
    BK: int
    warps: int
    stages: int
    slots: int = 0
    TN: int = 0
    programs: int = 0


class HopperTile(NamedTuple):
    """hopper_neurons_kernel: neurons of a program, minimum number of programs, depth of a chain, and chains."""

    TN: int
    programs: int
    depth: int
    BN: int = 64  # mask bits of a program
    chains: int = HOPPER_CHAINS


class SumTile(NamedTuple):
    """Columns of y, warps, stages; bits of each word (1 or 2) and words processed at once."""

    BD: int
    warps: int
    stages: int
    BS: int = 1
    BW: int = WORDS


class HopperSumTile(NamedTuple):
    """hopper_sums_kernel: bits of each word processed at once; warps; columns of y."""

    BS: int
    chains: int
    BD: int = 16


_SUMS_ON_HOPPER: dict[int, SumTile | HopperSumTile] = {  # key: the largest M
    8: HopperSumTile(3, 4),
    16: HopperSumTile(2, 4),
    32: HopperSumTile(10, 8),
    64: SumTile(16, 4, 4, BS=2),
}
_SUMS_OF_FP8: dict[int, HopperSumTile] = {
    4: HopperSumTile(2, 4),
    16: HopperSumTile(3, 4),
    32: HopperSumTile(5, 8),
    64: HopperSumTile(6, 4),
}
_INTERPRETED = NeuronTile(16, 32, 4, 2), SumTile(32, 4, 2, BS=2, BW=2)  # tiny


def why_not_hopper(capability: int, version: str = triton.__version__) -> str | None:
    """Why the Gluon kernels cannot run, or None."""
    if capability != 90:
        return "for sm_90"
    return None if version.startswith(_GLUON) else f"tried with Triton 3.6 and 3.7, not {version}"


def tiles_of(x: Tensor, F: int) -> tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]:
    """For the two kernels of few tokens x [M, D]."""
    if INTERPRETED:
        return _INTERPRETED
    capability, processors = device_facts(x.device.index)
    M, D = x.shape
    return tiles_for(M, D, F, element_size=x.element_size(), capability=capability, processors=processors)


def fp8_tiles_of(x: Tensor, F: int) -> tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]:
    """As ``tiles_of``, for e4m3 weights."""
    if INTERPRETED:
        return _INTERPRETED
    capability, processors = device_facts(x.device.index)
    M, D = x.shape
    return fp8_tiles_for(M, D, F, capability=capability, processors=processors)


def tiles_for(
    tokens: int,
    D: int,
    F: int,
    *,
    element_size: int = 2,
    capability: int = 90,
    processors: int = 132,
) -> tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]:
    """Measured on an H200 at D 2048, F 5632 and at D 4096, F 14336; correct for any shape and GPU."""
    shared = 1024 * _SHARED_KIB.get(capability, 99)
    BM = max(16, power_of_2(tokens))
    sums: SumTile | HopperSumTile
    if why_not_hopper(capability) is None and element_size == 2:
        sums = next(tile for most, tile in _SUMS_ON_HOPPER.items() if tokens <= most or most == MAX_FEW_TOKENS)
        hopper_tile = _hopper_tile(tokens, D, F, processors)
        if hopper_tile is not None:
            return hopper_tile, sums
    else:
        room = shared * 3 // 4 // (WORDS * (16 + BM) * element_size)  # blocks; a stage takes BS
        BS = min(1 if tokens <= 16 else 2, max(1, room))
        sums = SumTile(16, 4, max(1, min(4, 1 + room // BS)), BS)
    has_room = shared > 99 * 1024 and element_size == 2
    BN = 32 if 100 <= capability < 120 else 64  # Triton 3.7 cannot compile tcgen05's narrow tiles
    BK = 512 // element_size**2
    warps = (
        8 if tokens > 32 and (capability < 90 or element_size == 4) else 4
    )  # more registers, where there is no wgmma
    stages = max(1, min(6, shared // ((BN + BM) * BK * element_size)))
    neurons = NeuronTile(BN, BK, warps, stages, slots=16 if tokens <= 16 and has_room else 0)
    if capability >= 90 and BN == 64:
        TN, programs = _divided(F, BN, processors)
        neurons = neurons._replace(TN=TN, programs=programs)
        if programs > processors and tokens > 16 and capability == 90 and element_size == 2:
            neurons = neurons._replace(stages=4 if tokens <= 32 else 3)  # so that two programs fit an SM
            sums = HopperSumTile(6, 8) if isinstance(sums, HopperSumTile) else SumTile(32, 4, 4, BS=2)
    return neurons, sums


def _divided(F: int, most: int, processors: int) -> tuple[int, int]:
    """(neurons of a program, at most ``most``; programs), with equally many programs for every SM.

    If possible, the number of mask words is a multiple of the words that a sums kernel processes at once."""
    programs = processors * ceil_div(F, most * processors)
    words = programs // WORDS * WORDS or programs
    return (ceil_div(F, words), programs) if ceil_div(F, words) <= most else (ceil_div(F, programs), programs)


def _hopper_tile(tokens: int, D: int, F: int, processors: int) -> HopperTile | None:
    """None where an SM's rows of the gate do not fit its shared memory beside a program of the sums kernel."""
    if tokens > 16:
        return None
    TN, programs = _divided(F, 64, processors)
    depth = max(64, power_of_2(ceil_div(D, HOPPER_CHAINS)))
    size = 16 * ceil_div(TN, 16) * HOPPER_CHAINS * depth * 2
    return HopperTile(TN, programs, depth) if programs == processors and depth <= 256 and size <= 192 * 1024 else None


def fp8_tiles_for(
    tokens: int, D: int, F: int, *, capability: int = 90, processors: int = 132
) -> tuple[NeuronTile | HopperTile, SumTile | HopperSumTile]:
    """For e4m3 weights. Measured on an H200 at D 2048, F 5632; correct for any shape and GPU."""
    TN, programs = _divided(F, 64, processors)
    depth, stages = (256, 6) if tokens <= 32 else (128, 8)
    neurons: NeuronTile | HopperTile = NeuronTile(64, depth, 4, stages, TN=TN, programs=programs)
    if why_not_hopper(capability) is not None:
        return neurons, SumTile(16, 4, 2)
    chains = next((chains for most, chains in _CHAINS_FP8.items() if tokens <= most), 0)
    if chains and programs == processors and D <= 2048:
        neurons = HopperTile(TN, programs, max(64, power_of_2(ceil_div(D, chains))), chains=chains)
    return neurons, next(tile for most, tile in _SUMS_OF_FP8.items() if tokens <= most)
