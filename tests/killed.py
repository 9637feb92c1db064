"""Training that is stopped hard, for tests of resuming."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import TrainerCallback

from twell.train import run as run_module


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
