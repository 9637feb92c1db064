"""``twell convert``: from a checkpoint with SiLU or GELU to a sparse one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar, printer


@app.command()
def convert(
    model: Annotated[str, Argument(help="Folder or hub name of a causal language model.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help="With --train: as for twell train. Else only l1.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the new model; with --train, of the run.")] = None,
    relufy: Annotated[bool, Option("--relufy", help="Replace SiLU or GELU by ReLU: changes the function.")] = False,
    train: Annotated[bool, Option("--train", help="With --relufy: train it further on --data, with L1.")] = False,
    check: Annotated[
        bool, Option("--check", help="Only print what sparsify_ (with --relufy: relufy_) would do with each layer.")
    ] = False,
    data: Annotated[list[str] | None, Option(help="With --train: text, as for twell train; repeatable.")] = None,
    validation: Annotated[
        list[Path] | None,
        Option(help="With --train: files to validate on; repeatable. Default: one document in a hundred."),
    ] = None,
    tokenizer: Annotated[str | None, Option(help="tokenizer.json, folder or name. Default: the model's.")] = None,
    compiled: Annotated[bool, Option("--compile", help="With --train: torch.compile the model.")] = False,
    report_to: Annotated[str, Option(help="With --train: also log to tensorboard, wandb or trackio.")] = "none",
    as_json: Annotated[bool, Option("--json", help="The layers, or the run's summary, as JSON.")] = False,
) -> None:
    """Make a sparse model from an existing one: ReLU for SiLU or GELU, then training to recover the model's quality.

    Example: [bold]twell convert my-model --relufy --train --data text/ --out sparse-run steps=300[/bold]

    Without --train the model is saved untrained. After an interruption the same command continues, or twell train
    --resume. A model that already has ReLU trains further with twell train --from.
    """
    from twell.train import convert as converting
    from twell.train.recipes import Recipe, override
    from twell.train.run import quiet_libraries, read_summary

    quiet_libraries()
    changes = overrides or []
    if check and (train or out is not None):
        raise ValueError("--check writes nothing: leave out --train and --out")
    if not check and out is None:
        raise ValueError("give --out, or --check to only look")
    if check and tokenizer is not None:
        raise ValueError("--check writes nothing: leave out --tokenizer")
    if train and not relufy:
        raise ValueError(
            "--train is for --relufy; a model that already has ReLU trains further with twell train --from"
        )
    if not train:
        for option, given in (("--data", data), ("--validation", validation), ("--compile", compiled)):
            if given:
                raise ValueError(f"{option} is for --train")
        if other := [change for change in changes if not change.startswith("l1=")]:
            raise ValueError(f"{' '.join(other)} is for --train")
    say = printer(as_json)
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
            print("twell: the same command goes on where this one stopped", file=sys.stderr)
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
        same = "computes the same as before"
        changed = "no longer computes the same: train it with twell convert --train"
        say(f"the model is in {out}; it {changed if relufy else same}")
