"""What ``twell doctor`` reports: the machine, the backend and kernels that would run, a self-test, a model's plans."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twell import plan
from twell.nn import sparse_ffns
from twell.ops import backends
from twell.ops import functional as ops
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing, train_ffn
from twell.workbench.extras import EXTRAS


def examine() -> tuple[bool, dict[str, str]]:
    """Run the self-test and collect the facts: whether all is well, and what there is.

    Takes a second; two more where the CPU advertises AMX, ten more when GPU kernels compile for the first time.
    """
    bf16, gpu = bf16_problem(), _gpu()
    passed = "sparse equals dense, forward and backward"
    wrong = self_test(torch.device("cpu"), "auto", torch.float32, 256)
    if wrong is None and gpu is not None and backends.why_unavailable("triton", gpu) is None:
        wrong, passed = self_test(gpu, "triton", torch.bfloat16, 2048), f"{passed}, on the GPU too"
    facts = {
        **{package: _version_of(package) for package in ("twell", "torch", "triton", "transformers")},
        "python": platform.python_version(),
        "cpu": f"{timing.cpu_name()}, {torch.get_num_threads()} threads",
        "gpu": "none" if gpu is None else torch.cuda.get_device_name(gpu),
        "driver": _driver(),
        "backend on cpu": _backend_and_why(torch.device("cpu")),
        "backend on cuda": _backend_and_why(torch.device("cuda")),
        "kernels": _kernels(gpu),
        "costs": plan.costs_are(gpu or torch.device("cpu")),
        "compiler": _compiler(),
        "extras": _extras(),
        "bf16 on cpu": bf16 or "works",
        "self-test": wrong or passed,
    }
    return bf16 is None and wrong is None, facts


def _gpu() -> torch.device | None:
    return torch.device("cuda") if torch.cuda.is_available() else None


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backend_and_why(device: torch.device) -> str:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "none: torch sees no GPU"
    others = ((b, backends.why_unavailable(b, device)) for b in backends.BACKENDS[1:])
    reasons = "; ".join(f"not {b}: {why}" for b, why in others if why)
    chosen = backends.choose_backend("auto", device)
    return f"{chosen} ({reasons})" if reasons else chosen


def _kernels(gpu: torch.device | None) -> str:
    """The kernels that would run on the GPU."""
    if gpu is None or backends.why_unavailable("triton", gpu):
        return "none"
    from twell.gpu.decode import few_tiles
    from twell.gpu.shared import tiles

    major, minor = torch.cuda.get_device_capability(gpu)
    capability = 10 * major + minor
    chosen = tiles.tiles_for(capability, torch.bfloat16)
    made_for = next(c for c, known in tiles._BY_CAPABILITY.items() if known is chosen)
    why_no_gluon = few_tiles.why_not_hopper(capability)
    gluon = "in Gluon" if why_no_gluon is None else f"not in Gluon ({why_no_gluon})"
    return f"Triton, tiles of sm_{made_for} on an sm_{capability} GPU; a few tokens {gluon}"


def _driver() -> str:
    try:
        version = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        version = ""
    number = re.search(r"\d+\.\d+(\.\d+)?", version)
    built = f", torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (f"NVIDIA {number[0]}" if number else "none found") + built


def _compiler() -> str:
    """The C compiler, with which Triton builds a small module at a kernel's first launch."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(os.environ.get("CC", name)))), None)
    missing = [] if found else ["a C compiler (Debian: apt install gcc)"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("Python.h (Debian: apt install python3-dev)")
    return f"GPU kernels would miss {' and '.join(missing)}" if missing else f"{found}, Python.h"


def _extras() -> str:
    """The extras that are installed, and for each of the others the command that installs it."""
    lacking = {extra: [name for name in names if find_spec(name) is None] for extra, names in EXTRAS.items()}
    whole = ", ".join(extra for extra, names in lacking.items() if not names)
    incomplete = {extra: ", ".join(names) for extra, names in lacking.items() if names}
    others = [f"{extra} lacks {names}: pip install 'twell[{extra}]'" for extra, names in incomplete.items()]
    return "; ".join([f"{whole} installed"] * bool(whole) + others)


def self_test(
    device: torch.device, backend: str, dtype: torch.dtype, tokens: int, width: int = 512, hidden: int = 1408
) -> str | None:
    """What is wrong with a backend, or None.

    Runs many, few and one token with plain and frozen weights, and a backward, by a plan in which every part of the
    split has work. Large enough for the fast path.
    """
    try:
        inputs = cases.make("skew29", tokens, width, hidden, dtype=dtype, device=device)
        fired = (torch.relu(inputs.x @ inputs.w_gate.T) != 0).sum(0)
        hot = fired.argsort(descending=True)[: hidden // 11].cpu()
        few_active = 1.0  # so few that one token is screened
        split = plan.Plan(
            n_neurons=hidden, hot=hot, cap=12, first=6, min_tokens=0, few_tokens=16, mean_active=few_active
        )
        case = ffn.Case(workload="skew29", M=tokens, backend=backend, device=str(device), fp8=False)
        w = (inputs.w_gate, inputs.w_up, inputs.w_down)
        with torch.no_grad():
            layers = ffn.make_layers(case, inputs, split, 1)
            for n in (tokens, 16, 1):
                x = inputs.x[:n]
                dense = ops.gated_ffn(x, *w, backend="reference")
                for way in ("sparse", "frozen"):
                    ffn.check(x, inputs, True, dense, layers[way][0](x))
        train_ffn.errors_of(train_ffn.Problem.of(inputs.x, Weights(*w)), backend, split)
    except ffn.WrongResult as error:
        return f"on {device.type}: {error}"
    except Exception as error:  # drivers and compilers can raise anything, and every failure is a finding
        return f"on {device.type}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


# -- the plans of a model -----------------------------------------------------------------------------------


class LayerForecast(NamedTuple):
    """How one FFN would run."""

    layer: str
    runs: str  # "sparse", or "called" or "left alone" with the reason
    plan: str


def plans(model: str) -> list[LayerForecast]:
    """The plan that ``sparsify_`` would choose on this machine for each FFN of a model in a folder. Reads no weights.

    Without a GPU: the plan for a GPU with measured costs.
    """
    from transformers import AutoModelForCausalLM

    from twell.fp8.compressed import is_rowwise_fp8, place_fp8_
    from twell.hf.classify import SPARSE
    from twell.hf.counts import find_counts
    from twell.hf.loading import check_name, load_config, model_path, reading
    from twell.hf.sparsify import sparsify_empty_

    model = model_path(model)
    if not Path(model).is_dir():
        raise ValueError(f"no such model folder: {model}")
    check_name(model)
    config = load_config(model)
    with reading(model), torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config)
        if is_rowwise_fp8(getattr(config, "quantization_config", None)):
            place_fp8_(empty, config.quantization_config)  # as our own model types do themselves
    counts = find_counts(model)
    report = sparsify_empty_(empty, counts)  # raises for counts of another shape
    ffns = dict(sparse_ffns(empty))
    fired = {} if counts is None else dict(zip(ffns, counts.fired, strict=True))
    costs = plan.costs_for(_gpu() or torch.device("cpu"))
    rows = []
    for row in report.rows:
        how = ""
        if row.kind == SPARSE and counts is None:
            how = f"plans by its first batches; `twell calibrate {shlex.quote(model)} --text FILE` counts beforehand"
        elif counts is not None and row.kind == SPARSE:
            layer = ffns[row.layer]
            width, gated = getattr(layer, layer.projections[0]).in_features, len(layer.projections) == 3
            chosen = plan.choose_plan(fired[row.layer], counts.tokens, costs, width=width, gated=gated)
            how = repr(chosen).removeprefix("Plan(").removesuffix(")")
        runs = f"{row.kind}: {row.why}" if row.kind != SPARSE and row.why else row.kind
        rows.append(LayerForecast(row.layer, runs, how))
    return rows


# -- bf16 on machines that advertise AMX but cannot run it --------------------------------------------------

AMX_REMEDY = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert (a @ a)[0, 0] == 64"


def bf16_problem() -> str | None:
    """Why bf16 matrix products would kill this process, or None if they work.

    Some virtual machines advertise AMX and trap on its use: oneDNN then dies with SIGILL, which cannot be caught. So a
    second process tries it, only where the CPU advertises AMX (about 2 s).
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
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
