"""Train a sparse language model in Python, see how sparse it became, and let it write.

    python examples/train_sparse.py                          # the bundled text, two CPU cores, a minute
    python examples/train_sparse.py --steps 800 --active 0.02

``twell train`` does the same from the command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import twell  # registers the sparse model types with transformers  # noqa: F401
from twell.train.data import SAMPLE
from twell.train.recipes import override, tiny
from twell.train.run import run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("sparse-run"), help="folder of the run; must be empty")
parser.add_argument("--data", nargs="+", default=[SAMPLE], help="text files, folders, or a dataset's name")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--active", type=float, default=0.01, help="share of the neurons that a token is to fire")
parser.add_argument("--layers", type=int, default=4)
args = parser.parse_args()

# A recipe is a dataclass: the model's shape, its sparsity, the optimiser. Presets are functions that return one.
recipe = override(tiny(), [f"steps={args.steps}", f"target_active={args.active}", f"layers={args.layers}"])
run(recipe, args.data, args.out)

# What was saved is an ordinary checkpoint, with the weight names of Llama.
model = AutoModelForCausalLM.from_pretrained(args.out / "model").eval()
tokenizer = AutoTokenizer.from_pretrained(args.out / "model")
inputs = tokenizer("It was a dark night, and", return_tensors="pt")
with torch.no_grad():
    out = model(**inputs, labels=inputs.input_ids)
print(f"\ncross-entropy {out.ce_loss:.2f}, L1 {out.l1_loss:.2f}")
for layer, stats in enumerate(out.sparsity):
    active = stats.counts.sum() / stats.tokens
    print(f"layer {layer}: {active:.1f} of {len(stats.counts)} neurons active a token")
written = model.generate(**inputs, max_new_tokens=40, do_sample=True, top_p=0.9, pad_token_id=0)
print(tokenizer.decode(written[0]))
