"""Registers the sparse model types with transformers without importing it, so that ``import twell`` stays cheap.

``AutoConfig`` receives two placeholders when its module is imported, by any code. A placeholder that is used imports
``twell.hf``, which replaces it with the real configurations and models. (Registering the real classes at once would
import half of transformers in the middle of its own imports.)
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_AUTO_CONFIG_MODULE = "transformers.models.auto.configuration_auto"

# model type -> name of its configuration class in twell.hf
MODEL_TYPES = {"llama_sparse_relu": "LlamaSparseReluConfig", "qwen2_sparse_relu": "Qwen2SparseReluConfig"}


def register_with_transformers() -> None:
    """Called by ``import twell``."""
    if _AUTO_CONFIG_MODULE in sys.modules:
        _register_placeholders(sys.modules[_AUTO_CONFIG_MODULE])
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())


def _register_placeholders(auto: ModuleType) -> None:
    for model_type, name in MODEL_TYPES.items():
        if model_type not in auto.CONFIG_MAPPING:
            auto.AutoConfig.register(model_type, _placeholder(model_type, name))


def _placeholder(model_type: str, name: str) -> type:
    """A placeholder class whose instances are configurations of the real class."""

    def real() -> Any:
        return getattr(importlib.import_module("twell.hf"), name)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return real()(*args, **kwargs)

    def from_dict(cls: type, *args: Any, **kwargs: Any) -> Any:
        return real().from_dict(*args, **kwargs)

    return type(name, (), {"model_type": model_type, "__new__": new, "from_dict": classmethod(from_dict)})


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds no module itself: it wraps the loader of one module, to act after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _AUTO_CONFIG_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register_placeholders(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
