"""``twell bench decode``: one step of generation by a whole model, dense against sparse.

A step is one more token for each sequence, with a static cache that holds ``context`` tokens; on a GPU the steps of
both models are replayed as CUDA graphs. As in ``model.py`` random weights have no sparse activations, so every FFN has
the weights of a workload and its input: here other tokens in every layer, so that a step has the workload's mean count.
The sparse model is frozen (``twell.freeze_``), as ``twell generate`` and ``twell serve`` have it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from twell import backends
from twell.bench import cases, energy, ffn, timing
from twell.bench.model import check_logits
from twell.hf.convert import sparsify_
from twell.nn import SparseFFNBase, freeze_


@torch.no_grad()
def measure(
    model: Any,
    workload: str,
    batch: int,
    context: int,
    *,
    graph: bool,
    compiled: bool = False,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """A JSON-ready row. ``model``: a dense Llama with ReLU, whose FFN weights are overwritten.

    ``graph`` and ``compiled``: how both models run.
    """
    config, device = model.config, model.device
    D, F, n_layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    inputs = cases.make(workload, n_layers * batch + ffn.PLAN_TOKENS, D, F, dtype=model.dtype, device=device)
    tokens = inputs.x[: n_layers * batch].view(n_layers, batch, 1, D)
    fired = (torch.relu(inputs.x[n_layers * batch :] @ inputs.w_gate.T) != 0).sum(0)
    mean_active = (torch.relu(tokens @ inputs.w_gate.T) != 0).sum().item() / (n_layers * batch)
    cases.write_ffns_(model, inputs)
    sparse = copy.deepcopy(model)
    sparsify_(sparse)
    plan = None
    for layer in sparse.model.layers:
        assert isinstance(layer.mlp, SparseFFNBase)
        if backends.choose_backend(layer.mlp.backend, device) == "triton":
            plan = layer.mlp.plan_from_counts(fired, ffn.PLAN_TOKENS)
    frozen = freeze_(sparse)
    for each in (model, sparse):
        for layer, x in zip(each.model.layers, tokens, strict=True):
            layer.mlp.register_forward_pre_hook(functools.partial(_replaced, x))
    steps = {name: _Step(each, batch, context, compiled) for name, each in (("dense", model), ("sparse", sparse))}
    difference = check_logits(*(step.run()[:, -1] for step in steps.values()))
    runs: dict[str, Callable[[], Any]] = {name: step.run for name, step in steps.items()}
    if graph:
        with ffn.as_if_captured(sparse):
            steps["sparse"].rewind()
            steps["sparse"].run()
        runs = {name: ffn.replayed([step.run], before=step.rewind) for name, step in steps.items()}

    def rewind() -> None:
        for step in steps.values():
            step.rewind()

    times = timing.compare(runs, seconds=seconds, device=device, before=rewind)
    joules = {name: energy.joules(_rewinding(runs[name], steps[name]), device, min(seconds, 3.0)) for name in runs}
    return {
        "bench": "decode",
        "workload": workload,
        "layers": n_layers,
        "D": D,
        "F": F,
        "batch": batch,
        "context": context,
        "graph": graph,
        "compiled": compiled,
        "frozen": True,
        "frozen_bytes": frozen.bytes,
        "dtype": str(model.dtype).removeprefix("torch."),
        "mean_active": round(mean_active, 2),
        **{f"{name}_ms": spread._asdict() for name, spread in times.items()},
        "tokens_per_second": {name: round(1000 * batch / spread.p50, 1) for name, spread in times.items()},
        "speedup": round(times["dense"].p50 / times["sparse"].p50, 3),
        "difference": difference,
        "joules_per_token": {name: None if j is None else float(f"{j / batch:.4g}") for name, j in joules.items()},
        **({} if plan is None else {"plan": ffn.plan_facts(plan)}),
        **timing.environment(device),
    }


class _Step:
    """A model, a static cache filled with ``context`` tokens, and the token after them."""

    def __init__(self, model: Any, batch: int, context: int, compiled: bool = False) -> None:
        self.model, self.context, device = model, context, model.device
        self.cache = StaticCache(config=model.config, max_cache_len=context + 1)
        ids = torch.randint(
            model.config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0)
        ).to(device)
        model(ids[:, :context], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.call = torch.compile(model, dynamic=False) if compiled else model
        self.ids, self.position = ids[:, context:], torch.full((1, 1), context, device=device)

    def rewind(self) -> None:
        """The next step is the first one again."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.cumulative_length.fill_(self.context)

    def run(self) -> Tensor:
        return self.call(
            self.ids, past_key_values=self.cache, position_ids=self.position, use_cache=True, logits_to_keep=1
        ).logits


def _rewinding(run: Callable[[], Any], step: _Step) -> Callable[[], None]:
    def both() -> None:
        step.rewind()
        run()

    return both


def _replaced(x: Tensor, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layer's own token of each sequence, x [batch, 1, D], at every place."""
    return (x.expand(*args[0].shape), *args[1:])
