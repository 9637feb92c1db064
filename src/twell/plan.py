"""The plan of a layer: which neurons are hot, how many active neurons make a token heavy, or that it runs densely.

A plan follows from how often each neuron fires and from what things cost on a GPU. Costs are counted in units of one
element of a large GEMM: one token, one neuron, one projection. A gated FFN of F neurons costs 3 F a token densely. In
the three-part split a token pays

    hot neuron        3                      gate, up and down densely
    cold neuron       1 + p * gather         its gate, and two gathered rows whenever it fires (with frequency p)
    heavy token       C * (1 + 2 * heavy)    the C cold neurons densely, at the price of a GEMM over listed rows

so a neuron is hot where p > 2 / gather, and a token heavy where more than 2 * heavy * C / gather of its cold neurons
fire.
(A plain FFN has no up projection: 2, 1 + p * gather / 2, C * (1 + heavy).) A plan changes time, never a result.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor


class Costs(NamedTuple):
    """What a GPU takes, in elements of a large GEMM."""

    gather: float  # the two gathered rows of one active (token, neuron) pair
    heavy: float  # an element of a GEMM over listed rows
    token: float  # what a token costs the split besides: its bitmap row, its output once more


# From trials on an H200 (bf16, D 2048): GEMM 5.4 ps an element, tail 1.0 ns a pair.
_COSTS: dict[int, Costs] = {90: Costs(gather=190.0, heavy=1.4, token=350.0)}
_HOT_STEP = 128  # hot neurons fill whole tiles of the gate kernel
_MIN_GAIN = 1.05  # the split must promise this much over dense
_MIN_CAP = 16


def costs_for(device: torch.device) -> Costs:
    """Of the nearest older GPU that was measured, or else of the oldest."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    capability = 10 * major + minor
    older = [c for c in _COSTS if c <= capability]
    return _COSTS[max(older) if older else min(_COSTS)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One layer's plan. ``hot`` int64 [H], most frequent first; all F neurons where the layer runs densely."""

    n_neurons: int
    hot: Tensor
    cap: int
    predicted: float | None = None  # speedup over dense; not part of the encoded form

    def __post_init__(self) -> None:
        """A neuron that is hot twice, or not there, would silently change what the layer computes."""
        hot = self.hot.unique()
        inside = len(hot) == 0 or (int(hot[0]) >= 0 and int(hot[-1]) < self.n_neurons)
        if len(hot) != len(self.hot) or not inside or self.cap < 0:
            raise ValueError(
                f"a plan needs different hot neurons of 0 to {self.n_neurons - 1} and a cap of at least 0, got "
                f"{len(self.hot)} hot neurons, {len(hot)} of them different, and cap {self.cap}"
            )

    @property
    def is_dense(self) -> bool:
        return len(self.hot) == self.n_neurons

    def __repr__(self) -> str:
        if self.is_dense:
            return f"Plan(dense, {self.n_neurons} neurons)"
        predicted = "" if self.predicted is None else f", predicted {self.predicted:.2f}x"
        return f"Plan({len(self.hot)} of {self.n_neurons} neurons hot, tokens heavy above {self.cap}{predicted})"

    def encode(self) -> Tensor:
        """int32 [F + 2] on the CPU: H, cap, then the neurons, hot ones first. Operations take plans in this form: a
        tensor whose shape does not depend on the plan, so that a new plan compiles nothing anew."""
        cold = torch.ones(self.n_neurons, dtype=torch.bool)
        cold[self.hot] = False
        order = torch.cat([self.hot.cpu(), cold.nonzero()[:, 0]])
        return torch.cat([torch.tensor([len(self.hot), self.cap]), order]).int()

    @classmethod
    def decode(cls, encoded: Tensor) -> Plan:
        n_hot, cap = encoded[:2].tolist()
        if not 0 <= n_hot <= len(encoded) - 2:
            raise ValueError(f"the plan names {n_hot} hot neurons of {len(encoded) - 2}")
        return cls(n_neurons=len(encoded) - 2, hot=encoded[2 : 2 + n_hot].long(), cap=cap)


def dense_plan(n_neurons: int) -> Plan:
    return Plan(n_neurons=n_neurons, hot=torch.arange(n_neurons), cap=0, predicted=1.0)


def choose_plan(counts: Tensor, tokens: int, costs: Costs, *, gated: bool = True) -> Plan:
    """The plan for neurons that fired ``counts`` [F] times in ``tokens`` tokens.

    >>> counts = torch.tensor([900] * 128 + [3] * 1920)  # of 1000 tokens: some neurons fire nearly always, most hardly
    >>> plan = choose_plan(counts, 1000, Costs(gather=190.0, heavy=1.4, token=0.0))
    >>> len(plan.hot), plan.is_dense
    (128, False)
    >>> choose_plan(torch.full((2048,), 500), 1000, Costs(gather=190.0, heavy=1.4, token=0.0))
    Plan(dense, 2048 neurons)
    """
    F = len(counts)
    if tokens < 1:
        raise ValueError("a plan needs the counts of at least one token")
    frequency, order = (counts.double().cpu() / tokens).sort(descending=True, stable=True)
    projections, gather, heavy = (3, costs.gather, 2 * costs.heavy) if gated else (2, costs.gather / 2, costs.heavy)
    worth = int((frequency * gather > projections - 1).sum())
    n_hot = min(F, -(-worth // _HOT_STEP) * _HOT_STEP)
    n_cold = F - n_hot
    cost = projections * n_hot + n_cold + gather * float(frequency[n_hot:].sum()) + costs.token
    predicted = projections * F / cost
    if predicted < _MIN_GAIN:
        return dense_plan(F)
    cap = max(_MIN_CAP, int(heavy * n_cold / gather))
    return Plan(n_neurons=F, hot=order[:n_hot], cap=cap, predicted=predicted)
