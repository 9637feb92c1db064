"""The same tasks scored by lm-evaluation-harness in this process, on local files or the hub's datasets.

Each task is lm-eval's own configuration, zero-shot; for local files only the dataset is replaced. Log-likelihoods are
computed in fp32. lm-eval's default is the model's dtype; bf16 would round them to two or three digits.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twell.workbench.evaluate.predictions import context_length
from twell.workbench.evaluate.task_scores import TaskScore
from twell.workbench.evaluate.tasks import TASKS, TaskData

_CONFIGS = {  # in lm-eval's folder of tasks
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
}


def is_installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def version() -> str:
    return f"lm-eval {importlib.metadata.version('lm-eval')}"


def load_tasks(names: Sequence[str], local: Mapping[str, TaskData]) -> dict[str, Any]:
    """lm-eval's tasks by name, on ``local`` files, or on the hub's datasets where there is no file."""
    if not is_installed():
        raise RuntimeError("lm-eval is not installed: pip install 'twell[eval]', or --scorer own")
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        importlib.import_module("datasets").disable_progress_bars()
        library: Any = importlib.import_module("lm_eval.tasks")
        root = Path(library.__file__).parent
        manager = library.TaskManager(include_defaults=False)  # reading its thousands of tasks takes seconds
        loaded: dict[str, Any] = {}
        for name in names:
            config: dict[str, Any] = {"include": str(root / _CONFIGS[name]), "task": name, "num_fewshot": 0}
            if name in local:
                config |= _local_dataset(local[name], Path(folder))
            path = Path(folder) / f"{name}.yaml"
            path.write_text(json.dumps(config))  # JSON is YAML
            try:
                loaded |= manager.load([str(path)])["tasks"]
            except Exception as error:  # from datasets, the network or the hub's library
                first_line = str(error).strip().partition("\n")[0]
                hint = "; --data reads tasks from files" if name not in local else ""
                raise RuntimeError(f"lm-eval cannot load {name}: {first_line}{hint}") from error
        return loaded


def _local_dataset(data: TaskData, folder: Path) -> dict[str, Any]:
    path = folder / f"{data.task.name}.jsonl"
    path.write_text("".join(json.dumps(doc) + "\n" for doc in data.docs))
    kwargs = {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache"), "keep_in_memory": True}
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": kwargs,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }


def score_task(
    model: Any, tokenizer: Any, name: str, task: Any, *, batch_size: int = 32, limit: int | None = None
) -> TaskScore:
    """Score a task of ``load_tasks`` by lm-eval."""
    with _quiet():
        lm_eval: Any = importlib.import_module("lm_eval")
        wrapped = importlib.import_module("lm_eval.models.huggingface").HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=context_length(model),
            softmax_dtype="float32",
        )
        try:  # simple_evaluate would also list every installed package and the working directory's commit
            found = lm_eval.evaluate(lm=wrapped, task_dict={name: task}, limit=limit, bootstrap_iters=0)
        except AssertionError as error:
            too_long = (
                f"a choice has more tokens than the model's context of {context_length(model):,}"  # asserted bare
            )
            raise ValueError(f"lm-eval cannot score {name}: {str(error) or too_long}; use --scorer own") from error
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    metrics = ("acc", "acc_norm") if TASKS[name].is_normed else ("acc",)
    return TaskScore(
        [[float(log_p) for log_p, _ in sample["filtered_resps"]] for sample in samples],
        {metric: [bool(sample[metric]) for sample in samples] for metric in metrics},
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show lm-eval's progress bars on terminals only, and none of its log messages."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        yield
