"""Tiles of the two kernels of up to 64 tokens, for src/twell/gpu/decode/few_tiles.py; see tune_tiles.py.

The two kernels take microseconds and overlap, so they are timed together, as a CUDA graph of layers that each have
their own weights: first the neurons kernel with other tiles before the usual sums kernel, then the sums kernel with
other tiles after the usual neurons kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from twell.gpu.decode import few as decode
from twell.gpu.decode import few_tiles
from twell.gpu.shared.layout import by_rows
from twell.gpu.shared.tiles import device_facts
from twell.progress import Progress, silent
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing

R = TypeVar("R")

KERNELS = ("neurons", "sums")

Neurons = few_tiles.NeuronTile | few_tiles.HopperTile
Sums = few_tiles.SumTile | few_tiles.HopperSumTile
Tiles = tuple[Neurons, Sums]


def neuron_candidates(
    M: int, D: int, F: int, *, processors: int, sixteen_bits: bool, hopper: bool
) -> Iterator[Neurons]:
    """Triton tiles, and tiles of hopper.py where that kernel runs."""
    divided = few_tiles._divided(F, 64, processors)
    yield few_tiles.NeuronTile(64, 128, 4, 6)
    shapes = ((64, 6), (64, 8), (128, 3), (128, 4), (128, 6), (256, 3))
    for (BK, stages), slots in itertools.product(shapes, (0, 16) if sixteen_bits else (0,)):
        yield few_tiles.NeuronTile(64, BK, 4, stages, slots, *divided)
    if hopper and (tile := few_tiles._hopper_tile(M, D, F, processors)) is not None:
        yield tile


def sum_candidates(*, hopper: bool) -> Iterator[Sums]:
    for BD, stages, BS in itertools.product((16, 32), (2, 4, 6), (1, 2)):
        yield few_tiles.SumTile(BD, 4, stages, BS)
    if hopper:
        for BS, chains in itertools.product((2, 3, 4, 6, 8, 10, 12), (4, 8)):
            yield few_tiles.HopperSumTile(BS, chains)


class Layers:
    """As many copies of one FFN as a CUDA graph has layers, each with its own weights."""

    def __init__(self, workload: str, M: int, D: int, F: int, dtype: torch.dtype, device: torch.device) -> None:
        inputs = cases.make(workload, M, D, F, dtype=dtype, device=device)
        self.x, own = inputs.x, (inputs.w_gate, inputs.w_up, inputs.w_down)
        self.on_gpu = device.type == "cuda"
        n = ffn.GRAPH_LAYERS if self.on_gpu else 1
        self.weights = [by_rows(Weights(*(w.clone() for w in own))) for _ in range(n)]

    def usual(self) -> Tiles:
        return few_tiles.tiles_of(self.x, len(self.weights[0].gate))

    def run(self, tiles: Tiles) -> Callable[[], Tensor]:
        """A call of all layers, which returns the last layer's y."""
        runs = [functools.partial(decode.forward, self.x, w, "relu", tiles, settled=True) for w in self.weights]
        return ffn.replayed(runs) if self.on_gpu else runs[0]

    def ms(self, run: Callable[[], Tensor]) -> float:
        times = timing.compare({"it": run}, seconds=0.1, min_repeats=10, warmups=1, device=self.x.device)
        return times["it"].p50 / len(self.weights)


@torch.inference_mode()
def tune(
    workload: str,
    M: int,
    D: int,
    F: int,
    dtype: torch.dtype,
    device: torch.device,
    only: Sequence[str] = KERNELS,
    progress: Progress = silent,
) -> Iterator[tuple[str, Neurons | Sums, float, float]]:
    """Yield (kernel, tile, ms of a layer, ms over the usual tile's ms), the usual tile first."""
    layers = Layers(workload, M, D, F, dtype, device)
    neurons, sums = usual = layers.usual()
    capability, processors = device_facts(layers.x.device.index) if layers.on_gpu else (0, 1)
    sixteen_bits = dtype != torch.float32
    hopper = few_tiles.why_not_hopper(capability) is None and sixteen_bits and D % 16 == 0
    others = neuron_candidates(M, D, F, processors=processors, sixteen_bits=sixteen_bits, hopper=hopper)
    candidates: dict[str, list[Tiles]] = {
        "neurons": [(tile, sums) for tile in others],
        "sums": [(neurons, tile) for tile in sum_candidates(hopper=hopper)],
    }
    total, tried = sum(len(candidates[name]) for name in only), 0
    for name in only:
        run = layers.run(usual)
        expected, base = run().clone(), layers.ms(run)
        place = KERNELS.index(name)
        yield name, usual[place], base, 1.0
        for tiles in candidates[name]:
            tried_out = result_of(functools.partial(_run_and_result, layers, tiles), device)
            if tried_out is not None:
                run, result = tried_out
                require_same(result, expected, f"few tokens have another result with {tiles}")
                ms = layers.ms(run)
                yield name, tiles[place], ms, ms / base
            progress(tried := tried + 1, total)


def _run_and_result(layers: Layers, tiles: Tiles) -> tuple[Callable[[], Tensor], Tensor]:
    run = layers.run(tiles)
    return run, run()


def result_of(run: Callable[[], R], device: torch.device) -> R | None:
    """None where ``run`` does not compile or needs more than the GPU has; Triton raises several classes of error."""
    try:
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return None
    return result


def require_same(result: Tensor, expected: Tensor, otherwise: str) -> None:
    """Raise RuntimeError with the text ``otherwise`` where the results differ by more than rounding."""
    if not torch.allclose(result.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.abs().max())):
        raise RuntimeError(otherwise)
