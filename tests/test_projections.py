"""Changes of gate_proj, up_proj and down_proj act as in the dense block: adapters, hooks, subclasses and more."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronConfig, OPTConfig

import twell
from twell.hf import LlamaSparseReluConfig
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase, sparse_ffns

D, F = 16, 48
GATED = ("gate_proj", "up_proj", "down_proj")
PLAIN = ("up_proj", "down_proj")
f64 = torch.float64


class DenseFFN(nn.Module):
    """As transformers writes it."""

    def __init__(self, gated: bool = True, linear: Callable[..., nn.Linear] = nn.Linear) -> None:
        super().__init__()
        if gated:
            self.gate_proj = linear(D, F, bias=False, dtype=f64)
        self.up_proj = linear(D, F, bias=not gated, dtype=f64)
        self.down_proj = linear(F, D, bias=not gated, dtype=f64)
        self.act_fn = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up_proj(x)
        h = self.act_fn(self.gate_proj(x)) * h if hasattr(self, "gate_proj") else self.act_fn(h)
        return self.down_proj(h)


def twins(gated: bool = True, **options: Any) -> tuple[DenseFFN, SparseFFNBase]:
    """A dense block, and a sparse one with weights of the same values."""
    dense = DenseFFN(gated, **options)
    return dense, (GatedSparseFFN if gated else SparseFFN).from_dense(copy.deepcopy(dense))


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=f64)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same(dense: nn.Module, sparse: nn.Module) -> None:
    """Results and all gradients."""
    x = tokens(2, 5)
    ys = []
    for module in (dense, sparse):
        module.zero_grad()
        given = x.clone().requires_grad_()
        y = module(given)
        y.square().sum().backward()
        ys.append((y.detach(), given.grad))
    torch.testing.assert_close(ys[1], ys[0])
    torch.testing.assert_close(gradients(sparse), gradients(dense))


def with_hook(register: str, hook: Callable[..., Any]) -> Callable[[nn.Module, str], Callable[[], None]]:
    def change(block: nn.Module, name: str) -> Callable[[], None]:
        return getattr(getattr(block, name), register)(hook).remove

    return change


def halves_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / 2, *args[1:])


def adds_one(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 1


def doubles_gradients(module: nn.Module, dx: tuple[Tensor | None, ...], *dy: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else 2 * g for g in dx)


def by_pruning(block: nn.Module, name: str) -> Callable[[], None]:
    linear = getattr(block, name)
    shape = linear.weight.shape
    mask = torch.arange(shape.numel()).view(shape) % 3 != 1  # (l1_unstructured takes no strided weights)
    prune.custom_from_mask(linear, "weight", mask)
    with torch.no_grad():
        linear.weight_orig.mul_(2)  # what is left in linear.weight is old until the linear is called
    return lambda: prune.remove(linear, "weight")


def by_old_weight_norm(block: nn.Module, name: str) -> Callable[[], None]:
    linear = getattr(block, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(linear)
    with torch.no_grad():
        linear.weight_g.mul_(2)  # what is left in linear.weight is old until the linear is called
    return lambda: nn.utils.remove_weight_norm(linear)


def by_weight_norm(block: nn.Module, name: str) -> Callable[[], None]:
    linear = getattr(block, name)
    nn.utils.parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(2)
    return lambda: nn.utils.parametrize.remove_parametrizations(linear, "weight")


def by_accelerate(block: nn.Module, name: str) -> Callable[[], None]:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    linear = getattr(block, name)
    add_hook_to_module(linear, Doubling())
    return lambda: remove_hook_from_module(linear)


def by_forward(block: nn.Module, name: str) -> Callable[[], None]:
    linear = getattr(block, name)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias).tanh()
    return lambda: delattr(linear, "forward")


def by_lora(block: nn.Module, name: str) -> Callable[[], None]:
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    wrapped = LoraModel(block, LoraConfig(r=4, target_modules=[name], init_lora_weights=False), "default")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in wrapped.named_parameters():
            if "lora_" in key:
                p.data = torch.randn(p.shape, generator=generator, dtype=f64)
                p.requires_grad_()
    return lambda: wrapped.merge_and_unload() and None


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def by_another_module(block: nn.Module, name: str) -> Callable[[], None]:
    linear = getattr(block, name)
    new = Doubled(linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=f64)
    new.load_state_dict(linear.state_dict())
    setattr(block, name, new)
    return lambda: setattr(block, name, linear)


CHANGES: dict[str, Callable[[nn.Module, str], Callable[[], None]]] = {
    "forward hook": with_hook("register_forward_hook", adds_one),
    "forward pre-hook": with_hook("register_forward_pre_hook", halves_input),
    "full backward hook": with_hook("register_full_backward_hook", doubles_gradients),
    "full backward pre-hook": with_hook("register_full_backward_pre_hook", doubles_gradients),
    "pruning": by_pruning,
    "old weight_norm": by_old_weight_norm,
    "weight_norm": by_weight_norm,
    "accelerate": by_accelerate,
    "forward": by_forward,
    "LoRA": by_lora,
    "another module": by_another_module,
}
each_change = pytest.mark.parametrize("change", CHANGES)
each_projection = pytest.mark.parametrize(
    ("gated", "name"), [*((True, name) for name in GATED), *((False, name) for name in PLAIN)]
)


# -- One layer -------------------------------------------------------------------------------------------


@each_change
@each_projection
def test_acts_as_in_the_dense_block_and_leaves_no_trace(change: str, gated: bool, name: str) -> None:
    dense, sparse = twins(gated)
    assert sparse.why_called() is None
    assert_same(dense, sparse)
    undo = [CHANGES[change](block, name) for block in (dense, sparse)]
    reason = sparse.why_called()
    assert reason is not None and name in reason
    assert reason in repr(sparse)
    assert_same(dense, sparse)
    for back in undo:
        back()
    assert sparse.why_called() is None and "runs densely" not in repr(sparse)
    assert_same(dense, sparse)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("change", ["forward hook", "full backward hook", "LoRA", "another module"])
def test_statistics_of_called_layers(change: str, name: str) -> None:
    dense, sparse = twins()
    sparse.track_counts = True
    for block in (dense, sparse):
        CHANGES[change](block, name)
    x, mask = tokens(2, 5).requires_grad_(), torch.arange(10).view(2, 5) % 3 != 1
    y, stats = sparse(x, token_mask=mask, return_stats=True)
    r = torch.relu(dense.gate_proj(x))
    h = r * dense.up_proj(x)
    l1 = h.abs()[mask].sum()
    torch.testing.assert_close(stats.l1_sum, l1)
    assert torch.equal(stats.counts, (r != 0)[mask].sum(0).int())
    assert stats.tokens == mask.sum() == sparse.tokens_seen
    assert torch.equal(sparse.neuron_counts, stats.counts.long())
    (y.sum() + 0.3 * stats.l1_sum).backward()
    (dense.down_proj(h).sum() + 0.3 * l1).backward()
    torch.testing.assert_close(gradients(sparse), gradients(dense))


@pytest.fixture
def global_hook() -> Iterator[list[nn.Module]]:
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        yield seen
    finally:
        handle.remove()


def test_global_hooks_see_every_projection(global_hook: list[nn.Module]) -> None:
    _, sparse = twins()
    assert "global" in str(sparse.why_called())
    sparse(tokens(3))
    assert global_hook == [sparse.gate_proj, sparse.up_proj, sparse.down_proj, sparse]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_hook_is_called_once_a_call(mode: Any) -> None:
    _, sparse = twins()
    seen: list[Tensor] = []
    handle = sparse.gate_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    x = tokens(3)
    with mode():
        sparse(x)
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], x @ sparse.gate_proj.weight.t())
        handle.remove()
        sparse(x)
    assert len(seen) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_subclasses_come_through_from_dense(compiled: bool) -> None:
    dense, sparse = twins(linear=Doubled)
    assert "Doubled" in str(sparse.why_called()) and "Doubled" in repr(sparse)
    if compiled:
        torch._dynamo.reset()
        x = tokens(3)
        run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(x), dense(x))
    else:
        assert_same(dense, sparse)


def test_a_subclass_that_only_has_a_name_is_called_too() -> None:
    class Named(nn.Linear):
        pass

    assert twins(linear=Named)[1].why_called() is not None


def test_called_layers_are_not_frozen() -> None:
    _, sparse = twins()
    sparse.eval()
    sparse.gate_proj.register_forward_hook(adds_one)
    report = twell.freeze_(sparse)
    assert sparse.frozen is None and "gate_proj has hooks" in str(report)


def test_a_frozen_layer_whose_projection_changes_follows_it() -> None:
    dense, sparse = twins()
    sparse.eval()
    twell.freeze_(sparse)
    x = tokens(3)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), dense(x))
        undo = [CHANGES["forward hook"](block, "up_proj") for block in (dense, sparse)]
        torch.testing.assert_close(sparse(x), dense(x))
        for back in undo:
            back()
        torch.testing.assert_close(sparse(x), dense(x))


# -- Derivatives that there are not ----------------------------------------------------------------------

REFUSED = (NotImplementedError, RuntimeError)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("of", ["x", "weights"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_forward_mode_raises(gated: bool, of: str, mode: Any) -> None:
    layer = twins(gated)[1]
    x = tokens(3)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def run(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, x)

    with mode(), pytest.raises(REFUSED):
        if of == "x":
            torch.func.jvp(lambda x: run(x, weights), (x,), (torch.ones_like(x),))
        else:
            torch.func.jvp(lambda w: run(x, w), (weights,), ({n: torch.ones_like(w) for n, w in weights.items()},))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("return_stats", [False, True])
def test_dual_numbers_raise(requires_grad: bool, return_stats: bool) -> None:
    layer, x = twins()[1].requires_grad_(requires_grad), tokens(3)
    with forward_ad.dual_level(), pytest.raises(REFUSED):
        layer(forward_ad.make_dual(x, torch.ones_like(x)), return_stats=return_stats)


def test_functions_have_no_forward_mode() -> None:
    x, gate, up, down = (torch.randn(*shape, dtype=f64) for shape in ((3, D), (F, D), (F, D), (D, F)))
    for function in (lambda x: twell.gated_ffn(x, gate, up, down), lambda x: twell.ffn(x, gate, down)):
        with pytest.raises(REFUSED):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))


def test_a_called_layer_has_all_derivatives() -> None:
    dense, sparse = twins()
    for block in (dense, sparse):
        CHANGES["forward hook"](block, "gate_proj")
    x = tokens(3)
    expected = torch.func.jvp(dense, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(torch.func.jvp(sparse, (x,), (torch.ones_like(x),)), expected)


# -- Models ----------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": 0,
}
OPT_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE, hidden_act="relu"),
    "nemotron": lambda: NemotronConfig(**SHAPE),
    "opt": lambda: OPTConfig(**OPT_SHAPE),
}
TARGETS = {"llama": GATED, "llama_sparse_relu": GATED, "nemotron": PLAIN, "opt": ("fc1", "fc2")}
IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
each_model = pytest.mark.parametrize("kind", [*CONFIGS, "llama_sparse_relu"])


def model_pair(kind: str) -> tuple[Any, Any]:
    """A dense model and its sparse twin, in double precision."""
    config = CONFIGS[kind.removesuffix("_sparse_relu")]()
    dense = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for p in dense.parameters():
            p.mul_(3 if p.dim() == 2 else 1)
    if kind == "llama_sparse_relu":
        sparse = AutoModelForCausalLM.from_config(LlamaSparseReluConfig(**SHAPE)).double().eval()
        sparse.load_state_dict(dense.state_dict())
    else:
        sparse = copy.deepcopy(dense)
    assert twell.sparsify_(sparse).n_sparse == 2
    return dense, sparse


def with_lora(model: nn.Module, kind: str) -> Any:
    """With adapters that do something."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=list(TARGETS[kind]), init_lora_weights=False))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_" in name:
                p.data = 0.2 * torch.randn(p.shape, generator=generator, dtype=f64)
    return wrapped


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def adapter_gradients(model: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(input_ids=IDS).logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@each_model
def test_lora_on_a_sparse_model_is_lora_on_the_dense_one(kind: str, tmp_path: Path) -> None:
    """Trained, saved and loaded, merged and unmerged, merged for good: results, gradients and weights."""
    from peft import PeftModel

    pair = model_pair(kind)
    plain, weights = logits(pair[1]), copy.deepcopy(pair[1].state_dict())
    torch.testing.assert_close(plain, logits(pair[0]))
    both = dense, sparse = [with_lora(model, kind) for model in pair]
    untrained = logits(sparse)
    torch.testing.assert_close(untrained, logits(dense))
    found = adapter_gradients(sparse)
    assert len(found) == 2 * 2 * len(TARGETS[kind]) and all(g is not None and g.any() for g in found.values())
    torch.testing.assert_close(found, adapter_gradients(dense))

    for model in both:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
    adapted = logits(sparse)
    assert not any(torch.allclose(adapted, before) for before in (plain, untrained))
    torch.testing.assert_close(adapted, logits(dense))
    torch.testing.assert_close(sparse.state_dict(), dense.state_dict())
    sparse.save_pretrained(tmp_path, save_embedding_layers=False)
    for model in model_pair(kind):
        model.load_state_dict(weights)
        torch.testing.assert_close(logits(PeftModel.from_pretrained(model, tmp_path)), adapted)

    for model in both:
        model.merge_adapter()
    torch.testing.assert_close(logits(sparse), adapted)
    torch.testing.assert_close(sparse.state_dict(), dense.state_dict())
    for model in both:
        model.unmerge_adapter()
    torch.testing.assert_close(logits(sparse), adapted)
    torch.testing.assert_close(sparse.state_dict(), dense.state_dict())
    with sparse.disable_adapter():
        torch.testing.assert_close(logits(sparse), plain)

    merged = sparse.merge_and_unload()
    assert merged is pair[1] and all(ffn.why_called() is None for _, ffn in sparse_ffns(merged))
    torch.testing.assert_close(merged.state_dict(), dense.merge_and_unload().state_dict())
    torch.testing.assert_close(logits(merged), adapted)
    torch.testing.assert_close(logits(twell_dense(merged)), adapted)


def twell_dense(model: nn.Module) -> nn.Module:
    twell.desparsify_(model)
    return model


@each_model
def test_adapters_survive_the_way_back(kind: str) -> None:
    _, model = model_pair(kind)
    wrapped = with_lora(model, kind)
    adapted = logits(wrapped)
    twell.desparsify_(wrapped)
    torch.testing.assert_close(logits(wrapped), adapted)
    assert all(p.is_contiguous() for p in wrapped.parameters())
    assert twell.sparsify_(wrapped).n_sparse == 0
    torch.testing.assert_close(logits(wrapped), adapted)


@each_model
def test_adapters_first(kind: str) -> None:
    """A model with adapters is taken as it is, and runs sparsely once they are merged."""
    dense, sparse = model_pair(kind)
    twell.desparsify_(sparse)
    dense, sparse = with_lora(dense, kind), with_lora(sparse, kind)
    report = twell.sparsify_(sparse)
    outcome = "left alone" if kind == "opt" else "called"
    assert [row.kind for row in report.rows] == [outcome] * 2 and report.n_sparse == 0
    assert all("not a plain nn.Linear" in row.why for row in report.rows)
    assert ("skipped: " if kind == "opt" else "called: ") in str(report) and "2 dense: " in report.summary()
    torch.testing.assert_close(logits(sparse), logits(dense))
    torch.testing.assert_close(adapter_gradients(sparse), adapter_gradients(dense))
    adapted, merged = logits(sparse), sparse.merge_and_unload()
    assert twell.sparsify_(merged).n_sparse == 2
    assert all(ffn.why_called() is None for _, ffn in sparse_ffns(merged))
    torch.testing.assert_close(logits(merged), adapted)


@each_model
def test_layouts_under_adapters_are_restored(kind: str) -> None:
    _, model = model_pair(kind)
    assert sum(not p.is_contiguous() for p in model.parameters()) == 2
    wrapped = with_lora(model, kind)
    assert twell.restore_layout_(wrapped) == 2
    assert all(p.is_contiguous() for p in wrapped.parameters())


@each_model
@pytest.mark.parametrize("change", ["forward hook", "full backward hook", "pruning", "accelerate", "another module"])
@pytest.mark.parametrize("first", [False, True], ids=["sparsify_, change", "change, sparsify_"])
def test_changes_of_a_model(kind: str, change: str, first: bool) -> None:
    pair = model_pair(kind)
    dense, sparse = pair
    if first:
        twell.desparsify_(sparse)
    for which, name in enumerate(TARGETS[kind]):
        for model in pair:
            decoder = model.model.decoder if kind == "opt" else model.model
            layer = decoder.layers[which % 2]
            CHANGES[change](layer if kind == "opt" else layer.mlp, name)
    report = twell.sparsify_(sparse)
    if kind == "opt" and first and change in ("accelerate", "another module"):
        assert [row.kind for row in report.rows] == ["left alone"] * 2 and all(row.why for row in report.rows)
    else:
        assert [row.kind for row in report.rows] == ["called"] * 2
        for row, (name, ffn) in zip(report.rows, sparse_ffns(sparse), strict=True):
            assert row.layer == name and row.why and row.why == ffn.why_called() and row.why in repr(sparse)
    torch.testing.assert_close(logits(sparse), logits(dense))
    for model in pair:
        model.zero_grad()
        model(input_ids=IDS).logits.square().sum().backward()
    torch.testing.assert_close(gradients(sparse), gradients(dense))


def test_relufied_subclasses_are_called() -> None:
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).double().eval()
    for layer in model.model.layers:
        by_another_module(layer.mlp, "down_proj")
    twin = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, hidden_act="relu")).double().eval()
    for layer in twin.model.layers:
        by_another_module(layer.mlp, "down_proj")
    twin.load_state_dict(model.state_dict())
    report = twell.relufy_(model)
    assert all("down_proj is Doubled" in row.why for row in report.rows)
    torch.testing.assert_close(logits(model), logits(twin))


def test_hooks_of_blocks_stay() -> None:
    dense, _ = model_pair("llama")
    seen: list[str] = []
    mlp = dense.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    twell.sparsify_(dense)
    assert seen == []  # the check's tokens are nobody's
    logits(dense)
    twell.desparsify_(dense)
    logits(dense)
    assert seen == ["GatedSparseFFN", "LlamaMLP"]
    twell.sparsify_(dense)
    handle.remove()
    logits(dense)
    assert len(seen) == 2


def test_blocks_whose_activation_has_hooks_are_left_alone() -> None:
    _, model = model_pair("llama")
    twell.desparsify_(model)
    mlp = model.model.layers[1].mlp
    mlp.act_fn.register_forward_hook(adds_one)
    expected = logits(model)
    report = twell.sparsify_(model)
    assert [(row.kind, row.why) for row in report.rows] == [("sparse", ""), ("left alone", "act_fn has hooks")]
    torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("part", ["fc1", "activation_fn", "fc2"])
def test_hooks_on_each_part_of_opt(part: str) -> None:
    dense, sparse = model_pair("opt")
    seen: list[list[Tensor]] = [[], []]
    handles = []
    for model, outputs in zip((dense, sparse), seen, strict=True):
        module = model.model.decoder.layers[1].get_submodule(part)
        handles.append(module.register_forward_hook(lambda module, args, y, outputs=outputs: outputs.append(y)))
    torch.testing.assert_close(logits(sparse), logits(dense))
    torch.testing.assert_close(seen[1], seen[0])
    (_, first), (_, second) = sparse_ffns(sparse)
    assert first.why_called() is None and part in str(second.why_called())
    for handle in handles:
        handle.remove()
    assert second.why_called() is None
    torch.testing.assert_close(logits(sparse), logits(dense))
    assert len(seen[1]) == 1
