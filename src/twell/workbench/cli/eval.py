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
from twell.workbench.cli.common import append, counted_bar, device_of, dtype_of, print_table
from twell.workbench.cli.eval_subjects import EvalSubject

if TYPE_CHECKING:
    from twell.workbench.evaluate import Agreement, EvalMetrics, Mean, TaskData, Tokens

_WORST = 5  # differing predictions listed one by one
_TEXT_BATCH, _TASK_BATCH, _TASK_BATCH_GPU = 8, 32, 64
_SHORT = {"bits_per_byte": "bits/byte", "accuracy": "last word"}  # metrics in the table


class _Inputs(NamedTuple):
    """The texts and tasks to score on, read before the first model is loaded."""

    texts: dict[Path, str | list[str]]  # by file: its text, or its documents
    validation: Path | None
    last_words: Path | None
    passages: list[str]
    tasks: list[TaskData]  # from --data
    harness: dict[str, Any] | None  # lm-eval's tasks, if it is the scorer
    limit: int | None


class _Score(NamedTuple):
    """The score of one subject on one task or text."""

    name: str
    facts: dict[str, Any]  # for the row
    metrics: EvalMetrics
    choices: list[int]


@app.command("eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Folders or hub names of causal language models.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="arc_easy, arc_challenge, hellaswag, openbookqa, piqa, winogrande, commonsense_qa; with commas, or "
            "repeated. Default: all, unless there is --text, --validation or --last-words."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' .jsonl files. Default: lm-eval loads them from the hub.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text to predict; of .jsonl and .parquet the 'text' fields. Repeatable.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Documents to predict, read as twell train reads them; also token files, .u16.")
    ] = None,
    last_words: Annotated[
        Path | None, typer.Option(help="LAMBADA: .jsonl with 'text' fields; their last words are to be predicted.")
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

    FP8: [bold]twell eval my-run/model --fp8 --data tasks/ --validation val.u16[/bold]
    """
    torch_device = device_of(device)
    if fp8 and compare:
        raise ValueError("--fp8 compares dense and sparse itself: leave out --compare")
    if fp8 and dtype is None and torch_device.type == "cuda":
        dtype = "bfloat16"  # the sparse FP8 kernels need it
    torch_dtype = None if dtype is None else dtype_of(dtype)
    for name, number in (("--limit", limit), ("--batch-size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    inputs = _read(tasks or [], data, text or [], validation, last_words, scorer, limit)
    ways = "fp8" if fp8 else "compare" if compare else None

    subjects: list[EvalSubject] = []
    scores: list[list[_Score]] = []
    for subject in eval_subjects.subjects(models, ways, torch_device, torch_dtype):
        found: list[_Score] = []
        for score in _all_scores(subject, inputs, batch_size):
            found.append(score)
            baseline = None if subject.baseline is None else scores[subject.baseline][len(found) - 1]
            row = {**score.facts, **subject.facts, **subject.sparse_layers}
            if baseline is not None and subject.baseline is not None:
                row["against"] = {**subjects[subject.baseline].names, **_difference_facts(score, baseline)}
            if as_json:
                print(json.dumps(row), flush=True)
            append(row, out)
        facts = {**subject.facts, **subject.sparse_layers}
        subjects.append(subject._replace(model=None, twin=None, facts=facts))
        scores.append(found)
        del subject  # or its model would stay in memory while the next one loads
    if not as_json:
        _print(subjects, scores)


# -- what to score on ---------------------------------------------------------------------------------------


def _read(
    tasks: list[str],
    data: Path | None,
    text: list[Path],
    validation: Path | None,
    last_words: Path | None,
    scorer: str | None,
    limit: int | None,
) -> _Inputs:
    from twell.train.data import find_files
    from twell.workbench import evaluate as ev
    from twell.workbench.evaluate import harness

    if scorer not in (None, "lm-eval", "own"):
        raise ValueError(f"unknown scorer {scorer!r}: expected lm-eval or own")
    names = list(dict.fromkeys(name.strip() for given in tasks for name in given.split(",") if name.strip()))
    for name in names:
        ev.find_task(name)
    if not names and (data is not None or not (text or validation or last_words)):
        names = list(ev.TASKS)
    by_lm_eval = bool(names) and (harness.is_installed() if scorer is None else scorer == "lm-eval")
    if names and data is None and not by_lm_eval:
        hint = "" if scorer == "own" else " (from the hub they need lm-eval: pip install 'twell[eval]')"
        raise ValueError(f"nothing to evaluate on: give --data with the tasks' files{hint}, --text or --last-words")
    if validation is not None:
        find_files([validation])  # fails if it is missing; reading it takes a tokenizer
    texts = {path: _text_of(path) for path in text}
    passages = [] if last_words is None else ev.read_passages(last_words)[:limit]
    local = [] if data is None else ev.read_folder(data, names, limit)
    theirs = harness.load_tasks(local or names) if by_lm_eval else None
    return _Inputs(texts, validation, last_words, passages, local, theirs, limit)


def _text_of(path: Path) -> str | list[str]:
    """The documents of a .jsonl or .parquet file; of any other file its text."""
    from twell.train.data import TOKEN_SUFFIXES, read_texts, read_utf8

    if path.name.endswith(TOKEN_SUFFIXES):
        raise ValueError(f"{path} holds tokens: --text takes text, --validation also takes tokens")
    found = list(read_texts(path)) if path.suffix in (".jsonl", ".parquet") else read_utf8(path)
    if not found:
        raise ValueError(f"{path} is empty")
    return found


# -- scores -------------------------------------------------------------------------------------------------


def _all_scores(subject: EvalSubject, inputs: _Inputs, batch_size: int | None) -> Iterator[_Score]:
    from twell.workbench.evaluate import EvalMetrics

    yield from _text_scores(subject, inputs, batch_size)
    tasks = []
    for score in _task_scores(subject, inputs, batch_size):
        tasks.append(score)
        yield score
    if len(tasks) > 1:
        metrics = EvalMetrics(parts=[task.metrics for task in tasks])
        names = {"tasks": [task.name for task in tasks], "scorer": tasks[0].facts["scorer"]}
        yield _Score("mean", {"eval": "mean", **names, **_flat(metrics)}, metrics, [])


def _text_scores(subject: EvalSubject, inputs: _Inputs, batch_size: int | None) -> Iterator[_Score]:
    from twell.workbench import evaluate as ev

    model, tokenizer = subject.model, subject.tokenizer
    batch = batch_size or _TEXT_BATCH
    texts: dict[Path, str | list[str] | Tokens] = {**inputs.texts}
    if inputs.validation is not None:
        texts[inputs.validation] = ev.read_validation(tokenizer, inputs.validation)
    for path, content in texts.items():
        tokens = content if isinstance(content, ev.Tokens) else ev.tokens_of(tokenizer, content)
        with counted_bar(f"{subject.label}: {path.name}") as progress:
            s = ev.score_text(model, tokenizer, tokens, batch_size=batch, progress=progress)
        numbers = {**_flat(s.metrics), "word_perplexity": s.word_perplexity}
        facts = {"eval": "text", "file": str(path), **numbers, "tokens": s.tokens, "bytes": s.bytes, "words": s.words}
        if subject.twin is not None:
            rows = tokens.windows(model, tokenizer)
            with counted_bar(f"dense and sparse: {path.name}") as progress:
                found = ev.compare_predictions(subject.twin, model, rows, batch_size=batch, progress=progress)
            facts["predictions"] = _prediction_facts(found, tokenizer)
        yield _Score(path.name, facts, s.metrics, [])
    if inputs.last_words is not None:
        batch = batch_size or _task_batch(model)
        with counted_bar(f"{subject.label}: {inputs.last_words.name}") as progress:
            w = ev.score_last_words(model, tokenizer, inputs.passages, batch_size=batch, progress=progress)
        numbers = {**_flat(w.metrics), "perplexity": w.perplexity}
        facts = {"eval": "last words", "file": str(inputs.last_words), **numbers, "items": w.items}
        yield _Score(inputs.last_words.name, facts, w.metrics, [])


def _task_scores(subject: EvalSubject, inputs: _Inputs, batch_size: int | None) -> Iterator[_Score]:
    from twell.workbench import evaluate as ev
    from twell.workbench.evaluate import harness

    model, tokenizer = subject.model, subject.tokenizer
    batch = batch_size or _task_batch(model)
    files = {data.task.name: data for data in inputs.tasks}
    if inputs.harness is not None:
        for data in inputs.tasks:
            harness.check_lengths(model, tokenizer, data)
    for name in inputs.harness or files:
        start = time.perf_counter()
        if inputs.harness is not None:
            limit = None if name in files else inputs.limit  # files were read up to the limit
            s = harness.score_task(model, tokenizer, name, inputs.harness[name], batch_size=batch, limit=limit)
        else:
            with counted_bar(f"{subject.label}: {name}") as progress:
                s = ev.score_task(model, tokenizer, files[name], batch_size=batch, progress=progress)
        facts = {
            "eval": "task",
            "task": name,
            **_flat(s.metrics),
            "items": s.items,
            "scorer": "own" if inputs.harness is None else harness.version(),
            "data": str(files[name].path) if name in files else "hub",
            "seconds": round(time.perf_counter() - start, 3),
        }
        yield _Score(name, facts, s.metrics, s.choices)


def _prediction_facts(found: Agreement, tokenizer: Any) -> dict[str, Any]:
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


def _task_batch(model: Any) -> int:
    return _TASK_BATCH_GPU if model.device.type == "cuda" else _TASK_BATCH


def _flat(metrics: EvalMetrics) -> dict[str, float]:
    return _flat_means({name: metrics.mean(name) for name in metrics.names})


def _flat_means(means: dict[str, Mean]) -> dict[str, float]:
    return {key: number for name, m in means.items() for key, number in ((name, m.value), (f"{name}_error", m.error))}


def _difference_facts(score: _Score, to: _Score) -> dict[str, Any]:
    means = {name: score.metrics.difference(name, to.metrics) for name in score.metrics.names}
    facts: dict[str, Any] = _flat_means(means)
    if score.choices:
        facts["other_choices"] = sum(a != b for a, b in zip(score.choices, to.choices, strict=True))
    return facts


# -- the table ----------------------------------------------------------------------------------------------


def _print(subjects: Sequence[EvalSubject], scores: Sequence[Sequence[_Score]]) -> None:
    """For one subject: lines for texts, a table of tasks. For several: a table of everything, with differences."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    shown = list(range(len(scores[0])))
    if len(subjects) == 1:
        shown = [i for i in shown if scores[0][i].facts["eval"] in ("task", "mean")]
        for score in scores[0]:
            _print_text_line(score.facts)
    if not shown:
        return
    compared = [(i, subject.baseline) for i, subject in enumerate(subjects) if subject.baseline is not None]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("", "metric", "items", *(subject.label for subject in subjects)):
        table.add_column(name, justify="left" if name in ("", "metric") else "right", no_wrap=True)
    for i, baseline in compared:
        table.add_column(f"{subjects[i].label} - {subjects[baseline].label}", justify="right", no_wrap=True)
    for place in shown:
        first = scores[0][place]
        items = f"{first.facts['items']:,}" if "items" in first.facts else ""
        for metric in first.metrics.names:
            cells = [_cell(metric, found[place].metrics.mean(metric)) for found in scores]
            for i, baseline in compared:
                mean = scores[i][place].metrics.difference(metric, scores[baseline][place].metrics)
                cell = _cell(metric, mean, "+")
                cells.append(f"[bold]{cell}[/bold]" if abs(mean.value) > 2 * mean.error else cell)
            table.add_row(first.name, _SHORT.get(metric, metric), items, *cells)
    print_table(table)
    console = Console()
    for line in _notes(subjects, scores[0]):
        console.print(line, highlight=False)
    for i, baseline in compared:
        pairs = [(a, b) for a, b in zip(scores[i], scores[baseline], strict=True) if a.choices]
        if pairs:
            other = sum(_difference_facts(a, b)["other_choices"] for a, b in pairs)
            total = sum(len(a.choices) for a, _ in pairs)
            names = f"{subjects[i].label} and {subjects[baseline].label} choose differently"
            console.print(f"{names} in {other:,} of {total:,} items", highlight=False)
    for subject, found in zip(subjects, scores, strict=True):
        for score in found:
            if "predictions" in score.facts:
                line = _predictions(subject.label, score.facts["predictions"])
                console.print(f"{score.name}: {line}", highlight=False, markup=False)
    for subject in subjects:
        if "sparse_layers" in subject.facts:
            of = "{sparse_layers} of {fp8_layers}".format(**subject.facts)
            emulated = "; FP8 is emulated: the device does not have it" if subject.facts["emulated"] else ""
            console.print(f"{subject.label}: the sparse kernels ran in {of} layers{emulated}", highlight=False)


def _predictions(label: str, found: dict[str, Any]) -> str:
    line = f"{label} and FP8 dense predict different tokens at {found['other']:,} of {found['tokens']:,} places"
    if not found["other"]:
        return line
    moved, worst = found["moved"], found["worst"][0]
    dense, sparse = worst["texts"]
    return (
        f"{line}, {found['beyond_rounding']:,} of them beyond rounding. Logits moved by {moved[len(moved) // 2]} in "
        f"the median and by {moved[0]} at most: there dense predicts {dense!r} by {worst['dense_margin']}, sparse "
        f"{sparse!r} by {worst['sparse_margin']}. The largest logit is {found['largest_logit']}"
    )


def _notes(subjects: Sequence[EvalSubject], scores: Sequence[_Score]) -> Iterator[str]:
    scorer = scores[-1].facts.get("scorer")
    by = "" if scorer is None else f", scored by {'twell' if scorer == 'own' else scorer}"
    yield f"accuracies in %, ± standard error{by}"
    if len(subjects) > 1:
        yield "differences are paired by item; bold: more than twice the error"
    if scores[-1].name == "mean":
        yield "the mean of acc_norm takes acc for tasks without acc_norm"


def _cell(metric: str, mean: Mean, sign: str = "") -> str:
    scale, digits = (1, 4) if metric in ("bits_per_byte", "loss") else (100, 2)
    value = round(scale * mean.value, digits) + 0.0  # no -0.00
    return f"{value:{sign}.{digits}f} ± {scale * mean.error:.{digits}f}"


def _print_text_line(facts: dict[str, Any]) -> None:
    if facts["eval"] == "text":
        print(
            f"{facts['file']}: {facts['bits_per_byte']:.4f} bits per byte, cross-entropy {facts['loss']:.4f} "
            f"a token, word perplexity {facts['word_perplexity']:,.1f} ({facts['tokens']:,} tokens)"
        )
    elif facts["eval"] == "last words":
        print(
            f"{facts['file']}: last word right {facts['accuracy']:.2%} ± {facts['accuracy_error']:.2%}, "
            f"perplexity {facts['perplexity']:,.1f} ({facts['items']:,} passages)"
        )
