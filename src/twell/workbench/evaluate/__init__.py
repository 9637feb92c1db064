"""How good a model is: bits per byte of any text, LAMBADA's last words, and the paper's seven tasks."""

from __future__ import annotations

from twell.workbench.evaluate.agreement import Agreement, Parting, compare_predictions
from twell.workbench.evaluate.scores import Mean, Metrics, TaskScore, average, difference, mean_of, score_task
from twell.workbench.evaluate.tasks import TASKS, Item, Task, TaskData, find_task, read_folder, read_task
from twell.workbench.evaluate.text import (
    LastWordScore,
    TextScore,
    Tokens,
    read_passages,
    read_validation,
    score_last_words,
    score_text,
    tokens_of,
)

__all__ = [
    "TASKS",
    "Agreement",
    "Item",
    "LastWordScore",
    "Mean",
    "Metrics",
    "Parting",
    "Task",
    "TaskData",
    "TaskScore",
    "TextScore",
    "Tokens",
    "average",
    "compare_predictions",
    "difference",
    "find_task",
    "mean_of",
    "read_folder",
    "read_passages",
    "read_task",
    "read_validation",
    "score_last_words",
    "score_task",
    "score_text",
    "tokens_of",
]
