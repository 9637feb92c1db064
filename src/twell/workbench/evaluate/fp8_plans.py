"""For ``twell eval --fp8``: plans with which FP8 layers run sparsely at any number of tokens.

Normal plans run narrow layers and small batches densely. An evaluation of the sparse kernels needs them to run
everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.fp8 import Fp8Linear
from twell.hf.classify import projection_names
from twell.nn import SparseFFNBase, sparse_ffns
from twell.plan import choose_plan, costs_for


class Fired:
    """Forward hook on a gate projection that counts how often each neuron fires."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # int64 [F]
        self.tokens = 0

    def __call__(self, gate: nn.Module, args: tuple[Any, ...], z: Tensor) -> None:
        active = (torch.relu(z) != 0).flatten(0, -2)
        counts = active.sum(0)
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += len(active)


@contextlib.contextmanager
def counting(model: nn.Module, twin: nn.Module) -> Iterator[list[Fired]]:
    """Counts for each sparse FFN of ``model``, in their order, taken while its dense twin runs."""
    fired: list[Fired] = []
    with contextlib.ExitStack() as hooks:
        for name, _ in sparse_ffns(model):
            fired.append(Fired())
            block: Any = twin.get_submodule(name)
            names = block.projections if isinstance(block, SparseFFNBase) else projection_names(block)
            hooks.enter_context(getattr(block, names[0]).register_forward_hook(fired[-1]))
        yield fired


def plan_all_(model: nn.Module, fired: Sequence[Fired]) -> None:
    """Set plans with which FP8 layers run sparsely at any number of tokens, unless too many neurons fire."""
    for (_, ffn), of in zip(sparse_ffns(model), fired, strict=True):
        gate: Any = getattr(ffn, ffn.projections[0])
        if not isinstance(gate, Fp8Linear) or of.counts is None:
            continue
        costs = costs_for(gate.weight.device, fp8=True)
        costs = costs._replace(gate=0.01, token=0.0, hot=0.0, batch=0.0)  # gate > 0: in some layers nothing fires
        is_gated = len(ffn.projections) == 3
        plan = choose_plan(of.counts, of.tokens, costs, width=gate.in_features, gated=is_gated)
        ffn.set_plan(dataclasses.replace(plan, min_tokens=1, min_tokens_captured=1, tail=None))
