"""The log-probabilities that a model gives to tokens, for many sequences at once. Every score is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.hf.text import context_of
from twell.progress import Progress, silent

NAN = "the model's predictions are not numbers (NaN)"


class Query(NamedTuple):
    """Token ids, of which the last ``n`` are to be predicted; at least one id comes before them."""

    ids: Sequence[int]
    n: int


class Prediction(NamedTuple):
    log_p: float  # of all tokens to be predicted, summed
    is_top: bool  # each of them was the most likely token


def predict(model: Any, queries: Sequence[Query], *, batch_size: int, progress: Progress = silent) -> list[Prediction]:
    """A prediction for each query.

    Queries that differ only in their last token share a sequence. Sequences run sorted by length, the longest first:
    that keeps padding short, and a batch that exceeds the memory fails at once.
    """
    if batch_size < 1:
        raise ValueError(f"the batch size must be at least 1, got {batch_size}")
    queries_of: dict[tuple[int, ...], list[int]] = {}  # ids that the model reads -> indices of queries
    for i, query in enumerate(queries):
        queries_of.setdefault(tuple(query.ids[:-1]), []).append(i)
    sequences = sorted(queries_of, key=len, reverse=True)
    found: dict[int, Prediction] = {}
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(sequences), batch_size):
            batch = sequences[start : start + batch_size]
            asked = [(place, i) for place, sequence in enumerate(batch) for i in queries_of[sequence]]
            predictions = _predict_batch(model, batch, [(place, queries[i]) for place, i in asked])
            found.update(zip((i for _, i in asked), predictions, strict=True))
            progress(len(found), len(queries))
    finally:
        model.train(was_training)
    return [found[i] for i in range(len(queries))]


@torch.no_grad()
def _predict_batch(
    model: Any, sequences: Sequence[Sequence[int]], asked: Sequence[tuple[int, Query]]
) -> list[Prediction]:
    logits, (places, positions, targets) = logits_of(model, sequences, asked)
    log_p = logits[places, positions, targets] - logits.logsumexp(-1)[places, positions]
    is_top = logits.argmax(-1)[places, positions] == targets
    if log_p.isnan().any():
        raise ValueError(NAN)
    lengths = [query.n for _, query in asked]
    parts = zip(log_p.double().cpu().split(lengths), is_top.cpu().split(lengths), strict=True)
    return [Prediction(float(p.sum()), bool(top.all())) for p, top in parts]


def logits_of(
    model: Any, sequences: Sequence[Sequence[int]], asked: Sequence[tuple[int, Query]]
) -> tuple[Tensor, Tensor]:
    """float32 [sequences, kept, V], and int64 [3, n]: for each token to be predicted its place in ``sequences``, its
    position among the kept ones and its id.

    ``asked`` pairs a place in ``sequences`` with a query; the sequence is the query's ids without the last. Padding is
    on the right, where causal attention hides it from all tokens before it.
    """
    width = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=model.device)
    # Logits of all positions would take most of the memory; only those at the end are needed.
    kept = max(width - len(sequences[place]) + query.n for place, query in asked)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.float()
    if logits.shape[1] != kept:
        raise ValueError(f"the model returned logits of {logits.shape[1]} positions, expected {kept}")
    places: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for place, query in asked:
        end = kept - (width - len(sequences[place]))
        places += [place] * query.n
        positions += range(end - query.n, end)
        targets += query.ids[-query.n :]
    where = torch.tensor([places, positions, targets], device=logits.device)
    return logits, where


# -- texts --------------------------------------------------------------------------------------------------


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Query]:
    """(context, continuation) as tokens, cut where the context's own tokens end, as lm-eval does.

    White space at the end of a context belongs to the continuation, because tokens of words begin with it. The
    tokenizer adds its special tokens; an empty context becomes the end-of-text token.
    """
    moved = []
    for context, continuation in pairs:
        kept = context.rstrip()
        moved.append((kept, context[len(kept) :] + continuation))
    contexts = _encode(tokenizer, [context for context, _ in moved], special=True)
    wholes = _encode(tokenizer, [context + continuation for context, continuation in moved], special=True)
    queries = []
    for (context, continuation), before, whole in zip(moved, contexts, wholes, strict=True):
        if context:
            after = whole[len(before) :]
        else:
            before, after = [first_token(tokenizer)], _encode(tokenizer, [continuation], special=False)[0]
        if not before or not after:
            raise ValueError(f"the tokenizer makes no tokens of {(continuation if before else context)!r}")
        queries.append(Query([*before, *after], len(after)))
    return queries


def _encode(tokenizer: Any, texts: list[str], *, special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []


def windows(query: Query, context: int) -> list[Query]:
    """``query`` cut to a model's context: one query unless more than ``context`` tokens are to be predicted.

    Tokens that do not fit are lost on the left.

    >>> windows(Query([1, 2, 3, 4, 5, 6], 2), context=3)
    [Query(ids=[3, 4, 5, 6], n=2)]
    >>> windows(Query([1, 2, 3, 4, 5, 6], 5), context=3)
    [Query(ids=[1, 2, 3, 4], n=3), Query(ids=[3, 4, 5, 6], n=2)]
    """
    pieces, start = [], len(query.ids) - query.n
    while start < len(query.ids):
        end = min(start + context, len(query.ids))
        pieces.append(Query(query.ids[max(0, end - context - 1) : end], end - start))
        start = end
    return pieces


def predict_pairs(
    model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], *, batch_size: int, progress: Progress = silent
) -> list[Prediction]:
    """Predict each continuation after its context."""
    queries = [windows(query, context_length(model)) for query in encode(tokenizer, pairs)]
    found = iter(predict(model, [w for query in queries for w in query], batch_size=batch_size, progress=progress))
    parts = [[next(found) for _ in query] for query in queries]
    return [Prediction(sum(p.log_p for p in part), all(p.is_top for p in part)) for part in parts]


def context_length(model: Any) -> int:
    context = context_of(model)
    if context is None:
        raise ValueError("the model's configuration does not say how long its context is")
    return context


def first_token(tokenizer: Any) -> int:
    """The token that a text begins with."""
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise ValueError("the tokenizer has no end-of-text token to start a text with")
    return int(found)
