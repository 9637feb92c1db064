"""Training through the Triton kernels on a GPU: real shapes, all workloads, random ones, repeatability, memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import gpu, ops, reference
from twell.bench import cases
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights

pytestmark = pytest.mark.gpu

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
SLACK = {bf16: 1e-3, f16: 1e-4, f32: 2e-6}
SIX = (True, True, True, True, True, True, True)


def gradients(x: Tensor, dy: Tensor, dl1: Tensor | None, w: Weights, plan: Plan, **how: Any) -> Any:
    activation, mask = how.get("activation", "relu"), how.get("mask")
    encoded = plan.encode()
    *out, saved = gpu.forward_to_train(x, w, activation, encoded, mask, True)
    return out, gpu.backward(dy, dl1, x, w, saved, activation, encoded, mask, SIX)


def dense_gradients(x: Tensor, dy: Tensor, dl1: Tensor | None, w: Weights, **how: Any) -> Any:
    activation, mask = how.get("activation", "relu"), how.get("mask")
    out = reference.forward(x, w, activation, mask)
    return out, reference.backward(dy, dl1, x, w, out.gate, out.up, activation, mask, SIX)


def truth(x: Tensor, dy: Tensor, dl1: Tensor | None, w: Weights, **how: Any) -> Any:
    return dense_gradients(x.double(), dy.double(), None if dl1 is None else dl1.double(), w.to(torch.float64), **how)


def assert_right(ours: Any, dense: Any, true: Any, dtype: torch.dtype) -> None:
    """Every gradient errs at most twice as much as the dense formulas in the same dtype."""
    (y, l1_sum, _), got = ours
    names = ("y", "l1_sum", "x", *Weights._fields)
    rows = zip(
        names,
        (y, l1_sum, got.x, *got.weights),
        (dense[0].y, dense[0].l1_sum, dense[1].x, *dense[1].weights),
        (true[0].y, true[0].l1_sum, true[1].x, *true[1].weights),
        strict=True,
    )
    for name, a, b, t in rows:
        if t is None or t.numel() == 0:
            continue
        norm = t.norm().clamp(min=1e-30)
        error, allowed = float((a.double() - t).norm() / norm), float((b.double() - t).norm() / norm)
        slack = SLACK[dtype] * (10 if t.dim() == 0 else 1)  # dense may be right by luck in a single number
        assert error <= 2 * allowed + slack, f"{name}: {error:.2e}, dense {allowed:.2e}"


def plan_of(inputs: cases.FFNInputs, M: int, gated: bool = True) -> Plan:
    counts = (torch.relu(inputs.x[M:] @ inputs.w_gate.T) != 0).sum(0)
    return choose_plan(counts, len(inputs.x) - M, costs_for(inputs.x.device, training=True), gated=gated)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("workload", ["iid29", "skew29", "skew100", "skew300"])
def test_workloads(workload: str, gated: bool) -> None:
    M = 4096
    inputs = cases.make(workload, M + 2048, dtype=bf16, device="cuda")
    w = Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    x, dy, dl1 = inputs.x[:M], torch.randn_like(inputs.x[:M]), torch.tensor(1e-2, device="cuda")
    plan = plan_of(inputs, M, gated)
    assert not plan.is_dense
    true = truth(x, dy, dl1, w)
    ours = gradients(x, dy, dl1, w, plan)
    assert_right(ours, dense_gradients(x, dy, dl1, w), true, bf16)
    r = torch.relu(nnf.linear(x, w.gate))
    assert (ours[0][2] - (r != 0).sum(0)).abs().sum() <= 1e-3 * r.count_nonzero()  # other sums may round to 0


@pytest.mark.parametrize(("n_hot", "cap"), [(0, 0), (0, 16), (512, 16), (512, 1), (512, 2048), (5376, 16)])
def test_any_split(n_hot: int, cap: int) -> None:
    M = 2048
    inputs = cases.make("skew100", M, dtype=bf16, device="cuda")
    w = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    dy, dl1 = torch.randn_like(inputs.x), torch.tensor(1e-2, device="cuda")
    plan = Plan(n_neurons=5632, hot=torch.randperm(5632)[:n_hot], cap=cap, first=cap // 2, min_tokens=0)
    ours = gradients(inputs.x, dy, dl1, w, plan)
    assert_right(ours, dense_gradients(inputs.x, dy, dl1, w), truth(inputs.x, dy, dl1, w), bf16)


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes_and_sparsities(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    M = rng.choice([1, 7, 33, 300, 1025])
    D, F = 16 * rng.choice([1, 3, 8, 17, 64]), 16 * rng.choice([1, 5, 16, 40, 64])
    dtype, gated, bias = rng.choice([bf16, bf16, f16, f32]), rng.random() < 0.7, rng.random() < 0.4
    scale = D**-0.5

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    w = Weights(
        normal(F, D), normal(F, D) if gated else None, normal(D, F),
        normal(F) - rng.uniform(0, 1) if bias else None, normal(F) if bias and gated else None,
        normal(D) if bias else None,
    )  # fmt: skip
    x, dy = torch.randn(M, D, device="cuda").to(dtype), torch.randn(M, D, device="cuda").to(dtype)
    how: dict[str, Any] = {"activation": rng.choice(["relu", "relu2"])}
    how["mask"] = torch.rand(M, device="cuda") < 0.7 if rng.random() < 0.4 else None
    dl1 = torch.tensor(0.1, device="cuda") if rng.random() < 0.8 else None
    n_hot = min(2 * int(rng.random() * F / 2), F - 16)
    cap = rng.choice([0, 3, 16, 64, 300, 1024])
    plan = Plan(n_neurons=F, hot=torch.randperm(F)[:n_hot], cap=cap, first=cap // 3, min_tokens=0)
    # Which neurons are active is a matter of rounding: compare at the gate that the kernels' dtype gives.
    ours, dense = gradients(x, dy, dl1, w, plan, **how), dense_gradients(x, dy, dl1, w, **how)
    assert_right(ours, dense, truth(x, dy, dl1, w, **how), dtype)


def test_the_same_bits_twenty_times() -> None:
    inputs = cases.make("skew100", 4096, dtype=bf16, device="cuda")
    w = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    dy, dl1 = torch.randn_like(inputs.x), torch.tensor(1e-2, device="cuda")
    for cap in (16, 96):
        plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=cap, first=cap // 2, min_tokens=0)
        first = gradients(inputs.x, dy, dl1, w, plan)
        for _ in range(20):
            again = gradients(inputs.x, dy, dl1, w, plan)
            for a, b in zip(
                (*first[0], first[1].x, *first[1].weights), (*again[0], again[1].x, *again[1].weights), strict=True
            ):  # fmt: skip
                assert a is None or torch.equal(a, b)


def test_a_neuron_that_always_fires_though_it_is_cold() -> None:
    inputs = cases.make("skew29", 4096, dtype=bf16, device="cuda")
    w_gate = inputs.w_gate.clone()
    w_gate[7] = inputs.x.float().mean(0).to(bf16) * 3
    w = Weights(w_gate, inputs.w_up, inputs.w_down)
    assert (inputs.x @ w_gate[7] > 0).float().mean() > 0.9
    dy = torch.randn_like(inputs.x)
    plan = Plan(n_neurons=5632, hot=torch.arange(512, 1024), cap=96, first=32, min_tokens=0)
    ours = gradients(inputs.x, dy, None, w, plan)
    assert_right(ours, dense_gradients(inputs.x, dy, None, w), truth(inputs.x, dy, None, w), bf16)


def test_memory_is_half_of_dense() -> None:
    M = 16384
    inputs = cases.make("skew29", M + 2048, dtype=bf16, device="cuda")
    tensors = [t.clone().requires_grad_() for t in (inputs.x[:M], inputs.w_gate, inputs.w_up, inputs.w_down)]
    encoded, dy = plan_of(inputs, M).encode(), torch.randn_like(tensors[0])

    def dense() -> tuple[Tensor, Tensor]:
        x, w_gate, w_up, w_down = tensors
        h = torch.relu(nnf.linear(x, w_gate)) * nnf.linear(x, w_up)
        return nnf.linear(h, w_down), h.abs().sum(dtype=f32)

    def sparse() -> tuple[Tensor, Tensor]:
        y, stats = ops.gated_ffn(*tensors, return_stats=True, plan=encoded)
        return y, stats.l1_sum

    peaks = []
    for run in (dense, sparse):
        for _ in range(2):  # the first one keeps copies of weights, which the second finds
            for t in tensors:
                t.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y, l1_sum = run()
            torch.autograd.backward([y, l1_sum], [dy, torch.tensor(1e-3, device="cuda")])
            del y, l1_sum
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_training_in_a_cuda_graph_runs_densely() -> None:
    inputs = cases.make("skew29", 4096, dtype=bf16, device="cuda")
    tensors = [t.clone().requires_grad_() for t in (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)]
    plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=96, min_tokens=0).encode()
    for _ in range(2):
        torch.autograd.grad(ops.gated_ffn(*tensors, plan=plan).sum(), tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(ops.gated_ffn(*tensors, plan=plan).sum(), tensors)
    graph.replay()
    expected = torch.autograd.grad(ops.gated_ffn(*tensors, backend="reference").sum(), tensors)
    for a, b in zip(grads, expected, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()
