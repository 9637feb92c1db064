"""``twell bench decode``: one step of generation by a whole model, dense against sparse.

A step is one more token for each sequence, with a static cache that holds ``context`` tokens; on a GPU the steps of
both models are replayed as CUDA graphs. As in ``model.py`` random weights have no sparse activations, so every FFN has
the weights of a workload and its input: here other tokens in every layer, so that a step has the workload's mean count.
The sparse model is frozen (``twell.freeze_``), as ``twell generate`` and ``twell serve`` have it.

On a GPU with FP8 the same with FP8 FFNs: dense ones as ``bench ffn`` has them, always compiled, and where there are
kernels for it the sparse model after ``twell.quantize_``. All else of these models stays as it is: where whole models
are compiled, all of them are compiled alike, with the options that FP8 weights alone need.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from twell import energy
from twell.hf.convert import sparsify_
from twell.nn import FreezeReport, SparseFFNBase, freeze_
from twell.nn.quantize import quantize_
from twell.ops import backends
from twell.plan import Plan
from twell.workbench.bench import cases, ffn, fp8, timing
from twell.workbench.bench.model import check_logits

_FP8_LOGITS = 0.3  # relative difference from those of 16 bits beyond which FP8 is broken
_FP8_APART = 0.1  # of logits by sparse and dense FP8, which rounds h: 2 to 3 % of an FFN's output


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
    in_fp8: bool | None = None,
) -> dict[str, Any]:
    """A JSON-ready row. ``model``: a dense Llama with ReLU, whose FFN weights are overwritten.

    ``graph`` and ``compiled``: how all models run. ``in_fp8``: also with FP8 FFNs; by default where that applies.
    """
    config, device = model.config, model.device
    D, F, n_layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    inputs = cases.make(workload, n_layers * batch + ffn.PLAN_TOKENS, D, F, dtype=model.dtype, device=device)
    tokens = inputs.x[: n_layers * batch].view(n_layers, batch, 1, D)
    fired = (torch.relu(inputs.x[n_layers * batch :] @ inputs.w_gate.T) != 0).sum(0)
    mean_active = (torch.relu(tokens @ inputs.w_gate.T) != 0).sum().item() / (n_layers * batch)
    cases.write_ffns_(model, inputs)
    ffn.forget_compiled(device)
    sparse, plan, frozen = _sparse(model, fired)
    models, how = {"dense": model, "sparse": sparse}, {}
    if fp8.applies(device, model.dtype, D, F) if in_fp8 is None else in_fp8:
        for name, (kind, given) in fp8.ways(batch).items():
            models[name], how[name] = fp8.in_model(model, kind), given
        if fp8.applies_sparsely(device, model.dtype):
            models[ffn.SPARSE_FP8], *_ = _sparse(model, fired, in_fp8=True)
    for each in models.values():
        for layer, x in zip(each.model.layers, tokens, strict=True):
            layer.mlp.register_forward_pre_hook(functools.partial(_replaced, x))
    if device.type == "cuda" and not compiled:
        for name, given in how.items():
            for layer in models[name].model.layers:
                layer.mlp.compile(fullgraph=True, dynamic=False, **given)
    options = {key: value for given in how.values() for key, value in given.items()}
    steps = {name: _Step(each, batch, context, options if compiled else None) for name, each in models.items()}
    runs: dict[str, Callable[[], Any]] = {name: step.run for name, step in steps.items()}
    outputs = {
        name: torch.cat([layer.mlp(x)[:, 0] for layer, x in zip(each.model.layers, tokens, strict=True)])
        for name, each in models.items()
        if name not in ("dense", "sparse")
    }
    errors, quantisation = ffn.check_fp8(tokens.flatten(0, 2), inputs, True, outputs)
    differences = _check({name: run() for name, run in runs.items()})

    def rewind() -> None:
        for step in steps.values():
            step.rewind()

    def check_again() -> None:
        rewind()
        _check({name: run().clone() for name, run in runs.items()})

    if graph:
        with ffn.as_if_captured(*models.values()):
            for step in steps.values():
                step.rewind()
                step.run()
        runs = {name: ffn.replayed([step.run], before=step.rewind) for name, step in steps.items()}
        check_again()
    times = timing.compare(runs, seconds=seconds, device=device, before=rewind)
    check_again()
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
        **ffn.over_fp8(times),
        **differences,
        **({"error": errors, "quantisation_error": quantisation} if errors else {}),
        "joules_per_token": {name: None if j is None else float(f"{j / batch:.4g}") for name, j in joules.items()},
        **({} if plan is None else {"plan": ffn.plan_facts(plan)}),
        **timing.environment(device),
    }


def _sparse(model: Any, fired: Tensor, *, in_fp8: bool = False) -> tuple[Any, Plan | None, FreezeReport]:
    """A sparse copy, planned by counts of other tokens than are timed, and frozen."""
    sparse, plan = copy.deepcopy(model), None
    sparsify_(sparse)
    if in_fp8:
        quantize_(sparse)
    for layer in sparse.model.layers:
        assert isinstance(layer.mlp, SparseFFNBase)
        if backends.choose_backend(layer.mlp.backend, model.device) == "triton":
            plan = layer.mlp.plan_from_counts(fired, ffn.PLAN_TOKENS)
    return sparse, plan, freeze_(sparse)


def _check(logits: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative differences of logits [batch, 1, V], as fields: sparse from dense, and likewise in FP8. Raises
    WrongResult where models do not compute the same."""
    fields = {"difference": check_logits(logits["dense"], logits["sparse"])}
    for name in logits.keys() - {"dense", "sparse"}:
        check_logits(logits["dense"], logits[name], name, _FP8_LOGITS)
    if ffn.SPARSE_FP8 in logits:
        found = logits["fp8"], logits[ffn.SPARSE_FP8]
        fields["difference_fp8"] = check_logits(*found, ffn.SPARSE_FP8, _FP8_APART)
    return fields


class _Step:
    """A model, a static cache filled with ``context`` tokens, and the token after them."""

    def __init__(self, model: Any, batch: int, context: int, how: Mapping[str, Any] | None = None) -> None:
        """``how``: options of torch.compile; None: the model is not compiled."""
        self.model, self.context, device = model, context, model.device
        self.cache = StaticCache(config=model.config, max_cache_len=context + 1)
        ids = torch.randint(
            model.config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0)
        ).to(device)
        model(ids[:, :context], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.call = model if how is None else torch.compile(model, dynamic=False, **how)
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
