"""``twell analyze``: what the feed-forward layers of a model do on a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import Length, counted_bar, load_model, print_table, run_name


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    text: Annotated[
        Path | None,
        typer.Option(help="The text, as a file (.txt, .jsonl, .parquet) or folder. Default, for sample: its own text."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to analyse.")] = 16384,
    length: Length = None,
    out: Annotated[Path | None, typer.Option(help="Also write the whole analysis to this .json file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write this .html page; its figures can be saved as SVG.")
    ] = None,
    speed: Annotated[
        list[Path] | None, typer.Option(help="Rows of bench model or bench ffn to show on the page; repeatable.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="metrics.jsonl of the training. Default: the one beside the model, if any.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole analysis as JSON on standard output.")] = False,
) -> None:
    """Which neurons of a model fire on a text: how many, in which layers, for which tokens, and what that saves.

    Example: [bold]twell analyze my-run/model --text book.txt --report report.html[/bold]

    The model that ships with twell, on the text it was trained on: [bold]twell analyze sample[/bold]
    """
    from twell.workbench.analyze import analyze as analyze_model

    if report is not None and report.suffix != ".html":
        raise ValueError(f"{report}: the name of a page must end in .html")
    if (speed or metrics is not None) and report is None:
        raise ValueError("--speed and --metrics need --report")
    text = text or _own_text(model)
    shown = {} if report is None else _shown_with(model, metrics, speed or [])
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
    if report is not None:
        from twell.workbench import report as page

        title = run_name(Path(model).resolve())
        page.write(page.build(analysis, title=title, model=model, text=text.name, **shown), report)
        print(f"written: {report}", file=sys.stderr if as_json else sys.stdout)


def _own_text(model: str) -> Path:
    """The text of the shipped model; other models do not know theirs."""
    from twell.hf.loading import SAMPLE_MODEL, model_path
    from twell.train.data import SAMPLE

    if Path(model_path(model)).resolve() != SAMPLE_MODEL.resolve():
        raise ValueError(f"{model} needs --text FILE: only the model that ships with twell, sample, has a text")
    return SAMPLE


def _shown_with(model: str, metrics: Path | None, speed: list[Path]) -> dict[str, Any]:
    """The training log and measured rows for the page, read before the model: a file may be missing."""
    from twell.hf.loading import model_path
    from twell.workbench.bench import rows

    folder = Path(model_path(model)).resolve()
    if metrics is None and folder.is_dir():  # in the run's folder; the shipped model has its log beside its weights
        found = (place / "metrics.jsonl" for place in (folder, folder.parent))
        metrics = next((path for path in found if path.is_file()), None)
    return {
        "metrics": [] if metrics is None else rows.read([metrics]),
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
        caption="silent: share of neurons that never fired; top 10 %: share of all firings by the busiest tenth; "
        "shared: of the neurons that fire for a token or the next, those that fire for both; GPU: the plan's hot "
        "neurons, and its predicted speedup",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("layer", "of", "mean", "p50", "p99", "max", "silent", "top 10 %", "shared", "GPU hot", "GPU"):
        table.add_column(name.replace(" ", "\n", 1), justify="left" if name == "layer" else "right", no_wrap=True)
    for layer, F in zip(analysis.layers, facts.hidden_sizes, strict=True):
        plan = layer.plan
        table.add_row(
            layer.name,
            str(F),
            f"{layer.mean:.1f}",
            f"{layer.p50:.0f}",
            f"{layer.p99:.0f}",
            str(layer.max),
            f"{layer.silent:.1%}",
            f"{layer.top_tenth:.0%}",
            "" if layer.shared is None else f"{layer.shared:.0%}",
            *(("dense", "") if plan.dense else (str(plan.hot), f"{plan.predicted:.2f}x")),
        )
    print_table(table)
    for what, tokens in (("most", analysis.most_active), ("fewest", analysis.least_active)):
        some = ", ".join(f"{token.text!r} {token.mean:.0f}" for token in tokens[:8])
        console.print(f"tokens that wake the {what} neurons, over all layers: {escape(some)}", highlight=False)
