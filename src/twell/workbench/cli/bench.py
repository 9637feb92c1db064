"""``twell bench ffn | plot | curves``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.bench_common import (
    AsJson,
    Backend,
    Called,
    Dtype,
    Hidden,
    Out,
    Plain,
    Tokens,
    TraceOfFFN,
    Width,
    Workloads,
    place_of,
    print_speed_table,
    trace_rows,
)
from twell.workbench.cli.common import Seconds, collect


@bench_app.command("ffn")
def bench_ffn(
    workload: Workloads = None,
    tokens: Tokens = None,
    width: Width = 2048,
    hidden: Hidden = 5632,
    dtype: Dtype = None,
    plain: Plain = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
    backend: Backend = "auto",
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Time replays of three CUDA graphs of 16 layers; rows have one layer's share."),
    ] = False,
    called: Called = None,
    fp8: Annotated[
        bool | None,
        typer.Option("--fp8/--no-fp8", help="Also time FP8, dense and sparse. Default: on GPUs with it, in 16 bits."),
    ] = None,
    trace: TraceOfFFN = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time one FFN, dense against sparse and frozen, side by side: on the device, and as called.

    Example: [bold]twell bench ffn -w skew29 -w skew2800 -m 1 -m 256 --json[/bold]
    """
    from twell.workbench.bench import cases, ffn
    from twell.workbench.bench.fp8 import applies
    from twell.workbench.bench.timing import dtype_name

    torch_device, torch_dtype = place_of(device, dtype, backend)
    names, sizes = workload or ["skew29"], tokens or [1, 16, 256, 2048]
    for name in names:
        cases.get_workload(name)
    if min(*sizes, width, hidden) < 1:
        raise ValueError("--tokens, --width and --hidden must be at least 1")
    if graph and torch_device.type != "cuda":
        raise ValueError("--graph needs a GPU: use --device cuda")
    if fp8 and not applies(torch_device, torch_dtype, width, hidden):
        raise ValueError(
            "--fp8 needs a GPU of compute capability 8.9 or newer, bfloat16 or float16, and a --width and --hidden of "
            f"multiples of 16: got {torch_device}, {dtype_name(torch_dtype)}, {width} and {hidden}"
        )
    if trace is not None and (workload or plain or graph):
        raise ValueError("--trace times gated FFNs as they were recorded: it takes no --workload, --plain or --graph")
    how: dict[str, Any] = {"dtype": torch_dtype, "fp8": fp8}
    if trace is not None:
        from twell.ops import backends

        backends.choose_backend("triton", torch_device)  # before ffn_trace, which needs triton, is imported
        from twell.workbench.bench import ffn_trace

        how |= {"device": torch_device, "seconds": seconds}
        n_rows, measured = trace_rows(ffn_trace.measure, trace, tokens or [16384], width, hidden, **how)
    else:
        how |= {"gated": not plain, "device": device, "backend": backend, "graph": graph, "called": called}
        todo = [ffn.Case(workload=name, M=m, D=width, F=hidden, **how) for name in names for m in sizes]
        n_rows, measured = len(todo), ffn.run(todo, seconds=seconds)
    rows = collect(
        measured, n_rows, as_json, out, lambda row: f"{row['workload']}, {row['M']} tokens: {row['speedup']:.2f}x"
    )
    if not as_json:
        print_speed_table(rows)


@bench_app.command("plot")
def bench_plot(
    rows: Annotated[
        list[Path], typer.Argument(metavar="ROWS.jsonl", help="Rows of bench ffn, as --out wrote them, or of a sweep.")
    ],
    out: Annotated[Path, typer.Option(help="The .png or .svg file to write.")],
) -> None:
    """Plot speedup against mean active neurons, with the count at which sparse breaks even.

    Draws gated FFNs of the shape with the most rows. Example:
    [bold]twell bench plot rows.jsonl --out speedup.svg[/bold]

    Of rows of a sweep: its losses and speeds. Example:
    [bold]twell bench plot my-sweep/sweep.jsonl --out sweep.svg[/bold]
    """
    from twell.workbench.bench import plot, sweep_results
    from twell.workbench.bench import rows as files

    found = files.read(rows)
    if runs := [row for row in found if "sweep" in row]:
        plot.check_suffix(out)
        plot.save(sweep_results.draw(runs), out)
    else:
        plot.speedup(found, out)


@bench_app.command("curves")
def bench_curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of twell train, or their metrics.jsonl.")],
    out: Annotated[Path, typer.Option(help="The .png or .svg file to write.")],
    first: Annotated[str | None, typer.Option(help="Name of the run the others are compared with.")] = None,
    over: Annotated[str, typer.Option(help="steps, tokens or minutes (of training, without evaluations).")] = "steps",
) -> None:
    """Plot training runs over each other: losses, their difference, active neurons, layers that train sparsely.

    Example: [bold]twell bench curves dense-run sparse-run --over minutes --out curves.png[/bold]
    """
    from twell.workbench.bench import curves, plot

    plot.check_suffix(out)
    plot.save(curves.draw(curves.read_runs(runs), first, over), out)
