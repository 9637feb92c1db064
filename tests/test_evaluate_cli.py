"""``twell eval``: rows, tables, several models, dense against sparse, one clear line on bad input."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from command_line import Twell
from small_models import TINY, VOCAB
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import SparseFFNBase
from twell.nn.quantize import quantize_
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import train_bpe
from twell.workbench.cli.common import load_model
from twell.workbench.cli.eval_subjects import _ways
from twell.workbench.evaluate import TASKS, harness

ITEMS = str(Path(__file__).parent / "data" / "eval")
TEXT = next(iter(read_texts(SAMPLE)))[:3000]
SHAPE = TINY | {"max_position_embeddings": 128, "initializer_range": 0.5}


@pytest.fixture(autouse=True)
def no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each model the command frees its memory, which takes 0.4 s with everything that tests have imported."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two sparse models and a dense one."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_bpe([TEXT], VOCAB)
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**SHAPE)).save_pretrained(folder / name / "model")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "silu")
    found = {"one": folder / "one" / "model", "two": folder / "two" / "model", "silu": folder / "silu"}
    for path in found.values():
        tokenizer.save_pretrained(path)
    return {name: str(path) for name, path in found.items()}


def test_all_tasks_by_default(twell: Twell, models: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result = twell("eval", models["one"], "--data", ITEMS, "--scorer", "own", "--json", "--out", str(out))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows == [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["task"] for row in rows[:-1]] == list(TASKS)
    for row in rows[:-1]:
        assert (row["eval"], row["items"], row["scorer"], row["model"]) == ("task", 3, "own", models["one"])
        assert ("acc_norm" in row) == (row["task"] not in ("winogrande", "commonsense_qa"))
        assert {"commit", "versions", "device", "time", "dtype"} <= set(row)
    mean = rows[-1]
    assert (mean["eval"], mean["tasks"]) == ("mean", list(TASKS))
    assert mean["acc"] == pytest.approx(sum(row["acc"] for row in rows[:-1]) / 7)

    result = twell("eval", models["one"], "--data", ITEMS, "--scorer", "own", "--tasks", "piqa,winogrande")
    shown = result.stdout.splitlines()
    piqa = next(row for row in rows if row.get("task") == "piqa")
    assert any(line.split()[:4] == ["piqa", "acc", "3", f"{100 * piqa['acc']:.2f}"] for line in shown)
    assert not any("hellaswag" in line for line in shown)


def test_dense_against_sparse(twell: Twell, models: dict[str, str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["eval", models["one"], "--data", ITEMS, "--scorer", "own", "--tasks", "arc_easy", "--tasks", "piqa"]
    result = twell(*command, "--compare", "--text", str(text), "--limit", "2", "--json")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    dense, sparse = rows[:4], rows[4:]
    assert [row["eval"] for row in dense] == [row["eval"] for row in sparse] == ["text", "task", "task", "mean"]
    assert {row["mode"] for row in dense} == {"dense"} and {row["mode"] for row in sparse} == {"sparse"}
    for a, b in zip(dense, sparse, strict=True):
        assert "against" not in a
        against = b["against"]
        assert (against["model"], against["mode"]) == (models["one"], "dense")
        metric = "bits_per_byte" if b["eval"] == "text" else "acc"
        assert against[metric] == pytest.approx(b[metric] - a[metric])
        assert against[f"{metric}_error"] < 1e-3  # the same function, up to rounding
    assert sparse[1]["items"] == 2 and sparse[1]["against"]["other_choices"] == 0

    shown = twell(*command, "--compare", "--text", str(text)).stdout
    assert "sparse - dense" in shown and "bits/byte" in shown
    assert "sparse and dense choose differently in 0 of 6 items" in shown


def test_fp8_dense_and_sparse(
    twell: Twell, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "val.txt", tmp_path / "rows.jsonl"
    text.write_text(TEXT)
    command = ["eval", models["one"], "--fp8", "--data", ITEMS, "--scorer", "own", "--tasks", "piqa"]
    result = twell(*command, "--text", str(text), "--json", "--out", str(out))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["eval"], row["mode"]) for row in rows] == [
        (what, mode) for mode in ("dense", "FP8 dense", "FP8 sparse") for what in ("text", "task")
    ]
    dense, fp8, sparse = rows[::2]
    assert [row.get("against", {}).get("mode") for row in (dense, fp8, sparse)] == [None, "dense", "FP8 dense"]
    for before, row in ((dense, fp8), (fp8, sparse)):
        assert row["against"]["loss"] == pytest.approx(row["loss"] - before["loss"])
        assert (row["fp8_layers"], row["emulated"]) == (2, True) and row["loss_error"] > 0
    assert 1e-5 < abs(fp8["against"]["loss"]) < 0.1 and sparse["against"]["loss"] == 0  # what FP8 changes
    assert sparse["sparse_layers"] == 0 and sparse["predictions"]["tokens"] == sparse["tokens"]
    assert sparse["predictions"]["other"] == 0 and "predictions" not in fp8

    forward = SparseFFNBase._call_projections

    def otherwise(self: SparseFFNBase, *args: Any) -> Any:
        return forward(self, *args) * (1.0 if self.backend == "reference" else 0.8)

    monkeypatch.setattr(SparseFFNBase, "_call_projections", otherwise)
    result = twell(*command, "--text", str(text), "--json")
    found = json.loads(result.stdout.splitlines()[4])["predictions"]
    assert 0 < found["beyond_rounding"] <= found["other"] == len(found["moved"]) < found["tokens"]
    assert found["moved"] == sorted(found["moved"], reverse=True) and len(found["worst"]) == 5
    worst = found["worst"][0]
    assert worst["verdict"] == "a real difference" and len(worst["texts"]) == 2
    assert worst["dense_margin"] + worst["sparse_margin"] == pytest.approx(found["moved"][0], rel=1e-2)
    shown = twell(*command, "--text", str(text)).stdout
    assert "FP8 dense - dense" in shown and "FP8 sparse - FP8 dense" in shown
    assert (
        f"FP8 sparse and FP8 dense predict different tokens at {found['other']} of {found['tokens']:,} places" in shown
    )
    assert "FP8 sparse: the sparse kernels ran in 0 of 2 layers; FP8 is emulated: the device does not have it" in shown


def test_several_models_side_by_side(twell: Twell, models: dict[str, str], tmp_path: Path) -> None:
    passages = tmp_path / "passages.jsonl"
    passages.write_text("".join(json.dumps({"text": " ".join(TEXT.split()[i : i + 9])}) + "\n" for i in range(9)))
    command = ["eval", models["one"], models["two"], "--data", ITEMS, "--scorer", "own", "--tasks", "winogrande"]
    rows = list(map(json.loads, twell(*command, "--last-words", str(passages), "--json").stdout.splitlines()))
    assert [row["eval"] for row in rows] == ["last words", "task"] * 2
    assert rows[3]["against"]["model"] == models["one"]
    assert rows[3]["against"]["acc"] == pytest.approx(rows[3]["acc"] - rows[1]["acc"])
    assert rows[2]["against"]["accuracy"] == pytest.approx(rows[2]["accuracy"] - rows[0]["accuracy"])
    shown = twell(*command).stdout
    assert "two - one" in shown and "two and one choose differently" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tasks", "boolq"], "unknown task 'boolq': expected one of arc_easy"),
        (["--data", "missing"], "missing is not a folder"),
        (["--tasks", "piqa", "--scorer", "own"], "nothing to evaluate on: give --data"),
        (["--data", ITEMS, "--scorer", "mine"], "unknown scorer 'mine': expected lm-eval or own"),
        (["--data", ITEMS, "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--data", ITEMS, "--batch-size", "-1"], "--batch-size must be at least 1, got -1"),
        (["--data", ITEMS, "--device", "abacus"], "unknown device 'abacus'"),
        (["--data", ITEMS, "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--last-words", "missing.jsonl"], "missing.jsonl"),
        (["--text", "missing.u16"], "missing.u16 does not exist"),
        (["--fp8", "--compare"], "--fp8 compares dense and sparse itself: leave out --compare"),
    ],
)
def test_bad_input_is_one_clear_line(twell: Twell, args: list[str], message: str) -> None:
    result = twell("eval", "nowhere", *args)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_model_without_relu_has_nothing_to_compare(twell: Twell, models: dict[str, str]) -> None:
    result = twell("eval", models["silu"], "--data", ITEMS, "--scorer", "own", "--compare")
    assert result.returncode == 2
    assert re.search("has no FFN that can run sparsely: nothing is sparse: 2 dense: .*silu", result.stderr)
    result = twell("eval", models["silu"], "--data", ITEMS, "--scorer", "own", "--fp8")
    assert result.returncode == 2 and "has no FFN that can run sparsely" in result.stderr


def test_a_model_with_fp8_weights_has_none_of_16_bits_to_compare_with(models: dict[str, str]) -> None:
    model, _ = load_model(models["one"], "cpu")
    quantize_(model, emulate=True)
    with pytest.raises(ValueError, match="one already has FP8 weights"):
        next(_ways(model, "one", "fp8", torch.device("cpu")))


@pytest.mark.skipif(harness.is_installed(), reason="lm-eval is installed")
def test_lm_eval_is_asked_for_only_where_it_is_needed(twell: Twell, models: dict[str, str]) -> None:
    result = twell("eval", models["one"], "--data", ITEMS, "--scorer", "lm-eval")
    assert result.returncode == 2
    assert "lm-eval is not installed" in result.stderr
    assert "pip install 'twell[eval]'" in twell("eval", models["one"]).stderr
    row = json.loads(twell("eval", models["one"], "--data", ITEMS, "--tasks", "piqa", "--json").stdout)
    assert row["scorer"] == "own"


@pytest.mark.skipif(not harness.is_installed(), reason="needs lm-eval: pip install 'twell[eval]'")
def test_lm_eval_is_the_default_and_says_the_same(twell: Twell, models: dict[str, str]) -> None:
    ours = twell("eval", models["one"], "--data", ITEMS, "--scorer", "own", "--json")
    theirs = twell("eval", models["one"], "--data", ITEMS, "--json")
    for a, b in zip(ours.stdout.splitlines(), theirs.stdout.splitlines(), strict=True):
        row, other = json.loads(a), json.loads(b)
        assert other["scorer"].startswith("lm-eval 0.")
        assert {k: v for k, v in row.items() if "acc" in k} == {k: v for k, v in other.items() if "acc" in k}
