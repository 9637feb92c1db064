"""``twell bench model``: the forward pass of a whole Hugging Face model, dense against sparse.

A real model runs on text or random tokens as it is. A model of random weights has no sparse activations, so each of its
FFNs gets the weights of a workload and, by a hook, its input: the dense model's and the sparse model's alike.

The sparse model is as ``sparsify_`` leaves it, not frozen. Its times are the GPU's, by events, and *as called*: whole
calls in a plain loop, the host's time included. ``measure_generate`` times ``model.generate``, also frozen.

Outputs that can be compared are compared before and after timing: models that disagree have no speedup.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from twell import energy
from twell.hf.configs import SparsityFields
from twell.hf.sparsify import desparsify_, sparsify_
from twell.nn import SparseFFNBase, freeze_, sparse_ffns, thaw_
from twell.nn.quantize import quantize_
from twell.ops import backends
from twell.plan import Plan
from twell.workbench.bench import cases, ffn, timing
from twell.workbench.bench.checks import WrongResult, relative_error
from twell.workbench.bench.graphs import as_if_captured, replayed
from twell.workbench.bench.train_ffn import ratio

ENERGY_SECONDS = 3.0
PROMPT_TOKENS, NEW_TOKENS = 32, 64  # of measure_generate
GENERATE_ROUNDS = 7  # at least
_TOKENS_OF_A_LAYER = 64  # of a workload: batches this small have other tokens in every layer
_LAYER_TOKENS = 16384  # at most, where FFNs are timed one by one
_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 1e-3}  # of logits; bf16: 0.01 after 28 layers


class Subject(NamedTuple):
    """Two models to compare, which compute the same."""

    dense: Any
    sparse: Any
    facts: dict[str, Any]  # of the row
    comparable: bool = True  # False: their logits differ, by intention
    plans: tuple[Plan, ...] = ()  # of the layers, where this module makes them


@torch.no_grad()
def real(model: Any, name: str) -> Subject:
    """A model as it is. Its sparse copy plans from a calibration or its first batches, as it does for every user."""
    dense, sparse = without_twell(model), model
    report = sparsify_(sparse)
    if not report.n_sparse:
        raise ValueError(f"{name} has no FFN that can run sparsely:\n{report}")
    return Subject(dense, sparse, {"workload": "model", "model": name})


def without_twell(model: Any, *, shares_weights: bool = False) -> Any:
    """A copy as one would run it without twell; for a gated sparse type transformers' base model with ReLU.

    ``shares_weights``: a dense copy of the same type with the model's own parameters, in the layout they have.
    """
    config: Any = model.config
    is_base = not isinstance(config, SparsityFields) or not config.sparsity_gated_mlp or config.fp8_quantization
    if is_base or shares_weights:
        shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())} if shares_weights else {}
        twin = copy.deepcopy(model, shared)
        desparsify_(twin, restore_layout=not shares_weights)
        return twin
    base: Any = next(cls for cls in type(config).__mro__ if not issubclass(cls, SparsityFields))
    own = {f.name for f in dataclasses.fields(SparsityFields)} | {"model_type", "architectures", "hidden_act"}
    values = {name: value for name, value in config.to_dict().items() if name not in own}
    values["intermediate_size"] = config.sparsity_new_intermediate_size or values["intermediate_size"]
    with model.device:
        twin = AutoModelForCausalLM.from_config(base(**values, hidden_act="relu"), dtype=model.dtype)
    twin.load_state_dict(model.state_dict())
    twin.generation_config = copy.deepcopy(model.generation_config)
    return twin.train(model.training)


@torch.no_grad()
def synthetic(model: Any, workload: str, largest: tuple[int, int], *, backend: str = "auto") -> Subject:
    """Overwrites the FFN weights of ``model``, a dense Llama-like model with ReLU. ``largest``: the largest batch."""
    config, layers = model.config, model.config.num_hidden_layers
    by_kernels = backends.choose_backend(backend, model.device) == "triton"
    tokens = largest[0] * largest[1]
    n = tokens + _TOKENS_OF_A_LAYER * (layers - 1)
    sizes = n + ffn.PLAN_TOKENS * by_kernels, config.hidden_size, config.intermediate_size
    inputs = cases.make(workload, *sizes, dtype=model.dtype, device=model.device)
    cases.write_ffns_(model, inputs)
    sparse = copy.deepcopy(model)
    fired = (torch.relu(inputs.x[n:] @ inputs.w_gate.T) != 0).sum(0)
    plans = make_sparse_(sparse, [fired] * layers, ffn.PLAN_TOKENS, backend=backend)
    for i, layer in enumerate(sparse.model.layers):
        first = i * _TOKENS_OF_A_LAYER
        replaced = functools.partial(_replaced_input, inputs.x[first : first + tokens])
        for each in (layer, model.model.layers[i]):
            each.mlp.register_forward_pre_hook(replaced)
    return Subject(model, sparse, {"workload": workload}, plans=tuple(plans[:1]))  # all layers have the same


def make_sparse_(
    model: Any,
    fired: Sequence[Tensor],
    n_seen: int,
    *,
    backend: str = "auto",
    in_fp8: bool = False,
    training: bool = False,
) -> list[Plan]:
    """Replace the FFNs of a Llama-like model. Those that run by kernels are planned from how often each layer's neurons
    fired in ``n_seen`` tokens; their plans."""
    sparsify_(model)
    if in_fp8:
        quantize_(model)
    plans = []
    for layer, counts in zip(model.model.layers, fired, strict=True):
        layer.mlp.backend = backend
        if backends.choose_backend(backend, model.device) == "triton":
            plans.append(layer.mlp.plan_from_counts(counts, n_seen, training=training))
    return plans


def _replaced_input(x: Tensor, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first of the layer's tokens, in place of as many of the model's."""
    batch, length = args[0].shape[:2]
    return (x[: batch * length].view(batch, length, -1), *args[1:])


@torch.no_grad()
def measure(
    subject: Subject,
    ids: Tensor,
    *,
    compiled: bool = False,
    seconds: float = 3.0,
    wants_layers: bool = False,
    called: bool | None = None,
) -> dict[str, Any]:
    """A JSON-ready row for ids [batch, length]. ``wants_layers``: also time every FFN of a real model by itself.

    ``called``: also as called; by default on a GPU, since on a CPU all times are those of calls.
    """
    dense, sparse = models = subject.dense, subject.sparse
    device, tokens = dense.device, ids.numel()
    if compiled:
        ffn.forget_compiled(device)
        for each in models:
            for layer in getattr(each.model, "decoder", each.model).layers:
                layer.compile(dynamic=False)  # one by one: equal layers share one compilation
    runs = {name: functools.partial(_logits, each, ids) for name, each in zip(("dense", "sparse"), models, strict=True)}
    difference = None
    if subject.comparable:
        difference = check_logits(runs["dense"]()[:, -1], runs["sparse"]()[:, -1])
    times = timing.compare(runs, seconds=seconds, warmups=2, device=device)
    prompts = {name: functools.partial(_first_token, each, ids[:1]) for name, each in zip(runs, models, strict=True)}
    of_calls = {}
    if called or (called is None and device.type == "cuda"):
        of_calls = _as_called(runs, seconds, device)
    if subject.comparable:
        check_logits(runs["dense"]()[:, -1], runs["sparse"]()[:, -1])
    waits = timing.compare(prompts, seconds=seconds / 3, warmups=1, device=device)
    joules = {name: energy.joules(run, device, min(seconds, ENERGY_SECONDS)) for name, run in runs.items()}
    known = {name: j for name, j in joules.items() if j is not None}
    layers = _layers(dense, sparse, ids, seconds) if wants_layers else None
    memory = {name: memory_of(each, runs[name]) for name, each in zip(runs, models, strict=True)}
    return {
        **_fields("model", subject, ids, compiled),
        "frozen": False,
        **timing.ms_fields(times),
        "first_token_ms": timing.by_way(waits),
        "tokens_per_ms": {name: round(tokens / spread.p50, 3) for name, spread in times.items()},
        "speedup": ffn.speedup(times, "sparse"),
        **of_calls,
        "difference": difference,
        "memory": memory,
        "memory_ratio": ratio(memory["sparse"]["held"], memory["dense"]["held"]),
        "joules_per_token": {name: None if j is None else float(f"{j / tokens:.4g}") for name, j in joules.items()},
        "joules_ratio": ratio(known["sparse"], known["dense"]) if len(known) == 2 else None,
        **({"ffns": layers} if layers is not None else {}),
    }


def _fields(bench: str, subject: Subject, ids: Tensor, compiled: bool) -> dict[str, Any]:
    """What rows of a forward pass and of ``model.generate`` have in common."""
    config = subject.dense.config
    return {
        "bench": bench,
        **subject.facts,
        "layers": config.num_hidden_layers,
        "D": config.hidden_size,
        "F": getattr(config, "intermediate_size", None) or config.ffn_dim,  # OPT's name
        "batch": ids.shape[0],
        "length": ids.shape[1],
        "compiled": compiled,
        "dtype": timing.dtype_name(subject.dense.dtype),
        **({"plans": [ffn.plan_facts(plan) for plan in subject.plans]} if subject.plans else {}),
        **timing.environment(subject.dense.device),
    }


def _logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def _first_token(model: Any, ids: Tensor) -> Tensor:
    """A prompt's pass up to the logits of the next token, filling a cache."""
    return model(ids, use_cache=True, logits_to_keep=1).logits


def check_logits(dense: Tensor, sparse: Tensor, name: str = "sparse", allowed: float | None = None) -> float:
    """Relative difference of the logits; raises WrongResult where the models do not compute the same."""
    difference = relative_error(sparse, dense.double())
    if not difference < (allowed or _TOLERANCE.get(dense.dtype, 1e-6)):
        raise WrongResult(f"the {name} model's logits differ from the dense model's by {difference:.2e}")
    return float(f"{difference:.3g}")


def memory_of(model: Any, run: Callable[[], Any]) -> dict[str, int]:
    """Bytes of weights, of frozen state, of all that the model holds, and the most that ``run`` takes besides."""
    own = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    held = [*model.parameters(), *model.buffers()]
    for _, each in sparse_ffns(model):
        held += [each.neuron_counts, each.tokens_seen]
        held += [t for t in (*each._plan_eager, *each._plan_captured) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    frozen = _frozen_bytes(model)
    passing = timing.peak_bytes(run, model.device)
    return {"weights": sum(own.values()), "frozen": frozen, "held": sum(storages.values()) + frozen, "pass": passing}


def _frozen_bytes(model: Any) -> int:
    return sum(each.frozen_bytes() for _, each in sparse_ffns(model))


def _as_called(runs: Mapping[str, Callable[[], Any]], seconds: float, device: torch.device) -> dict[str, Any]:
    """Fields of a row: what whole calls take in a plain loop."""
    calls = {name: [run] for name, run in runs.items()}
    times = timing.as_called(calls, seconds=seconds / 2, device=device)
    return {
        "called_ms": timing.by_way(times),
        "host_us": timing.host_us(calls, device=device, repeats=9),
        "speedup_called": ffn.speedup(times, "sparse"),
    }


# ---------------------------------------------------------------------------------------------------------
# model.generate
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_generate(subject: Subject, ids: Tensor, new_tokens: int, *, seconds: float) -> dict[str, Any]:
    """A JSON-ready row of greedy ``model.generate`` after the prompts ids [batch, length]: dense, sparse and frozen."""
    dense, sparse, device = subject.dense, subject.sparse, subject.dense.device
    for each in (dense, sparse):
        each.generation_config.update(eos_token_id=None, pad_token_id=0)  # so that every way makes as many tokens

    def call(model: Any) -> Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)[
            :, ids.shape[1] :
        ]

    def timed(model: Any) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        tokens = call(model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = (time.perf_counter() - start) * 1e3
        if tokens.shape != (len(ids), new_tokens):
            raise WrongResult(f"expected {new_tokens} tokens of {len(ids)} prompts, got {tuple(tokens.shape)}")
        return taken

    difference = check_logits(_first_token(dense, ids)[:, -1], _first_token(sparse, ids)[:, -1])
    times: dict[str, list[float]] = {"dense": [], "sparse": [], "frozen": []}
    deadline, rounds, memory = time.perf_counter() + seconds, 0, 0
    while rounds < 1 + GENERATE_ROUNDS or time.perf_counter() < deadline:
        for name, taken in times.items():
            if name == "frozen":
                freeze_(sparse)
                memory = _frozen_bytes(sparse)
            taken.append(timed(dense if name == "dense" else sparse))
        thaw_(sparse)
        rounds += 1
    spreads = timing.quiet({name: taken[1:] for name, taken in times.items()})  # the first warms up
    return {
        **_fields("generate", subject, ids, False),
        "new_tokens": new_tokens,
        "called_ms": timing.by_way(spreads),
        "speedup_called": ffn.speedup(spreads, "sparse"),
        "speedup_called_frozen": ffn.speedup(spreads, "frozen"),
        "frozen_bytes": memory,
        "difference": difference,
    }


# ---------------------------------------------------------------------------------------------------------
# FFNs one by one
# ---------------------------------------------------------------------------------------------------------


def _layers(dense: Any, sparse: Any, ids: Tensor, seconds: float) -> list[dict[str, Any]]:
    """Each FFN by itself on its input in the model: active neurons, both times, the speedup.

    On a GPU, by replays of CUDA graphs: the GPU may take less time for an FFN than the host needs to launch it.
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[name] = args[0].flatten(0, -2)[:_LAYER_TOKENS].clone()

    ffns = {name: module for name, module in sparse.named_modules() if isinstance(module, SparseFFNBase)}
    hooks = [dense.get_submodule(name).register_forward_pre_hook(functools.partial(keep, name)) for name in ffns]
    _logits(dense, ids)
    for hook in hooks:
        hook.remove()
    rows = []
    for name, module in ffns.items():
        x = inputs.pop(name)
        first = getattr(module, module.projections[0])
        active = (torch.relu(first(x)) != 0).sum().item()
        runs: dict[str, Callable[[], Tensor]] = {
            "dense": functools.partial(dense.get_submodule(name), x),
            "sparse": functools.partial(module, x),
        }
        is_graph = x.device.type == "cuda"
        if is_graph:
            with as_if_captured(module):
                module(x)
            runs = {side: replayed([run]) for side, run in runs.items()}
        times = timing.compare(runs, seconds=min(0.3, seconds / len(ffns)), device=x.device)
        rows.append(
            {
                "name": name,
                "tokens": len(x),
                "mean_active": round(active / len(x), 2),
                "graph": is_graph,
                **timing.ms_fields(times),
                "speedup": round(times["dense"].p50 / times["sparse"].p50, 3),
            }
        )
    return rows
