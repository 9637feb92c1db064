"""Compile every kernel for an architecture without having it; prints a JSON line a kernel. Run by test_cross_compile.

The kernels are those of the launchers, for a layer's shape, and compiled as they are at their first launch. Must run
without TRITON_INTERPRET. Usage: python cross_compile.py CAPABILITY DTYPE D F
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from twell.formats import n_tiles
from twell.gpu import dense, dense_fp8
from twell.gpu.decode import few as decode
from twell.gpu.decode import few_fp8
from twell.gpu.decode import tiles as few_tiles
from twell.gpu.prefill import gate, heavy, heavy_fp8, lists, split_fp8, union, up_down
from twell.gpu.shared import fp8, rows
from twell.gpu.shared.launch import Kernel, power_of_2
from twell.gpu.shared.tiles import tiles_for
from twell.gpu.training import activation, hot, statistics, tail_backward, transpose, weight_gradients
from twell.saved import index_dtype

FEW_TOKENS = (1, 8, 16, 32, 64)


class Elsewhere:
    """A GPU for Triton to compile for, which can run nothing."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def many_tokens(capability: int, dtype: torch.dtype, D: int, F: int) -> Iterator[Kernel]:
    """Inference and training of a gated FFN, most with biases; C = F / 2 or what leaves a part of a tile."""
    tiles, overlaps, narrow = tiles_for(capability, dtype), capability >= 90, index_dtype(F)
    no, yes = False, True
    for is_hot, bias, whole in ((no, yes, no), (no, no, yes), (yes, yes, no)):
        of_hot = {"saves": is_hot, "gated": is_hot, "squared": no}
        ends = {"has_bias": bias, "whole": whole, "aligned": yes, "overlaps": overlaps}
        by_registers = not is_hot and capability == 90 and dtype.itemsize == 2
        flags = *of_hot.values(), *ends.values(), by_registers, dtype
        kernel = gate._kernel(dtype, tiles.gate, tiles.use_tma, is_hot, *flags)
        assert kernel.constants["BY_REGISTERS"] == by_registers  # where Triton puts values is as words.py expects
        yield kernel
    for marks in (no, yes):
        yield lists._kernel(dtype, narrow, power_of_2(n_tiles(F)), marks, overlaps)
    long_tail = tiles.long_tail if D * dtype.itemsize <= 8192 else tiles.tail
    for tile, saves in ((tiles.tail, no), (long_tail, yes)):
        yield up_down._kernel(dtype, narrow, D, tile, yes, no, yes, saves, yes, yes, overlaps, dtype)
    for gated in (yes, no):
        flags = (gated, not gated, (yes,) * 3, gated, gated)  # biases, a mask, statistics
        yield heavy._kernel(dtype, tiles.heavy, tiles.heavy_tma, *flags, heavy.CHUNK, heavy.LONG)
    yield transpose._kernel(yes, yes, overlaps)
    yield from transpose._adders(overlaps)
    yield transpose._pairs(narrow, overlaps)
    yield hot._adder(dtype, tiles.gate, tiles.use_tma, yes, overlaps)
    yield hot._gradient(dtype, tiles.heavy, tiles.use_tma, yes, no, yes, yes, yes, overlaps)
    yield statistics._kernel(yes, yes, yes, yes, overlaps)
    flags = {"gated": yes, "squared": yes, "has_l1": yes, "has_mask": yes, "wants_dx": yes, "wants_pairs": yes}
    split = tail_backward.SPLIT
    yield tail_backward._kernel(dtype, narrow, D, tiles.tail_backward, *flags.values(), split, overlaps)
    yield from weight_gradients._kernels(dtype, D, split, (yes,) * 5, overlaps)
    yield rows._transpose(dtype, overlaps)
    yield rows._put(dtype, yes, (yes,) * 3, overlaps)
    yield rows._gather(dtype, yes, overlaps)
    for interleaved in (no, yes):
        yield activation._kernel(dtype, yes, yes, interleaved, not interleaved, yes, yes, yes, overlaps)
    yield activation._gradient_kernel(dtype, yes, yes, yes, yes, yes, overlaps)
    yield dense._kernel(dtype, yes, no, overlaps)
    if capability == 90 and dtype.itemsize == 2:
        for _, tile in dense._FUSED:
            yield dense._gate_up(dtype, dtype, tile, yes, overlaps)


def few_tokens(capability: int, dtype: torch.dtype, D: int, F: int) -> Iterator[Kernel]:
    """For all numbers of tokens; on Hopper the kernels of hopper.py, frozen or not, and what runs where they cannot."""
    overlaps, flags = capability >= 90, (True, False, False, False)
    if dtype != torch.float32:
        yield from decode._kernels_of_one(dtype, D, F, False, flags, overlaps)
    why_not, in_fp8 = few_tiles.why_not_hopper, capability == 90 and dtype == torch.bfloat16
    for in_triton in (False, True) if why_not(capability) is None else (True,):
        if in_triton:
            few_tiles.why_not_hopper = lambda *_: "compiled for other versions of Triton"  # type: ignore[assignment]
        for M in FEW_TOKENS:
            tiles = few_tiles.tiles_for(M, D, F, element_size=dtype.itemsize, capability=capability)
            for settled in (False, True) if isinstance(tiles[0], few_tiles.HopperTile) else (False,):
                yield from decode.kernels_of(dtype, M, D, *tiles, settled, False, flags, overlaps)
            of_fp8 = few_tiles.fp8_tiles_for(M, D, F, capability=capability)
            for settled in (False, True) if isinstance(of_fp8[0], few_tiles.HopperTile) else (False,):
                if in_fp8 and M == 1 and isinstance(of_fp8[0], few_tiles.HopperTile):
                    yield from few_fp8._kernels_of_one(dtype, 128, of_fp8[0], settled, True, False, overlaps)
                elif in_fp8:
                    yield from decode.kernels_of(dtype, M, D, *of_fp8, settled, False, flags, overlaps, fp8.E4M3)


def between(capability: int, dtype: torch.dtype, F: int) -> Iterator[Kernel]:
    """For numbers of tokens between few and many."""
    if dtype != torch.float32:
        of_gpu = tiles_for(capability, dtype)
        for M in (128, 256, 2048):
            BW, flags = power_of_2(F // 32), (True, False, True, True)
            yield from union._kernels(dtype, union.tiles_for(M, of_gpu), BW, of_gpu.use_tma, *flags, capability >= 90)


def in_fp8(capability: int, dtype: torch.dtype, D: int, F: int) -> Iterator[Kernel]:
    """Of layers with FP8 weights."""
    tiles = split_fp8.tiles_for(capability)
    if dtype != torch.bfloat16 or tiles is None:
        return
    overlaps, no, yes = True, False, True
    for is_hot in (no, yes):
        flags = is_hot, no, is_hot, no, no, no, yes, overlaps, not is_hot, fp8.E4M3
        yield gate._kernel(dtype, tiles.gate, tiles.use_tma, *flags)
    flags = yes, no, yes, no, no, no, overlaps, fp8.E4M3
    yield up_down._kernel(dtype, index_dtype(F), D, tiles.tail, *flags)
    yield heavy_fp8._kernel(dtype, tiles.heavy, yes, no, heavy_fp8.CHUNK, heavy.LONG)
    yield fp8._kernel(dtype, D, no, no, no, overlaps)
    yield fp8._kernel(dtype, F, yes, yes, no, overlaps)
    for _, tile in dense_fp8._GATE_UP:
        yield dense._gate_up(dtype, fp8.E4M3, tile, no, overlaps)
    for _, tile in dense_fp8._DOWN:
        yield dense_fp8._down(dtype, tile, overlaps)


def spills(ptx: str, capability: int) -> dict[str, int]:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = folder / "ptxas-blackwell"
    ptxas = newer if capability >= 100 and newer.exists() else folder / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(ptxas), "-v", f"--gpu-name={architecture}", f.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert found and registers, said
    return {"spilled": int(found[1]), "registers": int(registers[1]), "serialized": "are serialized" in said}


def row_of(kernel: Kernel, capability: int) -> dict[str, Any]:
    compiled = kernel.compile()
    facts, ptx = compiled.metadata, compiled.asm["ptx"]
    return {
        "kernel": kernel.function.__name__,
        "overlaps": kernel.constants.get("OVERLAPS", False),
        "shared": facts.shared,
        "scratch": facts.global_scratch_size,
        "launched_early": facts.launch_pdl,
        "waits": "griddepcontrol.wait" in ptx,
        "cooperative": facts.launch_cooperative_grid,
        **spills(ptx, capability),
    }


def main() -> None:
    capability, dtype, D, F = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    triton.runtime.driver.set_active(Elsewhere(capability))
    shape = capability, dtype, D, F
    found = [*many_tokens(*shape), *between(capability, dtype, F), *few_tokens(*shape), *in_fp8(*shape)]
    different = {repr((k.function.__name__, k.arguments, k.constants, k.options)): k for k in found}
    for kernel in different.values():
        print(json.dumps(row_of(kernel, capability)), flush=True)


if __name__ == "__main__":
    main()
