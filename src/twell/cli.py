"""The ``twell`` command. Heavy modules are imported inside the commands, so that --help is quick."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from twell.train.recipes import Recipe

app = typer.Typer(
    help="Sparse-activation feed-forward layers, fast and exact.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench_app = typer.Typer(help="Measure dense against sparse, checked before timed.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point: bad input ends in one clear line and exit code 2."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"twell: error: {str(error).strip().partition(chr(10))[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("twell: interrupted", file=sys.stderr)
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        from twell import __version__

        print(f"twell {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------
# bench ffn
# ---------------------------------------------------------------------------------------------------------


@bench_app.command("ffn")
def bench_ffn(
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
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
    backend: Annotated[str, typer.Option(help="auto, reference, cpu or triton.")] = "auto",
    graph: Annotated[bool, typer.Option("--graph", help="Time replays of CUDA graphs.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Time every layer of this trace (twell trace) instead of a workload.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Timing budget per row, after 5 repeats.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """Time one FFN, dense against sparse, side by side.

    Example: [bold]twell bench ffn -w skew29 -w skew2800 -m 1 -m 256 --json[/bold]
    """
    import torch

    from twell import ops
    from twell.bench import cases, ffn
    from twell.doctor import bf16_problem

    torch_device = _device(device)
    dtype = dtype or ("bfloat16" if torch_device.type == "cuda" else "float32")
    torch_dtype = _dtype(dtype)
    ops.choose_backend(backend, torch_device)
    if torch_dtype == torch.bfloat16 and torch_device.type == "cpu" and (problem := bf16_problem()):
        raise RuntimeError(problem)
    names, sizes = workload or ["skew29"], tokens or [1, 16, 256, 2048]
    for name in names:
        cases.get_workload(name)
    if min(*sizes, width, hidden) < 1:
        raise ValueError("--tokens, --width and --hidden must be at least 1")
    if graph and torch_device.type != "cuda":
        raise ValueError("--graph needs a GPU: use --device cuda")
    if trace is not None and (workload or plain or graph):
        raise ValueError("--trace times gated FFNs as they were recorded: it takes no --workload, --plain or --graph")
    if trace is not None:
        ops.choose_backend("triton", torch_device)
        from twell.bench import traced

        n_rows, measured = _trace_rows(
            traced.measure,
            trace,
            tokens or [16384],
            width,
            hidden,
            dtype=torch_dtype,
            device=torch_device,
            seconds=seconds,
        )
    else:
        todo = [
            ffn.Case(
                workload=name,
                M=m,
                D=width,
                F=hidden,
                dtype=torch_dtype,
                gated=not plain,
                device=device,
                backend=backend,
                graph=graph,
            )
            for name in names
            for m in sizes
        ]
        n_rows, measured = len(todo), ffn.run(todo, seconds=seconds)
    rows = _collect(
        measured, n_rows, as_json, out, lambda row: f"{row['workload']}, {row['M']} tokens: {row['speedup']:.2f}x"
    )
    if not as_json:
        _print_speed_table(rows)


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
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help="What its FFNs compute: iidN or skewN. Default: skew29.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Activations of this trace (twell trace) instead.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's protocol: 64 x 2048 random tokens.")] = False,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeatable. Default: 32, on a CPU 4.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence; repeatable. Default: 2048 or the model's context.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the layers of both models.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Also time every FFN of MODEL by itself.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(help="Timing budget of a row, after 5 repeats.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """Time the forward pass of a whole model, dense against sparse: tokens, first token, memory, energy.

    Example: [bold]twell bench model my-run/model --text book.txt --layers[/bold]

    Without MODEL: random weights, whose FFNs compute a workload:
    [bold]twell bench model --preset 1.5b -w skew29 --paper[/bold]
    """
    import torch

    if paper and (batch or length or text is not None):
        raise ValueError("--paper is 64 x 2048 random tokens: leave out --batch, --length and --text")
    if min([*(batch or []), *(length or [])], default=1) < 1:
        raise ValueError("--batch and --length must be at least 1")
    torch_device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    batches = [64] if paper else batch or [4 if torch_device.type == "cpu" else 32]
    if model is not None:
        if preset is not None or workload is not None or trace is not None:
            raise ValueError("--preset, --workload and --trace are for models of random weights: leave out MODEL")
        n_rows, measured = _real_model_rows(
            model, text, batches, [2048] if paper else length, torch_device, compiled, seconds, layers
        )
    else:
        if text is not None or layers:
            raise ValueError("--text and --layers are for a real model: name one")
        sizes = [(b, n) for b in batches for n in ([2048] if paper else length or [2048])]
        measured = _random_model_rows(
            preset or "1.5b", workload or "skew29", trace, sizes, torch_device, compiled, seconds
        )
        n_rows = len(sizes)
    rows = _collect(
        ({**row, "case": "paper"} if paper else row for row in measured),
        n_rows,
        as_json,
        out,
        lambda row: f"{row['batch']} x {row['length']} tokens: {row['speedup']:.2f}x",
    )
    if not as_json:
        _print_model_table(rows)


def _real_model_rows(
    name: str,
    text: Path | None,
    batches: list[int],
    lengths: list[int] | None,
    device: Any,
    compiled: bool,
    seconds: float,
    layers: bool,
) -> tuple[int, Iterator[dict[str, Any]]]:
    """How many rows there will be, and the rows of a model as it is."""
    import torch

    from twell.bench import model as bench

    language_model, tokenizer = _load(name)
    language_model.to(device)
    context = getattr(language_model.config, "max_position_embeddings", None) or 2048
    lengths = lengths or [min(2048, context)]
    if max(lengths) > context:
        raise ValueError(f"the model's context is {context} tokens, --length asks for {max(lengths)}")
    if text is None:
        ids = torch.randint(language_model.config.vocab_size, (max(batches) * max(lengths),))
    else:
        from twell.train.data import read_texts

        ids = tokenizer("\n".join(read_texts(text)), return_tensors="pt").input_ids[0]
    needed = max(batches) * max(lengths)
    if len(ids) < needed:
        raise ValueError(f"{text} has {len(ids):,} tokens, --batch times --length asks for {needed:,}")
    subject = bench.real(language_model, name)

    def rows() -> Iterator[dict[str, Any]]:
        for b in batches:
            for n in lengths:
                some = ids[: b * n].view(b, n).to(device)
                row = bench.measure(subject, some, compiled=compiled, seconds=seconds, wants_layers=layers)
                yield {**row, "case": "random" if text is None else "text"}

    return len(batches) * len(lengths), rows()


def _random_model_rows(
    preset: str,
    workload: str,
    trace: Path | None,
    sizes: list[tuple[int, int]],
    device: Any,
    compiled: bool,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Rows of a model of random weights, made anew for every size."""
    import torch
    from transformers import LlamaForCausalLM

    from twell import ops
    from twell.bench import cases
    from twell.bench import model as bench
    from twell.trace import Trace
    from twell.train import recipes

    recipe = recipes.preset(preset)
    cases.get_workload(workload)
    ops.choose_backend("triton", device)
    patterns = None
    if trace is not None:
        recorded = Trace.load(trace)
        F = recipe.intermediate_size if recorded.hidden_sizes is None else None
        patterns = [recorded.pattern(i, F) for i in range(recorded.layers)]
        workload = f"skew{max(1, round(sum(p.sum().item() / len(p) for p in patterns) / len(patterns)))}"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def rows() -> Iterator[dict[str, Any]]:
        for batch, length in sizes:
            with device:
                dense: Any = LlamaForCausalLM(_dense_config(recipe, length))
            subject = bench.synthetic(dense.to(dtype).eval(), workload, (batch, length), patterns)
            ids = torch.randint(recipe.vocab_size, (batch, length), device=device)
            yield {**bench.measure(subject, ids, compiled=compiled, seconds=seconds), "preset": preset}

    return rows()


def _print_model_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    what = first.get("model") or f"{first['preset']}, {first['workload']}"
    table = Table(
        title=f"{what}, {first['dtype']}, {_machine(first)}{', compiled' if first['compiled'] else ''}",
        caption="ms: median, and half the distance of the 20th and 80th percentile; memory: of a pass, besides weights",
    )
    head = ("tokens", "", "ms", "tokens/ms", "first token ms", "memory MB", "mJ a token", "speedup")
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for side in ("dense", "sparse"):
            joules = row["joules_per_token"][side]
            table.add_row(
                f"{row['batch']} x {row['length']}" if side == "dense" else "",
                side,
                _ms(row[f"{side}_ms"]),
                f"{row['tokens_per_ms'][side]:.3g}",
                _ms(row["first_token_ms"][side]),
                f"{row['memory'][side]['pass'] / 1e6:.0f}",
                "not available" if joules is None else f"{1000 * joules:.3g}",
                f"[bold]{row['speedup']:.2f}x[/bold]" if side == "sparse" else "",
                end_section=side == "sparse",
            )
    Console().print(table)
    for row in rows:
        for layer in row.get("ffns", ()):
            print(f"{layer['name']}: {layer['mean_active']:.0f} active, {layer['speedup']:.2f}x")


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
    largest: Annotated[
        bool, typer.Option("--largest", help="With --model: each at the largest batch that fits the GPU.")
    ] = False,
    variant: Annotated[str, typer.Option(help="With --model: dense, sparse or both.")] = "both",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    backend: Annotated[str, typer.Option(help="auto, reference, cpu or triton.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Timing budget per row, after 5 repeats.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """Time training, dense against sparse: forward and backward of one FFN with L1, or whole steps of a model.

    Example: [bold]twell bench train -w skew29 -w skew100 -m 16384[/bold] or
    [bold]twell bench train --model --preset 1.5b --batch 8 -w skew29[/bold]
    """
    import torch

    from twell import ops
    from twell.bench import cases
    from twell.doctor import bf16_problem

    torch_device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch_dtype = _dtype(dtype or ("bfloat16" if torch_device.type == "cuda" else "float32"))
    ops.choose_backend(backend, torch_device)
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
        ops.choose_backend("triton", torch_device)
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
        from twell.bench import train_trace

        n_rows, measured = _trace_rows(train_trace.measure_trace, trace, sizes, width, hidden, **how)
    else:
        n_rows = len(names) * len(sizes)
        measured = _ffn_steps(names, sizes, width, hidden, gated=not plain, backend=backend, **how)
    rows = _collect(
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
    from twell.bench import ffn, train

    todo = [ffn.Case(workload=name, M=m, D=width, F=hidden, device=str(device), **how) for name in names for m in sizes]
    return train.run(todo, seconds=seconds)


def _model_steps(
    names: list[str], *, preset: str, batch: int | None, length: int, **how: Any
) -> Iterator[dict[str, Any]]:
    """``batch`` None: the largest that fits."""
    try:
        from twell.bench import train_model
    except ImportError as error:
        raise RuntimeError(f"models need more packages ({error}): pip install 'twell[train]'") from None
    from twell.train import recipes

    recipe = recipes.preset(preset)
    of_all = {"length": length, "l1": recipe.l1, **how}
    measure: Callable[..., dict[str, Any]] = train_model.measure_largest
    if batch is not None:
        measure = functools.partial(train_model.measure_model, batch=batch)
    return ({**measure(_dense_config(recipe, length), name, **of_all), "preset": preset} for name in names)


def _dense_config(recipe: Recipe, length: int) -> LlamaConfig:
    """A dense Llama with ReLU of the recipe's shape, for sequences of ``length`` tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=max(length, recipe.context),
        hidden_act="relu",
    )


def _print_ffn_steps(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"training a {first['kind']} FFN, D {first['D']}, F {first['F']}, {first['dtype']}, {_machine(first)}",
        caption="median ms of forward and backward; speedup over the faster dense one; "
        "error: largest of y and gradients, relative, against float64",
        box=box.SIMPLE,
    )
    timed = [name for name in ("dense", "compiled", "sparse") if f"{name}_ms" in first]
    for name in ("workload", "tokens", "active", *timed, "speedup", "error"):
        is_name = name == "workload"
        table.add_column(name, justify="left" if is_name else "right", no_wrap=not is_name)
    for row in rows:
        table.add_row(
            row["workload"],
            str(row["M"]),
            f"{row['mean_active']:.0f}",
            *(f"{row[f'{name}_ms']['p50']:.2f}" for name in timed),
            f"[bold]{row['speedup']:.2f}x[/bold]",
            "" if row["error"] is None else f"{max(row['error']['sparse'].values()):.1e}",
        )
    Console().print(table)
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
        if "after_step_ms" in row:
            facts.append(f"first after an optimiser step {row['after_step_ms']['p50']:.2f} ms")
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


@bench_app.command("plot")
def bench_plot(
    rows: Annotated[
        list[Path], typer.Argument(metavar="ROWS.jsonl", help="Rows of bench ffn, as --json or --out wrote them.")
    ],
    out: Annotated[Path, typer.Option(help="The .png or .svg file to write.")],
) -> None:
    """Plot speedup against mean active neurons, with the count at which sparse breaks even.

    Draws gated FFNs of the shape with the most rows. Example:
    [bold]twell bench plot rows.jsonl --out speedup.svg[/bold]
    """
    from twell.bench import plot
    from twell.bench import rows as files

    plot.speedup(files.read(rows), out)


@bench_app.command("curves")
def bench_curves(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of twell train, or their metrics.jsonl.")
    ],
    out: Annotated[Path, typer.Option(help="The .png or .svg file to write.")],
    first: Annotated[str | None, typer.Option(help="Name of the run the others are compared with.")] = None,
) -> None:
    """Plot training runs over each other: losses, their difference, active neurons, layers that train sparsely.

    Example: [bold]twell bench curves dense-run sparse-run --out curves.png[/bold]
    """
    from twell.bench import curves, plot

    plot.check_suffix(out)
    plot.save(curves.draw(curves.read_runs(runs), first), out)


def _collect(
    measured: Iterator[dict[str, Any]], n_rows: int, as_json: bool, out: Path | None, says: Callable[[Any], str]
) -> list[dict[str, Any]]:
    """All rows, each printed and written as it is done, under a progress bar that says something of the last."""
    rows: list[dict[str, Any]] = []
    try:
        with _progress("measuring", n_rows) as advance:
            for row in measured:
                rows.append(row)
                if as_json:
                    print(json.dumps(row), flush=True)
                _append(row, out)
                advance(says(row))
    except KeyboardInterrupt:
        where = "" if out is None else f", in {out}"
        print(f"twell: interrupted: {len(rows)} of {n_rows} rows are done{where}", file=sys.stderr)
        raise
    return rows


def _append(row: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        from twell.bench import rows

        rows.append(row, out)


def _trace_rows(
    measure: Callable[..., dict[str, Any]], path: Path, sizes: list[int], width: int, hidden: int, **how: Any
) -> tuple[int, Iterator[dict[str, Any]]]:
    """How many rows a trace gives, and the rows: ``measure`` of each of its layers."""
    from twell.bench import traced
    from twell.trace import Trace

    trace = Trace.load(path)
    names = trace.names or [f"layer {i}" for i in range(trace.layers)]
    width_of = hidden if trace.hidden_sizes is None else None
    rows = (
        measure(traced.Layer(name, trace.pattern(i, width_of)), m, width, **how)
        for m in sizes
        for i, name in enumerate(names)
    )
    return len(sizes) * len(names), rows


def _dtype(name: str) -> Any:
    import torch

    from twell import ops

    dtype = getattr(torch, name, None)
    if dtype not in ops.DTYPES:
        raise ValueError(f"unknown dtype {name!r}: expected float32, bfloat16, float16 or float64")
    return dtype


def _device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: expected cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here; use --device cpu")
    return device


def _machine(row: dict[str, Any]) -> str:
    return str(row["gpu"]) if "gpu" in row else f"{row['cpu']}, {row['threads']} threads"


def _ms(s: dict[str, float]) -> str:
    return f"{s['p50']:.2f} ±{(s['p80'] - s['p20']) / 2 / s['p50']:.0%}"


def _print_speed_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"{first['kind']} FFN, D {first['D']}, F {first['F']}, {first['dtype']}, {_machine(first)}",
        caption="ms: median, and half the distance of the 20th and 80th percentile; error: relative, against float64",
    )
    timed = [name for name in ("dense", "compiled", "sparse") if f"{name}_ms" in first]
    for name in ("workload", "tokens", "active", *(f"{name} ms" for name in timed), "speedup", "error"):
        table.add_column(name, justify="left" if name == "workload" else "right", no_wrap=True)

    for row in rows:
        table.add_row(
            row["workload"],
            str(row["M"]),
            f"{row['mean_active']:.0f}",
            *(_ms(row[f"{name}_ms"]) for name in timed),
            f"[bold]{row['speedup']:.2f}x[/bold]",
            f"{row['error']['sparse']:.1e}",
        )
    Console().print(table)
    for row in rows:
        if row.get("parts_ms"):
            plan, parts = row["plan"], ", ".join(f"{name} {ms:.3g}" for name, ms in row["parts_ms"].items())
            print(f"{row['workload']}, {row['M']} tokens: {plan['hot']} hot, heavy above {plan['cap']}: {parts}")


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A progress bar that each call advances by one, with a line of text."""
    with _bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _bar() -> Any:
    """A progress bar with remaining time on standard error; silent where that is no terminal."""
    from rich import progress as rp
    from rich.console import Console

    columns = (
        rp.TextColumn("{task.description}"),
        rp.BarColumn(),
        rp.MofNCompleteColumn(),
        rp.TimeElapsedColumn(),
        rp.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return rp.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# ---------------------------------------------------------------------------------------------------------
# compare
# ---------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------
# results
# ---------------------------------------------------------------------------------------------------------


@app.command()
def results(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="Markdown files with tables. Default: docs/results.md README.md.")
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

    stale = []
    for document in documents or [Path("docs/results.md"), Path("README.md")]:
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


# ---------------------------------------------------------------------------------------------------------
# tune
# ---------------------------------------------------------------------------------------------------------


@app.command()
def tune(
    workload: Annotated[str, typer.Option("--workload", "-w", help="iidN or skewN, for a mean count of N.")] = "skew29",
    tokens: Annotated[int, typer.Option("--tokens", "-m", help="Token count M.")] = 16384,
    width: Annotated[int, typer.Option("--width", "-d", help="Model width D.")] = 2048,
    hidden: Annotated[int, typer.Option("--hidden", "-f", help="Hidden width F.")] = 5632,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kernel: Annotated[
        list[str] | None, typer.Option(help="tail, gate, hot or heavy; repeatable. Default: all.")
    ] = None,
    best: Annotated[int, typer.Option(help="Candidates to show of each kernel.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Every trial as a JSON line on standard output.")] = False,
) -> None:
    """Time the GPU kernels with other tile sizes than the built-in ones, on this GPU.

    Takes a few minutes and changes nothing. Example: [bold]twell tune -m 16384[/bold]
    """
    torch_dtype, device = _dtype(dtype), _device("cuda")
    try:
        from twell.bench import tune as tuning
    except ImportError as error:
        raise RuntimeError(f"the kernels need triton ({error})") from None
    trials: dict[str, list[Any]] = {}
    only = kernel or tuning.KERNELS
    with _bar() as bar:
        task = bar.add_task("tuning", total=None)

        def progress(tried: int, total: int) -> None:
            bar.update(task, completed=tried, total=total)

        for trial in tuning.tune(workload, tokens, width, hidden, torch_dtype, device, only, progress):
            trials.setdefault(trial.kernel, []).append(trial)
            bar.update(task, description=trial.kernel)
            if as_json:
                print(json.dumps({**trial._asdict(), "tile": trial.tile._asdict()}), flush=True)
    for name, of_kernel in trials.items() if not as_json else ():
        print(f"{name}: now {of_kernel[0].ms:.4f} ms with {tuple(of_kernel[0].tile)}")
        for trial in sorted(of_kernel[1:], key=lambda t: t.ms)[:best]:
            tma = ", TMA" if trial.use_tma else ""
            print(f"    {trial.ms:.4f} ms ({trial.times:.3f}) with {tuple(trial.tile)}{tma}")


# ---------------------------------------------------------------------------------------------------------
# train
# ---------------------------------------------------------------------------------------------------------


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Change the recipe.")] = None,
    preset: Annotated[str, typer.Option(help="tiny, small, 0.5b, 1b, 1.5b or 2b.")] = "tiny",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A file (.txt, .jsonl, .parquet, .u16, .u16.xz) or folder, repeatable; or a Hugging Face dataset, "
            "owner/name[:config[:split]]. Default: the bundled text."
        ),
    ] = None,
    validation: Annotated[
        list[Path] | None,
        typer.Option(help="Files to validate on; repeatable. Default: one document in a hundred is held out."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("run"),
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, folder or name; without it a BPE is trained on the data.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model: a minute's start for a faster run on a GPU.")
    ] = False,
    report_to: Annotated[
        str, typer.Option(help="Also log to tensorboard, wandb or trackio, as the Trainer does.")
    ] = "none",
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: shard weights and optimiser over the processes (FSDP2).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="What the run reached, as one JSON object on standard output.")
    ] = False,
) -> None:
    """Train a sparse language model: ReLU and L1, on the Hugging Face Trainer.

    On a terminal the run is shown as one screen, elsewhere line by line. Example:
    [bold]twell train --preset tiny --out my-run l1=5e-3 steps=200[/bold]
    """
    try:
        from twell.train import recipes
        from twell.train.data import SAMPLE
        from twell.train.run import SUMMARY_FILE, quiet_libraries, run
        from twell.train.trainer import FSDP2
    except ImportError as error:
        raise RuntimeError(f"training needs more packages ({error}): pip install 'twell[train]'") from None
    quiet_libraries()
    if resume and overrides:
        raise ValueError(f"a resumed run keeps its recipe: leave out {' '.join(overrides)}")
    recipe = None if resume else recipes.override(recipes.preset(preset), overrides or [])
    run(
        recipe,
        data or ([] if resume else [SAMPLE]),
        out,
        validation=validation or [],
        tokenizer=tokenizer,
        go_on=resume,
        say=lambda line: print(line, flush=True, file=sys.stderr if as_json else sys.stdout),
        live=sys.stdout.isatty() and not as_json,
        torch_compile=compiled,
        report_to=report_to,
        **(FSDP2 if fsdp else {}),
    )
    if as_json:
        print(json.dumps(json.loads((out / SUMMARY_FILE).read_text())))


# ---------------------------------------------------------------------------------------------------------
# sweep
# ---------------------------------------------------------------------------------------------------------


@app.command()
def sweep(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the preset, for all runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the sweep; one that exists goes on.")] = Path("sweep"),
    l1: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: the paper's eight.")] = None,
    ablation: Annotated[
        list[str] | None, typer.Option(help="silu, plain or restart, at the preset's l1; repeatable.")
    ] = None,
    preset: Annotated[str, typer.Option(help="tiny, small, 0.5b, 1b, 1.5b or 2b.")] = "small",
    data: Annotated[list[str] | None, typer.Option(help="As for twell train. Default: the bundled text.")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="Files to validate and to time on.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, file or hub name. Default: one is trained.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the training.")] = False,
    seconds: Annotated[float, typer.Option(help="Timing budget of a run's model.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output, all else on error.")] = False,
) -> None:
    """Train a model for each l1, evaluate and time it: the table and the figure of what sparsity costs and gives.

    Example: [bold]twell sweep --preset tiny --l1 0 --l1 1e-3 --l1 3e-3 --ablation silu --out my-sweep[/bold]

    Interrupted, the same command goes on where it was.
    """
    from twell import sweep as sweeping
    from twell.train import recipes
    from twell.train.data import SAMPLE
    from twell.train.run import quiet_libraries

    quiet_libraries()
    recipe = recipes.override(recipes.preset(preset), overrides or [])
    todo = sweeping.variants(
        recipe, list(sweeping.PAPER_L1) if l1 is None and not ablation else l1 or [], ablation or []
    )

    def say(line: str) -> None:
        print(line, flush=True, file=sys.stderr if as_json else sys.stdout)

    measured = sweeping.sweep(
        recipe,
        todo,
        data or [str(SAMPLE)],
        out,
        validation=validation or [],
        tokenizer=tokenizer,
        seconds=seconds,
        say=say,
        torch_compile=compiled,
    )
    rows: list[dict[str, Any]] = []
    try:
        for row in measured:
            rows.append(row)
            say(f"{len(rows)} of {len(todo)} runs are done")
            if as_json:
                print(json.dumps(row), flush=True)
    except KeyboardInterrupt:
        print(
            f"twell: interrupted: {len(rows)} of {len(todo)} runs are done; the same command goes on", file=sys.stderr
        )
        raise
    if not as_json:
        print("\n".join(sweeping.table(rows)))
    say(f"the sweep is in {out}: {sweeping.ROWS_FILE}, {sweeping.TABLE_FILE}, {sweeping.FIGURE_FILE}")


# ---------------------------------------------------------------------------------------------------------
# trace
# ---------------------------------------------------------------------------------------------------------


@app.command()
def trace(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    text: Annotated[Path, typer.Option(help="The text to run it on: .txt, .jsonl or .parquet.")],
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to record.")] = 8192,
    length: Annotated[
        int | None, typer.Option(help="Tokens a sequence. Default: 1024, or the model's context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The layers as a JSON list on standard output.")] = False,
) -> None:
    """Record which neurons fire on a text, to benchmark on real activations.

    Example: [bold]twell trace my-run/model --text book.txt --out book.npz[/bold]
    """
    from twell.trace import record_text

    language_model, tokenizer = _load(model)
    with _counted("recording") as progress:
        recorded = record_text(language_model, tokenizer, text, length=length, tokens=tokens, progress=progress)
    recorded.save(out)
    layers = recorded.summary()
    if as_json:
        print(json.dumps([layer._asdict() for layer in layers]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{recorded.tokens:,} tokens, in {out}")
    for name in ("layer", "mean active", "p99", "max", "never fired", "busiest tenth carries"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for s in layers:
        table.add_row(s.layer, f"{s.mean:.1f}", f"{s.p99:.0f}", str(s.max), f"{s.dead:.1%}", f"{s.top_tenth:.0%}")
    Console().print(table)


# ---------------------------------------------------------------------------------------------------------
# analyze
# ---------------------------------------------------------------------------------------------------------


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model with ReLU FFNs.")],
    text: Annotated[Path, typer.Option(help="The text to run it on: .txt, .jsonl or .parquet.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to look at.")] = 16384,
    length: Annotated[
        int | None, typer.Option(help="Tokens a sequence. Default: 1024, or the model's context.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write everything to this .json file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON on standard output.")] = False,
) -> None:
    """What the FFNs of a model do on a text: how many neurons fire, where, for which tokens, and what that is worth.

    Example: [bold]twell analyze my-run/model --text book.txt --out analysis.json[/bold]
    """
    from twell.analyze import analyze as analyze_model

    language_model, tokenizer = _load(model)
    with _counted("reading") as progress:
        analysis = analyze_model(language_model, tokenizer, text, tokens=tokens, length=length, progress=progress)
    facts = {"model": model, "text": str(text), "analysis": analysis.to_json()}
    if out is not None:
        out.write_text(json.dumps(facts))
    if as_json:
        print(json.dumps(facts))
    else:
        _print_analysis(analysis)


def _print_analysis(analysis: Any) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = analysis.facts
    table = Table(title=f"active neurons a token, {facts.tokens:,} tokens in sequences of {facts.length}")
    head = ("layer", "of", "mean", "p50", "p99", "max", "silent", "top 10 % carry", "shared with next", "GPU plan")
    for name in head:
        table.add_column(name, justify="left" if name in ("layer", "GPU plan") else "right", no_wrap=True)
    for layer, F in zip(analysis.layers, facts.hidden_sizes, strict=True):
        overlap, plan = layer.overlap.neighbours, layer.plan
        table.add_row(
            layer.name,
            str(F),
            f"{layer.mean:.1f}",
            f"{layer.p50:.0f}",
            f"{layer.p99:.0f}",
            str(layer.max),
            f"{layer.silent:.1%}",
            f"{layer.top_shares['10']:.0%}",
            "" if overlap is None else f"{overlap:.0%}",
            "dense" if plan.dense else f"{plan.hot} hot, {plan.predicted:.2f}x",
        )
    console.print(table)
    for what, tokens in (("most", analysis.most_active), ("fewest", analysis.least_active)):
        some = ", ".join(f"{token.text!r} {token.mean:.0f}" for token in tokens[:8])
        console.print(f"tokens that wake {what} neurons, all layers together: {escape(some)}", highlight=False)


# ---------------------------------------------------------------------------------------------------------
# calibrate
# ---------------------------------------------------------------------------------------------------------


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model with ReLU FFNs.")],
    text: Annotated[Path, typer.Option(help="The text to count on: .txt, .jsonl or .parquet.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to count.")] = 32768,
    as_json: Annotated[bool, typer.Option("--json", help="The plans as a JSON list on standard output.")] = False,
) -> None:
    """Count how often each neuron fires on a text, and keep it beside the model: sparsify_ plans by it.

    Example: [bold]twell calibrate my-run/model --text book.txt[/bold]
    """
    if not model.is_dir():
        raise ValueError(f"{model} is no folder: the counts are kept beside the model")
    from twell.hf.convert import sparsify_
    from twell.hf.counts import COUNTS_FILE, NeuronCounts
    from twell.trace import record_text

    language_model, tokenizer = _load(str(model))
    with _counted("counting") as progress:
        trace = record_text(language_model, tokenizer, text, tokens=tokens, progress=progress)
    counts = NeuronCounts(fired=[trace.neuron_counts(i) for i in range(trace.layers)], tokens=trace.tokens)
    report = sparsify_(language_model, counts)
    counts.save(model / COUNTS_FILE)
    if as_json:
        print(json.dumps([{"layer": row.layer, "plan": row.plan} for row in report.rows]))
    else:
        for row in report.rows:
            print(f"{row.layer}  {row.plan}")
        print(f"counts of {counts.tokens:,} tokens are in {model / COUNTS_FILE}")


# ---------------------------------------------------------------------------------------------------------
# eval
# ---------------------------------------------------------------------------------------------------------


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text file to predict; repeatable.")] = None,
    last_words: Annotated[
        Path | None, typer.Option(help="LAMBADA: .jsonl with 'text' fields whose last word is to be predicted.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences computed at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a file on standard output.")] = False,
) -> None:
    """How well a model predicts text: bits per byte, perplexity, and LAMBADA's last words.

    Example: [bold]twell eval my-run/model --text wikitext2.txt --last-words lambada.jsonl[/bold]
    """
    from twell import evaluate as ev

    if not text and last_words is None:
        raise ValueError("nothing to evaluate on: give --text or --last-words")
    texts = {path: path.read_text(encoding="utf-8") for path in text or []}
    passages = None if last_words is None else ev.read_passages(last_words)
    language_model, tokenizer = _load(model)
    results: list[dict[str, Any]] = []
    for path, content in texts.items():
        with _counted(path.name) as progress:
            s = ev.score_text(language_model, tokenizer, content, batch_size=batch_size, progress=progress)
        numbers = {"loss": s.loss, "bits_per_byte": s.bits_per_byte, "word_perplexity": s.word_perplexity}
        results.append({"file": str(path), **numbers, "tokens": s.tokens, "bytes": s.bytes, "words": s.words})
    if last_words is not None and passages is not None:
        with _counted(last_words.name) as progress:
            w = ev.score_last_words(language_model, tokenizer, passages, batch_size=4 * batch_size, progress=progress)
        results.append({"file": str(last_words), **dataclasses.asdict(w)})
    for result in results:
        if as_json:
            print(json.dumps(result))
        elif "accuracy" in result:
            print(
                f"{result['file']}: last word right {result['accuracy']:.2%} ± {result['accuracy_error']:.2%}, "
                f"perplexity {result['perplexity']:,.1f} ({result['items']:,} passages)"
            )
        else:
            print(
                f"{result['file']}: {result['bits_per_byte']:.4f} bits per byte, cross-entropy {result['loss']:.4f} "
                f"a token, word perplexity {result['word_perplexity']:,.1f} ({result['tokens']:,} tokens)"
            )


def _load(name: str) -> tuple[Any, Any]:
    """A causal language model, on the GPU where there is one, and its tokenizer; from a folder or by hub name."""
    try:
        from transformers import AutoModelForCausalLM

        from twell.train.run import quiet_libraries
        from twell.train.tokenizer import load_tokenizer
    except ImportError as error:
        raise RuntimeError(f"models need more packages ({error}): pip install 'twell[train]'") from None
    import torch

    quiet_libraries()
    tokenizer = load_tokenizer(name)
    language_model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return language_model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@contextlib.contextmanager
def _counted(what: str) -> Iterator[Any]:
    """A progress bar told (done, total)."""
    with _bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ---------------------------------------------------------------------------------------------------------
# doctor
# ---------------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a causal language model: also show the plans of its layers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what would run here and why, and compare sparse with dense on this machine.

    With a model also how the GPU kernels would split the work of each layer, by the counts of twell calibrate. Exits
    with 1 if something is broken. Example: [bold]twell doctor my-run/model[/bold]
    """
    from twell.doctor import examine, plans

    layers = None if model is None else plans(model)
    report = examine()
    if as_json:
        of_model = {} if layers is None else {"plans": [layer._asdict() for layer in layers]}
        print(json.dumps({"healthy": report.healthy, **report.facts, **of_model}))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None, pad_edge=False)
        for name, fact in report.facts.items():
            table.add_row(f"[bold]{name}[/bold]", str(fact))
        Console().print(table)
        if layers is not None:
            _print_plans(layers)
    if not report.healthy:
        raise typer.Exit(1)


def _print_plans(layers: list[Any]) -> None:
    """Layers in a row whose plans read the same share a line."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if not layers:
        print("no feed-forward layers found")
        return
    table = Table("layer", "plan", "predicted")
    for (plan, predicted), group in itertools.groupby(layers, key=lambda layer: (layer.plan, layer.predicted)):
        first, *others = (layer.layer for layer in group)
        names = f"{first} to {others[-1]}" if others else first
        table.add_row(names, escape(plan), "" if predicted is None else f"{predicted:.2f}x")
    Console().print(table)


# ---------------------------------------------------------------------------------------------------------
# demo
# ---------------------------------------------------------------------------------------------------------


@app.command()
def demo() -> None:
    """Pack a sparse activation, time an FFN sparse and dense, train a small sparse model and let it write.

    Takes about two minutes. Example: [bold]twell demo[/bold]
    """
    from twell.demo import run_demo

    run_demo(_progress, _print_speed_table)


if __name__ == "__main__":
    main()
