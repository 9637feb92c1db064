"""The log-probability a model gives to tokens, many sequences at once. All scores are made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Progress = Callable[[int, int], None]  # (done, all)
NAN = "the model's predictions are not numbers (NaN)"


def silent(done: int, total: int) -> None:
    """No progress shown."""


class Row(NamedTuple):
    """Token ids, the last ``n`` of which are to be predicted; there is at least one before them."""

    ids: Sequence[int]
    n: int


class Prediction(NamedTuple):
    log_p: float  # of all tokens to be predicted together
    is_top: bool  # each of them was the most likely one


def predict(model: Any, rows: Sequence[Row], *, batch_size: int, progress: Progress = silent) -> list[Prediction]:
    """The prediction of every row, in their order.

    Sequences go in sorted by length, the longest first: little padding, and what does not fit shows at once. Rows that
    differ in their last token only share a sequence.
    """
    if batch_size < 1:
        raise ValueError(f"the batch size must be at least 1, got {batch_size}")
    sequences: dict[tuple[int, ...], list[int]] = {}  # what the model reads -> rows
    for i, row in enumerate(rows):
        sequences.setdefault(tuple(row.ids[:-1]), []).append(i)
    found: dict[int, Prediction] = {}
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(sorted(sequences, key=len, reverse=True), batch_size):
            asked = [(place, i) for place, sequence in enumerate(batch) for i in sequences[sequence]]
            predictions = _predict_batch(model, batch, [(place, rows[i]) for place, i in asked])
            found.update(zip((i for _, i in asked), predictions, strict=True))
            progress(len(found), len(rows))
    finally:
        model.train(was_training)
    return [found[i] for i in range(len(rows))]


@torch.no_grad()
def _predict_batch(
    model: Any, sequences: Sequence[Sequence[int]], asked: Sequence[tuple[int, Row]]
) -> list[Prediction]:
    logits, (places, positions, targets) = logits_of(model, sequences, asked)
    log_p = logits[places, positions, targets] - logits.logsumexp(-1)[places, positions]
    is_top = logits.argmax(-1)[places, positions] == targets
    if log_p.isnan().any():
        raise ValueError(NAN)
    lengths = [row.n for _, row in asked]
    return [Prediction(float(p.sum()), bool(top.all())) for p, top in zip(*_split(lengths, log_p, is_top), strict=True)]


def logits_of(
    model: Any, sequences: Sequence[Sequence[int]], asked: Sequence[tuple[int, Row]]
) -> tuple[Tensor, Tensor]:
    """float32 [sequences, kept, V], and int64 [3, n]: of each token to be predicted its place and position in them, and
    its id.

    ``asked``: pairs of a place in ``sequences`` and a row whose ids without the last are that sequence. Padding is on
    the right, where causal attention keeps it out of everything before it.
    """
    width = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=model.device)
    # Only the last positions are asked for: the logits of the others would be most of the memory.
    kept = max(width - len(sequences[place]) + row.n for place, row in asked)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.float()
    if logits.shape[1] != kept:
        raise ValueError(f"the model returned logits of {logits.shape[1]} positions, expected {kept}")
    places: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for place, row in asked:
        end = kept - (width - len(sequences[place]))
        places += [place] * row.n
        positions += range(end - row.n, end)
        targets += row.ids[-row.n :]
    where = torch.tensor([places, positions, targets], device=logits.device)
    return logits, where


def _split(lengths: list[int], log_p: Tensor, is_top: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return log_p.double().cpu().split(lengths), is_top.cpu().split(lengths)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


# ---------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """(context, continuation) in tokens, cut where the context's own tokens end, as lm-eval does it.

    White space at a context's end belongs to the continuation, as tokens of words begin with it. Special tokens come
    as the tokenizer puts them; an empty context becomes the end-of-text token.
    """
    moved = []
    for context, continuation in pairs:
        kept = context.rstrip()
        moved.append((kept, context[len(kept) :] + continuation))
    contexts = _encode(tokenizer, [context for context, _ in moved], special=True)
    wholes = _encode(tokenizer, [context + continuation for context, continuation in moved], special=True)
    rows = []
    for (context, continuation), before, whole in zip(moved, contexts, wholes, strict=True):
        if context:
            after = whole[len(before) :]
        else:
            before, after = [leader(tokenizer)], _encode(tokenizer, [continuation], special=False)[0]
        if not before or not after:
            raise ValueError(f"the tokenizer makes no tokens of {(continuation if before else context)!r}")
        rows.append(Row([*before, *after], len(after)))
    return rows


def _encode(tokenizer: Any, texts: list[str], *, special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []


def windows(row: Row, context: int) -> list[Row]:
    """``row`` in what a model of that context can read, which is one row unless more than ``context`` are predicted.

    What is too long loses tokens on the left.

    >>> windows(Row([1, 2, 3, 4, 5, 6], 2), context=3)
    [Row(ids=[3, 4, 5, 6], n=2)]
    >>> windows(Row([1, 2, 3, 4, 5, 6], 5), context=3)
    [Row(ids=[1, 2, 3, 4], n=3), Row(ids=[3, 4, 5, 6], n=2)]
    """
    pieces, start = [], len(row.ids) - row.n
    while start < len(row.ids):
        end = min(start + context, len(row.ids))
        pieces.append(Row(row.ids[max(0, end - context - 1) : end], end - start))
        start = end
    return pieces


def predict_pairs(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    batch_size: int,
    progress: Progress = silent,
) -> list[Prediction]:
    """Each continuation after its context."""
    rows = [windows(row, context_length(model)) for row in encode(tokenizer, pairs)]
    found = iter(predict(model, [w for row in rows for w in row], batch_size=batch_size, progress=progress))
    parts = [[next(found) for _ in row] for row in rows]
    return [Prediction(sum(p.log_p for p in part), all(p.is_top for p in part)) for part in parts]


def context_length(model: Any) -> int:
    return int(model.config.max_position_embeddings)


def leader(tokenizer: Any) -> int:
    """The token that a text begins with."""
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise ValueError("the tokenizer has no end-of-text token to start a text with")
    return int(found)
