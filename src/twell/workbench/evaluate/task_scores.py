"""A model's results on a task, and our own scorer: the model chooses the continuation with the highest log-likelihood.

``acc`` compares the log-likelihoods of the choices, ``acc_norm`` divides them by the choices' lengths in characters
first. Both, and the prompts, are those of lm-eval; harness.py lets lm-eval itself score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from twell.progress import Progress, silent
from twell.workbench.evaluate.means import EvalMetrics
from twell.workbench.evaluate.predictions import predict_pairs
from twell.workbench.evaluate.tasks import TaskData


class TaskScore(NamedTuple):
    """Item by item."""

    log_likelihoods: list[list[float]]  # [items][choices]
    right: dict[str, list[bool]]  # metric -> one an item; acc, and acc_norm if usual

    @property
    def metrics(self) -> EvalMetrics:
        return EvalMetrics.of(**self.right)

    @property
    def choices(self) -> list[int]:
        """The choice for each item, by acc."""
        return [_best(log_p) for log_p in self.log_likelihoods]


def score_task(
    model: Any, tokenizer: Any, data: TaskData, *, batch_size: int = 32, progress: Progress = silent
) -> TaskScore:
    """Score every choice of every item."""
    pairs = [pair for item in data.items for pair in zip(item.contexts, item.continuations, strict=True)]
    found = iter(predict_pairs(model, tokenizer, pairs, batch_size=batch_size, progress=progress))
    log_likelihoods = [[next(found).log_p for _ in item.continuations] for item in data.items]
    scored = list(zip(data.items, log_likelihoods, strict=True))
    right = {"acc": [_best(log_p) == item.gold for item, log_p in scored]}
    if data.task.is_normed:  # by the lengths of the choices, without the space before them
        right["acc_norm"] = [
            _best([p / (len(text) - 1) for p, text in zip(log_p, item.continuations, strict=True)]) == item.gold
            for item, log_p in scored
        ]
    return TaskScore(log_likelihoods, right)


def _best(log_p: Sequence[float]) -> int:
    """Index of the maximum; of equal ones the first."""
    return log_p.index(max(log_p))
