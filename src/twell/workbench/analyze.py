"""``twell analyze``: which neurons of a model fire on a text, by layer, position, token and neuron.

Everything follows from the recorded trace: which neurons fired, never how strongly. Sequences are independent:
neighbours, positions and examples lie within one sequence.
"""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.plan import choose_plan, costs_for
from twell.progress import Progress, silent
from twell.workbench.analysis import Analysis, Facts, LayerAnalysis, PlanSummary, TokenType
from twell.workbench.sequences import DEFAULT_LENGTH, Text, sequences_of
from twell.workbench.trace import Trace, record

CURVE_POINTS = 200
TOP, MIN_COUNT = 10, 5  # token types in either ranking; occurrences a type needs to be ranked
EXAMPLES, WINDOW = 3, 8  # of each ranked type, with so many tokens on either side
SAMPLE_TOKENS = 128  # shown token by token, at most


def analyze(
    model: Any,
    tokenizer: Any,
    text: Text,
    *,
    tokens: int = 16384,
    length: int | None = None,
    progress: Progress = silent,
) -> Analysis:
    """Run a model over the first ``tokens`` tokens of a text and analyse which neurons fire.

    ``text`` and ``length``: see ``sequences_of``; ``model`` and ``progress``: see ``record``.
    """
    from twell.hf.classify import projection_names
    from twell.hf.text import context_of

    context = context_of(model) if hasattr(model, "config") else None
    input_ids = sequences_of(tokenizer, text, tokens, length, context, shortest=2)
    batch_size = max(1, DEFAULT_LENGTH // input_ids.shape[1])
    trace = record(model, input_ids, batch_size=batch_size, progress=progress)
    ffn = getattr(model, "base_model", model).get_submodule(trace.names[0])
    gate = projection_names(ffn)[0]  # the projection that the activation follows
    return analyze_trace(
        trace,
        input_ids,
        tokenizer,
        width=getattr(ffn, gate).in_features,
        gated=gate == "gate_proj",
        model_type=getattr(model.config, "model_type", None),
        device=model.device,
    )


def analyze_trace(
    trace: Trace,
    input_ids: Tensor,
    tokenizer: Any,
    *,
    width: int,
    gated: bool,
    model_type: str | None = None,
    device: torch.device | None = None,
) -> Analysis:
    """Analyse the trace of ``input_ids`` [sequences, length]. Plans follow the costs of ``device``, or of a CPU."""
    n_sequences, length = input_ids.shape
    ids_SL = input_ids.cpu().numpy()
    active_SL = np.sum(trace.counts, axis=0, dtype=np.int64).reshape(n_sequences, length)  # over all layers
    positions = [0, *(1 << k for k in range((length - 1).bit_length()))]
    costs = costs_for(device or torch.device("cpu"))
    layers = []
    for i, summary in enumerate(trace.summary()):
        counts, fired = trace.counts[i], trace.neuron_counts(i)
        p50, p90 = np.percentile(counts, (50, 90)).tolist()
        by_position = np.split(counts.reshape(n_sequences, length).mean(0), positions[1:])
        ranks, frequencies = _curve(fired, trace.tokens)
        plan = choose_plan(fired, trace.tokens, costs, width=width, gated=gated)
        assert plan.predicted is not None  # choose_plan always predicts
        layers.append(
            LayerAnalysis(
                name=summary.layer,
                mean=summary.mean,
                p50=p50,
                p90=p90,
                p99=summary.p99,
                max=summary.max,
                silent=summary.dead,
                top_tenth=summary.top_tenth,
                shared=_shared(trace.pattern(i).view(n_sequences, length, -1)),
                by_position=[float(part.mean()) for part in by_position],
                ranks=ranks,
                frequencies=frequencies,
                plan=PlanSummary(
                    dense=plan.is_dense,
                    hot=len(plan.hot),
                    cap=plan.cap,
                    min_tokens=plan.min_tokens,
                    predicted=plan.predicted,
                ),
            )
        )
    most, least = _rankings(ids_SL, active_SL, tokenizer)
    facts = Facts(
        model_type=model_type,
        width=width,
        hidden_sizes=list(trace.hidden_sizes),
        tokens=trace.tokens,
        sequences=n_sequences,
        length=length,
        token_types=len(np.unique(ids_SL)),
    )
    return Analysis(
        facts=facts,
        layers=layers,
        positions=positions,
        min_count=MIN_COUNT,
        most_active=most,
        least_active=least,
        sample_tokens=[_token_text(tokenizer, token) for token in ids_SL[0, :SAMPLE_TOKENS].tolist()],
        sample_active=[counts[: min(length, SAMPLE_TOKENS)].tolist() for counts in trace.counts],
    )


# -- layers -------------------------------------------------------------------------------------------------


def _curve(fired: Tensor, tokens: int) -> tuple[list[int], list[float]]:
    """Ranks and frequencies of at most 200 neurons, the busiest first, closer together at low ranks, with both ends."""
    F = len(fired)
    ranks = np.arange(F) if F <= CURVE_POINTS else np.unique(np.geomspace(1, F, CURVE_POINTS).round().astype(int)) - 1
    return ranks.tolist(), (fired.sort(descending=True).values.double() / tokens)[ranks].tolist()


def _shared(active_SLF: Tensor) -> float | None:
    """The mean over neighbours for which a neuron fired: how many fire for both, over how many fire for either."""
    total, pairs = 0.0, 0
    for active_LF in active_SLF:
        counts, both = active_LF.sum(1), (active_LF[1:] & active_LF[:-1]).sum(1)
        either = counts[1:] + counts[:-1] - both
        total += float((both.double() / either.clamp(min=1)).sum())
        pairs += int((either > 0).sum())
    return total / pairs if pairs else None


# -- tokens -------------------------------------------------------------------------------------------------


def _rankings(ids_SL: np.ndarray, active_SL: np.ndarray, tokenizer: Any) -> tuple[list[TokenType], list[TokenType]]:
    """The token types with the most and with the fewest active neurons."""
    types, type_of_token, counts = np.unique(ids_SL, return_inverse=True, return_counts=True)
    means = np.bincount(type_of_token.ravel(), weights=active_SL.ravel()) / counts
    enough = np.flatnonzero(counts >= MIN_COUNT)

    def ranked(keys: np.ndarray) -> list[TokenType]:
        order = np.lexsort((types[enough], -counts[enough], keys[enough]))[:TOP]  # the last key counts first
        return [
            TokenType(
                id=int(types[i]),
                text=_token_text(tokenizer, int(types[i])),
                count=int(counts[i]),
                mean=float(means[i]),
                examples=_examples(int(types[i]), ids_SL, tokenizer),
            )
            for i in enough[order]
        ]

    return ranked(-means), ranked(means)


def _examples(token: int, ids_SL: np.ndarray, tokenizer: Any) -> list[list[str]]:
    """Spread evenly over the occurrences."""
    places = np.argwhere(ids_SL == token)  # [occurrences, 2]
    chosen = np.unique(np.linspace(0, len(places) - 1, min(EXAMPLES, len(places))).round().astype(np.int64))
    return [_in_context(tokenizer, ids_SL[sequence].tolist(), at) for sequence, at in places[chosen].tolist()]


def _in_context(tokenizer: Any, ids: list[int], position: int) -> list[str]:
    """The text around a token of a sequence: what stands before it, the token, what follows.

    Compares the decoded tokens before the position, and up to and including it, with the decoded window. They differ
    from it where a token ends inside a character, which decodes to a replacement character.
    """
    first = max(0, position - WINDOW)
    text = _decode(tokenizer, ids[first : position + WINDOW + 1])
    before, through = (_decode(tokenizer, ids[first:end]) for end in (position, position + 1))
    start, end = (len(commonprefix([text, part])) for part in (before, through))  # noqa: RUF071, characters are compared
    end = min(len(text), end + (end < len(through)))
    if start >= end and _decode(tokenizer, [ids[position]]):  # the window cuts off the rest of the character
        start = max(0, end - 1)
    return [text[:start], text[start:end], text[end:]]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _token_text(tokenizer: Any, token: int) -> str:
    """A single token as text, with the space before a word that some tokenizers drop at the start of a text."""
    text = _decode(tokenizer, [token])
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
