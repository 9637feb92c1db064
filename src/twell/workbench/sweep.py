"""``twell sweep``: what sparsity costs and gives. A training run for each target or l1, evaluated and timed.

A sweep is a folder with a run of ``twell train`` for each variant, and its results: ``sweep.jsonl``, ``sweep.md``.
The same command continues an interrupted sweep: finished runs stay, a run that was cut short resumes from its newest
checkpoint.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twell.train.recipe_file import RECIPE_FILE, TOKENIZER_FOLDER, check_same_run
from twell.train.recipes import Recipe, override
from twell.train.run import DATA_FOLDER, MODEL_FOLDER, SUMMARY_FILE, read_corpus, read_summary, run
from twell.train.tokenizer import load_tokenizer
from twell.workbench.bench import model as speed
from twell.workbench.bench import sweep_table
from twell.workbench.bench.rows import read

PAPER_L1 = (0.0, 6e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 6e-5, 1e-4)  # of its 1.5B model
ABLATIONS = ("silu", "plain", "restart")
ROWS_FILE, TABLE_FILE, SPEED_FILE = "sweep.jsonl", "sweep.md", "speed.json"
_BATCH = 32  # sequences timed at once on a GPU; on a CPU an eighth of them


def variants(
    recipe: Recipe, l1: Sequence[float], ablations: Sequence[str] = (), targets: Sequence[float] = ()
) -> dict[str, list[str]]:
    """The folder of each run, and what it changes in the recipe.

    A run for each target and each constant l1, and one for each ablation at the recipe's own target or l1.

    >>> from twell.train.recipes import tiny
    >>> list(variants(tiny(), [0, 1e-3], ["silu", "plain"], [0.02]))
    ['target-0.02', 'l1-0', 'l1-0.001', 'silu', 'plain']
    """
    for name in ablations:
        if name not in ABLATIONS:
            raise ValueError(f"unknown ablation {name!r}: expected one of {', '.join(ABLATIONS)}")
    if not l1 and not ablations and not targets:
        raise ValueError("a sweep needs at least one target, l1 or ablation")
    for what, values in (("l1", l1), ("target", targets)):
        folders = [f"{value:g}" for value in values]
        if len({*folders}) < len(folders):
            raise ValueError(f"the same {what} twice: {', '.join(folders)}")
    same_size = 16 * round(1.5 * recipe.intermediate_size / 16)  # two projections instead of three
    changes = {
        "silu": ["activation=silu", "l1=0", "restart_every=0", "restart_until=0"],
        "plain": ["gated=false", f"intermediate_size={same_size}"],
        "restart": [f"restart_every={max(1, recipe.steps // 12)}", f"restart_until={max(1, 2 * recipe.steps // 3)}"],
    }
    return {
        **{f"target-{value:g}": [f"target_active={value!r}"] for value in targets},
        **{f"l1-{value:g}": [f"l1={value!r}"] for value in l1},
        **{name: changes[name] for name in ablations},
    }


def sweep(
    recipe: Recipe,
    todo: Mapping[str, list[str]],
    data: Sequence[Path | str],
    out: Path,
    *,
    validation: Sequence[Path | str] = (),
    tokenizer: str | None = None,
    seconds: float = 3.0,
    say: Callable[[str], None] = print,
    **arguments: Any,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant as soon as it is done, and write the sweep's files after each: they keep the rows of
    earlier calls."""
    recipes = {name: override(recipe, changes) for name, changes in todo.items()}  # errors show before the first run
    rows = {row["sweep"]: row for row in read([out / ROWS_FILE])} if (out / ROWS_FILE).exists() else {}
    for name, own in recipes.items():
        folder = out / name
        say(f"{name}: {' '.join(todo[name])}")
        _train(own, data, folder, validation=validation, tokenizer=tokenizer, say=say, **arguments)
        row = {
            "sweep": name,
            "changes": todo[name],
            **read_summary(folder),
            "speed": _timed(own, data, validation, folder, seconds),
        }
        rows[name] = row
        _write([*rows.values()], out)
        yield row


def _train(recipe: Recipe, data: Sequence[Path | str], folder: Path, say: Callable[[str], None], **how: Any) -> None:
    """Train, resume, or leave a finished run as it is."""
    begun = (folder / RECIPE_FILE).exists()
    if begun:
        check_same_run(folder, recipe, data, how["validation"])
    if (folder / SUMMARY_FILE).exists():
        say(f"{folder} is finished")
    elif begun:
        how.pop("tokenizer")
        run(recipe, data, folder, go_on=True, say=say, **how)
    else:
        run(recipe, data, folder, say=say, **how)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _timed(
    recipe: Recipe, data: Sequence[Path | str], validation: Sequence[Path | str], folder: Path, seconds: float
) -> dict[str, Any] | None:
    """The row of ``twell bench model`` on text that the run was not trained on; None for a model without ReLU."""
    if recipe.activation != "relu":
        return None
    kept = folder / SPEED_FILE
    if kept.exists():
        row: dict[str, Any] = json.loads(kept.read_text())
        return row
    from twell.hf.loading import load_causal_lm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = load_causal_lm(str(folder / MODEL_FOLDER), dtype)
    ids = _held_out(recipe, data, validation, folder).to(device)
    row = speed.measure(speed.real(model.to(device).eval(), folder.name), ids, seconds=seconds, wants_layers=True)
    part = kept.with_suffix(".part")  # so that the file is complete or missing
    part.write_text(json.dumps(row))
    part.replace(kept)
    return row


def _held_out(recipe: Recipe, data: Sequence[Path | str], validation: Sequence[Path | str], folder: Path) -> Tensor:
    """Validation tokens, int64 [batch, context]."""
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    tokens = read_corpus(recipe, data, validation, tokenizer, folder / DATA_FOLDER, True, lambda line: None).held_out
    wanted = _BATCH if torch.cuda.is_available() else _BATCH // 8
    batch = min(wanted, len(tokens) // recipe.context)
    if batch < 1:
        raise ValueError(f"the validation text has {len(tokens)} tokens, a sequence {recipe.context}")
    return torch.as_tensor(tokens[: batch * recipe.context].astype("int64")).view(batch, recipe.context)


def _write(rows: list[dict[str, Any]], out: Path) -> None:
    (out / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / TABLE_FILE).write_text("\n".join(sweep_table.table(rows)) + "\n")
