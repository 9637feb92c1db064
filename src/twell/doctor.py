"""What this machine has, which backend would run and why, and a self-test."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any, NamedTuple

import torch

from twell import cpu, ops
from twell.bench import cases, ffn, timing


class Report(NamedTuple):
    healthy: bool
    facts: dict[str, Any]


def examine() -> Report:
    """Collect the facts and run the self-test (about a second; two more where the CPU advertises AMX)."""
    bf16 = cpu.bf16_problem()
    self_test = _self_test()
    facts = {
        "twell": _version_of("twell"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "transformers": _version_of("transformers"),
        "cpu": f"{timing.cpu_name()}, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "backend on cpu": _backend_and_why(torch.device("cpu")),
        "backend on cuda": _backend_and_why(torch.device("cuda")),
        "bf16 on cpu": bf16 or "works",
        "self-test": self_test or "sparse equals dense",
    }
    return Report(bf16 is None and self_test is None, facts)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backend_and_why(device: torch.device) -> str:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "none: torch sees no GPU"
    others = ((b, ops.why_unavailable(b, device)) for b in ops.BACKENDS[1:])
    reasons = "; ".join(f"not {b}: {why}" for b, why in others if why)
    return f"{ops.choose_backend('auto', device)} ({reasons})"


def _self_test() -> str | None:
    """What is wrong, or None: every sparsity level against float64 on a small shape."""
    for name in ("skew10", "skew100"):
        inputs = cases.make(name, 64, 128, 352, dtype=torch.float32)
        x = inputs.x
        sparse = ops.gated_ffn(x, inputs.w_gate, inputs.w_up, inputs.w_down)
        dense = ops.gated_ffn(x, inputs.w_gate, inputs.w_up, inputs.w_down, backend="reference")
        try:
            ffn.check(x, inputs, True, dense, sparse)
        except ffn.WrongResult as error:
            return f"{name}: {error}"
    return None
