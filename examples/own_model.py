"""Put a sparse FFN into a model of your own, and train it with L1: a few lines differ from an ordinary loop.

python examples/own_model.py                             # CPU or GPU, half a minute
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import twell
from twell.sparsity import L1Steering

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument(
    "--active", type=float, default=8, help="neurons of 256 that a token is to fire; L1 is steered to it"
)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A transformer block; the FFN is the sparse one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.ffn = twell.GatedSparseFFN(width, hidden)  # instead of Linear, activation, Linear

    def forward(self, x: Tensor) -> tuple[Tensor, twell.Stats]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False, is_causal=True)[0]
        y, stats = self.ffn(self.norms[1](x), return_stats=True)  # stats.l1_sum has a gradient
        return x + y, stats


class Model(nn.Module):
    def __init__(self, letters: int, width: int = 64, hidden: int = 256, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[twell.Stats]]:
        x, all_stats = self.embedding(ids), []
        for block in self.blocks:
            x, stats = block(x)
            all_stats.append(stats)
        return self.head(x), all_stats


text = "the quick brown fox jumps over the lazy dog and the dog sleeps on. " * 40
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text], device=device)
model = Model(len(letters)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steering = L1Steering(args.active, args.steps)
for step in range(args.steps):
    start = torch.randint(len(data) - 33, (16,))
    batch = torch.stack([data[i : i + 33] for i in start.tolist()])
    logits, all_stats = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    l1 = sum(stats.l1_sum / stats.tokens for stats in all_stats) / len(all_stats)  # mean over layers and tokens
    (loss + steering.l1 * l1).backward()
    optimizer.step()
    steering.advance(all_stats)
    optimizer.zero_grad()
    if step % 50 == 0 or step == args.steps - 1:
        active = [float(stats.counts.sum() / stats.tokens) for stats in all_stats]
        print(f"step {step:3}: loss {loss:.3f}, active neurons a token {', '.join(f'{n:.0f}' for n in active)} of 256")
