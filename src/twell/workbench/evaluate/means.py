"""Means over items with their standard errors, and differences between models."""

from __future__ import annotations

import math
import statistics
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
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(statistics.fmean(values), error)


def difference(of: Sequence[float], to: Sequence[float]) -> Mean:
    """Mean of ``of`` minus mean of ``to``, paired: an item that is hard for both adds no error.

    Unpaired if the numbers of items differ: models with contexts of different lengths cut a text into other windows.

    >>> difference([1, 1, 0, 1], [1, 0, 0, 1])
    Mean(value=0.25, error=0.25)
    """
    if len(of) == len(to):
        return mean_of([a - b for a, b in zip(of, to, strict=True)])
    a, b = mean_of(of), mean_of(to)
    return Mean(a.value - b.value, math.hypot(a.error, b.error))


class EvalMetrics(NamedTuple):
    """A model's metrics. Each is the mean over the items of a task or text; over several tasks, the mean of these."""

    samples: dict[str, list[Sequence[float]]]  # metric -> for each task, a number for each item

    @classmethod
    def of(cls, **samples: Sequence[float]) -> EvalMetrics:
        """Of one task or text."""
        return cls({name: [values] for name, values in samples.items()})

    @classmethod
    def over(cls, tasks: Sequence[EvalMetrics]) -> EvalMetrics:
        """Of several tasks, which have the same weight. A task without acc_norm takes part in its mean with acc."""
        names = dict.fromkeys(name for task in tasks for name in task.samples)
        return cls({name: [task.samples.get(name, task.samples["acc"])[0] for task in tasks] for name in names})

    def mean(self, name: str) -> Mean:
        return _average([mean_of(values) for values in self.samples[name]])

    def difference(self, name: str, to: EvalMetrics) -> Mean:
        """Difference from another model's metric, paired by item."""
        return _average([difference(a, b) for a, b in zip(self.samples[name], to.samples[name], strict=True)])


def _average(means: Sequence[Mean]) -> Mean:
    return Mean(statistics.fmean(m.value for m in means), math.hypot(*(m.error for m in means)) / len(means))
