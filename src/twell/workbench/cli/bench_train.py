"""``twell bench train``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.bench_common import (
    AsJson,
    Backend,
    Device,
    Dtype,
    Hidden,
    Out,
    Plain,
    Row,
    Tokens,
    TraceOfFFN,
    Width,
    Workloads,
    bold,
    dense_config,
    machine_of,
    place_of,
    print_lines,
    trace_rows,
)
from twell.workbench.cli.common import Seconds, collect


@bench_app.command("train")
def bench_train(
    workload: Workloads = None,
    tokens: Tokens = None,
    width: Width = 2048,
    hidden: Hidden = 5632,
    dtype: Dtype = None,
    plain: Plain = False,
    trace: TraceOfFFN = None,
    whole_model: Annotated[
        bool, typer.Option("--model", help="Steps of a whole model, AdamW included, instead of one FFN.")
    ] = False,
    preset: Annotated[str, typer.Option(help="With --model, its shape: tiny, small, 0.5b, 1b, 1.5b or 2b.")] = "1.5b",
    batch: Annotated[int, typer.Option(help="With --model: sequences of a step.")] = 8,
    length: Annotated[int, typer.Option(help="With --model: tokens of a sequence.")] = 2048,
    called: Annotated[
        bool | None,
        typer.Option(
            "--called/--no-called",
            help="One FFN: also time a plain loop with an optimiser's step, the host included. Default: on a GPU.",
        ),
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="With --model: each at the largest batch that fits the GPU.")
    ] = False,
    variant: Annotated[str, typer.Option(help="With --model: dense, sparse or both.")] = "both",
    device: Device = None,
    backend: Backend = "auto",
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time training, dense against sparse: forward and backward of one FFN with L1, or whole steps of a model.

    Example: [bold]twell bench train -w skew29 -w skew100 -m 16384[/bold] or
    [bold]twell bench train --model --preset 1.5b --batch 8 -w skew29[/bold]
    """
    from twell.ops import backends
    from twell.workbench.bench import cases

    torch_device, torch_dtype = place_of(device, dtype, backend)
    for name in workload or []:
        cases.get_workload(name)
    sizes = tokens or [16384 if torch_device.type == "cuda" else 2048]
    if min(*sizes, width, hidden, batch, length) < 1:
        raise ValueError("--tokens, --width, --hidden, --batch and --length must be at least 1")
    if variant not in ("both", "dense", "sparse"):
        raise ValueError(f"unknown variant {variant!r}: expected both, dense or sparse")
    if whole_model and (tokens or plain or trace is not None):
        raise ValueError("--model has gated FFNs on --batch times --length tokens: no --tokens, --plain or --trace")
    if largest and not whole_model:
        raise ValueError("--largest goes with --model")
    if variant != "both" and not whole_model:
        raise ValueError("--variant goes with --model: one FFN is always measured both ways")
    if trace is not None and (workload or plain):
        raise ValueError("--trace times gated FFNs as they were recorded: it takes no --workload or --plain")
    names, how = workload or ["skew29"], {"dtype": torch_dtype, "device": torch_device, "seconds": seconds}
    if whole_model:
        how |= {"variants": ("dense", "sparse") if variant == "both" else (variant,), "backend": backend}
        n_rows, measured = len(names), _step_rows(names, preset, None if largest else batch, length, **how)
    elif trace is not None:
        backends.choose_backend("triton", torch_device)  # before train_ffn_trace, which needs triton, is imported
        from twell.workbench.bench import train_ffn_trace

        n_rows, measured = trace_rows(train_ffn_trace.measure, trace, sizes, width, hidden, **how)
    else:
        from twell.workbench.bench import ffn, train_ffn

        case: dict[str, Any] = {"dtype": torch_dtype, "device": str(torch_device), "backend": backend}
        case |= {"D": width, "F": hidden, "gated": not plain, "called": called}
        todo = [ffn.Case(workload=name, M=m, **case) for name in names for m in sizes]
        n_rows, measured = len(todo), train_ffn.run(todo, seconds=seconds)
    rows = collect(
        measured,
        n_rows,
        as_json,
        out,
        lambda row: f"{row['workload']}: {row['speedup']:.2f}x" if "speedup" in row else row["workload"],
    )
    if not as_json:
        (_print_model_steps if whole_model else _print_ffn_steps)(rows)


def _step_rows(
    names: list[str],
    preset: str,
    batch: int | None,
    length: int,
    *,
    dtype: Any,
    device: Any,
    backend: str,
    **how: Any,
) -> Iterator[Row]:
    """``batch`` None: the largest that fits."""
    try:
        from twell.workbench.bench import train_model
    except ImportError as error:
        raise RuntimeError(f"models need more packages ({error}): pip install 'twell[train]'") from None
    from twell.train import recipes

    recipe = recipes.preset(preset)
    config, l1 = dense_config(recipe, length), 2e-5 if recipe.l1 is None else recipe.l1

    def measure(name: str) -> Row:
        setup = train_model.Setup(config, name, length, l1, dtype, device, backend)
        if batch is None:
            return train_model.measure_largest(setup, **how)
        return train_model.measure_steps(setup, batch, **how)

    return ({**measure(name), "preset": preset} for name in names)


def _print_ffn_steps(rows: list[Row]) -> None:
    first = rows[0]
    timed = [name for name in ("dense", "compiled", "sparse") if f"{name}_ms" in first]
    as_called = ["as called"] if "called_ms" in first else []

    def line(row: Row) -> list[str]:
        return [
            row["workload"],
            str(row["M"]),
            f"{row['mean_active']:.0f}",
            *(f"{row[f'{name}_ms']['p50']:.2f}" for name in timed),
            bold(row["speedup"]),
            *(bold(row["speedup_called"]) for _ in as_called),
            "" if row["error"] is None else f"{max(row['error']['sparse'].values()):.1e}",
        ]

    notes = ["median ms of forward and backward", "speedup over the faster dense one"]
    notes.append("error: largest of y and gradients, relative, against float64")
    title = f"training a {first['kind']} FFN, D {first['D']}, F {first['F']}, {first['dtype']}, {machine_of(first)}"
    head = ["workload", "tokens", "active", *timed, "speedup", *as_called, "error"]
    print_lines(title, notes, head, map(line, rows))
    for row in rows:
        print(f"{row['workload']}, {row['M']} tokens: {'; '.join(_facts(row))}")


def _facts(row: Row) -> Iterator[str]:
    if "plan" in row:
        yield f"{row['plan']['hot']} hot, long or heavy above {row['plan']['cap']}"
    if (memory := row["memory"]) is not None:
        dense, sparse = memory["dense"] / 1e6, memory["sparse"] / 1e6
        yield f"peak memory {sparse:.0f} of {dense:.0f} MB ({memory['ratio']:.2f}x)"
    if (joules := row["joules"]) is not None:
        dense, sparse = joules["dense"], joules["sparse"]
        yield f"energy {sparse:.2f} of {dense:.2f} J ({sparse / dense:.2f}x)"
    if "called_ms" in row:
        ways = ", ".join(
            f"{name} {spread['p50']:.2f} ms ({row['host_us'][name]:.0f} us of the host)"
            for name, spread in row["called_ms"].items()
        )
        step = f"{row['optimizer_ms']['p50']:.2f} ms"
        yield f"as called {ways}, besides AdamW's step of {step}; with it {row['speedup_called_with_step']:.2f}x"


def _print_model_steps(rows: list[Row]) -> None:
    for row in rows:
        batch = f"{row['batch']} x {row['length']}" if "batch" in row else f"largest batch x {row['length']}"
        print(f"{row['preset']}, {batch} tokens, {row['workload']}, {row['dtype']}:")
        for name in ("dense", "sparse"):
            if isinstance(of := row.get(name), str):
                print(f"    {name}: {of}")
            elif of is not None:
                peak, activations = (of["memory"][key] / 1e9 for key in ("peak", "activations"))
                energy = "" if of["joules"] is None else f", {of['joules']:.0f} J"
                own = f"{of['batch']} sequences, " if "batch" in of else ""
                print(
                    f"    {name}: {own}{of['step_ms']['p50']:.1f} ms a step, {of['tokens_per_ms']:.1f} tokens/ms, "
                    f"peak {peak:.2f} GB, activations {activations:.2f} GB{energy}"
                )
        if "batch_ratio" in row:
            print(f"    sparse over dense: {row['batch_ratio']:.2f}x the sequences, {row['speedup']:.2f}x as fast")
        elif "speedup" in row:
            print(
                f"    sparse over dense: {row['speedup']:.2f}x as fast, peak memory {row['peak_ratio']:.2f}x, "
                f"activations {row['activations_ratio']:.2f}x"
            )
