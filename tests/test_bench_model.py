"""A real model, dense against sparse, on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from command_line import Twell
from twell import nn
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import SparseFFNBase
from twell.plan import Plan
from twell.train import recipes
from twell.workbench.bench import cases, ffn, model, timing

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "compare", functools.partial(timing.compare, min_repeats=1))
    for owner, name, value in ((timing, "ROUND_MS", 0.01), (timing, "ROUNDS", 1), (model, "GENERATE_ROUNDS", 1)):
        monkeypatch.setattr(owner, name, value)


def dense_llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_act": "relu"} | changes)).eval()


def ids_of(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(SHAPE["vocab_size"], (batch, length))


@pytest.mark.parametrize("is_sparse_type", [False, True])
def test_row_of_a_real_model(is_sparse_type: bool) -> None:
    torch.manual_seed(0)
    made = LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**SHAPE)).eval() if is_sparse_type else dense_llama()
    row = model.measure(model.real(made, "a model"), ids_of(), seconds=0, wants_layers=True)
    assert (row["model"], row["layers"], row["D"], row["F"], row["batch"], row["length"]) == (
        "a model",
        2,
        64,
        256,
        2,
        16,
    )
    assert row["difference"] < 1e-5
    assert row["speedup"] == pytest.approx(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], abs=2e-3)
    assert row["tokens_per_ms"]["sparse"] == pytest.approx(32 / row["sparse_ms"]["p50"], rel=1e-2)
    assert row["first_token_ms"]["dense"]["p50"] > 0
    assert row["joules_per_token"] == {"dense": None, "sparse": None} and row["joules_ratio"] is None
    weights = sum(p.numel() * 4 for p in dense_llama().parameters())
    for side in ("dense", "sparse"):
        assert row["memory"][side]["weights"] == pytest.approx(weights, rel=0.01)
        assert row["memory"][side]["pass"] > 32 * 64 * 4
        assert row["memory"][side]["frozen"] == 0
    held = {side: row["memory"][side]["held"] for side in ("dense", "sparse")}
    assert row["memory_ratio"] == pytest.approx(held["sparse"] / held["dense"], abs=1e-3)
    own = row["memory"]["sparse"]["weights"]
    most = own + 2 * (2 * 8 * 256 + 500)  # counts, and where a plan has each neuron
    assert own <= held["dense"] <= held["sparse"] < most
    assert row["frozen"] is False and "called_ms" not in row
    json.dumps(row)


def test_calls_of_a_real_model_and_its_generate() -> None:
    subject = model.real(dense_llama(), "m")
    row = model.measure(subject, ids_of(1, 4), seconds=0, called=True)
    assert list(row["called_ms"]) == list(row["host_us"]) == ["dense", "sparse"]
    assert row["speedup_called"] == pytest.approx(
        row["called_ms"]["dense"]["p50"] / row["called_ms"]["sparse"]["p50"], abs=2e-3
    )
    row = model.measure_generate(subject, ids_of(2, 8), 5, seconds=0)
    assert (row["bench"], row["batch"], row["length"], row["new_tokens"]) == ("generate", 2, 8, 5)
    assert list(row["called_ms"]) == ["dense", "sparse", "frozen"] and row["difference"] < 1e-5
    assert row["speedup_called_frozen"] > 0 and json.loads(json.dumps(row)) == row
    assert not any(ffn.frozen for _, ffn in nn.sparse_ffns(subject.sparse))  # as it was before


def test_a_models_sizes_share_its_weights_and_a_few_tokens_differ_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffn, "PLAN_TOKENS", 64)
    made = dense_llama(intermediate_size=256)
    subject = model.synthetic(made, "skew10", (2, 8), backend="auto")
    x = cases.make("skew10", 16 + 64, 64, 256, dtype=torch.float32).x
    seen: dict[int, list[torch.Tensor]] = {}

    def look(i: int, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(i, []).append(args[0])

    for i, layer in enumerate(subject.dense.model.layers):
        layer.mlp.gate_proj.register_forward_pre_hook(functools.partial(look, i))
    with torch.no_grad():
        for shape in ((1, 4), (1, 1), (2, 8)):
            subject.dense(ids_of(*shape), use_cache=False)
    assert [x.shape[:2] for x in seen[0]] == [(1, 4), (1, 1), (2, 8)]
    for i, first in enumerate((0, 64)):
        assert torch.equal(seen[i][0][0], x[first : first + 4]) and torch.equal(seen[i][1][0], x[first : first + 1])
        assert torch.equal(seen[i][2].flatten(0, 1), x[first : first + 16])


def test_opt_has_other_names_for_its_parts() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    made: Any = OPTForCausalLM(
        OPTConfig(
            hidden_size=32, ffn_dim=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=100,
            max_position_embeddings=64, word_embed_proj_dim=32,
        )
    ).eval()  # fmt: skip
    row = model.measure(model.real(made, "opt"), ids_of(), seconds=0)
    assert row["F"] == 128 and row["difference"] < 1e-5


def test_layers_are_timed_on_the_input_they_have_in_the_model() -> None:
    made = dense_llama()
    ids = ids_of()
    seen: list[torch.Tensor] = []
    hook = made.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        made(ids)
    hook.remove()
    gate = made.model.layers[1].mlp.gate_proj.weight
    expected = (torch.relu(seen[0] @ gate.T) != 0).sum().item() / ids.numel()
    layers = model.measure(model.real(made, "m"), ids, seconds=0, wants_layers=True)["ffns"]
    assert [layer["name"] for layer in layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert layers[1]["mean_active"] == pytest.approx(expected, abs=0.01) and layers[1]["tokens"] == ids.numel()
    assert all(layer["speedup"] > 0 and layer["graph"] is False for layer in layers)


@pytest.mark.gpu
def test_on_a_gpu_layers_are_timed_as_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model.real(dense_llama().to("cuda", torch.bfloat16), "m")
    sparse_ffns = [module for module in subject.sparse.modules() if isinstance(module, SparseFFNBase)]
    sparse_ffns[0].set_plan(Plan(n_neurons=256, hot=torch.arange(128), cap=64, min_tokens=1))  # the other runs densely
    replayed, seen = model.replayed, []

    def checked(runs: Sequence[Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
        replay = replayed(runs)
        seen.append(ffn.relative_error(replay(), runs[-1]().double()))
        return replay

    monkeypatch.setattr(model, "replayed", checked)
    row = model.measure(subject, ids_of(8, 64).cuda(), seconds=0, wants_layers=True)
    assert len(seen) == 4 and max(seen) < 1e-2  # both sides of two layers
    assert all(layer["graph"] is True and layer["speedup"] > 0 for layer in row["ffns"])


def test_both_sides_run_as_they_say() -> None:
    subject = model.real(dense_llama(), "m")
    assert not any(isinstance(m, SparseFFNBase) for m in subject.dense.modules())
    assert sum(isinstance(m, SparseFFNBase) for m in subject.sparse.modules()) == 2


def test_models_that_disagree_have_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, right = model.real(dense_llama(), "m"), nn.GatedSparseFFN._ffn
    monkeypatch.setattr(nn.GatedSparseFFN, "_ffn", lambda *args: 1.5 * right(*args))
    with pytest.raises(ffn.WrongResult, match="logits differ"):
        model.measure(subject, ids_of(), seconds=0)


def test_a_model_without_relu_is_refused() -> None:
    with pytest.raises(ValueError, match="no FFN that can run sparsely"):
        model.real(dense_llama(hidden_act="silu"), "m")


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    dense_llama().save_pretrained(path)
    words = {word: i for i, word in enumerate(["a", "b", "c", "?", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="<end>").save_pretrained(path)
    return path


def test_shapes_and_generate_of_a_model_of_random_weights(
    twell: Twell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 16, "intermediate_size": 64, "heads": 2, "vocab_size": 50}
    preset = dataclasses.replace(recipes.preset("tiny"), **small)
    monkeypatch.setattr(recipes, "preset", lambda name: preset)
    monkeypatch.setattr(timing, "host_us", lambda ways, **_: dict.fromkeys(ways, 1.0))
    monkeypatch.setattr(model, "PROMPT_TOKENS", 2)
    monkeypatch.setattr(model, "NEW_TOKENS", 2)
    out = tmp_path / "rows.jsonl"
    sizes = "--shape 1x1 --shape 2x3 --preset tiny --depth 1 -w skew10 --seconds 0 --generate --called --device cpu"
    result = twell("bench", "model", *sizes.split(), "--out", str(out), columns=160)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    shapes = [("model", 1, 1), ("model", 2, 3), ("generate", 1, 2)]
    assert [(r["bench"], r["batch"], r["length"]) for r in rows] == shapes
    assert all(r["layers"] == 1 and r["preset"] == "1 layers of tiny" for r in rows)
    for said in ("called", "model.generate: 1 layers of tiny", "1 x 2 + 2"):
        assert said in result.stdout


def test_rows_on_text(twell: Twell, folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "new" / "rows.jsonl"
    text.write_text("a b c d " * 40)
    how = ["--layers", "--shape", "1x8", "--shape", "2x16", "--device", "cpu", "--seconds", "0"]
    result = twell("bench", "model", str(folder), "--text", str(text), *how, "--out", str(out), columns=160)
    assert result.returncode == 0, result.stderr
    for said in ("2 x 16", "held", "model.layers.1.mlp: "):
        assert said in result.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["batch"], r["length"], r["case"]) for r in rows] == [(1, 8, "text"), (2, 16, "text")]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--shape 2by8", "--shape must be sequences x tokens, as 4x2048, got '2by8'"),
        ("--shape 0x8", "--shape must be sequences x tokens"),
        ("--depth 0", "--depth must be at least 1"),
        ("MODEL --generate", "too few for --generate"),
        ("MODEL --depth 3", "leave out MODEL"),
        ("MODEL --preset tiny", "leave out MODEL"),
        ("--text a.txt", "are for a real model"),
        ("MODEL --shape 1x65", "context is 64 tokens"),
        ("MODEL --text TEXT --shape 9x64", "has 4 tokens"),
    ],
)
def test_what_does_not_fit_is_said(twell: Twell, args: str, message: str, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c d")
    named = [{"MODEL": str(folder), "TEXT": str(text)}.get(arg, arg) for arg in args.split()]
    result = twell("bench", "model", *named, "--device", "cpu")
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
