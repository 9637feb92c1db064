"""``twell trace | analyze | calibrate | eval``: what a model does on a text."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.cli.app import app
from twell.cli.common import counted_bar, load_model


@app.command()
def trace(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    text: Annotated[Path, typer.Option(help="The text to run it on: .txt, .jsonl or .parquet.")],
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to record.")] = 8192,
    length: Annotated[
        int | None, typer.Option(help="Tokens a sequence. Default: 1024, or the model's context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The layers as a JSON list on standard output.")] = False,
) -> None:
    """Record which neurons fire on a text, to benchmark on real activations.

    Example: [bold]twell trace my-run/model --text book.txt --out book.npz[/bold]
    """
    from twell.trace import record_text

    language_model, tokenizer = load_model(model)
    with counted_bar("recording") as progress:
        recorded = record_text(language_model, tokenizer, text, length=length, tokens=tokens, progress=progress)
    recorded.save(out)
    layers = recorded.summary()
    if as_json:
        print(json.dumps([layer._asdict() for layer in layers]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{recorded.tokens:,} tokens, in {out}")
    for name in ("layer", "mean active", "p99", "max", "never fired", "busiest tenth carries"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for s in layers:
        table.add_row(s.layer, f"{s.mean:.1f}", f"{s.p99:.0f}", str(s.max), f"{s.dead:.1%}", f"{s.top_tenth:.0%}")
    Console().print(table)


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    text: Annotated[Path, typer.Option(help="The text to run it on: .txt, .jsonl or .parquet.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to look at.")] = 16384,
    length: Annotated[
        int | None, typer.Option(help="Tokens a sequence. Default: 1024, or the model's context.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write everything to this .json file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page to look at: report.html.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write the page's figures to this folder.")] = None,
    suffix: Annotated[str, typer.Option(help="Of the figures: .png or .svg.")] = ".png",
    speed: Annotated[
        list[Path] | None, typer.Option(help="Rows of bench model or bench ffn to show on the page; repeatable.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="metrics.jsonl of the training. Default: the one beside the model, if any.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON on standard output.")] = False,
) -> None:
    """What the FFNs of a model do on a text: how many neurons fire, where, for which tokens, and what that is worth.

    Example: [bold]twell analyze my-run/model --text book.txt --report report.html[/bold]
    """
    from twell.analyze import analyze as analyze_model

    if report is not None and report.suffix != ".html":
        raise ValueError(f"{report}: a page's name ends in .html")
    if (speed or metrics is not None) and report is None and figures is None:
        raise ValueError("--speed and --metrics are for --report or --figures")
    shown = {} if report is None and figures is None else _shown_with(model, metrics, speed or [])
    language_model, tokenizer = load_model(model)
    with counted_bar("reading") as progress:
        analysis = analyze_model(language_model, tokenizer, text, tokens=tokens, length=length, progress=progress)
    facts = {"model": model, "text": str(text), "analysis": analysis.to_json()}
    if out is not None:
        out.write_text(json.dumps(facts))
    if as_json:
        print(json.dumps(facts))
    else:
        _print_analysis(analysis)
    if report is not None or figures is not None:
        from twell import report as reporting

        if report is not None:
            folder = Path(model).resolve()
            title = folder.parent.name if folder.name == "model" else folder.name  # a run keeps it in model/
            page = reporting.build(analysis, title=title, model=model, text=text.name, **shown)
            reporting.write(page, report)
        drawn = [] if figures is None else reporting.figures(analysis, figures, suffix=suffix, **shown)
        written = ([str(report)] if report is not None else []) + [str(path) for path in drawn]
        print(f"written: {', '.join(written)}", file=sys.stderr if as_json else sys.stdout)


def _shown_with(model: str, metrics: Path | None, speed: list[Path]) -> dict[str, Any]:
    """What a page shows besides the analysis: the training's log and measured rows. Read first: both may be missing."""
    from twell.bench import rows

    beside = Path(model).resolve().parent / "metrics.jsonl"
    if metrics is None and Path(model).is_dir() and beside.is_file():
        metrics = beside
    return {
        "metrics": None if metrics is None else rows.read([metrics]),
        "speed": rows.read(speed) if speed else None,
    }


def _print_analysis(analysis: Any) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = analysis.facts
    table = Table(title=f"active neurons a token, {facts.tokens:,} tokens in sequences of {facts.length}")
    head = ("layer", "of", "mean", "p50", "p99", "max", "silent", "top 10 % carry", "shared with next", "GPU plan")
    for name in head:
        table.add_column(name, justify="left" if name in ("layer", "GPU plan") else "right", no_wrap=True)
    for layer, F in zip(analysis.layers, facts.hidden_sizes, strict=True):
        overlap, plan = layer.overlap.neighbours, layer.plan
        table.add_row(
            layer.name,
            str(F),
            f"{layer.mean:.1f}",
            f"{layer.p50:.0f}",
            f"{layer.p99:.0f}",
            str(layer.max),
            f"{layer.silent:.1%}",
            f"{layer.top_shares['10']:.0%}",
            "" if overlap is None else f"{overlap:.0%}",
            "dense" if plan.dense else f"{plan.hot} hot, {plan.predicted:.2f}x",
        )
    console.print(table)
    for what, tokens in (("most", analysis.most_active), ("fewest", analysis.least_active)):
        some = ", ".join(f"{token.text!r} {token.mean:.0f}" for token in tokens[:8])
        console.print(f"tokens that wake {what} neurons, all layers together: {escape(some)}", highlight=False)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model with ReLU FFNs.")],
    text: Annotated[Path, typer.Option(help="The text to count on: .txt, .jsonl or .parquet.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to count.")] = 32768,
    as_json: Annotated[bool, typer.Option("--json", help="The plans as a JSON list on standard output.")] = False,
) -> None:
    """Count how often each neuron fires on a text, and keep it beside the model: sparsify_ plans by it.

    Example: [bold]twell calibrate my-run/model --text book.txt[/bold]
    """
    if not model.is_dir():
        raise ValueError(f"{model} is no folder: the counts are kept beside the model")
    from twell.hf.convert import sparsify_
    from twell.hf.counts import COUNTS_FILE, NeuronCounts
    from twell.trace import record_text

    language_model, tokenizer = load_model(str(model))
    with counted_bar("counting") as progress:
        trace = record_text(language_model, tokenizer, text, tokens=tokens, progress=progress)
    counts = NeuronCounts(fired=[trace.neuron_counts(i) for i in range(trace.layers)], tokens=trace.tokens)
    report = sparsify_(language_model, counts)
    counts.save(model / COUNTS_FILE)
    if as_json:
        print(json.dumps([{"layer": row.layer, "plan": row.plan} for row in report.rows]))
    else:
        for row in report.rows:
            print(f"{row.layer}  {row.plan}")
        print(f"counts of {counts.tokens:,} tokens are in {model / COUNTS_FILE}")


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text file to predict; repeatable.")] = None,
    last_words: Annotated[
        Path | None, typer.Option(help="LAMBADA: .jsonl with 'text' fields whose last word is to be predicted.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences computed at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a file on standard output.")] = False,
) -> None:
    """How well a model predicts text: bits per byte, perplexity, and LAMBADA's last words.

    Example: [bold]twell eval my-run/model --text wikitext2.txt --last-words lambada.jsonl[/bold]
    """
    from twell import evaluate as ev

    if not text and last_words is None:
        raise ValueError("nothing to evaluate on: give --text or --last-words")
    texts = {path: path.read_text(encoding="utf-8") for path in text or []}
    passages = None if last_words is None else ev.read_passages(last_words)
    language_model, tokenizer = load_model(model)
    results: list[dict[str, Any]] = []
    for path, content in texts.items():
        with counted_bar(path.name) as progress:
            s = ev.score_text(language_model, tokenizer, content, batch_size=batch_size, progress=progress)
        numbers = {"loss": s.loss, "bits_per_byte": s.bits_per_byte, "word_perplexity": s.word_perplexity}
        results.append({"file": str(path), **numbers, "tokens": s.tokens, "bytes": s.bytes, "words": s.words})
    if last_words is not None and passages is not None:
        with counted_bar(last_words.name) as progress:
            w = ev.score_last_words(language_model, tokenizer, passages, batch_size=4 * batch_size, progress=progress)
        results.append({"file": str(last_words), **dataclasses.asdict(w)})
    for result in results:
        if as_json:
            print(json.dumps(result))
        elif "accuracy" in result:
            print(
                f"{result['file']}: last word right {result['accuracy']:.2%} ± {result['accuracy_error']:.2%}, "
                f"perplexity {result['perplexity']:,.1f} ({result['items']:,} passages)"
            )
        else:
            print(
                f"{result['file']}: {result['bits_per_byte']:.4f} bits per byte, cross-entropy {result['loss']:.4f} "
                f"a token, word perplexity {result['word_perplexity']:,.1f} ({result['tokens']:,} tokens)"
            )
