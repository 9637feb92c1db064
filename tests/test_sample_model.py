"""The model that ships with the package: it is what its MODEL.md says, and every command can name it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import Twell
from twell import sparsify_
from twell.hf.counts import find_counts
from twell.hf.loading import SAMPLE_MODEL, load_causal_lm, load_config, model_path
from twell.nn import sparse_ffns
from twell.train.data import SAMPLE, load_corpus
from twell.train.tokenizer import load_tokenizer
from twell.workbench.generate import dense_twin


@pytest.fixture(scope="module")
def model() -> Any:
    return load_causal_lm("sample").eval()


@pytest.fixture(scope="module")
def held_out() -> Tensor:
    """[sequences, 256]: the document that was not trained on."""
    tokenizer: Any = load_tokenizer("sample")
    tokens = load_corpus(
        [SAMPLE],
        encode=lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"],
        end_of_text=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
    ).held_out
    return torch.from_numpy(tokens[: len(tokens) // 256 * 256].astype("int64")).view(-1, 256)


def said(pattern: str) -> float:
    """A number of MODEL.md."""
    (number,) = re.findall(pattern, (SAMPLE_MODEL / "MODEL.md").read_text(encoding="utf-8"))
    return float(number)


def test_files_are_small_and_shipped() -> None:
    assert sum(path.stat().st_size for path in SAMPLE_MODEL.iterdir()) < 6e6
    assert '"sample/*"' in (Path(__file__).parent.parent / "pyproject.toml").read_text()


@torch.no_grad()
def test_loss_and_sparsity_are_as_model_md_says(model: Any, held_out: Tensor) -> None:
    dense = dense_twin(model)
    assert sparsify_(model).n_sparse == model.config.num_hidden_layers
    ffns = [ffn for _, ffn in sparse_ffns(model)]
    for ffn in ffns:
        ffn.track_counts = True
        ffn.reset_counts()
    logits = model(held_out).logits
    torch.testing.assert_close(logits, dense(held_out).logits, rtol=1e-4, atol=1e-4)  # sparse equals dense
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), held_out[:, 1:].flatten()).item()
    assert loss == pytest.approx(said(r"\| ([\d.]+) a token"), abs=0.002)
    active = sum(int(ffn.neuron_counts.sum()) / int(ffn.tokens_seen) for ffn in ffns) / len(ffns)
    share = active / model.config.intermediate_size
    assert share == pytest.approx(said(r"\| ([\d.]+)%: held-out") / 100, rel=0.01)
    assert 0.01 < share < 0.03


def test_counts_fit_the_model(model: Any) -> None:
    counts = find_counts(str(SAMPLE_MODEL))
    assert counts is not None and counts.tokens == 32768
    assert [len(fired) for fired in counts.fired] == [model.config.intermediate_size] * model.config.num_hidden_layers


def test_generate_by_name(twell: Twell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = twell("generate", "sample", "--prompt", "The old man said", "--max-new-tokens", "12")
    assert done.returncode == 0 and len(done.stdout.split()) >= 4, done.stderr
    assert "all 4 feed-forward layers can run sparsely" in done.stderr


def test_analyze_knows_its_text(twell: Twell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    done = twell("analyze", "sample", "--tokens", "512", "--json", "--report", str(page))
    assert done.returncode == 0, done.stderr
    assert '"training":{"steps":[' in page.read_text()  # it finds its training's log, too
    facts = json.loads(done.stdout)
    assert facts["text"] == str(SAMPLE) and facts["analysis"]["facts"]["tokens"] == 512
    by_path = twell("analyze", str(SAMPLE_MODEL), "--tokens", "512", "--json")
    assert json.loads(by_path.stdout)["analysis"] == facts["analysis"]


def test_a_folder_of_that_name_wins(twell: Twell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_path("sample") == str(SAMPLE_MODEL) and load_config("sample").num_hidden_layers == 4
    (tmp_path / "sample").mkdir()
    assert model_path("sample") == "sample"
    done = twell("generate", "sample", "--prompt", "x")
    assert done.returncode == 2 and "sample is no folder of a model: it has no config.json" in done.stderr
    done = twell("analyze", "sample")
    assert done.returncode == 2 and "sample needs --text FILE" in done.stderr
