"""Compile every kernel for an architecture without having it; prints a JSON line a kernel. Run by test_cross_compile.

Must run without TRITON_INTERPRET. Usage: python cross_compile.py CAPABILITY DTYPE D F
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from twell.kernels import (
    activation,
    decode,
    dense,
    gate,
    heavy,
    lists,
    pack,
    screen,
    tail_backward,
    transpose,
    turn,
    up_down,
    weight_gradients,
)
from twell.kernels.tiles import few, tiles_for

CAPABILITY, DTYPE, D, F = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
TILES = tiles_for(CAPABILITY, getattr(torch, DTYPE))
ELEMENT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[DTYPE]
VALUES, INTEGERS, NEURONS = f"*{ELEMENT}", "*i32", "*i16"
OVERLAPS = {"OVERLAPS": CAPABILITY >= 90}


def compile_kernel(
    kernel: Any,
    arguments: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    label: str = "",
    *,
    registers: int | None = None,
) -> None:
    """Widths are multiples of 16 and pointers aligned, as they are when launched."""
    aligned = {"D", "C", "N", "width", "x_stride"}
    signature = arguments | dict.fromkeys(constants, "constexpr")
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in aligned
    }
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    row = {"kernel": kernel.__name__ + label, "shared": compiled.metadata.shared, **spills(compiled.asm["ptx"])}
    print(json.dumps(row), flush=True)


def spills(ptx: str) -> dict[str, int]:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = folder / "ptxas-blackwell"
    ptxas = newer if CAPABILITY >= 100 and newer.exists() else folder / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        architecture = f"sm_{CAPABILITY}{'a' if CAPABILITY >= 90 else ''}"
        command = [str(ptxas), "-v", f"--gpu-name={architecture}", f.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert found and registers, said
    return {"spilled": int(found[1]), "registers": int(registers[1])}


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def pointers(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


precision = "ieee" if DTYPE == "float32" else "tf32"
t = TILES.gate
for hot, whole in ((False, False), (False, True), (True, False)):
    x, rows, half_rows = (
        (f"tensordesc<{ELEMENT}[{n},{t.BK}]>" for n in (t.BM, t.BN, t.BN // 2))
        if TILES.use_tma
        else (VALUES, VALUES, VALUES)
    )
    compile_kernel(
        gate._gate_kernel,
        {"i_x": x, "i_rows": rows, "i_half_rows": half_rows, "i_bias": VALUES, "o_values": VALUES}
        | {"o_bitmap": VALUES if hot else INTEGERS, "o_marks": VALUES if hot else INTEGERS, "o_sums": VALUES}
        | integers("M", "D", "N", "width", "words", "x_stride"),
        {"HOT": hot, "SAVES": hot, "GATED": hot, "SQUARED": False, "HAS_BIAS": not whole, "WHOLE": whole}
        | {"ZEROS": not whole, "BM": t.BM, "BN": t.BN, "BK": t.BK}
        | {"GROUP_M": gate.GROUP_M, "USE_TMA": TILES.use_tma, "PRECISION": precision}
        | {"HALVES": t.BN >= 256}
        | OVERLAPS,
        t.warps,
        t.stages,
        " hot" if hot else " cold",
    )
compile_kernel(
    lists._list_kernel,
    pointers(INTEGERS, "i_bitmap")
    | pointers(VALUES, "i_gate")
    | pointers(INTEGERS, "i_order")
    | pointers(NEURONS, "o_rows")
    | pointers(VALUES, "o_values")
    | pointers(INTEGERS, "m_marks")
    | integers("M", "C", "words", "first", "cap", "n_early", "long_start"),
    {"BW": triton.next_power_of_2(F // 32), "HAS_ORDER": True, "LONG": lists.LONG, "N_LONG": lists.N_LONG}
    | {"CHUNK": lists._CHUNK}
    | OVERLAPS,
    1,
    1,
)
ELEMENT_BYTES = 4 if DTYPE == "float32" else 2
for tail, saves in ((TILES.tail, False), (TILES.long_tail if D * ELEMENT_BYTES <= 8192 else TILES.tail, True)):
    compile_kernel(
        up_down._tail_kernel,
        pointers(VALUES, "i_x")
        | pointers(NEURONS, "i_rows")
        | pointers(VALUES, "i_values")
        | pointers(INTEGERS, "i_marks")
        | pointers(VALUES, "i_up", "i_up_bias", "i_down", "i_down_bias", "o_y", "o_up")
        | pointers("*fp32", "o_l1")
        | integers("M", "D", "cap", "n_early", "long_start", "x_stride"),
        {
            "BD": D,
            "WHOLE": True,
            "NEURONS": tail.neurons,
            "GATED": True,
            "SQUARED": False,
            "SPOIL": True,
            "SAVES": saves,
        }
        | {"HAS_UP_BIAS": True, "HAS_DOWN_BIAS": True, "LONG": lists.LONG, "N_LONG": lists.N_LONG}
        | {"STAGES": tail.stages}
        | OVERLAPS,
        tail.warps_for(D),
        tail.stages,
        f" {tail.neurons} {tail.warps} {tail.stages}",
    )
t, small = TILES.heavy, few(TILES.heavy)
blocks = {"BM": t.BM, "BN": t.BN, "BK": t.BK, "FEW": 128, "FEW_BM": small.BM, "FEW_BN": small.BN, "FEW_BK": small.BK}
blocks |= {"GROUP_M": 8, "N_LONG": lists.N_LONG, "SQUARED": False, "PRECISION": precision}
compile_kernel(
    heavy._heavy_up_kernel,
    pointers(VALUES, "i_x", "i_up", "i_up_bias")
    | pointers(INTEGERS, "i_order", "i_bitmap", "i_marks")
    | pointers(VALUES, "m_gate")
    | integers("M", "D", "C", "words", "x_stride"),
    blocks | {"HAS_UP_BIAS": True, "HAS_ORDER": True} | OVERLAPS,
    t.warps,
    t.stages,
)
compile_kernel(
    heavy._heavy_down_kernel,
    pointers(VALUES, "i_h", "i_down", "i_down_bias")
    | pointers(INTEGERS, "i_order", "i_marks")
    | pointers(VALUES, "o_y")
    | integers("M", "D", "C"),
    blocks | {"HAS_DOWN_BIAS": True, "HAS_ORDER": True} | OVERLAPS,
    t.warps,
    t.stages,
)
compile_kernel(
    heavy._heavy_l1_kernel,
    pointers(VALUES, "i_h") | pointers(INTEGERS, "i_marks") | pointers("*fp32", "o_l1") | integers("M", "C"),
    {"N_LONG": lists.N_LONG, "BC": 1024, "SQUARED": False} | OVERLAPS,
    4,
    1,
)
compile_kernel(
    transpose._transpose_kernel,
    pointers(INTEGERS, "i_bitmap", "i_marks", "o_bits", "o_counts")
    | pointers("*i1", "i_counted")
    | pointers(INTEGERS, "o_statistics", "o_zero")
    | integers("M", "C", "words", "cap", "P"),
    {"LONG": lists.LONG, "N_LONG": lists.N_LONG, "CHUNK": transpose.CHUNK, "HAS_STATISTICS": True, "HAS_MASK": True}
    | OVERLAPS,
    1,
    1,
)
tail = TILES.tail_backward
compile_kernel(
    tail_backward._tail_backward_kernel,
    pointers(VALUES, "i_dy")
    | pointers(NEURONS, "i_rows")
    | pointers(VALUES, "i_values", "i_saved_up")
    | pointers(INTEGERS, "i_marks")
    | pointers("*fp32", "i_l1")
    | pointers("*i1", "i_counted")
    | pointers(VALUES, "i_gate", "i_up", "i_down")
    | pointers(INTEGERS, "i_places", "i_bits", "i_offsets")
    | pointers(VALUES, "o_dx")
    | pointers(INTEGERS, "o_tokens")
    | pointers(VALUES, "o_factors")
    | pointers(INTEGERS, "o_owners")
    | integers("M", "D", "cap", "n_early", "long_start", "size", "keys", "P"),
    {"BD": D, "WHOLE": True, "NEURONS": tail.neurons, "GATED": True, "SQUARED": True, "HAS_ORDER": True}
    | {"HAS_L1": True, "HAS_MASK": True, "WANTS_DX": True, "WANTS_PAIRS": True, "LONG": lists.LONG}
    | {"N_LONG": lists.N_LONG, "CHUNK": transpose.CHUNK}
    | {"SPLIT": tail_backward.SPLIT, "STAGES": tail.stages}
    | OVERLAPS,
    tail.warps_for(D),
    tail.stages,
)
for kernel, inputs, outputs, sizes, constants in (
    (
        weight_gradients._share_kernel,
        pointers(INTEGERS, "i_owners", "i_offsets"),
        pointers("*fp32", "o_shares"),
        integers("D", "size", "keys", "P", "x_stride", "shares"),
        {"TOKENS": weight_gradients._SHARE_TOKENS},
    ),
    (
        weight_gradients._neuron_kernel,
        pointers(INTEGERS, "i_offsets") | pointers("*fp32", "i_shares") | pointers(INTEGERS, "i_order"),
        pointers(VALUES, "o_gate", "o_up", "o_down", "o_gate_bias", "o_up_bias"),
        integers("D", "C", "size", "keys", "P", "x_stride"),
        {"HAS_ORDER": True, "TOKENS": weight_gradients._TOKENS},
    ),
):
    compile_kernel(
        kernel,
        pointers(VALUES, "i_x", "i_dy")
        | pointers(INTEGERS, "i_tokens")
        | pointers(VALUES, "i_factors")
        | inputs
        | outputs
        | sizes,
        constants
        | {"BD": weight_gradients._BLOCK_D, "SPLIT": tail_backward.SPLIT}
        | {"STAGES": 1, "WANTS_GATE": True, "WANTS_UP": True, "WANTS_DOWN": True}
        | {"WANTS_GATE_BIAS": True, "WANTS_UP_BIAS": True}
        | OVERLAPS,
        weight_gradients._WARPS,
        1,
    )
compile_kernel(
    turn._turn_kernel,
    pointers(VALUES, "i_t", "o_t") | integers("rows", "columns"),
    {"BLOCK": 64} | OVERLAPS,
    4,
    1,
)
compile_kernel(
    turn._put_rows_kernel,
    pointers(VALUES, "m_t") | pointers("*i64", "i_rows") | pointers(VALUES, "i_part") | integers("D", "stride"),
    {"BD": 1024, "ADDS": True} | OVERLAPS,
    4,
    1,
)
for interleaved in (False, True):
    compile_kernel(
        activation._forward_kernel,
        pointers(VALUES, "i_z", "i_u")
        | pointers("*i1", "i_counted")
        | pointers(VALUES, "o_h")
        | pointers(INTEGERS, "o_counts")
        | pointers("*fp32", "o_l1")
        | integers("M", "N"),
        {"GATED": True, "SQUARED": True, "INTERLEAVED": interleaved, "WANTS_H": not interleaved}
        | {"WANTS_STATISTICS": True, "HAS_MASK": True, "ROWS": activation._ROWS, "COLUMNS": activation._COLUMNS}
        | {"STEP": activation._STEP}
        | OVERLAPS,
        4,
        1,
    )
    compile_kernel(
        activation._backward_kernel,
        pointers(VALUES, "i_z", "i_u", "m_dh")
        | pointers("*fp32", "i_l1")
        | pointers("*i1", "i_counted")
        | pointers(VALUES, "o_dz", "o_du")
        | {"n": "i64", "N": "i32"},
        {"GATED": True, "SQUARED": True, "INTERLEAVED": interleaved, "HAS_L1": True, "HAS_MASK": True}
        | {"BLOCK": activation._BLOCK}
        | OVERLAPS,
        4,
        1,
    )
few_weights = pointers(VALUES, "i_gate", "i_gate_bias", "i_up", "i_up_bias", "i_down")
few_kind = {"PREFETCHES": CAPABILITY >= 90, "GATED": True, "SQUARED": False}
few_kind |= {"HAS_GATE_BIAS": False, "HAS_UP_BIAS": False}
if ELEMENT_BYTES == 2:
    compile_kernel(
        screen.screened_neurons_kernel,
        pointers(VALUES, "i_x")
        | pointers("*u8", "i_q")
        | pointers("*fp32", "i_scale", "i_reach")
        | few_weights
        | pointers(VALUES, "o_h")
        | pointers("*u8", "o_bits")
        | integers("D", "F"),
        OVERLAPS | {"BN": screen.BN, "BK": screen.BK, "SLOTS": screen.SLOTS} | few_kind,
        screen.WARPS,
        1,
        registers=screen.REGISTERS,
    )
    compile_kernel(
        decode._sum_kernel,
        pointers(VALUES, "i_h")
        | pointers(INTEGERS, "i_words")
        | pointers(VALUES, "i_down", "i_down_bias", "o_y")
        | integers("D", "F"),
        OVERLAPS | {"BW": triton.next_power_of_2(F // 32)} | decode._ONE | {"HAS_DOWN_BIAS": False},
        decode._warps_for_words(triton.next_power_of_2(F // 32)),
        1,
    )
for tokens in (1, 8, 16, 32, 64):
    facts = {"element_size": ELEMENT_BYTES, "capability": CAPABILITY}
    neurons, sums = decode.tiles_for(tokens, D, F, **facts)
    few_arguments = pointers(VALUES, "i_x") | few_weights | pointers(VALUES, "m_h")
    few_arguments |= pointers({32: "*i32", 64: "*i64"}[neurons.BN], "o_bits") | integers("M", "D", "F", "x_stride")
    BM = max(16, tokens)
    if isinstance(neurons, decode.HopperTile):
        from twell.kernels import hopper

        for early in (True, False):
            compile_kernel(
                hopper.neurons_kernel,
                few_arguments,
                OVERLAPS
                | {"EARLY": early, "HM": BM, "BM": max(8, tokens), "TN": neurons.TN, "SUBS": -(-neurons.TN // 16)}
                | {"CHAINS": decode.HOPPER_CHAINS, "DEPTH": neurons.depth}
                | few_kind,
                decode.HOPPER_CHAINS,
                1,
                f" {tokens} {early}",
            )
    if isinstance(sums, decode.HopperSumTile):
        from twell.kernels import hopper

        compile_kernel(
            hopper.sums_kernel,
            pointers(VALUES, "i_h")
            | pointers("*i64", "i_words")
            | pointers(VALUES, "i_down", "i_down_bias", "o_y")
            | integers("M", "D", "n_words"),
            {"STRIDE": neurons.TN}
            | OVERLAPS
            | {"BM": BM, "BW": decode._WORDS, "BS": sums.BS, "BD": sums.BD, "CHAINS": sums.chains}
            | {"HAS_DOWN_BIAS": False},
            sums.chains,
            1,
            f" {tokens}",
        )
    neurons, sums = decode.tiles_for(tokens, D, F, aligned=False, **facts)
    compile_kernel(
        decode._neurons_kernel,
        few_arguments,
        {"PRECISION": precision}
        | OVERLAPS
        | {"BM": BM, "TN": neurons.TN or neurons.BN, "BN": neurons.BN, "BK": neurons.BK, "SLOTS": neurons.slots}
        | {"CHAINS": decode._CHAINS, "DEPTH": decode._CHAIN_DEPTH, "CHAIN_STAGES": decode._CHAIN_STAGES}
        | few_kind,
        neurons.warps,
        neurons.stages,
        f" {tokens}",
    )
    compile_kernel(
        decode._sums_kernel,
        pointers(VALUES, "i_h")
        | pointers("*i64", "i_words")
        | pointers(VALUES, "i_down", "i_down_bias", "o_y")
        | integers("M", "D", "n_words", "last_bits"),
        {"STRIDE": (neurons.TN or 64) if neurons.BN == 64 else 64, "PRECISION": precision}
        | OVERLAPS
        | {"BM": BM, "BW": sums.BW, "BS": sums.BS, "BD": sums.BD, "HAS_DOWN_BIAS": False, "STAGES": sums.stages},
        sums.warps,
        sums.stages,
        f" {tokens}",
    )
compile_kernel(
    dense._activate_kernel,
    pointers(VALUES, "m_z", "i_u") | {"n": "i64"},
    {"BLOCK": dense._BLOCK, "GATED": True, "SQUARED": False},
    8,
    3,
)
compile_kernel(
    pack._counts_kernel,
    pointers(INTEGERS, "i_bitmap", "o_counts") | integers("M", "C", "words"),
    {"ROWS": pack._COUNT_ROWS, "STEP": 128},
    4,
    3,
)
if DTYPE != "float32":
    compile_kernel(
        pack._words_kernel,
        pointers(VALUES, "i_gate") | pointers(INTEGERS, "o_words") | integers("M", "F", "n_tiles", "slots"),
        {"TILE": 256, "BT": 256, "ROWS": pack._ROWS},
        4,
        3,
    )
