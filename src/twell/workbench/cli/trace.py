"""``twell trace``: which neurons fire on a text, recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import Length, Text, counted_bar, load_model


@app.command()
def trace(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    text: Text,
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to record.")] = 8192,
    length: Length = None,
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
