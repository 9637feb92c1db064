"""Runs of a second, and runs that are stopped hard, for tests of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import TrainerCallback

from twell.train import run as run_module

MODEL = ["hidden_size=32", "intermediate_size=64", "layers=2", "heads=2", "context=32", "vocab_size=300"]
BATCHES = ["sequences_per_step=4", "micro_batch=4", "lr_warmup=2", "log_every=1", "dead_after_tokens=200"]


class _Kill(TrainerCallback):
    """Stops a run hard in the middle of a step, after its first checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


@contextlib.contextmanager
def mortal_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it every run is killed in its fifth step."""
    make_trainer = run_module.make_trainer

    def mortal(*args: Any, **kwargs: Any) -> Any:
        trainer = make_trainer(*args, **kwargs)
        trainer.add_callback(_Kill())
        return trainer

    with monkeypatch.context() as m:
        m.setattr(run_module, "make_trainer", mortal)
        yield
