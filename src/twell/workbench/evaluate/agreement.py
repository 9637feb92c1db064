"""Do a dense and a sparse model predict the same tokens, and where they differ, is it a tie?

Dense and sparse round differently, so they may predict different tokens where two logits are about equal. After the
same tokens,

    moved = (dense[a] - dense[b]) + (sparse[b] - sparse[a])       a: dense's token, b: sparse's; both terms >= 0

measures how far the two logits changed places. Up to a few roundings of the largest logit that is a tie; beyond them
the models differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from twell.progress import Progress, silent
from twell.workbench.evaluate.predictions import NAN, Query, logits_of

# How many roundings of the largest logit two logits may move and still be a tie. The most seen on a CPU, over any two
# of 8192 logits and models with 4 to 28 layers: 36 in float32, where sums round, 5.1 in bfloat16 and 4.7 in float16.
_ROUNDINGS = {torch.float64: 256, torch.float32: 256, torch.bfloat16: 16, torch.float16: 16}


def rounding_bound(largest: float, dtype: torch.dtype) -> float:
    """How far two logits may move by rounding, given the largest logit."""
    return _ROUNDINGS[dtype] * torch.finfo(dtype).eps * largest


class Parting(NamedTuple):
    """A place where the models predict different tokens after the same ones, and how far their logits differ."""

    prompt: int  # or the window of a text
    position: int  # among the new tokens, or the tokens of the window
    dense_token: int
    sparse_token: int
    dense_margin: float  # logit of dense's own token minus that of sparse's
    sparse_margin: float
    bound: float

    @property
    def moved(self) -> float:
        return self.dense_margin + self.sparse_margin

    @property
    def is_tie(self) -> bool:
        return self.moved <= self.bound  # False for NaN

    @property
    def verdict(self) -> str:
        return "a tie within rounding" if self.is_tie else "a real difference"


class Agreement(NamedTuple):
    """How far the models agree on the most likely token at each place of a text."""

    tokens: int
    partings: list[Parting]  # the largest move first
    logits_difference: float  # the largest, over all logits
    largest_logit: float

    @property
    def real(self) -> int:
        """How many partings rounding does not explain."""
        return sum(not parting.is_tie for parting in self.partings)


@torch.no_grad()
def compare_predictions(
    dense: Any, sparse: Any, queries: Sequence[Query], *, batch_size: int, progress: Progress = silent
) -> Agreement:
    """Compare the most likely tokens at every place to be predicted; both models read the text itself."""
    partings: list[Parting] = []
    difference = largest = 0.0
    for first in range(0, len(queries), batch_size):
        batch = queries[first : first + batch_size]
        a, b = (logits_of(model, batch) for model in (dense, sparse))
        moved_most = float((a - b).abs().max())
        if math.isnan(moved_most):
            raise ValueError(NAN)
        difference, largest = max(difference, moved_most), max(largest, float(a.abs().max()))
        a_tokens, b_tokens = a.argmax(1), b.argmax(1)
        where = [(first + i, position) for i, query in enumerate(batch) for position in range(query.n)]
        for n in (a_tokens != b_tokens).nonzero()[:, 0].tolist():
            (window, position), i, j = where[n], int(a_tokens[n]), int(b_tokens[n])
            margins = float(a[n, i] - a[n, j]), float(b[n, j] - b[n, i])
            bound = rounding_bound(float(a[n].abs().max()), dense.dtype)
            partings.append(Parting(window, position, i, j, *margins, bound))
        progress(first + len(batch), len(queries))
    tokens = sum(query.n for query in queries)
    return Agreement(tokens, sorted(partings, key=lambda p: -p.moved), difference, largest)
