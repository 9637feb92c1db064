"""What the ``twell bench`` commands share: options, where they run, texts, rows as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench.cli.bench_table import Row, print_rows
from twell.workbench.cli.common import append, counted_bar, device_of, dtype_of, load_model, require_bf16

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
Called = Annotated[
    bool | None,
    typer.Option("--called/--no-called", help="Also time calls in a plain loop, the host included. Default: on a GPU."),
]
Fp8 = Annotated[
    bool | None,
    typer.Option("--fp8/--no-fp8", help="Also time FP8, dense and sparse. Default: on GPUs with it, in 16 bits."),
]
Device = Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")]
Backend = Annotated[str, typer.Option(help="auto, reference, cpu or triton.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")]
Out = Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")]


def place_of(device: str | None, dtype: str | None, backend: str) -> tuple[Any, Any]:
    """Device and dtype of an FFN; raises where the backend or the dtype does not run there."""
    from twell.ops import backends

    torch_device = device_of(device)
    torch_dtype = dtype_of(dtype if dtype is not None else "bfloat16" if torch_device.type == "cuda" else "float32")
    backends.choose_backend(backend, torch_device)
    require_bf16(torch_dtype, torch_device)
    return torch_device, torch_dtype


def model_as_run(name: str, device: Any) -> tuple[Any, Any]:
    """A trained model and its tokenizer: on a GPU in bfloat16, as one would run it there; elsewhere as it was saved."""
    return load_model(name, str(device), "bfloat16" if device.type == "cuda" else None)


def require_fp8(wanted: bool | None, device: Any) -> None:
    from twell.fp8 import why_unavailable

    if wanted and (reason := why_unavailable(device)):
        raise ValueError(f"--fp8: {reason}")


def text_ids(text: Path, tokenizer: Any, needed: int) -> Any:
    """The text's first tokens [needed]."""
    from twell.train.data import find_files, read_texts

    texts = (document for file in find_files([text]) for document in read_texts(file))
    ids = tokenizer("\n".join(texts), return_tensors="pt").input_ids[0]
    if len(ids) < needed:
        raise ValueError(f"{text} has {len(ids):,} tokens, and {needed:,} are needed for so many sequences")
    return ids[:needed]


def show(measured: Iterator[Row], n_rows: int, as_json: bool, out: Path | None) -> None:
    """Each row as JSON and into the file as soon as it is measured; without JSON a table of all."""
    rows: list[Row] = []
    try:
        with counted_bar("measuring") as progress:
            for row in measured:
                rows.append(row)
                if as_json:
                    print(json.dumps(row), flush=True)
                append(row, out)
                progress(len(rows), n_rows)
    except KeyboardInterrupt:
        where = "" if out is None else f", in {out}"
        print(f"twell: interrupted: {len(rows)} of {n_rows} rows are done{where}", file=sys.stderr)
        raise
    if not as_json:
        print_rows(rows)
