"""``twell demo``: what a sparse activation saves on this CPU, and a page about the small trained model.

No training, no GPU, a minute or two on two cores. Every time is measured in alternation with its dense counterpart; the
same rows make the terminal's tables, the page and the closing sentence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from twell.workbench.bench.timing import Spread
from twell.workbench.cli.analyze import analyze
from twell.workbench.cli.app import app
from twell.workbench.cli.common import append, print_table
from twell.workbench.cli.generate import generate_text

WORKLOAD = "skew29"  # 29 active neurons a token, as unevenly as in a trained model
PREFILL, CONTEXT = 256, 128  # tokens of a prompt; tokens before the one that is decoded
PROMPT = "The old man said"
LOADED, NOISY = 0.6, 0.35  # load a core, and spread of a median, beyond which a machine is called busy
Row = dict[str, Any]


@app.command()
def demo() -> None:
    """Time a layer and a model sparse and dense, let a small trained model write, and make a page about it.

    Takes a minute or two on two cores; the page is demo-out/report.html. Example: [bold]twell demo[/bold]
    """
    run(Path("demo-out"))


def run(folder: Path, *, width: int = 2048, hidden: int = 5632, seconds: float = 2.0) -> None:
    """``seconds`` of timing, each."""
    console = Console(highlight=False)
    if note := busy_before(os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1):
        console.print(note)
    folder.mkdir(parents=True, exist_ok=True)
    rows, page = folder / "rows.jsonl", folder / "report.html"
    rows.unlink(missing_ok=True)
    console.print(Rule(f"A layer, D {width}, F {hidden}, of which about 29 neurons fire for a token"))
    layer = time_layer(console, width, hidden, seconds)
    console.print(Rule("A model of four such layers with attention"))
    model = time_model(console, width, hidden, seconds)
    for row in (*layer, *model):
        append(row, rows)
    console.print(Rule("A small trained model, which ships with twell"))
    console.print(f"$ twell generate sample --prompt '{PROMPT}' --temperature 0.8 --top-k 40")
    generate_text("sample", [PROMPT], max_new_tokens=40, temperature=0.8, top_k=40)
    console.print(f"$ twell analyze sample --report {page} --speed {rows}")
    analyze("sample", report=page, speed=[rows])
    console.print(Rule("What it comes to"))
    said = f"a layer is {_shortly(layer)}; a model of such layers is {_shortly(model)}"
    console.print(f"Sparse against dense PyTorch on this CPU: {said}.")
    if note := busy_while([*layer, *model]):
        console.print(note)
    console.print(f"[bold]A page to look at: {page}[/bold]")


def time_layer(console: Console, width: int, hidden: int, seconds: float) -> list[Row]:
    """Rows of ``twell bench ffn -w skew29 -m 1 -m 16 -m 256``."""
    from twell.workbench.bench import ffn

    todo = [ffn.Case(workload=WORKLOAD, M=m, D=width, F=hidden) for m in (1, 16, 256)]
    with console.status("measuring"):
        rows = [{**row, "what": _tokens(row["M"])} for row in ffn.run(todo, seconds=seconds)]
    print_table(speed_table(rows))
    errors = [max(row["error"][side] for row in rows) for side in ("dense", "sparse")]
    console.print(f"Relative error against float64: dense {errors[0]:.1e}, sparse {errors[1]:.1e}.\n")
    return rows


def time_model(console: Console, width: int, hidden: int, seconds: float) -> list[Row]:
    """A row as of ``twell bench model`` (prefill) and one as of ``twell bench decode``."""
    import torch
    from transformers import LlamaForCausalLM

    from twell.train.recipes import Recipe
    from twell.workbench.bench import cases, decode
    from twell.workbench.bench import model as prefill

    length = PREFILL + CONTEXT
    recipe = Recipe(hidden_size=width, intermediate_size=hidden, layers=4, heads=16, vocab_size=4096, context=length)
    config = cases.llama_config(recipe, length)
    with console.status("measuring"):
        subject = prefill.synthetic(LlamaForCausalLM(config).eval(), WORKLOAD, (1, PREFILL))
        read = prefill.measure(subject, torch.randint(config.vocab_size, (1, PREFILL)), seconds=seconds)
        del subject
        fresh = LlamaForCausalLM(config).eval()  # without the hooks that replace inputs
        written = decode.measure(fresh, WORKLOAD, 1, CONTEXT, graph=False, seconds=seconds)
    rows = [
        {**read, "what": f"a prefill of {_tokens(PREFILL)}"},
        {**written, "what": "decoding a token"},
    ]
    print_table(speed_table(rows))
    apart = max(row["difference"] for row in rows)
    console.print(f"Logits, sparse against dense: a relative difference of {apart:.0e}.\n")
    return rows


def _tokens(n: int) -> str:
    return f"{n:,} token{'s'[: n != 1]}"


def _shortly(rows: list[Row]) -> str:
    return ", ".join(f"{verdict(*sides(row)).split(' (')[0]} for {row['what']}" for row in rows)


def speed_table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "dense", "sparse"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("sparse is", no_wrap=True)
    for row in rows:
        both = sides(row)
        times = (f"{_milliseconds(t.p50)} ms ±{t.relative:.0%}" for t in both)
        table.add_row(row["what"], *times, f"[bold]{verdict(*both)}[/bold]")
    return table


def _milliseconds(time: float) -> str:
    """
    >>> [_milliseconds(time) for time in (0.12345, 31.26, 999.7, 3126.4)]
    ['0.123', '31.3', '1,000', '3,126']
    """
    return f"{time:.3g}" if time < 999.5 else f"{time:,.0f}"


def sides(row: Row) -> tuple[Spread, Spread]:
    return Spread(**row["dense_ms"]), Spread(**row["sparse_ms"])


def verdict(dense: Spread, sparse: Spread) -> str:
    """In words, with the ratios that the spreads allow; times whose middle 60 % overlap are called the same.

    >>> verdict(Spread(9.0, 10.0, 12.0), Spread(4.0, 5.0, 6.0))
    '2.0x as fast (1.5 to 3.0)'
    >>> verdict(Spread(9.0, 10.0, 12.0), Spread(8.0, 9.0, 10.0))
    'the same within noise'
    >>> verdict(Spread(4.0, 5.0, 6.0), Spread(9.0, 10.0, 12.0))
    'slower: 0.50x as fast (0.33 to 0.67)'
    """
    if dense.p20 <= sparse.p80 and sparse.p20 <= dense.p80:
        return "the same within noise"
    ratio, least, most = dense.p50 / sparse.p50, dense.p20 / sparse.p80, dense.p80 / sparse.p20
    if ratio > 1:
        return f"{ratio:.1f}x as fast ({least:.1f} to {most:.1f})"
    return f"slower: {ratio:.2f}x as fast ({least:.2f} to {most:.2f})"


def busy_before(load: float, cores: int) -> str | None:
    """
    >>> busy_before(0.4, 2)
    >>> busy_before(3.1, 2)
    'This machine is busy (load 3.1 on 2 cores): times will vary, and ratios will be less clear.'
    """
    if load < LOADED * cores:
        return None
    return f"This machine is busy (load {load:.1f} on {cores} cores): times will vary, and ratios will be less clear."


def busy_while(rows: list[Row]) -> str | None:
    """Whether the times themselves say that something else was running.

    >>> quiet, noisy = ({"p20": p20, "p50": 10.0, "p80": 11.0} for p20 in (9.0, 3.0))
    >>> busy_while([{"dense_ms": quiet, "sparse_ms": quiet}])
    >>> busy_while([{"dense_ms": quiet, "sparse_ms": noisy}])
    'Times varied by up to ±40%: something else was running.'
    """
    worst = max(side.relative for row in rows for side in sides(row))
    return f"Times varied by up to ±{worst:.0%}: something else was running." if worst > NOISY else None
