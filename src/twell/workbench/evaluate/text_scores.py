"""How well a model predicts text: perplexity and bits per byte of any text, and LAMBADA's last words.

Every token of a text is predicted exactly once. The text is cut into windows of the model's context; the first window
begins with end-of-text, each further one with the last token of the window before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twell.progress import Progress, silent
from twell.train.data import TOKEN_SUFFIXES, find_files, read_documents, read_texts
from twell.workbench.evaluate.means import EvalMetrics
from twell.workbench.evaluate.predictions import Query, context_length, predict, predict_pairs


class Tokens(NamedTuple):
    """A text as tokens, and its length in bytes and words."""

    ids: list[int]
    bytes: int
    words: int

    def windows(self, model: Any, tokenizer: Any) -> list[Query]:
        """Queries that ask for each token once."""
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        context, ids = context_length(model), [first, *self.ids]
        windows = (ids[start : start + context + 1] for start in range(0, len(ids) - 1, context))
        return [Query(window, len(window) - 1) for window in windows]


def read_text(tokenizer: Any, path: Path) -> Tokens:
    """The documents of a file or folder, with end-of-text after each, as ``twell train`` reads them."""
    texts: list[str] = []
    ids: list[int] = []
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end-of-text token")
    for file in find_files([path]):
        if file.name.endswith(TOKEN_SUFFIXES):
            [found] = read_documents([file], tokenizer.encode, end_of_text=end, vocab_size=len(tokenizer))
            documents = [document.tolist() for document in found]
            texts += [tokenizer.decode(document[:-1], clean_up_tokenization_spaces=False) for document in documents]
        else:
            written = [text for text in read_texts(file) if text]
            documents = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in written]
            texts += written
        ids += [token for document in documents for token in document]
    if not ids:
        raise ValueError(f"{path} is empty")
    return Tokens(ids, sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts))


class TextScore(NamedTuple):
    metrics: EvalMetrics
    perplexity: float  # of the words of a text, or of the last words of passages


def score_text(
    model: Any, tokenizer: Any, tokens: Tokens, *, batch_size: int = 8, progress: Progress = silent
) -> TextScore:
    """Predict every token once: bits per byte, and cross-entropy a token (loss).

    Both are means over windows, as if all windows had as many tokens and bytes.
    """
    found = predict(model, tokens.windows(model, tokenizer), batch_size=batch_size, progress=progress)
    metrics = EvalMetrics.of(
        bits_per_byte=[-p.log_p * len(found) / (math.log(2) * tokens.bytes) for p in found],
        loss=[-p.log_p * len(found) / len(tokens.ids) for p in found],
    )
    return TextScore(metrics, _exp(-sum(p.log_p for p in found) / tokens.words))


def score_last_words(
    model: Any, tokenizer: Any, passages: Sequence[str], *, batch_size: int = 32, progress: Progress = silent
) -> TextScore:
    """LAMBADA: predict the last word of each passage. It is right only if each of its tokens is the most likely one."""
    if not passages:
        raise ValueError("no passages to score")
    pairs = []
    for passage in passages:
        body, _, word = passage.rstrip().rpartition(" ")
        if not body.strip():
            raise ValueError(f"a passage needs at least two words, got {passage!r}")
        pairs.append((body, f" {word}"))
    found = predict_pairs(model, tokenizer, pairs, batch_size=batch_size, progress=progress)
    metrics = EvalMetrics.of(accuracy=[p.is_top for p in found])
    return TextScore(metrics, _exp(-sum(p.log_p for p in found) / len(found)))


def _exp(nats: float) -> float:
    """Infinite instead of an OverflowError."""
    return math.exp(nats) if nats < 700 else math.inf
