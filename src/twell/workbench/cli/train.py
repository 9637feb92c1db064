"""``twell train``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from twell.workbench.cli.app import app
from twell.workbench.cli.common import printer


@app.command()
def train(
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Change the recipe.")] = None,
    preset_name: Annotated[
        str | None, Option("--preset", help="tiny, small, 0.5b, 1b, 1.5b or 2b. Default: tiny.")
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(
            help="A file (.txt, .jsonl, .parquet, .u16, .u16.xz) or folder, repeatable; or a Hugging Face dataset, "
            "owner/name[:config[:split]]. Default: the bundled text."
        ),
    ] = None,
    validation: Annotated[
        list[Path] | None, Option(help="Files to validate on; repeatable. Default: one document in a hundred.")
    ] = None,
    out: Annotated[Path, Option(help="Folder of the run.")] = Path("run"),
    model: Annotated[
        str | None, Option("--from", help="Train this model further: folder or hub name of a Llama or Qwen2 with ReLU.")
    ] = None,
    relufy: Annotated[
        bool, Option("--relufy", help="With --from: replace the model's SiLU or GELU by ReLU before the training.")
    ] = False,
    lora: Annotated[
        int | None,
        Option(min=1, help="With --from: train only adapters of this rank, without L1 unless you ask for it."),
    ] = None,
    lora_modules: Annotated[
        list[str] | None, Option(help="With --lora: layers that get an adapter; repeatable. Default: attention's.")
    ] = None,
    tokenizer: Annotated[
        str | None, Option(help="tokenizer.json, folder or name. Default: that of --from, else trained on the data.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Resume from the newest checkpoint; steps=N trains longer.")
    ] = False,
    compiled: Annotated[
        bool, Option("--compile", help="torch.compile the model: starts a minute later, runs faster on a GPU.")
    ] = False,
    save_memory: Annotated[
        bool, Option("--save-memory", help="Recompute attention, and the loss in chunks: larger batches, slower.")
    ] = False,
    report_to: Annotated[str, Option(help="Also log to tensorboard, wandb or trackio.")] = "none",
    fsdp: Annotated[
        bool, Option("--fsdp", help="Under torchrun: shard weights and optimiser over the processes (FSDP2).")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="The run's summary as JSON on standard output.")] = False,
) -> None:
    """Train a sparse language model: ReLU and L1, on the Hugging Face Trainer.

    L1 is steered until a token fires 1 % of the neurons. target_active=0.02 sets
    another share, target_active=30 a number of neurons; l1=1e-3 is a fixed coefficient.
    A terminal shows the run as one screen; elsewhere it prints lines.

    Example: [bold]twell train --preset tiny --out my-run target_active=0.02 steps=200[/bold]

    [bold]twell train --from my-run/model --data more/ --out my-second-run steps=500[/bold]
    """
    from twell.train.convert import Start
    from twell.train.data import SAMPLE
    from twell.train.lora import ATTENTION
    from twell.train.recipe_file import Saved
    from twell.train.recipes import override, preset
    from twell.train.run import how_to_go_on, quiet_libraries, read_summary, run
    from twell.train.trainer import FSDP2

    quiet_libraries()
    changes = overrides or []
    for option, given, other, why in (
        ("--relufy", relufy, model, "is for --from: a new model has ReLU"),
        ("--lora", lora is not None, not resume, "is not for --resume: a resumed run keeps its adapters"),
        ("--lora", lora is not None, model, "is for --from: a model without weights has nothing to adapt"),
        ("--lora-modules", lora_modules, lora is not None, "is for --lora: give the rank of the adapters, --lora 16"),
        ("--preset", preset_name, model is None, "is not for --from: the model has its own shape"),
        ("--resume", resume, model is None, "is not for --from: an interrupted run knows its model"),
        ("--fsdp", fsdp, lora is None, "is not for --lora, which runs on one GPU or several with DDP"),
    ):
        if given and not other:
            raise ValueError(f"{option} {why}")
    start = None
    if model is not None:
        adapters = None if lora is None else {"rank": lora, "modules": lora_modules or list(ATTENTION)}
        start = Start(model, adapters)
        recipe = start.recipe(changes, relufy=relufy, tokenizer=tokenizer)
        tokenizer = tokenizer or model
    else:
        recipe = preset(preset_name or "tiny")
        if resume:  # the steps of a preset do not extend a run
            was = Saved.read(out).recipe
            recipe = dataclasses.replace(recipe, steps=was.steps) if preset_name else was
        recipe = override(recipe, changes)
    try:
        run(
            recipe,
            data or ([] if resume else [SAMPLE]),
            out,
            start=start,
            go_on=resume,
            validation=validation or [],
            tokenizer=tokenizer,
            say=printer(as_json),
            live=sys.stdout.isatty() and not as_json,
            torch_compile=compiled,
            save_memory=save_memory,
            report_to=report_to,
            **(FSDP2 if fsdp else {}),
        )
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            options = ["--compile"] * compiled + ["--save-memory"] * save_memory + ["--fsdp"] * fsdp
            print(how_to_go_on(out, options), file=sys.stderr)
        raise
    if as_json:
        print(json.dumps(read_summary(out)))
