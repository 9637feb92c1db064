"""``trace_bench.py model``: the forward pass of a whole model, with the activations of a trained model.

A model of random weights whose FFNs get a workload's weights and input, as in ``twell bench model``, dense FP8
included. The sparse model's FFNs run their gate on that input and everything else at the trace's positions (see
trace_ffn.py). The trace's layers are repeated through the depth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trace_ffn import plan_and_rest, replay
from twell import gpu
from twell.reference import Weights
from twell.train import recipes
from twell.workbench.bench import cases, fp8, model
from twell.workbench.bench.parts import Parts


class TracedFFN(nn.Module):
    """A layer that runs its gate on x and everything after it at recorded positions; for timing only."""

    def __init__(self, ffn: Any, recorded: Tensor, M: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([getattr(ffn, name).weight for name in ffn.projections])
        self.plan, active = plan_and_rest(recorded.to(self.weights[0].device), M, self.weights[0].shape[1])
        self.M, self.active = M, [active]  # until the first batch, of which the parts are made
        self.parts: Parts | None = None
        self._forward_pre_hooks.update(ffn._forward_pre_hooks)  # which give it the workload's tokens

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() != self.M or not self.plan.runs_split(self.M, captured=False):
            return gpu.forward(x.flatten(0, 1), Weights(*self.weights), "relu", None).view(x.shape)
        if self.parts is None:
            self.parts = Parts(x.flatten(0, 1), Weights(*self.weights), self.plan)
            replay(self.parts, self.active.pop())
        self.parts.lay_out()  # its result is not used: a layer that is not frozen does this in every call
        self.parts.cold_gate(self.parts.tiles.gate, self.parts.tiles.use_tma)
        return self.parts.after_gate().view(x.shape)


def traced(dense: Any, patterns: list[Tensor], shape: tuple[int, int], backend: str = "auto") -> model.Subject:
    """Overwrites the FFN weights of ``dense``. ``patterns``: bool [tokens, F] of each layer of a trace."""
    mean_active = max(1, round(sum(p.sum().item() / len(p) for p in patterns) / len(patterns)))
    subject = model.synthetic(dense, f"skew{mean_active}", shape, backend=backend)
    subject.models.pop(fp8.SPARSE, None)  # it would run on the workload's activations
    for i, layer in enumerate(subject.sparse.model.layers):
        layer.mlp = TracedFFN(layer.mlp, patterns[i % len(patterns)], shape[0] * shape[1])
    plans = tuple(layer.mlp.plan for layer in subject.sparse.model.layers[: len(patterns)])
    return subject._replace(facts={"workload": "trace"}, comparable=False, plans=plans)


def measure(
    patterns: list[Tensor], preset: str, shape: tuple[int, int], device: torch.device, **how: Any
) -> dict[str, Any]:
    """A JSON-ready row. ``how``: see ``twell.workbench.bench.model.measure``."""
    recipe = recipes.preset(preset)
    dense = cases.random_llama(recipe, shape[1], device)
    ids = torch.randint(recipe.vocab_size, shape, device=device)
    return {**model.measure(traced(dense, patterns, shape), ids, **how), "preset": preset}
