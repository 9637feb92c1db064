"""``twell trace | analyze | calibrate``: what a model does on a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar, load_model, print_table


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
    from twell.workbench.trace import record_text

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
    from twell.workbench.analyze import analyze as analyze_model

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
        from twell.workbench import report as reporting

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
    from twell.workbench.bench import rows

    beside = Path(model).resolve().parent / "metrics.jsonl"
    if metrics is None and Path(model).is_dir() and beside.is_file():
        metrics = beside
    return {
        "metrics": None if metrics is None else rows.read([metrics]),
        "speed": rows.read(speed) if speed else None,
    }


def _print_analysis(analysis: Any) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = analysis.facts
    table = Table(
        title=f"active neurons a token, {facts.tokens:,} tokens in sequences of {facts.length}",
        caption="silent: share of neurons that never fired; top 10 %: share of firings that the busiest tenth carries; "
        "shared: active neurons that the next token has, too; GPU: hot neurons of its plan, predicted speedup",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("layer", "of", "mean", "p50", "p99", "max", "silent", "top 10 %", "shared", "GPU hot", "GPU"):
        table.add_column(name.replace(" ", "\n", 1), justify="left" if name == "layer" else "right", no_wrap=True)
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
            *(("dense", "") if plan.dense else (str(plan.hot), f"{plan.predicted:.2f}x")),
        )
    print_table(table)
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
    from twell.hf.counts import COUNTS_FILE, NeuronCounts
    from twell.hf.sparsify import sparsify_
    from twell.workbench.trace import record_text

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
