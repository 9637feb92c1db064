"""Training through the Triton kernels on a GPU: real shapes, all workloads, random ones, repeatability, memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

pytest.importorskip("triton")

import twell
from test_gpu_kernels import neuron_major, unaligned
from twell import gpu, reference
from twell.ops import functional as ops
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights
from twell.workbench.bench import cases

pytestmark = pytest.mark.gpu

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
SLACK = {bf16: 1e-3, f16: 1e-4, f32: 2e-6}
SIX = (True, True, True, True, True, True, True)


def gradients(x: Tensor, dy: Tensor, dl1: Tensor | None, w: Weights, plan: Plan, **how: Any) -> Any:
    activation, mask = how.get("activation", "relu"), how.get("mask")
    tensors = plan.on(x.device)
    *out, saved = gpu.train(x, w, activation, tensors, mask, want_stats=True, save=True)
    return out, gpu.backward(dy, dl1, x, w, saved, activation, tensors, mask, SIX)


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
    turned = neuron_major(w)
    odd = Weights._make(None if t is None else unaligned(t) for t in turned)
    for other in (turned, odd):  # Wd neuron by neuron, and nothing aligned: the same bits, in Wd's own layout
        again = gradients(unaligned(inputs.x), dy, dl1, other, plan)
        assert again[1].weights.down.stride() == turned.down.stride()
        assert_same(again, ours)


def everything(result: Any) -> list[Tensor]:
    return [t for t in (*result[0], result[1].x, *result[1].weights) if t is not None]


def assert_same(a: Any, b: Any) -> None:
    assert all(torch.equal(s, t) for s, t in zip(everything(a), everything(b), strict=True))


@pytest.mark.parametrize("seed", range(24))
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
    w = neuron_major(w) if rng.random() < 0.5 else w
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
            assert_same(gradients(inputs.x, dy, dl1, w, plan), first)


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
    plan, dy = plan_of(inputs, M), torch.randn_like(tensors[0])

    def dense() -> tuple[Tensor, Tensor]:
        x, w_gate, w_up, w_down = tensors
        h = torch.relu(nnf.linear(x, w_gate)) * nnf.linear(x, w_up)
        return nnf.linear(h, w_down), h.abs().sum(dtype=f32)

    def sparse() -> tuple[Tensor, Tensor]:
        y, stats = ops.gated_ffn(*tensors, return_stats=True, plan=plan)
        return y, stats.l1_sum

    peaks = []
    for run in (dense, sparse):
        for _ in range(2):  # the first one compiles kernels
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


def test_what_is_kept_may_be_saved_on_the_cpu() -> None:
    inputs = cases.make("skew29", 512, 256, 1024, dtype=bf16, device="cuda")
    tensors = [t.clone().requires_grad_() for t in (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)]
    plan = Plan(n_neurons=1024, hot=torch.arange(128), cap=16, min_tokens=0)
    expected = torch.autograd.grad(ops.gated_ffn(*tensors, plan=plan).sum(), tensors)
    with torch.autograd.graph.save_on_cpu():
        y = ops.gated_ffn(*tensors, plan=plan)
    for a, b in zip(torch.autograd.grad(y.sum(), tensors), expected, strict=True):
        assert torch.equal(a, b)


# -- without the host ---------------------------------------------------------------------------------------


@pytest.fixture
def host_may_not_wait() -> Iterator[Callable[[], None]]:
    """From when it is called on, whoever makes the host wait for the GPU raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def tokens_of(inputs: cases.FFNInputs, n_heavy: int) -> Tensor:
    """x with so many tokens, spread over it, that wake thousands of neurons."""
    x = inputs.x.clone()
    places = torch.randperm(len(x), device=x.device)[:n_heavy]
    x[places] = 3 * inputs.w_gate[:2816].float().mean(0).to(x.dtype) + torch.randn_like(x[places])
    return x


HEAVY = (0, 1, 200, 1500)


@pytest.mark.parametrize(("n_hot", "gated"), [(0, True), (512, True), (512, False)])
def test_forward_and_backward_in_a_cuda_graph(n_hot: int, gated: bool) -> None:
    """Captured with one number of heavy tokens, replayed with others: the bits of eager calls."""
    M = 2048
    inputs = cases.make("skew29", M, dtype=bf16, device="cuda")
    weights = [w.clone().requires_grad_() for w in (inputs.w_gate, inputs.w_up, inputs.w_down)[:: 1 if gated else 2]]
    static, dy = inputs.x.clone().requires_grad_(), torch.randn_like(inputs.x)
    mask, dl1 = torch.rand(M, device="cuda") < 0.7, torch.tensor(0.3, device="cuda")
    plan = Plan(n_neurons=5632, hot=torch.arange(n_hot), cap=48, min_tokens=0)
    op: Any = ops.gated_ffn if gated else ops.ffn

    def step() -> list[Tensor]:
        y, stats = op(static, *weights, plan=plan, token_mask=mask, return_stats=True)
        leaves = [static, *weights]
        return [y, stats.l1_sum, stats.counts, *torch.autograd.grad([y, stats.l1_sum], leaves, [dy, dl1])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    n_active = []
    for n_heavy in HEAVY:
        with torch.no_grad():
            static.copy_(tokens_of(inputs, n_heavy))
            n_active.append((torch.relu(static @ inputs.w_gate.T) != 0).sum(1))
        for _ in range(2):  # the first replay leaves what the second needs
            for t in out:
                t.detach().fill_(-1)
            graph.replay()
        for a, b in zip(out, step(), strict=True):
            assert torch.equal(a, b)
    heavy = [int((n > 256).sum()) for n in n_active]
    assert heavy[-1] >= 1500 > heavy[0]


def test_the_host_waits_for_nothing(host_may_not_wait: Callable[[], None]) -> None:
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    x, plan = tokens_of(inputs, 100), Plan(n_neurons=5632, hot=torch.arange(512), cap=48, min_tokens=0, few_tokens=8)
    layer = twell.GatedSparseFFN(2048, 5632, device="cuda", dtype=bf16)
    layer.set_plan(plan)
    for _ in range(2):  # kernels are compiled in the first round
        y, stats = layer(x, return_stats=True)
        (y.float().square().mean() + 1e-3 * stats.l1_sum).backward()
        with torch.no_grad():
            layer(x), layer(x[:8])
        host_may_not_wait()


def test_a_second_backward_finds_what_the_first_found() -> None:
    """The counter by which programs wait for each other is among what is kept."""
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    tensors = [t.clone().requires_grad_() for t in (tokens_of(inputs, 300), inputs.w_gate, inputs.w_up, inputs.w_down)]
    plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=48, min_tokens=0)
    y = ops.gated_ffn(*tensors, plan=plan)
    first, *others = (torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=True) for _ in range(5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# -- compiled -----------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self, dtype: torch.dtype = bf16) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "bias": True}
        self.layers = nn.ModuleList([twell.GatedSparseFFN(256, 1024, **options), twell.SparseFFN(256, 1536, **options)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        l1_sum = x.new_zeros((), dtype=f32)
        for layer in self.layers:
            y, stats = layer(nnf.layer_norm(x, (256,)), return_stats=True)
            x, l1_sum = x + y, l1_sum + stats.l1_sum
        return x, l1_sum

    def set_plans(self, hot: int, cap: int, **others: int) -> None:
        for layer in self.layers:
            n = len(layer.neuron_counts)
            plan = Plan(n_neurons=n, hot=torch.randperm(n)[:hot], cap=cap, **({"min_tokens": 0} | others))
            layer.set_plan(plan)


def test_compiled_training_of_planned_layers() -> None:
    """One graph, forward and backward; once warm, no plan compiles anything anew.

    In float32: a compiled norm rounds to 16 bits elsewhere, and neurons that hardly fire do then, or not.
    """
    torch.manual_seed(0)
    model, x = TwoLayers(f32), torch.randn(512, 256, device="cuda")
    dy = torch.randn_like(x)

    def step(run: Any) -> list[Tensor]:
        model.zero_grad()
        own = x.clone().requires_grad_()
        y, l1_sum = run(own)
        torch.autograd.backward([y, l1_sum], [dy, torch.tensor(1e-3, device="cuda")])
        return [y, l1_sum, own.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    def check() -> None:
        for a, b in zip(step(compiled), step(model), strict=True):
            assert (a.double() - b.double()).norm() <= 1e-3 * b.double().norm()

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for hot, cap in ((128, 16), (256, 32)):
        model.set_plans(hot, cap)
        check()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for hot, cap, first in ((0, 48, 8), (512, 0, 0), (126, 100, 30), (1000, 16, 16)):
            model.set_plans(hot, cap, first=first)
            check()
        model.set_plans(64, 16, min_tokens=513)  # densely
        check()
        for layer in model.layers:
            layer.set_plan(None)
        check()


def test_compiled_inference_of_planned_layers() -> None:
    torch.manual_seed(0)
    model, x = TwoLayers().eval().requires_grad_(False), torch.randn(512, 256, device="cuda", dtype=bf16)
    for layer in model.layers:
        twell.nn.neuron_major_(layer.down_proj)

    def forward(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = x + layer(nnf.layer_norm(x, (256,)))
        return x

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True)
    batches = (x, x[:16], x[:100])
    for plan in ({"hot": 128, "cap": 16}, {"hot": 256, "cap": 32}):
        model.set_plans(**plan)
        for tokens in batches:
            compiled(tokens)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for hot, cap, few in ((0, 48, 0), (512, 16, 64), (64, 0, 16)):
            model.set_plans(hot, cap, few_tokens=few, min_tokens=101)
            for tokens in batches:
                expected = forward(tokens).double()
                assert (compiled(tokens).double() - expected).norm() <= 2e-2 * expected.norm()
