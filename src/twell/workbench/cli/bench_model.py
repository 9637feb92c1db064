"""``twell bench model``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.bench_common import (
    AsJson,
    Called,
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

Shape = tuple[int, int]  # sequences, tokens of each


@bench_app.command("model")
def bench_model(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub name of a model with ReLU FFNs. Default: random weights.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Run MODEL on this text: .txt, .jsonl or .parquet. Default: random tokens.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Shape of a model of random weights: tiny, small, 0.5b, 1b, 1.5b or 2b.")
    ] = None,
    workload: ModelWorkload = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Sequences x tokens; repeatable. Default: 32x2048, on a CPU 4x2048, or the model's context."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Layers of a model of random weights. Default: the preset's.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Also time model.generate: 64 tokens after a prompt of 32.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the layers of all models.")] = False,
    fp8: Fp8 = None,
    called: Called = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also time every FFN of MODEL by itself.")] = False,
    device: Device = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time the forward pass of a whole model, dense against sparse: tokens, first token, memory, energy.

    On a GPU in bfloat16.

    Example: [bold]twell bench model my-run/model --text book.txt --layers[/bold]

    Without MODEL: random weights, whose FFNs compute a workload:
    [bold]twell bench model --preset 1.5b -w skew29 --shape 64x2048[/bold]
    """
    torch_device = device_of(device)
    require_fp8(fp8, torch_device)
    sizes = [_shape(said) for said in shape or []]
    how: dict[str, Any] = {"compiled": compiled, "seconds": seconds, "called": called}
    if model is not None:
        if preset is not None or workload is not None or depth is not None:
            raise ValueError("--preset, --workload and --depth are for models of random weights: leave out MODEL")
        rows = _real_model_rows(model, text, sizes, torch_device, generate, fp8, how | {"wants_layers": layers})
    else:
        if text is not None or layers:
            raise ValueError("--text and --layers are for a real model: name one")
        if depth is not None and depth < 1:
            raise ValueError("--depth must be at least 1")
        what = preset or "1.5b", workload or "skew29", depth
        rows = _random_model_rows(*what, sizes or [(_batch(torch_device), 2048)], torch_device, generate, fp8, how)
    show(rows, max(1, len(sizes)) + generate, as_json, out)


def _shape(text: str) -> Shape:
    """
    >>> _shape("4x2048")
    (4, 2048)
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"--shape must be sequences x tokens, as 4x2048, got {text!r}")
    return int(found[1]), int(found[2])


def _batch(device: Any) -> int:
    """Sequences, by default."""
    return 4 if device.type == "cpu" else 32


def _real_model_rows(
    name: str,
    text: Path | None,
    sizes: list[Shape],
    device: Any,
    generate: bool,
    in_fp8: bool | None,
    how: dict[str, Any],
) -> Iterator[Row]:
    """The rows of a model as it is."""
    import torch

    from twell.hf.text import context_of
    from twell.workbench.bench import model as bench

    language_model, tokenizer = model_as_run(name, device)
    context = context_of(language_model) or 2048
    sizes = sizes or [(_batch(device), min(2048, context))]
    longest = max(n for _, n in sizes)
    if longest > context:
        raise ValueError(f"the model's context is {context} tokens, --shape asks for {longest}")
    if generate and context < bench.PROMPT_TOKENS + bench.NEW_TOKENS:
        raise ValueError(f"the model's context is {context} tokens, too few for --generate")
    needed = max(max(b * n for b, n in sizes), bench.PROMPT_TOKENS if generate else 1)
    if text is None:
        ids = torch.randint(language_model.config.vocab_size, (needed,))
    else:
        ids = text_ids(text, tokenizer, needed)
    subject, case = bench.real(language_model, name, in_fp8=in_fp8), {"case": "random" if text is None else "text"}

    def ids_of(shape: Shape) -> Any:
        return ids[: shape[0] * shape[1]].view(shape).to(device)

    return ({**row, **case} for row in _measured(subject, ids_of, sizes, generate, how))


def _random_model_rows(
    preset: str,
    workload: str,
    depth: int | None,
    sizes: list[Shape],
    device: Any,
    generate: bool,
    in_fp8: bool | None,
    how: dict[str, Any],
) -> Iterator[Row]:
    """Rows of a model of random weights: one model for all sizes; compiled, a new one for each."""
    import torch

    from twell.train import recipes
    from twell.workbench.bench import cases
    from twell.workbench.bench import model as bench

    recipe = recipes.preset(preset)
    recipe = dataclasses.replace(recipe, layers=depth or recipe.layers)
    cases.get_workload(workload)
    facts = {"preset": preset if depth is None else f"{depth} layers of {preset}"}
    prompt = [(1, bench.PROMPT_TOKENS)] if generate else []

    def subject_for(some: list[Shape]) -> bench.Subject:
        dense = cases.random_llama(recipe, max(n for _, n in some), device)
        return bench.synthetic(dense, workload, max(some, key=lambda size: size[0] * size[1]), in_fp8=in_fp8)

    def ids_of(shape: Shape) -> Any:
        return torch.randint(recipe.vocab_size, shape, device=device)

    def rows() -> Iterator[Row]:
        if how["compiled"]:
            for size in sizes:
                yield from _measured(subject_for([size]), ids_of, [size], False, how)
            if generate:
                yield from _measured(subject_for(prompt), ids_of, [], True, how)
        else:
            yield from _measured(subject_for([*sizes, *prompt]), ids_of, sizes, generate, how)

    return ({**row, **facts} for row in rows())


def _measured(
    subject: Any, ids_of: Callable[[Shape], Any], sizes: list[Shape], generate: bool, how: dict[str, Any]
) -> Iterator[Row]:
    from twell.workbench.bench import model as bench

    for size in sizes:
        yield bench.measure(subject, ids_of(size), **how)
    if generate:
        prompts = ids_of((1, bench.PROMPT_TOKENS))
        yield bench.measure_generate(subject, prompts, bench.NEW_TOKENS, seconds=how["seconds"])
