"""twell: sparse-activation feed-forward layers, fast and exact.

>>> import twell
>>> twell.gated_ffn            # functional; twell.ffn without a gate  # doctest: +ELLIPSIS
<function gated_ffn at ...>
"""

from twell._version import __version__
from twell.formats import Hybrid, TwELL
from twell.nn import GatedSparseFFN, SparseFFN, freeze_, refresh_, restore_layout_, thaw_
from twell.nn.quantize import dequantize_, quantize_
from twell.ops import Stats, ffn, gated_ffn
from twell.plan import Plan
from twell.transformers_hook import register_with_transformers as _register_with_transformers


def __getattr__(name: str) -> object:
    """Functions that need transformers are imported when first used."""
    if name in ("desparsify_", "sparsify_"):
        from twell.hf import sparsify

        return getattr(sparsify, name)
    if name == "auto":
        from twell.hf.auto import auto

        return auto
    if name == "relufy_":
        from twell.hf.relufy import relufy_

        return relufy_
    raise AttributeError(f"module 'twell' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "GatedSparseFFN",
    "Hybrid",
    "Plan",
    "SparseFFN",
    "Stats",
    "TwELL",
    "__version__",
    "auto",
    "dequantize_",
    "desparsify_",
    "ffn",
    "freeze_",
    "gated_ffn",
    "quantize_",
    "refresh_",
    "relufy_",
    "restore_layout_",
    "sparsify_",
    "thaw_",
]

_register_with_transformers()
