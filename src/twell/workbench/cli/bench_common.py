"""What the ``twell bench`` commands share: options, where they run, rows of traces, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twell.workbench.cli.common import device_of, dtype_of, print_table

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from twell.train.recipes import Recipe

Row = dict[str, Any]

Workloads = Annotated[
    list[str] | None, typer.Option("--workload", "-w", help="iidN or skewN, for a mean count of N; repeatable.")
]
ModelWorkload = Annotated[
    str | None, typer.Option("--workload", "-w", help="What its FFNs compute: iidN or skewN. Default: skew29.")
]
Tokens = Annotated[list[int] | None, typer.Option("--tokens", "-m", help="Token count M; repeatable.")]
Width = Annotated[int, typer.Option("--width", "-d", help="Model width D.")]
Hidden = Annotated[int, typer.Option("--hidden", "-f", help="Hidden width F.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32, on a GPU bfloat16.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain FFN instead of the gated one.")]
TraceOfFFN = Annotated[
    Path | None, typer.Option(help="Time every layer of this trace (twell trace) instead of a workload.")
]
Called = Annotated[
    bool | None,
    typer.Option("--called/--no-called", help="Also time calls in a plain loop, the host included. Default: on a GPU."),
]
Device = Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")]
Backend = Annotated[str, typer.Option(help="auto, reference, cpu or triton.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")]
Out = Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")]


def place_of(device: str | None, dtype: str | None, backend: str) -> tuple[Any, Any]:
    """Device and dtype of an FFN; raises where the backend or the dtype does not run there."""
    import torch

    from twell.ops import backends
    from twell.workbench.doctor import bf16_problem

    torch_device = device_of(device)
    torch_dtype = dtype_of(dtype if dtype is not None else "bfloat16" if torch_device.type == "cuda" else "float32")
    backends.choose_backend(backend, torch_device)
    if torch_dtype == torch.bfloat16 and torch_device.type == "cpu" and (problem := bf16_problem()):
        raise RuntimeError(problem)
    return torch_device, torch_dtype


def trace_rows(
    measure: Callable[..., Row], path: Path, sizes: list[int], width: int, hidden: int, **how: Any
) -> tuple[int, Iterator[Row]]:
    """How many rows a trace gives, and the rows: ``measure`` of each of its layers."""
    from twell.workbench.bench.ffn_trace import TracedLayer
    from twell.workbench.trace import Trace

    trace = Trace.load(path)
    names = trace.names or [f"layer {i}" for i in range(trace.layers)]
    width_of = hidden if trace.hidden_sizes is None else None
    rows = (
        measure(TracedLayer(name, trace.pattern(i, width_of)), m, width, **how)
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


def text_ids(text: Path, tokenizer: Any, needed: int) -> Any:
    """The text's first tokens [needed]."""
    from twell.train.data import find_files, read_texts

    texts = (document for file in find_files([text]) for document in read_texts(file))
    ids = tokenizer("\n".join(texts), return_tensors="pt").input_ids[0]
    if len(ids) < needed:
        raise ValueError(f"{text} has {len(ids):,} tokens, and {needed:,} are needed for so many sequences")
    return ids[:needed]


# ---------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------

PERCENTILES = "ms: median, and half the distance of the 20th and 80th percentile"
AS_CALLED = "called: in a plain loop, the host's time included"


def machine_of(row: Row) -> str:
    return str(row["gpu"]) if "gpu" in row else f"{row['cpu']}, {row['threads']} threads"


def ms(spread: dict[str, float]) -> str:
    digits = 2 if spread["p50"] >= 1 else 4 if spread["p50"] < 0.1 else 3
    return f"{spread['p50']:.{digits}f} ±{(spread['p80'] - spread['p20']) / 2 / spread['p50']:.0%}"


def bold(speedup: float) -> str:
    return f"[bold]{speedup:.2f}x[/bold]"


def print_lines(title: str, notes: Sequence[str], head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Numbers to the right, names to the left; notes below."""
    from rich import box
    from rich.table import Table

    caption = "; ".join(notes)
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in head:
        table.add_column(name, justify="left" if name in ("workload", "") else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    print_table(table)


_WAYS = ("dense", "compiled", "fp8", "fp8_weights", "sparse", "frozen", "sparse_fp8")
_LABELS = {"fp8": "dense FP8", "fp8_weights": "FP8 weights", "sparse_fp8": "sparse FP8"}
_LABELS["sparse_compiled"] = "compiled sparse"
_SPEEDUPS = {"sparse": "", "frozen": "_frozen", "sparse_compiled": "_compiled"}  # of these ways; ends of field names


def label(way: str) -> str:
    return _LABELS.get(way, way)


def print_speed_table(rows: list[Row]) -> None:
    """Rows of ``bench ffn``: a line for each way, with the device's time and beside it that of calls."""
    first = rows[0]
    is_called, has_fp8 = "called_ms" in first, any("fp8_ms" in row for row in rows)
    notes = [PERCENTILES, AS_CALLED if is_called else "error: relative, against float64"]
    notes += ["frozen: twell.freeze_"] if "frozen_ms" in first else []
    notes += ["over FP8: over the faster dense FP8 one"] if has_fp8 else []
    head = ["workload", "tokens", "active", "", "ms", "speedup", *(["over FP8"] if has_fp8 else [])]
    head += ["called ms", "called", "host us"] if is_called else ["error"]
    title = f"{first['kind']} FFN, D {first['D']}, F {first['F']}, {first['dtype']}, {machine_of(first)}"
    print_lines(title, notes, head, (line for row in rows for line in _lines_of_ways(row, is_called, has_fp8)))
    for row in rows:
        if row.get("parts_ms"):
            plan, parts = row["plan"], ", ".join(f"{name} {ms:.3g}" for name, ms in row["parts_ms"].items())
            print(
                f"{row['workload']}, {row['M']} tokens: {plan['hot']} hot, long or heavy above {plan['cap']}: {parts}"
            )


def _lines_of_ways(row: Row, is_called: bool, has_fp8: bool) -> Iterator[list[str]]:
    times = {way: row[f"{way}_ms"] for way in _WAYS if f"{way}_ms" in row}
    fastest = min((way for way in ("sparse", "frozen") if way in times), key=lambda way: times[way]["p50"])
    first = [row["workload"], str(row["M"]), f"{row['mean_active']:.0f}"]
    for way in (*times, *(way for way in row.get("called_ms", ()) if way not in times)):
        field = _SPEEDUPS.get(way)
        cells = [label(way), ms(times[way]) if way in times else ""]
        cells.append(bold(row[f"speedup{field}"]) if field is not None and way in times else "")
        if has_fp8:
            of_16_bits = f"{row['speedup_over_fp8']:.2f}x" if way == fastest and "fp8_ms" in row else ""
            cells.append(bold(row["speedup_fp8"]) if way == "sparse_fp8" else of_16_bits)
        if is_called:
            speedup = bold(row[f"speedup_called{field}"]) if field is not None else ""
            cells += [ms(row["called_ms"][way]), speedup, f"{row['host_us'][way]:.0f}"]
        else:
            error = row["error"].get(way) if way.startswith(("sparse", "frozen")) else None
            cells.append("" if error is None else f"{error:.1e}")
        yield [*first, *cells]
        first = [""] * 3
