"""The result of ``twell analyze``: numbers, strings and lists, and their JSON form."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

FORMAT = 1  # of the JSON form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The model and the text. ``tokens`` = ``sequences`` * ``length``."""

    model_type: str | None
    layers: int
    width: int  # D
    hidden_sizes: list[int]  # F of each layer
    tokens: int
    sequences: int
    length: int  # tokens a sequence
    token_types: int  # distinct tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """A layer's neuron counts from before this analysis."""

    source: str  # "running counts" (made while the model ran) or "calibration" (by twell calibrate)
    tokens: int
    silent: float  # share of neurons that never fired


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """How often neurons fire, busiest first: at most 200 points, closer together at low ranks, both ends included."""

    ranks: list[int]  # 0 for the busiest neuron, F - 1 for the rarest
    frequencies: list[float]  # share of tokens for which the neuron fired


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Mean Jaccard index of two tokens' active neurons: how many fire for both, over how many fire for either.

    A pair of tokens for which no neuron fired does not count. None if no pair counts.
    """

    neighbours: float | None  # tokens t and t + 1 of a sequence
    random: float | None  # any two different tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """The plan that the GPU kernels would use for a layer on this text; see ``twell.plan``."""

    dense: bool  # the sparse kernels would gain too little
    hot: int  # neurons computed for every token; F if dense
    cap: int  # a token with more active cold neurons is heavy
    min_tokens: int  # a smaller batch runs densely
    predicted: float  # speedup over dense for batches of at least min_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAnalysis:
    """One FFN."""

    name: str
    mean: float  # active neurons a token
    p50: float
    p90: float
    p99: float
    max: int
    silent: float  # share of neurons that never fired on this text
    counted: Counted | None  # None if the model has no counts
    by_position: list[float]  # mean active neurons, one for each of Analysis.positions
    curve: Curve
    top_shares: dict[str, float]  # percent of neurons, busiest first -> their share of all firings; 0 if none fired
    overlap: Overlap
    plan: PlanSummary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positions:
    """Positions in a sequence from ``first`` to ``last``, both included."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A token in its context. ``text[start:end]`` is the token, or the whole character that the token is a part of."""

    sequence: int
    position: int
    active: int  # active neurons, over all layers
    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenType:
    """All occurrences of one token."""

    id: int
    text: str
    count: int
    mean: float  # active neurons, over all layers
    examples: list[Example]  # spread evenly over the occurrences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A stretch of the text, token by token."""

    sequence: int
    start: int
    tokens: list[str]
    active: list[list[int]]  # [layers][tokens]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Analysis:
    """The result of ``twell.workbench.analyze.analyze``.

    ``most_active`` and ``least_active`` rank token types by mean active neurons over all layers, ties by count and
    then by the lower id. In a text of few types a type can be in both.
    """

    facts: Facts
    layers: list[LayerAnalysis]
    positions: list[Positions]
    min_count: int
    most_active: list[TokenType]
    least_active: list[TokenType]
    mean_predicted: float  # speedup over dense, the mean of the layers' plans
    sample: Sample

    @property
    def mean_active(self) -> float:
        """Active neurons a token, over all layers."""
        return sum(layer.mean for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """A dict that ``json.dumps`` takes."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Analysis:
        """Read what ``to_json`` returned."""
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("not an analysis: there is no field 'format'")
        if data["format"] != FORMAT:
            raise ValueError(f"an analysis of format {data['format']!r}: only format {FORMAT} can be read")
        try:
            made: Analysis = _built(cls, {name: value for name, value in data.items() if name != "format"})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a complete analysis: {error}") from None
        return made

    def __repr__(self) -> str:
        facts = self.facts
        return (
            f"Analysis({facts.layers} layer{'s'[: facts.layers > 1]}, {facts.tokens:,} tokens, "
            f"{self.mean_active:.1f} neurons active, predicted {self.mean_predicted:.2f}x)"
        )


def _built(hint: Any, value: Any) -> Any:
    """The dataclasses that a type hint names, from what ``dataclasses.asdict`` made of them."""
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _built(hints.get(name), part) for name, part in value.items()})  # type: ignore[operator]
    if typing.get_origin(hint) is list:
        return [_built(typing.get_args(hint)[0], part) for part in value]
    if typing.get_origin(hint) is types.UnionType and value is not None:
        return _built(typing.get_args(hint)[0], value)
    return value
