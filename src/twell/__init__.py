"""twell: sparse-activation feed-forward layers, fast and exact.

>>> import twell
>>> twell.gated_ffn            # functional; twell.ffn without a gate  # doctest: +ELLIPSIS
<function gated_ffn at ...>
"""

from twell._version import __version__
from twell.formats import Hybrid, TwELL
from twell.nn import GatedSparseFFN, SparseFFN
from twell.ops import Stats, ffn, gated_ffn

__all__ = ["GatedSparseFFN", "Hybrid", "SparseFFN", "Stats", "TwELL", "__version__", "ffn", "gated_ffn"]
