"""``twell quantize``: a model with FP8 weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from twell.workbench.cli.app import app


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    out: Annotated[Path, typer.Option(help="Folder of the new model.")],
    as_json: Annotated[bool, typer.Option("--json", help="The layers as JSON.")] = False,
) -> None:
    """Round the feed-forward weights of a model to FP8, for inference, and save it as compressed-tensors would.

    Example: [bold]twell quantize my-run/model --out my-run/model-fp8[/bold]

    Attention, embeddings and head stay as they are. Quantizing needs no GPU; running the new model does.
    """
    from twell.hf.counts import counts_path
    from twell.hf.loading import check_name, load_causal_lm, model_path
    from twell.hf.sparsify import sparsify_
    from twell.nn import sparse_ffns
    from twell.nn.quantize import quantize_
    from twell.train.files import writing
    from twell.train.run import quiet_libraries
    from twell.train.tokenizer import load_tokenizer

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another folder")
    check_name(model)
    quiet_libraries()
    tokenizer, language_model = load_tokenizer(model), load_causal_lm(model).eval()
    found = sparsify_(language_model)
    if next(sparse_ffns(language_model), None) is None:
        raise ValueError(f"{model} has no feed-forward layers to quantize: {found.summary()}")
    report = quantize_(language_model)
    if not report.layers:
        raise ValueError(f"no feed-forward layer of {model} can be FP8: {report.left_alone[0][1]}")
    with writing(out):
        language_model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        if counts := counts_path(model_path(model)):  # plans are made from them
            shutil.copy(counts, out)
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        print(f"{report}; the model is in {out}")
