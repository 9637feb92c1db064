"""Whether a layer's plan still suits its text.

A plan is made from counts of some text. Other text may have longer tails and more heavy tokens, until the split is
slower than dense. So one in EVERY eager calls of the split also counts both on the device, and the host reads the
numbers LAG calls later. (A host further ahead of the GPU waits; the GPU then still has LAG calls queued.) If less than
half of the promised gain is left, the layer looks at its next tokens as it did at its first, and plans anew. After each
new plan it looks half as often, so that two alternating kinds of text do not make it plan for ever.

Which call plans depends on the calls alone, not on time. Layers called by several threads keep their plans. Training
has a planner of its own (``sparsity.Planner``).
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from twell.host import HostCopy
from twell.plan.choose import gain_left
from twell.plan.costs import Costs
from twell.plan.plan import Plan

EVERY, LAG = 16, 4  # calls
_MOST_REPLANS = 16  # further new plans do not make it look less often


class Drift:
    """Watches one layer whose plan was made from counts. ``replans``: how often the layer has planned anew."""

    def __init__(self, plan: Plan, costs: Costs, *, gated: bool, replans: int = 0) -> None:
        self._plan, self._costs, self._gated = plan, costs, gated
        self._every = EVERY << min(replans, _MOST_REPLANS)
        self._calls = -1
        self._sent: HostCopy | None = None
        self._tokens = 0
        self._thread: int | None = None
        self._is_shared = False

    def room(self, device: torch.device) -> Tensor | None:
        """Where the next call counts its pairs and heavy tokens; None: it does not count."""
        thread = threading.get_ident()
        if self._thread != thread:
            self._is_shared, self._thread = self._thread is not None, thread
        self._calls += 1
        if self._is_shared or self._calls % self._every:
            return None
        return torch.zeros(2, dtype=torch.int32, device=device)

    def send(self, counted: Tensor, tokens: int) -> None:
        """Start the copy of what a call of so many tokens counted."""
        self._sent, self._tokens = HostCopy(counted), tokens

    def is_too_far(self) -> bool:
        """Whether to plan anew. Every call asks; the answer can be True in one of EVERY."""
        if self._is_shared or self._calls % self._every != LAG:
            return False
        sent, self._sent = self._sent, None
        if sent is None:
            return False
        pairs, heavy = sent.value().tolist()
        tokens = max(1, self._tokens)
        return gain_left(self._plan, self._costs, pairs / tokens, heavy / tokens, gated=self._gated) < 0.5
