"""The kernels for few tokens on a GPU: within the tolerance law, the same bits every time, captured in a graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import twell
from test_gpu_kernels import assert_within_the_law, captured, neuron_major, random_weights
from twell import gpu, reference
from twell.gpu.decode import few as decode
from twell.gpu.decode import few_tiles, screen
from twell.gpu.shared.layout import by_rows
from twell.plan import choose_plan, costs_for, dense_plan
from twell.reference import Weights
from twell.workbench.bench import cases, ffn

pytestmark = pytest.mark.gpu
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = torch.device("cuda", 0)


def weights_of(inputs: cases.FFNInputs, gated: bool = True) -> Weights:
    return neuron_major(Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1, 2, 5, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("workload", ["iid29", "skew29", "skew1000", "skew2800"])
def test_workloads(workload: str, M: int, gated: bool) -> None:
    inputs = cases.make(workload, M, dtype=bf16, device="cuda")
    w, plan = weights_of(inputs, gated), dense_plan(5632, 64)
    dense = reference.forward(inputs.x, w, want_stats=False).y
    y = gpu.forward(inputs.x, w, "relu", plan.on(DEVICE))
    ffn.check(inputs.x, inputs, gated, dense, y)
    frozen = gpu.forward(inputs.x, w, "relu", plan.on(DEVICE), gpu.freeze(w, plan))
    assert torch.equal(frozen, y)  # with the gate read early


@pytest.mark.parametrize("seed", range(120))
def test_random_shapes_and_sparsities(seed: int) -> None:
    rng = random.Random(seed)
    M, D, F = rng.randint(1, 64), 16 * rng.randint(1, 300), 16 * rng.randint(1, 600)
    if seed % 2:  # as hopper.py takes it
        M, D, F = rng.randint(2, 16), 16 * rng.randint(1, 128), 16 * rng.randint(1, 356)
    dtype, gated, bias = rng.choice([bf16, bf16, f16, f32]), rng.random() < 0.7, rng.random() < 0.5
    torch.manual_seed(seed)
    w = random_weights(D, F, dtype, rng.uniform(-1, 3), gated=gated, bias=bias)
    wide = D * 2 if rng.random() < 0.3 else D + rng.choice([0, 0, 8])  # rows that lie apart
    x = torch.randn(M, wide, device="cuda").to(dtype)[:, :D]
    activation = rng.choice(["relu", "relu2"])
    plan = dense_plan(F, 64)
    kept = gpu.freeze(w, plan)  # with a neuron-major copy of Wd
    y = gpu.forward(x, w, activation, plan.on(DEVICE), kept)
    assert_within_the_law(y, x, w, activation)
    for again in (gpu.forward(x, w, activation, plan.on(DEVICE), kept),
                  gpu.forward(x, neuron_major(w), activation, plan.on(DEVICE))):  # fmt: skip
        assert torch.equal(again.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("seed", range(40))
def test_one_token_by_the_int8_copy(seed: int) -> None:
    """Also where it does not help: from no neuron that may fire to all of them."""
    rng = random.Random(seed)
    D, F, dtype = 16 * rng.randint(1, 300), 16 * rng.randint(1, 600), rng.choice([bf16, f16])
    torch.manual_seed(seed)
    w = random_weights(D, F, dtype, rng.uniform(-1, 3), gated=rng.random() < 0.7, bias=rng.random() < 0.5)
    x = torch.randn(1, D, device="cuda").to(dtype)
    activation = rng.choice(["relu", "relu2"])
    copy, rows, tiles = screen.screen_of(w.gate), by_rows(w), few_tiles.tiles_of(x, F)
    assert copy is not None
    y = decode.forward(x, rows, activation, tiles, copy)
    whole = decode.forward(x, rows, activation, tiles)
    truth = reference.forward(x.double(), w.to(torch.float64), activation, want_stats=False).y
    slack = {bf16: 1e-3, f16: 1e-4}[dtype]
    if truth.norm() > 0 and whole.isfinite().all():  # fp16 may not hold it
        assert ffn.relative_error(y, truth) <= 2 * ffn.relative_error(whole, truth) + slack
        assert torch.equal(decode.forward(x, rows, activation, tiles, copy), y)
    x[0, D // 2] = float("nan")
    assert decode.forward(x, rows, activation, tiles, copy).isnan().all()


def test_one_token_is_screened_where_that_helps() -> None:
    for workload, helps in (("skew29", True), ("skew2800", False)):
        inputs = cases.make(workload, 4096, dtype=bf16, device="cuda")
        fired = (torch.relu(inputs.x @ inputs.w_gate.T) != 0).sum(0)
        plan = choose_plan(fired, 4096, costs_for(fired.device))
        assert (gpu.freeze(weights_of(inputs), plan).q.numel() > 0) == helps


@pytest.mark.parametrize("M", [1, 8, 64])
def test_poisoned_tokens(M: int) -> None:
    inputs = cases.make("skew29", M, dtype=bf16, device="cuda")
    w, plan = weights_of(inputs), dense_plan(5632, 64, mean_active=29.0)
    for value in (float("nan"), float("inf"), float("-inf")):
        x = inputs.x.clone()
        x[M // 2, 5] = value
        expected = reference.forward(x, w, want_stats=False).y.isfinite()
        for kept in ((), gpu.freeze(w, plan)):
            assert torch.equal(gpu.forward(x, w, "relu", plan.on(DEVICE), kept).isfinite(), expected)


@pytest.mark.parametrize("M", [1, 8, 32, 64])
@pytest.mark.parametrize("frozen", [False, True])
def test_same_bits_every_time_also_in_a_graph(M: int, frozen: bool) -> None:
    inputs = cases.make("skew100", M, dtype=bf16, device="cuda")
    w, plan, x = weights_of(inputs), dense_plan(5632, 64, mean_active=29.0), inputs.x.clone()
    kept = gpu.freeze(w, plan) if frozen else ()

    def call() -> Tensor:
        return gpu.forward(x, w, "relu", plan.on(DEVICE), kept)

    first = call()
    for _ in range(50):
        assert torch.equal(call(), first)
    graph, out = captured(call)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, first)
    x.copy_(inputs.x.flip(0).roll(1, 1))  # other neurons fire: the graph has no count in it
    graph.replay()
    assert torch.equal(out, call())
    x.fill_(float("nan"))
    graph.replay()
    assert out.isnan().all()
    x.copy_(inputs.x)
    graph.replay()
    assert torch.equal(out, first)


def test_a_gate_that_was_just_written_is_not_read_early() -> None:
    """The kernel before writes it, and nothing lies between: results are of the new gate, every time."""
    inputs = cases.make("skew29", 8, dtype=bf16, device="cuda")
    w, plan = weights_of(inputs), dense_plan(5632, 64).on(DEVICE)
    gates = [inputs.w_gate.clone(), inputs.w_gate.flip(0).contiguous()]
    expected = [gpu.forward(inputs.x, w._replace(gate=gate), "relu", plan) for gate in gates]
    assert not torch.equal(*expected)
    for i in range(100):
        w.gate.copy_(gates[i % 2])
        assert torch.equal(gpu.forward(inputs.x, w, "relu", plan), expected[i % 2])


@pytest.mark.parametrize("M", [1, 8])
def test_graphs_follow_an_optimiser(M: int) -> None:
    """A replay asks for nothing, and reads the weights as they are."""
    inputs = cases.make("skew29", M, dtype=bf16, device="cuda")
    w = Weights._make(None if t is None else torch.nn.Parameter(t) for t in weights_of(inputs))
    plan = dense_plan(5632, 64).on(DEVICE)
    with torch.no_grad():
        graph, out = captured(lambda: gpu.forward(inputs.x, w, "relu", plan))
    parameters = [t for t in w if t is not None]
    for p in parameters:
        p.grad = torch.randn_like(p)
    torch.optim.AdamW(parameters, lr=1e-3, fused=True).step()
    graph.replay()
    torch.cuda.synchronize()
    assert_within_the_law(out, inputs.x, Weights._make(None if t is None else t.detach() for t in w))


def test_plans_choose_them() -> None:
    inputs = cases.make("skew29", 4096, dtype=bf16, device="cuda")
    fired = (torch.relu(inputs.x @ inputs.w_gate.T) != 0).sum(0)
    assert choose_plan(fired, 4096, costs_for(fired.device)).few_tokens == 64


def test_generation_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of the sparse model by the kernels are those of the dense one, with and without a static cache."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=8,
        hidden_act="relu",
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config).float().cuda().eval()
    with torch.no_grad():
        for layer in model.model.layers:  # few fire
            inputs = cases.make("skew29", 64, 512, 4096, dtype=f32, device="cuda")
            layer.mlp.gate_proj.weight.copy_(inputs.w_gate)
    ids = torch.randint(500, (2, 80), device="cuda")
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **arguments)
    twell.sparsify_(model)
    seen: list[int] = []
    forward = decode.forward

    def watched(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append(len(x))
        return forward(x, *rest, **options)

    monkeypatch.setattr(decode, "forward", watched)
    for layer in model.model.layers:
        layer.mlp.set_plan(dense_plan(4096, 64))
    assert torch.equal(model.generate(ids, **arguments), expected)
    assert seen and set(seen) == {2}
    seen.clear()
    assert torch.equal(model.generate(ids, cache_implementation="static", **arguments), expected)
    assert seen and set(seen) == {2}


def test_graphs_of_layers_and_of_whole_steps_are_timed() -> None:
    transformers: Any = pytest.importorskip("transformers")
    from twell.workbench.bench import decode as steps

    (row,) = ffn.run(
        [ffn.Case(workload="skew29", M=8, D=512, F=1408, dtype=bf16, device="cuda", graph=True)], seconds=0
    )
    assert row["graph"] and row["graph_layers"] == ffn.GRAPH_LAYERS and 0.001 < row["sparse_ms"]["p50"] < 0.1
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="relu",
    )
    for compiled in (False, True):
        model = transformers.LlamaForCausalLM(config).to("cuda", bf16).eval()
        row = steps.measure(model, "skew29", 2, 8, graph=True, compiled=compiled, seconds=0)
        assert row["graph"] and row["compiled"] == compiled and row["difference"] < 0.05
