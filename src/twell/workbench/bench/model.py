"""``twell bench model``: the forward pass of a whole Hugging Face model, dense against sparse.

A real model runs on text or random tokens as it is. A model of random weights has no sparse activations, so each of its
FFNs gets the weights of a workload and, by a hook, its input: the dense model's and the sparse model's alike.

The sparse model is as ``sparsify_`` leaves it, not frozen. Its times are the GPU's, by events, and *as called*: whole
calls in a plain loop, the host's time included. ``measure_generate`` times ``model.generate``, also frozen.

On a GPU with FP8, models with FP8 FFNs are timed too: dense ones as in ``bench ffn``, always compiled, and the sparse
model after ``twell.quantize_`` where its kernels run. The rest of these models stays as it is. ``decode.py`` compares
the same models.

Outputs that can be compared are compared before and after timing: models that disagree have no speedup.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
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
from twell.workbench.bench import cases, ffn, fp8, timing
from twell.workbench.bench.checks import WrongResult, check_fp8, relative_error
from twell.workbench.bench.graphs import as_if_captured, replayed
from twell.workbench.bench.train_ffn import ratio

ENERGY_SECONDS = 3.0
PROMPT_TOKENS, NEW_TOKENS = 32, 64  # of measure_generate
GENERATE_ROUNDS = 7  # at least
_TOKENS_OF_A_LAYER = 64  # of a workload: batches this small have other tokens in every layer
_LAYER_TOKENS = 16384  # at most, where FFNs are timed one by one
_CHECKED_TOKENS = 256  # by which FFNs in FP8 are checked, at least
_FP8_LOGITS = 0.3  # FP8 is broken where its logits differ more, relatively, from those of 16 bits
_FP8_APART = 0.1  # between sparse and dense FP8, which rounds h: 2 to 3 % of an FFN's output
_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 1e-3}  # of logits; bf16: 0.01 after 28 layers


class Subject(NamedTuple):
    """Models to compare, which compute the same."""

    models: dict[str, Any]  # by way: dense and sparse, and in FP8 those of ``with_fp8``
    facts: dict[str, Any]  # of the row
    comparable: bool = True  # False: the sparse model's logits differ, by intention
    plans: tuple[Plan, ...] = ()  # of the layers, where this module makes them
    inputs: cases.FFNInputs | None = None  # of the FFNs, where this module makes them

    @property
    def dense(self) -> Any:
        return self.models["dense"]

    @property
    def sparse(self) -> Any:
        return self.models["sparse"]


@torch.no_grad()
def real(model: Any, name: str, *, in_fp8: bool | None = None) -> Subject:
    """A model as it is. Its sparse copy plans from a calibration or its first batches, as it does for every user.

    ``in_fp8``: see ``with_fp8``.
    """
    dense, sparse = without_twell(model), model
    report = sparsify_(sparse)
    if not report.n_sparse:
        raise ValueError(f"{name} has no FFN that can run sparsely: {report.summary()}")

    def sparse_in_fp8() -> Any:
        made = copy.deepcopy(sparse)
        quantize_(made)
        return made

    models = with_fp8({"dense": dense, "sparse": sparse}, sparse_in_fp8, in_fp8)
    return Subject(models, {"workload": "model", "model": name})


def with_fp8(
    models: dict[str, Any], sparse_in_fp8: Callable[[], Any], in_fp8: bool | None, n_tokens: int = 1
) -> dict[str, Any]:
    """``models``, dense and sparse, and the same with FP8 FFNs, sparse where its kernels run: ``in_fp8``, by default
    where dense FP8 runs. ``n_tokens``: the fewest tokens of a call."""
    dense, weights = models["dense"], fp8.weights_of(models["sparse"])
    if in_fp8 is None:
        found = next(iter((weights or {}).values()), None)
        in_fp8 = found is not None and fp8.applies(dense.device, dense.dtype, *found.down.shape)
    if not in_fp8:
        return models
    if weights is None:
        raise ValueError("--fp8 needs FFNs of plain linears without biases, ReLU, and sizes that are multiples of 16")
    made = {name: fp8.in_model(dense, kind, weights) for name, (kind, _) in fp8.ways(n_tokens).items()}
    if fp8.applies_sparsely(dense.device, dense.dtype):
        made[fp8.SPARSE] = sparse_in_fp8()
    return models | made


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
def synthetic(
    model: Any, workload: str, largest: tuple[int, int], *, backend: str = "auto", in_fp8: bool | None = None
) -> Subject:
    """Overwrites the FFN weights of ``model``, a dense Llama-like model with ReLU. ``largest``: the largest batch.

    ``in_fp8``: see ``with_fp8``.
    """
    config, layers = model.config, model.config.num_hidden_layers
    by_kernels = backends.choose_backend(backend, model.device) == "triton"
    tokens = largest[0] * largest[1]
    n = tokens + _TOKENS_OF_A_LAYER * (layers - 1)
    sizes = n + ffn.PLAN_TOKENS * by_kernels, config.hidden_size, config.intermediate_size
    inputs = cases.make(workload, *sizes, dtype=model.dtype, device=model.device)
    cases.write_ffns_(model, inputs)
    fired = (torch.relu(inputs.x[n:] @ inputs.w_gate.T) != 0).sum(0)
    plans: list[Plan] = []  # all layers of a model have the same

    def sparse(*, in_fp8: bool = False) -> Any:
        made = copy.deepcopy(model)
        plans.extend(make_sparse_(made, [fired] * layers, ffn.PLAN_TOKENS, backend=backend, in_fp8=in_fp8)[:1])
        return made

    models = with_fp8({"dense": model, "sparse": sparse()}, functools.partial(sparse, in_fp8=True), in_fp8)
    for i in range(layers):
        replaced = functools.partial(_replaced_input, _of_layer(inputs.x, i, tokens))
        for each in models.values():
            each.model.layers[i].mlp.register_forward_pre_hook(replaced)
    facts = {"workload": workload, **({"plan_fp8": ffn.plan_facts(plans[1])} if len(plans) > 1 else {})}
    return Subject(models, facts, plans=tuple(plans[:1]), inputs=inputs)


def _of_layer(x: Tensor, i: int, tokens: int) -> Tensor:
    """The tokens of layer i."""
    return x[i * _TOKENS_OF_A_LAYER :][:tokens]


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
    tokens, device = ids.numel(), subject.dense.device
    models = {n: each for n, each in subject.models.items() if n not in fp8.NAMES or n in fp8.ways(tokens)}
    _compile_(models, compiled)
    runs = {name: functools.partial(_logits, each, ids) for name, each in models.items()}

    def check() -> dict[str, float | None]:
        return check_models({name: run()[:, -1].clone() for name, run in runs.items()}, subject.comparable)

    differences, errors = check(), {}
    if subject.inputs is not None:
        layers = range(min(len(subject.dense.model.layers), math.ceil(_CHECKED_TOKENS / tokens)))
        xs = [_of_layer(subject.inputs.x, i, tokens).view(*ids.shape, -1) for i in layers]
        errors = check_ffns(models, subject.inputs, xs)
    times = timing.compare(runs, seconds=seconds, warmups=2, device=device)
    prompts = {name: functools.partial(_first_token, each, ids[:1]) for name, each in models.items()}
    of_calls = _as_called(runs, seconds, device) if called or (called is None and device.type == "cuda") else {}
    check()
    joules = {name: energy.joules(run, device, min(seconds, ENERGY_SECONDS)) for name, run in runs.items()}
    memory = {name: memory_of(each, runs[name]) for name, each in models.items()}
    waits = timing.compare(prompts, seconds=seconds / 3, warmups=1, device=device)  # last: it compiles once more
    return {
        **_fields("model", subject, ids, compiled),
        "frozen": False,
        **timing.ms_fields(times),
        "first_token_ms": timing.by_way(waits),
        "tokens_per_ms": {name: round(tokens / spread.p50, 3) for name, spread in times.items()},
        "speedup": ffn.speedup(times, "sparse"),
        **ffn.over_fp8(times),
        **of_calls,
        **differences,
        **errors,
        "memory": memory,
        "memory_ratio": ratio(memory["sparse"]["held"], memory["dense"]["held"]),
        "joules_per_token": {name: None if j is None else float(f"{j / tokens:.4g}") for name, j in joules.items()},
        "joules_ratio": ratio(joules["sparse"], joules["dense"]) if joules["sparse"] and joules["dense"] else None,
        **({"ffns": _layers(models, ids, seconds)} if wants_layers else {}),
    }


def _compile_(models: Mapping[str, Any], whole: bool) -> None:
    """``whole``: the layers of the models; otherwise only dense FFNs in FP8, and those on a GPU."""
    device = models["dense"].device
    if whole:
        ffn.forget_compiled(device)
        for each in models.values():
            for layer in getattr(each.model, "decoder", each.model).layers:
                layer.compile(dynamic=False, **fp8.options(models))  # one by one: equal layers share one compilation
    elif device.type == "cuda":
        ffn.forget_compiled(device)
        fp8.compile_ffns_(models)


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


def check_models(logits: Mapping[str, Tensor], comparable: bool = True) -> dict[str, float | None]:
    """Fields of a row: relative differences of logits [batch, ..., V], sparse from dense, and in FP8.

    Raises WrongResult where models do not compute the same. ``comparable``: whether dense and sparse should.
    """
    fields = {"difference": check_logits(logits["dense"], logits["sparse"]) if comparable else None}
    for name in logits.keys() - {"dense", "sparse"}:
        check_logits(logits["dense"], logits[name], name, _FP8_LOGITS)
    if fp8.SPARSE in logits:
        fields["difference_fp8"] = check_logits(logits["fp8"], logits[fp8.SPARSE], fp8.SPARSE, _FP8_APART)
    return fields


def check_ffns(models: Mapping[str, Any], inputs: cases.FFNInputs, xs: Sequence[Tensor]) -> dict[str, Any]:
    """A field of a row: errors of the FFNs in FP8 of the first layers, each on its tokens x [batch, length, D]."""
    outputs = {
        name: torch.cat([layer.mlp(x).flatten(0, 1) for layer, x in zip(each.model.layers, xs, strict=False)])
        for name, each in models.items()
        if name not in ("dense", "sparse")
    }
    errors = check_fp8(torch.cat([x.flatten(0, 1) for x in xs]), inputs, True, outputs)
    return {"error": errors} if errors else {}


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
        **ffn.over_fp8(times, "speedup_called"),
    }


# ---------------------------------------------------------------------------------------------------------
# model.generate
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_generate(subject: Subject, ids: Tensor, new_tokens: int, *, seconds: float) -> dict[str, Any]:
    """A JSON-ready row of greedy ``model.generate`` after the prompts ids [batch, length]: all ways, and frozen."""
    models, sparse, device = subject.models, subject.sparse, subject.dense.device
    _compile_(models, whole=False)
    for each in models.values():
        each.generation_config.update(eos_token_id=None, pad_token_id=0)  # so that every way makes as many tokens

    def call(model: Any) -> Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)[
            :, ids.shape[1] :
        ]

    def timed(model: Any) -> float:
        timing.wait(device)
        start = time.perf_counter()
        tokens = call(model)
        timing.wait(device)
        taken = (time.perf_counter() - start) * 1e3
        if tokens.shape != (len(ids), new_tokens):
            raise WrongResult(f"expected {new_tokens} tokens of {len(ids)} prompts, got {tuple(tokens.shape)}")
        return taken

    differences = check_models({name: _first_token(each, ids)[:, -1] for name, each in models.items()})
    times: dict[str, list[float]] = {name: [] for name in (*models, "frozen")}
    deadline, rounds, memory = time.perf_counter() + seconds, 0, 0
    while rounds < 1 + GENERATE_ROUNDS or time.perf_counter() < deadline:
        for name, taken in times.items():
            if name == "frozen":
                freeze_(sparse)
                memory = _frozen_bytes(sparse)
            taken.append(timed(models.get(name, sparse)))
        thaw_(sparse)
        rounds += 1
    spreads = timing.quiet({name: taken[1:] for name, taken in times.items()})  # the first warms up
    return {
        **_fields("generate", subject, ids, False),
        "new_tokens": new_tokens,
        "called_ms": timing.by_way(spreads),
        "speedup_called": ffn.speedup(spreads, "sparse"),
        "speedup_called_frozen": ffn.speedup(spreads, "frozen"),
        **ffn.over_fp8(spreads, "speedup_called"),
        "frozen_bytes": memory,
        **differences,
    }


# ---------------------------------------------------------------------------------------------------------
# FFNs one by one
# ---------------------------------------------------------------------------------------------------------


def _layers(models: Mapping[str, Any], ids: Tensor, seconds: float) -> list[dict[str, Any]]:
    """Each FFN by itself on its input in the model: active neurons, the times, speedups.

    On a GPU, by replays of CUDA graphs: the GPU may take less time for an FFN than the host needs to launch it.
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[name] = args[0].flatten(0, -2)[:_LAYER_TOKENS].clone()

    dense = models["dense"]
    names = [name for name, module in models["sparse"].named_modules() if isinstance(module, SparseFFNBase)]
    hooks = [dense.get_submodule(name).register_forward_pre_hook(functools.partial(keep, name)) for name in names]
    with torch.compiler.set_stance("force_eager"):  # compiled code runs no hooks of modules
        _logits(dense, ids)
    for hook in hooks:
        hook.remove()
    _compile_(models, whole=False)
    rows = []
    for name in names:
        x, modules = inputs.pop(name), {way: each.get_submodule(name) for way, each in models.items()}
        active = (torch.relu(getattr(modules["sparse"], modules["sparse"].projections[0])(x)) != 0).sum().item()
        runs: dict[str, Callable[[], Tensor]] = {way: functools.partial(ffn_, x) for way, ffn_ in modules.items()}
        is_graph = x.device.type == "cuda"
        if is_graph:
            with as_if_captured(*modules.values()):
                for run in runs.values():
                    run()
            runs = {way: replayed([run]) for way, run in runs.items()}
        times = timing.compare(runs, seconds=min(0.3, seconds / len(names)), device=x.device)
        rows.append(
            {
                "name": name,
                "tokens": len(x),
                "mean_active": round(active / len(x), 2),
                "graph": is_graph,
                **timing.ms_fields(times),
                "speedup": round(times["dense"].p50 / times["sparse"].p50, 3),
                **ffn.over_fp8(times),
            }
        )
    return rows
