"""Scores of a text and of last words, against the same sums taken token by token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from twell.evaluate import read_passages, score_last_words, score_text
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import train_bpe

TEXT = next(iter(read_texts(SAMPLE)))[:2000]
CONTEXT = 32


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], 300)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LlamaSparseReluForCausalLM:
    torch.manual_seed(0)
    config = LlamaSparseReluConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        vocab_size=len(tokenizer),
        initializer_range=0.5,  # far from uniform predictions
    )
    return LlamaSparseReluForCausalLM(config).eval()


@torch.no_grad()
def log_p(model: Any, ids: list[int]) -> torch.Tensor:
    """[n - 1]: log p of every token after the first, one sequence alone."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("n_tokens", [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT + 5])
def test_every_token_is_predicted_once_with_all_the_context_there_is(n_tokens: int, model: Any, tokenizer: Any) -> None:
    text = tokenizer.decode(tokenizer.encode(TEXT)[:n_tokens])
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
    expected = -sum(
        float(log_p(model, ids[start : start + CONTEXT + 1]).sum()) for start in range(0, len(ids) - 1, CONTEXT)
    )
    for batch_size in (1, 3):
        score = score_text(model, tokenizer, text, batch_size=batch_size)
        assert score.nats == pytest.approx(expected, rel=1e-5)
        assert score.tokens == len(ids) - 1
    assert score.bytes == len(text.encode())
    assert score.words == len(text.split())
    assert score.loss == pytest.approx(expected / n_tokens, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / score.bytes, rel=1e-5)
    assert score.word_perplexity == pytest.approx(math.exp(expected / score.words), rel=1e-4)


def test_last_words_are_scored_given_all_before_them(model: Any, tokenizer: Any) -> None:
    words = TEXT.split()
    passages = [" ".join(words[i : i + 3 + i % 7]) for i in range(0, 60, 4)]
    nats, right = [], 0
    with torch.no_grad():
        for passage in passages:
            body, _, word = passage.rpartition(" ")
            context, target = tokenizer.encode(body), tokenizer.encode(f" {word}")
            ids = [*context, *target][-CONTEXT - 1 :]  # as much before it as the model can take
            nats.append(-float(log_p(model, ids)[-len(target) :].sum()))
            tops = model(torch.tensor([ids])).logits[0].argmax(-1)[-len(target) - 1 : -1]
            right += tops.tolist() == target
    for batch_size in (1, 4):
        score = score_last_words(model, tokenizer, passages, batch_size=batch_size)
        assert score.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
        assert score.accuracy == right / len(passages)
        assert score.items == len(passages)


def test_a_right_last_word_counts(model: Any, tokenizer: Any) -> None:
    """Passages ended by the model's own most likely token are all right."""
    passages = []
    for words in (TEXT.split()[i : i + 4] for i in range(0, 40, 4)):
        body = " ".join(words)
        with torch.no_grad():
            top = int(model(torch.tensor([tokenizer.encode(body)])).logits[0, -1].argmax())
        ending = tokenizer.decode([top])
        if ending.startswith(" ") and tokenizer.encode(f" {ending.strip()}") == [top]:
            passages.append(f"{body}{ending}")
    if not passages:
        pytest.skip("no prediction of this model begins a word")
    assert score_last_words(model, tokenizer, passages).accuracy == 1


def test_training_mode_is_left_as_it_was(model: Any, tokenizer: Any) -> None:
    model.train()
    score_text(model, tokenizer, "a b c")
    assert model.training
    model.eval()


def test_errors(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text is empty"):
        score_text(model, tokenizer, "")
    with pytest.raises(ValueError, match="no passages"):
        score_last_words(model, tokenizer, [])
    with pytest.raises(ValueError, match="at least two words, got 'alone'"):
        score_last_words(model, tokenizer, ["alone"])
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"text": "two words"}) + "\n" + json.dumps({"words": 1}) + "\n")
    with pytest.raises(ValueError, match="line 2 has no field 'text'"):
        read_passages(path)
