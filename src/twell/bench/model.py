"""``twell bench model``: the forward pass of a whole Hugging Face model, dense against sparse.

A model of random weights has no sparse activations, so every FFN gets the weights of a workload and, by a hook, its
input: dense and sparse models alike. With a trace, the FFNs of the sparse model run their gate on that input and
everything else on the trace's positions (see ``traced.py``), the trace's layers repeated through the depth.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.bench import cases, ffn, timing
from twell.hf.convert import sparsify_
from twell.nn import SparseFFNBase
from twell.reference import Weights


@torch.inference_mode()
def measure(
    model: Any,
    workload: str,
    *,
    batch: int,
    length: int,
    patterns: Sequence[Tensor] | None = None,
    compiled: bool = False,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """A JSON-ready row. ``model``: a dense Llama-like model with ReLU; its FFN weights are overwritten.

    ``patterns``: bool [tokens, F] of the layers of a trace.
    """
    device, dtype, config = model.device, model.dtype, model.config
    D, F, tokens = config.hidden_size, config.intermediate_size, batch * length
    with torch.inference_mode(False), torch.no_grad():
        inputs = cases.make(workload, tokens + ffn.PLAN_TOKENS, D, F, dtype=dtype, device=device)
        blocks = [layer.mlp for layer in model.model.layers]
        for block in blocks:
            block.gate_proj.weight.copy_(inputs.w_gate)
            block.up_proj.weight.copy_(inputs.w_up)
            block.down_proj.weight.copy_(inputs.w_down)
        x = inputs.x[:tokens].view(batch, length, D)
        sparse_model = copy.deepcopy(model)
        sparsify_(sparse_model)
    fired = (torch.relu(inputs.x[tokens:] @ inputs.w_gate.T) != 0).sum(0)
    plans = []
    for i, layer in enumerate(sparse_model.model.layers):
        assert isinstance(layer.mlp, SparseFFNBase)
        layer.mlp.backend = "triton"
        if patterns is None:
            plans.append(layer.mlp.plan_from_counts(fired, ffn.PLAN_TOKENS))
        else:
            layer.mlp = _TracedFFN.of(layer.mlp, x.flatten(0, 1), patterns, i)
            plans.append(layer.mlp.plan)
    ids = torch.randint(config.vocab_size, (batch, length), device=device)
    runs: dict[str, Callable[[], Any]] = {}
    for name, each in (("dense", model), ("sparse", sparse_model)):
        for layer in each.model.layers:
            layer.mlp.register_forward_pre_hook(lambda _, args: (x, *args[1:]))
            if compiled:
                layer.compile(dynamic=False)  # a layer at a time: they all share what is compiled once
        runs[name] = functools.partial(_logits, each, ids)
    error = None
    if patterns is None:
        dense, sparse = (runs[name]()[:, -1] for name in ("dense", "sparse"))
        error = _disagreement(dense, sparse)
    times = timing.compare(runs, seconds=seconds, warmups=2, device=device)
    return {
        "bench": "model",
        "workload": workload if patterns is None else "trace",
        "layers": len(blocks),
        "D": D,
        "F": F,
        "batch": batch,
        "length": length,
        "compiled": compiled,
        "dtype": str(dtype).removeprefix("torch."),
        **{f"{name}_ms": spread._asdict() for name, spread in times.items()},
        "tokens_per_ms": {name: round(tokens / spread.p50, 1) for name, spread in times.items()},
        "speedup": round(times["dense"].p50 / times["sparse"].p50, 3),
        "difference": error,
        "plans": [ffn.plan_facts(plan) for plan in plans[: len(patterns or [0])]],
        **timing.environment(device),
    }


def _logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def _disagreement(dense: Tensor, sparse: Tensor) -> float:
    """Relative difference of the logits; raises where the models do not compute the same."""
    difference = ffn.relative_error(sparse, dense.double())
    if not difference < 0.05:  # two bf16 models of the same weights differ by about 0.01 after 28 layers
        raise ffn.WrongResult(f"the sparse model's logits differ from the dense model's by {difference:.2e}")
    return float(f"{difference:.3g}")


class _TracedFFN(nn.Module):
    """A layer that runs its gate on x and everything after it on recorded positions: for timing alone."""

    def __init__(self, weights: nn.ParameterList, x: Tensor, active: Tensor) -> None:
        from twell.bench.parts import Parts  # needs triton
        from twell.bench.traced import plan_and_rest

        super().__init__()
        self.weights = weights
        self.plan, timed = plan_and_rest(active.to(x.device), *x.shape)
        self.parts = None
        if not self.plan.is_dense and self.plan.min_tokens <= len(x):
            self.parts = Parts(x, Weights(*weights), self.plan)
            self.parts.replay(timed)

    @classmethod
    def of(cls, layer: SparseFFNBase, x: Tensor, patterns: Sequence[Tensor], index: int) -> _TracedFFN:
        weights = nn.ParameterList([getattr(layer, name).weight for name in layer.projections])
        return cls(weights, x, patterns[index % len(patterns)])

    def forward(self, x: Tensor) -> Tensor:
        from twell import gpu

        if self.parts is None:
            return gpu.forward(x.flatten(0, 1), Weights(*self.weights), "relu", None).view(x.shape)
        self.parts.gate_into_nothing()
        return self.parts.after_gate().view(x.shape)
