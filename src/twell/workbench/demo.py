"""``twell demo``: what a sparse activation looks like, what it saves, and a sparse model trained from nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.rule import Rule

from twell import reference
from twell.formats import TwELL
from twell.workbench.bench import cases, ffn

_BARS = " ▁▂▃▄▅▆▇█"


def run_demo(progress: Any, print_speed_table: Callable[[list[dict[str, Any]]], None]) -> None:
    console = Console()
    torch.manual_seed(0)
    _show_packing(console)
    _show_layer(console)
    _show_speed(console, progress, print_speed_table)
    _show_training(console)


def _show_packing(console: Console) -> None:
    console.print(Rule("1. Packing: only what is active is stored"))
    g = torch.zeros(2, 16, dtype=torch.bfloat16)
    g[0, [1, 6, 12]] = torch.tensor([1.5, 2.0, 0.5], dtype=torch.bfloat16)
    g[1, [8, 15]] = torch.tensor([3.0, 1.0], dtype=torch.bfloat16)
    packed = TwELL.pack(g, tile=8, slots=2, compact=True)
    assert packed.words is not None
    for row, counts, words in zip(g.tolist(), packed.counts.tolist(), packed.words.tolist(), strict=True):
        console.print("activations", "".join(f"{v:4g}" if v else "   ·" for v in row), highlight=False)
        lists = (" ".join([f"{n}:", *(f"{w:08x}" for w in tile)]) for n, tile in zip(counts, words, strict=True))
        console.print("TwELL      ", "   ".join(lists), highlight=False)
    console.print("Per tile of 8 columns: count, then words of bf16 value and column in the tile.")
    console.print(f"Unpacked bit for bit: {torch.equal(packed.unpack(), g)}\n")


def _show_layer(console: Console) -> None:
    console.print(Rule("2. A layer as sparse as a trained model (D 1024, F 2816)"))
    inputs = cases.make("skew29", 512, 1024, 2816, dtype=torch.float32)
    r = torch.relu(inputs.x @ inputs.w_gate.T)
    per_token = (r != 0).sum(1)
    per_neuron = (r != 0).sum(0).sort(descending=True).values
    top = int(per_neuron[: len(per_neuron) // 10].sum()) / int(per_neuron.sum())
    histogram = torch.histc(per_token.float(), bins=40, min=0, max=float(per_token.max()))
    bars = "".join(_BARS[round(v * 8)] for v in (histogram / histogram.max()).tolist())
    console.print(f"active neurons a token: mean {per_token.float().mean():.0f}, most {int(per_token.max())} of 2816")
    console.print(f"0 {bars} {int(per_token.max())}", highlight=False)
    dead = int((per_neuron == 0).sum())
    console.print(f"the busiest 10 % of neurons do {top:.0%} of the work; {dead} never fire here")

    dense_y = reference.gated_ffn(inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)
    w = reference.Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    hot = (r != 0).sum(0).topk(128).indices.sort().values
    parts = reference.split(r, hot, cap=64)
    split_y = reference.split_ffn(inputs.x, w, hot, cap=64)
    n_hot, n_tail = int((parts.hot_gate != 0).sum()), int(parts.tail.counts.sum())
    console.print(
        f"three-part split: 128 hot neurons take {n_hot} active elements, {int(parts.heavy.sum())} heavy tokens run "
        f"densely, {n_tail} elements stay in the cold tail ({n_tail / len(r):.1f} a token)"
    )
    difference = ffn.relative_error(split_y, dense_y.double())
    console.print(f"sum of the three parts against dense: relative difference {difference:.1e}\n")


def _show_speed(console: Console, progress: Any, print_speed_table: Callable[..., None]) -> None:
    console.print(Rule("3. Speed on this CPU, checked against float64 first"))
    todo = [ffn.Case(workload=name, M=m) for name in ("skew29", "skew2800") for m in (1, 16, 256)]
    rows = []
    with progress("building inputs", len(todo)) as advance:
        for row in ffn.run(todo, seconds=1.5):
            rows.append(row)
            advance(f"{row['workload']}, {row['M']} tokens: {row['speedup']:.2f}x")
    print_speed_table(rows)
    console.print("skewN: N active neurons a token. skew2800 is half dense: there the layer runs densely.")


def _show_training(console: Console, folder: Path = Path("demo-out"), steps: int = 800) -> None:
    console.print(Rule("4. A sparse language model, trained here on the bundled text"))
    try:
        from twell.train.run import quiet_libraries, run
    except ImportError as error:
        console.print(f"skipped, training needs more packages ({error}): pip install 'twell\\[train]'")
        return
    from twell.train.data import SAMPLE
    from twell.train.recipes import override, tiny

    quiet_libraries()
    out = folder / time.strftime("%Y%m%d-%H%M%S")
    recipe = override(tiny(), [f"steps={steps}", "log_every=50", "eval_every=200", "save_every=200"])
    start = time.perf_counter()
    trainer: Any = run(
        recipe, [SAMPLE], out, say=lambda line: console.print(line, highlight=False), live=console.is_terminal
    )
    console.print(f"trained in {time.perf_counter() - start:.0f} s")
    validation = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row][-1]
    held_out = trainer.eval_dataset.blocks
    unigram = _unigram_loss(trainer.train_dataset.tokens, held_out.tokens)
    console.print(f"validation cross-entropy {validation:.2f}; guessing by word frequency alone gives {unigram:.2f}\n")
    ids = torch.stack([held_out[i]["input_ids"] for i in range(8)])
    speed, same = _measure(trainer.model, ids, out.name)
    _show_speed_of_model(console, speed, same)
    _show_generation(console, trainer.model, out)
    _write_report(console, trainer.model, held_out.tokens, speed, out)
    console.print(f"model {out / 'model'}, losses and active neurons step by step {out / 'metrics.jsonl'}")


def _unigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    counts = np.bincount(train, minlength=int(max(train.max(), held_out.max())) + 1) + 1.0
    return float(-np.log(counts / counts.sum())[held_out].mean())


@torch.no_grad()
def _measure(model: Any, ids: torch.Tensor, name: str) -> tuple[dict[str, Any], int]:
    """The row of ``twell bench model``, which terminal and page both show, and how many predictions are as dense."""
    from twell.workbench.bench import model as bench

    subject = bench.real(model.eval(), name)
    dense, sparse = (each(ids).logits.argmax(-1) for each in (subject.dense, subject.sparse))
    return bench.measure(subject, ids, seconds=4.0, wants_layers=True), int((dense == sparse).sum())


def _show_speed_of_model(console: Console, speed: dict[str, Any], same: int) -> None:
    from rich.table import Table

    from twell.workbench.bench import sweep_results

    n_tokens = speed["batch"] * speed["length"]
    table = Table(title=f"the trained model on {n_tokens:,} tokens of held-out text")
    for name in ("", "FFNs ms", "model ms", "memory MB"):
        table.add_column(name, justify="right")
    for side in ("dense", "sparse"):
        of_ffns = sum(layer[f"{side}_ms"]["p50"] for layer in speed["ffns"])
        memory = speed["memory"][side]["pass"] / 1e6
        table.add_row(side, f"{of_ffns:.1f}", f"{speed[f'{side}_ms']['p50']:.1f}", f"{memory:.1f}")
    table.add_row("speedup", f"{sweep_results.ffn_speedup(speed).p50:.2f}x", f"{speed['speedup']:.2f}x", "")
    console.print(table)
    console.print(f"predictions: {same:,} of {n_tokens:,} as dense")


def _write_report(console: Console, model: Any, tokens: np.ndarray, speed: dict[str, Any], out: Path) -> None:
    """The page of ``twell analyze``, on the held-out text, with what was measured there."""
    from twell.train.run import MODEL_FOLDER
    from twell.train.tokenizer import load_tokenizer
    from twell.train.trainer import METRICS_FILE
    from twell.workbench import report
    from twell.workbench.analyze import analyze
    from twell.workbench.bench import rows

    analysis = analyze(model, load_tokenizer(out / MODEL_FOLDER), tokens, tokens=min(8192, len(tokens)))
    page = report.build(
        analysis,
        title=out.name,
        model="the demo's model",
        text="held-out text",
        metrics=rows.read([out / METRICS_FILE]),
        speed=[speed],
    )
    report.write(page, out / "report.html")
    console.print(f"\n[bold]a page to look at: {out / 'report.html'}[/bold]")


def _show_generation(console: Console, model: Any, out: Path) -> None:
    from twell.train.run import MODEL_FOLDER
    from twell.train.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(out / MODEL_FOLDER)
    ids = tokenizer("The old man said", return_tensors="pt").input_ids
    torch.manual_seed(0)
    sample = model.generate(ids, max_new_tokens=80, do_sample=True, top_p=0.9, pad_token_id=0)
    console.print("it writes:")
    console.print(tokenizer.decode(sample[0]), style="italic", highlight=False)
