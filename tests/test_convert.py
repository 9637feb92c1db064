"""``twell convert`` and ``twell train --from``: models saved and trained further, resumed; one line on bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from conftest import commands
from small_runs import mortal_runs
from twell.train import convert as converting
from twell.train import run as run_module
from twell.train.data import SAMPLE, read_texts
from twell.train.run import read_metrics, run
from twell.train.tokenizer import load_tokenizer, train_bpe
from twell.workbench.bench import rows as results

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 320,  # more than the tokenizer has, as in many checkpoints
}
SHORT = [
    "steps=6",
    "sequences_per_step=4",
    "micro_batch=2",
    "context=32",
    "log_every=1",
    "save_every=3",
    "eval_every=3",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(t[:2000] for t in list(read_texts(SAMPLE))[:6]))
    return path


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(read_texts(text), 300).save_pretrained(folder)
    return folder


def saved(model: Any, folder: Path, tokenizer: Path | None) -> str:
    model.save_pretrained(folder)
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return str(folder)


@pytest.fixture
def llama(tmp_path: Path, tokenizer: Path) -> str:
    """Grouped heads, tied embeddings, SiLU."""
    return saved(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), tmp_path / "llama", tokenizer)


@pytest.fixture
def qwen2(tmp_path: Path, tokenizer: Path) -> str:
    """Biases in attention, a head of its own, GELU."""
    config = Qwen2Config(**SHAPE, tie_word_embeddings=False, hidden_act="gelu")
    return saved(Qwen2ForCausalLM(config), tmp_path / "qwen2", tokenizer)


def twell(*args: object) -> Any:
    return CliRunner().invoke(commands(), [str(arg) for arg in args])


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


# -- without training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_relufied_models_are_saved_as_sparse_types(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name, out = request.getfixturevalue(kind), tmp_path / "out"
    result = twell("convert", name, "--relufy", "--out", out, "--l1", "1e-3")
    assert result.exit_code == 0 and "model.layers.1.mlp" in result.stdout and "train it" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == f"{kind}_sparse_relu" and model.config.sparsity_l1_coeff == 1e-3
    before, after = parameters(AutoModelForCausalLM.from_pretrained(name)), parameters(model)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert len(load_tokenizer(out)) == 300


def test_a_relu_model_becomes_the_sparse_type_and_computes_the_same(tmp_path: Path, tokenizer: Path) -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")).to(torch.bfloat16).eval()
    name = saved(dense, tmp_path / "relu", tokenizer)
    result = twell("convert", name, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "it computes the same as before" in result.stdout
    sparse = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert sparse.config.model_type == "llama_sparse_relu" and sparse.dtype == torch.bfloat16
    ids = torch.arange(20)[None]
    torch.testing.assert_close(sparse.float()(ids).logits, dense.float()(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_sparse_type_keeps_its_own(tmp_path: Path, tokenizer: Path) -> None:
    name = saved(MistralForCausalLM(MistralConfig(**SHAPE)), tmp_path / "mistral", tokenizer)
    assert "without L1" in twell("convert", name, "--relufy", "--out", tmp_path / "out").stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_act == "relu"


def test_a_look_writes_nothing(llama: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert "skipped: silu: call relufy_ first" in twell("convert", llama, "--check").stdout
    rows = json.loads(twell("convert", llama, "--check", "--relufy", "--json").stdout)
    assert [(row["was"], row["became"]) for row in rows] == [("silu", "relu, l1 0.0004")] * 2
    assert sorted(tmp_path.rglob("*")) == before


# -- with training ----------------------------------------------------------------------------------------


def test_defaults_go_with_the_steps_and_the_shape_is_the_models() -> None:
    recipe = converting.continued_recipe(Qwen2Config(**SHAPE, rope_parameters={"rope_theta": 1e6}), ["steps=200"])
    assert (recipe.hidden_size, recipe.intermediate_size, recipe.layers, recipe.heads) == (32, 64, 2, 4)
    assert (recipe.context, recipe.vocab_size, recipe.rope_theta) == (64, 320, 1e6)
    assert 0 < recipe.lr_warmup < 200 and recipe.save_every < 200 and recipe.target_active == 0.01
    fixed = [["l1=1e-3", "steps=200"], ["l1=1e-3", "l1_warmup_end=7"], ["l1=0"]]
    fixed_recipes = [converting.continued_recipe(Qwen2Config(**SHAPE), changes) for changes in fixed]
    assert [(r.target_neurons, r.l1_warmup_end) for r in fixed_recipes] == [(None, 100), (None, 7), (None, 0)]
    assert converting.continued_recipe(LlamaConfig(max_position_embeddings=1 << 17)).context == 2048


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_converted_model_trains_and_an_interrupted_run_goes_on(
    kind: str, text: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = request.getfixturevalue(kind)
    command = ["train", "--from", name, "--relufy", "--data", text, "lr=1e-2", *SHORT]
    through = twell(*command, "--out", tmp_path / "through", "--json")
    assert through.exit_code == 0, through.output
    summary = json.loads(through.stdout)
    facts = summary["conversion"]
    assert facts["loss_recovered"] == summary["validation_loss"] < facts["loss_after"]
    assert facts["loss_before"] != facts["loss_after"] and 0 < facts["active_after"] < 64 and summary["active_mean"] > 0

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "through/model")
    original: Any = AutoModelForCausalLM.from_pretrained(name)
    assert model.config.model_type == f"{kind}_sparse_relu" and model.config.sparsity_l1_coeff > 0
    assert {n: p.shape for n, p in parameters(model).items()} == {n: p.shape for n, p in parameters(original).items()}
    recipe, tok = converting.continued_recipe(original.config, SHORT), load_tokenizer(name)
    corpus = run_module.read_corpus(recipe, [text], [], tok, tmp_path, True, print)
    assert converting.validate(model, corpus.held_out, recipe)[0] == pytest.approx(facts["loss_recovered"], rel=1e-5)
    assert converting.validate(original, corpus.held_out, recipe)[0] == pytest.approx(facts["loss_before"], rel=1e-5)

    with mortal_runs(monkeypatch):
        killed = twell(*command, "--out", tmp_path / "killed")
    assert killed.exit_code != 0 and "to go on from checkpoint-3: twell train --resume" in killed.output
    shutil.rmtree(name)  # the original is not needed any more
    run(None, [], tmp_path / "killed", go_on=True, say=lambda line: None)
    resumed = json.loads((tmp_path / "killed/summary.json").read_text())
    assert resumed["conversion"]["loss_before"] == facts["loss_before"]
    assert resumed["validation_loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)
    losses = [
        [row["ce_loss"] for row in read_metrics(tmp_path / run) if "ce_loss" in row] for run in ("killed", "through")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_sparse_model_trains_on(llama: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What --relufy saved is what --from takes, with the same recipe fields."""
    twell("convert", llama, "--relufy", "--out", tmp_path / "sparse")
    monkeypatch.chdir(tmp_path)
    command = ["train", "--from", "sparse", "--data", text, "--out", tmp_path / "run", *SHORT]
    result = twell(*command, "steps=1", "l1=0.5")
    assert result.exit_code == 0, result.output
    assert "it was " in result.stdout and "right after" not in result.stdout
    facts = json.loads((tmp_path / "run/summary.json").read_text())["conversion"]
    assert facts["loss_before"] == facts["loss_after"] and facts["activation"] == "relu"
    assert facts["model"] == str(tmp_path / "sparse")  # wherever the run is resumed
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").config.sparsity_l1_coeff == 0.5
    assert "is not empty: resume the run there" in str(twell(*command).exception)
    for path in [tmp_path / "run/summary.json", *(tmp_path / "run").glob("checkpoint-*")]:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert "starting again at step 0" in twell("train", "--resume", "--out", tmp_path / "run").stdout
    again = json.loads((tmp_path / "run/summary.json").read_text())["conversion"]
    assert again["loss_recovered"] == pytest.approx(facts["loss_recovered"], rel=1e-6)


def test_adapters_train_on_a_sparse_model_and_leave_its_weights(
    llama: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    twell("convert", llama, "--relufy", "--out", tmp_path / "sparse")
    command = ["train", "--from", tmp_path / "sparse", "--data", text, "--lora", "4", "lr=3e-2", *SHORT]
    through = twell(*command, "--out", tmp_path / "through")
    assert through.exit_code == 0, through.output
    sparse: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "through/model")
    assert merged.config.sparsity_l1_coeff == sparse.config.sparsity_l1_coeff > 0  # though there was no L1
    assert all(
        row["loss"] == pytest.approx(row["ce_loss"]) for row in read_metrics(tmp_path / "through") if "l1" in row
    )
    before, after = sparse.state_dict(), merged.state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"} and before.keys() == after.keys()
    ids = torch.arange(20)[None]
    adapted = PeftModel.from_pretrained(sparse, tmp_path / "through/adapter")
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits)
    trained = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert f"parameters, {trained:,} of them train; 6 steps" in through.stdout
    summary = json.loads((tmp_path / "through/summary.json").read_text())
    assert summary["validation_loss"] < summary["conversion"]["loss_before"]

    with mortal_runs(monkeypatch):
        assert twell(*command, "--out", tmp_path / "killed").exit_code != 0
    shutil.rmtree(tmp_path / "sparse")  # which a checkpoint holds
    assert twell("train", "--resume", "--out", tmp_path / "killed").exit_code == 0
    resumed: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "killed/model")
    torch.testing.assert_close(resumed.state_dict(), after)


# -- bad input --------------------------------------------------------------------------------------------


def test_bad_input_ends_in_one_clear_line(llama: str, text: Path, tmp_path: Path, tokenizer: Path) -> None:
    relu = saved(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")), tmp_path / "relu", tokenizer)
    tied_config = LlamaConfig(**SHAPE, hidden_act="relu", tie_word_embeddings=True)
    tied = saved(LlamaForCausalLM(tied_config), tmp_path / "tied", tokenizer)
    mistral = saved(MistralForCausalLM(MistralConfig(**SHAPE)), tmp_path / "mistral", tokenizer)
    gpt2 = saved(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=320)), tmp_path / "g", tokenizer)
    bloom = saved(
        BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=320)), tmp_path / "b", tokenizer
    )
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    moe = saved(Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **experts)), tmp_path / "moe", tokenizer)
    mute = saved(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "mute", None)
    narrow = saved(LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": 280})), tmp_path / "narrow", tokenizer)
    lacking = saved(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")), tmp_path / "lacking", tokenizer)
    weights = load_file(f"{lacking}/model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, f"{lacking}/model.safetensors", metadata={"format": "pt"})
    out, full = tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "note").touch()
    train = ["--relufy", "--data", text, "--out", out]
    for args, message in (
        ([llama], "give either --out, or --check"),
        (
            [lacking, "--check"],
            r"lacks 1 of its model's weights: model\.layers\.1\.mlp\.down_proj\.weight\. They would",
        ),
        ([lacking, "--out", out], "lacks 1 of its model's weights"),
        ([tmp_path / "nowhere", "--check"], "nowhere is no folder of a model"),
        ([llama, "--check", "--out", out], "give either --out, or --check"),
        ([llama, "--out", out], "is silu: --relufy makes it ReLU"),
        ([relu, "--relufy", "--out", out], "is ReLU already: leave out --relufy"),
        (
            [gpt2, "--relufy", "--out", out],
            r"no feed-forward layer of .* \(gpt2\) can be converted: its Conv1D weights",
        ),
        ([bloom, "--relufy", "--out", out], "the configuration of bloom cannot say so of its"),
        (
            [moe, "--relufy", "--out", out],
            "the configuration of qwen2_moe cannot say so of its",
        ),
        ([mute, "--relufy", "--out", out], "the tokenizer of .*mute cannot be loaded"),
        ([narrow, "--relufy", "--out", out], "has 300 tokens, the model's vocabulary 280"),
        ([llama, "--relufy", "--out", full], "is not empty"),
        ([llama, "--relufy", "--out", out, "--l1", "-1"], "l1 must be a finite number"),
        (["train", "--from", mute, *train], "the tokenizer of .*mute cannot be loaded"),
        (["train", "--from", mistral, *train], "only llama and qwen2 train with L1"),
        (["train", "--from", llama, *train, "context=128"], "context 128 is longer than the model's, 64"),
        (["train", "--from", llama, *train, "hidden_size=64"], "a model keeps its shape"),
        (["train", "--from", llama, *train, "--data", tmp_path / "none.txt"], "does not exist"),
        (["train", "--from", relu, *train], "is ReLU already: leave out --relufy"),
        (["train", "--relufy", "--out", out], "--relufy is for --from"),
        (["train", "--from", llama, "--out", out], "is silu: --relufy makes it ReLU"),
        (["train", "--from", mistral, "--out", out], "is silu"),
        (["train", "--from", tmp_path / "nowhere", "--out", out], "nowhere is no folder of a model"),
        (["train", "--from", relu, "--out", full], "is not empty"),
        (["train", "--from", relu, "--out", out, "--preset", "tiny"], "--preset is not for --from"),
        (["train", "--from", relu, "--out", out, "--resume"], "--resume is not for --from"),
        (["train", "--from", relu, "--out", out, "layers=3"], "a model keeps its shape"),
        (
            ["train", "--from", relu, "--out", out, "--lora", "4", "--lora-modules", "c_fc"],
            "no linear layer is called c_fc",
        ),
        (
            ["train", "--from", tied, "--data", text, "--out", out, "--lora", "4", "--lora-modules", "lm_head"],
            "lm_head shares its weight with the embedding",
        ),
        (["train", "--from", relu, "--out", out, "--lora", "4", "restart_every=5"], "with --lora these do not train"),
        (["train", "--out", out, "--lora", "4"], "--lora is for --from"),
        (["train", "--from", relu, "--out", out, "--lora-modules", "q_proj"], "--lora-modules is for --lora"),
    ):
        result = twell(*(args if args[0] == "train" else ["convert", *args]))
        assert result.exit_code != 0, args
        with pytest.raises((ValueError, OSError), match=message) as raised:
            raise result.exception or AssertionError
        assert "\n" not in str(raised.value)
    assert not out.exists()


# -- the document -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["convert-tiny.jsonl", "convert-small.jsonl"])
def test_the_documents_table_is_of_the_rows(file: str) -> None:
    root = Path(__file__).parents[1]
    name = file.removesuffix(".jsonl")
    text = (root / "docs/converting.md").read_text().split(f"<!-- table {name} -->")[1].split("<!-- end -->")[0]
    rows = results.read([root / "results" / file])
    assert rows
    for row in rows:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['name']} |"))
        assert f"| {row['validation_loss']:.3f} |" in line
        assert "active_share" not in row or f"({row['active_share']:.1%})".replace("%", " %") in line
        facts = row.get("conversion", {})
        assert all(f"{facts[key]:.3f}" in line for key in ("loss_before", "loss_after") if facts)
