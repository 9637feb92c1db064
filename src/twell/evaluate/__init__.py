"""How good a model is: bits per byte of any text, LAMBADA's last words, and the paper's seven tasks."""

from __future__ import annotations

from twell.evaluate.scores import Mean, Metrics, TaskScore, average, difference, mean_of, score_task
from twell.evaluate.tasks import TASKS, Item, Task, TaskData, find_task, read_folder, read_task
from twell.evaluate.text import LastWordScore, TextScore, read_passages, score_last_words, score_text

__all__ = [
    "TASKS",
    "Item",
    "LastWordScore",
    "Mean",
    "Metrics",
    "Task",
    "TaskData",
    "TaskScore",
    "TextScore",
    "average",
    "difference",
    "find_task",
    "mean_of",
    "read_folder",
    "read_passages",
    "read_task",
    "score_last_words",
    "score_task",
    "score_text",
]
