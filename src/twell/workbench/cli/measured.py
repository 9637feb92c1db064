"""``twell compare | results | tune``: what to do with measurements."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import dtype_of, new_bar


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
    from twell.workbench.bench import compare as comparing

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
        typer.Argument(
            help="Markdown files with tables. Default: docs/results.md docs/training.md docs/converting.md README.md."
        ),
    ] = None,
    rows: Annotated[Path, typer.Option(help="The folder of .jsonl files the tables are made from.")] = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; fail where a table is not up to date.")
    ] = False,
) -> None:
    """Make the tables of documents anew from measured rows.

    Example: [bold]twell results --check docs/results.md[/bold]
    """
    from twell.workbench.bench import tables

    if not rows.is_dir():
        raise ValueError(f"there is no folder of rows {rows}")
    stale = []
    usual = ("docs/results.md", "docs/training.md", "docs/converting.md", "README.md")
    for document in documents or map(Path, usual):
        if not document.is_file():
            raise ValueError(f"there is no document {document}")
        new, old = tables.updated(document, rows), document.read_text()
        if documents and "<!-- table " not in old:
            raise ValueError(f"{document} has no tables: see docs/results.md for how they begin and end")
        if new != old:
            stale.append(str(document))
            if not check:
                document.write_text(new)
    if check and stale:
        raise ValueError(f"not up to date: {', '.join(stale)}; run twell results")
    print(f"{'up to date' if not stale else 'changed: ' + ', '.join(stale)}")


@app.command()
def tune(
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Time the kernels with other tile sizes instead; writes nothing.")
    ] = False,
    workload: Annotated[str, typer.Option("--workload", "-w", help="For --tiles: iidN or skewN.")] = "skew29",
    tokens: Annotated[int, typer.Option("--tokens", "-m", help="For --tiles: token count M.")] = 16384,
    width: Annotated[int, typer.Option("--width", "-d", help="For --tiles: model width D.")] = 2048,
    hidden: Annotated[int, typer.Option("--hidden", "-f", help="For --tiles: hidden width F.")] = 5632,
    dtype: Annotated[str, typer.Option(help="For --tiles: bfloat16, float16 or float32.")] = "bfloat16",
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help="For --tiles: tail, gate, hot or heavy; for up to 64 tokens neurons or sums; repeatable. Default: all."
        ),
    ] = None,
    best: Annotated[int, typer.Option(help="For --tiles: candidates to show of each kernel.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output: costs, or every trial.")] = False,
) -> None:
    """Measure what this GPU takes, and write it down: layers are planned by it from now on.

    Takes about a minute. Without it an H200's costs are scaled to other GPUs of its generation, and others run densely;
    [bold]twell doctor[/bold] tells. Changes speed, never a result. Examples: [bold]twell tune[/bold],
    [bold]twell tune --tiles -m 8[/bold]
    """
    import torch

    from twell.ops import backends

    torch_dtype = dtype_of(dtype)
    of_tiles = workload, tokens, width, hidden, dtype, kernel, best
    if not tiles and of_tiles != ("skew29", 16384, 2048, 5632, "bfloat16", None, 5):
        raise ValueError("-w, -m, -d, -f, --dtype, --kernel and --best are for twell tune --tiles")
    if not torch.cuda.is_available():
        raise ValueError("twell tune times kernels on a GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    why_not = backends.why_unavailable("triton", device)
    if why_not is not None:
        raise ValueError(f"the kernels do not run here: {why_not}")
    if tiles:
        _tune_tiles(workload, tokens, width, hidden, torch_dtype, device, kernel or (), best, as_json)
        return
    from twell.plan import tuned
    from twell.workbench.bench import costs

    with new_bar() as bar:
        task = bar.add_task("measuring costs", total=None)
        found = costs.measure(device, progress=lambda done, total: bar.update(task, completed=done, total=total))
    by_kind = {kind: of._asdict() for kind, of in zip(("inference", "training"), found, strict=True)}
    path = tuned.write(device, by_kind, date=datetime.datetime.now(datetime.UTC).date().isoformat())
    if as_json:
        print(json.dumps({"path": str(path), **by_kind}))
        return
    for kind, numbers in by_kind.items():
        print(f"{kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    print(f"written to {path}; delete it to undo")


def _tune_tiles(
    workload: str,
    tokens: int,
    width: int,
    hidden: int,
    dtype: Any,
    device: Any,
    kernels: Sequence[str],
    best: int,
    as_json: bool,
) -> None:
    from twell.workbench.bench import tune as tuning

    trials: dict[str, list[Any]] = {}
    with new_bar() as bar:
        task = bar.add_task("tuning", total=None)

        def progress(tried: int, total: int) -> None:
            bar.update(task, completed=tried, total=total)

        for trial in tuning.tune(workload, tokens, width, hidden, dtype, device, kernels, progress):
            trials.setdefault(trial.kernel, []).append(trial)
            bar.update(task, description=trial.kernel)
            if as_json:
                print(json.dumps({**trial._asdict(), "tile": trial.tile._asdict()}), flush=True)
    for name, of_kernel in trials.items() if not as_json else ():
        print(f"{name}: now {of_kernel[0].ms:.5f} ms with {of_kernel[0].tile}")
        for trial in sorted(of_kernel[1:], key=lambda t: t.ms)[:best]:
            tma = ", TMA" if trial.use_tma else ""
            print(f"    {trial.ms:.5f} ms ({trial.times:.3f}) with {trial.tile}{tma}")
