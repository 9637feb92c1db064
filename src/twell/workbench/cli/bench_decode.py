"""``twell bench decode``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.bench_common import (
    AsJson,
    Device,
    Fp8,
    ModelWorkload,
    Out,
    model_as_run,
    require_fp8,
    show,
    text_ids,
)
from twell.workbench.cli.bench_table import Row
from twell.workbench.cli.common import Seconds, device_of

CONTEXT = 256  # tokens, where the model has room for as many


@bench_app.command("decode")
def bench_decode(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub name of a Llama-like ReLU model. Default: random weights.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="The text that MODEL reads: .txt, .jsonl or .parquet.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Shape of a model of random weights: tiny, small, 0.5b (default), 1b, 1.5b, 2b.")
    ] = None,
    workload: ModelWorkload = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeatable. Default: 1.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens before the one that is timed. Default: 256, or what fits the model.")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="On a GPU: without CUDA graphs.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="All models compiled, as transformers does with a static cache.")
    ] = False,
    fp8: Fp8 = None,
    device: Device = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time a step of generation by a whole model, dense against sparse and frozen; on a GPU in bfloat16.

    Example: [bold]twell bench decode --preset 1.5b -w skew29 --batch 1 --batch 8[/bold]

    A trained model: [bold]twell bench decode my-run/model --text book.txt --batch 1 --batch 64[/bold]
    """
    from twell.train import recipes
    from twell.workbench.bench import cases

    if min([*(batch or []), 1 if context is None else context]) < 1:
        raise ValueError("--batch and --context must be at least 1")
    torch_device = device_of(device)
    require_fp8(fp8, torch_device)
    if (model is None) != (text is None):
        raise ValueError("a model reads a text: give both MODEL and --text, or neither for random weights")
    if model is not None and (preset or workload):
        raise ValueError("--preset and --workload are for models of random weights: leave out MODEL")
    batches, graph = batch or [1], torch_device.type == "cuda" and not eager
    how: dict[str, Any] = {"graph": graph, "compiled": compiled, "in_fp8": fp8, "seconds": seconds}
    recipe, workload = recipes.preset(preset or "0.5b"), workload or "skew29"
    cases.get_workload(workload)

    def of_random_weights() -> Iterator[Row]:
        from twell.workbench.bench import decode

        length = context or CONTEXT
        for n in batches:
            llama = cases.random_llama(recipe, length + 1, torch_device)
            yield {**decode.measure(llama, workload, n, length, **how), "preset": preset or "0.5b"}

    def of_a_text(name: str, text: Path) -> Iterator[Row]:
        from twell.hf.text import context_of
        from twell.workbench.bench import decode

        language_model, tokenizer = model_as_run(name, torch_device)
        room = context_of(language_model) or sys.maxsize
        length = context or max(1, min(CONTEXT, room - decode.NEW_TOKENS))
        if length + decode.NEW_TOKENS > room:
            raise ValueError(f"the model's context is {room} tokens: --context must leave {decode.NEW_TOKENS} of them")
        ids = text_ids(text, tokenizer, decode.tokens_needed(max(batches), length)).to(torch_device)
        for n in batches:
            yield decode.measure_text(language_model, name, ids, n, length, **how)

    rows = of_random_weights() if model is None or text is None else of_a_text(model, text)
    show(rows, len(batches), as_json, out)
