"""``twell compare | tune``."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="ROWS.jsonl", help="Two or more files of rows, or one.")],
    by: Annotated[
        str | None, typer.Option(help="Compare the rows of one file by this field: commit, gpu, versions.torch, ...")
    ] = None,
    first: Annotated[str | None, typer.Option(help="The side that the others are compared with.")] = None,
    floor: Annotated[float, typer.Option(help="A smaller relative difference is noise whatever the spread.")] = 0.02,
    check: Annotated[
        list[str] | None, typer.Option(help="What must not get worse; repeatable. Default: speedup and sparse times.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="How much worse it may get, beyond noise.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="The differences as a JSON list on standard output.")] = False,
) -> None:
    """Compare measured rows; a difference below the spread is called noise. Exit code 1: something got worse.

    Example: [bold]twell compare old.jsonl new.jsonl --check speedup[/bold]
    """
    from twell.workbench.bench import compare as comparing

    comparison = comparing.compare_files(files, by=by, first=first, floor=floor)
    if as_json:
        print(json.dumps(comparison.to_json()))
    else:
        from rich.console import Console

        Console().print(comparing.table(comparison))
    raise typer.Exit(comparing.verdict(comparison, check or None, threshold))


@app.command()
def tune(
    as_json: Annotated[bool, typer.Option("--json", help="The costs as JSON on standard output.")] = False,
) -> None:
    """Measure the costs of this GPU and write them down: layers are planned by them from now on.

    Takes about a minute. Without it an H200's costs are scaled to other GPUs of its generation, and all other GPUs run
    densely; [bold]twell doctor[/bold] tells which. It changes speed, never a result. Example: [bold]twell tune[/bold]
    """
    import torch

    from twell.ops import backends
    from twell.plan import tuned
    from twell.workbench.bench import costs

    if not torch.cuda.is_available():
        raise ValueError("twell tune times kernels on a GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    why_not = backends.why_unavailable("triton", device)
    if why_not is not None:
        raise ValueError(f"the kernels do not run here: {why_not}")
    with counted_bar("measuring costs") as progress:
        found = costs.measure(device, progress=progress)
    by_kind = {kind: of._asdict() for kind, of in zip(("inference", "training"), found, strict=True)}
    path = tuned.write(device, by_kind, date=datetime.datetime.now(datetime.UTC).date().isoformat())
    if as_json:
        print(json.dumps({"path": str(path), **by_kind}))
        return
    for kind, numbers in by_kind.items():
        print(f"{kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    print(f"written to {path}; delete it to undo")
