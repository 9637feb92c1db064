"""The vLLM plugin: after ``pip install 'twell[vllm]'`` vLLM runs the sparse model types by itself. See docs/engines.md.

vLLM calls ``register`` in each of its processes, whatever model they run: nothing heavy is imported here.
"""

from __future__ import annotations

ARCHITECTURES = (
    "LlamaSparseReluForCausalLM",
    "Qwen2SparseReluForCausalLM",
    "SparseLlamaForCausalLM",  # the released checkpoints
)


def register() -> None:
    """The entry point of ``vllm.general_plugins``. ``import twell`` has made the model types known to transformers."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, "twell.vllm.model:SparseForCausalLM")
