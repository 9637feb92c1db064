"""FP8 weights, evaluated: what the sparse kernels compute, in every layer and at any number of tokens.

A plan lets them run where that pays, which for narrow layers and small batches it does not. Quality is asked of them,
not of what is run in their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.fp8 import Fp8Linear
from twell.nn import sparse_ffns
from twell.plan import choose_plan, costs_for


class Fired:
    """A forward hook of a gate projection: how often each neuron fires."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # int64 [F]
        self.tokens = 0

    def __call__(self, gate: nn.Module, args: tuple[Any, ...], z: Tensor) -> None:
        active = (torch.relu(z) != 0).flatten(0, -2)
        counts = active.sum(0)
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += len(active)


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[list[Fired]]:
    """Of a sparse model's FFNs in their order, as long as projections are called."""
    fired: list[Fired] = []
    with contextlib.ExitStack() as hooks:
        for _, ffn in sparse_ffns(model):
            fired.append(Fired())
            gate: Any = getattr(ffn, ffn.projections[0])
            hooks.enter_context(gate.register_forward_hook(fired[-1]))
        yield fired


def plan_all_(model: nn.Module, fired: Sequence[Fired]) -> None:
    """Plans by which FP8 layers run sparsely at any number of tokens; densely only where too many neurons fire."""
    for (_, ffn), of in zip(sparse_ffns(model), fired, strict=True):
        gate: Any = getattr(ffn, ffn.projections[0])
        if not isinstance(gate, Fp8Linear) or of.counts is None:
            continue
        costs = costs_for(gate.weight.device, fp8=True)._replace(gate=0.0, token=0.0, hot=0.0, batch=0.0)
        is_gated = len(ffn.projections) == 3
        plan = choose_plan(of.counts, of.tokens, costs, width=gate.in_features, gated=is_gated)
        ffn.set_plan(dataclasses.replace(plan, min_tokens=1, min_tokens_captured=1, tail=None))
