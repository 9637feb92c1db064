"""``twell sweep``: what sparsity costs and gives. One training run for each l1, evaluated and timed; a table, a figure.

A sweep is a folder with a run of ``twell train`` for each variant, and what follows from them: ``sweep.jsonl``,
``sweep.md``, ``sweep.png``. Run again, it goes on where it was: finished runs stay, one that was cut short resumes from
its newest checkpoint.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from twell.bench import model as speed
from twell.bench import plot
from twell.train.recipes import Recipe, override
from twell.train.run import DATA_FOLDER, MODEL_FOLDER, RECIPE_FILE, SUMMARY_FILE, TOKENIZER_FOLDER, read_corpus, run
from twell.train.tokenizer import load_tokenizer
from twell.train.trainer import latest_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_L1 = (0.0, 6e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 6e-5, 1e-4)  # of its 1.5B model
ABLATIONS = ("silu", "plain", "restart")
ROWS_FILE, TABLE_FILE, FIGURE_FILE, SPEED_FILE = "sweep.jsonl", "sweep.md", "sweep.png", "speed.json"
_BATCH = 32  # sequences that are timed at once on a GPU; on a CPU an eighth of it


class Variant(NamedTuple):
    """One run of a sweep: its folder, and what it changes in the recipe."""

    name: str
    changes: list[str]


def variants(recipe: Recipe, l1: Sequence[float], ablations: Sequence[str] = ()) -> list[Variant]:
    """A run for each l1, and for each ablation one at the recipe's own l1.

    >>> from twell.train.recipes import tiny
    >>> [v.name for v in variants(tiny(), [0, 1e-3], ["silu", "plain"])]
    ['l1-0', 'l1-0.001', 'silu', 'plain']
    """
    for name in ablations:
        if name not in ABLATIONS:
            raise ValueError(f"unknown ablation {name!r}: expected one of {', '.join(ABLATIONS)}")
    if not l1 and not ablations:
        raise ValueError("a sweep needs at least one l1 or ablation")
    if len(set(l1)) < len(l1):
        raise ValueError(f"the same l1 twice: {', '.join(f'{value:g}' for value in l1)}")
    same_size = 16 * round(1.5 * recipe.intermediate_size / 16)  # two projections instead of three
    changes = {
        "silu": ["activation=silu", "l1=0", "restart_every=0"],
        "plain": ["gated=false", f"intermediate_size={same_size}"],
        "restart": [f"restart_every={max(1, recipe.steps // 12)}", f"restart_until={max(1, 2 * recipe.steps // 3)}"],
    }
    return [
        *(Variant(f"l1-{value:g}", [f"l1={value!r}"]) for value in l1),
        *(Variant(name, changes[name]) for name in ablations),
    ]


def sweep(
    recipe: Recipe,
    todo: Sequence[Variant],
    data: Sequence[Path | str],
    out: Path,
    *,
    validation: Sequence[Path | str] = (),
    tokenizer: str | None = None,
    seconds: float = 3.0,
    say: Callable[[str], None] = print,
    **arguments: Any,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant as it is done, and write the sweep's files anew after each."""
    recipes = [override(recipe, variant.changes) for variant in todo]  # all of them, before the first hour
    rows = []
    for variant, own in zip(todo, recipes, strict=True):
        folder = out / variant.name
        say(f"{variant.name}: {' '.join(variant.changes)}")
        _train(own, data, folder, validation=validation, tokenizer=tokenizer, say=say, **arguments)
        row = {
            "sweep": variant.name,
            "changes": variant.changes,
            **json.loads((folder / SUMMARY_FILE).read_text()),
            "speed": _timed(own, data, validation, folder, seconds),
        }
        rows.append(row)
        _write(rows, out)
        yield row


def _train(recipe: Recipe, data: Sequence[Path | str], folder: Path, say: Callable[[str], None], **how: Any) -> None:
    """Train, go on, or leave a finished run as it is."""
    if (folder / RECIPE_FILE).exists():
        saved = json.loads((folder / RECIPE_FILE).read_text())
        before = (Recipe(**saved["recipe"]), saved["data"], saved["validation"])
        if before != (recipe, [str(p) for p in data], [str(p) for p in how["validation"]]):
            raise ValueError(f"{folder} holds a run of another recipe or other data: choose another folder")
    if (folder / SUMMARY_FILE).exists():
        say(f"{folder} is finished")
    elif latest_checkpoint(folder) is not None:
        how.pop("tokenizer")
        run(None, [], folder, go_on=True, say=say, **how)
    else:
        if (folder / RECIPE_FILE).exists():  # cut short before its first checkpoint: only what was downloaded is of use
            for path in folder.iterdir():
                if path.name != DATA_FOLDER:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        run(recipe, data, folder, say=say, **how)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _timed(
    recipe: Recipe, data: Sequence[Path | str], validation: Sequence[Path | str], folder: Path, seconds: float
) -> dict[str, Any] | None:
    """The row of ``twell bench model`` on text the run was not trained on; None for a model without ReLU."""
    if recipe.activation != "relu":
        return None
    kept = folder / SPEED_FILE
    if not kept.exists():
        from transformers import AutoModelForCausalLM

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder / MODEL_FOLDER, dtype=dtype)
        ids = _held_out(recipe, data, validation, folder).to(device)
        subject = speed.real(model.to(device).eval(), folder.name)
        row = speed.measure(subject, ids, seconds=seconds, wants_layers=True)
        part = kept.with_suffix(".part")  # whole, or not at all
        part.write_text(json.dumps(row))
        part.replace(kept)
    return dict(json.loads(kept.read_text()))


def _held_out(recipe: Recipe, data: Sequence[Path | str], validation: Sequence[Path | str], folder: Path) -> Tensor:
    """Validation tokens, int64 [batch, context]."""
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    tokens = read_corpus(recipe, data, validation, tokenizer, folder / DATA_FOLDER, True, lambda line: None).held_out
    wanted = _BATCH if torch.cuda.is_available() else _BATCH // 8
    batch = min(wanted, len(tokens) // recipe.context)
    if batch < 1:
        raise ValueError(f"the validation text has {len(tokens)} tokens, a sequence {recipe.context}")
    return torch.as_tensor(tokens[: batch * recipe.context].astype("int64")).view(batch, recipe.context)


# ---------------------------------------------------------------------------------------------------------
# What comes of it
# ---------------------------------------------------------------------------------------------------------


def _write(rows: list[dict[str, Any]], out: Path) -> None:
    (out / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / TABLE_FILE).write_text("\n".join(table(rows)) + "\n")
    try:
        figure = draw(rows)
    except RuntimeError:  # no matplotlib
        return
    plot.save(figure, out / FIGURE_FILE)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: loss, sparsity and speed of each run, relative to l1 0 where there is one."""
    base = next((row for row in rows if row["sweep"] == "l1-0"), None)
    lines = [
        "| run | validation loss | to l1 0 | active | dead | FFNs | model | tokens/s training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        loss, of = row["validation_loss"], row["speed"]
        cells = [
            row["sweep"],
            f"{loss:.3f}",
            f"{100 * (loss / base['validation_loss'] - 1):+.1f} %" if base else "",
            f"{row['active_mean']:.1f} ({row['active_share']:.1%})" if "active_mean" in row else "all",
            f"{row['dead_share']:.1%}" if "dead_share" in row else "",
            "" if of is None else f"{ffn_speedup(of):.2f}x",
            "" if of is None else f"{of['speedup']:.2f}x",
            f"{row['tokens_per_second']:,.0f}" if row.get("tokens_per_second") else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ffn_speedup(row: dict[str, Any]) -> float:
    """Of all FFNs of a row of ``twell bench model --layers`` together."""
    dense, sparse = (sum(layer[f"{side}_ms"]["p50"] for layer in row["ffns"]) for side in ("dense", "sparse"))
    return float(dense / sparse)


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Validation loss, and speed of the FFNs, against the mean active count; l1 beside the points."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"plots need another package ({error}): pip install 'twell[plot]'") from None

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    counted = [row for row in rows if "active_mean" in row]
    for axes, of, name in (
        (losses, lambda row: row["validation_loss"], "validation cross-entropy"),
        (speeds, lambda row: ffn_speedup(row["speed"]), "speed of the FFNs over dense"),
    ):
        for is_l1, marker, colour in ((True, "o-", "tab:blue"), (False, "s", "tab:orange")):
            chosen = [row for row in counted if row["sweep"].startswith("l1-") == is_l1]
            points = sorted((row["active_mean"], of(row), row["sweep"].removeprefix("l1-")) for row in chosen)
            axes.plot([p[0] for p in points], [p[1] for p in points], marker, color=colour)
            for active, value, label in points:
                axes.annotate(label, (active, value), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("mean active neurons a token (l1 beside the points)")
        axes.set_ylabel(name)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for row in rows:
        if "active_mean" not in row:
            losses.axhline(row["validation_loss"], color="0.4", linewidth=1, linestyle="--")
            where: Any = ("axes fraction", "data")
            losses.annotate(row["sweep"], (0.01, row["validation_loss"]), xycoords=where, va="bottom", fontsize=8)
    speeds.axhline(1, color="black", linewidth=1)
    return figure
