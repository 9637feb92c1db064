"""A tiny sparse model, and traces of given patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from twell.hf import LlamaSparseReluConfig
from twell.workbench.trace import Trace

VOCAB, LAYERS, F, D, CONTEXT = 300, 2, 96, 32, 64
TINY: dict[str, Any] = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind: it is a lazy dog. " * 12


def tiny_model(config: Any = None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or LlamaSparseReluConfig(**TINY)).double()


def named_trace_of(*patterns: np.ndarray) -> Trace:
    """A trace of bool [tokens, F] patterns, one a layer."""
    counts = [p.sum(1).astype(np.uint16) for p in patterns]
    neurons = [p.nonzero()[1].astype(np.uint16) for p in patterns]
    return Trace(counts, neurons, [p.shape[1] for p in patterns], [f"layers.{i}.mlp" for i in range(len(patterns))])
