"""``twell train | sweep``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import Seconds, counted_bar


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Change the recipe.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="tiny, small, 0.5b, 1b, 1.5b or 2b. Default: tiny.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A file (.txt, .jsonl, .parquet, .u16, .u16.xz) or folder, repeatable; or a Hugging Face dataset, "
            "owner/name[:config[:split]]. Default: the bundled text."
        ),
    ] = None,
    validation: Annotated[
        list[Path] | None,
        typer.Option(help="Files to validate on; repeatable. Default: one document in a hundred is held out."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("run"),
    model: Annotated[
        str | None,
        typer.Option("--from", help="Train this model further: folder or hub name of a Llama or Qwen2 with ReLU."),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(help="With --from: train adapters of this rank alone, and no L1 unless you ask for it."),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(help="With --lora: layers that get one; repeatable. Default: those of attention."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, folder or name. Default: with --from the model's, else a BPE is trained on the data."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's newest checkpoint; steps=N: for longer.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model: a minute's start for a faster run on a GPU.")
    ] = False,
    save_memory: Annotated[
        bool,
        typer.Option(
            "--save-memory",
            help="Compute attention again in the backward, and the loss in chunks: larger batches, slower.",
        ),
    ] = False,
    report_to: Annotated[
        str, typer.Option(help="Also log to tensorboard, wandb or trackio, as the Trainer does.")
    ] = "none",
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: shard weights and optimiser over the processes (FSDP2).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="What the run reached, as one JSON object on standard output.")
    ] = False,
) -> None:
    """Train a sparse language model: ReLU and L1, on the Hugging Face Trainer.

    L1 is steered until a token fires 1 % of the neurons. target_active=0.02 asks
    for another share, 30 for a number of neurons; l1=1e-3 is a fixed coefficient.
    On a terminal the run is shown as one screen, elsewhere line by line.

    Example: [bold]twell train --preset tiny --out my-run target_active=0.02 steps=200[/bold]

    [bold]twell train --from my-run/model --data more/ --out my-second-run steps=500[/bold]
    """
    try:
        from twell.train import recipes
        from twell.train.data import SAMPLE
        from twell.train.recipe_file import Saved
        from twell.train.run import how_to_go_on, quiet_libraries, read_summary, run
        from twell.train.trainer import FSDP2
    except ImportError as error:
        raise RuntimeError(f"training needs more packages ({error}): pip install 'twell[train]'") from None
    quiet_libraries()
    how: dict[str, Any] = {
        "validation": validation or [],
        "tokenizer": tokenizer,
        "say": lambda line: print(line, flush=True, file=sys.stderr if as_json else sys.stdout),
        "live": sys.stdout.isatty() and not as_json,
        "torch_compile": compiled,
        "save_memory": save_memory,
        "report_to": report_to,
        **(FSDP2 if fsdp else {}),
    }
    changes = overrides or []
    if model is None and (lora is not None or lora_modules):
        raise ValueError("--lora is for --from: a model without weights has nothing to adapt")
    if lora_modules and lora is None:
        raise ValueError("--lora-modules is for --lora: give the rank of the adapters, --lora 16")
    if model is not None:
        for option, given in (("--preset", preset), ("--resume", resume)):
            if given:
                raise ValueError(
                    f"{option} is not for --from: a model has its own shape, and a run that began resumes alone"
                )
        if lora is not None and fsdp:
            raise ValueError("--lora runs on one GPU, or several without --fsdp")
    try:
        if model is not None:
            from twell.train.convert import continue_training
            from twell.train.lora import ATTENTION

            how |= {"lora": lora, "lora_modules": lora_modules or ATTENTION, "bar": counted_bar}
            continue_training(model, out, data or [SAMPLE], changes=changes, **how)
        else:
            recipe = recipes.override(recipes.preset(preset or "tiny"), changes)
            if resume:
                was = Saved.read(out)
                recipe = recipes.override(recipe if preset else was.recipe, changes)
                if not any(change.startswith("steps=") for change in changes):  # a preset's are no wish for more
                    recipe = dataclasses.replace(recipe, steps=was.recipe.steps)
                if was.conversion:  # where there is no checkpoint yet, its model is made anew
                    from twell.train.convert import beginning

                    facts = was.conversion["facts"]
                    how["begin"] = beginning(facts["model"], how["say"], counted_bar, facts.get("lora"))
            run(recipe, data or ([] if resume else [SAMPLE]), out, go_on=resume, **how)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            options = ["--compile"] * compiled + ["--save-memory"] * save_memory + ["--fsdp"] * fsdp
            print(how_to_go_on(out, options), file=sys.stderr)
        raise
    if as_json:
        print(json.dumps(read_summary(out)))


@app.command()
def sweep(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the preset, for all runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the sweep; one that exists goes on.")] = Path("sweep"),
    target: Annotated[
        list[float] | None, typer.Option(help="A share or number of active neurons, as target_active; repeatable.")
    ] = None,
    l1: Annotated[
        list[float] | None,
        typer.Option(help="A constant coefficient; repeatable. Default, with no --target: the paper's eight."),
    ] = None,
    ablation: Annotated[
        list[str] | None, typer.Option(help="silu, plain or restart, at the preset's target_active; repeatable.")
    ] = None,
    preset: Annotated[str, typer.Option(help="tiny, small, 0.5b, 1b, 1.5b or 2b.")] = "small",
    data: Annotated[list[str] | None, typer.Option(help="As for twell train. Default: the bundled text.")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="Files to validate and to time on.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, file or hub name. Default: one is trained.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the training.")] = False,
    seconds: Seconds = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output, all else on error.")] = False,
) -> None:
    """Train a model for each target or l1, evaluate and time it: a table and a figure of what sparsity costs and gives.

    Example: [bold]twell sweep --preset tiny --l1 0 --target 0.03 --target 0.01 --ablation silu --out my-sweep[/bold]

    Interrupted, the same command goes on where it was.
    """
    from twell.train import recipes
    from twell.train.data import SAMPLE
    from twell.train.run import quiet_libraries
    from twell.workbench import sweep as sweeping
    from twell.workbench.bench import swept

    quiet_libraries()
    recipe = recipes.override(recipes.preset(preset), overrides or [])
    usual = [] if ablation or target else list(sweeping.PAPER_L1)
    todo = sweeping.variants(recipe, usual if l1 is None else l1, ablation or [], target or [])

    def say(line: str) -> None:
        print(line, flush=True, file=sys.stderr if as_json else sys.stdout)

    measured = sweeping.sweep(
        recipe,
        todo,
        data or [str(SAMPLE)],
        out,
        validation=validation or [],
        tokenizer=tokenizer,
        seconds=seconds,
        say=say,
        torch_compile=compiled,
    )
    rows: list[dict[str, Any]] = []
    try:
        for row in measured:
            rows.append(row)
            say(f"{len(rows)} of {len(todo)} runs are done")
            if as_json:
                print(json.dumps(row), flush=True)
    except KeyboardInterrupt:
        print(
            f"twell: interrupted: {len(rows)} of {len(todo)} runs are done; the same command goes on", file=sys.stderr
        )
        raise
    if not as_json:
        print("\n".join(swept.table(rows)))
    say(f"the sweep is in {out}: {sweeping.ROWS_FILE}, {sweeping.TABLE_FILE}, {sweeping.FIGURE_FILE}")
