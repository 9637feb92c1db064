"""Whether a layer's plan still suits its text.

A plan is made from counts of some text. Other text may have longer tails and heavy tokens, up to a forward that takes
longer than a dense one. So one of EVERY eager calls that run in three parts also counts both on the device. The numbers
are read LAG calls later, when they have long arrived: nothing waits. If less than half of what the plan promised is
left, the layer looks at its next tokens as it did at its first, and plans anew.

Which call plans depends on the calls alone, not on time. Training has a planner of its own (``sparsity.Planner``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.host import HostCopy
from twell.plan import Costs, Plan, gain_left

EVERY, LAG = 16, 4  # calls


class Drift:
    """Of a layer with a plan that was made from counts."""

    def __init__(self, plan: Plan, costs: Costs, *, gated: bool) -> None:
        self._plan, self._costs, self._gated = plan, costs, gated
        self._calls = -1
        self._sent: HostCopy | None = None
        self._tokens = 0

    def room(self, device: torch.device) -> Tensor | None:
        """Of the next call: where it counts pairs and heavy tokens; None: it does not."""
        self._calls += 1
        if self._calls % EVERY:
            return None
        return torch.zeros(2, dtype=torch.int32, device=device)

    def send(self, counted: Tensor, tokens: int) -> None:
        """What a call of so many tokens has counted."""
        self._sent, self._tokens = HostCopy(counted), tokens

    def is_too_far(self) -> bool:
        """Whether it is time to plan anew. Asked in every call, answered in one of EVERY."""
        if self._sent is None or self._calls % EVERY != LAG:
            return False
        pairs, heavy = self._sent.value().tolist()
        self._sent = None
        tokens = max(1, self._tokens)
        return gain_left(self._plan, self._costs, pairs / tokens, heavy / tokens, gated=self._gated) < 0.5
