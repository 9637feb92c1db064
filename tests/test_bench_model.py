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
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM

from command_line import Twell
from short_benchmarks import fp8_kernels
from twell import nn
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import SparseFFNBase
from twell.plan import Plan
from twell.train import recipes
from twell.workbench.bench import cases, ffn, fp8, model, timing

__all__ = ["fp8_kernels"]  # a fixture
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
    ways = sum(field.endswith("_ms") for field in row["ffns"][0])
    assert len(seen) == 2 * ways and max(seen) < 1e-2  # all ways of two layers
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
    with pytest.raises(ValueError, match=r"no FFN that can run sparsely: nothing is sparse: .*silu"):
        model.real(dense_llama(hidden_act="silu"), "m")


# -- FP8 ---------------------------------------------------------------------------------------------------

IN_FP8 = ["dense", "sparse", "fp8", "fp8_weights", "sparse_fp8"]


def test_a_row_with_fp8(fp8_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "host_us", lambda ways, **_: dict.fromkeys(ways, 1.0))
    subject = model.synthetic(dense_llama(), "skew10", (2, 40), in_fp8=True)
    many, few = (model.measure(subject, ids_of(*shape), seconds=0, called=True) for shape in ((2, 40), (2, 8)))
    for row, ways in ((many, [way for way in IN_FP8 if way != "fp8_weights"]), (few, IN_FP8)):  # 64 tokens at most
        times = {way: row[f"{way}_ms"]["p50"] for way in ways}
        assert [way for way in IN_FP8 if f"{way}_ms" in row] == ways
        for field in ("called_ms", "host_us", "tokens_per_ms", "first_token_ms", "memory", "joules_per_token"):
            assert list(row[field]) == ways
        dense = min(times[way] for way in ways if way in fp8.NAMES)
        assert row["speedup_fp8"] == pytest.approx(dense / times["sparse_fp8"], abs=1e-3)
        assert row["speedup_over_fp8"] == pytest.approx(dense / times["sparse"], abs=1e-3)
        assert row["speedup_called_fp8"] > 0 and row["speedup_called_over_fp8"] > 0
        assert row["difference"] < 1e-5 and row["difference_fp8"] < 0.05
        assert list(row["error"]) == ways[2:] and max(row["error"].values()) < 0.05
        weights = {way: of["weights"] for way, of in row["memory"].items()}
        assert weights["fp8"] < 0.7 * weights["dense"]
    row = model.measure_generate(subject, ids_of(2, 4), 2, seconds=0)
    assert list(row["called_ms"]) == [*IN_FP8, "frozen"] and row["difference_fp8"] < 0.05
    assert row["speedup_called_fp8"] > 0 and row["speedup_called_over_fp8"] > 0


def test_a_real_model_with_fp8_and_its_layers(fp8_kernels: None) -> None:
    torch.manual_seed(0)
    made = LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**SHAPE)).eval()
    weights = [p.clone() for p in made.parameters()]
    subject = model.real(made, "m", in_fp8=True)
    assert all(torch.equal(p, w) for p, w in zip(made.parameters(), weights, strict=True))
    row = model.measure(subject, ids_of(), seconds=0, wants_layers=True)
    assert row["difference_fp8"] < 0.05 and "error" not in row  # no input of its FFNs is known beforehand
    for layer in row["ffns"]:
        assert [way for way in IN_FP8 if f"{way}_ms" in layer] == IN_FP8 and layer["speedup_fp8"] > 0


def test_where_fp8_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(model.real(dense_llama(), "m").models) == ["dense", "sparse"]  # a CPU
    monkeypatch.setattr(fp8, "applies", lambda *_: True)
    assert list(model.real(dense_llama(), "m").models) == IN_FP8[:4]  # a GPU without kernels for it
    assert list(model.real(dense_llama(), "m", in_fp8=False).models) == IN_FP8[:2]
    assert list(model.real(dense_llama(mlp_bias=True), "m").models) == IN_FP8[:2]
    with pytest.raises(ValueError, match="--fp8 needs FFNs of plain linears without biases"):
        model.real(dense_llama(mlp_bias=True), "m", in_fp8=True)


def test_ffns_in_fp8_are_compiled_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers: list[dict[str, Any]] = []

    def noted(call: Any, *, options: Any = None, **how: Any) -> Any:
        compilers.append(how | {"options": options})
        return original(call, **how, backend=counter)

    original, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(torch, "compile", noted)
    torch.compiler.reset()
    subject = model.synthetic(dense_llama(num_hidden_layers=4), "skew10", (2, 8), in_fp8=True)
    fp8.compile_ffns_(subject.models)
    with torch.no_grad():
        for name in fp8.NAMES:
            subject.models[name](ids_of(2, 8), use_cache=False)
    how = {"fullgraph": True, "dynamic": False}
    tuned = {"coordinate_descent_tuning": True}
    assert compilers == [*[{**how, "options": None}] * 4, *[{**how, "options": tuned}] * 4]
    assert counter.frame_count == 3  # both kinds, and the hook that replaces their input
    assert fp8.options(subject.models) == {"options": tuned} and fp8.options(["dense", "fp8"]) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_models_run_in_fp8(compiled: bool) -> None:
    if not fp8.applies(torch.device("cuda"), torch.bfloat16, 256, 1024):
        pytest.skip("needs a GPU with FP8")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 2048}
    for shape in ((1, 8), (2, 2048)):
        subject = model.synthetic(dense_llama(**sizes).to("cuda", torch.bfloat16), "skew29", shape)
        row = model.measure(subject, ids_of(*shape).cuda(), compiled=compiled, seconds=0)
        assert row["speedup_over_fp8"] > 0 and row["error"]["fp8"] < 0.1 and row["difference"] < 0.05
        assert ("sparse_fp8_ms" in row) == fp8.applies_sparsely(torch.device("cuda"), torch.bfloat16)
    row = model.measure_generate(subject, ids_of(1, 8).cuda(), 4, seconds=0)
    assert row["speedup_called_over_fp8"] > 0
    subject = model.real(dense_llama(**sizes).to("cuda", torch.bfloat16), "m")
    row = model.measure(subject, ids_of(2, 64).cuda(), compiled=compiled, seconds=0, wants_layers=True)
    assert all(layer["speedup_over_fp8"] > 0 for layer in row["ffns"])


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
    for said in ("2 x 16", "held", "model.layers.1.mlp: ", "float32"):
        assert said in result.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["batch"], r["length"], r["case"]) for r in rows] == [(1, 8, "text"), (2, 16, "text")]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--shape 2by8", "--shape must be sequences x tokens, as 4x2048, got '2by8'"),
        ("--shape 0x8", "--shape must be sequences x tokens"),
        ("--fp8", "--fp8: FP8 matrix products need an NVIDIA GPU"),
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
