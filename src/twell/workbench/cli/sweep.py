"""``twell sweep``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from twell.workbench.cli.app import app
from twell.workbench.cli.common import Seconds, printer


@app.command()
def sweep(
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help="Changes to the preset, for all runs.")
    ] = None,
    out: Annotated[Path, Option(help="Folder of the sweep; an existing one is continued.")] = Path("sweep"),
    target: Annotated[
        list[float] | None, Option(help="A share or number of active neurons, as target_active; repeatable.")
    ] = None,
    l1: Annotated[
        list[float] | None,
        Option(help="A constant coefficient; repeatable. Default, with no --target: the paper's eight."),
    ] = None,
    ablation: Annotated[
        list[str] | None, Option(help="silu, plain or restart, at the preset's target_active; repeatable.")
    ] = None,
    preset: Annotated[str, Option(help="tiny, small, 0.5b, 1b, 1.5b or 2b.")] = "small",
    data: Annotated[list[str] | None, Option(help="As for twell train. Default: the bundled text.")] = None,
    validation: Annotated[list[Path] | None, Option(help="Files to validate and to time on.")] = None,
    tokenizer: Annotated[str | None, Option(help="Folder, file or hub name. Default: one is trained.")] = None,
    compiled: Annotated[bool, Option("--compile", help="torch.compile the training.")] = False,
    seconds: Seconds = 3.0,
    as_json: Annotated[bool, Option("--json", help="JSON lines on standard output, the rest on error.")] = False,
) -> None:
    """Train, evaluate and time a model for each target or l1: a table of what sparsity costs and gains.

    Example: [bold]twell sweep --preset tiny --l1 0 --target 0.03 --target 0.01 --ablation silu --out my-sweep[/bold]

    After an interruption the same command continues.
    """
    from twell.train import recipes
    from twell.train.data import SAMPLE
    from twell.train.run import quiet_libraries
    from twell.workbench import sweep as sweeping
    from twell.workbench.bench import sweep_table

    quiet_libraries()
    recipe = recipes.override(recipes.preset(preset), overrides or [])
    steering = [each for each in overrides or [] if each.startswith(("l1=", "target_active="))]
    if steering and {*(ablation or [])} <= {"silu"}:
        raise ValueError(f"each run of this sweep has an l1 or target of its own: leave out {' '.join(steering)}")
    usual = [] if ablation or target else list(sweeping.PAPER_L1)
    todo = sweeping.variants(recipe, usual if l1 is None else l1, ablation or [], target or [])
    say = printer(as_json)
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
        print("\n".join(sweep_table.table(rows)))
    say(f"the sweep is in {out}: {sweeping.ROWS_FILE}, {sweeping.TABLE_FILE}")
