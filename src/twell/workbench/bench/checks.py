"""Whether what a benchmark times is right: checked before a measurement, and again after it.

Sparse output may err at most twice as much against float64 as PyTorch's own dense output does. A benchmark whose check
fails raises ``WrongResult`` and reports no speedup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from twell import reference
from twell.workbench.bench import fp8
from twell.workbench.bench.cases import FFNInputs

SLACK = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
_TRUTH_ROWS = 256  # rows compared with float64
_FP8_ERROR, _FP8_ROWS = 0.25, 16  # an error beyond it means FP8 is broken; in fewer rows y may be next to nothing
_FP8_ROW = 0.5  # how far any row of sparse and dense FP8 may be apart, in norms of a usual row; 0.18 was seen


class WrongResult(RuntimeError):
    """The sparse output is further from the truth than the tolerance law allows."""

    exit_code = 1  # of a command: a verdict, not bad input


def relative_error(y: Tensor, truth: Tensor) -> float:
    """0 where y is exact and the truth is 0."""
    return ((y.double() - truth).norm() / truth.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def require_same(y: Tensor, checked: Tensor, name: str) -> None:
    if not torch.equal(y, checked):
        raise WrongResult(f"{name} output is not what it was before it was timed; no speedup is reported")


def check(x: Tensor, inputs: FFNInputs, gated: bool, dense: Tensor, sparse: Tensor) -> dict[str, float]:
    """Relative errors against float64 on up to 256 rows spread over x; raises WrongResult beyond the tolerance.

    Dense and sparse are also compared with each other in all rows, since the sample may miss the wrong one.
    """
    step = max(1, len(x) // _TRUTH_ROWS)
    up = inputs.w_up if gated else None
    w = reference.Weights(inputs.w_gate, up, inputs.w_down).to(torch.float64)
    truth = reference.forward(x[::step].double(), w, want_stats=False).y
    errors = {"dense": relative_error(dense[::step], truth), "sparse": relative_error(sparse[::step], truth)}
    allowed = 2 * errors["dense"] + SLACK[x.dtype]
    usual = truth.norm(dim=1).median().clamp(min=torch.finfo(x.dtype).tiny)  # 0 where no neuron fires
    row_error = ((sparse.double() - dense.double()).norm(dim=1) / usual).max().item()
    if not errors["sparse"] <= allowed or not row_error <= 10 * allowed:
        raise WrongResult(
            f"sparse output is wrong: relative error {errors['sparse']:.2e} (dense {errors['dense']:.2e}, allowed "
            f"{allowed:.2e}), worst row {row_error:.2e} from dense; no speedup is reported"
        )
    return {name: float(f"{e:.3g}") for name, e in errors.items()}


def check_all(x: Tensor, inputs: FFNInputs, gated: bool, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """``check`` of each sparse way of 16 bits or more that is there; the errors of these and of dense."""
    sparse = [name for name in ("sparse", "frozen", "sparse_compiled") if name in outputs]
    errors = {name: check(x, inputs, gated, outputs["dense"], outputs[name]) for name in sparse}
    return {"dense": errors["sparse"]["dense"], **{name: of["sparse"] for name, of in errors.items()}}


def check_fp8(x: Tensor, inputs: FFNInputs, gated: bool, outputs: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Relative errors of FP8 FFNs against float64, on the rows that ``check`` takes: against weights and x as FP8
    rounds them (``fp8.meant``); None where that is 0. Raises WrongResult where FP8 is broken."""
    errors: dict[str, float | None] = {}
    rows = slice(None, None, max(1, len(x) // _TRUTH_ROWS))
    w = reference.Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    for name in (name for name in (*fp8.NAMES, fp8.SPARSE) if name in outputs):
        y, truth = outputs[name][rows], fp8.meant(name, x[rows], w)
        error, allowed = relative_error(y, truth), _FP8_ERROR
        if name == fp8.SPARSE:  # compared in all rows, since the sample may miss the wrong one
            allowed = 1.05 * (errors["fp8"] or 0.0) + 1e-3  # the factor counts where both are dense
            apart = (outputs[name].double() - outputs["fp8"].double()).norm(dim=1).max()
            if not apart <= _FP8_ROW * truth.norm(dim=1).median() and len(y) >= _FP8_ROWS:
                raise WrongResult(f"{name} output is wrong: a row is {apart:.2e} from dense; no speedup is reported")
        if not error <= (allowed if len(y) >= _FP8_ROWS else math.inf):
            raise WrongResult(f"{name} output is wrong: relative error {error:.2e}; no speedup is reported")
        errors[name] = float(f"{error:.3g}") if error < 1e6 else None
    return errors
