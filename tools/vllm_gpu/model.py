"""The model that bench.py measures: random weights, as sparse as a synthetic workload of twell.workbench.bench.

The embeddings are the workload's tokens. A constant direction m in all of them carries the neurons' thresholds through
every norm, since what attention and FFNs add is small and orthogonal to m. Each layer's thresholds are fitted to the
tokens that reach it, so that as many neurons fire for a token as in the workload.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from twell.hf.configs import LlamaSparseReluConfig
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.workbench.bench import cases

PROMPT, NEW = 32, 128  # tokens of a prompt, and generated tokens
CHECKED = 8  # prompts whose tokens are compared
Row = dict[str, Any]


@functools.cache
def prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    gen = torch.Generator().manual_seed(length * 1000)
    return torch.randint(vocab, (max(64, batch), length), generator=gen)[:batch].tolist()


class Fitter:
    """Gives each FFN its weights when its first tokens arrive."""

    def __init__(self, args: argparse.Namespace) -> None:
        D, F = args.width, args.hidden
        self.inputs = cases.make(args.workload, args.vocab, D, F, dtype=torch.float32, device=args.device)
        gen = torch.Generator(args.device).manual_seed(0)  # as in cases.make: the same direction
        self.m_D = nn.functional.normalize(torch.randn(D, generator=gen, device=args.device), dim=0)
        if (self.inputs.x @ self.m_D).std() > 1e-2:
            raise RuntimeError("twell.workbench.bench.cases no longer draws its constant direction first")
        self.threshold_F = -(self.inputs.w_gate @ self.m_D)
        self.gate_FD = self.inputs.w_gate + torch.outer(self.threshold_F, self.m_D)
        self.mean = cases.get_workload(args.workload).mean_nnz
        self.fired: list[Tensor] = []
        self.active: list[float] = []

    def without_m(self, w: Tensor) -> Tensor:
        """w [D, ...] with outputs orthogonal to m."""
        return w.float() - torch.outer(self.m_D, self.m_D @ w.float())

    def scale(self, x_MD: Tensor, gate_FD: Tensor, threshold_F: Tensor) -> float:
        """The factor of the thresholds with which ``mean`` neurons fire for a token."""
        z_MF, along_M1 = x_MD @ gate_FD.T, (x_MD @ self.m_D)[:, None]
        low, high = 0.0, 4.0
        for _ in range(30):
            middle = (low + high) / 2
            count = (z_MF > middle * along_M1 * threshold_F).float().sum(1).mean().item()
            low, high = (middle, high) if count > self.mean else (low, middle)
        return low

    def __call__(self, mlp: Any, inputs: tuple[Tensor, ...]) -> None:
        x_MD = inputs[0].flatten(0, -2)
        F = len(self.threshold_F)
        order = torch.randperm(F, generator=torch.Generator().manual_seed(len(self.fired))).to(x_MD.device)
        gate_FD, threshold_F = self.gate_FD[order], self.threshold_F[order]
        scale = self.scale(x_MD.float(), gate_FD, threshold_F)
        mlp.gate_proj.weight.copy_(gate_FD - scale * torch.outer(threshold_F, self.m_D))
        mlp.up_proj.weight.copy_(self.inputs.w_up[order])
        mlp.down_proj.weight.copy_(self.without_m(self.inputs.w_down[:, order]))
        active_MF = mlp.gate_proj(x_MD) > 0
        self.fired.append(active_MF.sum(0).cpu())
        self.active.append(round(active_MF.sum().item() / len(x_MD), 1))


def settings(args: argparse.Namespace) -> Row:
    return {
        "hidden_size": args.width,
        "intermediate_size": args.hidden,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "num_hidden_layers": args.layers,
        "vocab_size": args.vocab,
        "max_position_embeddings": 4096,
        "hidden_act": "relu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def empty_model(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(args.device):
            return LlamaForCausalLM(LlamaConfig(**settings(args), architectures=["LlamaForCausalLM"])).eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def fit(args: argparse.Namespace, model: Any) -> tuple[Fitter, NeuronCounts]:
    fitter = Fitter(args)
    model.model.embed_tokens.weight.copy_(fitter.inputs.x)
    for layer in model.model.layers:
        out = layer.self_attn.o_proj.weight
        out.normal_(0, 0.1 / args.width**0.5)
        out.copy_(fitter.without_m(out))
    hooks = [layer.mlp.register_forward_pre_hook(fitter) for layer in model.model.layers]
    ids = torch.tensor(prompts(8, args.calibrate, args.vocab), device=args.device)
    model.model(ids)
    for hook in hooks:
        hook.remove()
    return fitter, NeuronCounts(fired=[f.long() for f in fitter.fired], tokens=ids.numel())


def save(args: argparse.Namespace, model: Any, counts: NeuronCounts) -> None:
    """dense: Llama with ReLU. sparse: the same weights as twell's type. llama: with SiLU, for vLLM's own class."""
    folder = Path(args.folder)
    model.save_pretrained(folder / "dense", max_shard_size="20GB")
    configs = {
        "sparse": LlamaSparseReluConfig(**settings(args), architectures=["LlamaSparseReluForCausalLM"]),
        "llama": LlamaConfig(**{**settings(args), "hidden_act": "silu"}, architectures=["LlamaForCausalLM"]),
    }
    for name, config in configs.items():
        config.save_pretrained(folder / name)
        for file in (folder / "dense").glob("*.safetensors*"):
            (folder / name / file.name).unlink(missing_ok=True)
            os.link(file, folder / name / file.name)
        shutil.copy(folder / "dense" / "generation_config.json", folder / name)
    counts.save(folder / "sparse" / COUNTS_FILE)


def load(args: argparse.Namespace) -> Any:
    path = Path(args.folder) / "dense"
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(args.device).eval()


@torch.inference_mode()
def generate(args: argparse.Namespace) -> Row:
    """Generate tokens by transformers' dense model, and count the neurons that fire for them."""
    model = load(args)
    asked = torch.tensor(prompts(CHECKED, PROMPT, args.vocab), device=args.device)
    ids = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens = ids[:, PROMPT:].tolist()
    (Path(args.folder) / "tokens-transformers.json").write_text(json.dumps(tokens))
    active: list[float] = []

    def count(_module: Any, _inputs: Any, z: Tensor) -> None:
        active.append(round((z > 0).sum().item() / z[..., 0].numel(), 1))

    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(count)
    model.model(ids)
    return {"what": "generated", "active_per_token": active, "different_tokens": [len(set(t)) for t in tokens]}


def make(args: argparse.Namespace) -> Iterator[Row]:
    model = empty_model(args)
    fitter, counts = fit(args, model)
    save(args, model, counts)
    fire = [int((f > 0).sum()) for f in counts.fired]
    shape = {"layers": args.layers, "width": args.width, "hidden": args.hidden, "workload": args.workload}
    yield {"what": "model", **shape, "active_per_token": fitter.active, "neurons_that_fire": fire}
    yield generate(args)


@torch.inference_mode()
def verify(args: argparse.Namespace) -> Iterator[Row]:
    """How far each token of each engine is below the best logit of transformers' dense model."""
    folder, model = Path(args.folder), load(args)
    for file in sorted(folder.glob("tokens-*.json")):
        name, tokens = file.stem.removeprefix("tokens-"), json.loads(file.read_text())
        wrong = sum(not 0 <= t < args.vocab for ts in tokens for t in ts)
        if wrong:
            yield {"what": "tokens", "name": name, "outside_the_vocabulary": wrong}
            continue
        asked = prompts(len(tokens), PROMPT, args.vocab)
        ids = torch.tensor([a + t for a, t in zip(asked, tokens, strict=True)], device=args.device)
        logits = model(ids).logits[:, PROMPT - 1 : -1].float()
        below = logits.max(-1).values - logits.gather(-1, ids[:, PROMPT:, None])[..., 0]
        yield {
            "what": "tokens",
            "name": name,
            "best": round((below == 0).float().mean().item(), 4),
            "furthest_below": round(below.max().item(), 4),
            "logit_std": round(logits.std().item(), 3),
        }
