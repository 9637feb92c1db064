"""``twell bench ffn``: one FFN, dense against sparse, on workloads of known sparsity.

A case is checked before it is timed: sparse output may err at most twice as much as PyTorch's own dense
output does against float64. A case that fails the check raises, and no speedup is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import ops, reference
from twell.bench import cases, timing

_TRUTH_ROWS = 256  # rows compared with float64
_SLACK = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}


class WrongResult(RuntimeError):
    """The sparse output is further from the truth than the tolerance law allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row to measure."""

    workload: str
    M: int
    D: int = 2048
    F: int = 5632
    dtype: torch.dtype = torch.float32
    gated: bool = True
    device: str = "cpu"
    backend: str = "auto"
    seed: int = 0


@torch.inference_mode()
def run(cases_: list[Case], *, seconds: float = 3.0) -> Iterator[dict[str, Any]]:
    """Measure each case; yields one JSON-ready row per case, as it is done."""
    inputs, made_for = None, None
    for case in cases_:
        # Weights do not depend on M, so cases that differ in M alone share one build: the largest.
        key = dataclasses.replace(case, M=0)
        if inputs is None or made_for != key:
            largest = max(c.M for c in cases_ if dataclasses.replace(c, M=0) == key)
            with torch.inference_mode(False):  # weights as a model has them, with version counters
                inputs = cases.make(
                    case.workload, largest, case.D, case.F, seed=case.seed, dtype=case.dtype, device=case.device
                )
            made_for = key
        yield _run_case(case, inputs, seconds)


def _run_case(case: Case, inputs: cases.FFNInputs, seconds: float) -> dict[str, Any]:
    x = inputs.x[: case.M].contiguous()
    dense, sparse = _alternatives(case, inputs, x)
    errors = check(x, inputs, case.gated, dense(), sparse())
    r = torch.relu(nnf.linear(x, inputs.w_gate))
    times = timing.compare({"dense": dense, "sparse": sparse}, seconds=seconds)
    return {
        "bench": "ffn",
        "workload": case.workload,
        "kind": "gated" if case.gated else "plain",
        "M": case.M,
        "D": case.D,
        "F": case.F,
        "dtype": str(case.dtype).removeprefix("torch."),
        "backend": ops.choose_backend(case.backend, x.device),
        "mean_active": round((r != 0).sum().item() / case.M, 2),
        "dense_ms": times["dense"]._asdict(),
        "sparse_ms": times["sparse"]._asdict(),
        "speedup": round(times["dense"].p50 / times["sparse"].p50, 3),
        "error": errors,
        **timing.environment(x.device),
    }


def _alternatives(case: Case, inputs: cases.FFNInputs, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    w_gate, w_up, w_down = inputs.w_gate, inputs.w_up, inputs.w_down

    def dense_gated() -> Tensor:
        return nnf.linear(torch.relu(nnf.linear(x, w_gate)) * nnf.linear(x, w_up), w_down)

    def dense_plain() -> Tensor:
        return nnf.linear(torch.relu(nnf.linear(x, w_gate)), w_down)

    def sparse_gated() -> Tensor:
        return ops.gated_ffn(x, w_gate, w_up, w_down, backend=case.backend)

    def sparse_plain() -> Tensor:
        return ops.ffn(x, w_gate, w_down, backend=case.backend)

    return (dense_gated, sparse_gated) if case.gated else (dense_plain, sparse_plain)


def check(x: Tensor, inputs: cases.FFNInputs, gated: bool, dense: Tensor, sparse: Tensor) -> dict[str, float]:
    """Relative errors against float64 on up to 256 rows spread over x; raises WrongResult beyond the tolerance.

    All rows are compared between dense and sparse as well, since the sample may miss the wrong one.
    """
    step = max(1, len(x) // _TRUTH_ROWS)
    up = inputs.w_up if gated else None
    w = reference.Weights(inputs.w_gate, up, inputs.w_down).to(torch.float64)
    truth = reference.forward(x[::step].double(), w, want_stats=False).y
    errors = {"dense": relative_error(dense[::step], truth), "sparse": relative_error(sparse[::step], truth)}
    allowed = 2 * errors["dense"] + _SLACK[x.dtype]
    row_error = ((sparse.double() - dense.double()).norm(dim=1) / truth.norm(dim=1).median()).max().item()
    if not errors["sparse"] <= allowed or not row_error <= 10 * allowed:
        raise WrongResult(
            f"sparse output is wrong: relative error {errors['sparse']:.2e} (dense {errors['dense']:.2e}, allowed "
            f"{allowed:.2e}), worst row {row_error:.2e} from dense; no speedup is reported"
        )
    return {name: float(f"{e:.3g}") for name, e in errors.items()}


def relative_error(y: Tensor, truth: Tensor) -> float:
    return ((y.double() - truth).norm() / truth.norm()).item()
