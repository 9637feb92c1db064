"""``twell demo``: what a sparse activation is, what it saves on this CPU, and a page about a small trained model.

No training, no GPU, under three minutes on two cores. Every time is measured in alternation with its dense
counterpart; the same rows make the terminal's tables, the page and the closing sentence.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from twell.workbench.bench import cases, ffn
from twell.workbench.bench.timing import Spread, cpu_name

WORKLOAD = "skew29"  # 29 active neurons a token, as unevenly as in a trained model
SENTENCE = "The old man looked out of the window and said nothing."
PROMPT = "The old man said"
LOADED, NOISY = 0.6, 0.35  # load a core, and spread of a median, beyond which a machine is called busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is timed: a layer, and a model of such layers."""

    D: int = 2048
    F: int = 5632
    workload: str = WORKLOAD
    layer_tokens: tuple[int, ...] = (1, 16, 256)
    layers: int = 4
    heads: int = 16
    prefill: int = 256  # tokens
    context: int = 128  # tokens before the one that is decoded
    seconds: float = 2.0  # of timing, each


def run_demo(folder: Path = Path("demo-out"), size: Size | None = None, console: Console | None = None) -> None:
    size, console = size or Size(), console or Console()
    torch.manual_seed(0)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if note := busy_before(load, os.cpu_count() or 1):
        console.print(note, highlight=False)
    try:
        from twell.train.run import quiet_libraries
    except ImportError as error:
        rows = time_layer(console, size)
        close(console, rows, None)
        console.print(f"The other parts need more packages ({error}): pip install 'twell\\[train]'")
        return
    quiet_libraries()
    model, tokenizer, share = show_activation(console)
    rows = time_layer(console, size)
    rows += time_model(console, size)
    page = write_page(console, model, tokenizer, rows, folder)
    close(console, rows, share)
    console.print(f"\n[bold]A page to look at: {page}[/bold]")
    console.print("Next: twell generate sample --prompt 'One day'")
    console.print("      twell train --preset tiny --out my-run    (two minutes)", highlight=False)


# ---------------------------------------------------------------------------------------------------------
# 1. The shipped model on a sentence
# ---------------------------------------------------------------------------------------------------------


def show_activation(console: Console) -> tuple[Any, Any, float]:
    """Returns the model, its tokenizer and the share of its neurons that fires on the sentence."""
    from twell.hf.loading import SAMPLE_MODEL, load_causal_lm
    from twell.train.tokenizer import load_tokenizer
    from twell.workbench.trace import record

    console.print(Rule("1. A sparse activation: which neurons fire in a small trained model"))
    model, tokenizer = load_causal_lm(str(SAMPLE_MODEL)).eval(), load_tokenizer(SAMPLE_MODEL)
    ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
    trace = record(model, ids)
    F = model.config.intermediate_size
    table = Table("token", *(f"layer {i}" for i in range(trace.layers)), f"of {F} each", box=None, pad_edge=False)
    fired = torch.stack([trace.pattern(i).sum(1) for i in range(trace.layers)], 1)  # [tokens, layers]
    for token, counts in zip(ids[0].tolist(), fired.tolist(), strict=True):
        share = sum(counts) / (F * len(counts))
        table.add_row(repr(tokenizer.decode([token])), *map(str, counts), f"{share:.1%}")
    console.print(table)
    share = float(fired.sum()) / (F * fired.numel())
    console.print(
        f"{share:.1%} of the neurons fire. All others are exactly 0, and twell skips the work behind them.",
        highlight=False,
    )
    prompt = tokenizer(PROMPT, return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=40, do_sample=True, temperature=0.8, top_k=40)
    console.print("The model writes:")
    console.print(f"{tokenizer.decode(text[0])}\n", style="italic", highlight=False)
    return model, tokenizer, share


# ---------------------------------------------------------------------------------------------------------
# 2. and 3. A layer and a model of real width
# ---------------------------------------------------------------------------------------------------------


def time_layer(console: Console, size: Size) -> list[dict[str, Any]]:
    """Rows of ``twell bench ffn``."""
    title = f"2. One feed-forward layer, D {size.D}, F {size.F}, {active_of(size.workload)} active neurons a token"
    console.print(Rule(title))
    console.print(f"On {cpu_name()}, {torch.get_num_threads()} threads, float32.")
    todo = [ffn.Case(workload=size.workload, M=m, D=size.D, F=size.F) for m in size.layer_tokens]
    rows = []
    with console.status("measuring"):
        for row in ffn.run(todo, seconds=size.seconds):
            rows.append({**row, "of": "layer", "what": tokens(row["M"])})
    console.print(speed_table(rows))
    errors = [max(row["error"][side] for row in rows) for side in ("dense", "sparse")]
    console.print(f"Relative error against float64: dense {errors[0]:.1e}, sparse {errors[1]:.1e}.", highlight=False)
    console.print()
    return rows


@torch.no_grad()
def time_model(console: Console, size: Size) -> list[dict[str, Any]]:
    """A row of ``twell bench model`` (prefill) and one of ``twell bench decode``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from twell.workbench.bench import decode
    from twell.workbench.bench import model as prefill

    console.print(Rule(f"3. A model of {size.layers} such layers with attention, reading and writing"))
    console.print("Random weights; every feed-forward layer has the weights and inputs of part 2.")
    config = LlamaConfig(
        hidden_size=size.D,
        intermediate_size=size.F,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=4096,
        max_position_embeddings=size.prefill + size.context,
        hidden_act="relu",
    )
    with console.status("measuring"):
        subject = prefill.synthetic(LlamaForCausalLM(config).eval(), size.workload, (1, size.prefill))
        ids = torch.randint(config.vocab_size, (1, size.prefill))
        read = prefill.measure(subject, ids, seconds=size.seconds)
        del subject
        fresh = LlamaForCausalLM(config).eval()  # without the hooks that replace inputs
        written = decode.measure(fresh, size.workload, 1, size.context, graph=False, seconds=size.seconds)
    rows = [
        {**read, "of": "model", "what": f"a prefill of {tokens(size.prefill)}"},
        {**written, "of": "model", "what": "decoding a token"},
    ]
    console.print(speed_table(rows))
    apart = max(row["difference"] for row in rows)
    console.print(f"Logits, sparse against dense: a relative difference of {apart:.0e}.", highlight=False)
    console.print()
    return rows


def tokens(n: int) -> str:
    return f"{n:,} token{'s'[: n != 1]}"


def active_of(workload: str) -> int:
    return int(cases.get_workload(workload).mean_nnz)


def speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "dense", "sparse"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("sparse is", no_wrap=True)
    for row in rows:
        dense, sparse = sides(row)
        table.add_row(row["what"], milliseconds(dense), milliseconds(sparse), f"[bold]{verdict(dense, sparse)}[/bold]")
    return table


def sides(row: dict[str, Any]) -> tuple[Spread, Spread]:
    return Spread(**row["dense_ms"]), Spread(**row["sparse_ms"])


def milliseconds(t: Spread) -> str:
    """The median, and half the distance of the 20th and 80th percentile.

    >>> milliseconds(Spread(9.0, 10.0, 12.0))
    '10.0 ms ±15%'
    """
    return f"{t.p50:.{0 if t.p50 >= 100 else 1 if t.p50 >= 10 else 2}f} ms ±{relative_spread(t):.0%}"


def relative_spread(t: Spread) -> float:
    return (t.p80 - t.p20) / 2 / t.p50


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


def busy_while(rows: list[dict[str, Any]]) -> str | None:
    """Whether the times themselves say that something else was running."""
    worst = max(relative_spread(side) for row in rows for side in sides(row))
    return f"Times varied by up to ±{worst:.0%}: something else was running." if worst > NOISY else None


# ---------------------------------------------------------------------------------------------------------
# 4. and 5. The page, and what it comes to
# ---------------------------------------------------------------------------------------------------------


def write_page(console: Console, model: Any, tokenizer: Any, rows: list[dict[str, Any]], folder: Path) -> Path:
    """The page of ``twell analyze`` about the shipped model, with the rows measured here."""
    from twell.hf.loading import SAMPLE_MODEL
    from twell.train.data import SAMPLE, load_corpus
    from twell.workbench import report
    from twell.workbench.analyze import analyze
    from twell.workbench.bench import rows as saved

    console.print(Rule("4. What the neurons of the shipped model do, as a page"))
    with console.status("reading"):
        text = load_corpus(
            [SAMPLE],
            encode=lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"],
            end_of_text=tokenizer.eos_token_id,
            vocab_size=len(tokenizer),
        ).held_out
        analysis = analyze(model, tokenizer, text)
    page = report.build(
        analysis,
        title="sample",
        model="The model that ships with twell",
        text="text held out of its training",
        metrics=saved.read([SAMPLE_MODEL / "metrics.jsonl"]),
        speed=rows,
    )
    folder.mkdir(parents=True, exist_ok=True)
    report.write(page, folder / "report.html")
    table = Table("layer", "active neurons a token", "at most", "never fire", "busiest tenth fires", box=None)
    for i, layer in enumerate(analysis.layers):
        table.add_row(
            str(i),
            f"{layer.mean:.1f} of {analysis.facts.hidden_sizes[i]}",
            str(layer.max),
            f"{layer.silent:.0%}",
            f"{layer.top_shares['10']:.0%}",
        )
    console.print(table)
    console.print()
    return folder / "report.html"


def close(console: Console, rows: list[dict[str, Any]], share: float | None) -> None:
    """One sentence with all numbers, and what disturbed them."""
    console.print(Rule("What it comes to"))
    trained = "" if share is None else f"The trained model fires {share:.1%} of its neurons. "
    where = f"about {active_of(rows[0]['workload'])} of {rows[0]['F']:,} active neurons"
    said = f"{trained}Sparse against dense PyTorch on this CPU, with {where}: a layer is {shortly(rows, 'layer')}"
    if any(row["of"] == "model" for row in rows):
        said += f"; a model of such layers is {shortly(rows, 'model')}"
    console.print(f"{said}.", highlight=False)
    if note := busy_while(rows):
        console.print(note, highlight=False)


def shortly(rows: list[dict[str, Any]], of: str) -> str:
    return ", ".join(f"{verdict(*sides(row)).split(' (')[0]} for {row['what']}" for row in rows if row["of"] == of)
