"""``twell bench ffn``: the forward of one FFN, dense against sparse, on workloads of known sparsity.

Four ways: dense (``nn.Linear``s, as in Hugging Face's blocks), on a GPU the same compiled, sparse as ``sparsify_``
leaves a layer, and frozen (``twell.freeze_``). On a GPU with FP8 also dense in FP8, compiled, and sparse in FP8
(``twell.quantize_``) where its kernels run. Each way has two times: the device's, and that of a call *as called*, in a
plain Python loop with the host's time included.

``checks.py`` has what is checked before a measurement and after it.

Legend: M tokens, D model width, F hidden width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from twell import reference
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase, neuron_major_
from twell.nn.quantize import quantize_
from twell.ops import backends
from twell.plan import Plan, choose_plan, costs_for
from twell.workbench.bench import cases, fp8, timing
from twell.workbench.bench.checks import WrongResult, check, check_all, check_fp8, relative_error, require_same
from twell.workbench.bench.graphs import as_if_captured, in_turn, replayed

__all__ = ["Case", "WrongResult", "check", "make_layers", "relative_error", "run"]

PLAN_TOKENS = 4096  # not timed: their counts make the plan
GRAPH_LAYERS = 16  # in a CUDA graph, each with its own weights: as in a model, none finds them in the L2 cache
GRAPHS = 3  # of each way, timed in turn: where kernels overlap, graphs may place their programs differently
_L2_BYTES = 60e6  # an H200's, rounded up
_LEAST_READ = 1 / 8  # of a layer's weights: its gate in int8
_SPARSE = ("sparse", "frozen")
DENSE_16_BITS = ("dense", "compiled")  # in the weights' own dtype
DENSE = (*DENSE_16_BITS, *fp8.NAMES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row to measure."""

    workload: str
    M: int
    D: int = 2048
    F: int = 5632
    dtype: torch.dtype = torch.float32
    gated: bool = True
    device: str = "cpu"
    backend: str = "auto"
    graph: bool = False  # time replays of CUDA graphs of GRAPH_LAYERS layers; rows have the time of one layer
    called: bool | None = None  # also as called. Default: on a GPU; on a CPU all times are those of calls
    fp8: bool | None = None  # also in FP8. Default: where dense FP8 runs

    @property
    def is_fp8(self) -> bool:
        return fp8.applies(torch.device(self.device), self.dtype, self.D, self.F) if self.fp8 is None else self.fp8

    @property
    def is_sparse_fp8(self) -> bool:
        is_by_kernels = self.is_fp8 and self.backend in ("auto", "triton")
        return is_by_kernels and fp8.applies_sparsely(torch.device(self.device), self.dtype)

    @property
    def is_called(self) -> bool:
        return torch.device(self.device).type == "cuda" if self.called is None else self.called


@torch.no_grad()
def run(cases_: list[Case], *, seconds: float = 3.0) -> Iterator[dict[str, Any]]:
    """Measure each case; yield its JSON-ready row as soon as it is done."""
    inputs, made_for = None, None
    for case in cases_:
        # Weights do not depend on M, so cases that differ only in M share the inputs of the largest.
        key = dataclasses.replace(case, M=0)
        if inputs is None or made_for != key:
            largest = max(c.M for c in cases_ if dataclasses.replace(c, M=0) == key)
            if backends.choose_backend(case.backend, torch.device(case.device)) == "triton":
                largest += PLAN_TOKENS
            inputs = cases.make(case.workload, largest, case.D, case.F, dtype=case.dtype, device=case.device)
            made_for = key
        yield _run_case(case, inputs, seconds)


def _run_case(case: Case, inputs: cases.FFNInputs, seconds: float) -> dict[str, Any]:
    x = inputs.x[: case.M].contiguous()
    backend = backends.choose_backend(case.backend, x.device)
    seen = inputs.x[-PLAN_TOKENS:]
    plan = plan_for(seen, inputs.w_gate, gated=case.gated) if backend == "triton" else None
    forget_compiled(x.device)
    runs = alternatives(case, inputs, x, plan)
    checked = {name: run().clone() for name, run in runs.items()}
    errors: dict[str, float | None] = {**check_all(x, inputs, case.gated, checked)}
    errors |= check_fp8(x, inputs, case.gated, checked)
    times = timing.compare(runs, seconds=seconds, device=x.device)
    for name in runs.keys() - {*DENSE}:
        require_same(runs[name](), checked[name], name)
    memory = {}
    if x.device.type == "cuda" and not case.graph:  # besides y
        memory = {name: timing.peak_bytes(run, x.device) - x.nbytes for name, run in runs.items()}
    del runs, checked
    if case.graph:
        times = timing.shared(times, GRAPH_LAYERS)
    mean_active = (torch.relu(nnf.linear(x, inputs.w_gate)) != 0).sum().item() / case.M
    row = {
        **fields(case, "ffn", backend, mean_active, times),
        **({"graph_layers": GRAPH_LAYERS} if case.graph else {}),
        **ratios(times),
        **(_as_called(case, inputs, x, plan, seconds) if case.is_called else {}),
        **({"memory": memory} if memory else {}),
        "error": errors,
    }
    if plan is not None:
        in_fp8 = plan_in_fp8(case, inputs)
        row |= {"plan": plan_facts(plan), **({} if in_fp8 is None else {"plan_fp8": plan_facts(in_fp8)})}
        row["parts_ms"] = _parts(case, inputs, x, plan, seconds / 3)
    return row


def _as_called(case: Case, inputs: cases.FFNInputs, x: Tensor, plan: Plan | None, seconds: float) -> dict[str, Any]:
    """Fields of a row: what calls take in a plain loop, over as many layers as outgrow the L2 cache."""
    n_layers = called_layers(sum(w.nbytes for w in (inputs.w_gate, inputs.w_up, inputs.w_down)), x.device)
    layers = make_layers(case, inputs, plan, n_layers)
    if _compiles(x.device):
        layers["sparse_compiled"] = [_compiled(layer) for layer in layers["sparse"]]
    calls = {name: [functools.partial(layer, x) for layer in each] for name, each in layers.items()}
    checked = {name: each[0]() for name, each in calls.items()}
    check_all(x, inputs, case.gated, checked)
    check_fp8(x, inputs, case.gated, checked)

    def check_again() -> None:
        for name in calls.keys() - {*DENSE}:
            for call in calls[name]:  # of equal weights
                require_same(call(), checked[name], f"{name}, as called,")

    check_again()
    times = timing.as_called(calls, seconds=seconds / 2, device=x.device)
    host = timing.host_us(calls, device=x.device)
    check_again()
    frozen: Any = layers["frozen"][0]
    return {
        "called_layers": n_layers,
        "called_ms": timing.by_way(times),
        "host_us": host,
        **ratios(times, "speedup_called"),
        "frozen_bytes": frozen.frozen_bytes(),
    }


# ---------------------------------------------------------------------------------------------------------
# Fields of rows
# ---------------------------------------------------------------------------------------------------------


def fields(case: Case, bench: str, backend: str, mean_active: float, times: timing.Times) -> dict[str, Any]:
    """What every row of one FFN has: its case, its times, and where they were measured."""
    return {
        "bench": bench,
        "workload": case.workload,
        "kind": "gated" if case.gated else "plain",
        "M": case.M,
        "D": case.D,
        "F": case.F,
        "dtype": timing.dtype_name(case.dtype),
        "backend": backend,
        **({"graph": case.graph} if bench == "ffn" else {}),
        "mean_active": round(mean_active, 2),
        **timing.ms_fields(times),
        **timing.environment(torch.device(case.device)),
    }


def speedup(times: timing.Times, of: str) -> float:
    """Over the faster dense way of the same dtype: FP8 gives other results."""
    dense = min(times[name].p50 for name in DENSE_16_BITS if name in times)
    return round(dense / times[of].p50, 3)


def ratios(times: timing.Times, prefix: str = "speedup") -> dict[str, Any]:
    """All speedups of a row; ``prefix`` says of which times: "speedup" or "speedup_called"."""
    found: dict[str, Any] = {prefix: speedup(times, "sparse"), f"{prefix}_frozen": speedup(times, "frozen")}
    if "sparse_compiled" in times:  # eager against eager, and compiled against compiled
        found[f"{prefix}_eager"] = round(times["dense"].p50 / times["sparse"].p50, 3)
        found[f"{prefix}_compiled"] = round(times["compiled"].p50 / times["sparse_compiled"].p50, 3)
    return found | over_fp8(times, prefix)


def over_fp8(times: timing.Times, prefix: str = "speedup") -> dict[str, Any]:
    """Speedups over the faster dense FP8 way: of the faster of sparse and frozen, and of sparse FP8. {} without FP8."""
    dense = [times[name].p50 for name in fp8.NAMES if name in times]
    if not dense:
        return {}
    found: dict[str, Any] = {"over_fp8": min(times[name].p50 for name in _SPARSE if name in times)}
    if fp8.SPARSE in times:
        found["fp8"] = times[fp8.SPARSE].p50
    return {f"{prefix}_{name}": round(min(dense) / ms, 3) for name, ms in found.items()}


def plan_facts(plan: Plan) -> dict[str, Any]:
    predicted = plan.predicted and round(plan.predicted, 3)
    (few, most, least), (few_captured, _, least_captured) = (plan.tokens(captured=c) for c in (False, True))
    numbers = {"cap": plan.cap, "min_tokens": least, "few_tokens": few, "union_tokens": most if most > few else 0}
    captured = {"min_tokens_captured": least_captured, "few_tokens_captured": few_captured}
    return {"hot": len(plan.hot), **numbers, **captured, "predicted": predicted}


def _parts(case: Case, inputs: cases.FFNInputs, x: Tensor, plan: Plan, seconds: float) -> dict[str, float]:
    from twell.workbench.bench.parts import Parts  # needs triton, which a machine without a GPU may lack

    if not plan.runs_split(case.M, captured=case.graph):
        return {}
    w = reference.Weights(inputs.w_gate, inputs.w_up if case.gated else None, inputs.w_down)
    return parts_ms(Parts(x, w, plan), w, seconds)


def parts_ms(parts: Any, w: reference.Weights, seconds: float) -> dict[str, float]:
    """Medians of the parts of the split, each timed alone, and of the dense gate."""
    tiles, x = parts.tiles, parts.x
    runs: dict[str, Callable[[], Any]] = {
        "dense gate": lambda: nnf.linear(x, w.gate),
        "layout": parts.lay_out,
        "cold gate": lambda: parts.cold_gate(tiles.gate, tiles.use_tma),
        "lists": parts.list_active,
        "tail": lambda: parts.tail(parts.tail_tile),
        "heavy": lambda: parts.heavy(tiles.heavy),
    }
    if parts.has_hot:
        runs["hot"] = lambda: parts.hot(tiles.gate, tiles.use_tma)
        runs["hot down"] = parts.hot_down
    n_heavy = parts.n_heavy()
    times = timing.compare(runs, seconds=seconds, device=x.device, before=parts.restore)
    return {name: spread.p50 for name, spread in times.items()} | {"heavy tokens": n_heavy}


# ---------------------------------------------------------------------------------------------------------
# Dense and sparse layers
# ---------------------------------------------------------------------------------------------------------


def called_layers(weight_bytes: int, device: torch.device) -> int:
    """How many layers to call in turn so that none finds what it reads in an L2 cache; at least 4."""
    return 4 if device.type != "cuda" else max(4, min(64, math.ceil(_L2_BYTES / (_LEAST_READ * weight_bytes))))


def forget_compiled(device: torch.device) -> None:
    """Each number of tokens is compiled separately, and torch.compile gives up on a function after eight."""
    if device.type == "cuda":
        torch.compiler.reset()


def plan_for(seen: Tensor, w_gate: Tensor, *, gated: bool, **costs: bool) -> Plan:
    """From the counts of tokens that are not timed, ``seen`` [tokens, D]."""
    fired = (torch.relu(nnf.linear(seen, w_gate)) != 0).sum(0)
    return choose_plan(fired, len(seen), costs_for(seen.device, **costs), width=seen.shape[1], gated=gated)


def plan_in_fp8(case: Case, inputs: cases.FFNInputs) -> Plan | None:
    """Of the sparse FFN with FP8 weights, whose costs are others."""
    if not case.is_sparse_fp8:
        return None
    return plan_for(inputs.x[-PLAN_TOKENS:], inputs.w_gate, gated=case.gated, fp8=True)


class DenseFFN(nn.Module):
    """As Hugging Face's blocks: down_proj(act_fn(gate_proj(x)) * up_proj(x)), or without a gate."""

    def __init__(self, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> None:
        super().__init__()
        self.gate_proj = None if w_gate is None else linear(w_gate)
        self.up_proj, self.down_proj, self.act_fn = linear(w_up), linear(w_down), nn.ReLU()

    def hidden(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.act_fn(self.up_proj(x))
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))


def linear(weight: Tensor) -> nn.Linear:
    """A layer on the memory of ``weight``."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made


@torch.inference_mode(False)  # weights made in inference mode could not be kept as parameters
@torch.no_grad()
def make_layers(case: Case, inputs: cases.FFNInputs, plan: Plan | None, n: int) -> dict[str, list[Any]]:
    """n layers of each way, with equal weights in memory of their own."""
    in_fp8 = fp8.ways(case.M) if case.is_fp8 else {}
    sparse = (*_SPARSE, fp8.SPARSE) if case.is_sparse_fp8 else _SPARSE
    made: dict[str, list[Any]] = {name: [] for name in ("dense", *in_fp8, *sparse)}
    plan_fp8 = None if plan is None else plan_in_fp8(case, inputs)
    own = (inputs.w_gate, inputs.w_up, inputs.w_down)
    for i in range(n):
        w_gate, w_up, w_down = own if i == 0 else (w.clone() for w in own)
        weights = (w_gate, w_up, w_down) if case.gated else (None, w_gate, w_down)
        made["dense"].append(DenseFFN(*weights).eval())
        for name, (ffn_of, _) in in_fp8.items():
            made[name].append(ffn_of(*weights).eval())
        laid_out = DenseFFN(*weights).eval()
        neuron_major_(laid_out.down_proj)  # as sparsify_ does
        for name in sparse:
            layer = sparse_layer(laid_out, case.backend, plan)
            if name == "frozen":
                layer.freeze()
            elif name == fp8.SPARSE:
                quantize_(layer)  # drops the plan, which goes by other costs
                layer.set_plan(plan_fp8)
            made[name].append(layer)
    if _compiles(torch.device(case.device)):
        compiled = {"compiled": [_compiled(layer) for layer in made["dense"]]}
        for name, (_, how) in in_fp8.items():
            compiled[name] = [_compiled(layer, **how) for layer in made[name]]
        made = {"dense": made["dense"], **compiled, **{name: made[name] for name in sparse}}
    return made


def _compiles(device: torch.device) -> bool:
    """Not on a CPU, where Inductor needs a C++ compiler."""
    return device.type == "cuda"


def _compiled(layer: nn.Module, **how: Any) -> Any:
    return torch.compile(layer, fullgraph=True, dynamic=False, **how)  # equal layers share one compilation


def sparse_layer(dense: DenseFFN, backend: str, plan: Plan | None) -> SparseFFNBase:
    """On the weights of a dense layer, which it shares."""
    made_of: type[SparseFFNBase] = SparseFFN if dense.gate_proj is None else GatedSparseFFN
    layer = made_of.from_dense(dense, backend=backend)
    layer.set_plan(plan)
    return layer


def alternatives(case: Case, inputs: cases.FFNInputs, x: Tensor, plan: Plan | None) -> dict[str, Callable[[], Tensor]]:
    """A call of one layer of each way; or of ``GRAPHS`` CUDA graphs of ``GRAPH_LAYERS`` layers each."""
    layers = make_layers(case, inputs, plan, GRAPH_LAYERS if case.graph else 1)
    runs = {name: [functools.partial(layer, x) for layer in each] for name, each in layers.items()}
    if not case.graph:
        return {name: calls[0] for name, calls in runs.items()}
    for name in layers.keys() - {*DENSE}:
        with as_if_captured(*layers[name]):
            runs[name][0]()
    return {name: in_turn([replayed(calls) for _ in range(GRAPHS)]) for name, calls in runs.items()}
