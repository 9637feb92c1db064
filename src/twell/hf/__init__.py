"""Sparse models for transformers: configurations and causal LMs, registered with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from twell.hf.configs import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.hf.models import (
    LlamaSparseReluForCausalLM,
    LlamaSparseReluModel,
    Qwen2SparseReluForCausalLM,
    Qwen2SparseReluModel,
    SparseCausalLMOutput,
)

for _config, _base, _model in (
    (LlamaSparseReluConfig, LlamaSparseReluModel, LlamaSparseReluForCausalLM),
    (Qwen2SparseReluConfig, Qwen2SparseReluModel, Qwen2SparseReluForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)

__all__ = [
    "LlamaSparseReluConfig",
    "LlamaSparseReluForCausalLM",
    "LlamaSparseReluModel",
    "Qwen2SparseReluConfig",
    "Qwen2SparseReluForCausalLM",
    "Qwen2SparseReluModel",
    "SparseCausalLMOutput",
]
