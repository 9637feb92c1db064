"""The modules as drop-in blocks: HF names, shared parameters, running counts, plans, frozen state, copies, training,
compile."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twell
from twell import cpu, reference
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase, neuron_major_, sparse_ffns
from twell.ops import functional as ops
from twell.plan import Plan, dense_plan
from twell.vllm.ffn import compile_kernels, vllm_ffn_of

f64 = torch.float64
D, F = 8, 32
each_kind = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


# -- Dense blocks as transformers has them ---------------------------------------------------------------


def relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


class ReLUSquaredActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return relu_squared(x)


class DenseGated(nn.Module):
    def __init__(self, bias: bool = False, act_fn: Any = None, dtype: torch.dtype = f64) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(D, F, bias=bias, dtype=dtype)
        self.up_proj = nn.Linear(D, F, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(F, D, bias=bias, dtype=dtype)
        self.act_fn = nn.ReLU() if act_fn is None else act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DensePlain(nn.Module):
    def __init__(self, bias: bool = False, act_fn: Any = None, dtype: torch.dtype = f64) -> None:
        super().__init__()
        self.up_proj = nn.Linear(D, F, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(F, D, bias=bias, dtype=dtype)
        self.act_fn = nn.ReLU() if act_fn is None else act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class OPTLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, F, dtype=f64), nn.Linear(F, D, dtype=f64)
        self.activation_fn = nn.functional.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


def dense_block(gated: bool, **options: Any) -> nn.Module:
    return DenseGated(**options) if gated else DensePlain(**options)


def sparse_class(gated: bool) -> type[SparseFFNBase]:
    return GatedSparseFFN if gated else SparseFFN


def tokens(*shape: int, dtype: torch.dtype = f64) -> Tensor:
    return torch.randn(*shape, D, dtype=f64).to(dtype)


# -- Construction, state dict, conversion ----------------------------------------------------------------


@each_kind
@with_and_without_bias
def test_state_dict_is_that_of_the_dense_block(gated: bool, bias: bool) -> None:
    dense, layer = dense_block(gated, bias=bias), sparse_class(gated)(D, F, bias=bias, dtype=f64, track_counts=True)
    shapes = {name: t.shape for name, t in dense.state_dict().items()}
    assert {name: t.shape for name, t in layer.state_dict().items()} == shapes
    assert {name: t.shape for name, t in layer.named_parameters()} == shapes
    assert {name for name, _ in layer.named_buffers()} == {"neuron_counts", "tokens_seen"}


@each_kind
@with_and_without_bias
def test_loads_a_dense_state_dict_strictly_and_back(gated: bool, bias: bool) -> None:
    dense, layer = dense_block(gated, bias=bias), sparse_class(gated)(D, F, bias=bias, dtype=f64)
    layer.load_state_dict(dense.state_dict(), strict=True)
    x = tokens(2, 5)
    torch.testing.assert_close(layer(x), dense(x))
    again = dense_block(gated, bias=bias)
    again.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(again(x), dense(x))


def test_keeps_device_and_dtype() -> None:
    layer = GatedSparseFFN(D, F, bias=True, dtype=torch.bfloat16, device="meta")
    assert all((p.dtype, p.device.type) == (torch.bfloat16, "meta") for p in layer.parameters())
    assert all((b.dtype, b.device.type) == (torch.int64, "meta") for b in layer.buffers())
    assert layer.to_empty(device="cpu").neuron_counts.device.type == "cpu"


@each_kind
@with_and_without_bias
@pytest.mark.parametrize("act_fn", [nn.ReLU(), ReLUSquaredActivation()], ids=["relu", "relu2"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_from_dense_computes_the_dense_block(gated: bool, bias: bool, act_fn: nn.Module, backend: str) -> None:
    dense = dense_block(gated, bias=bias, act_fn=act_fn)
    layer = sparse_class(gated).from_dense(dense, backend=backend)
    for x in (tokens(), tokens(1), tokens(2, 5), tokens(300), tokens(0)):
        torch.testing.assert_close(layer(x), dense(x))


@each_kind
@with_and_without_bias
def test_from_dense_shares_parameters(gated: bool, bias: bool) -> None:
    dense = dense_block(gated, bias=bias)
    layer = sparse_class(gated).from_dense(dense)
    theirs = dict(dense.named_parameters())
    assert all(p is theirs[name] for name, p in layer.named_parameters())
    assert len(theirs) == len(list(layer.parameters()))


def test_from_dense_takes_other_names() -> None:
    dense = OPTLike()
    layer = SparseFFN.from_dense(dense, names=("fc1", "fc2"))
    assert layer.up_proj is dense.fc1
    assert layer.down_proj is dense.fc2
    x = tokens(3)
    torch.testing.assert_close(layer(x), dense(x))


@pytest.mark.parametrize("training", [True, False])
def test_from_dense_keeps_the_mode_and_takes_options(training: bool) -> None:
    layer = GatedSparseFFN.from_dense(DenseGated().train(training), backend="reference", track_counts=True)
    assert (layer.training, layer.backend, layer.track_counts) == (training, "reference", True)


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (nn.ReLU(), "relu"),
        (torch.relu, "relu"),
        (nn.functional.relu, "relu"),
        (relu_squared, "relu2"),
        (ReLUSquaredActivation(), "relu2"),
    ],
)
@pytest.mark.parametrize("attribute", ["act_fn", "activation_fn", "act"])
def test_activation_is_read_from_the_block(function: Any, activation: str, attribute: str) -> None:
    dense = DensePlain()
    del dense.act_fn
    setattr(dense, attribute, function)
    assert SparseFFN.from_dense(dense).activation == activation


@pytest.mark.parametrize(("function", "name"), [(nn.SiLU(), "SiLU"), (nn.functional.gelu, "gelu"), (nn.GELU(), "GELU")])
def test_other_activations_are_refused_by_name(function: Any, name: str) -> None:
    dense = DenseGated(act_fn=function)
    with pytest.raises(ValueError, match=rf"DenseGated\.act_fn is {name}: a sparse FFN computes relu or relu2"):
        GatedSparseFFN.from_dense(dense)
    assert GatedSparseFFN.from_dense(dense, activation="relu").activation == "relu"


def test_a_block_without_an_activation_is_refused() -> None:
    dense = DenseGated()
    del dense.act_fn
    with pytest.raises(ValueError, match="DenseGated does not name its activation; pass activation='relu' or 'relu2'"):
        GatedSparseFFN.from_dense(dense)


def test_missing_projections_are_named() -> None:
    with pytest.raises(ValueError, match=r"expected OPTLike\.up_proj to be an nn\.Linear, got NoneType; pass names="):
        SparseFFN.from_dense(OPTLike())
    with pytest.raises(
        ValueError, match=r"expected OPTLike\.activation_fn to be an nn\.Linear, got (builtin_)?function"
    ):
        SparseFFN.from_dense(OPTLike(), names=("fc1", "activation_fn"))


@pytest.mark.parametrize("names", [("fc1",), ("fc1", "fc2", "fc2")])
def test_a_wrong_number_of_names_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"from_dense: names must be 2 names, for up_proj, down_proj, got \('fc1'"):
        SparseFFN.from_dense(OPTLike(), names=names)


@each_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelu"}, "activation must be one of relu, relu2, got 'gelu'"),
        ({"backend": "cuda"}, "backend must be one of auto, reference, cpu, triton, got 'cuda'"),
    ],
)
def test_wrong_options_are_refused(gated: bool, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_class(gated)(D, F, **options)
    with pytest.raises(ValueError, match=message):
        sparse_class(gated).from_dense(dense_block(gated), **options)


# -- Running counts and repr -----------------------------------------------------------------------------


def active(dense: nn.Module, x: Tensor) -> Tensor:
    carrier = dense.gate_proj if hasattr(dense, "gate_proj") else dense.up_proj
    return carrier(x).reshape(-1, F) > 0


@each_kind
def test_running_counts_add_up(gated: bool) -> None:
    dense = dense_block(gated)
    layer = sparse_class(gated).from_dense(dense, track_counts=True)
    assert layer.mean_active is None
    xs = [tokens(2, 5), tokens(7), tokens(0)]
    for x in xs:
        assert layer(x).shape == x.shape
    seen = torch.cat([active(dense, x) for x in xs])
    assert layer.tokens_seen == 17
    assert torch.equal(layer.neuron_counts, seen.sum(0))
    assert layer.mean_active == pytest.approx(seen.sum().item() / 17)
    layer.reset_counts()
    assert layer.neuron_counts.sum() == layer.tokens_seen == 0
    assert layer.mean_active is None


def test_counts_change_only_on_request() -> None:
    layer = GatedSparseFFN(D, F)
    layer(tokens(3, dtype=torch.float32))
    _, stats = layer(tokens(3, dtype=torch.float32), return_stats=True)
    assert layer.tokens_seen == 0
    layer.commit(stats)
    assert layer.tokens_seen == 3
    assert torch.equal(layer.neuron_counts, stats.counts.long())


@pytest.mark.parametrize("track_counts", [True, False])
def test_statistics_are_returned_on_request(track_counts: bool) -> None:
    layer = GatedSparseFFN(D, F, dtype=f64, track_counts=track_counts)
    x, mask = tokens(2, 5), torch.arange(10).view(2, 5) % 3 != 1
    y, stats = layer(x, token_mask=mask, return_stats=True)
    assert isinstance(stats, twell.Stats)
    assert stats.tokens == mask.sum()
    assert layer.tokens_seen == (mask.sum() if track_counts else 0)
    torch.testing.assert_close(layer(x), y)


def test_called_projections_must_return_all_neurons_for_statistics() -> None:
    """A projection that returns only its share of the neurons, as in tensor parallel models, has no statistics."""
    layer, x = SparseFFN(D, F, dtype=f64), tokens()
    expected, stats = layer(x, return_stats=True)
    hook = layer.up_proj.register_forward_hook(lambda *_: None)
    y, called = layer(x, return_stats=True)  # x [D]: one token
    torch.testing.assert_close((y, *called), (expected, *stats))
    hook.remove()
    layer.up_proj.register_forward_hook(lambda module, args, out: out[..., : F // 2])
    layer.down_proj.forward = lambda h: h @ layer.down_proj.weight[:, : F // 2].t()
    assert layer(x).shape == (D,)
    with pytest.raises(ValueError, match="need all 32 neurons of the layer, but up_proj returned 16"):
        layer(x, return_stats=True)


def test_counts_do_not_overflow_int32() -> None:
    layer = GatedSparseFFN(D, F)
    layer.neuron_counts.fill_(2**31 - 1)
    layer.commit(twell.Stats(torch.tensor(0.0), torch.ones(F, dtype=torch.int32), torch.tensor(1)))
    assert (layer.neuron_counts == 2**31).all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_counting_without_autograd(context: Any) -> None:
    layer = SparseFFN(D, F, track_counts=True)
    with context():
        layer(tokens(4, dtype=torch.float32))
    layer(tokens(4, dtype=torch.float32)).sum().backward()
    assert layer.tokens_seen == 8


def test_repr_in_each_state() -> None:
    layer = GatedSparseFFN(D, F, activation="relu2", backend="reference", dtype=f64)
    start = "8 -> 32 -> 8, relu2, backend=reference"
    assert layer.extra_repr() == start
    layer.track_counts = True
    assert layer.extra_repr() == f"{start}, counting, no tokens yet"
    counts = torch.full((F,), 100, dtype=torch.int32)
    counts[:7] = 0
    layer.commit(twell.Stats(torch.tensor(0.0), counts, torch.tensor(2000)))
    assert layer.extra_repr() == f"{start}, 1.2 of 32 active over 2,000 tokens, 7 never"
    assert f"{start}, 1.2 of 32 active" in repr(layer)
    layer.set_plan(dense_plan(F, 8))
    assert layer.extra_repr().endswith("7 never, Plan(dense, 32 neurons, sparse up to 8 tokens)")
    layer.gate_proj.register_forward_hook(lambda *_: None)
    assert layer.extra_repr().startswith(f"{start}, runs densely: gate_proj has hooks, 1.2 of 32")
    layer.gate_proj._forward_hooks.clear()
    assert layer.to("meta").extra_repr() == start
    assert SparseFFN(D, F, track_counts=True, device="meta").extra_repr() == "8 -> 32 -> 8, relu, backend=auto"


# -- Plans -----------------------------------------------------------------------------------------------


def some_plan(n_hot: int = 6, **numbers: Any) -> Plan:
    return Plan(n_neurons=F, hot=torch.randperm(F)[:n_hot], cap=16, **numbers)


def test_a_plan_must_fit_the_number_of_neurons() -> None:
    layer = GatedSparseFFN(D, F)
    with pytest.raises(ValueError, match="the plan is for 16 neurons, the layer has 32"):
        layer.set_plan(dense_plan(16))
    assert layer.plan is None
    plan = some_plan()
    layer.set_plan(plan)
    assert layer.plan is plan
    layer.set_plan(None)
    assert layer.plan is None


@pytest.mark.parametrize(
    "counts", [torch.full((F,), 11), torch.full((F,), -1), torch.ones(F), torch.ones(F, 1, dtype=torch.int64), [1] * F]
)
def test_wrong_counts_plans_and_inputs_are_refused(counts: Any) -> None:
    layer = GatedSparseFFN(D, F)
    with pytest.raises(ValueError, match=r"counts .*must be"):
        layer.plan_from_counts(counts, 10)
    with pytest.raises(ValueError, match=r"plan must be a twell.Plan or None, got str"):
        layer.set_plan("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must be a torch.Tensor, got one without dimensions"):
        layer(torch.tensor(1.0))


@pytest.mark.parametrize("dim", [0, 1])
@torch.no_grad()
def test_vmap_in_inference(dim: int) -> None:
    layers = [GatedSparseFFN(D, F) for _ in range(3)]
    x = torch.randn(5, 4, D)
    torch.testing.assert_close(torch.vmap(layers[0], dim, dim)(x), layers[0](x))
    weights, _ = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
    ensemble = torch.vmap(lambda w, x: torch.func.functional_call(layers[0], w, x), (0, None))(weights, x)
    assert torch.equal(ensemble, torch.stack([layer(x) for layer in layers]))


def test_operations_always_get_a_plan_if_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without a plan uses a dense plan, so that compiled code is the same."""
    pytest.importorskip("triton")
    layer, plan = GatedSparseFFN(D, F), some_plan()
    assert layer._plan_eager.order.tolist() == list(range(F))
    layer.set_plan(plan)
    assert layer._plan_eager is plan.on(torch.device("cpu"))
    assert layer._plan_captured is plan.on(torch.device("cpu"), captured=True)
    assert layer.to("meta")._plan_eager == ops.NO_PLAN
    assert layer.to_empty(device="cpu")._plan_eager is plan.on(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert layer.to(torch.bfloat16)._plan_eager == ops.NO_PLAN


# -- Layout ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Runs an FFN itself, as OPT's decoder layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, F), nn.Linear(F, D)
        self.activation_fn = nn.ReLU()
        self.__dict__["twell_inline_ffn"] = SparseFFN.from_dense(self, names=("fc1", "fc2"))


def test_all_sparse_ffns_are_found() -> None:
    model = nn.ModuleDict({"a": GatedSparseFFN(D, F), "b": nn.Sequential(Block(), nn.Linear(D, D), SparseFFN(D, F))})
    found = dict(sparse_ffns(model))
    assert list(found) == ["a", "b.0", "b.2"]
    assert found["a"] is model["a"] and found["b.0"].up_proj is model["b"][0].fc1
    assert [name for name, _ in sparse_ffns(model["a"])] == [""]


def test_neuron_major_layout_and_back() -> None:
    model = nn.Sequential(GatedSparseFFN(D, F), Block(), SparseFFN(D, F))
    x = tokens(5, dtype=torch.float32)
    weights = [model[0].down_proj.weight, model[1].fc2.weight, model[2].down_proj.weight]
    before, expected = [w.detach().clone() for w in weights], model[0](x)
    for linear in (model[0].down_proj, model[1].fc2):
        parameter = linear.weight
        neuron_major_(linear)
        assert linear.weight is parameter and reference.is_neuron_major(parameter)
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    torch.testing.assert_close(model[0](x), expected)
    assert twell.restore_layout_(model) == 2
    assert all(w.is_contiguous() and torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    assert twell.restore_layout_(model) == 0


# -- Frozen state; what it does about writes to weights is in test_written_weights.py --------------------

each_frozen_backend = pytest.mark.parametrize("backend", ["cpu", "triton"])


def frozen_layer(backend: str, mode: Any = torch.no_grad) -> SparseFFNBase:
    """Float32, with a plan that has hot neurons."""
    if backend == "triton":
        pytest.importorskip("triton")
    layer = GatedSparseFFN(16, F, bias=True, backend=backend).eval()
    layer.set_plan(some_plan(few_tokens=4))
    with mode():
        twell.freeze_(layer)
    return layer


def frozen_tensors(layer: SparseFFNBase) -> dict[int, Tensor]:
    """By address."""
    assert layer.frozen is not None
    with torch.no_grad():
        tensors = layer.frozen.tensors(layer._weights(), layer.plan)
    return {t.data_ptr(): t.clone() for t in tensors if t.numel()}


def test_freeze_reports_what_it_did() -> None:
    model = nn.Sequential(GatedSparseFFN(D, F), Block(), SparseFFN(D, F)).eval()
    model[1].__dict__["twell_inline_ffn"].eval()
    model[2].up_proj.register_forward_hook(lambda *_: None)
    report = twell.freeze_(model)
    ffns = [ffn for _, ffn in sparse_ffns(model)]
    assert [ffn.frozen is not None for ffn in ffns] == [True, True, False]
    assert (report.layers, report.skipped) == (2, (("2", "up_proj has hooks"),))
    assert report.bytes == sum(ffn.frozen_bytes() for ffn in ffns) >= 2 * D * F * 4
    line = "2 feed-forward layers frozen, 0.0 MB beside their weights; 1 not: up_proj has hooks"
    assert str(report) == line
    assert ffns[0].extra_repr().endswith("backend=auto, frozen, 0.0 MB")
    assert twell.refresh_(model) == 2 and twell.thaw_(model) == 2 and twell.thaw_(model) == 0
    assert all(ffn.frozen is None and ffn.frozen_bytes() == 0 for ffn in ffns)


def test_layers_in_training_are_not_frozen() -> None:
    model = nn.Sequential(GatedSparseFFN(D, F), GatedSparseFFN(D, F).eval())
    with pytest.raises(ValueError, match="the model is in training mode"):
        twell.freeze_(model)
    assert all(ffn.frozen is None for ffn in model)
    twell.freeze_(model.eval())
    assert all(ffn.frozen is not None for ffn in model)
    model.eval()
    assert all(ffn.frozen is not None for ffn in model)
    model.train()
    assert all(ffn.frozen is None for ffn in model)


@pytest.mark.parametrize(
    ("backend", "mode"), [("cpu", torch.no_grad), ("cpu", torch.inference_mode), ("triton", torch.inference_mode)]
)
def test_frozen_state_is_rewritten_in_place(backend: str, mode: Any) -> None:
    """Frozen in either mode; captured graphs go on reading the same addresses."""
    layer, x = frozen_layer(backend, mode), tokens(3, dtype=torch.float32).repeat(1, 2)
    before = frozen_tensors(layer)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.5)
        with mode():
            y = layer(x)
        after = frozen_tensors(layer)
        twell.thaw_(layer)
        torch.testing.assert_close(y, layer(x))
    assert before.keys() == after.keys() and len(after) >= 1
    assert not all(torch.equal(before[at], after[at]) for at in after)
    assert not any(t.is_inference() for t in after.values())


def test_a_new_plan_reorders_frozen_state() -> None:
    """In place if the number of hot neurons is the same, so that CUDA graphs stay right."""
    layer = frozen_layer("triton")
    x = tokens(9, dtype=torch.float32).repeat(1, 2)
    before = frozen_tensors(layer)
    for plan, in_place in ((some_plan(6, min_tokens=5), True), (some_plan(10), False), (None, False)):
        layer.set_plan(plan)
        with torch.no_grad():
            got = layer(x)
        assert (frozen_tensors(layer).keys() == before.keys()) == in_place
        torch.testing.assert_close(got, reference.forward(x, layer._weights(), want_stats=False).y)
    assert layer.frozen_bytes() == 0  # densely there is nothing to keep


@each_frozen_backend
def test_frozen_layers_follow_conversions(backend: str) -> None:
    """To fp16 and back: the weights then have other values, possibly at their old addresses."""
    layer, x = frozen_layer(backend), tokens(1, dtype=torch.float32).repeat(1, 2)
    with torch.no_grad():
        layer(x)
        for dtype in (torch.float16, torch.float32):
            layer.to(dtype)
            got = layer(x.to(dtype))
            thawed = copy.deepcopy(layer)
            twell.thaw_(thawed)
            torch.testing.assert_close(got, thawed(x.to(dtype)), rtol=0, atol=1e-3 if dtype == torch.float16 else 1e-6)


# -- Copies, dtypes, devices -----------------------------------------------------------------------------


def through_a_file(layer: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("backend", "copied"), [("cpu", copy.deepcopy), ("cpu", through_a_file), ("triton", through_a_file)]
)
def test_copies_of_planned_and_frozen_layers(backend: str, copied: Any) -> None:
    layer, x = frozen_layer(backend), tokens(2, dtype=torch.float32).repeat(1, 2)
    twin = copied(layer)
    assert repr(twin) == repr(layer) and torch.equal(twin.plan.hot, layer.plan.hot)
    assert not frozen_tensors(twin).keys() & frozen_tensors(layer).keys()
    with torch.no_grad():
        expected = layer(x)
        torch.testing.assert_close(twin(x), expected)
        for p in twin.parameters():
            p.zero_()
        assert not twin(x).any()
        torch.testing.assert_close(layer(x), expected)


def counted_layer(gated: bool) -> SparseFFNBase:
    layer = sparse_class(gated)(D, F, bias=True, dtype=f64, activation="relu2", track_counts=True)
    layer(tokens(5))
    return layer


@each_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_copies_without_a_plan_have_the_counts(gated: bool, copied: Any) -> None:
    layer = counted_layer(gated)
    twin, x = copied(layer), tokens(4)
    assert repr(twin) == repr(layer)
    assert torch.equal(twin.neuron_counts, layer.neuron_counts) and twin.neuron_counts.any()
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.down_proj.weight.mul_(2)
    assert not torch.equal(twin(x), layer(x))
    twin.reset_counts()
    assert layer.tokens_seen == 5 + 4 + 4 and layer.neuron_counts.any()


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float()])
@each_kind
def test_conversion_of_the_dtype_keeps_counts(gated: bool, convert: Any) -> None:
    layer = counted_layer(gated)
    before = layer.neuron_counts.clone()
    converted = convert(layer)
    dtype = converted.down_proj.weight.dtype
    assert dtype != f64
    assert (converted.neuron_counts.dtype, converted.tokens_seen.dtype) == (torch.int64, torch.int64)
    assert torch.equal(converted.neuron_counts, before)
    y = converted(tokens(3, dtype=dtype))
    assert y.dtype == dtype
    assert converted.tokens_seen == 8


# -- Training and compile --------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(("activation", "l1"), [("relu", 0.0), ("relu2", 0.01)])
def test_trains_as_its_dense_twin(gated: bool, activation: str, l1: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.training, "MIN_TRAIN_ROWS", 1)
    monkeypatch.setattr(reference, "backward", None)  # the sparse backward, not its fallback
    act_fn = nn.ReLU() if activation == "relu" else ReLUSquaredActivation()
    dense = dense_block(gated, bias=True, act_fn=act_fn)
    carrier = dense.gate_proj if gated else dense.up_proj
    with torch.no_grad():
        carrier.bias -= 2
    layer = sparse_class(gated).from_dense(copy.deepcopy(dense))
    x, target = tokens(40), tokens(40)

    def dense_loss() -> Tensor:
        h = act_fn(carrier(x)) * dense.up_proj(x) if gated else act_fn(carrier(x))
        return (dense.down_proj(h) - target).square().mean() + l1 * h.abs().sum() / 40

    def sparse_loss() -> Tensor:
        y, stats = layer(x, return_stats=True)
        return (y - target).square().mean() + l1 * stats.l1_sum / stats.tokens

    def losses(module: nn.Module, loss: Any) -> list[float]:
        optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9), []
        for _ in range(8):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            seen.append(value.item())
        return seen

    got, want = losses(layer, sparse_loss), losses(dense, dense_loss)
    assert got == pytest.approx(want, rel=1e-10)
    assert got[-1] < got[0]
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p, dense.get_parameter(name), rtol=1e-8, atol=1e-8)


@each_kind
def test_compiled_with_running_counts(gated: bool) -> None:
    torch._dynamo.reset()
    dense = dense_block(gated, bias=True)
    layer = sparse_class(gated).from_dense(dense, track_counts=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = tokens(2, 5)
    for calls in (1, 2):
        y = compiled(x)
        torch.testing.assert_close(y, dense(x))
        assert layer.tokens_seen == 10 * calls
        assert torch.equal(layer.neuron_counts, calls * active(dense, x).sum(0))
    got = torch.autograd.grad(y.sum(), layer.down_proj.weight)
    torch.testing.assert_close(got, torch.autograd.grad(dense(x).sum(), dense.down_proj.weight))


def test_autocast_keeps_parameters_and_gradients_in_float32() -> None:
    layer = GatedSparseFFN(D, F, bias=True, track_counts=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(tokens(6, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    assert layer.tokens_seen == 6


def test_vllm_runs_a_layer_on_all_sizes_of_prompts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share = vllm_ffn_of(GatedSparseFFN(16, 64, device="meta"), 1, 2, torch.device("cpu"), torch.float32, lambda y: y)
    ran: list[tuple[int, ...]] = []
    monkeypatch.setattr(share, "_ffn", lambda x, *_: ran.append(tuple(x.shape)))
    for most in (700, 512, 100):
        compile_kernels([share], most)
    assert ran == [(128, 16), (256, 16), (512, 16), (700, 16), (128, 16), (256, 16), (512, 16), (100, 16)]
