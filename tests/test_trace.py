"""Traces: recorded patterns against hooks by hand, files there and back, and a model left as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronConfig, OPTConfig

import twell
from small_models import LAYERS, TEXT, TINY, VOCAB, F, tiny_model, trace_of
from twell.hf import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.nn import SparseFFNBase, sparse_ffns
from twell.train.tokenizer import train_bpe
from twell.workbench import trace as trace_module
from twell.workbench.trace import MAX_WIDTH, Trace, record, record_text

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


def u16(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint16)


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
        assert trace.sequence_length == 12
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
    assert (whole.sequence_length, some.sequence_length, some.tokens) == (64, 8, 24)
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


# -- files --------------------------------------------------------------------------------------------------


def test_a_recorded_trace_survives_its_file(tmp_path: Path) -> None:
    trace = record(dense_or_sparse("llama sparse"), token_ids())
    path = tmp_path / "new" / "trace.npz"
    trace.save(path)
    trace.save(str(path))  # over an older one
    assert [p.name for p in path.parent.iterdir()] == ["trace.npz"]
    loaded = Trace.load(str(path))
    assert (loaded.hidden_sizes, loaded.names) == ([F] * LAYERS, ["layers.0.mlp", "layers.1.mlp"])
    assert loaded.sequence_length == 12
    assert repr(loaded) == repr(trace)
    assert loaded.summary() == trace.summary()
    for layer in range(LAYERS):
        assert loaded.counts[layer].dtype == loaded.neurons[layer].dtype == np.uint16
        assert torch.equal(loaded.pattern(layer), trace.pattern(layer))


def test_links_are_followed_and_devices_left_alone(tmp_path: Path) -> None:
    trace, pipe, link = trace_of(np.eye(4, dtype=bool)), tmp_path / "pipe", tmp_path / "link.npz"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="pipe is not a file"):
        trace.save(pipe)
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "real.npz")
    trace.save(link)
    assert link.is_symlink() and Trace.load(tmp_path / "real.npz").tokens == 4


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, trace = tmp_path / "trace.npz", trace_of(np.eye(3, dtype=bool))
    trace.save(path)
    before = path.read_bytes()

    def fail(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        trace.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_shared_layout_loads_and_is_written(tmp_path: Path) -> None:
    """Counts and neurons alone, as in traces that others recorded."""
    arrays = {"counts_0": u16(2, 0, 1), "neurons_0": u16(1, 3, 0), "counts_1": u16(0, 0, 0), "neurons_1": u16()}
    np.savez_compressed(tmp_path / "shared.npz", **arrays)
    trace = Trace.load(tmp_path / "shared.npz")
    assert (trace.hidden_sizes, trace.names, trace.sequence_length) == (None, None, None)
    assert trace.pattern(0, 5).int().tolist() == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert not trace.pattern(1, 5).any()
    assert [row.layer for row in trace.summary(5)] == ["0", "1"]
    for needs_width in (lambda: trace.pattern(0), trace.summary):
        with pytest.raises(ValueError, match="pass F"):
            needs_width()
    with pytest.raises(ValueError, match="names neuron 3 of a layer of 3"):
        trace.pattern(0, 3)
    trace.save(tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as file:
        assert sorted(file.files) == sorted(arrays)
        for name, array in arrays.items():
            assert file[name].dtype == np.uint16
            assert np.array_equal(file[name], array)


def test_summary_by_hand() -> None:
    pattern = np.zeros((100, 20), dtype=bool)
    pattern[:, 0] = True  # every token
    pattern[:50, 1] = True
    pattern[0, :10] = True  # the first token wakes ten
    (row,) = trace_of(pattern, hidden_sizes=[20], names=["ffn"]).summary()
    assert row.layer == "ffn"
    assert row.mean == pytest.approx((100 + 50 + 8) / 100)
    assert row.p99 == np.percentile([10] + [2] * 49 + [1] * 50, 99)
    assert row.max == 10
    assert row.dead == 0.5
    assert row.top_tenth == pytest.approx(150 / 158)
    silent = trace_of(np.zeros((2, 3), dtype=bool), hidden_sizes=[3]).summary()[0]
    assert (silent.mean, silent.max, silent.dead, silent.top_tenth) == (0, 0, 1, 0)


def test_the_width_of_a_recorded_layer_is_its_own() -> None:
    trace = trace_of(np.eye(3, 8, dtype=bool), hidden_sizes=[8])
    assert torch.equal(trace.pattern(0, 8), trace.pattern(0))
    with pytest.raises(ValueError, match="layer 0 has 8 neurons, not 9"):
        trace.pattern(0, 9)


GOOD: dict[str, Any] = {"counts_0": u16(2, 1), "neurons_0": u16(1, 3, 0), "counts_1": u16(0, 1), "neurons_1": u16(2)}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"neurons_0": u16(1, 3)}, "neurons_0 holds 2 indices, but counts_0 sums to 3"),
    ({"neurons_0": u16(3, 1, 0)}, "neurons_0 does not ascend within token 0"),
    ({"counts_0": u16(1, 2), "neurons_0": u16(1, 3, 3)}, "does not ascend within token 1"),
    ({"counts_1": np.array([0, 1])}, "counts_1 must be uint16 and flat, got int64 [2]"),
    ({"neurons_1": u16(2)[None]}, "neurons_1 must be uint16 and flat, got uint16 [1, 1]"),
    ({"counts_1": u16(0, 1, 0)}, "counts_1 holds 3 tokens, counts_0 2"),
    ({"neurons_1": None}, "neurons_1 is not a file in the archive"),
    ({"counts_0": None, "neurons_0": None}, "is not a trace: counts_0 is not a file"),
    ({"hidden_0": 3, "hidden_1": 4}, "neurons_0 names neuron 3 of a layer of 3"),
    ({"hidden_0": 1 << 16, "hidden_1": 4}, "a trace holds 1 to 65,535 neurons a layer, not 65,536"),
    ({"hidden_0": "wide", "hidden_1": 4}, "invalid literal"),
    ({"sequence_length": 3}, "2 tokens are not whole sequences of 3"),
    ({"counts_0": np.array([None])}, "Object arrays"),
    (dict.fromkeys(GOOD), "at least one layer"),
    ({f"{what}_{i}": u16() for what in ("counts", "neurons") for i in range(2)}, "holds 0 tokens"),
]


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    for changes, message in BAD:
        np.savez(path, **{key: value for key, value in {**GOOD, **changes}.items() if value is not None})
        with pytest.raises(ValueError) as error:
            Trace.load(path)
        assert str(path) in str(error.value)
        assert message in str(error.value)


def test_corrupted_files_are_refused_by_name(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "bad.npz"
    random = np.random.default_rng(0).random((200, 50)) < 0.3
    trace_of(random, hidden_sizes=[50]).save(whole)
    content = whole.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 3 : len(content) // 3 + 40] = bytes(40)
    array = tmp_path / "array.npy"
    np.save(array, random)
    for bad in (b"", b"no trace", content[:-30], content[: len(content) // 2], bytes(damaged), array.read_bytes()):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"bad\.npz"):
            Trace.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.npz does not exist"):
        Trace.load(tmp_path / "none.npz")


patterns = st.tuples(st.integers(1, 12), st.integers(1, 40)).flatmap(
    lambda shape: st.lists(hnp.arrays(np.bool_, shape), min_size=1, max_size=3)
)


@given(patterns, st.booleans())
def test_any_pattern_survives_its_file(tmp_path_factory: pytest.TempPathFactory, layers: Any, tell: bool) -> None:
    width = layers[0].shape[1]
    path = tmp_path_factory.getbasetemp() / "any.npz"
    trace_of(*layers, hidden_sizes=[width] * len(layers) if tell else None).save(path)
    loaded = Trace.load(path)
    assert loaded.layers == len(layers)
    for layer, pattern in enumerate(layers):
        assert np.array_equal(loaded.pattern(layer, None if tell else width).numpy(), pattern)
