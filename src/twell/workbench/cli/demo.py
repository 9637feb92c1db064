"""``twell demo``: other commands in a row, and a model of real width."""

from __future__ import annotations

from pathlib import Path

from twell.workbench.cli.analyze import analyze
from twell.workbench.cli.app import app
from twell.workbench.cli.bench import bench_ffn
from twell.workbench.cli.common import append
from twell.workbench.cli.generate import generate_text

PROMPT = "The old man said"


@app.command()
def demo() -> None:
    """Time a layer and a model sparse and dense, let a small trained model write, and make a page about it.

    Takes about a minute on two cores; the page is demo-out/report.html. Example: [bold]twell demo[/bold]
    """
    run(Path("demo-out"))


def run(folder: Path, *, width: int = 2048, hidden: int = 5632, seconds: float = 2.0) -> None:
    """``seconds`` of timing, each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, page = folder / "rows.jsonl", folder / "report.html"
    rows.unlink(missing_ok=True)
    _say("A layer, of which 29 neurons fire for a token", "twell bench ffn -w skew29 -m 1 -m 16 -m 256")
    bench_ffn(["skew29"], [1, 16, 256], width=width, hidden=hidden, seconds=seconds, out=rows)
    _say("A model of four such layers with attention writes a token", None)
    _time_model(rows, width, hidden, seconds)
    _say("A small trained model writes", f"twell generate sample --prompt '{PROMPT}' --temperature 0.8 --top-k 40")
    generate_text("sample", [PROMPT], max_new_tokens=40, temperature=0.8, top_k=40)
    _say("Which of its neurons fire", f"twell analyze sample --report {page} --speed {rows}")
    analyze("sample", report=page, speed=[rows])


def _say(what: str, command: str | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.rule(what)
    if command is not None:
        console.print(f"$ {command}", markup=False)


def _time_model(out: Path, width: int, hidden: int, seconds: float) -> None:
    """A step of decoding, as ``twell bench decode`` times it for larger models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from twell.workbench.bench import decode

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=16,
        vocab_size=4096,
        max_position_embeddings=256,
        hidden_act="relu",
    )
    row = decode.measure(LlamaForCausalLM(config).eval(), "skew29", 1, 128, graph=False, seconds=seconds)
    append(row, out)
    times = (f"{way} {row[f'{way}_ms']['p50']:.3g} ms" for way in ("dense", "sparse"))
    print(f"a token: {', '.join(times)}: {row['speedup']:.2f}x")
