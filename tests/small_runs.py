"""Training runs of a second, and runs that are killed, for tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from twell.train import run as run_module
from twell.train.data import SAMPLE, read_texts

MODEL = ["hidden_size=32", "intermediate_size=64", "layers=2", "heads=2", "context=32", "vocab_size=300"]
BATCHES = ["sequences_per_step=4", "micro_batch=4", "lr_warmup=2", "log_every=1", "dead_after_tokens=200"]
TIMES = (
    "tokens_per_second",
    "watts",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    "eval_model_preparation_time",
)


def write_text(path: Path) -> Path:
    """Eight documents to train on."""
    path.write_text("\n<|endoftext|>\n".join(t[:3000] for t in list(read_texts(SAMPLE))[:8]))
    return path


def result(out: Path) -> dict[str, Any]:
    """Everything in which two runs must agree: metrics without times, and the files of the model."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in rows if "train_runtime" not in row]
    summary = run_module.read_summary(out)
    files = {path.name: path.read_bytes() for path in (out / "model").iterdir()}
    files.pop("training_args.bin")  # names the folder of the run
    return {"metrics": rows, "validation_loss": summary["validation_loss"], "active": summary["active"], **files}


class _Kill(TrainerCallback):
    """Kills a run in the middle of a step, after its first checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


@contextlib.contextmanager
def mortal_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context every run is killed in its fifth step."""
    make_trainer = run_module.make_trainer

    def mortal(*args: Any, **kwargs: Any) -> Any:
        trainer = make_trainer(*args, **kwargs)
        trainer.add_callback(_Kill())
        return trainer

    with monkeypatch.context() as m:
        m.setattr(run_module, "make_trainer", mortal)
        yield
