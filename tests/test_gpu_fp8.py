"""FP8 on a GPU that has it: dense FFNs in the rows of ``twell bench ffn``, the sparse kernels, and layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import twell
from twell import gpu, reference
from twell.formats import TwELL
from twell.gpu import dense_fp8
from twell.gpu.decode import few_fp8
from twell.gpu.prefill import split_fp8
from twell.gpu.shared import gate
from twell.gpu.shared.tiles import device_facts
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import sparse_ffns
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Fp8, Weights, to_fp8
from twell.workbench.bench import cases, decode, ffn, fp8
from twell.workbench.evaluate import compare_predictions
from twell.workbench.evaluate.fp8_plans import counting, plan_all_
from twell.workbench.evaluate.predictions import Query
from twell.workbench.generate import dense_twin

pytestmark = pytest.mark.gpu
UNPOISONED = {"empty": torch.empty, "empty_like": torch.empty_like, "new_empty": torch.Tensor.new_empty}
SHAPE: dict[str, Any] = {"workload": "skew29", "D": 256, "F": 768, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.fixture(autouse=True)
def fp8_gpu() -> None:
    if not fp8.applies(torch.device("cuda"), torch.bfloat16, 256, 768):
        pytest.skip("needs a GPU with FP8")


def test_rows() -> None:
    few, many = ffn.run([ffn.Case(**SHAPE, M=16, graph=True), ffn.Case(**SHAPE, M=4096)], seconds=0.1)
    for row, names in ((few, ["fp8", "fp8_weights"]), (many, ["fp8"])):
        ways = ["dense", "compiled", *names, "sparse", "frozen"]
        assert [name.removesuffix("_ms") for name in row if name.removesuffix("_ms") in (*ways, *fp8.NAMES)] == ways
        in_fp8 = ["sparse_fp8"] if gpu.fp8.why_not(torch.device("cuda", 0)) is None else []
        assert list(row["called_ms"]) == [*ways, *in_fp8, "sparse_compiled"]
        ms = {way: row[f"{way}_ms"]["p50"] for way in ways}
        assert row["speedup"] == pytest.approx(min(ms["dense"], ms["compiled"]) / ms["sparse"], abs=1e-3)
        ratio = min(ms[name] for name in names) / min(ms["sparse"], ms["frozen"])
        assert row["speedup_over_fp8"] == pytest.approx(ratio, abs=1e-3) and row["speedup_called_over_fp8"] > 0
        assert row["error"]["fp8"] < 0.1
    assert few["error"]["fp8_weights"] < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1, 64])
def test_compiled_values(dtype: torch.dtype, gated: bool, M: int) -> None:
    inputs = cases.make("skew100", M, 256, 768, dtype=dtype, device="cuda")
    w = Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    in_order = (w.gate, w.up, w.down) if gated else (None, w.gate, w.down)
    torch.compiler.reset()
    for name, (kind, how) in fp8.ways(M).items():
        with torch.no_grad():
            y = torch.compile(kind(*in_order), fullgraph=True, dynamic=False, **how)(inputs.x)
        assert ffn.relative_error(y, fp8.meant(name, inputs.x, w)) < (0.1 if name == "fp8" else 0.01)


# -- the sparse kernels ------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if gpu.fp8.why_not(torch.device("cuda", 0)) is not None:
        pytest.skip("needs a Hopper GPU")


def in_fp8(inputs: cases.FFNInputs, gated: bool = True) -> tuple[Fp8, Fp8 | None, Fp8]:
    return to_fp8(inputs.w_gate), to_fp8(inputs.w_up) if gated else None, to_fp8(inputs.w_down)


def plan_for(inputs: cases.FFNInputs) -> Plan:
    fired = (torch.relu(inputs.x[:4096] @ inputs.w_gate.T) != 0).sum(0)
    return choose_plan(fired, min(4096, len(inputs.x)), costs_for(fired.device, fp8=True))


def assert_right(y: Tensor, x: Tensor, w: tuple[Fp8, Fp8 | None, Fp8], activation: str = "relu") -> None:
    """No further from the meaning than a dense FP8 FFN, which rounds h as well."""
    truth = reference.fp8_forward(x, *w, activation)
    dense = gpu.fp8.dense(x, gpu.fp8.keep(*w, None).w, activation)
    assert ffn.relative_error(y, truth) <= ffn.relative_error(dense, truth) < 0.05


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize(("workload", "gated"), [("skew29", True), ("skew300", True), ("iid29", False)])
@pytest.mark.usefixtures("hopper")
def test_all_ways_give_the_meaning(workload: str, gated: bool, activation: str) -> None:
    inputs = cases.make(workload, 4099, 1024, 5632, dtype=torch.bfloat16, device="cuda")
    x, w = inputs.x, in_fp8(inputs, gated)
    x[7] *= 30  # a heavy token
    for n_hot, cap in ((0, 64), (512, 64), (512, 2)):
        plan = Plan(n_neurons=5632, hot=torch.randperm(5632)[:n_hot], cap=cap, first=32, min_tokens=0)
        tensors = plan.on(x.device)
        kept = gpu.fp8.keep(*w, tensors)
        y = gpu.fp8.forward(x, kept.w, activation, tensors, 0, 0, kept.layout)
        assert_right(y, x, w, activation)
        assert torch.equal(y, gpu.fp8.forward(x, kept.w, activation, tensors, 0, 0, kept.layout))


@pytest.mark.parametrize(
    ("D", "F", "activation"),
    [(2048, 5632, "relu"), (2048, 5632, "relu2"), (4096, 8192, "relu"), (1040, 5104, "relu"), (512, 1536, "relu")],
)
@pytest.mark.usefixtures("hopper")
def test_small_dense_batches(D: int, F: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels for them, of every tile, and by cuBLAS: as far from the meaning, and the same bits every time."""
    inputs = cases.make("skew300", 512, D, F, dtype=torch.bfloat16, device="cuda")
    found: set[Any] = set()
    x, w = inputs.x, in_fp8(inputs)
    kept = gpu.fp8.keep(*w, None).w
    ys: dict[int, Tensor] = {}
    numbers = (1, 7, 63, 64, 65, 80, 100, 128, 129, 192, 200, 256, 257, 384, 385, 512)
    for M in numbers:
        ys[M] = gpu.fp8.dense(x[:M], kept, activation)
        assert torch.equal(ys[M], gpu.fp8.dense(x[:M], kept, activation))
        tiles = dense_fp8.tiles_for(M, D, F, x.device)
        found |= set() if tiles is None else {tiles.gate_up, tiles.down}
    assert found == {tile for _, tile in (*dense_fp8._GATE_UP, *dense_fp8._DOWN)} or F != 5632
    monkeypatch.setattr(dense_fp8, "tiles_for", lambda *_: None)
    for M in numbers:
        truth = reference.fp8_forward(x[:M], *w, activation)
        by_cublas = gpu.fp8.dense(x[:M], kept, activation)
        assert ffn.relative_error(ys[M], truth) <= (1.2 if M > 60 else 1.5) * ffn.relative_error(by_cublas, truth) < 0.1
        assert M < 60 or ffn.relative_error(ys[M], by_cublas.double()) < 0.04  # some values of h are rounded otherwise


@pytest.mark.usefixtures("hopper")
def test_small_dense_batches_of_inf_nan_and_in_graphs() -> None:
    inputs = cases.make("skew100", 40, 2048, 5632, dtype=torch.bfloat16, device="cuda")
    x, kept = inputs.x, gpu.fp8.keep(*in_fp8(inputs), None).w
    x[3, 5], x[4, 5], x[5] = torch.nan, torch.inf, 0
    assert dense_fp8.tiles_for(40, 2048, 5632, x.device) is not None
    y = gpu.fp8.dense(x, kept, "relu")
    assert y.isfinite().all(1).nonzero()[:, 0].tolist() == [i for i in range(40) if i not in (3, 4)]
    assert not y[5].any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [gpu.fp8.dense(x, kept, "relu") for _ in range(3)]
    for _ in range(20):
        graph.replay()
    assert all(torch.equal(t[5:], y[5:]) for t in captured)


@pytest.mark.parametrize(
    ("D", "F", "gated", "activation"),
    [
        (2048, 5632, True, "relu"),
        (2048, 5632, True, "relu2"),
        (1040, 5104, True, "relu"),
        (4096, 14336, True, "relu"),
        (512, 1536, False, "relu2"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_few_tokens(D: int, F: int, gated: bool, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every kernel: one layer after the other, each with weights of its own, while the one before it ends."""
    inputs = cases.make("skew29" if F > 2000 else "skew100", 64, D, F, dtype=torch.bfloat16, device="cuda")
    x, w = inputs.x, in_fp8(inputs, gated)
    x[1] *= 1000
    x[2] /= 1000
    of = gpu.fp8.Fp8Weights.of(*w, by_neurons=True)
    rows = [gpu.fp8.Fp8Weights._make(None if t is None else t.clone() for t in of) for _ in range(3)]
    for M in (1, 2, 3, 8, 9, 17, 32, 33):
        ys = [few_fp8.forward(x[:M], v, activation, settled=settled) for settled in (False, True) for v in rows]
        assert_right(ys[0], x[:M], w, activation)
        assert all(torch.equal(y, ys[0]) for y in ys)
        graph = torch.cuda.CUDAGraph()
        with monkeypatch.context() as m, torch.cuda.graph(graph):
            for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
                m.setattr(owner, name, UNPOISONED[name])  # fills between kernels would keep them apart
            of_y = few_fp8.forward(few_fp8.forward(x[:M], rows[1], activation, settled=True), rows[2], activation)
            ys = [few_fp8.forward(x[:M], v, activation, settled=True) for v in rows]
        for _ in range(10):
            graph.replay()
        assert torch.equal(of_y, few_fp8.forward(ys[0], rows[0], activation)) and of_y.isfinite().all()
        assert_right(ys[2], x[:M], w, activation)
        assert torch.equal(ys[0], ys[2])


@pytest.mark.usefixtures("hopper")
def test_few_tokens_of_inf_nan_zeros_and_all_neurons() -> None:
    inputs = cases.make("skew100", 64, 2048, 5632, dtype=torch.bfloat16, device="cuda")
    x, w = inputs.x, in_fp8(inputs)
    rows = gpu.fp8.Fp8Weights.of(*w, by_neurons=True)
    for M in (8, 16, 32, 64):
        y = few_fp8.forward(x[:M] * 0, rows, "relu")
        assert not y.any()
        bad = x[:M].clone()
        bad[1, 5], bad[2, 5], bad[3] = torch.nan, torch.inf, 0
        y = few_fp8.forward(bad, rows, "relu", settled=True)
        assert y.isfinite().all(1).nonzero()[:, 0].tolist() == [i for i in range(M) if i not in (1, 2)]
        assert_right(y[4:], bad[4:], w)
    assert not few_fp8.forward(x[:1] * 0, rows, "relu", settled=True).any()
    for value in (torch.nan, torch.inf):
        bad = x[:1].clone()
        bad[0, 5] = value
        assert few_fp8.forward(bad, rows, "relu", settled=True).isnan().all()
    always = (to_fp8(inputs.w_gate.abs()), *w[1:])
    rows = gpu.fp8.Fp8Weights.of(*always, by_neurons=True)
    for M in (1, 8, 16, 32, 64):
        assert_right(few_fp8.forward(x[:M].abs(), rows, "relu", settled=True), x[:M].abs(), always)


@pytest.mark.usefixtures("hopper")
def test_inf_nan_zeros_and_empty_batches() -> None:
    inputs = cases.make("skew100", 300, 512, 1536, dtype=torch.bfloat16, device="cuda")
    x, w = inputs.x, in_fp8(inputs)
    x[3, 5], x[4, 5], x[5] = torch.nan, torch.inf, 0
    plan = Plan(n_neurons=1536, hot=torch.arange(256), cap=32, first=16, min_tokens=0)
    tensors = plan.on(x.device)
    kept = gpu.fp8.keep(*w, tensors)
    for least in (0, 1000):
        y = gpu.fp8.forward(x, kept.w, "relu", tensors, 0, least, kept.layout)
        assert y.isfinite().all(1).nonzero()[:, 0].tolist() == [i for i in range(len(x)) if i not in (3, 4)]
    assert gpu.fp8.forward(x[:0], kept.w, "relu", tensors, 0, 0, kept.layout).shape == (0, 512)


@pytest.mark.usefixtures("hopper")
def test_neurons_fire_but_for_the_rounding_of_sums() -> None:
    """Hopper adds e4m3 products with 13 bits: a neuron whose sum nearly cancels may fire or not."""
    inputs = cases.make("skew29", 2048, 2048, 5632, dtype=torch.bfloat16, device="cuda")
    x, w = to_fp8(inputs.x), to_fp8(inputs.w_gate)
    tiles, (_, processors) = split_fp8.tiles_for(90), device_facts(0)
    assert tiles is not None
    facts: dict[str, Any] = {"tile": tiles.gate, "programs": processors, "use_tma": True}
    got = gate.gate_in_twell(x.q, w.q, None, scales=(x.scale, w.scale), dtype=torch.bfloat16, **facts)
    assert got.words is not None
    r = TwELL.from_words(got.words, got.counts, shape=got.shape, dtype=got.dtype).unpack(skip_overflowed=True)
    z = x.to(torch.float64) @ w.to(torch.float64).T
    differ = (r != 0) != (z > 0)
    terms = x.to(torch.float64).abs() @ w.to(torch.float64).abs().T  # of each sum, without signs
    assert not (differ & (z.abs() > 2**-8 * terms) & ~got.overflowed[:, None]).any()
    assert differ.float().mean() < 1e-3


@pytest.mark.usefixtures("hopper")
def test_a_quantised_layer_plans_itself_and_is_captured() -> None:
    inputs = cases.make("skew29", 8192, 1024, 5632, dtype=torch.bfloat16, device="cuda")
    layer = twell.GatedSparseFFN(1024, 5632, device="cuda", dtype=torch.bfloat16).eval()
    weights = (inputs.w_gate, inputs.w_up, inputs.w_down)
    with torch.no_grad():
        for name, weight in zip(layer.projections, weights, strict=True):
            getattr(layer, name).weight.copy_(weight)
        twell.quantize_(layer)
        x, w = inputs.x, in_fp8(inputs)
        for M in (8192, 8192, 100, 33, 1, 1):
            assert_right(layer(x[:M]), x[:M], w)
        assert layer.plan is not None and not layer.plan.is_dense and layer.plan.few_tokens >= 8
        assert 0 < layer.frozen_bytes() < sum(2 * weight.numel() for weight in weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, layer(x))
        few = torch.cuda.CUDAGraph()
        with torch.cuda.graph(few):
            y_few = layer(x[:3])
        layer.down_proj.weight_scale.mul_(2)  # seen, and what is kept written over, where the graph reads it
        doubled = (*w[:2], Fp8(w[2].q, w[2].scale * 2))
        assert_right(layer(x), x, doubled)
        graph.replay()
        assert_right(y, x, doubled)
        few.replay()
        assert_right(y_few, x[:3], doubled)
        layer.down_proj.weight_scale.data.div_(2)
        assert twell.refresh_(layer) == 1
        graph.replay()
        assert torch.equal(y, layer(x))
        assert_right(y, x, w)
        compiled = torch.compile(layer, fullgraph=True)
        assert ffn.relative_error(compiled(x[:512]), layer(x[:512]).double()) < 0.05
        for M in (1, 3, 8192):  # the layer itself, with what it knows of its weights
            assert torch.equal(compiled(x[:M]), layer(x[:M]))
        layer.down_proj.weight_scale.mul_(2)
        assert_right(compiled(x[:3]), x[:3], doubled)


# -- whole models ------------------------------------------------------------------------------------------


LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_of_a_model(compiled: bool) -> None:
    shape = {**LLAMA, "num_hidden_layers": 4 if compiled else 16, "hidden_act": "relu"}
    model = LlamaForCausalLM(LlamaConfig(**shape)).to("cuda", torch.bfloat16).eval()
    row = decode.measure(model, "skew29", 1, 8, graph=True, compiled=compiled, seconds=0.1)
    ways = ["dense", "sparse", "fp8", "fp8_weights", "sparse_fp8"]
    assert list(row["tokens_per_second"]) == ways and list(row["error"]) == ways[2:]
    dense = min(row["fp8_ms"]["p50"], row["fp8_weights_ms"]["p50"])
    assert row["speedup_fp8"] == pytest.approx(dense / row["sparse_fp8_ms"]["p50"], abs=1e-3)
    assert row["difference_fp8"] < 0.1


@pytest.mark.usefixtures("hopper")
def test_a_model_that_runs_by_its_kernels_always_agrees_with_its_dense_twin() -> None:
    torch.manual_seed(0)
    model = LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**LLAMA)).to("cuda", torch.bfloat16).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate_proj.weight, mean=-0.02, std=0.02)
    twell.quantize_(model)
    twin = dense_twin(model)
    rows = [Query(torch.randint(512, (n + 1,)).tolist(), n) for n in (64, 64, 7)]
    with torch.no_grad(), counting(model, twin) as fired:
        twin(torch.tensor([rows[0].ids[:-1]], device="cuda"))
    for of in fired:  # as if hardly any fired: plans are sparse, and tokens heavy
        of.tokens *= 256
    plan_all_(model, fired)
    found = compare_predictions(twin, model, rows, batch_size=2)
    ran = [each.is_laid_out() for _, each in sparse_ffns(model)]
    assert all(ran)
    assert 0 < found.logits_difference < 0.2 * found.largest_logit
