"""Few tokens (M <= 64), as in generation: read all of the gate, and of up and down only the neurons that fire.

    neurons kernel   z = x Wg^T + bg;  for neurons that fire for any token: u = x Wu^T + bu;  h = a(relu(z)) * u
    sums kernel      y = sum over those neurons n of h_n Wd_n,  + bd

A program of the neurons kernel has TN neurons and the whole of D, since ReLU needs the complete sum. It sets one bit
for each neuron that fires and prefetches these neurons' rows of Wd. A program of the sums kernel takes the lowest set
bit of every mask word, then the next ones, and sums those neurons for BD columns of y. No sum depends on timing and no
grid on a count, so CUDA graphs can capture both kernels.

Variants: screen.py has a neurons kernel for one token and a frozen gate, followed by ``sum_kernel``; hopper.py has, for
Hopper, a neurons kernel for up to 16 tokens and a sums kernel for up to 32.

From Hopper on a kernel's programs start while the preceding kernel ends, each on the SM with the most free room. An SM
that had no program of the preceding kernel would get several of the next one, and all others would wait for it. So the
neurons kernel has as many programs as there are SMs, or a multiple, even if some have no neurons.

A token with inf or NaN in x has z = inf, -inf or NaN everywhere. -inf counts as firing: h = 0 * u is NaN, as in a dense
FFN, where u is inf or NaN.

Legend: M tokens, D model width, F neurons, U neurons that fire for any token.
Weights: Wg, Wu [F, D] as the model has them, Wd neuron-major [F, D].
Bytes, D 2048, F 5632, bf16: Wg 23 MB, then 8 KB for each of U neurons (29 at M 1, 0.2 MB; about 1000 at M 64 of skew29,
8 MB); dense reads 69 MB.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.gpu.decode import screen, steps
from twell.gpu.decode.few_tiles import WORDS, HopperSumTile, HopperTile, NeuronTile, SumTile, tiles_of
from twell.gpu.decode.screen import Screen
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, can_overlap, ceil_div, power_of_2
from twell.gpu.shared.layout import aligned, ready
from twell.gpu.shared.replay import Recorded, Space
from twell.plan import MAX_FEW_TOKENS
from twell.reference import Weights

_BITS = {
    8: torch.uint8,
    16: torch.int16,
    32: torch.int32,
    64: torch.int64,
}  # dtype of a mask with one bit per neuron of a tile
_CHAINS, _CHAIN_DEPTH, _CHAIN_STAGES = 4, 128, 4  # up for few rows: D is divided among warps
_ONE = {"BU": 32, "BD": 32}  # sum_kernel: neurons at once, columns of y


def forward(
    x: Tensor,
    w: Weights,
    activation: str,
    tiles: tuple[NeuronTile | HopperTile, SumTile | HopperSumTile] | None = None,
    screened: Screen | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """y [..., D] for x [..., D], of 1 to 64 tokens.

    ``w``: the weights, Wd neuron-major as [D, F] or [F, D]. ``screened``: the gate's screen, for M 1. ``settled``:
    nothing that is still in flight writes the gate, so it may be read before the preceding kernel has ended.

    The key contains all strides: a call whose launches are repeated checks nothing else."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)  # its code is warmer than new_empty's
    run = _unscreened if screened is None else _screened_token
    tensors = (x, y, *w) if screened is None else (x, y, *w, *screened)
    if run.repeat(_key(x, w, activation, tiles, settled), tensors) is None:
        _run(run, x, y, w, activation, tiles, screened, settled)
    return y


def _key(x: Tensor, w: Weights, activation: str, tiles: Any, settled: bool) -> tuple[Any, ...]:
    gate, up, down, b_gate, b_up, b_down = w
    return (
        x.shape, x.stride(), x.dtype, gate.shape, gate.stride(), up is None or up.stride(), down.stride(),
        b_gate is None or b_gate.stride(), b_up is None or b_up.stride(), b_down is None or b_down.stride(),
        activation, tiles, settled,
    )  # fmt: skip


def _run(
    run: Recorded,
    x: Tensor,
    y: Tensor,
    w: Weights,
    activation: str,
    tiles: tuple[NeuronTile | HopperTile, SumTile | HopperSumTile] | None,
    screened: Screen | None,
    settled: bool,
) -> None:
    """The first call of a key, or a call on copies, where x or a weight is not stored as kernels read it."""
    M = x.numel() // x.shape[-1]
    if not 0 < M <= MAX_FEW_TOKENS:
        raise ValueError(f"few.forward takes 1 to {MAX_FEW_TOKENS} tokens, got {M}")
    if screened is not None and M > 1:
        raise ValueError(f"a screened gate is for one token, got {M}")
    given, (x, w) = (x, *w), (aligned(x), ready(w))
    is_copied = any(a is not b for a, b in zip(given, (x, *w), strict=True))
    settled = settled and w.gate is given[1]
    key = _key(x, w, activation, tiles, settled)
    squared = activation == "relu2"
    if screened is not None:
        (run if is_copied else run.record)(key, (x, y, *w, *screened), x, y, w, screened, squared)
    else:
        (run if is_copied else run.record)(key, (x, y, *w), x, y, w, squared, tiles, settled)


@Recorded
def _screened_token(
    space: Space, x: Tensor, y: Tensor, w: Weights, screened: Screen, squared: bool
) -> tuple[Tensor, ...]:
    D, F = x.shape[-1], len(w.gate)
    h, words = space.take(F), space.take(ceil_div(F, 32), dtype=torch.int32)
    first, second = _kernels_of_one(x.dtype, D, F, w.down_bias is not None, _flags(w, squared), can_overlap())
    gate, up, down, b_gate, b_up, b_down = (0 if t is None else t for t in w)
    first(ceil_div(F, screen.BN), x, *screened, gate, b_gate, up, b_up, down, h, words, D, F)
    second(ceil_div(D, _ONE["BD"]), h, words, down, b_down, y, D, F)
    return ()


def _flags(w: Weights, squared: bool) -> tuple[bool, ...]:
    """See ``_constants``."""
    return w.up is not None, squared, w.gate_bias is not None, w.up_bias is not None


@functools.cache
def _kernels_of_one(
    dtype: torch.dtype, D: int, F: int, has_down_bias: bool, flags: tuple[bool, ...], overlaps: bool
) -> tuple[Kernel, Kernel]:
    BW = power_of_2(ceil_div(F, 32))
    first = Kernel(
        screen.screened_neurons_kernel,
        (dtype, torch.uint8, torch.float32, torch.float32, *[dtype] * 6, _BITS[screen.BN], MULTIPLE, MULTIPLE),
        {
            "BN": screen.BN,
            "BK": min(screen.BK, power_of_2(D)),
            "SLOTS": screen.SLOTS,
            **_constants(flags, overlaps),
        },
        warps=screen.WARPS,
        registers=screen.REGISTERS,
    )
    second = Kernel(
        steps.sum_kernel,
        (dtype, torch.int32, dtype, dtype, dtype, MULTIPLE, MULTIPLE),
        {"OVERLAPS": overlaps, "BW": BW, **_ONE, "HAS_DOWN_BIAS": has_down_bias},
        warps=_warps_for_words(BW),
    )
    return first, second


def _warps_for_words(n: int) -> int:
    """So that every thread has mask words."""
    return min(16, 4 * max(1, n // 256))


@Recorded
def _unscreened(
    space: Space,
    x: Tensor,
    y: Tensor,
    w: Weights,
    squared: bool,
    tiles: tuple[NeuronTile | HopperTile, SumTile | HopperSumTile] | None,
    settled: bool,
) -> tuple[Tensor, ...]:
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    (M, D), F, has_bias, overlaps = x.shape, len(w.gate), w.down_bias is not None, can_overlap()
    neurons, sums = tiles or tiles_of(x, F)
    between = Between.of(space, M, F, neurons)
    first, second = kernels_of(x.dtype, M, D, neurons, sums, settled, has_bias, _flags(w, squared), overlaps)
    gate, up, down, b_gate, b_up, b_down = (0 if t is None else t for t in w)
    scales = () if isinstance(neurons, HopperTile) else (0, 0, 0)
    first(between.programs, x, gate, b_gate, up, b_up, down, between.h, between.words, *scales, M, D, F, x.stride(0))
    in_triton = isinstance(sums, SumTile)
    given = between.h, between.words, down, b_down, y, *((0,) if in_triton else ())
    second(ceil_div(D, sums.BD), *given, M, D, between.n_words, *((between.last_bits,) if in_triton else ()))
    return ()


class Between(NamedTuple):
    """Buffers between the two kernels."""

    programs: int  # of the first kernel
    h: Tensor  # [F, tokens]
    words: Tensor  # int64: masks, a bit per neuron
    n_words: int  # words in use
    last_bits: int  # bits in use of the last word

    @classmethod
    def of(cls, space: Space, M: int, F: int, neurons: NeuronTile | HopperTile) -> Between:
        n_tiles, BN = ceil_div(F, neurons.TN or neurons.BN), neurons.BN
        n_words, programs = ceil_div(n_tiles * BN, 64), max(n_tiles, neurons.programs)
        h, words = space.take(F, _padded(M)), space.take(ceil_div(programs * BN, 64), dtype=torch.int64)
        return cls(programs, h, words, n_words, n_tiles * BN - 64 * (n_words - 1))


def _padded(M: int) -> int:
    return max(16, power_of_2(M))


def kernels_of(
    dtype: torch.dtype,
    M: int,
    D: int,
    neurons: NeuronTile | HopperTile,
    sums: SumTile | HopperSumTile,
    settled: bool,
    has_down_bias: bool,
    flags: tuple[bool, ...],
    overlaps: bool,
    factors: torch.dtype | None = None,
) -> tuple[Kernel, Kernel]:
    """The neurons kernel and the sums kernel for M tokens. ``factors``: dtype of x and the weights; e4m3 if they have
    scales."""
    stride, n_tokens = (neurons.TN or 64) if neurons.BN == 64 else 64, ANY if M % 16 else MULTIPLE
    factors = factors or dtype
    first = _first_kernel(dtype, D, power_of_2(M), n_tokens, neurons, settled, flags, overlaps, factors)
    return first, _second_kernel(dtype, _padded(M), n_tokens, stride, sums, has_down_bias, overlaps, factors)


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
    factors: torch.dtype,
) -> Kernel:
    """``tokens``: a power of 2; ``n_tokens``: the declaration of their number."""
    f32, bits, sizes = torch.float32, _BITS[tile.BN], (n_tokens, MULTIPLE, MULTIPLE, MULTIPLE)
    constants: dict[str, Any]
    if isinstance(tile, HopperTile):
        from twell.gpu.decode import hopper, hopper_fp8  # need Gluon, which the interpreter lacks

        constants = {
            "EARLY": settled,
            "HM": max(16, tokens),
            "BM": max(8, tokens),
            "TN": tile.TN,
            "SUBS": ceil_div(tile.TN, 16),
            "CHAINS": tile.chains,
            "DEPTH": tile.depth,
            **_constants(flags, overlaps),
        }
        if factors == dtype:
            return Kernel(hopper.hopper_neurons_kernel, (*[dtype] * 7, bits, *sizes), constants, warps=tile.chains)
        without_biases = {name: c for name, c in constants.items() if "BIAS" not in name} | {"TOKENS": tokens}
        arguments: tuple[Any, ...] = (dtype, factors, f32, factors, f32, factors, dtype, bits, *sizes)
        return Kernel(hopper_fp8.hopper_fp8_neurons_kernel, arguments, without_biases, warps=tile.chains)
    constants = {
        "SCALED": factors != dtype,
        "PRECISION": _precision(dtype),
        "BM": max(16, tokens),
        "TN": tile.TN or tile.BN,
        "BN": tile.BN,
        "BK": min(tile.BK, power_of_2(D)),
        "SLOTS": tile.slots,
        "CHAINS": _CHAINS,
        "DEPTH": min(_CHAIN_DEPTH, max(16, power_of_2(D) // _CHAINS)),
        "CHAIN_STAGES": _CHAIN_STAGES,
        **_constants(flags, overlaps),
    }
    arguments = (factors, factors, dtype, factors, dtype, factors, dtype, bits, f32, f32, f32, *sizes)
    return Kernel(steps.neurons_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


@functools.cache
def _second_kernel(
    dtype: torch.dtype,
    BM: int,
    n_tokens: int,
    stride: int,
    tile: SumTile | HopperSumTile,
    has_bias: bool,
    overlaps: bool,
    factors: torch.dtype,
) -> Kernel:
    scaled, sizes = factors != dtype, (n_tokens, MULTIPLE, ANY)
    constants: dict[str, Any]
    if isinstance(tile, HopperSumTile):
        from twell.gpu.decode import hopper, hopper_fp8

        constants = {
            "STRIDE": stride,
            "OVERLAPS": overlaps,
            "BM": BM,
            "BW": WORDS,
            "BS": tile.BS,
            "BD": tile.BD,
            "CHAINS": tile.chains,
            **({} if scaled else {"HAS_DOWN_BIAS": has_bias}),
        }
        function = hopper_fp8.hopper_fp8_sums_kernel if scaled else hopper.hopper_sums_kernel
        of_columns = torch.float32 if scaled else dtype  # scales, or a bias
        return Kernel(function, (dtype, torch.int64, factors, of_columns, dtype, *sizes), constants, warps=tile.chains)
    constants = {
        "STRIDE": stride,
        "SCALED": scaled,
        "PRECISION": _precision(dtype),
        "OVERLAPS": overlaps,
        "BM": BM,
        "BW": tile.BW,
        "BS": tile.BS,
        "BD": tile.BD,
        "HAS_DOWN_BIAS": has_bias,
        "STAGES": tile.stages,
    }
    arguments = (dtype, torch.int64, factors, dtype, dtype, torch.float32, *sizes, ANY)
    return Kernel(steps.sums_kernel, arguments, constants, warps=tile.warps, stages=tile.stages)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # no effect on 16 bits


def _constants(flags: tuple[bool, ...], overlaps: bool) -> dict[str, bool]:
    gated, squared, has_gate_bias, has_up_bias = flags
    return {
        "OVERLAPS": overlaps,
        "PREFETCHES": overlaps,
        "GATED": gated,
        "SQUARED": squared,
        "HAS_GATE_BIAS": has_gate_bias,
        "HAS_UP_BIAS": has_up_bias,
    }
