"""``twell compare | results | tune``: what to do with measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.cli.app import app
from twell.cli.common import dtype_of, new_bar


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="ROWS.jsonl...", help="Two or more files of rows, or one.")],
    by: Annotated[
        str | None, typer.Option(help="Compare the rows of one file by this field: commit, gpu, versions.torch, ...")
    ] = None,
    first: Annotated[str | None, typer.Option(help="Which side the others are compared with.")] = None,
    floor: Annotated[float, typer.Option(help="A smaller relative difference is noise whatever the spread.")] = 0.02,
    check: Annotated[
        list[str] | None, typer.Option(help="What must not get worse; repeatable. Default: speedup and sparse times.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="By how much it may, beyond noise.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="The differences as a JSON list on standard output.")] = False,
) -> None:
    """Measured rows side by side; a difference below the spread is called noise. Exit code 1 where something got worse.

    Example: [bold]twell compare old.jsonl new.jsonl --check speedup[/bold]
    """
    from twell.bench import compare as comparing

    comparison = comparing.compare_files(files, by=by, first=first, floor=floor)
    if as_json:
        print(json.dumps(comparison.to_json()))
    else:
        from rich.console import Console

        Console().print(comparing.table(comparison))
    raise typer.Exit(comparing.verdict(comparison, check or None, threshold))


@app.command()
def results(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="Markdown files with tables. Default: docs/results.md docs/converting.md README.md."),
    ] = None,
    rows: Annotated[Path, typer.Option(help="The folder of .jsonl files the tables are made from.")] = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; fail where a table is not up to date.")
    ] = False,
) -> None:
    """Make the tables of documents anew from measured rows.

    Example: [bold]twell results --check docs/results.md[/bold]
    """
    from twell.bench import tables

    if not rows.is_dir():
        raise ValueError(f"there is no folder of rows {rows}")
    stale = []
    for document in documents or [Path("docs/results.md"), Path("docs/converting.md"), Path("README.md")]:
        if not document.is_file():
            raise ValueError(f"there is no document {document}")
        new = tables.updated(document, rows)
        if new != document.read_text():
            stale.append(str(document))
            if not check:
                document.write_text(new)
    if check and stale:
        raise ValueError(f"not up to date: {', '.join(stale)}; run twell results")
    print(f"{'up to date' if not stale else 'changed: ' + ', '.join(stale)}")


@app.command()
def tune(
    workload: Annotated[str, typer.Option("--workload", "-w", help="iidN or skewN, for a mean count of N.")] = "skew29",
    tokens: Annotated[int, typer.Option("--tokens", "-m", help="Token count M.")] = 16384,
    width: Annotated[int, typer.Option("--width", "-d", help="Model width D.")] = 2048,
    hidden: Annotated[int, typer.Option("--hidden", "-f", help="Hidden width F.")] = 5632,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="tail, gate, hot or heavy; for up to 64 tokens neurons or sums; repeatable. Default: all."),
    ] = None,
    best: Annotated[int, typer.Option(help="Candidates to show of each kernel.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Every trial as a JSON line on standard output.")] = False,
) -> None:
    """Time the GPU kernels with other tile sizes than the built-in ones, on this GPU.

    Takes a few minutes and changes nothing. Examples: [bold]twell tune -m 16384[/bold], [bold]twell tune -m 8[/bold]
    """
    import torch

    torch_dtype = dtype_of(dtype)
    if not torch.cuda.is_available():
        raise ValueError("twell tune times kernels on a GPU, and torch sees none here")
    device = torch.device("cuda")
    try:
        from twell.bench import tune as tuning
    except ImportError as error:
        raise RuntimeError(f"the kernels need triton ({error})") from None
    trials: dict[str, list[Any]] = {}
    with new_bar() as bar:
        task = bar.add_task("tuning", total=None)

        def progress(tried: int, total: int) -> None:
            bar.update(task, completed=tried, total=total)

        for trial in tuning.tune(workload, tokens, width, hidden, torch_dtype, device, kernel or (), progress):
            trials.setdefault(trial.kernel, []).append(trial)
            bar.update(task, description=trial.kernel)
            if as_json:
                print(json.dumps({**trial._asdict(), "tile": trial.tile._asdict()}), flush=True)
    for name, of_kernel in trials.items() if not as_json else ():
        print(f"{name}: now {of_kernel[0].ms:.5f} ms with {of_kernel[0].tile}")
        for trial in sorted(of_kernel[1:], key=lambda t: t.ms)[:best]:
            tma = ", TMA" if trial.use_tma else ""
            print(f"    {trial.ms:.5f} ms ({trial.times:.3f}) with {trial.tile}{tma}")
