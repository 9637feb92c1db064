"""The vLLM plugin: after ``pip install 'twell[vllm]'`` vLLM runs the sparse model types by itself. See docs/engines.md.

vLLM calls ``register`` in each of its processes, whatever model they run: nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURES = (
    "LlamaSparseReluForCausalLM",
    "Qwen2SparseReluForCausalLM",
    "SparseLlamaForCausalLM",  # the released checkpoints
)
TESTED = ("0.32",)  # minor versions


def register() -> None:
    """The entry point of ``vllm.general_plugins``. ``import twell`` has made the model types known to transformers."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, "twell.vllm:SparseForCausalLM")


def __getattr__(name: str) -> Any:
    """The model's class, when vLLM first needs it. Its module imports what other versions of vLLM may not have."""
    if name != "SparseForCausalLM":
        raise AttributeError(f"module 'twell.vllm' has no attribute {name!r}")
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in TESTED:
        raise ImportError(
            f"twell's plugin was tested with vLLM {', '.join(f'{version}.x' for version in TESTED)} and runs with no "
            f"other; this is {vllm.__version__}: pip install 'twell[vllm]' installs one that was tested"
        )
    from twell.vllm.model import SparseForCausalLM

    return SparseForCausalLM
