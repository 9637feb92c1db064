"""``twell calibrate``: counts of firing neurons, kept beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import Text, counted_bar, load_model


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model with ReLU FFNs.")],
    text: Text,
    tokens: Annotated[int, typer.Option(help="How many tokens to count.")] = 32768,
    as_json: Annotated[bool, typer.Option("--json", help="The plans as a JSON list on standard output.")] = False,
) -> None:
    """Count how often each neuron fires on a text and keep the counts beside the model, where sparsify_ finds them.

    Example: [bold]twell calibrate my-run/model --text book.txt[/bold]
    """
    if not model.is_dir():
        raise ValueError(f"{model} is not a folder: the counts are kept beside the model")
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
