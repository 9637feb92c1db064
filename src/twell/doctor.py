"""What this machine has, which backend would run and why, and a self-test."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any, NamedTuple

import torch

from twell import ops
from twell.bench import cases, ffn, timing


class Report(NamedTuple):
    healthy: bool
    facts: dict[str, Any]


def examine() -> Report:
    """Collect the facts and run the self-test (about a second; two more where the CPU advertises AMX)."""
    bf16 = bf16_problem()
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
    """What is wrong, or None: two sparsity levels against float64, large enough for the fast path to run."""
    for name in ("skew10", "skew100"):
        inputs = cases.make(name, 64, 512, 1408, dtype=torch.float32)
        x = inputs.x
        sparse = ops.gated_ffn(x, inputs.w_gate, inputs.w_up, inputs.w_down)
        dense = ops.gated_ffn(x, inputs.w_gate, inputs.w_up, inputs.w_down, backend="reference")
        try:
            ffn.check(x, inputs, True, dense, sparse)
        except ffn.WrongResult as error:
            return f"{name}: {error}"
    return None


# ---------------------------------------------------------------------------------------------------------
# bf16 on machines that advertise AMX but cannot run it
# ---------------------------------------------------------------------------------------------------------

AMX_REMEDY = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert (a @ a)[0, 0] == 64"


def bf16_problem() -> str | None:
    """Why bf16 matrix products would kill this process, or None where they work.

    Some virtual machines advertise AMX and trap on its use: oneDNN then dies with SIGILL, which cannot be
    caught. So it is tried in a second process, and only where the CPU advertises AMX (about 2 s).
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _advertises_amx():
        return None
    result = subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True, check=False)
    if result.returncode == 0:
        return None
    return (
        f"bf16 matrix products crash on this machine (exit code {result.returncode}): it advertises AMX but "
        f"cannot run it. Before starting Python: {AMX_REMEDY}"
    )


def _advertises_amx() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            return "amx_bf16" in f.read()
    except OSError:
        return False
