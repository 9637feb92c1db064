"""``metrics.jsonl``, the log of a run, and the callback of the trainer that writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from twell.ops import Stats

if TYPE_CHECKING:
    from twell.train.trainer import SparseTrainer

METRICS_FILE = "metrics.jsonl"
_MUST_BE_FINITE = ("ce_loss", "l1_loss", "loss", "grad_norm", "eval_loss")


def active_neurons(stats: Sequence[Stats], prefix: str) -> dict[str, float]:
    """Mean active neurons a token, of each layer and of all layers."""
    active = torch.stack([s.counts.sum() / s.tokens.clamp(min=1) for s in stats]).tolist()
    per_layer = {f"{prefix}active/{i}": a for i, a in enumerate(active)}
    return {f"{prefix}active_mean": sum(active) / len(active), **per_layer}


def metrics_line(step: int, logs: dict[str, Any]) -> str:
    """An entry of ``metrics.jsonl``. JSON has no NaN, so ``not_finite`` lists the fields that are not finite."""
    numbers = {key: value for key, value in logs.items() if not isinstance(value, float) or math.isfinite(value)}
    not_finite = [key for key in logs if key not in numbers]
    row = {"step": step, **numbers, **({"not_finite": not_finite} if not_finite else {})}
    return json.dumps(row, allow_nan=False) + "\n"


class SparsityCallback(TrainerCallback):
    """Drives what the trainer does between steps, writes the log, and stops a run that is no longer finite."""

    def __init__(self, trainer: SparseTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.restart_stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_step()
        control.should_log |= control.should_save  # so a resumed run has the log entries of an uninterrupted one

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs:
            return
        if state.is_world_process_zero:
            with (Path(args.output_dir) / METRICS_FILE).open("a", encoding="utf-8") as f:
                f.write(metrics_line(state.global_step, logs))
        for field in _MUST_BE_FINITE:
            if not math.isfinite(value := logs.get(field, 0.0)):
                raise RuntimeError(f"{field} is {value} at step {state.global_step}: try a lower lr or l1; stopped")
        self.trainer.restart_stopwatch()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.restart_stopwatch()

    on_save = on_evaluate
