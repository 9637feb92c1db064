"""How good a model is on text: perplexity and bits per byte of any text, and LAMBADA's last words.

Every token of a text is predicted exactly once: the text is cut into windows of the model's context, the first one
led by end-of-text, each further one by the last token of the window before it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

Progress = Callable[[int, int], None]  # (windows or items done, all)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScore:
    """Sums over a text; the usual averages follow from them."""

    nats: float  # sum of -log p
    tokens: int
    bytes: int
    words: int

    @property
    def loss(self) -> float:
        """Cross-entropy a token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def word_perplexity(self) -> float:
        return math.exp(self.nats / self.words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastWordScore:
    """LAMBADA: is the last word of a passage what the model would write next?"""

    accuracy: float
    accuracy_error: float  # standard error
    perplexity: float  # of the last word
    items: int


def score_text(
    model: Any, tokenizer: Any, text: str, *, batch_size: int = 8, progress: Progress = lambda done, total: None
) -> TextScore:
    """Predict every token of ``text`` once."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError("the text is empty")
    context = _context(model)
    led = [_leader(tokenizer), *ids]
    windows = [led[start : start + context + 1] for start in range(0, len(led) - 1, context)]
    nats, done = 0.0, 0
    for batch in _batches(windows, batch_size):
        log_p, _ = _log_probabilities(model, batch)
        nats -= sum(row.double().sum().item() for row in log_p)
        done += len(batch)
        progress(done, len(windows))
    return TextScore(nats=nats, tokens=len(ids), bytes=len(text.encode()), words=len(text.split()))


def score_last_words(
    model: Any,
    tokenizer: Any,
    passages: Sequence[str],
    *,
    batch_size: int = 32,
    progress: Progress = lambda done, total: None,
) -> LastWordScore:
    """Each passage's last word, given the rest: right only if every one of its tokens is the most likely one."""
    if not passages:
        raise ValueError("no passages to score")
    limit = _context(model) + 1
    items = []
    for passage in passages:
        body, _, word = passage.rstrip().rpartition(" ")
        if not body:
            raise ValueError(f"a passage needs at least two words, got {passage!r}")
        target = tokenizer.encode(f" {word}", add_special_tokens=False)
        ids = [*tokenizer.encode(body, add_special_tokens=False), *target]
        items.append((ids[-limit:], len(target)))
    items.sort(key=lambda item: len(item[0]), reverse=True)  # little padding, and the largest batch comes first
    right, nats, done = 0, 0.0, 0
    for batch in _batches(items, batch_size):
        log_p, is_top = _log_probabilities(model, [ids for ids, _ in batch])
        for (_, n), row, top in zip(batch, log_p, is_top, strict=True):
            nats -= row[-n:].double().sum().item()
            right += bool(top[-n:].all())
        done += len(batch)
        progress(done, len(items))
    share = right / len(items)
    error = math.sqrt(share * (1 - share) / max(1, len(items) - 1))
    return LastWordScore(accuracy=share, accuracy_error=error, perplexity=math.exp(nats / len(items)), items=len(items))


def read_passages(path: Path) -> list[str]:
    """The ``text`` fields of a .jsonl file."""
    passages = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            passages.append(json.loads(line)["text"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number} has no field 'text'") from None
    return passages


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _context(model: Any) -> int:
    return int(model.config.max_position_embeddings)


def _leader(tokenizer: Any) -> int:
    leader = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if leader is None:
        raise ValueError("the tokenizer has no end-of-text token to start a text with")
    return int(leader)


@torch.no_grad()
def _log_probabilities(model: Any, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Per row of ids: log p of every token after the first, and whether it was the most likely one.

    Rows are padded on the right, where causal attention keeps the padding out of everything before it.
    """
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    finally:
        model.train(was_training)
    targets = ids[:, 1:]
    log_p = -nnf.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)
    is_top = logits.argmax(-1) == targets
    lengths = [len(row) - 1 for row in rows]
    return (
        [row[:n] for row, n in zip(log_p, lengths, strict=True)],
        [row[:n] for row, n in zip(is_top, lengths, strict=True)],
    )
