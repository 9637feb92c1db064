"""Compile all kernels for an architecture that need not be present; print one JSON line per kernel. test_cross_compile
runs it.

Kernels come from the functions that the launchers call, with the arguments for one layer's shape. Must run without
TRITON_INTERPRET. Usage: python cross_compile.py CAPABILITY DTYPE D F
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
from triton.backends.nvidia.compiler import CUDABackend

import interpreted
from twell.formats import n_tiles
from twell.gpu import dense, dense_fp8
from twell.gpu.decode import few as decode
from twell.gpu.decode import few_fp8, few_tiles
from twell.gpu.prefill import heavy_fp8, split_fp8, union
from twell.gpu.shared import gate, heavy, lists, round_fp8, rows, tail
from twell.gpu.shared.launch import Kernel, power_of_2
from twell.gpu.shared.tiles import tiles_for
from twell.gpu.training import activation, columns, heavy_backward, hot, statistics, tail_backward, weight_gradients
from twell.reference import E4M3
from twell.saved import index_dtype

FEW_TOKENS = (1, 8, 16, 32, 64)
_WAIT_FOR_ONE = r"(%\w+) = ttng\.warp_group_dot [^\n]*\n[^\n]*warp_group_dot_wait \1,[^\n]*pendings = 0"


class Elsewhere:
    """A driver for Triton: a GPU to compile for, on which nothing can run."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def many_tokens(capability: int, dtype: torch.dtype, D: int, F: int) -> Iterator[Kernel]:
    """Inference and training of a gated FFN, mostly with biases; C is F / 2, or leaves part of a tile."""
    tiles, overlaps, narrow = tiles_for(capability, dtype), capability >= 90, index_dtype(F)
    no, yes = False, True
    for is_hot, bias, whole in ((no, yes, no), (no, no, yes), (yes, yes, no)):
        by_registers = not is_hot and capability == 90 and dtype.itemsize == 2
        kernel = gate._kernel(
            dtype, dtype, tiles.gate, tiles.use_tma, yes, HOT=is_hot, SAVES=is_hot, GATED=is_hot, SQUARED=no,
            HAS_BIAS=bias, WHOLE=whole, BY_REGISTERS=by_registers, OVERLAPS=overlaps,
        )  # fmt: skip
        assert kernel.constants["BY_REGISTERS"] == by_registers  # Triton's layout is as words.py expects
        yield kernel
    for marks in (no, yes):
        yield lists._kernel(dtype, narrow, power_of_2(n_tiles(F)), marks, overlaps)
    long_tail = tiles.long_tail if D * dtype.itemsize <= 8192 else tiles.tail
    for tile, saves in ((tiles.tail, no), (long_tail, yes)):
        flags = {"GATED": yes, "SQUARED": no, "SPOIL": yes, "SAVES": saves}
        biases = {"HAS_UP_BIAS": yes, "HAS_DOWN_BIAS": yes}
        yield tail._kernel(dtype, narrow, D, tile, dtype, **flags, **biases, OVERLAPS=overlaps)
    for gated in (yes, no):
        ffn = heavy.HeavyFFN(gated, not gated, yes, yes, yes, mask=gated, statistics=gated)
        yield heavy._kernel(dtype, tiles.heavy, tiles.heavy_tma, heavy.CHUNK, heavy.LONG, ffn)
    yield heavy_backward._kernel(
        dtype, torch.float32, yes, (yes,) * 6, heavy_backward.heavy_tiles(capability, dtype), GATED=yes, SQUARED=no,
        HAS_GATE_BIAS=yes, HAS_UP_BIAS=yes, HAS_ORDER=yes, HAS_MASK=yes,
    )  # fmt: skip
    yield columns._kernel(yes, yes, overlaps)
    yield from columns._adders(overlaps)
    yield columns._pairs(narrow, overlaps)
    yield hot._adder(dtype, tiles.gate, tiles.use_tma, yes, overlaps)
    l1 = {"HAS_L1": yes, "HAS_MASK": yes}
    yield hot._gradient(dtype, tiles.heavy, tiles.use_tma, yes, overlaps, GATED=yes, SQUARED=no, **l1)
    yield statistics._kernel(HAS_HOT=yes, HAS_COLD=yes, HAS_ORDER=yes, HAS_MASK=yes, OVERLAPS=overlaps)
    flags = {"GATED": yes, "SQUARED": yes, **l1, "WANTS_DX": yes, "WANTS_PAIRS": yes}
    split = tail_backward.SPLIT
    yield tail_backward._kernel(dtype, narrow, D, tiles.tail_backward, split, **flags, OVERLAPS=overlaps)
    yield from weight_gradients._kernels(dtype, D, split, (yes,) * 5, overlaps)
    yield rows._transpose(dtype, overlaps)
    yield rows._put(dtype, yes, (yes,) * 3, overlaps)
    yield rows._gather(dtype, yes, overlaps)
    for interleaved in (no, yes):
        yield activation._kernel(
            dtype, yes, GATED=yes, SQUARED=yes, INTERLEAVED=interleaved, WANTS_H=not interleaved, WANTS_STATISTICS=yes,
            HAS_MASK=yes, OVERLAPS=overlaps,
        )  # fmt: skip
    yield activation._backward(dtype, yes, GATED=yes, SQUARED=yes, **l1, OVERLAPS=overlaps)
    yield dense._kernel(dtype, yes, no, overlaps)
    if capability == 90 and dtype.itemsize == 2:
        for _, tile in dense._FUSED:
            yield dense._gate_up(dtype, dtype, tile, yes, overlaps)


def few_tokens(capability: int, dtype: torch.dtype, D: int, F: int) -> Iterator[Kernel]:
    """All numbers of tokens; on Hopper the Gluon kernels, frozen or not, and the Triton kernels that replace them."""
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
                    yield from decode.kernels_of(dtype, M, D, *of_fp8, settled, False, flags, overlaps, E4M3)


def between(capability: int, dtype: torch.dtype, F: int) -> Iterator[Kernel]:
    """Numbers of tokens between few and many."""
    if dtype != torch.float32:
        of_gpu = tiles_for(capability, dtype)
        for M in (128, 256, 2048):
            flags = {"GATED": True, "SQUARED": False, "HAS_UP_BIAS": True}
            tiles, BW = union.tiles_for(M, of_gpu), power_of_2(F // 32)
            yield from union._kernels(dtype, tiles, BW, of_gpu.use_tma, True, capability >= 90, **flags)


def in_fp8(capability: int, dtype: torch.dtype, D: int, F: int) -> Iterator[Kernel]:
    """Layers with FP8 weights."""
    tiles = split_fp8.tiles_for(capability)
    if dtype != torch.bfloat16 or tiles is None:
        return
    overlaps, no, yes = True, False, True
    for is_hot in (no, yes):
        flags = {"HOT": is_hot, "SAVES": no, "GATED": is_hot, "SQUARED": no}
        more = {"HAS_BIAS": no, "WHOLE": no, "BY_REGISTERS": not is_hot, "OVERLAPS": overlaps}
        yield gate._kernel(dtype, E4M3, tiles.gate, tiles.use_tma, yes, **flags, **more)
    flags = {"GATED": yes, "SQUARED": no, "SPOIL": yes, "SAVES": no, "HAS_UP_BIAS": no, "HAS_DOWN_BIAS": no}
    yield tail._kernel(dtype, index_dtype(F), D, tiles.tail, E4M3, **flags, OVERLAPS=overlaps)
    yield heavy_fp8._kernel(dtype, tiles.heavy, yes, no, heavy_fp8.CHUNK, heavy.LONG)
    yield round_fp8._kernel(dtype, D, no, no, no, overlaps)
    yield round_fp8._kernel(dtype, F, yes, yes, no, overlaps)
    for _, tile in dense_fp8._GATE_UP:
        yield dense._gate_up(dtype, E4M3, tile, no, overlaps)
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
        "waits_for_each": re.search(_WAIT_FOR_ONE, compiled.asm["ttgir"]) is not None,
        "cooperative": facts.launch_cooperative_grid,
        **spills(ptx, capability),
    }


def stop_at_ptx() -> None:
    """Skip Triton's own run of ptxas: ``spills`` runs it with -v."""
    CUDABackend.make_cubin = lambda *_: b""


def main() -> None:
    interpreted.speed_up_triton()  # on a machine with a GPU test modules may call it: the compiler must not notice
    stop_at_ptx()
    capability, dtype, D, F = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    triton.runtime.driver.set_active(Elsewhere(capability))
    shape = capability, dtype, D, F
    found = [*many_tokens(*shape), *between(capability, dtype, F), *few_tokens(*shape), *in_fp8(*shape)]
    different = {repr((k.function.__name__, k.arguments, k.constants, k.options)): k for k in found}
    for kernel in different.values():
        print(json.dumps(row_of(kernel, capability)), flush=True)


if __name__ == "__main__":
    main()
