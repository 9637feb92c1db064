"""``twell doctor``."""

from __future__ import annotations

import itertools
import json
from typing import Annotated

import typer

from twell.workbench.cli.app import app


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a causal language model: also show what its layers would do.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what would run here and why, and compare sparse with dense on this machine.

    With a model: also which layers would run sparsely, and how the GPU kernels would split their work by the counts
    of twell calibrate. Exits with 1 if something is broken. Example: [bold]twell doctor my-run/model[/bold]
    """
    from twell.workbench.doctor import examine, plans

    layers = None if model is None else plans(model)
    healthy, facts = examine()
    if as_json:
        of_model = {} if layers is None else {"plans": [layer._asdict() for layer in layers]}
        print(json.dumps({"healthy": healthy, **facts, **of_model}))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        from twell.hf.sparsify import NONE_FOUND

        table = Table(show_header=False, box=None, pad_edge=False)
        for name, fact in facts.items():
            table.add_row(f"[bold]{name}[/bold]", escape(fact))
        Console().print(table)
        table = Table("layer", "runs", "plan")
        for (runs, plan), group in itertools.groupby(layers or [], key=lambda layer: layer[1:]):
            first, *others = (layer.layer for layer in group)  # consecutive layers with equal plans share a line
            table.add_row(f"{first} to {others[-1]}" if others else first, escape(runs), escape(plan))
        if layers is not None:
            Console().print(table if layers else NONE_FOUND)
    if not healthy:
        raise typer.Exit(1)
