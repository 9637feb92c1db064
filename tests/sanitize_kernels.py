"""Run every GPU kernel once or more at small, awkward shapes, for compute-sanitizer to watch. Usage, on a GPU:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_kernels.py      (and --tool racecheck)
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell import gpu, reference
from twell.kernels import decode, pack, screen
from twell.kernels.gate import gate_and_bitmap
from twell.plan import Plan, dense_plan
from twell.reference import Weights


def train(x: Tensor, w: Weights, plan: Plan | None) -> None:
    """Forward and backward with every output, by a plan or densely."""
    dy, dl1 = torch.randn_like(x), torch.tensor(0.1, device=x.device)
    mask = torch.arange(len(x), device=x.device) % 3 > 0
    needs = (True,) * 7
    if plan is None:
        out = gpu.dense_forward(x, w, "relu", mask, want_stats=True)
        got = gpu.dense_backward(dy, dl1, x, w, out.gate, out.up, "relu", mask, needs)
    else:
        *_, saved = gpu.forward_to_train(x, w, "relu", plan.encode(), mask, True)
        got = gpu.backward(dy, dl1, x, w, saved, "relu", plan.encode(), mask, needs)
    x, w, dy, dl1 = x.double(), w.to(torch.float64), dy.double(), dl1.double()
    out = reference.forward(x, w, "relu", mask)
    want = reference.backward(dy, dl1, x, w, out.gate, out.up, "relu", mask, needs)
    for a, t in zip((got.x, *got.weights), (want.x, *want.weights), strict=True):
        assert a is not None and t is not None and (a.double() - t).norm() <= 5e-2 * t.norm(), (x.shape, plan)


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
                y = gpu.forward(x, w, "relu", plan.encode())
                truth = reference.forward(x.double(), w.to(torch.float64), want_stats=False).y
                assert (y.double() - truth).norm() <= 2e-2 * truth.norm(), (M, D, F, dtype, plan)
                train(x, w, plan)
            train(x, w, None)
            tiles, programs = gpu.launch_facts(x)
            r, bitmap, _ = gate_and_bitmap(x, w.gate, None, tile=tiles.gate, programs=programs, use_tma=tiles.use_tma)
            pack.neuron_counts(bitmap, F)
            if dtype == torch.bfloat16:
                pack.twell_words(r)
            gpu.forward(x, w, "relu", None)
            for few in (1, 3, 16, 33, 64):
                some = x[:few]
                plan = dense_plan(F, few_tokens=64).encode()
                y = gpu.forward(some, w, "relu", plan)
                assert torch.equal(gpu.forward(some, w, "relu", plan), y)  # with the gate read early
                truth = reference.forward(some.double(), w.to(torch.float64), want_stats=False).y
                assert (y.double() - truth).norm() <= 2e-2 * truth.norm(), (len(some), D, F, dtype)
            if dtype == torch.bfloat16:
                copy, tiles_of_few = screen.screen_of(w.gate), decode.tiles_for(1, D, F, aligned=False)
                y = decode.forward(x[:1], w, w.down.t().contiguous(), "relu", tiles_of_few, copy)
                truth = reference.forward(x[:1].double(), w.to(torch.float64), want_stats=False).y
                assert (y.double() - truth).norm() <= 2e-2 * truth.norm(), (D, F)
    torch.cuda.synchronize()
    print("every kernel ran, and its results are right")


if __name__ == "__main__":
    main()
