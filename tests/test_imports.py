"""Imports go one way, and importing the package is cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "twell"

# A module may import modules of a lower level, and of its own package.
LIBRARY = {
    "_version": 0,
    "formats": 1,
    "energy": 1,
    "host": 1,
    "int8": 1,
    "progress": 1,
    "plan": 1.5,
    "saved": 1.8,
    "reference": 2,
    "fp8": 2.5,
    "cpu": 3,
    "gpu": 4,
    "ops": 5,
    "nn": 6,
    "transformers_hook": 6,  # imports twell.hf by name, when a sparse configuration is first used
    "sparsity": 7,
    "hf": 8,
    "vllm": 8.5,
    "__init__": 9,
    "train": 10,
}
WORKBENCH = {
    "bench": 11,
    "extras": 11,
    "evaluate": 12,
    "analysis": 12,
    "sequences": 11,
    "trace": 12,
    "doctor": 12,
    "serve": 12,
    "analyze": 13,
    "generate": 13,
    "sweep": 13,
    "report": 14,
    "cli": 16,
}
LEVELS = {
    **LIBRARY,
    "workbench": 11,
    **{f"workbench.{name}": level for name, level in WORKBENCH.items()},
    "__main__": 17,
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imported_modules(source: str) -> set[str]:
    """Names below ``twell`` that a module imports, anywhere in it; "__init__" for the package itself."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("twell").lstrip(".") for a in node.names if a.name.split(".")[0] == "twell"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "twell":
                names = {a.name for a in node.names}
                found |= {n if n in LEVELS else "__init__" for n in names}
            elif node.module == "twell.workbench":
                found |= {f"workbench.{a.name}" for a in node.names}
            elif node.module and node.module.startswith("twell."):
                found.add(node.module.removeprefix("twell."))
    return {name or "__init__" for name in found}


def part_of(name: str) -> str:
    """The entry of LEVELS that a module belongs to."""
    first, _, rest = name.partition(".")
    second = f"{first}.{rest.split('.')[0]}"
    return second if second in LEVELS else first


def back_edges(name: str, source: str) -> list[str]:
    own = part_of(name)
    targets = {part_of(target) for target in imported_modules(source)} - {own}
    return [f"{name} -> {target}" for target in targets if LEVELS[target] >= LEVELS[own]]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    assert back_edges(module_name(path), path.read_text()) == []


ROOMS = {  # of gpu/
    "shared": 0,
    "prefill": 1,
    "decode": 1,
    "training": 1,
    "dense": 2,
    "dense_fp8": 3,
    "fp8": 4,
    "__init__": 5,
}


@pytest.mark.parametrize("path", sorted((SOURCE / "gpu").rglob("*.py")), ids=module_name)
def test_imports_within_gpu_go_one_way(path: Path) -> None:
    room = path.relative_to(SOURCE / "gpu").parts[0].removesuffix(".py")
    inside = (name.split(".") for name in imported_modules(path.read_text()) if name.startswith("gpu."))
    assert [name for _, name, *_ in inside if name != room and ROOMS[name] >= ROOMS[room]] == []


@pytest.mark.parametrize(
    "source", ["from twell.ops import gated_ffn", "from twell import nn", "import twell.workbench.cli", "import twell"]
)
def test_a_back_edge_is_found(source: str) -> None:
    assert len(back_edges("reference", f"def f():\n    {source}\n")) == 1


def test_import_is_cheap() -> None:
    """Less than 300 ms beyond torch, and no heavy module that torch does not import itself."""
    code = """
import json, sys, time, torch
HEAVY = {"transformers", "triton", "typer", "rich", "compressed_tensors", "torchao"}
before, start = HEAVY & {*sys.modules}, time.perf_counter()
import twell
twell.quantize_
print(json.dumps({"seconds": time.perf_counter() - start, "heavy": sorted(HEAVY & {*sys.modules} - before)}))
"""
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    assert min(run["seconds"] for run in runs) < 0.3
    assert all(run["heavy"] == [] for run in runs)
