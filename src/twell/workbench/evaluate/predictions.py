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


@torch.no_grad()
def predict(model: Any, queries: Sequence[Query], *, batch_size: int, progress: Progress = silent) -> list[Prediction]:
    """A prediction for each query.

    Queries run sorted by length, the longest first: that keeps padding short, and a batch that exceeds the memory
    fails at once.
    """
    order = sorted(range(len(queries)), key=lambda i: -len(queries[i].ids))
    found: dict[int, Prediction] = {}
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            asked = order[start : start + batch_size]
            batch = [queries[i] for i in asked]
            logits = logits_of(model, batch)
            targets = torch.tensor([i for query in batch for i in query.ids[-query.n :]], device=logits.device)
            log_p = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
            if log_p.isnan().any():
                raise ValueError(NAN)
            is_top = (logits.argmax(-1) == targets).cpu()
            lengths = [query.n for query in batch]
            for i, p, top in zip(asked, log_p.double().cpu().split(lengths), is_top.split(lengths), strict=True):
                found[i] = Prediction(float(p.sum()), bool(top.all()))
            progress(len(found), len(queries))
    finally:
        model.train(was_training)
    return [found[i] for i in range(len(queries))]


def logits_of(model: Any, queries: Sequence[Query]) -> Tensor:
    """float32 [n, V]: logits of all tokens to be predicted, query after query.

    Padding is on the right, where causal attention hides it from all tokens before it.
    """
    lengths = [len(query.ids) - 1 for query in queries]  # the model reads all ids but the last
    width = max(lengths)
    rows = [[*query.ids[:-1], *[0] * (width - length)] for query, length in zip(queries, lengths, strict=True)]
    # Logits of all positions would take most of the memory; only those at the end are needed.
    kept = max(width - length + query.n for query, length in zip(queries, lengths, strict=True))
    ids = torch.tensor(rows, device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.float()
    if logits.shape[1] != kept:
        raise ValueError(f"the model returned logits of {logits.shape[1]} positions, expected {kept}")
    ends = [kept - width + length for length in lengths]
    return torch.cat([row[end - query.n : end] for row, end, query in zip(logits, ends, queries, strict=True)])


# -- texts --------------------------------------------------------------------------------------------------


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Query]:
    """(context, continuation) as tokens, cut where the context's own tokens end, as lm-eval does.

    White space at the end of a context belongs to the continuation, because tokens of words begin with it. The
    tokenizer adds its special tokens.
    """
    contexts = tokenizer([context.rstrip() for context, _ in pairs], verbose=False)["input_ids"]
    wholes = tokenizer([context + continuation for context, continuation in pairs], verbose=False)["input_ids"]
    queries = [Query(whole, len(whole) - len(before)) for before, whole in zip(contexts, wholes, strict=True)]
    for query, (_, continuation) in zip(queries, pairs, strict=True):
        if query.n < 1:
            raise ValueError(f"the tokenizer makes no tokens of {continuation!r}")
    return queries


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
