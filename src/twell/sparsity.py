"""Sparsity in training: the L1 coefficient, firing clocks, fresh starts for dead neurons, and plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twell.host import HostCopy
from twell.nn import SparseFFNBase
from twell.ops import Stats
from twell.ops.backends import choose_backend
from twell.plan import Plan

# L1Steering: chosen by runs of `tiny` and simulated runs, in which L1 acts within 6 to 200 steps and doubling l1 leaves
# 0.33 to 0.7 of the active neurons.
_GAIN, _INTEGRAL, _REACHED = 1.5, 0.06, 0.24
_INTEGRAL_STEPS = (10.0, 20.0)  # least and most: L1 acts within some 100 steps, however long the run
_START, _LEAST, _MOST = 1e-2, 1e-5, 1.0  # nats of the L1 term
_LOOKS, _CHANGED = 5, 0.1  # Planner: checks of the layers per planning interval, and the relative change that counts
_SILENT = 1e-3  # least active neurons relative to the target, and least L1 sum: smaller values count as this


def l1_warmup(step: int, start: int, end: int) -> float:
    """The factor on the L1 coefficient: 0 until ``start``, then linearly up to 1 at ``end``.

    >>> [l1_warmup(step, 10, 20) for step in (0, 10, 15, 20, 99)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    return 1.0 if step >= end else max(0.0, (step - start) / max(1, end - start))


@torch.no_grad()
def sum_over_processes(stats: Sequence[Stats]) -> list[Stats]:
    """The statistics of all layers summed over processes, in two messages. Every process must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return [Stats(s.l1_sum.detach(), s.counts, s.tokens) for s in stats]
    l1_sums = torch.stack([s.l1_sum.detach() for s in stats])
    integers = torch.cat([torch.cat([s.counts.long(), s.tokens.long().reshape(1)]) for s in stats])
    dist.all_reduce(l1_sums)
    dist.all_reduce(integers)
    layers = integers.split([len(s.counts) + 1 for s in stats])
    return [Stats(l1, layer[:-1], layer[-1]) for l1, layer in zip(l1_sums, layers, strict=True)]


def advance_clock(clock: Tensor, stats: Stats) -> Tensor:
    """A firing clock, int64 [F]: the tokens since each neuron of a layer last fired, after one more step.

    ``stats`` are of all processes: see ``sum_over_processes``.

    >>> clock = torch.zeros(3, dtype=torch.int64)
    >>> for counts, tokens in (([2, 0, 1], 10), ([1, 0, 0], 5)):
    ...     clock = advance_clock(clock, Stats(torch.tensor(0.0), torch.tensor(counts), torch.tensor(tokens)))
    >>> clock.tolist()
    [0, 15, 5]
    """
    return torch.where(stats.counts > 0, 0, clock.to(stats.counts.device) + stats.tokens)


class L1Steering:
    """Steers the L1 coefficient so that a token fires ``target`` neurons, in the mean over layers.

    After every optimiser step call ``advance`` with the step's statistics (of all processes); ``l1`` is the coefficient
    for the next step. With a = active neurons of a token and e = log(a / target) - reference, each step

        log l1 += _GAIN * (change of e + e / integral)              integral: 6 % of the steps, 10 to 20

    The reference goes from the first log(a / target) to 0, along a cosine, by a quarter of the ``steps``; loaded into
    one of more steps, it goes on from where it was. So L1 rises while the model learns: ``tiny`` ends 1 to 5 % below
    the cross-entropy of a constant l1 at equal sparsity. ``l1``: the coefficient to start from, that of a model trained
    before; without one the L1 term starts at 0.01 nats. It stays below 1.

    A step's statistics go to the host and act one step later. So l1 does not depend on timing, and the host waits only
    for work queued a whole step before. Save ``state_dict()`` in the checkpoint.

    >>> steering = L1Steering(target=5, steps=300)
    >>> for active in (256, 200, 150):  # of 512 neurons, of one layer
    ...     steering.advance([Stats(torch.tensor(20.0), torch.tensor([active]), torch.tensor(1))])
    ...     print(f"{steering.l1:.2g}")
    0
    0.0005
    0.00034
    """

    def __init__(self, target: float, steps: int, l1: float = 0.0) -> None:
        if not 0 < target < math.inf:
            raise ValueError(f"L1Steering: target must be a number of neurons above 0, got {target}")
        if not steps >= 1 or steps % 1:
            raise ValueError(f"L1Steering: steps must be a whole number of at least 1, got {steps}")
        self.target, self.steps, self.l1 = target, steps, l1
        least, most = _INTEGRAL_STEPS
        self._integral = min(max(least, _INTEGRAL * steps), most)  # steps after which a constant error has acted twice
        self._ramp = 0.0  # how much of the reference's way is done, up to 1
        self._first: list[float] = []  # log(a / target) and the L1 sum of a token, in the first step
        self._error = 0.0  # e of the last step
        self._sent: HostCopy | None = None

    @torch.no_grad()
    def advance(self, stats: Sequence[Stats]) -> None:
        """Add one step's statistics; set l1 by those of the step before."""
        if not stats:
            raise ValueError("L1Steering: no statistics of a layer: call the modules with return_stats=True")
        if self._sent is not None:
            self._steer(self._sent.value())
        self._sent = HostCopy(
            torch.stack([t.sum().double() for s in stats for t in (s.counts, s.l1_sum, s.tokens)]).reshape(-1, 3)
        )

    def _steer(self, sums: Tensor) -> None:
        active, l1_sum = (sums[:, :2] / sums[:, 2:]).mean(0).tolist()
        if not (math.isfinite(active) and math.isfinite(l1_sum)):  # no tokens, or a run about to end with an error
            return
        x, l1_sum = math.log(max(active / self.target, _SILENT)), max(l1_sum, _SILENT)
        if not self._first:
            self._first, self.l1 = [x, l1_sum], min(self.l1 or _START / l1_sum, _MOST / l1_sum)
            return
        self._ramp = min(1.0, self._ramp + 1 / (_REACHED * self.steps))
        reference = self._first[0] * (1 + math.cos(math.pi * self._ramp)) / 2
        error = x - reference
        change = _GAIN * (error - self._error + error / self._integral)
        least, most = _LEAST / self._first[1], _MOST / l1_sum
        self.l1, self._error = min(max(self.l1 * math.exp(min(change, 50.0)), least), most), error

    def state_dict(self) -> dict[str, Any]:
        sent = None if self._sent is None else self._sent.value().clone()
        return {"l1": self.l1, "ramp": self._ramp, "first": self._first, "error": self._error, "sent": sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.l1, self._ramp, self._first, self._error = (state[key] for key in ("l1", "ramp", "first", "error"))
        self._sent = None if state["sent"] is None else HostCopy(state["sent"])


class Planner:
    """Moves layers between the dense path and the sparse kernels while they train, by how often their neurons fired.

    After every optimiser step call ``advance`` with the step's statistics (of all processes). Every ``every`` steps all
    layers are planned, by the counts since the last check. Five times as often, layers are planned whose active neurons
    have changed by more than a tenth since their plan, so that a layer becomes sparse as soon as that pays.
    Counts go to the host and act one step later. So plans do not depend on timing, and the host waits only for work
    queued a whole step before.

    Layers start densely. Without kernels, nothing happens. Save ``state_dict()`` in the checkpoint.

    >>> from twell import GatedSparseFFN
    >>> planner = Planner([GatedSparseFFN(64, 256)], every=10)
    >>> planner.advance([Stats(torch.tensor(0.0), torch.zeros(256, dtype=torch.int32), torch.tensor(100))])
    >>> planner.hot_neurons()
    [None]
    """

    def __init__(self, ffns: Sequence[SparseFFNBase], every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"Planner: every must be at least 1, got {every}")
        self.ffns, self.every, self._between = list(ffns), every, every // _LOOKS or every
        self._means: list[float | None] = [None] * len(self.ffns)  # active neurons per token when a layer was planned
        self._sums: Tensor | None = None  # each layer's counts and tokens since the last copy
        self._steps = 0
        self._sent: HostCopy | None = None
        for ffn in self.ffns:
            ffn.set_plan(None)

    @torch.no_grad()
    def advance(self, stats: Sequence[Stats]) -> None:
        """Add one step's statistics; set plans if it is time."""
        if not self.ffns or not all(_has_kernels(ffn) for ffn in self.ffns):
            return
        if self._sent is not None:
            self._set_plans(self._sent.value())
            self._sent = None
        sums = torch.cat([t.long().reshape(-1) for s in stats for t in (s.counts, s.tokens)])
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums
        self._steps += 1
        if self._steps % self._between == 0 or self._steps % self.every == 0:
            self._sent, self._sums = HostCopy(self._sums), None

    def _set_plans(self, sums: Tensor) -> None:
        all_of_them = self._steps % self.every == 0
        rows = sums.split([len(ffn.neuron_counts) + 1 for ffn in self.ffns])
        for i, (ffn, row) in enumerate(zip(self.ffns, rows, strict=True)):
            tokens = int(row[-1])
            mean, before = int(row[:-1].sum()) / max(1, tokens), self._means[i]
            if tokens and (all_of_them or before is None or abs(mean - before) > _CHANGED * before):
                self._means[i] = mean
                plan = ffn.plan_from_counts(row[:-1], tokens, training=True)
                if plan.is_dense:
                    ffn.set_plan(None)

    def hot_neurons(self) -> list[int | None]:
        """For each layer the number of hot neurons; None while it runs densely."""
        return [len(ffn.plan.hot) if ffn.plan is not None and _has_kernels(ffn) else None for ffn in self.ffns]

    def state_dict(self) -> dict[str, Any]:
        return {
            "plans": [None if ffn.plan is None else ffn.plan.state_dict() for ffn in self.ffns],
            "sums": None if self._sums is None else self._sums.cpu(),
            "means": list(self._means),
            "steps": self._steps,
            "sent": None if self._sent is None else self._sent.value().clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for ffn, plan in zip(self.ffns, state["plans"], strict=True):
            ffn.set_plan(None if plan is None else Plan.from_state_dict(plan))
        self._means, self._sums, self._steps = state["means"], state["sums"], state["steps"]
        self._sent = None if state["sent"] is None else HostCopy(state["sent"])


def _has_kernels(ffn: SparseFFNBase) -> bool:
    return choose_backend(ffn.backend, ffn.neuron_counts.device) == "triton"


@torch.no_grad()
def restart_neurons_(
    ffn: SparseFFNBase, neurons: Tensor, *, std: float, seed: int, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Give the gate rows of ``neurons`` (bool [F]) fresh normal weights and forget the optimiser's state for them.

    Only the gate changes; the neuron's other weights stay. The numbers depend on ``seed`` alone: the same seed gives
    the same weights on every process.
    """
    gate = getattr(ffn, ffn.projections[0])
    if neurons.dtype != torch.bool or neurons.shape != (gate.out_features,):
        raise ValueError(
            f"restart_neurons_: neurons must be bool [{gate.out_features}], got {neurons.dtype} {tuple(neurons.shape)}"
        )
    # Drawn for all neurons on the CPU, so that a neuron's weights do not depend on which others are restarted.
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randn(gate.weight.shape, generator=generator) * std
    for parameter, value in ((gate.weight, fresh), (gate.bias, torch.zeros(gate.out_features))):
        if parameter is None:
            continue
        chosen = _laid_out_as(parameter, neurons.reshape(-1, *[1] * (value.dim() - 1)).expand(value.shape))
        parameter.copy_(torch.where(chosen, _laid_out_as(parameter, value.to(parameter.dtype)), parameter))
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for entry in state.values():
            if isinstance(entry, Tensor) and entry.shape == parameter.shape:
                entry.copy_(torch.where(chosen, torch.zeros_like(entry), entry))


def _laid_out_as(parameter: Tensor, value: Tensor) -> Any:
    """``value`` (whole on every process) on the parameter's device, and sharded as the parameter is (FSDP2)."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None)
