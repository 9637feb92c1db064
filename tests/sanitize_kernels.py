"""Run every GPU kernel once or more at small, awkward shapes, for compute-sanitizer to watch. Usage, on a GPU:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_kernels.py      (and --tool racecheck)
"""

from __future__ import annotations

import torch

from twell import gpu, reference
from twell.kernels import pack
from twell.kernels.gate import gate_and_bitmap
from twell.plan import Plan
from twell.reference import Weights


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
            tiles, programs = gpu.launch_facts(x)
            r, bitmap, _ = gate_and_bitmap(x, w.gate, None, tile=tiles.gate, programs=programs, use_tma=tiles.use_tma)
            pack.neuron_counts(bitmap, F)
            if dtype == torch.bfloat16:
                pack.twell_words(r)
            gpu.forward(x, w, "relu", None)
    torch.cuda.synchronize()
    print("every kernel ran, and its results are right")


if __name__ == "__main__":
    main()
