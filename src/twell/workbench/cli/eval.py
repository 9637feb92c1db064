"""``twell eval``: how good models are, on text and on tasks, and what sparsity changes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from twell.workbench.cli import eval_subjects
from twell.workbench.cli.app import app
from twell.workbench.cli.common import append, counted_bar, device_of, print_table
from twell.workbench.cli.eval_subjects import EvalSubject

if TYPE_CHECKING:
    from twell.workbench.evaluate import Agreement, EvalMetrics

Row = dict[str, Any]

_WORST = 5  # differing predictions listed one by one
_METRICS = {  # name in the table, scale, digits
    "bits_per_byte": ("bits/byte", 1, 4),
    "loss": ("loss", 1, 4),
    "word_perplexity": ("word perplexity", 1, 1),
    "accuracy": ("last word", 100, 2),
    "perplexity": ("perplexity", 1, 1),
    "acc": ("acc", 100, 2),
    "acc_norm": ("acc_norm", 100, 2),
}


class _Inputs(NamedTuple):
    """The texts and tasks to score on, checked before the first model is loaded."""

    texts: list[Path]
    last_words: Path | None
    passages: list[str]
    tasks: dict[str, Any]  # by name: our TaskData, or lm-eval's task
    data: dict[str, str]  # by name: the task's file
    scorer: str
    limit: int | None


class _Score(NamedTuple):
    """The score of one subject on one task or text."""

    row: Row
    metrics: EvalMetrics
    choices: list[int]


@app.command("eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Folders or hub names of causal language models.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="arc_easy, arc_challenge, hellaswag, openbookqa, piqa, winogrande, commonsense_qa; with commas, or "
            "repeated. Default: all, unless there is --text or --last-words."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' .jsonl files. Default: lm-eval loads them from the hub.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Documents to predict, read as twell train reads them; also token files, .u16. Repeatable."),
    ] = None,
    last_words: Annotated[
        Path | None,
        typer.Option(help="LAMBADA: documents, such as .jsonl with 'text' fields, whose last words to predict."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run each model densely and sparsely.")] = False,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="Run each model densely, then with FP8 weights in its FFNs densely and sparsely."),
    ] = False,
    scorer: Annotated[
        str | None, typer.Option(help="What scores tasks: lm-eval or own. Default: lm-eval if it is installed.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take only the first items of each task, and the first passages.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences a batch. Default: 8 for a text, else 32, on a GPU 64.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if there is a GPU.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: as saved; with --fp8 on a GPU bfloat16."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """How good models are: the paper's seven tasks, bits per byte of a text, LAMBADA's last words.

    Example: [bold]twell eval my-run/model --data tasks/ --compare[/bold]

    Several models, with differences and their standard errors: [bold]twell eval l1-0/model l1-2e-5/model[/bold]

    Text: [bold]twell eval my-run/model --text wikitext2.txt --last-words lambada.jsonl[/bold]

    FP8: [bold]twell eval my-run/model --fp8 --data tasks/ --text val.u16[/bold]
    """
    torch_device = device_of(device)
    if fp8 and compare:
        raise ValueError("--fp8 compares dense and sparse itself: leave out --compare")
    if fp8 and dtype is None and torch_device.type == "cuda":
        dtype = "bfloat16"  # the sparse FP8 kernels need it
    for option, number in (("--limit", limit), ("--batch-size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{option} must be at least 1, got {number}")
    inputs = _inputs(tasks or [], data, text or [], last_words, scorer, limit)
    ways = "fp8" if fp8 else "compare" if compare else None

    labels: list[str] = []
    baselines: list[int | None] = []
    scores: list[list[_Score]] = []
    for subject in eval_subjects.subjects(models, ways, torch_device, dtype):
        found: list[_Score] = []
        for score in _scores(subject, inputs, batch_size):
            row = {**score.row, **_flat(score.metrics), **subject.facts, **subject.sparse_layers}
            if subject.baseline is not None:
                row["against"] = _difference(score, scores[subject.baseline][len(found)])
            found.append(score._replace(row=row))
            if as_json:
                print(json.dumps(row), flush=True)
            append(row, out)
        labels.append(subject.label)
        baselines.append(subject.baseline)
        scores.append(found)
        del subject  # or its model would stay in memory while the next one loads
    if not as_json:
        _print(labels, baselines, [[score.row for score in found] for found in scores])


def _inputs(
    tasks: list[str],
    data: Path | None,
    texts: list[Path],
    last_words: Path | None,
    scorer: str | None,
    limit: int | None,
) -> _Inputs:
    from twell.train.data import find_files, read_texts
    from twell.workbench import evaluate as ev
    from twell.workbench.evaluate import harness

    if scorer not in (None, "lm-eval", "own"):
        raise ValueError(f"unknown scorer {scorer!r}: expected lm-eval or own")
    names = list(dict.fromkeys(name.strip() for given in tasks for name in given.split(",") if name.strip()))
    for name in names:
        ev.find_task(name)
    if not names and (data is not None or not (texts or last_words)):
        names = list(ev.TASKS)
    by_lm_eval = scorer == "lm-eval" or (scorer is None and harness.is_installed())
    if names and data is None and not by_lm_eval:
        hint = "" if scorer == "own" else " (from the hub they need lm-eval: pip install 'twell[eval]')"
        raise ValueError(f"nothing to evaluate on: give --data with the tasks' files{hint}, --text or --last-words")
    if texts:
        find_files(texts)  # fails if one is missing; reading them takes a tokenizer
    passages = [] if last_words is None else [text for path in find_files([last_words]) for text in read_texts(path)]
    local = {} if data is None else {read.task.name: read for read in ev.read_folder(data, names, limit)}
    loaded: dict[str, Any] = harness.load_tasks(names, local) if names and by_lm_eval else dict(local)
    by = harness.version() if loaded and by_lm_eval else "own"
    return _Inputs(
        texts, last_words, passages[:limit], loaded, {n: str(read.path) for n, read in local.items()}, by, limit
    )


# -- scores -------------------------------------------------------------------------------------------------


def _scores(subject: EvalSubject, inputs: _Inputs, batch_size: int | None) -> Iterator[_Score]:
    from twell.workbench import evaluate as ev
    from twell.workbench.evaluate import harness

    model, tokenizer = subject.model, subject.tokenizer
    for path in inputs.texts:
        tokens = ev.read_text(tokenizer, path)
        batch = batch_size or 8
        with counted_bar(f"{subject.label}: {path.name}") as progress:
            text = ev.score_text(model, tokenizer, tokens, batch_size=batch, progress=progress)
        row: Row = {"eval": "text", "file": str(path), "word_perplexity": text.perplexity}
        row |= {"tokens": len(tokens.ids), "bytes": tokens.bytes, "words": tokens.words}
        if subject.twin is not None:
            queries = tokens.windows(model, tokenizer)
            with counted_bar(f"dense and sparse: {path.name}") as progress:
                found = ev.compare_predictions(subject.twin, model, queries, batch_size=batch, progress=progress)
            row["predictions"] = _predictions(found, tokenizer)
        yield _Score(row, text.metrics, [])
    batch = batch_size or (64 if model.device.type == "cuda" else 32)
    if inputs.last_words is not None:
        with counted_bar(f"{subject.label}: {inputs.last_words.name}") as progress:
            words = ev.score_last_words(model, tokenizer, inputs.passages, batch_size=batch, progress=progress)
        row = {"eval": "last words", "file": str(inputs.last_words), "perplexity": words.perplexity}
        yield _Score({**row, "items": len(inputs.passages)}, words.metrics, [])
    scored = []
    for name, task in inputs.tasks.items():
        start = time.perf_counter()
        if inputs.scorer == "own":
            with counted_bar(f"{subject.label}: {name}") as progress:
                score = ev.score_task(model, tokenizer, task, batch_size=batch, progress=progress)
        else:
            score = harness.score_task(model, tokenizer, name, task, batch_size=batch, limit=inputs.limit)
        row = {"eval": "task", "task": name, "items": len(score.choices), "scorer": inputs.scorer}
        row |= {"data": inputs.data.get(name, "hub"), "seconds": round(time.perf_counter() - start, 3)}
        scored.append(score.metrics)
        yield _Score(row, score.metrics, score.choices)
    if len(scored) > 1:
        row = {"eval": "mean", "tasks": list(inputs.tasks), "scorer": inputs.scorer}
        yield _Score(row, ev.EvalMetrics.over(scored), [])


def _flat(metrics: EvalMetrics, to: EvalMetrics | None = None) -> Row:
    """Each metric and its error; or its difference from that of ``to``."""
    row = {}
    for name in metrics.samples:
        row[name], row[f"{name}_error"] = metrics.mean(name) if to is None else metrics.difference(name, to)
    return row


def _difference(score: _Score, to: _Score) -> Row:
    row = {key: to.row[key] for key in ("model", "mode") if key in to.row} | _flat(score.metrics, to.metrics)
    if score.choices:
        row["other_choices"] = sum(a != b for a, b in zip(score.choices, to.choices, strict=True))
    return row


def _predictions(found: Agreement, tokenizer: Any) -> Row:
    def rounded(number: float) -> float:
        return float(f"{number:.3g}")

    worst = [
        {
            **{key: rounded(n) if isinstance(n, float) else n for key, n in parting._asdict().items()},
            "texts": [tokenizer.decode([token]) for token in (parting.dense_token, parting.sparse_token)],
            "verdict": parting.verdict,
        }
        for parting in found.partings[:_WORST]
    ]
    return {
        "tokens": found.tokens,
        "other": len(found.partings),
        "beyond_rounding": found.real,
        "logits_difference": rounded(found.logits_difference),
        "largest_logit": rounded(found.largest_logit),
        "moved": [rounded(parting.moved) for parting in found.partings],
        "worst": worst,
    }


# -- the table ----------------------------------------------------------------------------------------------


def _print(labels: Sequence[str], baselines: Sequence[int | None], rows: Sequence[Sequence[Row]]) -> None:
    """``rows``: for each subject, in the same order."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    compared = [(i, f"{labels[i]} - {labels[to]}") for i, to in enumerate(baselines) if to is not None]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("", "metric", "items", *labels, *(name for _, name in compared)):
        table.add_column(name, justify="left" if name in ("", "metric") else "right", no_wrap=True)
    for of_all in zip(*rows, strict=True):
        first = of_all[0]
        name = Path(first["file"]).name if "file" in first else first.get("task", "mean")
        items = first.get("items") or first.get("tokens")
        for metric, (shown, _, _) in _METRICS.items():
            if metric in first:
                cells = [_cell(row, metric) for row in of_all]
                cells += [_cell(of_all[i]["against"], metric, "+") for i, _ in compared]
                table.add_row(name, shown, f"{items:,}" if items else "", *cells)
    print_table(table)
    console = Console()
    for line in _notes(labels, baselines, rows):
        console.print(line, highlight=False, markup=False)


def _cell(row: Row, metric: str, sign: str = "") -> str:
    if metric not in row:  # differences of perplexities are not taken
        return ""
    _, scale, digits = _METRICS[metric]
    cell = f"{round(scale * row[metric], digits) + 0.0:{sign},.{digits}f}"  # no -0.00
    if f"{metric}_error" in row:
        error = row[f"{metric}_error"]
        cell += f" ± {scale * error:.{digits}f}"
        if sign and abs(row[metric]) > 2 * error:
            return f"[bold]{cell}[/bold]"
    return cell


def _notes(labels: Sequence[str], baselines: Sequence[int | None], rows: Sequence[Sequence[Row]]) -> Iterator[str]:
    scorer = rows[0][-1].get("scorer")
    by = "" if scorer is None else f", scored by {'twell' if scorer == 'own' else scorer}"
    scale = "" if all(row["eval"] == "text" for row in rows[0]) else "accuracies in %, "
    yield f"{scale}± standard error{by}"
    if len(labels) > 1:
        yield "differences are paired by item; bold: more than twice the error"
    if rows[0][-1]["eval"] == "mean":
        yield "the mean of acc_norm takes acc for tasks without acc_norm"
    for label, to, found in zip(labels, baselines, rows, strict=True):
        tasks = [row for row in found if row["eval"] == "task"]
        if to is not None and tasks:
            other, items = sum(row["against"]["other_choices"] for row in tasks), sum(row["items"] for row in tasks)
            yield f"{label} and {labels[to]} choose differently in {other:,} of {items:,} items"
    for label, found in zip(labels, rows, strict=True):
        for row in found:
            if "predictions" in row:
                of = row["predictions"]
                moved = f"; logits moved by {of['moved'][0]} at most" if of["moved"] else ""
                yield (
                    f"{Path(row['file']).name}: {label} and FP8 dense predict different tokens at {of['other']:,} of "
                    f"{of['tokens']:,} places, {of['beyond_rounding']:,} of them beyond rounding{moved}"
                )
        if "sparse_layers" in found[0]:
            layers = "{sparse_layers} of {fp8_layers}".format(**found[0])
            emulated = "; FP8 is emulated: the device does not have it" if found[0]["emulated"] else ""
            yield f"{label}: the sparse kernels ran in {layers} layers{emulated}"
