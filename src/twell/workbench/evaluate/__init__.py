"""How good a model is: bits per byte of any text, LAMBADA's last words, and the paper's seven tasks."""

from __future__ import annotations

from twell.workbench.evaluate.agreement import Agreement, compare_predictions
from twell.workbench.evaluate.means import EvalMetrics, Mean
from twell.workbench.evaluate.task_scores import TaskScore, score_task
from twell.workbench.evaluate.tasks import TASKS, TaskData, find_task, read_folder
from twell.workbench.evaluate.text_scores import Tokens, read_text, score_last_words, score_text

__all__ = [
    "TASKS",
    "Agreement",
    "EvalMetrics",
    "Mean",
    "TaskData",
    "TaskScore",
    "Tokens",
    "compare_predictions",
    "find_task",
    "read_folder",
    "read_text",
    "score_last_words",
    "score_task",
    "score_text",
]
