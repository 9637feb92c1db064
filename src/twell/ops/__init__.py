"""``twell.gated_ffn`` and ``twell.ffn`` (functional.py), their registration with PyTorch (registered.py), and the
choice of a backend (backends.py)."""

from twell.ops.functional import DTYPES, Stats, ffn, gated_ffn

__all__ = ["DTYPES", "Stats", "ffn", "gated_ffn"]
