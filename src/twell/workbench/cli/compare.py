"""``twell compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import print_table


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
        print_table(comparing.table(comparison))
        print("\n".join(comparing.notes(comparison)))
    raise typer.Exit(comparing.verdict(comparison, check or None, threshold))
