"""The two sparse formats, ``TwELL`` (twell.py) and ``Hybrid`` (hybrid.py): packing, unpacking and invariants.

Both hold a matrix [M, F] of activations, M tokens by F neurons, of which few are *active*: not equal to zero, NaN
included. Counts are always the true counts. A row that does not fit raises (``overflow="error"``) or is marked
(``overflow="mark"``), to be handled another way.

TwELL (tile-wise ELLPACK) cuts the F columns into tiles of T. A row keeps a short list per tile, so that a
matrix product which computes one tile at a time can write the lists itself. Hybrid keeps rows of at most
``cap`` entries in one narrow list each, and the few longer rows densely in a backup.

>>> g = torch.tensor([[0.0, 5.0, 0.0, 0.0, 6.0, 7.0], [0.0, 0.0, 0.0, 8.0, 0.0, 0.0]])
>>> t = TwELL.pack(g, tile=3, slots=2)
>>> t
TwELL(2 x 6, tile=3, slots=2, float32, plain, 4 active, 52 bytes)
>>> t.counts.tolist()
[[1, 2], [0, 1]]
>>> t.columns.tolist()
[[[1, 0], [4, 5]], [[0, 0], [3, 0]]]
>>> torch.equal(t.unpack(), g)
True

Column indices are stored in 16 bits. torch has few operations on uint16, so the bits live in an int16
tensor (TwELL's plain form, Hybrid) or below the value (TwELL's words); ``.columns`` gives them as int64.
"""

import torch  # noqa: F401  # for the doctest

from twell.formats.common import Overflow
from twell.formats.hybrid import Hybrid
from twell.formats.twell import SLOTS, TILE, TwELL, n_tiles, word_dtype

__all__ = ["SLOTS", "TILE", "Hybrid", "Overflow", "TwELL", "n_tiles", "word_dtype"]
