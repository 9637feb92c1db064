"""``twell generate``: the tokens of model.generate, streamed, in batches, and densely against sparsely."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from command_line import Result, Twell
from twell import cpu
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.hf.sparsify import sparsify_
from twell.nn import SparseFFNBase, sparse_ffns
from twell.nn.quantize import quantize_
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import load_tokenizer, train_bpe
from twell.workbench import generate
from twell.workbench.cli import generate as generate_command
from twell.workbench.generate import Parting, config_for

TEXT = next(iter(read_texts(SAMPLE)))[:3000]
PROMPTS = ["The captain", "It was a dark night, and the wind had", "She said: “No”"]
CONTEXT = 64
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


Ask = Callable[..., Result]


@pytest.fixture
def ask(twell: Twell, folders: dict[str, str]) -> Ask:
    """Runs ``twell generate`` with a model, for n tokens after each prompt."""

    def run(name: str, n: int | None, options: str = "", prompts: Sequence[str] = PROMPTS[:1]) -> Result:
        given = [word for prompt in prompts for word in ("--prompt", prompt)]
        given += [] if n is None else ["--max-new-tokens", str(n)]
        return twell("generate", folders.get(name, name), *given, *options.split())

    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of random weights: a sparse type, a plain Llama with ReLU, one with SiLU, and OPT."""
    torch.manual_seed(0)
    tokenizer = train_bpe([TEXT], 300)
    n_tokens = len(tokenizer)
    opt = {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3, "activation_function": "relu"}
    models = {
        "sparse": LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**SHAPE, vocab_size=n_tokens)),
        "relu": LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=n_tokens, hidden_act="relu")),
        "silu": LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=n_tokens)),
        "opt": OPTForCausalLM(OPTConfig(**SHAPE, **opt, vocab_size=n_tokens, pad_token_id=0)),
    }
    folder = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        path = folder / name / "model"
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return {name: str(folder / name / "model") for name in models}


def load(folder: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(folder)


def own_tokens(folder: str, prompt: str, n: int, **how: Any) -> list[int]:
    """What model.generate gives, without twell's help."""
    model, tokenizer = load(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **how)
    return out[0, ids.shape[1] :].tolist()


# -- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparse", "relu", "silu", "opt"])
def test_tokens_are_those_of_generate(ask: Ask, folders: dict[str, str], name: str) -> None:
    result = ask(name, 12, "--json", PROMPTS[1:2])
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout)
    assert row["token_ids"] == own_tokens(folders[name], PROMPTS[1], 12)
    assert row["text"] == load_tokenizer(folders[name]).decode(row["token_ids"], skip_special_tokens=True)
    assert (row["prompt"], row["new_tokens"], row["finish"]) == (PROMPTS[1], 12, "length")
    assert row["first_token_s"] > 0 and row["tokens_per_s"] > 0
    if name == "silu":
        assert "nothing is sparse: 2 dense: silu" in result.stderr and "frozen" not in result.stderr
        assert row["active_neurons"] == {}
    else:
        assert "all 2 feed-forward layers can run sparsely" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("2 feed-forward layers frozen, 0.0 MB beside their weights")
        assert len(row["active_neurons"]) == 2
        assert all(0 < mean < 64 for mean in row["active_neurons"].values())


def test_prompts_together_get_the_tokens_they_get_alone(ask: Ask, folders: dict[str, str]) -> None:
    rows = [json.loads(line) for line in ask("sparse", 16, "--json", PROMPTS).stdout.splitlines()]
    assert len({row["prompt_tokens"] for row in rows}) == 3  # so there is padding
    assert [row["token_ids"] for row in rows] == [own_tokens(folders["sparse"], p, 16) for p in PROMPTS]
    assert [row["prompt"] for row in rows] == PROMPTS
    shown = ask("sparse", 16, "", PROMPTS).stdout
    assert shown == "\n".join(f"==> {row['prompt']} <==\n{row['text']}\n" for row in rows)
    assert ask("sparse", 16, "--stream", PROMPTS).stdout == shown


@pytest.mark.parametrize("changed", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}])
def test_penalties_do_not_count_padding(
    folders: dict[str, str], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(folders["sparse"])
    model.generation_config.update(**changed)
    ids = generate.encode(tokenizer, PROMPTS)
    together = generate.generate(model, tokenizer, ids, config_for(model, ids, max_new_tokens=12))
    assert [g.ids for g in together] == [own_tokens(folders["sparse"], p, 12, **changed) for p in PROMPTS]

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_run", interrupted)
    [only] = generate.generate(model, tokenizer, ids, config_for(model, ids, max_new_tokens=12))
    assert (only.ids, only.text, only.finish, only.first_token_s) == ([], "", "interrupted", None)


def test_a_prompt_that_ends_early_ends_alone(folders: dict[str, str]) -> None:
    model, tokenizer = load(folders["sparse"])
    ids = generate.encode(tokenizer, PROMPTS)
    before = generate.generate(model, tokenizer, ids, config_for(model, ids, max_new_tokens=12))
    end = next(t for t in before[0].ids[2:] if t not in before[1].ids and t not in before[0].ids[:2])
    model.generation_config.eos_token_id = [end]
    after = generate.generate(model, tokenizer, ids, config_for(model, ids, max_new_tokens=12))
    assert after[0].ids == before[0].ids[: before[0].ids.index(end) + 1]
    assert (after[0].finish, after[1].finish) == ("stop", "length")
    assert after[1].ids == before[1].ids
    assert after[0].seconds < after[1].seconds


def test_streamed_text_is_the_text(ask: Ask) -> None:
    streamed = ask("sparse", 40, "--stream")
    assert ask("sparse", 40).stdout == streamed.stdout != "\n"
    assert "40 new in" in streamed.stderr and "tokens/s" in streamed.stderr


def test_ctrl_c_keeps_what_was_generated(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask("sparse", 30, "--stream").stdout
    pieces: list[str] = []

    def print_some(text: str) -> None:
        print(text, end="")
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "_print_piece", print_some)
    result = ask("sparse", 30, "--stream")
    assert result.returncode == 130
    assert result.stdout == "".join(pieces) + "\n" and whole.startswith("".join(pieces))
    assert "interrupted" in result.stderr and "new in" in result.stderr


def test_a_static_cache_changes_nothing(ask: Ask) -> None:
    result = ask("relu", 10, "--static-cache", PROMPTS)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ask("relu", 10, "", PROMPTS).stdout


def test_sampling_repeats_by_its_seed(ask: Ask) -> None:
    one, again, other = (ask("sparse", 20, f"--temperature 1.5 --seed {seed}").stdout for seed in (1, 1, 2))
    assert one == again != other
    assert ask("sparse", 20, "--temperature 1.5 --seed 1 --top-p 0.9 --top-k 20").returncode == 0
    greedy = ask("sparse", 20).stdout
    assert ask("sparse", 20, "--top-k 1").stdout == greedy == ask("sparse", 20, "--temperature 0").stdout
    assert one != greedy


def test_sampling_defaults_are_those_of_the_model(folders: dict[str, str]) -> None:
    model, _ = load(folders["sparse"])
    config = config_for(model, [[1]], temperature=0.7)
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.7, 1.0, 0)
    model.generation_config.update(top_p=0.8, top_k=20, do_sample=True)
    config = config_for(model, [[1]], top_p=0.5)
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 1.0, 0.5, 20)
    assert config_for(model, [[1]]).do_sample is False


def test_prompts_from_files_and_standard_input(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask("sparse", 5, "", PROMPTS[1:2]).stdout
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPTS[1] + "\n", encoding="utf-8")
    for options in (f"--prompt-file {file}", "", "--prompt -", "--prompt-file -"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPTS[1] + "\n"))
        assert ask("sparse", 5, options, []).stdout == expected


def test_chat_template(ask: Ask, folders: dict[str, str], tmp_path: Path) -> None:
    model, tokenizer = load(folders["sparse"])
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    answer = ask(str(tmp_path), 8, "--chat", ["Hello"])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ask(str(tmp_path), 8, "", ["<user>Hello<answer>"]).stdout
    assert answer.stdout != ask(str(tmp_path), 8, "", ["Hello"]).stdout


def test_the_default_length_is_what_fits(ask: Ask) -> None:
    row = json.loads(ask("sparse", None, "--json").stdout)
    assert row["prompt_tokens"] + row["new_tokens"] == CONTEXT


# -- dense against sparse -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparse", "relu", "opt"])
def test_dense_and_sparse_agree(ask: Ask, name: str) -> None:
    result = ask(name, 12, "--compare --repeats 2 --json", PROMPTS[:2])
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout)
    assert row["agrees"] and row["partings"] == [] and row["new_tokens"] == [12, 12]
    assert row["logits_difference"] < 1e-4 < row["largest_logit"]
    for side in ("dense", "sparse"):
        assert row["prefill_ms"][side]["p50"] > 0 and row["decode_tokens_per_s"][side] > 0
        assert row["memory"][side]["weights"] > 0 and row["memory"][side]["pass"] > 0
        assert row["memory"][side]["frozen"] == 0  # the layers are that small
        p20, p50, p80 = row["decode_ms"][side].values()
        assert p20 <= p50 <= p80
    ratio = row["decode_ms"]["dense"]["p50"] / row["decode_ms"]["sparse"]["p50"]
    assert row["speedup"]["decode"] == pytest.approx(ratio, abs=1e-3)
    assert {"commit", "versions", "cpu"} <= set(row)
    if name == "relu":
        shown = ask(name, 12, "--compare --repeats 2 --static-cache", PROMPTS[:2]).stdout
        for said in ("frozen beside them, MB", "greedy tokens agree, all 24", "decode, tokens/s", "static cache"):
            assert said in shown


def test_comparing_a_single_token_or_nothing(ask: Ask) -> None:
    row = json.loads(ask("relu", 1, "--compare --repeats 1 --json").stdout)
    assert row["decode_ms"] == row["decode_tokens_per_s"] == {} and row["speedup"]["decode"] is None
    assert "greedy tokens agree, all 1" in ask("relu", 1, "--compare --repeats 1").stdout
    result = ask("silu", None, "--compare")
    assert result.returncode == 2
    assert "there is nothing to compare: nothing is sparse: 2 dense: silu" in result.stderr


def test_a_real_difference_is_found(ask: Ask, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.forward

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = right(x, *args, **kwargs)
        return result._replace(y=0.5 * result.y)

    expected = own_tokens(folders["sparse"], PROMPTS[1], 12)
    monkeypatch.setattr(cpu, "forward", wrong)
    result = ask("sparse", 12, "--compare --repeats 1 --json", PROMPTS[1:2])
    assert result.returncode == 1, result.stderr
    row = json.loads(result.stdout)
    [parting] = row["partings"]
    assert not row["agrees"] and parting["verdict"] == "a real difference"
    at = parting["position"]
    assert parting["dense_token"] == expected[at] != parting["sparse_token"]
    assert parting["dense_margin"] > 0 and parting["sparse_margin"] > 0
    assert parting["dense_margin"] + parting["sparse_margin"] > parting["bound"] > 0

    result = ask("sparse", 12, "--compare --repeats 1", PROMPTS[1:2])
    assert result.returncode == 1
    assert f"a real difference: greedy tokens part after {at} equal ones" in result.stdout
    assert f"by {parting['dense_margin']:.3g} and {parting['sparse_margin']:.3g} of the logits" in result.stdout


def test_ties_are_told_from_differences() -> None:
    dense = torch.tensor([[10.0, 10.0 - 1e-6, 0.0]])
    ids = {"dense": [[7, 0]], "sparse": [[7, 1]]}
    first = torch.zeros(1, 8)

    def judged(sparse: torch.Tensor) -> Parting:
        [parting], *_ = generate._judge(ids, {"dense": (first, dense), "sparse": (first, sparse)}, torch.float32)
        return parting

    tie = judged(torch.tensor([[10.0 - 2e-6, 10.0, 0.0]]))
    assert (tie.position, tie.dense_token, tie.sparse_token) == (1, 0, 1)
    assert tie.moved == pytest.approx(3e-6, rel=0.5) and tie.verdict == "a tie within rounding"
    assert judged(torch.tensor([[9.9, 10.0, 0.0]])).verdict == "a real difference"
    assert judged(torch.full((1, 3), math.nan)).verdict == "a real difference"


def test_the_dense_twin_shares_all_weights(folders: dict[str, str]) -> None:
    for name in ("sparse", "relu", "opt"):
        model, _ = load(folders[name])
        dense = generate.dense_twin(model)
        own, shared = dict(model.named_parameters()), dict(dense.named_parameters())
        assert own.keys() == shared.keys() and all(own[key] is shared[key] for key in own)
        assert not sparsify_(model).changed and sparsify_(dense).changed
    model, _ = load(folders["sparse"])
    quantize_(model, emulate=True)  # whose layers run sparsely on some GPUs
    dense = generate.dense_twin(model)
    own, shared = dict(model.named_parameters()), dict(dense.named_parameters())
    assert all(own[key] is shared[key] for key in own) and {f.backend for _, f in sparse_ffns(dense)} == {"reference"}


def test_layers_are_frozen_and_keep_their_layout(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[bool, bool]] = set()
    right = SparseFFNBase._ffn

    def watched(self: SparseFFNBase, *args: Any) -> Any:
        down = getattr(self, self.projections[-1]).weight
        if "dense_block" in vars(self):  # it is in its place: sparsify_ has tried it
            seen.add((self.frozen is not None, bool(down.t().is_contiguous())))
        return right(self, *args)

    monkeypatch.setattr(SparseFFNBase, "_ffn", watched)
    for options in ("", "--compare --repeats 1"):
        assert ask("relu", 3, options).returncode == 0
    assert seen == {(True, True)}


@pytest.mark.gpu
def test_compiled_decoding_on_a_gpu(folders: dict[str, str]) -> None:
    model, tokenizer = load(folders["relu"])
    model = model.cuda()
    dense = generate.dense_twin(model)
    ids = generate.encode(tokenizer, PROMPTS[:1])
    config = config_for(model, ids, max_new_tokens=20, static_cache=True)
    result = generate.compare(dense, model, ids, config, repeats=1)
    assert result.agrees and result.memory["sparse"]["pass"] > 0
    assert all(layer.mlp.plan is not None for layer in model.model.layers)
    [generated] = generate.generate(model, tokenizer, ids, config)
    assert generated.ids == result.ids["sparse"][0]
