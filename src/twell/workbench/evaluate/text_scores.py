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
from twell.train.data import find_files, read_documents
from twell.workbench.evaluate.means import EvalMetrics
from twell.workbench.evaluate.predictions import Query, context_length, first_token, predict, predict_pairs
from twell.workbench.evaluate.tasks import read_lines


class TextScore(NamedTuple):
    """Sums over a text, and their averages."""

    tokens: int
    bytes: int
    words: int
    window_nats: tuple[float, ...]  # sum of -log p over each window

    @property
    def nats(self) -> float:
        return sum(self.window_nats)

    @property
    def loss(self) -> float:
        """Cross-entropy a token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nats / self.words)

    @property
    def metrics(self) -> EvalMetrics:
        """Means over windows. Each counts as if all had the same number of tokens and bytes."""
        n = len(self.window_nats)
        shares = {"loss": self.tokens / n, "bits_per_byte": math.log(2) * self.bytes / n}
        return EvalMetrics({name: [nats / share for nats in self.window_nats] for name, share in shares.items()})


class LastWordScore(NamedTuple):
    """LAMBADA: does the model predict the last word of a passage?"""

    right: tuple[bool, ...]  # one a passage
    perplexity: float  # of the last words

    @property
    def items(self) -> int:
        return len(self.right)

    @property
    def metrics(self) -> EvalMetrics:
        return EvalMetrics({"accuracy": [float(r) for r in self.right]})


class Tokens(NamedTuple):
    """A text as tokens, and its length in bytes and words."""

    ids: list[int]
    bytes: int
    words: int

    @classmethod
    def of(cls, ids: list[int], texts: Sequence[str]) -> Tokens:
        return cls(ids, sum(len(one.encode()) for one in texts), sum(len(one.split()) for one in texts))

    def windows(self, model: Any, tokenizer: Any) -> list[Query]:
        """Queries that ask for each token once."""
        context, ids = context_length(model), [first_token(tokenizer), *self.ids]
        windows = (ids[start : start + context + 1] for start in range(0, len(ids) - 1, context))
        return [Query(window, len(window) - 1) for window in windows]


def tokens_of(tokenizer: Any, text: str | Sequence[str]) -> Tokens:
    """The tokens of a text, or of several documents with end-of-text after each, as in training."""
    texts, end = ([text], []) if isinstance(text, str) else (text, [tokenizer.eos_token_id])
    ids = [token for one in texts for token in (*tokenizer.encode(one, add_special_tokens=False), *end)]
    if len(ids) == len(texts) * len(end):
        raise ValueError("the text is empty")
    return Tokens.of(ids, texts)


def read_validation(tokenizer: Any, path: Path) -> Tokens:
    """Documents as ``twell train`` reads its validation data: text cut at lines of end-of-text, or token files."""

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(one, add_special_tokens=False) for one in texts]

    files = find_files([path])
    found = read_documents(files, encode, end_of_text=tokenizer.eos_token_id, vocab_size=len(tokenizer))
    documents = [document.tolist() for file in found for document in file]
    texts = [tokenizer.decode(document[:-1], clean_up_tokenization_spaces=False) for document in documents]
    return Tokens.of([token for document in documents for token in document], texts)


def score_text(
    model: Any, tokenizer: Any, text: str | Sequence[str] | Tokens, *, batch_size: int = 8, progress: Progress = silent
) -> TextScore:
    """Predict every token of a text once; for several documents also the end-of-text after each."""
    tokens = text if isinstance(text, Tokens) else tokens_of(tokenizer, text)
    predictions = predict(model, tokens.windows(model, tokenizer), batch_size=batch_size, progress=progress)
    return TextScore(len(tokens.ids), tokens.bytes, tokens.words, tuple(-p.log_p for p in predictions))


def score_last_words(
    model: Any, tokenizer: Any, passages: Sequence[str], *, batch_size: int = 32, progress: Progress = silent
) -> LastWordScore:
    """Predict the last word of each passage: right only if each of its tokens is the most likely one."""
    if not passages:
        raise ValueError("no passages to score")
    pairs = []
    for passage in passages:
        body, _, word = passage.rstrip().rpartition(" ")
        if not body.strip():
            raise ValueError(f"a passage needs at least two words, got {passage!r}")
        pairs.append((body, f" {word}"))
    found = predict_pairs(model, tokenizer, pairs, batch_size=batch_size, progress=progress)
    return LastWordScore(tuple(p.is_top for p in found), _exp(-sum(p.log_p for p in found) / len(found)))


def _exp(nats: float) -> float:
    """Infinite instead of an OverflowError."""
    return math.exp(nats) if nats < 700 else math.inf


def read_passages(path: Path) -> list[str]:
    """The ``text`` fields of a .jsonl file."""
    passages = []
    for number, fields in read_lines(path):
        if not isinstance(fields.get("text"), str):
            raise ValueError(f"{path}, line {number} has no field 'text'")
        passages.append(fields["text"])
    return passages
