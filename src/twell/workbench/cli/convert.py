"""``twell convert``: a model with ReLU FFNs from an existing one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from twell.workbench.cli.app import app


@app.command()
def convert(
    model: Annotated[str, Argument(help="Folder or hub name of a causal language model.")],
    out: Annotated[Path | None, Option(help="Folder of the new model.")] = None,
    relufy: Annotated[bool, Option("--relufy", help="Replace SiLU or GELU by ReLU: changes the function.")] = False,
    check: Annotated[
        bool, Option("--check", help="Only print what sparsify_ (with --relufy: relufy_) would do with each layer.")
    ] = False,
    l1: Annotated[float, Option(help="Weight of L1 in the saved model's loss.")] = 4e-4,
    tokenizer: Annotated[str | None, Option(help="tokenizer.json, folder or name. Default: the model's.")] = None,
    as_json: Annotated[bool, Option("--json", help="The layers as JSON.")] = False,
) -> None:
    """Save a ReLU model as its sparse type; with --relufy a SiLU or GELU model, with ReLU instead, untrained.

    Example: [bold]twell convert my-model --check[/bold]

    twell train --from my-model --relufy replaces the activation and trains the model to recover its quality.
    """
    from twell.train import convert as converting
    from twell.train.run import quiet_libraries

    quiet_libraries()
    if (out is None) != check:
        raise ValueError("give either --out, or --check, which only looks and writes nothing")
    if out is None:
        report = converting.check(model, relufy=relufy, l1=l1)
    else:
        report = converting.convert(model, out, relufy=relufy, tokenizer=tokenizer, l1=l1)
    print(json.dumps([dataclasses.asdict(row) for row in report.rows]) if as_json else report)
    if out is not None and not as_json:
        changed = f"no longer computes the same: train it with twell train --from {out}"
        print(f"the model is in {out}; it {changed if relufy else 'computes the same as before'}")
