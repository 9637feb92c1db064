"""The result of ``twell analyze``: numbers, strings and lists, and their JSON form."""

from __future__ import annotations

import dataclasses
from typing import Any

FORMAT = 2  # of the JSON form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The model and the text. ``tokens`` = ``sequences`` * ``length``."""

    model_type: str | None
    width: int  # D
    hidden_sizes: list[int]  # F of each layer
    tokens: int
    sequences: int
    length: int  # tokens a sequence
    token_types: int  # distinct tokens


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
    top_tenth: float  # share of all firings by the busiest tenth of the neurons; 0 if none fired
    shared: float | None  # of the neurons that fire for a token or the next, the share that fires for both; the mean
    by_position: list[float]  # mean active neurons, from each of Analysis.positions to the next
    ranks: list[int]  # some neurons, the busiest first: 0 is the busiest of all, F - 1 the rarest
    frequencies: list[float]  # the share of tokens for which each of these fired
    plan: PlanSummary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenType:
    """All occurrences of one token."""

    id: int
    text: str
    count: int
    mean: float  # active neurons, over all layers
    examples: list[list[str]]  # what stands before it, the token (or the character it is a part of), what follows


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Analysis:
    """The result of ``twell.workbench.analyze.analyze``.

    ``most_active`` and ``least_active`` rank token types by mean active neurons over all layers, ties by count and
    then by the lower id. In a text of few types a type can be in both.
    """

    facts: Facts
    layers: list[LayerAnalysis]
    positions: list[int]  # in a sequence: 0, 1, 2, 4, 8, ...
    min_count: int  # occurrences a type needs to be ranked
    most_active: list[TokenType]
    least_active: list[TokenType]
    sample_tokens: list[str]  # the beginning of the text, token by token
    sample_active: list[list[int]]  # [layers][tokens]

    @property
    def mean_active(self) -> float:
        """Active neurons a token, over all layers."""
        return sum(layer.mean for layer in self.layers)

    @property
    def mean_predicted(self) -> float:
        """Speedup over dense, the mean of the layers' plans."""
        return sum(layer.plan.predicted for layer in self.layers) / len(self.layers)

    def to_json(self) -> dict[str, Any]:
        """A dict that ``json.dumps`` takes."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def __repr__(self) -> str:
        n_layers = len(self.layers)
        return (
            f"Analysis({n_layers} layer{'s'[: n_layers > 1]}, {self.facts.tokens:,} tokens, "
            f"{self.mean_active:.1f} neurons active, predicted {self.mean_predicted:.2f}x)"
        )
