"""``twell bench ffn``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.bench_common import (
    AsJson,
    Backend,
    Called,
    Dtype,
    Fp8,
    Hidden,
    Out,
    Plain,
    Tokens,
    Width,
    Workloads,
    place_of,
    show,
)
from twell.workbench.cli.common import Seconds


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
    fp8: Fp8 = None,
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
    how: dict[str, Any] = {"dtype": torch_dtype, "device": device, "backend": backend}
    how |= {"D": width, "F": hidden, "gated": not plain, "graph": graph, "called": called, "fp8": fp8}
    todo = [ffn.Case(workload=name, M=m, **how) for name in names for m in sizes]
    show(ffn.run(todo, seconds=seconds), len(todo), as_json, out)
