"""Run a checkpoint with ReLU FFNs sparsely: the same tokens, less work.

    python examples/accelerate_checkpoint.py my-run/model            # a folder, or a name on the hub
    python examples/accelerate_checkpoint.py                         # a model of random weights, to see it work

``twell bench model`` and ``twell generate --compare`` measure with more care.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import twell

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="folder or hub name of a causal language model with ReLU FFNs")
parser.add_argument("--tokens", type=int, default=256, help="of the prompt")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
else:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        hidden_act="relu",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # random weights fire for half of all tokens; trained ones with L1 hardly ever
        layer.mlp.gate_proj = torch.nn.Linear(512, 2048)
        torch.nn.init.constant_(layer.mlp.gate_proj.bias, -1.2)
model.to(device).eval()
ids = torch.randint(model.config.vocab_size, (1, args.tokens), device=device)


@torch.inference_mode()
def timed() -> tuple[float, torch.Tensor]:
    """Milliseconds of a forward pass, the best of five, and its logits."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        logits = model(ids).logits.float().cpu()  # waits for the device
        times.append(1000 * (time.perf_counter() - start))
    return min(times), logits


twell.desparsify_(model)  # a run of ``twell train`` loads as a sparse model
dense_ms, dense = timed()
report = twell.sparsify_(model)  # in place: each FFN that computes the same when run sparsely is replaced
print(report)
sparse_ms, sparse = timed()
difference = (sparse - dense).norm() / dense.norm()
print(f"dense {dense_ms:.1f} ms, sparse {sparse_ms:.1f} ms; logits differ by {difference:.1e}, which is rounding")

twell.desparsify_(model)  # the way back, exactly
assert torch.equal(timed()[1], dense)
