"""Traces: recorded patterns against hooks by hand, and a model left as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronConfig, OPTConfig

import twell
from small_models import LAYERS, TEXT, TINY, VOCAB, F, named_trace_of, tiny_model
from twell.hf import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.nn import SparseFFNBase, sparse_ffns
from twell.train.tokenizer import train_bpe
from twell.workbench import trace as trace_module
from twell.workbench.trace import MAX_WIDTH, record, record_text

OPT = {"ffn_dim": F, "word_embed_proj_dim": 32, **TINY}

# Configuration, whether it is sparsified, and the projection that carries the activation.
MODELS: dict[str, tuple[Callable[[], Any], bool, str]] = {
    "llama sparse": (lambda: LlamaSparseReluConfig(**TINY), False, "gate_proj"),
    "llama sparse, plain": (lambda: LlamaSparseReluConfig(**TINY, sparsity_gated_mlp=False), False, "up_proj"),
    "qwen2 sparse": (lambda: Qwen2SparseReluConfig(**TINY), False, "gate_proj"),
    "llama": (lambda: LlamaConfig(**TINY, hidden_act="relu", mlp_bias=True), False, "gate_proj"),
    "llama sparsified": (lambda: LlamaConfig(**TINY, hidden_act="relu", mlp_bias=True), True, "gate_proj"),
    "nemotron": (lambda: NemotronConfig(**TINY), False, "up_proj"),
    "nemotron sparsified": (lambda: NemotronConfig(**TINY), True, "up_proj"),
    "opt": (lambda: OPTConfig(**OPT), False, "fc1"),
    "opt sparsified": (lambda: OPTConfig(**OPT), True, "fc1"),
}
each_model = pytest.mark.parametrize("name", MODELS)


def dense_or_sparse(name: str) -> Any:
    config, sparsified, _ = MODELS[name]
    model = tiny_model(config())
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "bias" in path:
                p.normal_(std=0.1)  # zero at initialisation
    if sparsified:
        assert len(twell.sparsify_(model).changed) == LAYERS
    return model


def token_ids(sequences: int = 5, length: int = 12) -> Tensor:
    return torch.randint(1, VOCAB, (sequences, length), generator=torch.Generator().manual_seed(0))


def ffns_of(model: nn.Module, projection: str) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(getattr(m, projection, None), nn.Module)]


def by_hand(model: nn.Module, name: str, ids: Tensor) -> list[Tensor]:
    """bool [tokens, F] per layer, from hooks on the FFNs' inputs, one sequence at a time."""
    projection = MODELS[name][2]
    seen: list[list[Tensor]] = []
    handles = []
    for ffn in ffns_of(model, projection):
        gate = getattr(ffn, projection)
        rows: list[Tensor] = []
        seen.append(rows)

        def hook(module: nn.Module, args: tuple[Any, ...], gate: Any = gate, rows: list[Tensor] = rows) -> None:
            z = args[0].reshape(-1, gate.in_features) @ gate.weight.t()
            rows.append((z if gate.bias is None else z + gate.bias) > 0)

        handles.append((gate if projection == "fc1" else ffn).register_forward_pre_hook(hook))
    model.eval()
    with torch.no_grad():
        for row in ids:
            model(row[None])
    for handle in handles:
        handle.remove()
    return [torch.cat(rows) for rows in seen]


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


# -- recording ----------------------------------------------------------------------------------------------


@each_model
def test_recorded_patterns_are_those_found_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_ROWS_AT_ONCE", 7)
    model, ids = dense_or_sparse(name), token_ids()
    expected = by_hand(model, name, ids)
    for batch_size in (1, 3, 8):
        calls: list[tuple[int, int]] = []
        trace = record(model, ids, batch_size=batch_size, progress=lambda *args, calls=calls: calls.append(args))
        assert trace.layers == len(expected) == LAYERS
        assert trace.hidden_sizes == [F] * LAYERS
        for layer, pattern in enumerate(expected):
            assert torch.equal(trace.pattern(layer), pattern)
            assert 0 < pattern.double().mean() < 1
        assert calls == [(min(n + batch_size, 5), 5) for n in range(0, 5, batch_size)]
    if hasattr(model.config, "sparsity_gated_mlp"):  # the model's own counts
        with torch.no_grad():
            stats = model.eval()(ids, output_sparsity=True).sparsity
        for layer in range(LAYERS):
            assert torch.equal(trace.pattern(layer).sum(0), stats[layer].counts.long())


@pytest.mark.parametrize("name", ["llama sparse", "opt"])
def test_nan_counts_as_active(name: str) -> None:
    model = dense_or_sparse(name)
    gate = getattr(ffns_of(model, MODELS[name][2])[-1], MODELS[name][2])
    with torch.no_grad():
        gate.weight[5] = float("nan")
    assert record(model, token_ids()).pattern(LAYERS - 1)[:, 5].all()


def test_16_bit_models_and_32_bit_ids() -> None:
    model = dense_or_sparse("llama sparse").bfloat16()
    assert 0 < record(model, token_ids().int()).summary()[0].mean < F


@each_model
def test_the_model_is_as_it_was(name: str) -> None:
    model, ids = dense_or_sparse(name), token_ids()
    model(ids)  # leaves attributes of its own
    model.train()
    ffns_of(model, MODELS[name][2])[0].eval()  # a module with a mode of its own
    for module in model.modules():
        if isinstance(module, SparseFFNBase):
            module.track_counts, module.backend = True, "reference"
    modules = {path: (module, module.training, set(vars(module))) for path, module in model.named_modules()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def check() -> None:
        now = {path: (module, module.training, set(vars(module))) for path, module in model.named_modules()}
        assert now == modules
        assert hooks_of(model) == 0
        assert list(model.state_dict()) == list(weights)
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
        for module in model.modules():
            if isinstance(module, SparseFFNBase):
                assert module.track_counts and module.backend == "reference" and not module.tokens_seen

    record(model, ids)
    check()
    assert torch.is_grad_enabled()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with pytest.raises(ZeroDivisionError):
        record(model, ids, batch_size=2, progress=lambda done, total: 1 // 0)
    check()

    attention = [module for path, module in model.named_modules() if path.endswith("self_attn")]
    failing = attention[-1].register_forward_pre_hook(lambda module, args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        record(model, ids)
    failing.remove()
    check()


def test_ffns_that_are_not_relu_are_left_out_and_named() -> None:
    model = dense_or_sparse("llama")
    model.model.layers[0].mlp.act_fn = nn.SiLU()
    trace = record(model, token_ids())
    assert trace.names == ["layers.1.mlp"]
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp \(silu: call relufy_ first\) and 1 more"):
        record(model, token_ids())


@pytest.mark.parametrize("name", ["llama", "llama sparsified", "nemotron sparsified", "opt sparsified"])
def test_adapters_are_in_the_trace(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    model, ids = dense_or_sparse(name), token_ids()
    plain = record(model, ids)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=[MODELS[name][2]], init_lora_weights=False))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, p in adapted.named_parameters():
            if "lora_" in path:
                p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    trace = record(adapted, ids)
    merged = record(adapted.merge_and_unload(), ids)
    assert trace.hidden_sizes == [F] * LAYERS
    for layer in range(LAYERS):
        assert torch.equal(trace.pattern(layer), merged.pattern(layer))
        assert not torch.equal(trace.pattern(layer), plain.pattern(layer))


def test_an_ffn_that_its_block_runs() -> None:
    """Its counts and mode stay, a hook on fc1 acts, and an activation that may not be ReLU any more is refused."""
    model, ids = dense_or_sparse("opt sparsified").train(), token_ids()
    ffns = [ffn for _, ffn in sparse_ffns(model)]
    for ffn in ffns:
        ffn.track_counts = True
    plain = record(model, ids)
    assert all(ffn.training and ffn.track_counts and not ffn.tokens_seen for ffn in ffns)
    assert all(ffn.why_called() is None for ffn in ffns)
    last = model.model.decoder.layers[-1]
    with last.fc1.register_forward_hook(lambda module, args, z: -z):
        negated = record(model, ids)
    assert torch.equal(negated.pattern(0), plain.pattern(0))
    assert torch.equal(negated.pattern(1), ~plain.pattern(1))
    last.activation_fn = nn.SiLU()
    with pytest.raises(ValueError, match=r"layers\.1 cannot be recorded: activation_fn is another one"):
        record(model, ids)


def test_an_ffn_that_not_every_token_passes_is_refused() -> None:
    model = dense_or_sparse("llama sparse")
    model.model.layers[1].mlp = model.model.layers[0].mlp  # one FFN for both layers
    with pytest.raises(ValueError, match="computed 120 tokens, the model 60"):
        record(model, token_ids())


def test_bad_input_is_refused() -> None:
    model, ids = dense_or_sparse("llama sparse"), token_ids()
    bad = [(other, "input_ids must be integers") for other in (ids[0], ids[:0], ids[:, :0], ids.double())]
    bad += [
        (ids + (VOCAB - ids.max()), "token 300 is not in the model's vocabulary, which ends at 299"),
        (ids - ids.min() - 1, "token -1 "),
        (token_ids(1, 65), "sequences of 65 tokens exceed the model's context of 64"),
    ]
    for input_ids, message in bad:
        with pytest.raises(ValueError, match=message):
            record(model, input_ids)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        record(model, ids, batch_size=0)
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        record(nn.Linear(2, 2), ids)


def test_a_text_is_recorded_in_sequences_of_the_context(tmp_path: Path) -> None:
    path, model, tokenizer = tmp_path / "text.txt", dense_or_sparse("llama sparse"), train_bpe([TEXT], VOCAB)
    path.write_text(TEXT)
    whole, some = record_text(model, tokenizer, path), record_text(model, tokenizer, path, tokens=30, length=8)
    assert some.tokens == 24
    ids = torch.tensor(tokenizer.encode(TEXT))
    assert torch.equal(whole.pattern(1)[:64], record(model, ids[None, :64]).pattern(1))
    for how, message in (
        ({"length": 65}, "exceed the model's context of 64"),
        ({"length": 40, "tokens": 20}, "20 tokens hold no sequence of 40"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            record_text(model, tokenizer, path, **how)


def test_width_is_limited_by_16_bits() -> None:
    def model(width: int) -> Any:
        config = {**TINY, "hidden_size": 8, "num_hidden_layers": 1}
        return AutoModelForCausalLM.from_config(LlamaSparseReluConfig(**{**config, "intermediate_size": width}))

    with pytest.raises(ValueError, match="65,536 neurons; a trace holds at most 65,535"):
        record(model(MAX_WIDTH + 1), token_ids(1, 2))
    widest = model(MAX_WIDTH)
    with torch.no_grad():
        widest.model.layers[0].mlp.gate_proj.weight.fill_(float("nan"))
    trace = record(widest, token_ids(1, 2))
    assert trace.counts[0].tolist() == [MAX_WIDTH] * 2
    assert trace.pattern(0).all()


# -- numbers ------------------------------------------------------------------------------------------------


def test_summary_by_hand() -> None:
    pattern = np.zeros((100, 20), dtype=bool)
    pattern[:, 0] = True  # every token
    pattern[:50, 1] = True
    pattern[0, :10] = True  # the first token wakes ten
    (row,) = named_trace_of(pattern).summary()
    assert row.layer == "layers.0.mlp"
    assert row.mean == pytest.approx((100 + 50 + 8) / 100)
    assert row.p99 == np.percentile([10] + [2] * 49 + [1] * 50, 99)
    assert row.max == 10
    assert row.dead == 0.5
    assert row.top_tenth == pytest.approx(150 / 158)
    silent = named_trace_of(np.zeros((2, 3), dtype=bool)).summary()[0]
    assert (silent.mean, silent.max, silent.dead, silent.top_tenth) == (0, 0, 1, 0)
