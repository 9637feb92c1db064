"""``twell bench train``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.common import (
    Seconds,
    collect,
    dense_config,
    device_of,
    dtype_of,
    machine_of,
    print_table,
    trace_rows,
)


@bench_app.command("train")
def bench_train(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="iidN or skewN, for a mean count of N; repeatable."),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", "-m", help="Token count M; repeatable.")] = None,
    width: Annotated[int, typer.Option("--width", "-d", help="Model width D.")] = 2048,
    hidden: Annotated[int, typer.Option("--hidden", "-f", help="Hidden width F.")] = 5632,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32, on a GPU bfloat16.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain FFN instead of the gated one.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Time every layer of this trace (twell trace) instead of a workload.")
    ] = None,
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
            help="Of one FFN: also time a plain loop with an optimiser's step, the host included. Default: on a GPU.",
        ),
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="With --model: each at the largest batch that fits the GPU.")
    ] = False,
    variant: Annotated[str, typer.Option(help="With --model: dense, sparse or both.")] = "both",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    backend: Annotated[str, typer.Option(help="auto, reference, cpu or triton.")] = "auto",
    seconds: Seconds = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """Time training, dense against sparse: forward and backward of one FFN with L1, or whole steps of a model.

    Example: [bold]twell bench train -w skew29 -w skew100 -m 16384[/bold] or
    [bold]twell bench train --model --preset 1.5b --batch 8 -w skew29[/bold]
    """
    import torch

    from twell.ops import backends
    from twell.workbench.bench import cases
    from twell.workbench.doctor import bf16_problem

    torch_device = device_of(device)
    torch_dtype = dtype_of(dtype if dtype is not None else "bfloat16" if torch_device.type == "cuda" else "float32")
    backends.choose_backend(backend, torch_device)
    if torch_dtype == torch.bfloat16 and torch_device.type == "cpu" and (problem := bf16_problem()):
        raise RuntimeError(problem)
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
    if trace is not None:
        backends.choose_backend("triton", torch_device)
    how: dict[str, Any] = {"dtype": torch_dtype, "device": torch_device, "seconds": seconds}
    names = workload or ["skew29"]
    if whole_model:
        variants = ("dense", "sparse") if variant == "both" else (variant,)
        of_model: dict[str, Any] = {
            "preset": preset,
            "batch": None if largest else batch,
            "length": length,
            "variants": variants,
            "backend": backend,
        }
        n_rows, measured = len(names), _model_steps(names, **of_model, **how)
    elif trace is not None:
        from twell.workbench.bench import train_trace

        n_rows, measured = trace_rows(train_trace.measure_trace, trace, sizes, width, hidden, **how)
    else:
        n_rows = len(names) * len(sizes)
        measured = _ffn_steps(names, sizes, width, hidden, gated=not plain, backend=backend, called=called, **how)
    rows = collect(
        measured,
        n_rows,
        as_json,
        out,
        lambda row: f"{row['workload']}: {row['speedup']:.2f}x" if "speedup" in row else row["workload"],
    )
    if not as_json:
        (_print_model_steps if whole_model else _print_ffn_steps)(rows)


def _ffn_steps(
    names: list[str], sizes: list[int], width: int, hidden: int, *, device: Any, seconds: float, **how: Any
) -> Iterator[dict[str, Any]]:
    from twell.workbench.bench import ffn, train

    todo = [ffn.Case(workload=name, M=m, D=width, F=hidden, device=str(device), **how) for name in names for m in sizes]
    return train.run(todo, seconds=seconds)


def _model_steps(
    names: list[str], *, preset: str, batch: int | None, length: int, **how: Any
) -> Iterator[dict[str, Any]]:
    """``batch`` None: the largest that fits."""
    try:
        from twell.workbench.bench import train_model
    except ImportError as error:
        raise RuntimeError(f"models need more packages ({error}): pip install 'twell[train]'") from None
    from twell.train import recipes

    recipe = recipes.preset(preset)
    of_all = {"length": length, "l1": 2e-5 if recipe.l1 is None else recipe.l1, **how}
    measure: Callable[..., dict[str, Any]] = train_model.measure_largest
    if batch is not None:
        measure = functools.partial(train_model.measure_model, batch=batch)
    return ({**measure(dense_config(recipe, length), name, **of_all), "preset": preset} for name in names)


def _print_ffn_steps(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"training a {first['kind']} FFN, D {first['D']}, F {first['F']}, {first['dtype']}, {machine_of(first)}",
        caption="median ms of forward and backward; speedup over the faster dense one; "
        "error: largest of y and gradients, relative, against float64",
        box=box.SIMPLE,
    )
    timed = [name for name in ("dense", "compiled", "sparse") if f"{name}_ms" in first]
    as_called = ("as called",) if "called_ms" in first else ()
    for name in ("workload", "tokens", "active", *timed, "speedup", *as_called, "error"):
        is_name = name == "workload"
        table.add_column(name, justify="left" if is_name else "right", no_wrap=not is_name)
    for row in rows:
        table.add_row(
            row["workload"],
            str(row["M"]),
            f"{row['mean_active']:.0f}",
            *(f"{row[f'{name}_ms']['p50']:.2f}" for name in timed),
            f"[bold]{row['speedup']:.2f}x[/bold]",
            *(f"[bold]{row['speedup_called']:.2f}x[/bold]" for _ in as_called),
            "" if row["error"] is None else f"{max(row['error']['sparse'].values()):.1e}",
        )
    print_table(table)
    for row in rows:
        facts = []
        if "plan" in row:
            facts.append(f"{row['plan']['hot']} hot, heavy above {row['plan']['cap']}")
        if (memory := row["memory"]) is not None:
            dense, sparse = memory["dense"] / 1e6, memory["sparse"] / 1e6
            facts.append(f"peak memory {sparse:.0f} of {dense:.0f} MB ({memory['ratio']:.2f}x)")
        if (joules := row["joules"]) is not None:
            dense, sparse = joules["dense"], joules["sparse"]
            facts.append(f"energy {sparse:.2f} of {dense:.2f} J ({sparse / dense:.2f}x)")
        if "called_ms" in row:
            ways = ", ".join(
                f"{name} {spread['p50']:.2f} ms ({row['host_us'][name]:.0f} us of the host)"
                for name, spread in row["called_ms"].items()
            )
            step = f"{row['optimizer_ms']['p50']:.2f} ms"
            facts.append(
                f"as called {ways}, besides AdamW's step of {step}; with it {row['speedup_called_with_step']:.2f}x"
            )
        print(f"{row['workload']}, {row['M']} tokens: {'; '.join(facts)}")


def _print_model_steps(rows: list[dict[str, Any]]) -> None:
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
