"""FP8 layers: their values, what PyTorch does to modules, and quantize_ and dequantize_ on sparse FFNs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronConfig, OPTConfig, PreTrainedModel

import twell
from twell import reference
from twell.fp8 import E4M3, Fp8Linear
from twell.fp8 import linear as fp8
from twell.nn import FP8_WEIGHTS, GatedSparseFFN, SparseFFN, SparseFFNBase, sparse_ffns
from twell.ops import registered
from twell.plan import Plan, as_size
from twell.reference import to_fp8
from twell.workbench import trace

D, F = 32, 80
f64 = torch.float64
BF16_STEP = 2.0**-8  # half of a step of bfloat16, relative
SHAPE = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
Model = Callable[[], PreTrainedModel]


@pytest.fixture(autouse=True)
def for_inference() -> Any:
    with torch.no_grad():
        yield


def linear(n_in: int = D, n_out: int = F, bias: bool = False, **options: Any) -> Fp8Linear:
    return Fp8Linear.from_linear(nn.Linear(n_in, n_out, bias=bias, **options), emulate=True)


def meaning(layer: Fp8Linear, x: Tensor) -> Tensor:
    """y in float64: the rounded x times the matrix that the weight stands for."""
    rows = to_fp8(x.reshape(-1, x.shape[-1])).to(f64) @ layer.fp8().to(f64).T
    rows = rows if layer.bias is None else rows + layer.bias.double()
    return rows.view(*x.shape[:-1], layer.out_features)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def llama() -> PreTrainedModel:
    config = LlamaConfig(**SHAPE, intermediate_size=F, hidden_act="relu")
    return AutoModelForCausalLM.from_config(config).eval()


def nemotron() -> PreTrainedModel:
    config = NemotronConfig(**SHAPE, intermediate_size=F, num_key_value_heads=2, mlp_bias=True)
    return AutoModelForCausalLM.from_config(config).eval()


def opt() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(OPTConfig(**SHAPE, ffn_dim=F, word_embed_proj_dim=D)).eval()


def sparse(make: Model) -> PreTrainedModel:
    model = make()
    assert twell.sparsify_(model).n_sparse == 2
    return model


def logits(model: PreTrainedModel) -> Tensor:
    return model(torch.arange(12).view(2, 6)).logits


# -- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (7,), (0,), (2, 3), (2, 0), ()])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_by_the_values_of_its_weight(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = linear(bias=bias), torch.randn(*shape, D)
    y = layer(x)
    assert y.shape == (*shape, F) and y.dtype == x.dtype
    torch.testing.assert_close(y.double(), meaning(layer, x), rtol=1e-6, atol=1e-6)  # fp32 sums of 32 products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_y_has_the_dtype_of_x(dtype: torch.dtype) -> None:
    layer, x = linear(bias=True), torch.randn(5, D, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), meaning(layer, x), rtol=BF16_STEP, atol=1e-6)


def test_x_need_not_be_contiguous() -> None:
    layer, x = linear(), torch.randn(D, 6).t()
    assert layer(x).equal(layer(x.contiguous()))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_non_finite_token_gives_nan_and_changes_no_other(bad: float) -> None:
    layer, x = linear(), torch.randn(3, D)
    expected = layer(x)
    x[1, 4] = bad
    y = layer(x)
    assert y[1].isnan().all() and y[0].equal(expected[0]) and y[2].equal(expected[2])


def test_autocast_runs_in_its_dtype() -> None:
    layer, x = linear(), torch.randn(3, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.equal(layer(x.bfloat16()))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_the_error_of_an_ffn_is_the_rounding_of_h(gated: bool, activation: str) -> None:
    layer = (GatedSparseFFN if gated else SparseFFN)(D, F, activation=activation)
    twell.quantize_(layer, emulate=True)
    x, w = torch.randn(50, D), [getattr(layer, name).fp8() for name in layer.projections]
    expected = reference.fp8_forward(x, w[0], w[1] if gated else None, w[-1], activation)
    # fp8_forward does not round h, and down_proj rounds it to 4 bits: 2^-4 at most, about 2^-5 in the mean square.
    assert float((layer(x) - expected).norm() / expected.norm()) < 2**-4


def test_sizes_are_multiples_of_16() -> None:
    for n_in, n_out in ((24, 32), (32, 40)):
        with pytest.raises(ValueError, match=f"multiples of 16, got {n_in} and {n_out}"):
            Fp8Linear(n_in, n_out)


def test_unsupported_inputs_are_refused() -> None:
    layer = linear()
    with pytest.raises(ValueError, match="x must have 32 features, got 16"):
        layer(torch.randn(3, 16))
    with pytest.raises(ValueError, match=r"x must be bfloat16, float16 or float32, got torch\.int64"):
        layer(torch.ones(3, D, dtype=torch.int64))
    with pytest.raises(ValueError, match="x is on meta, the weight on cpu"):
        layer(torch.ones(3, D, device="meta"))


def test_gradients_are_refused() -> None:
    layer = linear(bias=True)
    with torch.enable_grad():
        with pytest.raises(RuntimeError, match=r"FP8 layers are for inference.*no_grad.*dequantize_"):
            layer(torch.randn(3, D, requires_grad=True))
        assert not layer(torch.randn(3, D)).requires_grad


def test_a_cpu_is_refused_with_the_requirement() -> None:
    layer = Fp8Linear.from_linear(nn.Linear(D, F))
    with pytest.raises(
        RuntimeError, match=r"compute capability 8\.9 or newer, and this is cpu; .*dequantize_\(model\)"
    ):
        layer(torch.randn(3, D))
    assert "emulate" not in repr(layer) and "emulate=True" in repr(linear())


@pytest.mark.parametrize(("capability", "can"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_are_asked_for_their_capability(monkeypatch: Any, capability: tuple[int, int], can: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fp8.why_unavailable(torch.device("cuda"))
    assert (reason is None) == can
    assert can or str(reason).endswith(f"this one has {capability[0]}.{capability[1]}")


# -- what PyTorch does to modules ---------------------------------------------------------------------------

MOVES: list[Callable[[nn.Module], nn.Module]] = [
    lambda m: m.half(),
    lambda m: m.to(torch.float16),
    lambda m: m.type(torch.float16),
    lambda m: m.bfloat16().half(),
    lambda m: m.to("cpu", torch.float16),
]


@pytest.mark.parametrize("move", MOVES)
def test_a_new_dtype_applies_to_the_bias_only(move: Callable[[nn.Module], nn.Module]) -> None:
    layer = linear(bias=True)
    model = nn.Sequential(copy.deepcopy(layer), nn.Linear(F, 2))
    moved: Any = move(model)
    assert moved[1].weight.dtype == moved[0].bias.dtype == torch.float16
    assert moved[0].weight.dtype == E4M3 and bits(moved[0].weight).equal(bits(layer.weight))
    assert moved[0].weight_scale.dtype == torch.float32 and moved[0].weight_scale.equal(layer.weight_scale)


def test_layers_move_between_devices() -> None:
    layer = linear().to("meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"} and layer.weight.dtype == E4M3
    empty = layer.to_empty(device="cpu")
    assert empty.weight.dtype == E4M3 and empty.weight_scale.dtype == torch.float32 and empty.weight.shape == (F, D)
    assert not any(p.requires_grad for p in empty.parameters())


def test_copies_and_state_dicts_are_the_same_bit_for_bit() -> None:
    layer, x = linear(bias=True), torch.randn(4, D)
    fresh = Fp8Linear(D, F, bias=True, emulate=True)
    assert fresh(x).equal(torch.zeros(4, F))
    state = layer.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "weight": (F, D),
        "weight_scale": (F, 1),
        "bias": (F,),
    }
    fresh.load_state_dict(state)
    assert fresh(x).equal(layer(x)) and copy.deepcopy(layer)(x).equal(layer(x))


def test_weights_without_scales_are_not_loaded() -> None:
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"weight is torch\.float32, expected torch\.float8_e4m3fn"):
            linear().load_state_dict(nn.Linear(D, F, bias=False).state_dict(), strict=strict)


def test_compiles_without_a_break() -> None:
    layer = GatedSparseFFN(D, F, bias=True)
    twell.quantize_(layer, emulate=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, D)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.slow
def test_inductor_compiles_it() -> None:
    layer, x = linear(), torch.randn(5, D)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


# -- quantize_ and dequantize_ --------------------------------------------------------------------------------


def layer_that_kernels_would_run() -> GatedSparseFFN:
    """A layer as on a GPU with kernels; here its projections are called."""
    layer = GatedSparseFFN(D, F, dtype=torch.bfloat16).eval()
    twell.quantize_(layer, emulate=True)
    plan = Plan(n_neurons=F, hot=torch.arange(16), cap=16, first=8, min_tokens=512, few_tokens=8)
    layer.set_plan(plan)
    layer._plan_eager = plan.on(torch.device("cpu"))
    layer._number = as_size(registered.number_of(layer), torch.device("cpu"))
    layer._kernels_on = 0
    return layer


def test_compiled_models_call_layers_that_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer itself runs few and many tokens; other batches are compiled from its projections."""
    monkeypatch.setattr(
        GatedSparseFFN, "in_fp8", lambda self, x, _: seen.append(len(x)) or self._call_projections(x, None, False)
    )
    seen: list[int] = []
    layers = [layer_that_kernels_would_run() for _ in range(10)]
    x = torch.randn(600, D).bfloat16()
    torch.compiler.reset()
    for layer in layers:  # which share what is compiled
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for M in (100, 1, 3, 600):
            assert torch.allclose(compiled(x[:M]), layer._call_projections(x[:M], None, False), atol=0.05)
    assert seen == [1, 3, 600] * len(layers)
    with torch.autocast("cpu", torch.float16):
        assert compiled(x[:3]).dtype == layer._call_projections(x[:3], None, False).dtype and len(seen) == 30


def test_compiled_code_sees_writes_before_it_calls_a_layer() -> None:
    layer, x = layer_that_kernels_would_run(), torch.randn(3, D).bfloat16()

    def doubled(x: Tensor) -> Any:
        layer.down_proj.weight_scale.mul_(2)
        return layer(x)

    before = layer._call_projections(x, None, False)
    torch.compiler.reset()
    y = torch.compile(doubled, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, 2 * before)
    args = x, layer._fp8_tensors(), layer._number
    torch.library.opcheck(torch.ops.twell.fp8_layer.default, args, test_utils="test_faketensor")
    exported = torch.export.export(layer, (x,), strict=False)  # may run elsewhere: calls no layer of this process
    assert torch.ops.twell.fp8_layer.default not in [node.target for node in exported.graph.nodes]
    with pytest.raises(RuntimeError, match="not in this process"):
        torch.ops.twell.fp8_layer.default(*args[:2], as_size(5, x.device))


@pytest.mark.parametrize("make", [llama, nemotron, opt])
def test_quantize_rounds_every_projection_and_dequantize_gives_the_values_back(make: Model) -> None:
    model = sparse(make)
    before = {name: [getattr(ffn, p) for p in ffn.projections] for name, ffn in sparse_ffns(model)}
    report = twell.quantize_(model, "fp8", emulate=True)
    assert report.layers == tuple(before) and report.left_alone == () and report.bytes_after < report.bytes_before / 2
    assert str(report) == repr(report)
    for name, ffn in sparse_ffns(model):
        for projection, was in zip(ffn.projections, before[name], strict=True):
            layer = getattr(ffn, projection)
            q, scale = to_fp8(was.weight)
            assert bits(layer.weight).equal(bits(q)) and layer.weight_scale.equal(scale[:, None])
            assert layer.weight.is_contiguous() and layer.bias is was.bias
        assert ffn.why_called() == FP8_WEIGHTS and FP8_WEIGHTS in repr(model)
    in_fp8 = logits(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Fp8Linear)]
    assert twell.dequantize_(model) == len(layers) == sum(map(len, before.values()))
    for (name, ffn), values in zip(sparse_ffns(model), before.values(), strict=True):
        assert ffn.why_called() is None
        for projection, was in zip(ffn.projections, values, strict=True):
            plain = getattr(ffn, projection)
            assert type(plain) is nn.Linear and plain.weight.equal(to_fp8(was.weight).to(torch.float32)), name
    # What is left is the rounding of x and h, two of 2^-5 a layer in the mean square.
    dense = logits(model)
    assert 0 < float((dense - in_fp8).norm() / dense.norm()) < 2**-3
    twell.desparsify_(model)
    torch.testing.assert_close(logits(model), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_alone_gets_its_dtype_back(dtype: torch.dtype) -> None:
    layer = GatedSparseFFN(D, F, dtype=dtype)
    twell.quantize_(layer)
    assert twell.dequantize_(layer) == 3 and {p.dtype for p in layer.parameters()} == {dtype}


def test_a_quantised_model_runs_as_its_dense_blocks_would() -> None:
    model = sparse(llama)
    twell.quantize_(model, emulate=True)
    expected = logits(model)
    report = twell.desparsify_(model)
    assert [row.became for row in report.rows] == ["LlamaMLP", "LlamaMLP"]
    assert isinstance(model.model.layers[0].mlp.gate_proj, Fp8Linear) and logits(model).equal(expected)
    report = twell.sparsify_(model)
    assert report.n_sparse == 0 and len(report.changed) == 2 and FP8_WEIGHTS in str(report)
    assert logits(model).equal(expected)


@pytest.mark.parametrize("make", [llama, opt])
def test_replaced_weights_are_freed(make: Model) -> None:
    model = sparse(make)
    for change in (twell.quantize_, twell.dequantize_):
        weights = [weakref.ref(getattr(ffn, name).weight) for _, ffn in sparse_ffns(model) for name in ffn.projections]
        change(model)
        gc.collect()
        assert not any(weight() is not None for weight in weights)


def test_neurons_of_fp8_layers_are_recorded() -> None:
    model = sparse(llama)
    twell.quantize_(model, emulate=True)
    recorded = trace.record(model, torch.arange(12).view(2, 6))
    assert recorded.layers == 2


def test_opt_runs_densely_in_fp8_and_sparsely_again() -> None:
    model = sparse(opt)
    twell.quantize_(model, emulate=True)
    layer = model.model.decoder.layers[0]
    assert isinstance(layer.fc1, Fp8Linear) and isinstance(layer.fc2, Fp8Linear)
    expected = logits(model)
    twell.desparsify_(model)
    assert logits(model).equal(expected)
    model = sparse(opt)
    twell.quantize_(model, emulate=True)
    twell.dequantize_(model)
    (_, ffn), *_ = sparse_ffns(model)
    assert vars(model.model.decoder.layers[0].fc1)["forward"] is ffn.steps[0]


def test_statistics_of_fp8_layers_are_counted() -> None:
    layer = GatedSparseFFN(D, F, track_counts=True)
    twell.quantize_(layer, emulate=True)
    x = torch.randn(6, D)
    _, stats = layer(x, return_stats=True)
    assert stats.counts.equal((torch.relu(layer.gate_proj(x)) != 0).sum(0).int())
    assert layer.neuron_counts.equal(stats.counts.long())
    assert int(layer.tokens_seen) == 6


def test_quantize_again_changes_whether_layers_emulate_and_nothing_else() -> None:
    layer = GatedSparseFFN(D, F)
    twell.quantize_(layer)
    state = copy.deepcopy(layer.state_dict())
    report = twell.quantize_(layer, emulate=True)
    assert report.layers == () and report.left_alone == (("", "its weights are FP8 already"),)
    assert layer(torch.randn(2, D)).shape == (2, D)
    assert all(bits(t).equal(bits(state[name])) for name, t in layer.state_dict().items())


def test_what_quantize_refuses() -> None:
    with pytest.raises(ValueError, match="unknown config 'int3', expected one of: fp8"):
        twell.quantize_(sparse(llama), "int3")
    with pytest.raises(ValueError, match="no sparse feed-forward layers; call sparsify_ first"):
        twell.quantize_(llama())
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got str"):
        twell.quantize_("a/model")  # type: ignore[arg-type]
    model = sparse(llama)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="already quantised by gptq"):
        twell.quantize_(model)


def spoil(layer: Any, what: str) -> None:
    if what == "hook":
        layer.up_proj.register_forward_hook(lambda module, args, y: 2 * y)
    elif what == "subclass":
        layer.gate_proj.__class__ = type("LoraLinear", (nn.Linear,), {})
    elif what == "not finite":
        layer.down_proj.weight[3, 4] = float("inf")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("hook", "up_proj has hooks"),
        ("subclass", "gate_proj is LoraLinear, not a plain nn.Linear"),
        ("not finite", "down_proj has weights that are not finite"),
    ],
)
def test_other_projections_are_left_alone(what: str, reason: str) -> None:
    model = sparse(llama)
    spoil(model.model.layers[1].mlp, what)
    report = twell.quantize_(model, emulate=True)
    assert report.layers == ("model.layers.0.mlp",) and report.left_alone == (("model.layers.1.mlp", reason),)
    assert f"1 left alone: {reason}" in str(report)
    assert not any(isinstance(module, Fp8Linear) for module in model.model.layers[1].modules())
    assert "model.layers.1.mlp.gate_proj" in model.config.quantization_config["ignore"]


def test_sizes_that_do_not_fit_are_left_alone() -> None:
    layer = GatedSparseFFN(D, 24)
    assert "multiples of 16, got 32 and 24" in twell.quantize_(layer).left_alone[0][1]


# -- the layer's other functions -------------------------------------------------------------------------------


def quantised() -> SparseFFNBase:
    layer = GatedSparseFFN(D, F).eval()
    twell.quantize_(layer, emulate=True)
    return layer


def test_frozen_layers_are_thawed_and_fp8_ones_are_not_frozen() -> None:
    layer = GatedSparseFFN(D, F).eval()
    twell.freeze_(layer)
    report = twell.quantize_(layer, emulate=True)
    assert report.thawed == 1 and "1 were frozen and are no longer" in str(report) and layer.frozen is None
    assert twell.freeze_(layer).skipped == (("", FP8_WEIGHTS),)
    assert twell.refresh_(layer) == twell.thaw_(layer) == 0
    layer.freeze()
    assert layer.frozen is None


def test_plans_are_kept_and_change_no_result() -> None:
    layer, x = quantised(), torch.randn(300, D)
    expected = layer(x)
    plan = layer.plan_from_counts(torch.ones(F, dtype=torch.int64), 100)
    assert isinstance(plan, Plan) and layer(x).equal(expected)
    layer.set_plan(None)
    with pytest.raises(ValueError, match="the plan is for 64 neurons, the layer has 80"):
        layer.set_plan(GatedSparseFFN(D, 64).plan_from_counts(torch.ones(64, dtype=torch.int64), 100))
    assert layer(x).equal(expected)


def test_plans_from_counts_are_made_anew_when_costs_change() -> None:
    layer = GatedSparseFFN(D, F).eval()
    layer.plan_from_counts(torch.ones(F, dtype=torch.int64), 100)
    assert layer.plan is not None and not layer._plans_itself
    twell.quantize_(layer, emulate=True)
    assert layer.plan is None and layer._plans_itself
    layer.plan_from_counts(torch.ones(F, dtype=torch.int64), 100)
    twell.dequantize_(layer)
    assert layer.plan is None and layer._plans_itself
    by_hand = Plan(n_neurons=F, hot=torch.arange(16), cap=16)
    layer.set_plan(by_hand)
    twell.quantize_(layer, emulate=True)
    assert layer.plan is by_hand


def test_shared_projections_stay_shared() -> None:
    model = torch.nn.Sequential(GatedSparseFFN(D, F), GatedSparseFFN(D, F)).eval()
    model[1].gate_proj = model[0].gate_proj
    twell.quantize_(model, emulate=True)
    assert model[1].gate_proj is model[0].gate_proj and model[1].up_proj is not model[0].up_proj


def test_writes_are_seen_wherever_it_was_quantised() -> None:
    layer = GatedSparseFFN(D, F).eval()
    with torch.inference_mode():
        twell.quantize_(layer, emulate=True)
    assert not any(p.is_inference() for p in layer.parameters())


def test_an_fp8_layer_on_a_cpu_does_not_look_at_its_first_tokens(monkeypatch: Any) -> None:
    layer = quantised()
    monkeypatch.setattr(SparseFFNBase, "_look_at", lambda *args: pytest.fail("it reads a weight as it is"))
    assert layer(torch.randn(300, D)).shape == (300, D)


def test_layouts_stay_as_they_are() -> None:
    model = sparse(llama)
    assert not model.model.layers[0].mlp.down_proj.weight.is_contiguous()
    twell.quantize_(model, emulate=True)
    assert twell.restore_layout_(model) == 0
    moved = copy.deepcopy(model).to(torch.bfloat16)
    assert moved.dtype == torch.bfloat16 and logits(moved).dtype == torch.bfloat16
    assert next(moved.model.layers[0].mlp.parameters()).dtype == E4M3


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (0,), (2, 33), (4096,)])
def test_gpus_compute_the_same(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    layer = Fp8Linear.from_linear(nn.Linear(512, 1408, bias=bias, device="cuda", dtype=dtype))
    x = torch.randn(*shape, 512, device="cuda", dtype=dtype)
    y, expected = layer(x), meaning(layer, x)
    assert y.dtype == dtype and y.shape == expected.shape
    if y.numel():  # fast accumulation keeps about 14 bits of a sum
        assert float((y.double() - expected).norm() / expected.norm()) < 2**-9 + 2**-8 * (dtype == torch.bfloat16)


@pytest.mark.gpu
def test_a_gpu_runs_a_layer_eagerly_compiled_and_in_a_graph() -> None:
    layer = GatedSparseFFN(512, 1408, device="cuda", dtype=torch.bfloat16).eval()
    twell.quantize_(layer)
    x = torch.randn(33, 512, device="cuda", dtype=torch.bfloat16)
    x[5, 3] = float("nan")
    y = layer(x)
    assert y[5].isnan().all() and y.isnan().sum() == 512

    def distance(other: Tensor) -> float:  # a compiler divides otherwise, which rounds a few of x and h to a neighbour
        assert other.isnan().equal(y.isnan())
        return float((other - y).nan_to_num().float().norm() / y.nan_to_num().float().norm())

    assert distance(torch.compile(layer, fullgraph=True)(x)) < 0.02
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    graph.replay()
    assert captured.nan_to_num().equal(y.nan_to_num())
    with fp8.emulated(layer):
        assert distance(layer(x)) < 0.02
