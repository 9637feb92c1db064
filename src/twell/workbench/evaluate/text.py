"""How well a model predicts text: perplexity and bits per byte of any text, and LAMBADA's last words.

Every token of a text is predicted exactly once: the text is cut into windows of the model's context, the first one
led by end-of-text, each further one by the last token of the window before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twell.train.data import find_files, read_documents
from twell.workbench.evaluate.predictions import Progress, Row, context_length, leader, predict, predict_pairs, silent
from twell.workbench.evaluate.scores import Metrics, mean_of
from twell.workbench.evaluate.tasks import read_lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScore:
    """Sums over a text; the usual averages follow from them."""

    nats: float  # sum of -log p
    tokens: int
    bytes: int
    words: int
    window_nats: tuple[float, ...]

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
    def metrics(self) -> Metrics:
        """Of each window, as if all had the same share of the tokens and bytes: then the whole is their mean."""
        n = len(self.window_nats)
        shares = {"loss": self.tokens / n, "bits_per_byte": math.log(2) * self.bytes / n}
        return Metrics({name: [nats / share for nats in self.window_nats] for name, share in shares.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastWordScore:
    """LAMBADA: is the last word of a passage what the model would write next?"""

    accuracy: float
    accuracy_error: float  # standard error
    perplexity: float  # of the last word
    items: int
    right: tuple[bool, ...]  # passage by passage

    @property
    def metrics(self) -> Metrics:
        return Metrics({"accuracy": [float(r) for r in self.right]})


class Tokens(NamedTuple):
    """A text as tokens, and how long it is otherwise."""

    ids: list[int]
    bytes: int
    words: int

    @classmethod
    def of(cls, ids: list[int], texts: Sequence[str]) -> Tokens:
        return cls(ids, sum(len(one.encode()) for one in texts), sum(len(one.split()) for one in texts))

    def windows(self, model: Any, tokenizer: Any) -> list[Row]:
        """Rows that predict each of the tokens once."""
        context, led = context_length(model), [leader(tokenizer), *self.ids]
        windows = (led[start : start + context + 1] for start in range(0, len(led) - 1, context))
        return [Row(window, len(window) - 1) for window in windows]


def tokens_of(tokenizer: Any, text: str | Sequence[str]) -> Tokens:
    """Of a text; of several documents with end-of-text after each, as in training."""
    texts, end = ([text], []) if isinstance(text, str) else (text, [tokenizer.eos_token_id])
    ids = [token for one in texts for token in (*tokenizer.encode(one, add_special_tokens=False), *end)]
    if len(ids) == len(texts) * len(end):
        raise ValueError("the text is empty")
    return Tokens.of(ids, texts)


def read_validation(tokenizer: Any, path: Path) -> Tokens:
    """Documents as ``twell train`` reads what it validates on: text cut at lines of end-of-text, or tokens."""

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
    """Predict every token of ``text`` once; of several documents also the end-of-text after each, as in training."""
    tokens = text if isinstance(text, Tokens) else tokens_of(tokenizer, text)
    rows = tokens.windows(model, tokenizer)
    nats = tuple(-p.log_p for p in predict(model, rows, batch_size=batch_size, progress=progress))
    return TextScore(nats=sum(nats), tokens=len(tokens.ids), bytes=tokens.bytes, words=tokens.words, window_nats=nats)


def score_last_words(
    model: Any, tokenizer: Any, passages: Sequence[str], *, batch_size: int = 32, progress: Progress = silent
) -> LastWordScore:
    """Each passage's last word, given the rest: right only if every one of its tokens is the most likely one."""
    if not passages:
        raise ValueError("no passages to score")
    pairs = []
    for passage in passages:
        body, _, word = passage.rstrip().rpartition(" ")
        if not body.strip():
            raise ValueError(f"a passage needs at least two words, got {passage!r}")
        pairs.append((body, f" {word}"))
    found = predict_pairs(model, tokenizer, pairs, batch_size=batch_size, progress=progress)
    right = tuple(p.is_top for p in found)
    accuracy = mean_of(right)
    return LastWordScore(
        accuracy=accuracy.value,
        accuracy_error=accuracy.error,
        perplexity=_exp(-sum(p.log_p for p in found) / len(found)),
        items=len(found),
        right=right,
    )


def _exp(nats: float) -> float:
    """Infinite where a model is as bad as that, instead of an OverflowError."""
    return math.exp(nats) if nats < 700 else math.inf


def read_passages(path: Path) -> list[str]:
    """The ``text`` fields of a .jsonl file."""
    passages = []
    for number, fields in read_lines(path):
        if not isinstance(fields.get("text"), str):
            raise ValueError(f"{path}, line {number} has no field 'text'")
        passages.append(fields["text"])
    return passages
