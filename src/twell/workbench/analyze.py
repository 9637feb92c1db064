"""``twell analyze``: which neurons of a model fire on a text, by layer, position, token and neuron.

Everything follows from the recorded trace: which neurons fired, never how strongly. Sequences are independent:
neighbours, positions and examples lie within one sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from twell.nn import SparseFFNBase
from twell.plan import Costs, choose_plan, costs_for
from twell.progress import Progress, silent
from twell.workbench.analysis import (
    Analysis,
    Counted,
    Curve,
    Example,
    Facts,
    LayerAnalysis,
    Overlap,
    PlanSummary,
    Positions,
    Sample,
    TokenType,
)
from twell.workbench.sequences import DEFAULT_LENGTH, Text, sequences_of
from twell.workbench.trace import Trace, record

TOP_PERCENT = (1, 5, 10, 20)  # of a layer's neurons, busiest first
CURVE_POINTS = 200
_PAIRS_AT_ONCE = 1024  # pairs of tokens compared in one step
_MAX_RANDOM_PAIRS = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How much of a text is shown."""

    top: int = 20  # token types in either ranking
    min_count: int = 5  # occurrences a type needs to be ranked
    examples: int = 3  # of each ranked type
    window: int = 8  # tokens on either side of an example, within its sequence
    sample_sequence: int = 0  # where the stretch begins that is shown token by token
    sample_start: int = 0
    sample_tokens: int = 128  # at most; the stretch ends with its sequence
    seed: int = 0  # of the random pairs

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("min_count", 1), ("sample_tokens", 1), ("examples", 0), ("window", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


_DEFAULTS = Options()


class FFNShape(NamedTuple):
    """What a plan depends on besides how often neurons fire."""

    width: int  # D
    gated: bool


def analyze(
    model: Any,
    tokenizer: Any,
    text: Text,
    *,
    tokens: int = 16384,
    length: int | None = None,
    batch_size: int | None = None,
    device: torch.device | None = None,
    options: Options = _DEFAULTS,
    progress: Progress = silent,
) -> Analysis:
    """Run a model over the first ``tokens`` tokens of a text and analyse which neurons fire.

    ``text`` and ``length``: see ``sequences_of``; ``model`` and ``progress``: see ``record``. ``batch_size`` counts
    sequences; by default a batch has about 1024 tokens. Plans follow the costs of ``device``, by default the model's.
    """
    from twell.hf.text import context_of

    context = context_of(model) if hasattr(model, "config") else None
    input_ids = sequences_of(tokenizer, text, tokens, length, context, shortest=2)
    n_sequences, length = input_ids.shape
    _check_sample(options, n_sequences, length)
    if batch_size is None:
        batch_size = max(1, DEFAULT_LENGTH // length)
    trace = record(model, input_ids, batch_size=batch_size, progress=progress)
    ffns = [getattr(model, "base_model", model).get_submodule(name) for name in trace.names]
    return analyze_trace(
        trace,
        input_ids,
        tokenizer,
        shapes=[_shape_of(ffn) for ffn in ffns],
        model_type=getattr(model.config, "model_type", None),
        counted=_counted(model, ffns),
        device=device or model.device,
        options=options,
    )


def analyze_trace(
    trace: Trace,
    input_ids: Tensor,
    tokenizer: Any,
    *,
    shapes: Sequence[FFNShape],
    model_type: str | None = None,
    counted: Sequence[Counted | None] | None = None,
    device: torch.device | None = None,
    options: Options = _DEFAULTS,
) -> Analysis:
    """Analyse the trace of ``input_ids`` [sequences, length]. ``shapes`` and ``counted`` have one entry a layer."""
    n_sequences, length = input_ids.shape
    if trace.tokens != input_ids.numel():
        raise ValueError(f"the trace has {trace.tokens:,} tokens, input_ids {input_ids.numel():,}")
    if length < 2:
        raise ValueError("a sequence needs at least 2 tokens: neighbours are compared")
    if len(shapes) != trace.layers:
        raise ValueError(f"the trace has {trace.layers} layers, but {len(shapes)} shapes were given")
    _check_sample(options, n_sequences, length)
    ids_SL = input_ids.cpu().numpy()
    active_SL = np.sum(trace.counts, axis=0, dtype=np.int64).reshape(n_sequences, length)  # over all layers
    positions = _positions(length)
    neighbours, random_pairs = _neighbours(n_sequences, length), _random_pairs(trace.tokens, options.seed)
    costs = costs_for(device or torch.device("cpu"))
    layers = []
    for i, summary in enumerate(trace.summary()):
        counts, fired, active = trace.counts[i], trace.neuron_counts(i), trace.pattern(i)
        p50, p90 = np.percentile(counts, (50, 90)).tolist()
        layers.append(
            LayerAnalysis(
                name=summary.layer,
                mean=summary.mean,
                p50=p50,
                p90=p90,
                p99=summary.p99,
                max=summary.max,
                silent=summary.dead,
                counted=None if counted is None else counted[i],
                by_position=_by_position(counts.reshape(n_sequences, length), positions),
                curve=_curve(fired, trace.tokens),
                top_shares=_top_shares(fired),
                overlap=Overlap(neighbours=_jaccard(active, *neighbours), random=_jaccard(active, *random_pairs)),
                plan=_plan(fired, trace.tokens, shapes[i], costs),
            )
        )
    most, least = _rankings(ids_SL, active_SL, tokenizer, options)
    facts = Facts(
        model_type=model_type,
        layers=trace.layers,
        width=shapes[0].width,
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
        min_count=options.min_count,
        most_active=most,
        least_active=least,
        mean_predicted=sum(layer.plan.predicted for layer in layers) / len(layers),
        sample=_sample(trace, ids_SL, tokenizer, options),
    )


def _check_sample(options: Options, n_sequences: int, length: int) -> None:
    sequence, start = options.sample_sequence, options.sample_start
    if not 0 <= sequence < n_sequences:
        raise ValueError(f"sample_sequence must be 0 to {n_sequences - 1:,}, got {sequence}")
    if not 0 <= start < length:
        raise ValueError(f"sample_start must be 0 to {length - 1:,}, got {start}")


# -- the model ----------------------------------------------------------------------------------------------


def _gate_of(ffn: nn.Module) -> tuple[str, nn.Linear]:
    """The projection that the activation follows, with its name."""
    from twell.hf.classify import projection_names

    name = projection_names(ffn)[0]
    return name, getattr(ffn, name)


def _shape_of(ffn: nn.Module) -> FFNShape:
    name, gate = _gate_of(ffn)
    return FFNShape(gate.in_features, name == "gate_proj")


def _counted(model: Any, ffns: Sequence[nn.Module]) -> list[Counted | None]:
    """For each FFN: running counts if any FFN has them, else the counts of ``twell calibrate`` beside the model."""
    running = [_counted_while_running(ffn) for ffn in ffns]
    if any(running):
        return running
    from twell.hf.counts import find_counts

    counts = find_counts(getattr(model.config, "_name_or_path", None))
    if counts is None:
        return running
    widths, counted = [_gate_of(ffn)[1].out_features for ffn in ffns], [len(fired) for fired in counts.fired]
    if widths != counted:
        raise ValueError(f"the counts have {len(counted)} FFNs {counted}, the model has {len(widths)} {widths}")
    return [Counted(source="calibration", tokens=counts.tokens, silent=_never(fired)) for fired in counts.fired]


def _counted_while_running(ffn: nn.Module) -> Counted | None:
    if not isinstance(ffn, SparseFFNBase) or not int(ffn.tokens_seen):
        return None
    return Counted(source="running counts", tokens=int(ffn.tokens_seen), silent=_never(ffn.neuron_counts))


def _never(fired: Tensor) -> float:
    return float((fired == 0).double().mean())


# -- layers -------------------------------------------------------------------------------------------------


def _positions(length: int) -> list[Positions]:
    """0, 1, 2 to 3, 4 to 7, ..., doubling; the last range ends with the sequence.

    >>> [(p.first, p.last) for p in _positions(10)]
    [(0, 0), (1, 1), (2, 3), (4, 7), (8, 9)]
    """
    firsts = [0, *(1 << k for k in range((length - 1).bit_length()))]
    return [Positions(first=first, last=min(max(1, 2 * first), length) - 1) for first in firsts]


def _by_position(counts_SL: np.ndarray, positions: list[Positions]) -> list[float]:
    return [float(counts_SL[:, p.first : p.last + 1].mean()) for p in positions]


def _curve(fired: Tensor, tokens: int) -> Curve:
    """Half of the points at equal distances, half at equal ratios, since a few busy neurons fire most."""
    F, half = len(fired), CURVE_POINTS // 2
    frequencies = fired.sort(descending=True).values.double() / tokens
    if F <= CURVE_POINTS:
        return Curve(ranks=list(range(F)), frequencies=frequencies.tolist())
    spread = np.concatenate([np.linspace(0, F - 1, half), np.geomspace(1, F, half) - 1])
    ranks = np.unique(spread.round().astype(np.int64))
    return Curve(ranks=ranks.tolist(), frequencies=frequencies[ranks].tolist())


def _top_shares(fired: Tensor) -> dict[str, float]:
    """Share of all firings by the busiest 1, 5, ... percent of the neurons, at least one neuron."""
    busiest, total = fired.sort(descending=True).values, max(1, int(fired.sum()))
    return {str(p): int(busiest[: max(1, round(len(fired) * p / 100))].sum()) / total for p in TOP_PERCENT}


def _neighbours(n_sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens t and t + 1 of every sequence, as indices into all tokens."""
    left = torch.arange(n_sequences * length).view(n_sequences, length)[:, :-1].flatten()
    return left, left + 1


def _random_pairs(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of different tokens, of any sequences: as many as there are tokens, up to a limit."""
    generator = torch.Generator().manual_seed(seed)
    n_pairs = min(tokens, _MAX_RANDOM_PAIRS)
    left = torch.randint(tokens, (n_pairs,), generator=generator)
    further = torch.randint(1, tokens, (n_pairs,), generator=generator)
    return left, (left + further) % tokens


def _jaccard(active_MF: Tensor, left: Tensor, right: Tensor) -> float | None:
    """The mean over pairs of tokens for which a neuron fired."""
    total, pairs, counts = 0.0, 0, active_MF.sum(1)
    for a, b in zip(left.split(_PAIRS_AT_ONCE), right.split(_PAIRS_AT_ONCE), strict=True):
        both = (active_MF[a] & active_MF[b]).sum(1)
        either = counts[a] + counts[b] - both
        total += float((both.double() / either.clamp(min=1)).sum())
        pairs += int((either > 0).sum())
    return total / pairs if pairs else None


def _plan(fired: Tensor, tokens: int, shape: FFNShape, costs: Costs) -> PlanSummary:
    plan = choose_plan(fired, tokens, costs, width=shape.width, gated=shape.gated)
    assert plan.predicted is not None  # choose_plan always predicts
    return PlanSummary(
        dense=plan.is_dense, hot=len(plan.hot), cap=plan.cap, min_tokens=plan.min_tokens, predicted=plan.predicted
    )


# -- tokens -------------------------------------------------------------------------------------------------


def _rankings(
    ids_SL: np.ndarray, active_SL: np.ndarray, tokenizer: Any, options: Options
) -> tuple[list[TokenType], list[TokenType]]:
    """The token types with the most and with the fewest active neurons."""
    types, type_of_token, counts = np.unique(ids_SL, return_inverse=True, return_counts=True)
    means = np.bincount(type_of_token.ravel(), weights=active_SL.ravel()) / counts
    enough = np.flatnonzero(counts >= options.min_count)

    def ranked(keys: np.ndarray) -> list[TokenType]:
        order = np.lexsort((types[enough], -counts[enough], keys[enough]))[: options.top]  # the last key counts first
        return [
            TokenType(
                id=int(types[i]),
                text=_token_text(tokenizer, int(types[i])),
                count=int(counts[i]),
                mean=float(means[i]),
                examples=_examples(int(types[i]), ids_SL, active_SL, tokenizer, options),
            )
            for i in enough[order]
        ]

    return ranked(-means), ranked(means)


def _examples(token: int, ids_SL: np.ndarray, active_SL: np.ndarray, tokenizer: Any, options: Options) -> list[Example]:
    places = np.argwhere(ids_SL == token)  # [occurrences, 2]
    chosen = np.unique(np.linspace(0, len(places) - 1, min(options.examples, len(places))).round().astype(np.int64))
    examples = []
    for sequence, position in places[chosen].tolist():
        text, start, end = _in_context(tokenizer, ids_SL[sequence].tolist(), position, options.window)
        active = int(active_SL[sequence, position])
        examples.append(Example(sequence=sequence, position=position, active=active, text=text, start=start, end=end))
    return examples


def _in_context(tokenizer: Any, ids: list[int], position: int, window: int) -> tuple[str, int, int]:
    """The text around a token of a sequence, and where the token starts and ends in it.

    Compares the decoded tokens before the position, and up to and including it, with the decoded window. They differ
    from it where a token ends inside a character, which decodes to a replacement character.
    """
    first = max(0, position - window)
    text = _decode(tokenizer, ids[first : position + window + 1])
    before, through = (_decode(tokenizer, ids[first:end]) for end in (position, position + 1))
    start, end = (len(commonprefix([text, part])) for part in (before, through))  # noqa: RUF071, characters are compared
    end = min(len(text), end + (end < len(through)))
    if start >= end and _decode(tokenizer, [ids[position]]):  # the window cuts off the rest of the character
        start = max(0, end - 1)
    return text, start, end


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _token_text(tokenizer: Any, token: int) -> str:
    """A single token as text, with the space before a word that some tokenizers drop at the start of a text."""
    text = _decode(tokenizer, [token])
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text


def _sample(trace: Trace, ids_SL: np.ndarray, tokenizer: Any, options: Options) -> Sample:
    sequence, start = options.sample_sequence, options.sample_start
    stretch = slice(start, start + options.sample_tokens)
    return Sample(
        sequence=sequence,
        start=start,
        tokens=[_token_text(tokenizer, token) for token in ids_SL[sequence, stretch].tolist()],
        active=[counts.reshape(ids_SL.shape)[sequence, stretch].tolist() for counts in trace.counts],
    )
