"""Multiple choice by log-likelihood: the choice is the continuation that the model finds most likely.

``acc`` compares the choices' log-likelihoods, ``acc_norm`` divides them by the choices' lengths in characters first.
Both, their standard errors and the prompts are lm-eval's; ``harness.py`` lets it do the scoring itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from twell.workbench.evaluate.predictions import Progress, predict_pairs, silent
from twell.workbench.evaluate.tasks import Item, TaskData


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


def difference(of: Sequence[float], to: Sequence[float]) -> Mean:
    """Mean of ``of`` minus mean of ``to``, paired: what is hard for both does not count as an error.

    >>> difference([1, 1, 0, 1], [1, 0, 0, 1])
    Mean(value=0.25, error=0.25)
    """
    if len(of) != len(to):
        raise ValueError(f"paired items: expected as many of both, got {len(of)} and {len(to)}")
    return mean_of([a - b for a, b in zip(of, to, strict=True)])


def average(means: Sequence[Mean]) -> Mean:
    """Over tasks, each with the same weight."""
    return Mean(sum(m.value for m in means) / len(means), math.sqrt(sum(m.error**2 for m in means)) / len(means))


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics of a model, each the mean of what it is item by item; or their average over ``parts``, the tasks."""

    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    parts: Sequence[Metrics] = ()

    @property
    def names(self) -> list[str]:
        return list(self.samples) or list(dict.fromkeys(name for part in self.parts for name in part.names))

    def mean(self, name: str) -> Mean:
        if self.parts:
            return average([part.mean(part._name_for(name)) for part in self.parts])
        return mean_of(self.samples[name])

    def difference(self, name: str, to: Metrics) -> Mean:
        """To another model's; paired over the items. Texts cut into other windows have none to pair."""
        if self.parts:
            pairs = zip(self.parts, to.parts, strict=True)
            return average([part.difference(part._name_for(name), other) for part, other in pairs])
        if len(self.samples[name]) != len(to.samples[name]):
            mine, others = self.mean(name), to.mean(name)
            return Mean(mine.value - others.value, math.hypot(mine.error, others.error))
        return difference(self.samples[name], to.samples[name])

    def _name_for(self, name: str) -> str:
        """A task without acc_norm goes into its average with acc."""
        return name if name in self.samples else "acc"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore:
    """What a model did on a task, item by item."""

    task: str
    log_likelihoods: list[list[float]]  # of each item's choices
    right: dict[str, list[bool]]  # by metric: acc, and acc_norm where it is usual

    @property
    def items(self) -> int:
        return len(self.log_likelihoods)

    @property
    def metrics(self) -> Metrics:
        return Metrics({name: [float(r) for r in right] for name, right in self.right.items()})

    @property
    def choices(self) -> list[int]:
        """Chosen without regard to length."""
        return [_best(log_p) for log_p in self.log_likelihoods]


def score_task(
    model: Any, tokenizer: Any, data: TaskData, *, batch_size: int = 32, progress: Progress = silent
) -> TaskScore:
    """Every choice of every item, by our own scorer."""
    pairs = [pair for item in data.items for pair in zip(item.contexts, item.continuations, strict=True)]
    found = iter(predict_pairs(model, tokenizer, pairs, batch_size=batch_size, progress=progress))
    log_likelihoods = [[next(found).log_p for _ in item.continuations] for item in data.items]
    scored = list(zip(data.items, log_likelihoods, strict=True))
    right = {"acc": [_best(log_p) == item.gold for item, log_p in scored]}
    if data.task.is_normed:
        right["acc_norm"] = [_best(_normed(item, log_p)) == item.gold for item, log_p in scored]
    return TaskScore(task=data.task.name, log_likelihoods=log_likelihoods, right=right)


def _best(log_p: Sequence[float]) -> int:
    """The first of the greatest."""
    return max(range(len(log_p)), key=log_p.__getitem__)


def _normed(item: Item, log_p: Sequence[float]) -> list[float]:
    """Divided by the choices' characters, the space before them not counted."""
    return [p / (len(text) - 1) for p, text in zip(log_p, item.continuations, strict=True)]
