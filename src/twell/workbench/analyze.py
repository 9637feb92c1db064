"""``twell analyze``: which neurons of a model wake on a text, seen by layer, position, token and neuron.

``analyze`` runs a model over a text and returns an ``Analysis``: numbers, strings and lists throughout, which
``to_json`` turns into what ``json.dumps`` takes. Everything follows from the recorded trace (``analyze_trace``): which
neurons fired, never how strongly.

Sequences are cut from the text one after another and know nothing of each other: neighbours, positions and examples
lie within one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from twell.nn import SparseFFNBase
from twell.plan import Costs, choose_plan, costs_for
from twell.workbench.trace import (
    DEFAULT_LENGTH,
    Progress,
    Trace,
    _context,
    _silent,
    encode_beginning,
    packed_text,
    record,
)

FORMAT = 1  # of the JSON form
TOP_PERCENT = (1, 5, 10, 20)  # of a layer's neurons, the busiest
CURVE_POINTS = 200
_PAIRS_AT_ONCE = 1024  # rows of a pattern compared at once
_MAX_RANDOM_PAIRS = 16384

Text = str | Path | Sequence[int] | np.ndarray | Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is shown of a text, and how much of it."""

    top: int = 20  # token types at either end of the ranking
    min_count: int = 5  # occurrences that a type needs to be ranked
    examples: int = 3  # of each ranked type
    window: int = 8  # tokens on either side of an example, as far as its sequence goes
    sample_sequence: int = 0  # the stretch that is shown token by token
    sample_start: int = 0
    sample_tokens: int = 128  # as far as the sequence goes
    seed: int = 0  # of the random pairs

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("min_count", 1), ("sample_tokens", 1), ("examples", 0), ("window", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


_DEFAULTS = Options()


# ---------------------------------------------------------------------------------------------------------
# The result
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What was analysed: ``tokens`` = ``sequences`` * ``length``."""

    model_type: str | None
    layers: int
    width: int  # D
    hidden_sizes: list[int]  # F of each layer
    tokens: int
    sequences: int
    length: int  # tokens a sequence: the context that the model had
    token_types: int  # different tokens among them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """What was counted of a layer before: while it ran, or by ``twell calibrate``."""

    source: str  # "running counts" or "calibration"
    tokens: int
    silent: float  # share of neurons that never fired in them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """How often neurons fire, the busiest first: at most 200 of them, dense where ranks are low, with both ends."""

    ranks: list[int]  # 0 for the busiest neuron, F - 1 for the rarest
    frequencies: list[float]  # share of tokens for which it fired


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Mean Jaccard index of two tokens' active sets: shared neurons over all neurons of either.

    Pairs of which neither token woke a neuron do not count; None where all pairs are such.
    """

    neighbours: float | None  # tokens t and t + 1 of a sequence
    random: float | None  # any two different tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """How the GPU kernels would split the layer's work, by this text; see ``twell.plan``."""

    dense: bool  # the split would gain too little
    hot: int  # neurons computed for every token; F where dense
    cap: int  # a token with more active cold neurons is heavy
    min_tokens: int  # a smaller batch runs densely
    predicted: float  # speedup over dense, of batches that are large enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One FFN."""

    name: str
    mean: float  # active neurons a token
    p50: float
    p90: float
    p99: float
    max: int
    silent: float  # share of neurons that never fired on this text
    counted: Counted | None  # None where the model carries no counts
    by_position: list[float]  # mean active neurons, for each of the analysis' positions
    curve: Curve
    top_shares: dict[
        str, float
    ]  # percent of neurons, the busiest: the share of all firings they carry; 0 if none fired
    overlap: Overlap
    plan: LayerPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positions:
    """Places in a sequence from ``first`` to ``last``, both included."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A token in its context: ``text[start:end]`` is the token.

    A token that is only a part of a character is shown as the whole character.
    """

    sequence: int
    position: int
    active: int  # neurons that it woke, over all layers
    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenType:
    """All occurrences of one token."""

    id: int
    text: str
    count: int
    mean: float  # neurons that it woke, over all layers
    examples: list[Example]  # spread evenly over its occurrences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A stretch of the text, token by token."""

    sequence: int
    start: int
    tokens: list[str]
    active: list[list[int]]  # [layers][tokens]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Analysis:
    """What ``analyze`` found.

    ``most_active`` and ``least_active`` rank token types by the neurons they wake, over all layers: the most, or the
    fewest, first; among equals the more frequent, then the lower id. A text of few types has some in both.
    """

    facts: Facts
    layers: list[Layer]
    positions: list[Positions]
    min_count: int
    most_active: list[TokenType]
    least_active: list[TokenType]
    mean_predicted: float  # speedup over dense: the mean of the layers' plans
    sample: Sample

    @property
    def mean_active(self) -> float:
        """Neurons that a token wakes, over all layers."""
        return sum(layer.mean for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Nothing but what ``json.dumps`` takes."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Analysis:
        """What ``to_json`` gave, after ``json.loads``."""
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("not an analysis: it tells no format")
        if data["format"] != FORMAT:
            raise ValueError(f"an analysis of format {data['format']!r}: only {FORMAT} can be read")
        try:
            fields = {name: value for name, value in data.items() if name != "format"}
            made = {
                "facts": Facts(**fields["facts"]),
                "layers": [_layer_from(layer) for layer in fields["layers"]],
                "positions": [Positions(**positions) for positions in fields["positions"]],
                "most_active": [_token_type_from(row) for row in fields["most_active"]],
                "least_active": [_token_type_from(row) for row in fields["least_active"]],
                "sample": Sample(**fields["sample"]),
            }
            return cls(**{**fields, **made})
        except KeyError as error:
            raise ValueError(f"not a whole analysis: {error} is missing") from None
        except TypeError as error:
            raise ValueError(f"not a whole analysis: {error}") from None

    def __repr__(self) -> str:
        facts = self.facts
        return (
            f"Analysis({facts.layers} layer{'s'[: facts.layers > 1]}, {facts.tokens:,} tokens, "
            f"{self.mean_active:.1f} neurons active, predicted {self.mean_predicted:.2f}x)"
        )


def _layer_from(data: dict[str, Any]) -> Layer:
    counted = None if data["counted"] is None else Counted(**data["counted"])
    parts = {
        "counted": counted,
        "curve": Curve(**data["curve"]),
        "overlap": Overlap(**data["overlap"]),
        "plan": LayerPlan(**data["plan"]),
    }
    return Layer(**{**data, **parts})


def _token_type_from(data: dict[str, Any]) -> TokenType:
    return TokenType(**{**data, "examples": [Example(**example) for example in data["examples"]]})


# ---------------------------------------------------------------------------------------------------------
# A model on a text
# ---------------------------------------------------------------------------------------------------------


class FFNShape(NamedTuple):
    """What a plan asks of a layer besides how often its neurons fire."""

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
    progress: Progress = _silent,
) -> Analysis:
    """Run ``model`` over the first ``tokens`` tokens of a text, as far as it goes, and analyse which neurons fire.

    ``model``: as for ``twell.workbench.trace.record``. ``text`` is the text itself, the ``Path`` of a file (.txt,
    .jsonl, .parquet, or a folder; documents are packed with an end-of-text token after each), or token ids. It is cut
    into sequences of ``length``: by default 1024, or the model's context or the text where that is shorter; what fills
    no sequence is left out. ``batch_size``: sequences computed at once, by default about 1024 tokens. ``device``: whose
    costs the plans go by, by default the model's. ``progress`` is called with the sequences done, and how many there
    are.
    """
    input_ids = _cut(_ids(tokenizer, text, tokens), tokens, length, _context(model))
    n_sequences, length = input_ids.shape
    _check_sample(options, n_sequences, length)
    if batch_size is None:
        batch_size = max(1, DEFAULT_LENGTH // length)
    trace = record(model, input_ids, batch_size=batch_size, progress=progress)
    ffns = [getattr(model, "base_model", model).get_submodule(name) for name in trace.names or []]
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
    """Analyse what ``record`` gave for ``input_ids`` [sequences, length]. ``shapes`` and ``counted``: one per layer."""
    n_sequences, length = input_ids.shape
    if trace.hidden_sizes is None:
        raise ValueError("the trace does not tell the width of its layers")
    if trace.tokens != input_ids.numel():
        raise ValueError(f"the trace is of {trace.tokens:,} tokens, not of the {input_ids.numel():,} given")
    if length < 2:
        raise ValueError("sequences of at least 2 tokens are needed, since neighbours are compared")
    _check_sample(options, n_sequences, length)
    if len(shapes) != trace.layers:
        raise ValueError(f"the trace is of {trace.layers} layers, not of the {len(shapes)} whose shapes were given")
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
            Layer(
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


def correlation(active: Sequence[float], speedups: Sequence[float]) -> float:
    """Pearson's correlation between layers' mean active neurons and their measured speedups.

    >>> round(correlation([10, 20, 40], [3.0, 2.5, 1.5]), 6)
    -1.0
    """
    x, y = np.asarray(active, dtype=np.float64), np.asarray(speedups, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"one speedup a layer is needed, got {x.size} layers and {y.size} speedups")
    if len(x) < 2:
        raise ValueError(f"a correlation needs at least 2 layers, got {len(x)}")
    for name, values in (("active neurons", x), ("speedups", y)):
        if not np.isfinite(values).all():
            raise ValueError(f"the {name} must be finite numbers")
        if (values == values[0]).all():
            raise ValueError(f"there is no correlation: all layers have the same {name}, {values[0]:g}")
    x, y = (values / np.abs(values).max() for values in (x, y))  # squares neither overflow nor vanish
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1, 1))


# ---------------------------------------------------------------------------------------------------------
# The text and the model
# ---------------------------------------------------------------------------------------------------------


def _ids(tokenizer: Any, text: Text, tokens: int) -> Tensor:
    """int64 [n]: the ids of a text, at least ``tokens`` of them if it has as many."""
    if tokens < 2:
        raise ValueError(f"at least 2 tokens are needed, since neighbours are compared; got tokens={tokens}")
    if isinstance(text, Path):
        text = packed_text(tokenizer, text, tokens)
    elif isinstance(text, str):
        text = encode_beginning(tokenizer, text, tokens)
    if len(text) == 0:
        raise ValueError("the text is empty")
    ids = torch.as_tensor(text)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"token ids must be integers [tokens], got {ids.dtype} {list(ids.shape)}")
    return ids.long()


def _cut(ids: Tensor, tokens: int, length: int | None, context: int | None) -> Tensor:
    """[sequences, length]: the first ``tokens`` ids in whole sequences."""
    n_tokens = min(len(ids), tokens)
    if length is None:
        length = min(DEFAULT_LENGTH, context or DEFAULT_LENGTH, max(2, n_tokens))
    if length < 2:
        raise ValueError(f"sequences of at least 2 tokens are needed, since neighbours are compared; got {length}")
    if length > tokens:
        raise ValueError(f"{tokens:,} tokens hold no sequence of {length:,}")
    if length > n_tokens:
        plural = "s"[: n_tokens != 1]
        raise ValueError(f"the text holds {n_tokens:,} token{plural}: too few for one sequence of {length:,}")
    n_sequences = n_tokens // length
    return ids[: n_sequences * length].view(n_sequences, length)


def _check_sample(options: Options, n_sequences: int, length: int) -> None:
    if not 0 <= options.sample_sequence < n_sequences:
        raise ValueError(f"no sequence {options.sample_sequence} to show: the text has {n_sequences:,}, from 0 on")
    if not 0 <= options.sample_start < length:
        raise ValueError(f"nothing to show from token {options.sample_start} on: a sequence has {length:,}, from 0 on")


def _gate_of(ffn: nn.Module) -> tuple[str, nn.Linear]:
    """The projection that carries the activation, with its name."""
    from twell.hf.classify import projection_names

    name = projection_names(ffn)[0]
    return name, getattr(ffn, name)


def _shape_of(ffn: nn.Module) -> FFNShape:
    name, gate = _gate_of(ffn)
    return FFNShape(gate.in_features, name == "gate_proj")


def _counted(model: Any, ffns: Sequence[nn.Module]) -> list[Counted | None]:
    """Per FFN: its running counts where any has some, else what ``twell calibrate`` left beside the model."""
    running = [_counted_while_running(ffn) for ffn in ffns]
    if any(running):
        return running
    from twell.hf.counts import find_counts

    counts = find_counts(getattr(model.config, "_name_or_path", None))
    if counts is None:
        return running
    widths, counted = [_gate_of(ffn)[1].out_features for ffn in ffns], [len(fired) for fired in counts.fired]
    if widths != counted:
        raise ValueError(f"the counts are of {len(counted)} FFNs {counted}, the model has {len(widths)} {widths}")
    return [Counted(source="calibration", tokens=counts.tokens, silent=_never(fired)) for fired in counts.fired]


def _counted_while_running(ffn: nn.Module) -> Counted | None:
    if not isinstance(ffn, SparseFFNBase) or not int(ffn.tokens_seen):
        return None
    return Counted(source="running counts", tokens=int(ffn.tokens_seen), silent=_never(ffn.neuron_counts))


def _never(fired: Tensor) -> float:
    return float((fired == 0).double().mean())


# ---------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------


def _positions(length: int) -> list[Positions]:
    """0, 1, 2 to 3, 4 to 7, ... up to the end of a sequence, which may come before that of the last.

    >>> [(p.first, p.last) for p in _positions(10)]
    [(0, 0), (1, 1), (2, 3), (4, 7), (8, 9)]
    """
    firsts = [0, *(1 << k for k in range((length - 1).bit_length()))]
    return [Positions(first=first, last=min(max(1, 2 * first), length) - 1) for first in firsts]


def _by_position(counts_SL: np.ndarray, positions: list[Positions]) -> list[float]:
    return [float(counts_SL[:, p.first : p.last + 1].mean()) for p in positions]


def _curve(fired: Tensor, tokens: int) -> Curve:
    """Half of the points at equal distances, half at equal ratios: a few busy neurons carry most layers."""
    F, half = len(fired), CURVE_POINTS // 2
    frequencies = fired.sort(descending=True).values.double() / tokens
    if F <= CURVE_POINTS:
        return Curve(ranks=list(range(F)), frequencies=frequencies.tolist())
    spread = np.concatenate([np.linspace(0, F - 1, half), np.geomspace(1, F, half) - 1])
    ranks = np.unique(spread.round().astype(np.int64))
    return Curve(ranks=ranks.tolist(), frequencies=frequencies[ranks].tolist())


def _top_shares(fired: Tensor) -> dict[str, float]:
    """By percent of neurons, at least one neuron: the share of firings that the busiest carry."""
    busiest, total = fired.sort(descending=True).values, max(1, int(fired.sum()))
    return {str(p): int(busiest[: max(1, round(len(fired) * p / 100))].sum()) / total for p in TOP_PERCENT}


def _neighbours(n_sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens t and t + 1 of every sequence, as indices into all tokens."""
    left = torch.arange(n_sequences * length).view(n_sequences, length)[:, :-1].flatten()
    return left, left + 1


def _random_pairs(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two different tokens each, of any sequences; as many pairs as tokens, up to a limit."""
    generator = torch.Generator().manual_seed(seed)
    n_pairs = min(tokens, _MAX_RANDOM_PAIRS)
    left = torch.randint(tokens, (n_pairs,), generator=generator)
    further = torch.randint(1, tokens, (n_pairs,), generator=generator)
    return left, (left + further) % tokens


def _jaccard(active_MF: Tensor, left: Tensor, right: Tensor) -> float | None:
    """The mean over pairs of tokens of which at least one woke a neuron."""
    total, pairs, counts = 0.0, 0, active_MF.sum(1)
    for a, b in zip(left.split(_PAIRS_AT_ONCE), right.split(_PAIRS_AT_ONCE), strict=True):
        both = (active_MF[a] & active_MF[b]).sum(1)
        either = counts[a] + counts[b] - both
        total += float((both.double() / either.clamp(min=1)).sum())
        pairs += int((either > 0).sum())
    return total / pairs if pairs else None


def _plan(fired: Tensor, tokens: int, shape: FFNShape, costs: Costs) -> LayerPlan:
    plan = choose_plan(fired, tokens, costs, width=shape.width, gated=shape.gated)
    assert plan.predicted is not None  # of a plan that was chosen
    return LayerPlan(
        dense=plan.is_dense, hot=len(plan.hot), cap=plan.cap, min_tokens=plan.min_tokens, predicted=plan.predicted
    )


# ---------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------


def _rankings(
    ids_SL: np.ndarray, active_SL: np.ndarray, tokenizer: Any, options: Options
) -> tuple[list[TokenType], list[TokenType]]:
    """The token types that wake the most neurons, and those that wake the fewest."""
    types, of_token, counts = np.unique(ids_SL, return_inverse=True, return_counts=True)
    means = np.bincount(of_token.ravel(), weights=active_SL.ravel()) / counts
    enough = np.flatnonzero(counts >= options.min_count)
    rankings = []
    for key in (-means, means):
        order = np.lexsort((types[enough], -counts[enough], key[enough]))[: options.top]  # by the last key first
        rankings.append(
            [
                TokenType(
                    id=int(types[i]),
                    text=_token_text(tokenizer, int(types[i])),
                    count=int(counts[i]),
                    mean=float(means[i]),
                    examples=_examples(int(types[i]), ids_SL, active_SL, tokenizer, options),
                )
                for i in enough[order]
            ]
        )
    return rankings[0], rankings[1]


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

    The place is found by decoding up to the token and through it: what differs from the whole text there is the
    replacement for half a character.
    """
    first = max(0, position - window)
    text = _decode(tokenizer, ids[first : position + window + 1])
    before, through = (_decode(tokenizer, ids[first:end]) for end in (position, position + 1))
    start, end = (_shared_start(text, part) for part in (before, through))
    end = min(len(text), end + (end < len(through)))
    if start >= end and _decode(tokenizer, [ids[position]]):  # more of a character that the window cuts off
        start = max(0, end - 1)
    return text, start, end


def _shared_start(a: str, b: str) -> int:
    """Characters at the start that two strings share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _token_text(tokenizer: Any, token: int) -> str:
    """A token by itself; with the space before a word, which some tokenizers drop where a text starts with it."""
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
