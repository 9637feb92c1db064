"""What tests on the CPU cannot see: the same formats, operations and modules on CUDA tensors."""

from __future__ import annotations

import pytest
import torch

import twell
from twell import reference
from twell.gpu.prefill import union
from twell.gpu.shared.launch import Kernel
from twell.vllm.ffn import compile_kernels, vllm_ffn_of
from twell.workbench.bench import cases, ffn

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs_on_gpu(dtype: torch.dtype, M: int = 257) -> cases.FFNInputs:
    return cases.make("skew29", M, 256, 1024, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_formats_agree_with_the_cpu(dtype: torch.dtype) -> None:
    g = torch.relu(torch.randn(70, 300) - 1.5).to(dtype)
    g[3, 5], g[4] = float("nan"), 1
    twell_cpu = twell.TwELL.pack(g, tile=64, slots=65)
    assert twell.TwELL.pack(g.cuda(), tile=64, slots=65) == twell_cpu.to("cuda")
    hybrid_cpu = twell.Hybrid.pack(g, cap=30)
    on_gpu = twell.Hybrid.pack(g.cuda(), cap=30)
    assert on_gpu.to("cpu") == hybrid_cpu
    assert on_gpu.transpose(cap=20).to("cpu") == hybrid_cpu.transpose(cap=20)
    assert on_gpu != hybrid_cpu  # another device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 16, 257])
def test_gated_ffn_is_within_the_tolerance(dtype: torch.dtype, M: int) -> None:
    inputs = inputs_on_gpu(dtype, M)
    w = reference.Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    y, stats = twell.gated_ffn(inputs.x, *w[:3], return_stats=True)
    ffn.check(inputs.x, inputs, True, reference.forward(inputs.x, w).y, y)
    assert stats.counts.device.type == "cuda"
    assert int(stats.tokens) == M


@pytest.mark.parametrize("backward_through", ["y", "l1_sum"])
def test_gradients_agree_with_plain_autograd(backward_through: str) -> None:
    inputs = inputs_on_gpu(torch.float32)
    leaves = [t.double().requires_grad_() for t in (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)]
    x, w_gate, w_up, w_down = leaves
    y, stats = twell.gated_ffn(*leaves, return_stats=True)
    h = torch.relu(x @ w_gate.T) * (x @ w_up.T)
    mine, plain = (y, h @ w_down.T) if backward_through == "y" else (stats.l1_sum, h.abs().sum())
    weight = torch.randn_like(plain)
    got = torch.autograd.grad((mine * weight).sum(), leaves)
    expected = torch.autograd.grad((plain * weight).sum(), leaves, materialize_grads=True)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_in_its_dtype(dtype: torch.dtype) -> None:
    layer = twell.GatedSparseFFN(64, 256, device="cuda", track_counts=True)
    x = torch.randn(9, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert layer.gate_proj.weight.grad is not None
    assert layer.gate_proj.weight.grad.dtype == torch.float32
    assert int(layer.tokens_seen) == 9


def test_compiles_without_a_break_and_trains() -> None:
    layer = twell.GatedSparseFFN(64, 256, device="cuda")
    x = torch.randn(33, 64, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    y, stats = compiled(x, return_stats=True)
    torch.testing.assert_close(y, layer(x))
    (y.square().mean() + stats.l1_sum).backward()
    assert layer.up_proj.weight.grad is not None


def test_inference_is_captured_in_a_cuda_graph() -> None:
    layer = twell.SparseFFN(64, 256, device="cuda").requires_grad_(False)
    x = torch.randn(8, 64, device="cuda")
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, layer(x))


def test_backends_and_devices_are_checked() -> None:
    inputs = inputs_on_gpu(torch.float32, 2)
    with pytest.raises(ValueError, match="backend 'cpu' is not available: it runs on CPU tensors"):
        twell.gated_ffn(inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, backend="cpu")
    with pytest.raises(ValueError, match="w_up is on cpu but x is on cuda:0"):
        twell.gated_ffn(inputs.x, inputs.w_gate, inputs.w_up.cpu(), inputs.w_down)


# -- as vLLM calls a layer: vllm/ffn.py ---------------------------------------------------------------------


@pytest.mark.parametrize("n_shares", [1, 2])
def test_vllms_conditions(n_shares: int) -> None:
    """Inference mode, one compilation for all batches with no guard left, CUDA graphs of 1 to 512 tokens, larger
    batches without, and new weights where graphs read the old ones. Shares of the neurons sum up to the whole layer."""
    inputs = cases.make("skew29", 8192, 2048, 5632, dtype=torch.bfloat16, device="cuda")
    x = inputs.x[:4096]
    whole = twell.GatedSparseFFN(2048, 5632, device="meta")
    fired = (torch.relu(inputs.x[4096:] @ inputs.w_gate.T) != 0).sum(0)
    shares = [vllm_ffn_of(whole, i, n_shares, x.device, x.dtype, lambda y: y) for i in range(n_shares)]
    model = torch.nn.ModuleList(shares)
    for share in shares:
        share.plan_own(fired, 4096)
        assert share.plan is not None and share.plan.few_tokens >= 32 and not share.plan.is_dense

    def load(scale: float) -> None:
        for share in shares:
            share.gate_proj.weight.data.copy_(inputs.w_gate[share.own])
            share.up_proj.weight.data.copy_(inputs.w_up[share.own] * scale)
            share.down_proj.weight.data.copy_(inputs.w_down[:, share.own])

    load(1)
    twell.freeze_(model)
    twell.refresh_(model)
    torch.compiler.reset()
    drop = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    compiled = [torch.compile(share, fullgraph=True, options=drop) for share in shares]
    expected = dense_truth(inputs, x)

    def check(y: torch.Tensor, scale: float, name: str) -> None:
        error = ffn.relative_error(y, expected[: len(y)] * scale)
        assert error < 8e-3, (name, len(y), error)  # two sums of bf16; dense has 3e-3

    with torch.inference_mode():
        first = x[:2048].clone()
        torch._dynamo.mark_dynamic(first, 0)
        check(sum(run(first) for run in compiled), 1, "first")  # with the largest batch, as vLLM
        graphs = {}
        for M in (512, 256, 128, 64, 16, 8, 2, 1):
            given = x[:M].clone()
            y = sum(run(given) for run in compiled)
            check(y, 1, "compiled")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = sum(run(given) for run in compiled)
            graphs[M] = graph, given, y
        for M in (700, 2048, 3072, 4096):
            check(sum(run(x[:M]) for run in compiled), 1, "without a graph")
        load(2)
        twell.refresh_(model)
        for graph, _, y in graphs.values():
            y.zero_()
            graph.replay()
            check(y, 2, "replayed")
        check(sum(run(x) for run in compiled), 2, "new weights")


def test_prompts_compile_nothing_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.make("skew29", 8192, 2048, 5632, dtype=torch.bfloat16, device="cuda")
    whole, x = twell.GatedSparseFFN(2048, 5632, device="meta"), inputs.x[:4096]
    share = vllm_ffn_of(whole, 0, 1, x.device, x.dtype, lambda y: y)
    share.plan_own((torch.relu(inputs.x[4096:] @ inputs.w_gate.T) != 0).sum(0), 4096)
    share.load_state_dict(
        {"gate_proj.weight": inputs.w_gate, "up_proj.weight": inputs.w_up, "down_proj.weight": inputs.w_down}
    )
    twell.freeze_(share)
    compiled, compile_ = [], Kernel.compile
    monkeypatch.setattr(Kernel, "compile", lambda kernel: compiled.append(kernel) or compile_(kernel))
    union._kernels.cache_clear()  # other tests may have compiled them
    compile_kernels([share], 4096)
    assert len(compiled) >= 3 * 5  # three kernels for each size's tiles
    compiled.clear()
    with torch.inference_mode():
        for M in (65, 129, 300, 700, 1500, 3071, 3072, 3500, 4096):
            share(x[:M])
    assert not compiled, [kernel.function.__name__ for kernel in compiled]


def dense_truth(inputs: cases.FFNInputs, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x.double() @ inputs.w_gate.double().T) * (x.double() @ inputs.w_up.double().T)
    return h @ inputs.w_down.double().T
