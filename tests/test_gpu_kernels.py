"""The Triton kernels on a GPU, at real shapes: within the tolerance law, for any plan, the same bits every time."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import twell
from twell import TwELL, gpu, reference
from twell.bench import cases, ffn
from twell.kernels import gate, pack
from twell.kernels.tiles import device_facts, tiles_for
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights

pytestmark = pytest.mark.gpu
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


def plan_for(inputs: cases.FFNInputs, gated: bool = True) -> Plan:
    r = torch.relu(inputs.x[:4096] @ inputs.w_gate.T)
    plan = choose_plan((r != 0).sum(0), len(r), costs_for(r.device), gated=gated)
    return dataclasses.replace(plan, min_tokens=0)


def sparse(inputs: cases.FFNInputs, plan: Plan, gated: bool = True) -> Tensor:
    encoded = plan.encode()
    if gated:
        return twell.gated_ffn(inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, backend="triton", plan=encoded)
    return twell.ffn(inputs.x, inputs.w_gate, inputs.w_down, backend="triton", plan=encoded)


def dense(inputs: cases.FFNInputs, gated: bool = True) -> Tensor:
    w = Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    return reference.forward(inputs.x, w, want_stats=False).y


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("workload", ["iid29", "skew29", "skew100", "skew300", "skew1000", "skew2800"])
def test_workloads(workload: str, gated: bool) -> None:
    inputs = cases.make(workload, 4099, dtype=bf16, device="cuda")
    ffn.check(inputs.x, inputs, gated, dense(inputs, gated), sparse(inputs, plan_for(inputs, gated), gated))


@pytest.mark.parametrize(("n_hot", "cap"), [(0, 1), (0, 32), (0, 5632), (512, 1), (512, 64), (5504, 16)])
def test_forced_plans_change_nothing(n_hot: int, cap: int) -> None:
    inputs = cases.make("skew100", 2048, dtype=bf16, device="cuda")
    plan = Plan(n_neurons=5632, hot=torch.randperm(5632)[:n_hot], cap=cap, first=cap // 2)
    ffn.check(inputs.x, inputs, True, dense(inputs), sparse(inputs, plan))


@pytest.mark.parametrize("dtype", [bf16, f16, f32])
def test_gate_bitmap_words_and_counts(dtype: torch.dtype) -> None:
    inputs = cases.make("skew100", 1027, 1024, 2816, dtype=dtype, device="cuda")
    capability, processors = device_facts(0)
    tiles = tiles_for(capability, dtype)
    r, bitmap, _ = gate.gate_and_bitmap(
        inputs.x, inputs.w_gate, None, tile=tiles.gate, programs=processors, use_tma=tiles.use_tma
    )
    expected = torch.relu(inputs.x.double() @ inputs.w_gate.double().T)
    eager = torch.relu(inputs.x @ inputs.w_gate.T)
    allowed = 2 * ffn.relative_error(eager, expected) + 1e-6
    assert ffn.relative_error(r, expected) <= allowed
    assert torch.equal(pack.neuron_counts(bitmap, 2816), (r != 0).sum(0).int())
    if dtype != f32:
        packed = TwELL.pack(r, tile=256, slots=32, compact=True, overflow="mark")
        assert torch.equal(pack.twell_words(r), packed.words)


def random_weights(
    D: int, F: int, dtype: torch.dtype, shift: float, *, gated: bool, bias: bool, device: str = "cuda"
) -> Weights:
    """With a bias fewer neurons fire, by ``shift`` standard deviations."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return Weights(
        normal(F, D) / 4,
        normal(F, D) / 4 if gated else None,
        normal(D, F) / 4,
        normal(F) - shift * D**0.5 / 4 if bias else None,
        normal(F) if bias and gated else None,
        normal(D) if bias else None,
    ).to(dtype)


@pytest.mark.parametrize("seed", range(200))
def test_random_shapes_and_sparsities(seed: int) -> None:
    rng = random.Random(seed)
    M = rng.choice([1, 7, 64, 513, 1000, 2049])
    D, F = 16 * rng.randint(1, 96), 16 * rng.randint(1, 200)
    dtype, gated, bias = rng.choice([bf16, bf16, f16, f32]), rng.random() < 0.7, rng.random() < 0.3
    torch.manual_seed(seed)
    w = random_weights(D, F, dtype, rng.uniform(-1, 3), gated=gated, bias=bias)
    x = torch.randn(M, D, device="cuda").to(dtype)
    hot = torch.randperm(F)[: min(F, 128 * rng.randint(0, 6))]
    activation = rng.choice(["relu", "relu2"])
    plan = Plan(n_neurons=F, hot=hot, cap=rng.choice([1, 16, 100, F]), first=rng.choice([0, 4, 64]), min_tokens=0)
    y = gpu.forward(x, w, activation, plan.encode())
    truth = reference.forward(x.double(), w.to(torch.float64), activation, want_stats=False).y
    eager = reference.forward(x, w, activation, want_stats=False).y
    slack = {bf16: 1e-3, f16: 1e-4, f32: 1e-6}[dtype]
    if truth.norm() > 0 and eager.isfinite().all():
        assert ffn.relative_error(y, truth) <= 2 * ffn.relative_error(eager, truth) + slack


def test_poisoned_tokens() -> None:
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    inputs.x[3, 5], inputs.x[700, 0], inputs.x[2047, 1] = float("nan"), float("inf"), float("-inf")
    expected = dense(inputs).isfinite().all(1)
    assert torch.equal(sparse(inputs, plan_for(inputs)).isfinite().all(1), expected)
    assert int((~expected).sum()) == 3


def test_same_bits_every_time() -> None:
    inputs = cases.make("skew100", 4096, dtype=bf16, device="cuda")
    plan = plan_for(inputs)
    first = sparse(inputs, plan)
    for _ in range(20):
        assert torch.equal(sparse(inputs, plan), first)


def test_cuda_graph_and_compile() -> None:
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    encoded = plan_for(inputs).encode()
    x, w_gate, w_up, w_down = inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down

    def call(x: Tensor) -> Tensor:
        return twell.gated_ffn(x, w_gate, w_up, w_down, backend="triton", plan=encoded)

    expected = call(x)
    static = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(static)
    static.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(out, call(x.flip(0)))
    static.copy_(x)
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(torch.compile(call, fullgraph=True)(x), expected)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    M, D, F = 400_000, 128, 5632  # M * F = 2.25e9
    w = Weights(*(torch.randn(s, device="cuda", dtype=bf16) / 8 for s in ((F, D), (F, D), (D, F))))
    w = w._replace(gate_bias=torch.full((F,), -4.0, device="cuda", dtype=bf16))
    x = torch.randn(M, D, device="cuda", dtype=bf16)
    y = gpu.forward(x, w, "relu", Plan(n_neurons=F, hot=torch.arange(128), cap=64).encode())
    for rows in (slice(0, 500), slice(M - 500, M)):
        truth = reference.forward(x[rows].double(), w.to(torch.float64), want_stats=False).y
        assert ffn.relative_error(y[rows], truth) < 1e-2


def test_a_layer_plans_itself_and_stays_right() -> None:
    inputs = cases.make("skew29", 8192, dtype=bf16, device="cuda")
    layer = twell.GatedSparseFFN(2048, 5632, device="cuda", dtype=bf16)
    with torch.no_grad():
        for linear, weight in zip(
            (layer.gate_proj, layer.up_proj, layer.down_proj),
            (inputs.w_gate, inputs.w_up, inputs.w_down),
            strict=True,
        ):
            linear.weight.copy_(weight)
        first = layer(inputs.x[:3000])
        assert layer.plan is None
        y = layer(inputs.x)  # plans, then runs by the plan
        assert layer.plan is not None and 0 < int(layer.plan[0]) < 5632
        ffn.check(inputs.x, inputs, True, dense(inputs), y)
        assert ffn.relative_error(layer(inputs.x[:3000]), first.double()) < 1e-2


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_wide_models(dtype: torch.dtype) -> None:
    """The shape of a 70B model, with fewer neurons: a thread must not run out of registers."""
    inputs = cases.make("skew29", 2048, 8192, 4096, dtype=dtype, device="cuda")
    ffn.check(inputs.x, inputs, True, dense(inputs), sparse(inputs, plan_for(inputs)))
