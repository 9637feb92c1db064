"""Means over items with their standard errors, and differences between models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    value: float
    error: float  # standard error


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of independent items.

    >>> mean_of([0, 1, 1, 1])
    Mean(value=0.75, error=0.25)
    """
    n = len(values)
    mean = sum(values) / n
    return Mean(mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, n - 1) / n))


def paired_difference(of: Sequence[float], to: Sequence[float]) -> Mean:
    """Mean of ``of`` minus mean of ``to``, paired: an item that is hard for both adds no error.

    >>> paired_difference([1, 1, 0, 1], [1, 0, 0, 1])
    Mean(value=0.25, error=0.25)
    """
    return mean_of([a - b for a, b in zip(of, to, strict=True)])


def average(means: Sequence[Mean]) -> Mean:
    """The average over tasks; each task has the same weight."""
    return Mean(sum(m.value for m in means) / len(means), math.sqrt(sum(m.error**2 for m in means)) / len(means))


@dataclasses.dataclass(frozen=True)
class EvalMetrics:
    """A model's metrics. Each is the mean of ``samples``, one an item, or the average over ``parts``, one a task."""

    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    parts: Sequence[EvalMetrics] = ()

    @property
    def names(self) -> list[str]:
        return list(self.samples) or list(dict.fromkeys(name for part in self.parts for name in part.names))

    def mean(self, name: str) -> Mean:
        if self.parts:
            return average([part.mean(part._name_for(name)) for part in self.parts])
        return mean_of(self.samples[name])

    def difference(self, name: str, to: EvalMetrics) -> Mean:
        """Difference from another model's metric: paired by item, or unpaired if the numbers of items differ.

        Models with contexts of different lengths cut a text into different windows.
        """
        if self.parts:
            pairs = zip(self.parts, to.parts, strict=True)
            return average([part.difference(part._name_for(name), other) for part, other in pairs])
        if len(self.samples[name]) != len(to.samples[name]):
            mine, others = self.mean(name), to.mean(name)
            return Mean(mine.value - others.value, math.hypot(mine.error, others.error))
        return paired_difference(self.samples[name], to.samples[name])

    def _name_for(self, name: str) -> str:
        """A task without acc_norm contributes its acc to the average."""
        return name if name in self.samples else "acc"
