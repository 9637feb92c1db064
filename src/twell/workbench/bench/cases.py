"""Workloads: synthetic FFNs and tokens with a chosen sparsity.

A workload has no bias: a constant direction ``m`` in x carries every neuron's firing threshold. So the gate is sparse
by construction, and as uneven as in trained models: a few neurons fire often, a few tokens make many neurons fire.

    x_MD    = z + s m                      z: token part, no component along m; s = sqrt(D) / 2
    gate_n  = z . G_n - (t_n + shift)      t_n: normal quantile of 1 - (firing probability of neuron n)

Legend: M tokens, D model width, F hidden width.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from twell.train.recipes import Recipe

_CENTRES = 4096  # clusters of similar tokens, drawn with weight 1 / rank
_TOKEN_BLOCK = 4096  # tokens are drawn in blocks of this size; `shift` is fitted to the first block
_DEAD_THRESHOLD = 12.0  # standard deviations: never reached
_MAX_PROBABILITY = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The statistics of a synthetic gate activation.

    mean_nnz: active neurons per token.  sigma: spread of the neurons' firing rates (log-normal).
    dead: share of neurons that never fire.  rho: how alike the tokens of a cluster are.
    tok_sigma: spread of the tokens' norms (log-normal), which makes some tokens heavier.
    """

    mean_nnz: float
    sigma: float = 0.0
    dead: float = 0.0
    rho: float = 0.0
    tok_sigma: float = 0.0


_FAMILIES: dict[str, Workload] = {
    "iid": Workload(mean_nnz=29),
    "skew": Workload(mean_nnz=29, sigma=1.6, dead=0.3, rho=0.6, tok_sigma=0.12),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNInputs:
    """One FFN and its input, weights in HF layout: x [M, D], w_gate and w_up [F, D], w_down [D, F]."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor


def get_workload(name: str) -> Workload:
    """``iidN``, whose neurons all fire alike, or ``skewN``, as uneven as a trained model, for a mean count N."""
    named = re.fullmatch("([a-z]+)([0-9]+)", name)
    if named is None or named[1] not in _FAMILIES or int(named[2]) == 0:
        families = " or ".join(f"{family}N" for family in _FAMILIES)
        raise ValueError(f"unknown workload {name!r}: expected {families} for a mean count N, as in skew29")
    return dataclasses.replace(_FAMILIES[named[1]], mean_nnz=int(named[2]))


def _firing_thresholds(w: Workload, n_neurons: int, gen: torch.Generator) -> Tensor:
    """Thresholds t_F in standard deviations; the firing probabilities then sum to about mean_nnz."""
    if w.mean_nnz >= n_neurons:
        raise ValueError(f"mean_nnz {w.mean_nnz:g} does not fit {n_neurons} neurons")
    p_F = torch.exp(w.sigma * torch.randn(n_neurons, generator=gen, device=gen.device))
    p_F[torch.rand(n_neurons, generator=gen, device=gen.device) < w.dead] = 0
    p_F = (p_F * (w.mean_nnz / p_F.sum())).clamp(max=_MAX_PROBABILITY).double()
    t_F = math.sqrt(2) * torch.erfinv(1 - 2 * p_F)
    return t_F.clamp(max=_DEAD_THRESHOLD).float()


def _fit_shift(pre_MF: Tensor, t_F: Tensor, mean_nnz: float) -> float:
    """The shift of all thresholds at which the rows of ``pre_MF`` average ``mean_nnz`` positives."""
    excess_MF = pre_MF - t_F
    low, high = -2 * _DEAD_THRESHOLD, 2 * _DEAD_THRESHOLD
    for _ in range(40):
        shift = (low + high) / 2
        too_many = (excess_MF > shift).sum().item() > mean_nnz * len(excess_MF)
        low, high = (shift, high) if too_many else (low, shift)
    return shift


def _without(direction_D: Tensor, a: Tensor) -> Tensor:
    return a - torch.outer(a @ direction_D, direction_D)


def _tokens(w: Workload, m_D: Tensor, centres_CD: Tensor, seed: int) -> Tensor:
    """One block of token parts z, which have no component along m."""
    gen = torch.Generator(m_D.device).manual_seed(seed)
    z = torch.randn(_TOKEN_BLOCK, len(m_D), generator=gen, device=gen.device)
    if w.rho:
        weight = 1 / torch.arange(1, _CENTRES + 1, dtype=torch.float64, device=gen.device)
        centre = torch.multinomial(weight, _TOKEN_BLOCK, replacement=True, generator=gen)
        z = math.sqrt(w.rho) * centres_CD[centre] + math.sqrt(1 - w.rho) * z
    return _without(m_D, z) * torch.exp(w.tok_sigma * torch.randn(_TOKEN_BLOCK, 1, generator=gen, device=gen.device))


def make(
    workload: Workload | str,
    M: int,
    D: int = 2048,
    F: int = 5632,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> FFNInputs:
    """The inputs of ``workload`` for M tokens. The same arguments give the same numbers on a device."""
    w = get_workload(workload) if isinstance(workload, str) else workload
    if M < 1 or D < 2 or F < 1:
        raise ValueError(f"expected M >= 1, D >= 2, F >= 1, got M={M}, D={D}, F={F}")
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=gen.device)

    m_D = torch.nn.functional.normalize(normal(D), dim=0)
    G_FD = _without(m_D, normal(F, D) / math.sqrt(D))
    t_F = _firing_thresholds(w, F, gen)
    w_up, w_down = normal(F, D) / math.sqrt(D), normal(D, F) / math.sqrt(F)
    centres_CD = normal(_CENTRES, D)

    # Each block of tokens has its own seed, so that neither tokens nor weights depend on M.
    n_blocks = -(-M // _TOKEN_BLOCK)
    z = torch.cat([_tokens(w, m_D, centres_CD, seed + (b + 1) * _TOKEN_BLOCK) for b in range(n_blocks)])
    shift = _fit_shift(z[:_TOKEN_BLOCK] @ G_FD.T, t_F, w.mean_nnz)

    s = math.sqrt(D) / 2
    tensors = {
        "x": z[:M] + s * m_D,
        "w_gate": G_FD - torch.outer((t_F + shift) / s, m_D),
        "w_up": w_up,
        "w_down": w_down,
    }
    return FFNInputs(**{name: t.to(dtype).contiguous() for name, t in tensors.items()})


@torch.no_grad()
def write_ffns_(model: Any, inputs: FFNInputs) -> None:
    """Give every FFN of a Llama-like model the workload's weights."""
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.copy_(inputs.w_gate)
        layer.mlp.up_proj.weight.copy_(inputs.w_up)
        layer.mlp.down_proj.weight.copy_(inputs.w_down)


def llama_config(recipe: Recipe, length: int) -> LlamaConfig:
    """A dense Llama with ReLU of the recipe's shape, for sequences of ``length`` tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=max(length, recipe.context),
        hidden_act="relu",
    )


def random_llama(recipe: Recipe, length: int, device: torch.device) -> Any:
    """A model of ``llama_config``, as one would run it there: in bfloat16 on a GPU, elsewhere in float32."""
    from transformers import LlamaForCausalLM

    with device:
        made: Any = LlamaForCausalLM(llama_config(recipe, length))
    return made.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
