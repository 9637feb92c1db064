"""Make the model that ships with the package, ``src/twell/sample``: about 20 minutes on one core, 2 GB of memory.

    OMP_NUM_THREADS=1 python tools/sample_model.py RUN

RUN is the folder of the training; a finished run there is used as it is, an interrupted one resumes. The weights are
stored in bf16, and ``config.json`` says float32: they are computed with in float32, which every CPU can do.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from twell import sparsify_
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.hf.loading import SAMPLE_MODEL, load_causal_lm
from twell.nn import sparse_ffns
from twell.train.data import SAMPLE, Blocks
from twell.train.recipes import Recipe, override, tiny
from twell.train.run import read_corpus, read_metrics, read_summary, run
from twell.train.tokenizer import load_tokenizer
from twell.workbench.trace import record_text

RECIPE = [
    *("hidden_size=160", "intermediate_size=768", "layers=4", "heads=5", "context=256", "vocab_size=3072"),
    *("sequences_per_step=8", "micro_batch=8", "steps=2000", "lr_warmup=60", "target_active=0.02"),
    *("log_every=20", "eval_every=200", "save_every=200"),
]
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
COUNTED_TOKENS = 32768


class Held(NamedTuple):
    """The shipped weights on the held-out document."""

    loss: float  # nats a token
    bits: float  # a byte
    active: list[float]  # neurons a token, by layer
    training_tokens: int  # of the other documents


def make(out: Path) -> None:
    recipe = override(tiny(), RECIPE)
    if not (out / "summary.json").is_file():
        run(recipe, [SAMPLE], out, go_on=(out / "recipe.json").is_file())
    SAMPLE_MODEL.mkdir(exist_ok=True)
    for name in KEPT:
        shutil.copyfile(out / "model" / name, SAMPLE_MODEL / name)
    weights = {name: w.bfloat16().contiguous() for name, w in load_file(out / "model" / "model.safetensors").items()}
    save_file(weights, SAMPLE_MODEL / "model.safetensors", metadata={"format": "pt"})
    (SAMPLE_MODEL / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    shutil.copyfile(out / "metrics.jsonl", SAMPLE_MODEL / "metrics.jsonl")
    never = count(SAMPLE_MODEL)
    described = describe(recipe, read_summary(out), read_metrics(out), measure(recipe, SAMPLE_MODEL), never)
    (SAMPLE_MODEL / "MODEL.md").write_text(described, encoding="utf-8")
    print(described)


def count(folder: Path) -> float:
    """As ``twell calibrate`` does. Returns the share of neurons that never fired."""
    trace = record_text(load_causal_lm(str(folder)).eval(), load_tokenizer(folder), SAMPLE, tokens=COUNTED_TOKENS)
    fired = [trace.neuron_counts(layer) for layer in range(trace.layers)]
    NeuronCounts(fired=fired, tokens=trace.tokens).save(folder / COUNTS_FILE)
    return float((torch.cat(fired) == 0).float().mean())


@torch.no_grad()
def measure(recipe: Recipe, folder: Path) -> Held:
    model: Any = load_causal_lm(str(folder)).eval()
    sparsify_(model)
    tok: Any = load_tokenizer(folder)
    corpus = read_corpus(recipe, [SAMPLE], [], tok, folder, False, print)
    blocks = Blocks(corpus.held_out, recipe.context)
    ids = torch.stack([blocks[i]["input_ids"] for i in range(len(blocks))])
    ffns = [ffn for _, ffn in sparse_ffns(model)]
    for ffn in ffns:
        ffn.track_counts = True
        ffn.reset_counts()
    logits = model(ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    text = tok.decode(corpus.held_out[corpus.held_out != tok.eos_token_id].tolist())
    bits = loss / math.log(2) * len(corpus.held_out) / len(text.encode())
    active = [int(ffn.neuron_counts.sum()) / int(ffn.tokens_seen) for ffn in ffns]
    return Held(loss, bits, active, len(corpus.train))


def describe(recipe: Recipe, summary: dict[str, Any], metrics: list[Any], held: Held, never: float) -> str:
    share, F = sum(held.active) / len(held.active) / recipe.intermediate_size, recipe.intermediate_size
    config = json.loads((SAMPLE_MODEL / "config.json").read_text())
    by_layer = ", ".join(f"{n:.1f}" for n in held.active)
    curve = ", ".join(f"{row['step']}: {row['eval_loss']:.3f}" for row in metrics if "eval_loss" in row)
    return f"""# sample: a small sparse model

A Llama with ReLU-gated feed-forward layers, trained by `twell train` so that a token fires 2 % of the neurons. It ships
with the package so that every command has a model to run:

```
twell generate sample --prompt "The old man said" --temperature 0.8 --top-k 40 --seed 1
twell serve sample
```

Its text has the words and the rhythm of its books, and no sense. Its layers are too small for sparsity to save time: it
shows what a sparse model does, not how fast one runs.

| | |
|---|---|
| parameters | {summary["parameters"]:,}: width {recipe.hidden_size}, {recipe.layers} layers of {F} neurons, \
{recipe.heads} heads, context {recipe.context}, vocabulary {config["vocab_size"]:,} |
| weights | stored in bfloat16; computed with in float32, as `config.json` says |
| data | `train/sample.txt` alone: 1.6 MB in the public domain (`train/SAMPLE.md`), one document of 105 held out |
| training | {recipe.steps:,} steps of {recipe.tokens_per_step:,} tokens, \
{summary["tokens"] / held.training_tokens:.1f} epochs; {summary["seconds"] / 60:.0f} minutes on one core; \
twell {summary["versions"]["twell"]}, torch {summary["versions"]["torch"]} |
| validation loss by step | {curve} |
| validation loss | {held.loss:.3f} a token, {held.bits:.3f} bits a byte: held-out document, weights as stored |
| active neurons | {share:.2%}: held-out document; by layer {by_layer} of {F} |
| silent neurons | {never:.1%} never fired in {COUNTED_TOKENS:,} tokens (`{COUNTS_FILE}`, by which `sparsify_` plans) |
| made by | `tools/sample_model.py`; `metrics.jsonl` is the training's log |
| licence | Apache-2.0, as the rest of the package |
"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(Path(sys.argv[1]))
