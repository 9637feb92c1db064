"""What commands share: devices and models by name, progress bars, rows, tables."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twell.ops import functional as ops


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

    quiet_libraries()
    torch_device = device_of(device)
    torch_dtype = "auto" if dtype is None else dtype_of(dtype)
    language_model = load_causal_lm(name, torch_dtype)
    refuse_fp8(name, language_model, torch_device)
    tokenizer = load_tokenizer(name)
    require_bf16(language_model.dtype, torch_device)
    return language_model.to(torch_device).eval(), tokenizer


def require_bf16(dtype: Any, device: Any) -> None:
    """Raise where bfloat16 was asked for and would kill the process."""
    import torch

    from twell.workbench.doctor import bf16_problem

    if dtype == torch.bfloat16 and device.type == "cpu" and (problem := bf16_problem()):
        raise RuntimeError(problem)


def run_name(folder: Path) -> str:
    """The name of a model's folder, or of its run, which keeps the model in a folder called model."""
    return folder.parent.name if folder.name == "model" else folder.name


def append(row: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        from twell.workbench.bench import rows

        rows.append(row, out)


@contextlib.contextmanager
def counted_bar(what: str) -> Iterator[Any]:
    """A progress bar with the time that remains, on standard error; invisible where that is no terminal.

    Each call sets how many are done, of how many, and perhaps the text.
    """
    from rich import progress as rp
    from rich.console import Console

    times = rp.TimeElapsedColumn(), rp.TimeRemainingColumn()
    columns = rp.TextColumn("{task.description}"), rp.BarColumn(), rp.MofNCompleteColumn(), *times
    console = Console(stderr=True)
    with rp.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, text=what: bar.update(task, completed=done, total=total, description=text)


def print_table(table: Any) -> None:
    """Print at the table's own width where the terminal is narrower: a number cut short is worse than a long line."""
    from rich.console import Console

    needed = Console(width=10_000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)
