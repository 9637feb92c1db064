"""``twell convert``: from a checkpoint with SiLU or GELU to a sparse one; ``twell quantize``: FP8 weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="With --train: change the recipe, as of twell train. Else l1 only."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new model, or with --train of the run.")] = None,
    relufy: Annotated[
        bool, typer.Option("--relufy", help="SiLU or GELU gate -> ReLU: changes what the model computes.")
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="With --relufy: train it further on --data, with L1.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only tell, layer by layer, what sparsify_ (with --relufy: relufy_) would do."),
    ] = False,
    data: Annotated[list[str] | None, typer.Option(help="With --train: text, as for twell train; repeatable.")] = None,
    validation: Annotated[
        list[Path] | None,
        typer.Option(help="With --train: files to validate on; repeatable. Default: one document in a hundred."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, folder or name. Default: the model's.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="With --train: torch.compile the model.")] = False,
    report_to: Annotated[str, typer.Option(help="With --train: also log to tensorboard, wandb or trackio.")] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="The layers, or the run's summary, as JSON.")] = False,
) -> None:
    """Make a sparse model of an existing one: ReLU for SiLU or GELU, then training that recovers what that cost.

    Example: [bold]twell convert my-model --relufy --train --data text/ --out sparse-run steps=300[/bold]

    Without --train the model is saved untrained. Interrupted, the same command goes on, as does twell train --resume.
    A model that is ReLU already trains further by twell train --from.
    """
    try:
        from twell.train import convert as converting
        from twell.train.recipes import Recipe, override
        from twell.train.run import quiet_libraries, read_summary
    except ImportError as error:
        raise RuntimeError(f"converting needs more packages ({error}): pip install 'twell[train]'") from None
    quiet_libraries()
    changes = overrides or []
    if check and (train or out is not None):
        raise ValueError("--check writes nothing: leave out --train and --out")
    if not check and out is None:
        raise ValueError("where to? give --out, or --check to only look")
    if check and tokenizer is not None:
        raise ValueError("--check writes nothing: leave out --tokenizer")
    if train and not relufy:
        raise ValueError("--train is for --relufy; a model that is ReLU already trains further by twell train --from")
    if not train:
        for option, given in (("--data", data), ("--validation", validation), ("--compile", compiled)):
            if given:
                raise ValueError(f"{option} is for --train")
        if other := [change for change in changes if not change.startswith("l1=")]:
            raise ValueError(f"{' '.join(other)} is for --train")

    def say(line: str) -> None:
        print(line, flush=True, file=sys.stderr if as_json else sys.stdout)

    if train and out is not None:
        try:
            converting.convert_and_train(
                model,
                out,
                data or [],
                changes=changes,
                validation=validation or [],
                tokenizer=tokenizer,
                say=say,
                bar=counted_bar,
                live=sys.stdout.isatty() and not as_json,
                torch_compile=compiled,
                report_to=report_to,
            )
        except KeyboardInterrupt:
            print("twell: the same command goes on where this one was", file=sys.stderr)
            raise
        if as_json:
            print(json.dumps(read_summary(out)))
        return
    l1 = override(Recipe(l1=converting.L1), changes).l1 or 0.0
    if out is None:
        report = converting.check(model, relufy=relufy, l1=l1)
    else:
        report = converting.convert(model, out, relufy=relufy, tokenizer=tokenizer, l1=l1)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in report.rows]))
    else:
        print(report)
    if out is not None:
        then = (
            "no longer computes what it did: train it, by twell convert --train" if relufy else "computes what it did"
        )
        say(f"the model is in {out}; it {then}")


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    out: Annotated[Path, typer.Option(help="Folder of the new model.")],
    as_json: Annotated[bool, typer.Option("--json", help="The layers as JSON.")] = False,
) -> None:
    """Round the feed-forward weights of a model to FP8, for inference, and save it as compressed-tensors would.

    Example: [bold]twell quantize my-run/model --out my-run/model-fp8[/bold]

    Attention, embeddings and head stay as they are. No GPU is needed for it, but one to run the new model.
    """
    try:
        from twell.hf.counts import COUNTS_FILE
        from twell.hf.loading import load_causal_lm
        from twell.hf.sparsify import NONE_FOUND, sparsify_
        from twell.train.files import writing
        from twell.train.run import quiet_libraries
        from twell.train.tokenizer import load_tokenizer
    except ImportError as error:
        raise RuntimeError(f"quantizing needs more packages ({error}): pip install 'twell[train]'") from None
    from twell.nn import sparse_ffns
    from twell.nn.quantize import quantize_

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another folder")
    quiet_libraries()
    tokenizer, language_model = load_tokenizer(model), load_causal_lm(model).eval()
    found = sparsify_(language_model)
    if next(sparse_ffns(language_model), None) is None:
        why = found.rows[0].why if found.rows else NONE_FOUND
        raise ValueError(f"{model} has no feed-forward layers to quantize: {why}")
    report = quantize_(language_model)
    if not report.layers:
        raise ValueError(f"no feed-forward layer of {model} can be FP8: {report.left_alone[0][1]}")
    with writing(out):
        language_model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        if (counts := Path(model) / COUNTS_FILE).is_file():  # which plans follow
            shutil.copy(counts, out)
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        print(f"{report}; the model is in {out}")
