"""What commands share: devices and models by name, progress bars, rows printed as they come, tables."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from twell.ops import functional as ops

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from twell.train.recipes import Recipe


def _budget(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter(f"expected a number of at least 0, got {seconds}")
    return seconds


Seconds = Annotated[float, typer.Option(callback=_budget, help="Timing budget of a row, after 5 repeats.")]
Text = Annotated[Path, typer.Option(help="The text: a .txt, .jsonl or .parquet file, or a folder of them.")]
Length = Annotated[int | None, typer.Option(help="Tokens a sequence. Default: 1024, or the model's context.")]


def printer(as_json: bool) -> Callable[[str], None]:
    """Prints lines as they come: on standard error with ``as_json``, which keeps standard output for JSON."""
    return lambda line: print(line, flush=True, file=sys.stderr if as_json else sys.stdout)


def device_of(name: str | None) -> Any:
    """The torch.device; None: a GPU where there is one, else the CPU."""
    has_gpu = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: expected cpu or cuda")
    if device.type == "cuda" and not has_gpu:
        raise ValueError("torch sees no GPU here; use --device cpu")
    return device


def dtype_of(name: str) -> Any:
    dtype = getattr(torch, name, None)
    if dtype not in ops.DTYPES:
        raise ValueError(f"unknown dtype {name!r}: expected float32, bfloat16, float16 or float64")
    return dtype


def load_model(name: str, device: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from a folder or by hub name.

    By default on a GPU where there is one, in the dtype in which the model was saved.
    """
    from twell.hf.loading import load_causal_lm, refuse_fp8
    from twell.train.run import quiet_libraries
    from twell.train.tokenizer import load_tokenizer
    from twell.workbench.doctor import bf16_problem

    quiet_libraries()
    torch_device = device_of(device)
    torch_dtype = "auto" if dtype is None else dtype_of(dtype)
    language_model = load_causal_lm(name, torch_dtype)
    refuse_fp8(name, language_model, torch_device)
    tokenizer = load_tokenizer(name)
    if language_model.dtype == torch.bfloat16 and torch_device.type == "cpu" and (problem := bf16_problem()):
        raise RuntimeError(problem)
    return language_model.to(torch_device).eval(), tokenizer


def collect(
    measured: Iterator[dict[str, Any]], n_rows: int, as_json: bool, out: Path | None, says: Callable[[Any], str]
) -> list[dict[str, Any]]:
    """All rows, each printed and written as soon as it is measured. ``says``: the progress bar's text after a row."""
    rows: list[dict[str, Any]] = []
    try:
        with progress_bar("measuring", n_rows) as advance:
            for row in measured:
                rows.append(row)
                if as_json:
                    print(json.dumps(row), flush=True)
                append(row, out)
                advance(says(row))
    except KeyboardInterrupt:
        where = "" if out is None else f", in {out}"
        print(f"twell: interrupted: {len(rows)} of {n_rows} rows are done{where}", file=sys.stderr)
        raise
    return rows


def append(row: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        from twell.workbench.bench import rows

        rows.append(row, out)


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Any]:
    """A progress bar: each call advances it by one and sets its text."""
    with new_bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


@contextlib.contextmanager
def counted_bar(what: str) -> Iterator[Any]:
    """A progress bar: each call sets how many are done, of how many."""
    with new_bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def new_bar() -> Any:
    """A progress bar with the time that remains, on standard error; invisible where that is no terminal."""
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


def print_table(table: Any) -> None:
    """Print at the table's own width where the terminal is narrower: a number cut short is worse than a long line."""
    from rich.console import Console

    needed = Console(width=10_000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)


def machine_of(row: dict[str, Any]) -> str:
    return str(row["gpu"]) if "gpu" in row else f"{row['cpu']}, {row['threads']} threads"


def ms(s: dict[str, float]) -> str:
    digits = 2 if s["p50"] >= 1 else 4 if s["p50"] < 0.1 else 3
    return f"{s['p50']:.{digits}f} ±{(s['p80'] - s['p20']) / 2 / s['p50']:.0%}"


_DENSE = ("dense", "compiled", "fp8", "fp8_weights")
WAYS = {
    "fp8": "dense FP8",
    "fp8_weights": "FP8 weights",
    "sparse_fp8": "sparse FP8",
    "sparse_compiled": "compiled sparse",
}
_FIELDS = {"frozen": "_frozen", "sparse_compiled": "_compiled"}  # of a way's speedup, behind "speedup"


def print_speed_table(rows: list[dict[str, Any]]) -> None:
    """A line for each way of every row: the device's time, and beside it that of calls."""
    from rich import box
    from rich.table import Table

    first = rows[0]
    is_called, has_fp8 = "called_ms" in first, any("fp8_ms" in row for row in rows)
    table = Table(
        title=f"{first['kind']} FFN, D {first['D']}, F {first['F']}, {first['dtype']}, {machine_of(first)}",
        caption="ms: median, and half the distance of the 20th and 80th percentile"
        + ("" if is_called else "; error: relative, against float64")
        + ("; called: in a plain loop, the host's time included" if is_called else "")
        + ("; frozen: twell.freeze_" if "frozen_ms" in first else "")
        + ("; over FP8: over the faster dense FP8 one" if has_fp8 else ""),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    last = ("called ms", "called", "host us") if is_called else ("error",)
    over_fp8 = ("over FP8",) if has_fp8 else ()
    for name in ("workload", "tokens", "active", "", "ms", "speedup", *over_fp8, *last):
        table.add_column(name, justify="left" if name in ("workload", "") else "right", no_wrap=True)

    for row in rows:
        ways = [way for way in (*_DENSE, "sparse", "frozen", "sparse_fp8") if f"{way}_ms" in row]
        fastest = min((way for way in ("sparse", "frozen") if way in ways), key=lambda way: row[f"{way}_ms"]["p50"])
        ways += ["sparse_compiled"] if "sparse_compiled" in row.get("called_ms", ()) else []
        for way in ways:
            error, more, in_fp8 = row["error"].get(way), _FIELDS.get(way, ""), way == "sparse_fp8"
            is_sparse, has_time = way not in _DENSE, f"{way}_ms" in row
            ratio = f"{row['speedup_over_fp8']:.2f}x" if way == fastest and "fp8_ms" in row else ""
            ratio = f"[bold]{row['speedup_fp8']:.2f}x[/bold]" if in_fp8 else ratio
            cells = [f"{error:.1e}" if is_sparse and error is not None else ""]
            if is_called:
                speedup = f"[bold]{row[f'speedup_called{more}']:.2f}x[/bold]" if is_sparse and not in_fp8 else ""
                cells = [ms(row["called_ms"][way]), speedup, f"{row['host_us'][way]:.0f}"]
            table.add_row(
                *((row["workload"], str(row["M"]), f"{row['mean_active']:.0f}") if way == ways[0] else ("", "", "")),
                WAYS.get(way, way),
                ms(row[f"{way}_ms"]) if has_time else "",
                f"[bold]{row[f'speedup{more}']:.2f}x[/bold]" if is_sparse and has_time and not in_fp8 else "",
                *((ratio,) if has_fp8 else ()),
                *cells,
            )
    print_table(table)
    for row in rows:
        if row.get("parts_ms"):
            plan, parts = row["plan"], ", ".join(f"{name} {ms:.3g}" for name, ms in row["parts_ms"].items())
            print(f"{row['workload']}, {row['M']} tokens: {plan['hot']} hot, heavy above {plan['cap']}: {parts}")


def trace_rows(
    measure: Callable[..., dict[str, Any]], path: Path, sizes: list[int], width: int, hidden: int, **how: Any
) -> tuple[int, Iterator[dict[str, Any]]]:
    """How many rows a trace gives, and the rows: ``measure`` of each of its layers."""
    from twell.workbench.bench import traced
    from twell.workbench.trace import Trace

    trace = Trace.load(path)
    names = trace.names or [f"layer {i}" for i in range(trace.layers)]
    width_of = hidden if trace.hidden_sizes is None else None
    rows = (
        measure(traced.Layer(name, trace.pattern(i, width_of)), m, width, **how)
        for m in sizes
        for i, name in enumerate(names)
    )
    return len(sizes) * len(names), rows


def dense_config(recipe: Recipe, length: int) -> LlamaConfig:
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
