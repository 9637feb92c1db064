"""``twell bench decode``: one step of generation by a whole model, dense against sparse.

A step is one more token for each sequence, with a static cache that holds ``context`` tokens. On a GPU the steps of
both models are replayed as CUDA graphs. As in ``model.py`` random weights have no sparse activations, so every FFN has
the weights of a workload and its input: here each layer has its own tokens, so that a step has the workload's mean
count. The sparse model is frozen (``twell.freeze_``), as ``twell generate`` and ``twell serve`` have it.

Models with FP8 FFNs are those of ``model.py``. Where whole models are compiled, all are compiled with the options that
FP8 weights alone need.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from twell import energy
from twell.hf.sparsify import sparsify_
from twell.nn import FreezeReport, freeze_, sparse_ffns
from twell.workbench.bench import cases, ffn, fp8, timing
from twell.workbench.bench.graphs import as_if_captured, replayed
from twell.workbench.bench.model import check_ffns, check_models, make_sparse_, with_fp8, without_twell

NEW_TOKENS = 16  # of a text: steps that are timed together
COUNTED_TOKENS = 8192  # of a text: their counts make the plans


@torch.no_grad()
def measure(
    model: Any, workload: str, batch: int, context: int, *, in_fp8: bool | None = None, **how: Any
) -> dict[str, Any]:
    """A JSON-ready row of one token. Overwrites the FFN weights of ``model``, a dense Llama with ReLU.

    ``in_fp8``: also with FP8 FFNs; by default where they run. ``how``: see ``_measured``.
    """
    config, device = model.config, model.device
    D, F, n_layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    inputs = cases.make(workload, n_layers * batch + ffn.PLAN_TOKENS, D, F, dtype=model.dtype, device=device)
    tokens = inputs.x[: n_layers * batch].view(n_layers, batch, 1, D)
    fired = (torch.relu(inputs.x[n_layers * batch :] @ inputs.w_gate.T) != 0).sum(0)
    mean_active = (torch.relu(tokens @ inputs.w_gate.T) != 0).sum().item() / (n_layers * batch)
    cases.write_ffns_(model, inputs)
    models, frozen = _models(model, [fired] * n_layers, ffn.PLAN_TOKENS, batch, in_fp8)
    for each in models.values():
        for layer, x in zip(each.model.layers, tokens, strict=True):
            layer.mlp.register_forward_pre_hook(functools.partial(_replaced, x))
    ids = torch.randint(config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    row = _measured(models, ids.to(device), context, functools.partial(check_ffns, models, inputs, [*tokens]), **how)
    plans = {
        field: each.model.layers[0].mlp.plan
        for field, each in (("plan", models["sparse"]), ("plan_fp8", models.get(fp8.SPARSE)))
        if each is not None
    }
    return {
        **row,
        "workload": workload,
        "frozen_bytes": frozen,
        "mean_active": round(mean_active, 2),
        **{field: ffn.plan_facts(plan) for field, plan in plans.items() if plan is not None},
    }


@torch.no_grad()
def measure_text(
    model: Any, name: str, ids: Tensor, batch: int, context: int, *, in_fp8: bool | None = None, **how: Any
) -> dict[str, Any]:
    """As ``measure``, for a model as it is on the tokens ``ids`` of a text: ``NEW_TOKENS`` steps through the text.

    The counts of the text's first ``COUNTED_TOKENS`` or more, which are not timed, make the plans.
    """
    dense, n_counted = without_twell(model), _n_counted(context)
    seen, timed = ids[:n_counted], ids[n_counted : tokens_needed(batch, context)].view(batch, context + NEW_TOKENS)
    fired, n_seen = _fired(model, [seen.view(-1, context)])
    of_timed, n_timed = _fired(model, [timed])
    models, frozen = _models(dense, fired, n_seen, batch, in_fp8)
    active = [counts.sum().item() / n_timed for counts in of_timed]
    return {
        **_measured(models, timed, context, **how),
        "workload": "text",
        "model": name,
        "frozen_bytes": frozen,
        "mean_active": round(sum(active) / len(active), 2),
        "active": [round(n, 1) for n in active],
    }


def tokens_needed(batch: int, context: int) -> int:
    """How long the text of ``measure_text`` must be."""
    return _n_counted(context) + batch * (context + NEW_TOKENS)


def _n_counted(context: int) -> int:
    """Whole sequences of ``context`` tokens."""
    return -(-COUNTED_TOKENS // context) * context


def _fired(model: Any, batches: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """How often each neuron of each layer fires, and in how many tokens."""
    counted = copy.deepcopy(model)
    sparsify_(counted)
    layers = [ffn for _, ffn in sparse_ffns(counted)]
    for ffn_ in layers:
        ffn_.track_counts = True
        ffn_.reset_counts()
    for ids in batches:
        counted(ids, use_cache=False, logits_to_keep=1)
    return [ffn_.neuron_counts for ffn_ in layers], int(layers[0].tokens_seen)


def _models(
    dense: Any, fired: Sequence[Tensor], n_seen: int, batch: int, in_fp8: bool | None
) -> tuple[dict[str, Any], int]:
    """The models to compare by name, and bytes frozen in the sparse one."""
    ffn.forget_compiled(dense.device)
    sparse, frozen = _sparse(dense, fired, n_seen)
    models = {"dense": dense, "sparse": sparse}
    return with_fp8(models, lambda: _sparse(dense, fired, n_seen, in_fp8=True)[0], in_fp8, batch), frozen.bytes


def _measured(
    models: dict[str, Any],
    ids: Tensor,
    context: int,
    check: Callable[[], dict[str, Any]] = dict,
    *,
    graph: bool,
    compiled: bool = False,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """Fields of a row: times and joules of a step of all models, at the same place in the same text.

    ``ids`` [batch, context + steps]. ``graph``: replay CUDA graphs. ``compiled``: compile whole models; otherwise only
    dense FFNs in FP8 are compiled. Logits are compared before and after timing; ``check`` gives more fields.
    """
    device, dense = ids.device, models["dense"]
    if device.type == "cuda" and not compiled:
        fp8.compile_ffns_(models)
    of_all = fp8.options(models) if compiled else None
    steps = {name: _Steps(each, ids, context, of_all) for name, each in models.items()}
    runs: dict[str, Callable[[], Any]] = {name: step.run for name, step in steps.items()}
    fields = check_models({name: run() for name, run in runs.items()}) | check()

    def rewind() -> None:
        for step in steps.values():
            step.rewind()

    def check_again() -> None:
        rewind()
        check_models({name: run().clone() for name, run in runs.items()})

    if graph:
        with as_if_captured(*models.values()):
            for step in steps.values():
                step.rewind()
                step.run()
        runs = {name: replayed([step.run], before=step.rewind) for name, step in steps.items()}
        check_again()
    spreads = timing.compare(runs, seconds=seconds, device=device, before=rewind)
    check_again()
    batch, n_steps = len(ids), ids.shape[1] - context
    times = timing.shared(spreads, n_steps, 4)
    joules = {name: energy.joules(_rewinding(runs[name], steps[name]), device, min(seconds, 3.0)) for name in runs}
    return {
        "bench": "decode",
        "layers": dense.config.num_hidden_layers,
        "D": dense.config.hidden_size,
        "F": dense.config.intermediate_size,
        "batch": batch,
        "context": context,
        "graph": graph,
        "compiled": compiled,
        "frozen": True,
        "dtype": timing.dtype_name(dense.dtype),
        **timing.environment(device),
        **timing.ms_fields(times),
        "tokens_per_second": {name: round(1000 * batch / spread.p50, 1) for name, spread in times.items()},
        "speedup": round(times["dense"].p50 / times["sparse"].p50, 3),
        **ffn.over_fp8(times),
        **fields,
        "joules_per_token": {
            name: None if j is None else float(f"{j / batch / n_steps:.4g}") for name, j in joules.items()
        },
    }


def _sparse(dense: Any, fired: Sequence[Tensor], n_seen: int, *, in_fp8: bool = False) -> tuple[Any, FreezeReport]:
    """A frozen sparse copy."""
    sparse = copy.deepcopy(dense)
    make_sparse_(sparse, fired, n_seen, in_fp8=in_fp8)
    return sparse, freeze_(sparse)


class _Steps:
    """A model, a static cache with ``context`` tokens, and a step for each token after them."""

    def __init__(self, model: Any, ids: Tensor, context: int, how: Mapping[str, Any] | None = None) -> None:
        """``ids`` [batch, context + steps]. ``how``: options of torch.compile; None: the model is not compiled."""
        self.model, self.context, n = model, context, ids.shape[1]
        self.cache = StaticCache(config=model.config, max_cache_len=n)
        model(ids[:, :context], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.call = model if how is None else torch.compile(model, dynamic=False, **how)
        self.ids = [ids[:, i : i + 1].contiguous() for i in range(context, n)]
        self.positions = [torch.full((1, 1), i, device=ids.device) for i in range(context, n)]

    def rewind(self) -> None:
        """The next run starts after ``context`` tokens again."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.cumulative_length.fill_(self.context)

    def run(self) -> Tensor:
        """Logits [batch, steps, V]."""
        logits = [
            self.call(ids, past_key_values=self.cache, position_ids=at, use_cache=True, logits_to_keep=1).logits
            for ids, at in zip(self.ids, self.positions, strict=True)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)


def _rewinding(run: Callable[[], Any], step: _Steps) -> Callable[[], None]:
    def both() -> None:
        step.rewind()
        run()

    return both


def _replaced(x: Tensor, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layer's own token of each sequence, x [batch, 1, D], at every position."""
    return (x.expand(*args[0].shape), *args[1:])
