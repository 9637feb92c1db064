"""Run every GPU kernel once or more at small, awkward shapes, for compute-sanitizer to watch. Usage, on a GPU:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize_kernels.py

(and --tool racecheck. Its API errors would be the query for a kernel's parameter after the last one.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell import gpu, reference
from twell.gpu import fp8 as gpu_fp8
from twell.gpu.decode import few_fp8
from twell.gpu.prefill import split_fp8
from twell.gpu.shared.layout import Fp8Weights
from twell.plan import Plan, dense_plan
from twell.reference import Weights


def assert_right(y: Tensor, x: Tensor, w: Weights) -> None:
    truth = reference.forward(x.double(), w.to(torch.float64), want_stats=False).y
    assert (y.double() - truth).norm() <= 2e-2 * truth.norm(), (*x.shape, len(w.gate), x.dtype)


def train(x: Tensor, w: Weights, plan: Plan | None) -> None:
    """Forward and backward with every output, by a plan or densely."""
    dy, dl1 = torch.randn_like(x), torch.tensor(0.1, device=x.device)
    mask = torch.arange(len(x), device=x.device) % 3 > 0
    needs = (True,) * 7
    tensors = None if plan is None else plan.on(x.device)
    *_, saved = gpu.train(x, w, "relu", tensors, mask, want_stats=True, save=True)
    got = gpu.backward(dy, dl1, x, w, saved, "relu", tensors, mask, needs)
    x, w, dy, dl1 = x.double(), w.to(torch.float64), dy.double(), dl1.double()
    out = reference.forward(x, w, "relu", mask)
    want = reference.backward(dy, dl1, x, w, out.gate, out.up, "relu", mask, needs)
    for a, t in zip((got.x, *got.weights), (want.x, *want.weights), strict=True):
        assert a is not None and t is not None and (a.double() - t).norm() <= 5e-2 * t.norm(), (x.shape, plan)


def fp8_layer(M: int, D: int, F: int) -> None:
    """FP8 weights: the split with long and heavy tokens, and dense batches."""
    if torch.cuda.get_device_capability() < (8, 9):
        return
    x = torch.randn(M, D, device="cuda").bfloat16()
    x[:, 0], x[M // 2] = 1, x[M // 2] * 20
    gate, up, down = (torch.randn(s, device="cuda") / 8 for s in ((F, D), (F, D), (D, F)))
    gate[:, 0] -= 1.5
    w = reference.to_fp8(gate), reference.to_fp8(up), reference.to_fp8(down)
    rows, truth = Fp8Weights.of(*w, by_neurons=True), reference.fp8_forward(x, *w)
    for n_hot, cap in ((0, 40), (128, 4), (128, 0)):
        plan = Plan(n_neurons=F, hot=torch.randperm(F)[:n_hot], cap=cap, first=cap // 2, min_tokens=0).on(x.device)
        layout = split_fp8.lay_out(rows, plan, n_hot, x.dtype)
        for least in (0, M + 1):
            y = gpu_fp8.forward(x, rows, "relu", plan, 0, least, layout)
            assert (y.double() - truth).norm() <= 5e-2 * truth.norm(), (M, D, F, n_hot, least)
    for few in (1, 8, 16, 33):
        y = few_fp8.forward(x[:few], rows, "relu", settled=True)
        assert (y.double() - truth[:few]).norm() <= 5e-2 * truth[:few].norm(), (few, D, F)


def main() -> None:
    for M, D, F in ((300, 128, 768), (129, 208, 400), (1, 64, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(M)
            w = Weights(*(torch.randn(s, device="cuda") / 8 for s in ((F, D), (F, D), (D, F), (F,), (F,), (D,))))
            w = w._replace(gate_bias=w.gate_bias - 1.5)  # type: ignore[operator]
            x = torch.randn(M, D, device="cuda")
            x[M // 2] *= 20  # a token that wakes many neurons
            w, x = w.to(dtype), x.to(dtype)
            for n_hot, cap, first in ((0, 40, 8), (128, 4, 2), (0, 1000, 500), (256, 0, 0)):
                plan = Plan(
                    n_neurons=F, hot=torch.randperm(F)[: min(n_hot, F - 16)], cap=cap, first=first, min_tokens=0
                )
                for layout in (w, w._replace(down=w.down.t().contiguous().t())):
                    assert_right(gpu.forward(x, layout, "relu", plan.on(x.device)), x, w)
                    assert_right(gpu.forward(x, layout, "relu", plan.on(x.device), gpu.freeze(layout, plan)), x, w)
                train(x, w, plan)
            train(x, w, None)
            assert_right(gpu.forward(x, w, "relu", None), x, w)
            few_plan = dense_plan(F, few_tokens=64, mean_active=1.0)  # one token by the int8 copy of the gate
            union_plan = dense_plan(F, union_tokens=4095)
            for few in (1, 3, 16, 33, 64, M):
                kept = gpu.freeze(w, few_plan)
                assert_right(gpu.forward(x[:few], w, "relu", few_plan.on(x.device), kept), x[:few], w)
                turned = w._replace(down=w.down.t().contiguous().t())
                assert_right(gpu.forward(x[:few], turned, "relu", union_plan.on(x.device)), x[:few], w)
                assert_right(gpu.forward(x[:few], turned, "relu", few_plan.on(x.device)), x[:few], w)
    for M, D, F in ((300, 128, 768), (129, 208, 400), (40, 1040, 5104)):  # the last for small dense batches
        fp8_layer(M, D, F)
    torch.cuda.synchronize()
    print("every kernel ran, and its results are right")


if __name__ == "__main__":
    main()
