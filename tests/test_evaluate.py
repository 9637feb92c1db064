"""Scores of a text, of last words and of tasks, against the same sums taken token by token."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from small_models import TINY, VOCAB, F, tiny_model
from twell.hf import LlamaSparseReluConfig
from twell.nn import sparse_ffns
from twell.nn.quantize import quantize_
from twell.train.data import END_OF_TEXT, SAMPLE, read_texts
from twell.train.tokenizer import train_bpe
from twell.workbench.evaluate import (
    TASKS,
    EvalMetrics,
    Mean,
    TaskData,
    Tokens,
    compare_predictions,
    read_folder,
    read_text,
    score_last_words,
    score_task,
    score_text,
)
from twell.workbench.evaluate.fp8_plans import Fired, counting, plan_all_
from twell.workbench.evaluate.means import difference, mean_of
from twell.workbench.evaluate.predictions import Query, context_length, encode, predict
from twell.workbench.evaluate.tasks import Item
from twell.workbench.trace import record

TEXT = next(iter(read_texts(SAMPLE)))[:2000]
CONTEXT = 32


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], VOCAB)


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaSparseReluConfig(**TINY | {"max_position_embeddings": CONTEXT, "initializer_range": 0.5})
    return tiny_model(config).float().eval()  # its predictions are far from uniform


def tokens_of(tokenizer: Any, text: str) -> Tokens:
    return Tokens(tokenizer.encode(text), len(text.encode()), len(text.split()))


@torch.no_grad()
def log_p(model: Any, ids: list[int]) -> torch.Tensor:
    """[n - 1]: log p of every token after the first, one sequence alone."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("n_tokens", [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT + 5])
def test_every_token_is_predicted_once_with_all_the_context_there_is(n_tokens: int, model: Any, tokenizer: Any) -> None:
    text = tokenizer.decode(tokenizer.encode(TEXT)[:n_tokens])
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
    windows = [ids[start : start + CONTEXT + 1] for start in range(0, len(ids) - 1, CONTEXT)]
    expected = -sum(float(log_p(model, window).sum()) for window in windows)
    for batch_size in (1, 3):
        score = score_text(model, tokenizer, tokens_of(tokenizer, text), batch_size=batch_size)
        assert sum(score.metrics.samples["loss"][0]) / len(windows) == pytest.approx(expected / n_tokens, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected / len(text.split())), rel=1e-4)
    for name, amount in (
        ("loss", n_tokens),
        ("bits_per_byte", math.log(2) * len(text.encode())),
    ):  # means over the windows
        mean = score.metrics.mean(name)
        assert mean.value == pytest.approx(expected / amount, rel=1e-5)
        assert mean.error > 0 or len(windows) == 1


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
        assert score.metrics.mean("accuracy").value == right / len(passages)


def test_a_right_last_word_counts(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a model that knows the whole passage, and by one that does not know its last token."""
    passage = " ".join(TEXT.split()[:4])
    ids = tokenizer.encode(passage)
    for known in (len(ids), len(ids) - 1):
        logits = torch.nn.functional.one_hot(torch.tensor([*ids[1:known], *[0] * (1 + len(ids) - known)]), 300)[None]

        def forward(input_ids: Any, logits_to_keep: int, logits: Any = logits, **_: Any) -> Any:
            return SimpleNamespace(logits=9.0 * logits[:, : input_ids.shape[1]][:, -logits_to_keep:])

        monkeypatch.setattr(model, "forward", forward)
        assert score_last_words(model, tokenizer, [passage]).metrics.mean("accuracy").value == (known == len(ids))


# -- tasks --------------------------------------------------------------------------------------------------

ITEMS = Path(__file__).parent / "data" / "eval"


@pytest.mark.parametrize("name", ["arc_easy", "winogrande", "commonsense_qa"])
def test_a_task_is_scored_choice_by_choice(name: str, model: Any, tokenizer: Any) -> None:
    """With a context of 32 tokens: most prompts are cut on the left, none of the choices is."""
    [data] = read_folder(ITEMS, [name])
    expected, right, right_norm = [], [], []
    for item in data.items:
        sums, normed = [], []
        for context, continuation in zip(item.contexts, item.continuations, strict=True):
            before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
            n = len(whole) - len(before)
            sums.append(float(log_p(model, whole[-CONTEXT - 1 :])[-n:].sum()))
            normed.append(sums[-1] / len(continuation.strip()))
        expected.append(sums)
        right.append(sums.index(max(sums)) == item.gold)
        right_norm.append(normed.index(max(normed)) == item.gold)
    for batch_size in (1, 7, 100):
        score = score_task(model, tokenizer, data, batch_size=batch_size)
        for ours, theirs in zip(score.log_likelihoods, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert score.right == ({"acc": right, "acc_norm": right_norm} if name == "arc_easy" else {"acc": right})
        assert score.metrics.mean("acc").value == sum(right) / len(right)


def test_a_choice_longer_than_the_context_is_predicted_in_windows(model: Any, tokenizer: Any) -> None:
    choice = " " + " ".join(TEXT.split()[:40])
    item = Item(("Question:",) * 2, (choice, " no"), 0)
    data = TaskData(TASKS["piqa"], Path("none"), [{}], [item])
    before, whole = tokenizer.encode("Question:"), tokenizer.encode("Question:" + choice)
    assert len(whole) - len(before) > 2 * CONTEXT
    expected, start = 0.0, len(before)
    while start < len(whole):
        end = min(start + CONTEXT, len(whole))
        expected += float(log_p(model, whole[max(0, end - CONTEXT - 1) : end])[start - end :].sum())
        start = end
    assert score_task(model, tokenizer, data).log_likelihoods[0][0] == pytest.approx(expected, rel=1e-5)


def test_the_longest_run_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Query([5, 6], 1), Query([1, 2, 3, 9], 2), Query([1, 2, 3, 4], 1), Query([7, 8, 9], 1)]
    expected = [float(log_p(model, list(row.ids))[-row.n :].sum()) for row in rows]
    shapes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **kw: (shapes.append(tuple(kw["input_ids"].shape)), forward(**kw))[1])
    seen: list[tuple[int, int]] = []
    model.train()
    found = predict(model, rows, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert model.training  # the mode is left as it was
    model.eval()
    assert [p.log_p for p in found] == pytest.approx(expected, rel=1e-5)
    assert shapes == [(2, 3), (2, 2)]
    assert seen == [(2, 4), (4, 4)]


def test_white_space_at_the_end_of_a_context_goes_to_the_continuation(tokenizer: Any) -> None:
    [row] = encode(tokenizer, [("one two ", "three")])
    assert row == encode(tokenizer, [("one two", " three")])[0]
    with pytest.raises(ValueError, match="makes no tokens of ''"):
        encode(tokenizer, [("one", "")])


def test_nan_is_no_choice(model: Any, tokenizer: Any) -> None:
    [data] = read_folder(ITEMS, ["piqa"])
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: logits * math.nan)
    try:
        with pytest.raises(ValueError, match="not numbers"):
            score_task(model, tokenizer, data)
    finally:
        hook.remove()


def test_means_and_paired_differences() -> None:
    a, b = [1.0, 1, 0, 1, 0, 1], [1.0, 0, 0, 1, 1, 0]
    for values, mean in ((a, mean_of(a)), ([x - y for x, y in zip(a, b, strict=True)], difference(a, b))):
        t = torch.tensor(values, dtype=torch.float64)
        assert mean == pytest.approx((t.mean().item(), t.std().item() / math.sqrt(len(a))))
    assert mean_of([1.0]) == Mean(1, 0)
    unpaired = difference(a, [0.0, 0, 1, 1])  # as texts in other windows
    assert unpaired == pytest.approx((4 / 6 - 0.5, math.hypot(mean_of(a).error, mean_of([0.0, 0, 1, 1]).error)))


def test_metrics_average_over_tasks() -> None:
    """A task without acc_norm takes part in its average with acc; differences average as the tasks do."""
    mean = EvalMetrics.over([EvalMetrics.of(acc=[0, 1.0], acc_norm=[1.0, 1]), EvalMetrics.of(acc=[0, 0, 0, 1.0])])
    assert list(mean.samples) == ["acc", "acc_norm"]
    a, b = mean_of([0, 1]), mean_of([0, 0, 0, 1])
    assert mean.mean("acc") == pytest.approx(((0.5 + 0.25) / 2, math.hypot(a.error, b.error) / 2))
    assert mean.mean("acc_norm").value == (1 + 0.25) / 2
    other = EvalMetrics.over([EvalMetrics.of(acc=[1.0, 1], acc_norm=[0, 0.0]), EvalMetrics.of(acc=[0, 0, 1.0, 1])])
    a, b = difference([0, 1], [1, 1]), difference([0, 0, 0, 1], [0, 0, 1, 1])
    assert mean.difference("acc", other) == pytest.approx(((a.value + b.value) / 2, math.hypot(a.error, b.error) / 2))
    assert mean.difference("acc_norm", other).value == (1 - 0.25) / 2


def test_texts_are_read_as_training_reads_them(tokenizer: Any, tmp_path: Path) -> None:
    """With an end-of-text after each document."""
    documents, end = [TEXT[:99].strip(), TEXT[100:250].strip()], tokenizer.eos_token_id
    ids = [token for document in documents for token in (*tokenizer.encode(document), end)]
    (tmp_path / "val.txt").write_text(f"\n{END_OF_TEXT}\n".join(documents))
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (*documents, "")))
    np.array(ids, dtype="<u2").tofile(tmp_path / "val.u16")
    for name in ("val.txt", "val.jsonl", "val.u16"):
        bytes_and_words = sum(len(d.encode()) for d in documents), sum(len(d.split()) for d in documents)
        assert read_text(tokenizer, tmp_path / name) == Tokens(ids, *bytes_and_words)
    assert read_text(tokenizer, tmp_path).ids == 3 * ids
    np.array([999], dtype="<u2").tofile(tmp_path / "val.u16")
    with pytest.raises(ValueError, match="another tokenizer"):
        read_text(tokenizer, tmp_path / "val.u16")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        read_text(tokenizer, tmp_path / "empty.txt")


@torch.no_grad()
def test_predictions_are_compared_token_by_token(model: Any, tokenizer: Any) -> None:
    other = copy.deepcopy(model)
    other.lm_head.weight += 0.2 * torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    rows = tokens_of(tokenizer, TEXT[:400]).windows(model, tokenizer)
    seen: list[tuple[int, int]] = []
    found = compare_predictions(model, other, rows, batch_size=3, progress=lambda *at: seen.append(at))
    expected = {}
    for window, row in enumerate(rows):
        a, b = (each(torch.tensor([row.ids[:-1]])).logits[0] for each in (model, other))
        for position, (x, y) in enumerate(zip(a, b, strict=True)):
            i, j = int(x.argmax()), int(y.argmax())
            if i != j:
                expected[window, position] = (i, j, float(x[i] - x[j]), float(y[j] - y[i]))
    assert 10 < len(found.partings) == len(expected) < found.tokens == sum(row.n for row in rows)
    for p in found.partings:
        margins = p.dense_token, p.sparse_token, p.dense_margin, p.sparse_margin
        assert margins == pytest.approx(expected[p.prompt, p.position], abs=1e-4)
    moved = [p.moved for p in found.partings]
    assert moved == sorted(moved, reverse=True) and found.real == len([m for m in moved if m > 1e-2])
    assert found.logits_difference >= max(moved) / 2 and seen[-1] == (len(rows), len(rows))
    same = compare_predictions(model, model, rows, batch_size=8)
    assert (same.partings, same.logits_difference, same.real) == ([], 0.0, 0)
    other.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not numbers"):
        compare_predictions(model, other, rows, batch_size=8)


@torch.no_grad()
def test_fp8_layers_are_planned_to_run_sparsely_always(model: Any) -> None:
    quantized = copy.deepcopy(model)
    quantize_(quantized, emulate=True)
    twin, ids = copy.deepcopy(quantized), torch.arange(20).view(2, 10)
    with counting(quantized, twin) as fired:
        twin(ids)
    twin(ids)
    recorded = record(quantized, ids)
    for layer, of in enumerate(fired):
        assert of.tokens == 20 and of.counts is not None
        assert torch.equal(of.counts, recorded.neuron_counts(layer))
    rare = Fired()
    rare.counts, rare.tokens = torch.ones(F, dtype=torch.int64), 1000
    plan_all_(quantized, [rare, fired[1]])
    few, many = (ffn.plan for _, ffn in sparse_ffns(quantized))
    assert few is not None and few.runs_split(1, captured=False) and few.tail is None  # so it stays
    assert many is not None and many.is_dense  # half of the neurons fire
    rare.counts.zero_()
    plan_all_(quantized, [rare, rare])
    assert all(ffn.plan is not None and not ffn.plan.is_dense for _, ffn in sparse_ffns(quantized))
    plan_all_(plain := copy.deepcopy(model), fired)
    assert [ffn.plan for _, ffn in sparse_ffns(plain)] == [None, None]


def test_errors(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no passages"):
        score_last_words(model, tokenizer, [])
    with pytest.raises(ValueError, match="at least two words, got 'alone'"):
        score_last_words(model, tokenizer, ["alone"])
    with pytest.raises(ValueError, match="does not say how long its context is"):
        context_length(SimpleNamespace(config=PreTrainedConfig()))
