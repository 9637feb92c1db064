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
    Tokens,
    Width,
    Workloads,
    place_of,
    show,
)
from twell.workbench.cli.bench_table import Row
from twell.workbench.cli.common import Seconds


@bench_app.command("train")
def bench_train(
    workload: Workloads = None,
    tokens: Tokens = None,
    width: Width = 2048,
    hidden: Hidden = 5632,
    dtype: Dtype = None,
    plain: Plain = False,
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
    from twell.workbench.bench import cases, ffn, train_ffn

    torch_device, torch_dtype = place_of(device, dtype, backend)
    names, sizes = workload or ["skew29"], tokens or [16384 if torch_device.type == "cuda" else 2048]
    for name in names:
        cases.get_workload(name)
    if min(*sizes, width, hidden, batch, length) < 1:
        raise ValueError("--tokens, --width, --hidden, --batch and --length must be at least 1")
    if whole_model and (tokens or plain):
        raise ValueError("--model has gated FFNs on --batch times --length tokens: no --tokens or --plain")
    if whole_model:
        place: dict[str, Any] = {"dtype": torch_dtype, "device": torch_device, "backend": backend}
        show(_step_rows(names, preset, batch, length, seconds, **place), len(names), as_json, out)
        return
    case: dict[str, Any] = {"dtype": torch_dtype, "device": str(torch_device), "backend": backend}
    case |= {"D": width, "F": hidden, "gated": not plain, "called": called}
    todo = [ffn.Case(workload=name, M=m, **case) for name in names for m in sizes]
    show(train_ffn.run(todo, seconds=seconds), len(todo), as_json, out)


def _step_rows(names: list[str], preset: str, batch: int, length: int, seconds: float, **place: Any) -> Iterator[Row]:
    from twell.train import recipes
    from twell.workbench.bench import cases, train_model

    recipe = recipes.preset(preset)
    config, l1 = cases.llama_config(recipe, length), 2e-5 if recipe.l1 is None else recipe.l1
    for name in names:
        setup = train_model.Setup(config, name, batch, length, l1, **place)
        yield {**train_model.measure(setup, seconds=seconds), "preset": preset}
