"""Sparse models in transformers, and the conversion of existing ones."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

import twell
from twell.hf import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.hf.counts import NeuronCounts
from twell.hf.loading import load_causal_lm
from twell.nn import SparseFFNBase, sparse_ffns
from twell.ops import functional

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SPARSE_CONFIGS = [LlamaSparseReluConfig, Qwen2SparseReluConfig]
each_type = pytest.mark.parametrize("config_class", SPARSE_CONFIGS, ids=lambda c: c.model_type)
each_kind = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def sparse_model(config_class: type = LlamaSparseReluConfig, l1: float = 0.01, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**TINY | {"sparsity_l1_coeff": l1} | changes))
    with torch.no_grad():  # larger weights than at initialisation, so that L1 and its gradient weigh something
        for p in model.parameters():
            p.mul_(3 if p.dim() == 2 else 1)
    return model


def token_ids(batch: int = 4, length: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(1, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------------------------
# Registration
# ---------------------------------------------------------------------------------------------------------

IMPORTS = """
import twell; assert "transformers" not in sys.modules; from transformers import AutoModelForCausalLM
from transformers import AutoModelForCausalLM; import twell
import twell; from transformers import Trainer, AutoModelForCausalLM
import transformers, twell; from twell.hf import models; from transformers import AutoModelForCausalLM
"""
# Each line in a process of its own, forked after the slow imports.
IN_EVERY_ORDER = """
import os, sys, accelerate, torch._dynamo
for line in sys.argv[2].strip().splitlines():
    if os.fork() == 0:
        exec(line)
        print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__, flush=True)
        os._exit(0)
    os.wait()
"""


def test_import_twell_makes_the_types_known_in_any_order_and_imports_no_transformers(tmp_path: Path) -> None:
    sparse_model().save_pretrained(tmp_path)
    command = [sys.executable, "-c", IN_EVERY_ORDER, str(tmp_path), IMPORTS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == 4 * "LlamaSparseReluForCausalLM\n", result.stderr


def test_auto_config_makes_the_real_configuration() -> None:
    config = AutoConfig.for_model("llama_sparse_relu", **TINY, sparsity_l1_coeff=0.5)
    assert type(config) is LlamaSparseReluConfig
    assert config.sparsity_l1_coeff == 0.5


# ---------------------------------------------------------------------------------------------------------
# Configurations and checkpoints
# ---------------------------------------------------------------------------------------------------------


@each_type
def test_configuration_keeps_known_and_unknown_fields(config_class: type, tmp_path: Path) -> None:
    fields = {
        "sparsity_l1_coeff": 2e-5,
        "sparsity_gated_mlp": False,
        "sparsity_new_intermediate_size": 64,
        "sparsity_use_hybrid_kernel": True,
        "sparsity_l0_cutoff": 50,
        "sparsity_start_warmup_step": 10,
        "sparsity_end_warmup_step": 20,
        "sparsity_reinitialize": True,
        "sparsity_do_track": True,
        "sparsity_tokens_until_dead": 1000,
        "sparsity_mlp_execution_logic": "auto",
        "sparsity_baseline_run": False,
        "sparsity_of_tomorrow": [1, 2],
    }
    config_class(**TINY, **fields).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is config_class
    assert {name: getattr(loaded, name) for name in fields} == fields


def test_a_checkpoint_in_the_released_form_loads(tmp_path: Path) -> None:
    dense = AutoModelForCausalLM.from_config(
        LlamaConfig(**TINY, hidden_act="relu", rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    ).bfloat16()
    weights = {n: t.clone() for n, t in dense.state_dict().items() if n != "lm_head.weight"}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {
        **TINY,
        "architectures": ["LlamaSparseReluForCausalLM"],
        "model_type": "llama_sparse_relu",
        "hidden_act": "silu",  # the released configurations say so; the FFN is ReLU all the same
        "rope_theta": 1e5,
        "torch_dtype": "bfloat16",
        "sparsity_l1_coeff": 2e-5,
        "sparsity_gated_mlp": True,
        "sparsity_reinitialize": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 1e5
    assert {n for n, _ in model.named_parameters()} == set(weights)
    assert all(torch.equal(model.state_dict()[n], w) for n, w in weights.items())  # not reinitialised
    ids = token_ids()
    torch.testing.assert_close(model.eval()(ids).logits, dense.eval()(ids).logits, rtol=0.05, atol=0.02)


@each_type
@each_kind
def test_save_and_load_bit_for_bit(config_class: type, gated: bool, tmp_path: Path) -> None:
    model = sparse_model(config_class, sparsity_gated_mlp=gated, sparsity_new_intermediate_size=80).eval()
    assert model.model.layers[0].mlp.up_proj.out_features == 80
    assert hasattr(model.model.layers[0].mlp, "gate_proj") == gated
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.num_hidden_layers == loaded.model.config.num_hidden_layers == 3
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert torch.equal(loaded(token_ids()).logits, model(token_ids()).logits)
    for _, ffn in sparse_ffns(loaded):
        assert int(ffn.tokens_seen) == int(ffn.neuron_counts.abs().sum()) == 0
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(model.model)
    assert torch.equal(base(token_ids()).last_hidden_state, model.model(token_ids()).last_hidden_state)
    ids = token_ids(2, 5)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@pytest.mark.parametrize("kind", ["sparse type", "commands"])
def test_a_checkpoint_that_lacks_weights_is_refused(kind: str, tmp_path: Path) -> None:
    """Of the sparse types by every way to load them, of other models by the commands' loader."""
    model = sparse_model() if kind == "sparse type" else dense_model("llama")
    model.save_pretrained(tmp_path)
    load: Callable[[Path], Any] = load_causal_lm if kind == "commands" else AutoModelForCausalLM.from_pretrained
    assert load(tmp_path).config.model_type == model.config.model_type
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in weights.items() if ".mlp." not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    loads = [load] if kind == "commands" else [load, type(model).from_pretrained, type(model.model).from_pretrained]
    for load in loads:
        names = r"layers\.0\.mlp\.down_proj\.weight, .* and 4 more"
        with pytest.raises(ValueError, match=rf"lacks 9 of its model's weights: (model\.)?{names}"):
            load(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------


def plain_l1(model: Any, ids: Tensor, counted: Tensor) -> Tensor:
    """The paper's formula, from the inputs the FFNs really get."""
    terms = []

    def record(mlp: nn.Module, args: tuple) -> None:
        x = args[0]
        gated = hasattr(mlp, "gate_proj")
        h = torch.relu(mlp.gate_proj(x)) * mlp.up_proj(x) if gated else torch.relu(mlp.up_proj(x))
        terms.append(h.abs().sum(-1)[counted].mean())

    hooks = [layer.mlp.register_forward_pre_hook(record) for layer in model.model.layers]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(terms).mean()


@each_type
@each_kind
def test_loss_is_cross_entropy_plus_l1(config_class: type, gated: bool) -> None:
    model = sparse_model(config_class, l1=0.02, sparsity_gated_mlp=gated)
    ids = token_ids()
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1] = -100
    out = model(ids, labels=labels)
    counted = nn.functional.pad(labels[:, 1:] != -100, (0, 1))  # the tokens that predict a label
    torch.testing.assert_close(out.l1_loss, plain_l1(model, ids, counted))
    torch.testing.assert_close(out.loss, out.ce_loss + 0.02 * out.l1_loss)
    logits = model.eval()(ids).logits
    ce = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.ce_loss, ce)
    assert torch.equal(out.logits, logits)
    assert [int(s.tokens) for s in out.sparsity] == [int(counted.sum())] * 3


def test_statistics_without_labels_leave_out_padding() -> None:
    model, ids = sparse_model().eval(), token_ids()
    mask = torch.ones_like(ids)
    mask[2, 6:] = 0
    out = model(ids, attention_mask=mask, output_sparsity=True)
    assert out.loss is None
    assert [int(s.tokens) for s in out.sparsity] == [36] * 3
    assert not hasattr(model(ids, attention_mask=mask), "sparsity")


def test_accumulated_micro_batches_give_the_gradient_of_the_whole() -> None:
    model = sparse_model(l1=0.1).double()
    ids = token_ids(6)
    labels = ids.clone()
    labels[0, 2:] = labels[3] = -100  # unequal numbers of tokens
    items = (labels[:, 1:] != -100).sum()
    whole = model(ids, labels=labels, num_items_in_batch=items)
    whole.loss.backward()
    expected = gradients(model)
    for sizes in ([3, 3], [1, 5], [2, 1, 3]):
        model.zero_grad()
        losses = [
            model(i, labels=lab, num_items_in_batch=items).loss
            for i, lab in zip(ids.split(sizes), labels.split(sizes), strict=True)
        ]
        sum(losses).backward()
        torch.testing.assert_close(sum(losses), whole.loss)
        torch.testing.assert_close(gradients(model), expected)


def trainer_step(batch: int, accumulation: int, folder: Path) -> tuple[Any, Any]:
    """The model before and after one SGD step on four rows of unequal numbers of labels."""
    model = sparse_model(l1=0.1).double()
    before = copy.deepcopy(model)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=rows_of_unequal_length()).train()
    return before, model


def rows_of_unequal_length() -> list[dict[str, Tensor]]:
    rows = [{"input_ids": row, "labels": row.clone()} for row in token_ids(4)]
    for row, length in zip(rows, (10, 4, 7, 2), strict=True):
        row["labels"][length:] = -100
    return rows


def test_trainer_step_does_not_depend_on_accumulation(tmp_path: Path) -> None:
    before, whole = trainer_step(4, 1, tmp_path)
    for batch, accumulation in ((2, 2), (1, 4)):
        _, accumulated = trainer_step(batch, accumulation, tmp_path)
        torch.testing.assert_close(accumulated.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-11)

    rows = rows_of_unequal_length()
    labels = torch.stack([row["labels"] for row in rows])
    before(torch.stack([row["input_ids"] for row in rows]), labels=labels).loss.backward()
    # Later versions of the Trainer divide by the labels predicted, earlier ones by all labels: CE and L1 alike.
    shifted, unshifted = (labels[:, 1:] != -100).sum(), (labels != -100).sum()
    name = "model.layers.1.mlp.gate_proj.weight"
    p, stepped = before.get_parameter(name), whole.get_parameter(name)
    assert any(
        torch.allclose(stepped, p - 0.1 * p.grad * scale, rtol=1e-9, atol=1e-11) for scale in (1, shifted / unshifted)
    )


@each_type
def test_gradient_checkpointing_changes_nothing_and_counts_once(config_class: type) -> None:
    model = sparse_model(config_class, l1=0.1).double().train()
    ids = token_ids()
    plain = model(ids, labels=ids)
    plain.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    checkpointed = model(ids, labels=ids, use_cache=False)
    checkpointed.loss.backward()
    torch.testing.assert_close(gradients(model), expected)
    for a, b in zip(plain.sparsity, checkpointed.sparsity, strict=True):
        assert torch.equal(a.counts, b.counts)
    assert len(checkpointed.sparsity) == 3


def kept_bytes(model: Any, ids: Tensor) -> int:
    """Of what a training forward keeps besides parameters, every storage once."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(ids, labels=ids).loss
    del loss
    return sum(kept.values())


@pytest.mark.parametrize(
    ("config_class", "how"),
    [
        *itertools.product((LlamaSparseReluConfig, Qwen2SparseReluConfig), ("eager", "items")),
        (LlamaSparseReluConfig, "compiled"),
    ],
)
def test_saving_memory_changes_no_gradient(config_class: type, how: str) -> None:
    layers = 1 if how == "compiled" else 3
    model, ids = sparse_model(config_class, vocab_size=2000, num_hidden_layers=layers), token_ids()
    labels = ids.masked_fill(ids % 5 == 0, -100)
    options: dict[str, Any] = {"num_items_in_batch": torch.tensor(50)} if how == "items" else {}
    first = model(ids, labels=labels, **options)
    first.loss.backward()
    expected, before = gradients(model), kept_bytes(model, ids)
    model.zero_grad()
    model.save_memory()
    assert kept_bytes(model, ids) < 0.5 * before
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    out = forward(ids, labels=labels, **options)
    assert out.logits is None and out.past_key_values is None
    torch.testing.assert_close((out.ce_loss, out.l1_loss), (first.ce_loss, first.l1_loss))
    torch.testing.assert_close([s.counts for s in out.sparsity], [s.counts for s in first.sparsity])
    out.loss.backward()
    torch.testing.assert_close(gradients(model), expected)
    assert model.eval()(ids, labels=labels).logits is not None
    model.save_memory(False)
    assert model.train()(ids, labels=labels).logits is not None


def test_the_loss_in_chunks_is_not_rounded_to_bf16() -> None:
    """torch 2.13 adds losses up in the dtype of the weights: of 1,600 tokens that is 2 % off."""
    model, ids = sparse_model(vocab_size=2000), torch.randint(2000, (50, 32))
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(ids, labels=ids)
        model.save_memory()
        saved = model(ids, labels=ids)
    assert saved.ce_loss.dtype == torch.float32
    torch.testing.assert_close(saved.ce_loss, plain.ce_loss, rtol=5e-4, atol=0)


class LigerLoss:
    """Called as Liger-Kernel's."""

    def __init__(self, *, ignore_index: int, reduction: str, accum_dtype: torch.dtype) -> None:
        self.options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}

    def __call__(self, weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden @ weight.T, labels, **self.options)


def test_older_torch_takes_the_loss_from_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.functional, "linear_cross_entropy")
    liger = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss=LigerLoss)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.SimpleNamespace(transformers=liger))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    model, ids = sparse_model(num_hidden_layers=1), token_ids()
    expected = model(ids, labels=ids).loss
    model.save_memory()
    torch._dynamo.reset()
    for forward in (model, torch.compile(model, backend="aot_eager")):
        torch.testing.assert_close(forward(ids, labels=ids).loss, expected)


def test_saving_memory_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse_model()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="lm_head is Sequential"):
        model.save_memory()
    monkeypatch.delattr(nn.functional, "linear_cross_entropy")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(RuntimeError, match=r"torch 2\.13, or pip install liger-kernel"):
        model.save_memory()


def test_reentrant_checkpointing_is_refused() -> None:
    model, ids = sparse_model().train(), token_ids()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(ids, labels=ids, use_cache=False)
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:  # past both models, as wrappers do it
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant"):
        model(ids, labels=ids, use_cache=False)


def test_a_trainer_that_keeps_labels_back_is_refused(tmp_path: Path) -> None:
    """The loss would have no L1. Without L1, or where nothing is trained, labels may be missing."""
    model = sparse_model(l1=0.1)
    common: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none"}
    smoothing = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, **common)
    loss = {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()}
    for arguments, how in ((smoothing, {}), (TrainingArguments(str(tmp_path), **common), loss)):
        trainer = Trainer(model=model, args=arguments, train_dataset=rows_of_unequal_length(), **how)
        with pytest.raises(
            ValueError, match=r"sparsity_l1_coeff is 0\.1.*label_smoothing_factor and compute_loss_func"
        ):
            trainer.train()
    ids = token_ids()
    assert model.train()(ids, output_sparsity=True).sparsity is not None
    with torch.no_grad():
        model(ids)
    model.eval()(ids)
    model.config.sparsity_l1_coeff = 0.0
    trainer.train()


def test_threads_have_losses_of_their_own() -> None:
    model = sparse_model(l1=0.1).eval()
    batches = [token_ids(seed=1), token_ids(2, 7, seed=2)]
    expected = [model(ids, labels=ids) for ids in batches]
    meeting = threading.Barrier(2, timeout=20)

    def meet(*_: Any) -> None:
        meeting.wait()

    for layer in model.model.layers:  # both are within the layer before either computes its FFN
        layer.mlp.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda ids: model(ids, labels=ids), batches))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.l1_loss, other.l1_loss) and torch.equal(one.loss, other.loss)
        assert [int(s.tokens) for s in one.sparsity] == [int(s.tokens) for s in other.sparsity]


def test_compiles_without_a_break() -> None:
    model, ids = sparse_model(num_hidden_layers=1), token_ids()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ThreadPoolExecutor(1) as fresh:  # a thread in which no model has run yet
        _, out = (fresh.submit(compiled, ids, labels=ids).result() for _ in range(2))
    torch.testing.assert_close(out.loss, model(ids, labels=ids).loss)
    out.loss.backward()
    assert model.model.layers[0].mlp.gate_proj.weight.grad is not None


# ---------------------------------------------------------------------------------------------------------
# sparsify_ and desparsify_
# ---------------------------------------------------------------------------------------------------------

OPT = {"hidden_size": 32, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61}
RELU_MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**TINY, hidden_act="relu"),
    "llama with bias": lambda: LlamaConfig(**TINY, hidden_act="relu", mlp_bias=True),
    "mistral": lambda: MistralConfig(**TINY, hidden_act="relu"),
    "qwen2": lambda: Qwen2Config(**TINY, hidden_act="relu"),
    "qwen3": lambda: Qwen3Config(**TINY, hidden_act="relu", head_dim=8),
    "gemma": lambda: GemmaConfig(**TINY, hidden_act="relu", hidden_activation="relu", head_dim=8),
    "nemotron": lambda: NemotronConfig(**TINY),
    "opt": lambda: OPTConfig(**OPT, word_embed_proj_dim=32),
}


def dense_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(RELU_MODELS[name]()).eval()


@pytest.mark.parametrize("name", RELU_MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparsify_keeps_the_function_and_desparsify_is_exact(name: str, dtype: torch.dtype) -> None:
    model = dense_model(name).to(dtype)
    ids = token_ids()
    before, keys, classes = model(ids).logits, list(model.state_dict()), [type(m) for m in model.modules()]
    report = twell.sparsify_(model)
    assert len(report.changed) == 3 and not report.skipped
    assert list(model.state_dict()) == keys
    wide = before.double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (model(ids).logits.double() - wide).norm() <= tolerance * wide.norm()
    again = twell.sparsify_(model)
    assert [row.why for row in again.rows] == ["already sparse"] * 3
    assert len(twell.desparsify_(model).changed) == 3
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["llama", "nemotron", "opt"])
def test_sparsified_models_run_the_sparse_operation_and_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model(name).double()
    ids = token_ids()
    model(ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    twell.sparsify_(model)
    calls = count_calls(monkeypatch)
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 3
    torch.testing.assert_close(gradients(model), expected)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has an element for each sparse FFN that has run since."""
    calls: list[int] = []
    run = functional.run
    monkeypatch.setattr(functional, "run", lambda *a, **k: (calls.append(1), run(*a, **k))[1])
    return calls


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_of_a_sparsified_model_is_its_own(name: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model(name)
    twell.sparsify_(model)
    twin = make(model)
    ids = token_ids()
    calls = count_calls(monkeypatch)
    assert torch.equal(twin(ids).logits, model(ids).logits)
    assert len(calls) == 6
    before = model(ids).logits
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(model(ids).logits, before)
    assert not twin(ids).logits.any()
    twell.desparsify_(twin)
    assert all(ffn.why_called() is None for _, ffn in sparse_ffns(model)) and not list(sparse_ffns(twin))


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_check_of_sparsify_is_no_tokens_to_plan_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(SparseFFNBase, "_look_at", lambda self, x: looks.append(x))
    model = dense_model(name)
    twell.sparsify_(model)
    assert not looks and all(ffn._plans_itself for _, ffn in sparse_ffns(model))
    with torch.no_grad():
        model(token_ids())
    assert len(looks) == 3


def test_opt_has_what_other_sparse_models_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, counts, freezing; modes and devices reach its FFNs though they are no submodules."""
    model, ids = dense_model("opt"), token_ids()
    expected = model(ids).logits
    counts = NeuronCounts(fired=[torch.full((96,), 2) for _ in range(3)], tokens=1000)
    report = twell.sparsify_(model, counts)
    ffns = dict(sparse_ffns(model))
    assert list(ffns) == [f"model.decoder.layers.{i}" for i in range(3)] == [row.layer for row in report.rows]
    assert all(row.plan == repr(ffns[row.layer].plan) for row in report.rows)
    assert "96 neurons" in repr(model)

    for ffn in ffns.values():
        ffn.track_counts = True
    calls = count_calls(monkeypatch)
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(calls) == 3 and {int(ffn.tokens_seen) for ffn in ffns.values()} == {ids.numel()}
    fused = [ffn.neuron_counts.clone() for ffn in ffns.values()]
    hooks = [layer.fc2.register_forward_hook(lambda *_: None) for layer in model.model.decoder.layers]
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(calls) == 3  # called, and counted all the same
    for ffn, once, hook in zip(ffns.values(), fused, hooks, strict=True):
        assert torch.equal(ffn.neuron_counts, 2 * once)
        ffn.track_counts = False
        hook.remove()

    assert twell.freeze_(model).layers == 3
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected)
    model.train()
    assert all(ffn.frozen is None and ffn.training for ffn in ffns.values())
    model.eval().to("meta")
    assert {ffn.neuron_counts.device.type for ffn in ffns.values()} == {"meta"}


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_sparsified_layers_compile_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    model: Any = dense_model(name)
    twell.sparsify_(model)
    if name == "llama":
        block = model.model.layers[0].mlp
    else:
        layer = model.model.decoder.layers[0]
        block = nn.Sequential(layer.fc1, layer.activation_fn, layer.fc2)
    x = torch.randn(5, 32)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))


def test_what_is_not_relu_is_skipped_with_the_reason() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).eval()
    before = model(token_ids()).logits
    report = twell.sparsify_(model)
    assert [row.why for row in report.rows] == ["silu: call relufy_ first"] * 3
    assert {row.kind for row in report.rows} == {"left alone"}
    assert str(report).splitlines()[1] == "model.layers.0.mlp  LlamaMLP  skipped: silu: call relufy_ first"
    assert torch.equal(model(token_ids()).logits, before)


def test_a_chosen_backend_of_a_sparse_type_stays() -> None:
    """However often its layers are dense in between."""
    model = sparse_model()
    chosen = ["cpu", "reference", "auto"]
    for (_, ffn), backend in zip(sparse_ffns(model), chosen, strict=True):
        ffn.backend = backend
    for _ in range(3):
        rows = twell.sparsify_(model).rows
        assert [row.kind for row in rows] == ["sparse", "left alone", "sparse"]
        assert rows[1].why == "backend='reference' was chosen for it"
        assert [ffn.backend for _, ffn in sparse_ffns(model)] == chosen
        twell.desparsify_(model)
        twell.desparsify_(model)
        assert {ffn.backend for _, ffn in sparse_ffns(model)} == {"reference"}
    assert [row.became for row in twell.desparsify_(sparse_model()).rows] == ["GatedSparseMLP, run densely"] * 3
    model.model.layers[2].mlp.backend = "cpu"  # chosen meanwhile
    twell.desparsify_(model)
    twell.sparsify_(model)
    assert [layer.mlp.backend for layer in model.model.layers] == ["cpu", "reference", "cpu"]


def test_a_dense_twin_may_leave_the_layout_to_the_sparse_one() -> None:
    model = dense_model("llama")
    twell.sparsify_(model)
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    twell.desparsify_(twin, restore_layout=False)
    down: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    assert twin.get_parameter("model.layers.0.mlp.down_proj.weight") is down.weight
    assert down.weight.t().is_contiguous()
    torch.testing.assert_close(twin(token_ids()).logits, model(token_ids()).logits)
    twell.desparsify_(model)
    assert down.weight.is_contiguous()


# ---------------------------------------------------------------------------------------------------------
# relufy_
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "sparse"), [(LlamaConfig, LlamaSparseReluConfig), (Qwen2Config, Qwen2SparseReluConfig)]
)
def test_relufied_models_become_their_sparse_type(base: type, sparse: type, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(base(**TINY)).eval()
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    relu_twin = AutoModelForCausalLM.from_config(base(**TINY, hidden_act="relu")).eval()
    relu_twin.load_state_dict(weights)
    report = twell.relufy_(model, l1=0.03)
    assert [row.became for row in report.rows] == ["relu, l1 0.03"] * 3
    ids = token_ids()
    torch.testing.assert_close(model(ids).logits, relu_twin(ids).logits)
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, out.ce_loss + 0.03 * out.l1_loss)
    assert out.l1_loss > 0
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.config) is sparse
    assert loaded.config.sparsity_l1_coeff == 0.03
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


def test_other_models_get_relu_and_can_be_sparsified() -> None:
    model = AutoModelForCausalLM.from_config(MistralConfig(**TINY)).eval()
    report = twell.relufy_(model)
    assert all("without L1" in str(row.became) for row in report.rows)
    assert model.config.hidden_act == "relu"
    assert len(twell.sparsify_(model).changed) == 3


def test_relufy_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        twell.relufy_(nn.Linear(2, 2))
    for l1 in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="l1 must be a finite number of at least 0"):
            twell.relufy_(dense_model("llama"), l1=l1)
        with pytest.raises(ValueError, match="sparsity_l1_coeff must be a finite number of at least 0"):
            sparse_model(l1=l1)
