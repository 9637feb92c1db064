"""``twell bench model | decode``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.app import bench_app
from twell.workbench.cli.bench_common import (
    AS_CALLED,
    PERCENTILES,
    AsJson,
    Called,
    Device,
    ModelWorkload,
    Out,
    Row,
    bold,
    dense_config,
    label,
    machine_of,
    ms,
    print_lines,
    text_ids,
)
from twell.workbench.cli.common import Seconds, collect, device_of, load_model

_SIDES = ("dense", "sparse")
_FP8 = ("fp8", "fp8_weights", "sparse_fp8")


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
    trace: Annotated[Path | None, typer.Option(help="Activations of this trace (twell trace) instead.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's protocol: 64 x 2048 random tokens.")] = False,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeatable. Default: 32, on a CPU 4.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence; repeatable. Default: 2048 or the model's context.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Sequences x tokens, as 1x2048, in place of the two; repeatable.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Layers of a model of random weights. Default: the preset's.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Also time model.generate: 64 tokens after a prompt of 32.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the layers of both models.")] = False,
    called: Called = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also time every FFN of MODEL by itself.")] = False,
    device: Device = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time the forward pass of a whole model, dense against sparse: tokens, first token, memory, energy.

    Example: [bold]twell bench model my-run/model --text book.txt --layers[/bold]

    Without MODEL: random weights, whose FFNs compute a workload:
    [bold]twell bench model --preset 1.5b -w skew29 --paper[/bold]
    """
    if paper and (batch or length or shape or text is not None):
        raise ValueError("--paper is 64 x 2048 random tokens: leave out --batch, --length, --shape and --text")
    if shape and (batch or length):
        raise ValueError("--shape says both --batch and --length: leave them out")
    if min([*(batch or []), *(length or []), 1 if depth is None else depth]) < 1:
        raise ValueError("--batch, --length and --depth must be at least 1")
    torch_device = device_of(device)
    batches = [64] if paper else batch or [4 if torch_device.type == "cpu" else 32]
    lengths = [2048] if paper else length or []
    sizes = [_shape(text) for text in shape or []]
    how: dict[str, Any] = {"compiled": compiled, "seconds": seconds, "called": called}
    if model is not None:
        if preset is not None or workload is not None or trace is not None or depth is not None:
            raise ValueError(
                "--preset, --workload, --depth and --trace are for models of random weights: leave out MODEL"
            )
        how["wants_layers"] = layers
        measured = _real_model_rows(model, text, sizes, batches, lengths, torch_device, generate, how)
    else:
        if text is not None or layers:
            raise ValueError("--text and --layers are for a real model: name one")
        if trace is not None and generate:
            raise ValueError("--generate is for a workload: what a trace has recorded is a whole batch")
        sizes = sizes or [(b, n) for b in batches for n in lengths or [2048]]
        what = preset or "1.5b", workload or "skew29", trace, depth
        measured = _random_model_rows(*what, sizes, torch_device, generate, how)
    rows = collect(
        ({**row, "case": "paper"} if paper else row for row in measured),
        (len(sizes) or len(batches) * len(lengths or [0])) + generate,
        as_json,
        out,
        lambda row: f"{row['batch']} x {row['length']} tokens: {row.get('speedup', row.get('speedup_called')):.2f}x",
    )
    if not as_json:
        _print_model_table([row for row in rows if row["bench"] == "model"])
        for row in rows:
            if row["bench"] == "generate":
                _print_generate(row)


def _shape(text: str) -> tuple[int, int]:
    """Sequences and tokens of each, from text such as 4x2048."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or min(int(found[1]), int(found[2])) < 1:
        raise ValueError(f"--shape must be sequences x tokens, as 4x2048, got {text!r}")
    return int(found[1]), int(found[2])


def _real_model_rows(
    name: str,
    text: Path | None,
    sizes: list[tuple[int, int]],
    batches: list[int],
    lengths: list[int],
    device: Any,
    generate: bool,
    how: dict[str, Any],
) -> Iterator[Row]:
    """The rows of a model as it is, for ``sizes`` or all ``batches`` of all ``lengths``."""
    import torch

    from twell.hf.text import context_of
    from twell.workbench.bench import model as bench

    language_model, tokenizer = load_model(name)
    language_model.to(device)
    context = context_of(language_model) or 2048
    sizes = sizes or [(b, n) for b in batches for n in lengths or [min(2048, context)]]
    longest = max(n for _, n in sizes)
    if longest > context:
        raise ValueError(f"the model's context is {context} tokens, --length asks for {longest}")
    if generate and context < bench.PROMPT_TOKENS + bench.NEW_TOKENS:
        raise ValueError(f"the model's context is {context} tokens, too few for --generate")
    needed = max(max(b * n for b, n in sizes), bench.PROMPT_TOKENS if generate else 1)
    if text is None:
        ids = torch.randint(language_model.config.vocab_size, (needed,))
    else:
        ids = text_ids(text, tokenizer, needed)
    subject, case = bench.real(language_model, name), {"case": "random" if text is None else "text"}

    def rows() -> Iterator[Row]:
        for b, n in sizes:
            yield {**bench.measure(subject, ids[: b * n].view(b, n).to(device), **how), **case}
        if generate:
            prompt = ids[: bench.PROMPT_TOKENS].view(1, -1).to(device)
            yield {**bench.measure_generate(subject, prompt, bench.NEW_TOKENS, seconds=how["seconds"]), **case}

    return rows()


def _random_model_rows(
    preset: str,
    workload: str,
    trace: Path | None,
    depth: int | None,
    sizes: list[tuple[int, int]],
    device: Any,
    generate: bool,
    how: dict[str, Any],
) -> Iterator[Row]:
    """Rows of a model of random weights: one model for all sizes; with a trace or compiled, a new one for each size."""
    import torch
    from transformers import LlamaForCausalLM

    from twell.ops import backends
    from twell.train import recipes
    from twell.workbench.bench import cases
    from twell.workbench.bench import model as bench
    from twell.workbench.trace import Trace

    recipe = recipes.preset(preset)
    cases.get_workload(workload)
    backends.choose_backend("triton", device)
    patterns = None
    if trace is not None:
        recorded = Trace.load(trace)
        F = recipe.intermediate_size if recorded.hidden_sizes is None else None
        patterns = [recorded.pattern(i, F) for i in range(recorded.layers)]
        workload = f"skew{max(1, round(sum(p.sum().item() / len(p) for p in patterns) / len(patterns)))}"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = {"preset": preset} if depth is None else {"preset": f"{depth} layers of {preset}"}

    def subject_for(some: list[tuple[int, int]]) -> bench.Subject:
        largest = max(some, key=lambda size: size[0] * size[1])
        config = dense_config(recipe, max(n for _, n in some))
        config.num_hidden_layers = depth or recipe.layers
        with device:
            dense: Any = LlamaForCausalLM(config)
        return bench.synthetic(dense.to(dtype).eval(), workload, largest, patterns)

    def rows() -> Iterator[Row]:
        apart = patterns is not None or how["compiled"]
        for some in [[size] for size in sizes] if apart else [sizes]:
            subject = subject_for(some)
            for shape in some:
                ids = torch.randint(recipe.vocab_size, shape, device=device)
                yield {**bench.measure(subject, ids, **how), **facts}
            del subject
        if generate:
            shape = (1, bench.PROMPT_TOKENS)
            subject = subject_for([shape])
            ids = torch.randint(recipe.vocab_size, shape, device=device)
            yield {**bench.measure_generate(subject, ids, bench.NEW_TOKENS, seconds=how["seconds"]), **facts}

    return rows()


def _print_model_table(rows: list[Row]) -> None:
    first = rows[0]
    has_calls = "called_ms" in first

    def line(row: Row, side: str) -> list[str]:
        joules, is_sparse = row["joules_per_token"][side], side == "sparse"
        cells = [
            "" if is_sparse else f"{row['batch']} x {row['length']}",
            side,
            ms(row[f"{side}_ms"]),
            f"{row['tokens_per_ms'][side]:.3g}",
            ms(row["first_token_ms"][side]),
            f"{row['memory'][side]['pass'] / 1e6:.0f}",
            "?" if joules is None else f"{1000 * joules:.3g}",
            bold(row["speedup"]) if is_sparse else "",
        ]
        of_calls = [ms(row["called_ms"][side]), bold(row["speedup_called"]) if is_sparse else ""] if has_calls else []
        return [*cells, *of_calls]

    what = first.get("model") or f"{first['preset']}, {first['workload']}"
    title = f"{what}, {first['dtype']}, {machine_of(first)}{', compiled' if first['compiled'] else ''}"
    notes = [PERCENTILES, "memory: of a pass, besides weights", "?: not available", *([AS_CALLED] if has_calls else [])]
    head = ["tokens", "", "ms", "tokens\na ms", "first\ntoken ms", "memory\nMB", "mJ a\ntoken", "speedup"]
    head += ["called\nms", "called"] if has_calls else []
    print_lines(title, notes, head, (line(row, side) for row in rows for side in _SIDES))
    held = first["memory"]["sparse"]["held"] / 1e6
    print(f"the sparse model is not frozen; it holds {held:,.1f} MB, {first['memory_ratio']:.3f}x of the dense one")
    for row in rows:
        for layer in row.get("ffns", ()):
            print(f"{layer['name']}: {layer['mean_active']:.0f} active, {layer['speedup']:.2f}x")


def _print_generate(row: Row) -> None:
    ways = ", ".join(f"{name} {ms(spread)} ms" for name, spread in row["called_ms"].items())
    print(
        f"model.generate, {row['new_tokens']} tokens after {row['length']}: {ways}: {row['speedup_called']:.2f}x, "
        f"frozen {row['speedup_called_frozen']:.2f}x ({row['frozen_bytes'] / 1e6:,.1f} MB beside the weights)"
    )


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
    context: Annotated[int, typer.Option(help="Tokens before the one that is timed.")] = 256,
    eager: Annotated[bool, typer.Option("--eager", help="On a GPU: without CUDA graphs.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="All models compiled, as transformers does with a static cache.")
    ] = False,
    fp8: Annotated[
        bool | None,
        typer.Option("--fp8/--no-fp8", help="Also time FP8 FFNs, dense and sparse. Default: on GPUs with FP8."),
    ] = None,
    device: Device = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time a step of generation by a whole model, dense against sparse and frozen.

    Example: [bold]twell bench decode --preset 1.5b -w skew29 --batch 1 --batch 8[/bold]

    A trained model: [bold]twell bench decode my-run/model --text book.txt --batch 1 --batch 64[/bold]
    """
    import torch

    from twell.fp8 import why_unavailable
    from twell.train import recipes
    from twell.workbench.bench import cases

    if min([*(batch or []), context]) < 1:
        raise ValueError("--batch and --context must be at least 1")
    torch_device = device_of(device)
    if fp8 and (reason := why_unavailable(torch_device)):
        raise ValueError(f"--fp8: {reason}")
    if (model is None) != (text is None):
        raise ValueError("a model reads a text: give both MODEL and --text, or neither for random weights")
    if model is not None and (preset or workload):
        raise ValueError("--preset and --workload are for models of random weights: leave out MODEL")
    on_gpu, batches = torch_device.type == "cuda", batch or [1]
    how: dict[str, Any] = {"graph": on_gpu and not eager, "compiled": compiled, "in_fp8": fp8, "seconds": seconds}
    recipe, workload = recipes.preset(preset or "0.5b"), workload or "skew29"
    cases.get_workload(workload)

    def of_random_weights() -> Iterator[Row]:
        from transformers import LlamaForCausalLM

        from twell.workbench.bench import decode

        for n in batches:
            with torch_device:
                llama: Any = LlamaForCausalLM(dense_config(recipe, context + 1))
            llama.to(torch.bfloat16 if on_gpu else torch.float32).eval()
            yield {**decode.measure(llama, workload, n, context, **how), "preset": preset or "0.5b"}

    def of_a_text(name: str, text: Path) -> Iterator[Row]:
        from twell.hf.text import context_of
        from twell.workbench.bench import decode

        language_model, tokenizer = load_model(name, device, "bfloat16" if on_gpu else None)
        room = context_of(language_model)
        if room is not None and context + decode.NEW_TOKENS > room:
            raise ValueError(f"the model's context is {room} tokens: --context must leave {decode.NEW_TOKENS} of them")
        ids = text_ids(text, tokenizer, decode.tokens_needed(max(batches), context)).to(torch_device)
        for n in batches:
            yield decode.measure_text(language_model, name, ids, n, context, **how)

    rows = of_random_weights() if model is None or text is None else of_a_text(model, text)
    measured = collect(rows, len(batches), as_json, out, lambda row: f"{row['batch']} sequences: {row['speedup']:.2f}x")
    for row in measured if not as_json else ():
        what = f"{row['preset']}, {workload}" if model is None else f"{model}, {row['mean_active']:.0f} active"
        where = f"{what}, {row['dtype']}, {machine_of(row)}, {row['batch']} sequences"
        print(f"{where} after {context} tokens: {_rates(row, _SIDES)}: {row['speedup']:.2f}x")
        print(f"the sparse model is frozen: {row['frozen_bytes'] / 1e6:,.1f} MB beside its weights")
        if "fp8_ms" in row:
            ratios = f"{row['speedup_over_fp8']:.2f}x in 16 bits"
            ratios += f", {row['speedup_fp8']:.2f}x in FP8" if "speedup_fp8" in row else ""
            print(f"with FP8 FFNs: {_rates(row, _FP8)}; sparse over the faster dense FP8: {ratios}")


def _rates(row: Row, ways: Iterable[str]) -> str:
    there = [way for way in ways if f"{way}_ms" in row]
    rates = [f"{label(way)} {row['tokens_per_second'][way]:,} ({ms(row[f'{way}_ms'])} ms)" for way in there]
    return f"tokens/s {', '.join(rates)}"
