"""``twell bench ffn``: one FFN, dense against sparse, on workloads of known sparsity.

Four ways: dense (a block as Hugging Face's, of ``nn.Linear``s), on a GPU the same compiled, sparse as ``sparsify_``
leaves a layer, and frozen (``twell.freeze_``); on a GPU with FP8 also dense in FP8, compiled, and sparse in FP8
(``twell.quantize_``) where there are kernels for it. Of each two times: the device's, and that of a call *as called*,
in a plain loop of Python with the host's time included.

A case is checked before it is timed: sparse output may err at most twice as much as PyTorch's own dense
output does against float64. After it, the sparse output must still be the same. A case that fails raises, and no
speedup is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from twell import reference
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase, neuron_major_, sparse_ffns
from twell.nn.quantize import quantize_
from twell.ops import backends
from twell.plan import Plan, choose_plan, costs_for
from twell.workbench.bench import cases, fp8, timing

PLAN_TOKENS = 4096  # whose counts make the plan; they are not timed
GRAPH_LAYERS = 16  # of a CUDA graph, with weights of their own: as in a model, none finds its weights in the L2 cache
GRAPHS = 3  # of each way, timed in turn: where kernels overlap, each graph may place their programs otherwise
_TRUTH_ROWS = 256  # rows compared with float64
_SLACK = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
_L2_BYTES = 60e6  # of an H200, as it is rounded up
_LEAST_READ = 1 / 8  # of a layer's weights: its gate in int8
_SPARSE = ("sparse", "frozen")
_SAME_DTYPE = ("dense", "compiled")  # dense ones, of the weights' own dtype
DENSE = (*_SAME_DTYPE, *fp8.NAMES)
SPARSE_FP8 = "sparse_fp8"
_FP8_ERROR, _FP8_ROWS = 0.25, 16  # error beyond which FP8 is broken; in fewer rows y may be next to nothing
_FP8_ROW = 0.5  # how far any row of sparse and dense FP8 may be apart, in terms of a usual row; 0.18 was seen


class WrongResult(RuntimeError):
    """The sparse output is further from the truth than the tolerance law allows."""


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
    graph: bool = False  # time replays of CUDA graphs of GRAPH_LAYERS layers, and give the time of one
    called: bool | None = None  # also as called; by default on a GPU: a CPU's times are those of calls anyway
    fp8: bool | None = None  # also dense in FP8; by default where that applies
    seed: int = 0

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
    """Measure each case; yields one JSON-ready row per case, as it is done."""
    inputs, made_for = None, None
    for case in cases_:
        # Weights do not depend on M, so cases that differ in M alone share one build: the largest.
        key = dataclasses.replace(case, M=0)
        if inputs is None or made_for != key:
            largest = max(c.M for c in cases_ if dataclasses.replace(c, M=0) == key)
            if backends.choose_backend(case.backend, torch.device(case.device)) == "triton":
                largest += PLAN_TOKENS
            inputs = cases.make(
                case.workload,
                largest,
                case.D,
                case.F,
                seed=case.seed,
                dtype=case.dtype,
                device=case.device,
            )
            made_for = key
        yield _run_case(case, inputs, seconds)


def _run_case(case: Case, inputs: cases.FFNInputs, seconds: float) -> dict[str, Any]:
    x = inputs.x[: case.M].contiguous()
    backend = backends.choose_backend(case.backend, x.device)
    plan = _plan(case, inputs) if backend == "triton" else None
    forget_compiled(x.device)
    runs = alternatives(case, inputs, x, plan)
    checked = {name: run().clone() for name, run in runs.items()}
    errors = _check_all(case, inputs, x, checked)
    errors_fp8, quantisation = check_fp8(x, inputs, case.gated, checked)
    times = timing.compare(runs, seconds=seconds, device=x.device)
    for name in runs.keys() - {*DENSE}:
        _check_same(runs[name](), checked[name], name)
    memory = {}
    if x.device.type == "cuda" and not case.graph:  # besides y
        memory = {name: timing.peak_bytes(run, x.device) - x.nbytes for name, run in runs.items()}
    del runs, checked
    if case.graph:
        times = {name: timing.Spread(*(round(t / GRAPH_LAYERS, 5) for t in spread)) for name, spread in times.items()}
    row = {
        "bench": "ffn",
        "workload": case.workload,
        "kind": "gated" if case.gated else "plain",
        "M": case.M,
        "D": case.D,
        "F": case.F,
        "dtype": str(case.dtype).removeprefix("torch."),
        "backend": backend,
        "graph": case.graph,
        **({"graph_layers": GRAPH_LAYERS, "graphs": GRAPHS} if case.graph else {}),
        "mean_active": round((torch.relu(nnf.linear(x, inputs.w_gate)) != 0).sum().item() / case.M, 2),
        **{f"{name}_ms": spread._asdict() for name, spread in times.items()},
        "speedup": speedup(times, "sparse"),
        "speedup_frozen": speedup(times, "frozen"),
        **over_fp8(times),
        **(_as_called(case, inputs, x, plan, seconds) if case.is_called else {}),
        **({"memory": memory} if memory else {}),
        "error": {**errors, **errors_fp8},
        **({"quantisation_error": quantisation} if quantisation else {}),
        **timing.environment(x.device),
    }
    if plan is not None:
        row["plan"] = plan_facts(plan)
        row["parts_ms"] = _parts(case, inputs, x, plan, seconds / 3)
    return row


def _as_called(case: Case, inputs: cases.FFNInputs, x: Tensor, plan: Plan | None, seconds: float) -> dict[str, Any]:
    """The fields of a row that tell what calls take in a plain loop, on as many layers as outgrow the L2 cache."""
    n_layers = called_layers(sum(w.nbytes for w in (inputs.w_gate, inputs.w_up, inputs.w_down)), x.device)
    layers = make_layers(case, inputs, plan, n_layers)
    if _compiles(x.device):
        layers["sparse_compiled"] = [_compiled(layer) for layer in layers["sparse"]]
    calls = {name: [functools.partial(layer, x) for layer in each] for name, each in layers.items()}
    checked = {name: each[0]() for name, each in calls.items()}
    _check_all(case, inputs, x, checked)
    check_fp8(x, inputs, case.gated, checked)

    def check_again() -> None:
        for name in calls.keys() - {*DENSE}:
            for call in calls[name]:  # of equal weights
                _check_same(call(), checked[name], f"{name}, as called,")

    check_again()
    times = timing.as_called(calls, seconds=seconds / 2, device=x.device)
    host = timing.host_us(calls, device=x.device)
    check_again()
    frozen: Any = layers["frozen"][0]
    return {
        "called_layers": n_layers,
        "called_ms": {name: spread._asdict() for name, spread in times.items()},
        "host_us": host,
        "speedup_called": speedup(times, "sparse"),
        "speedup_called_frozen": speedup(times, "frozen"),
        **(_like_against_like(times) if "compiled" in times else {}),
        **over_fp8(times, called=True),
        "frozen_bytes": frozen.frozen_bytes(),
    }


def speedup(times: Mapping[str, timing.Spread], of: str) -> float:
    """Over the faster dense one; not over FP8, whose results are others."""
    dense = min(times[name].p50 for name in _SAME_DTYPE if name in times)
    return round(dense / times[of].p50, 3)


def over_fp8(times: Mapping[str, timing.Spread], *, called: bool = False) -> dict[str, Any]:
    """Fields: of the faster of sparse and frozen, and of sparse in FP8, over the faster dense FP8 one, where one was
    timed."""
    dense = [times[name].p50 for name in fp8.NAMES if name in times]
    if not dense:
        return {}
    ratios = {"over_fp8": min(times[name].p50 for name in _SPARSE if name in times)}
    if SPARSE_FP8 in times:
        ratios["fp8"] = times[SPARSE_FP8].p50
    way = "speedup_called_" if called else "speedup_"
    fields: dict[str, Any] = {f"{way}{name}": round(min(dense) / ms, 3) for name, ms in ratios.items()}
    return fields if called else {**fields, "fp8_accumulation": "fast"}


def _like_against_like(times: Mapping[str, timing.Spread]) -> dict[str, float]:
    """Eager against eager, and compiled against compiled."""
    pairs = {"eager": ("dense", "sparse"), "compiled": ("compiled", "sparse_compiled")}
    return {f"speedup_called_{how}": round(times[a].p50 / times[b].p50, 3) for how, (a, b) in pairs.items()}


def called_layers(weight_bytes: int, device: torch.device) -> int:
    """How many layers of such weights to call in turn, so that none finds what it reads in an L2 cache; at least 4."""
    return 4 if device.type != "cuda" else max(4, min(64, math.ceil(_L2_BYTES / (_LEAST_READ * weight_bytes))))


def forget_compiled(device: torch.device) -> None:
    """Every number of tokens is compiled for itself, and torch.compile gives up on a function after eight."""
    if device.type == "cuda":
        torch.compiler.reset()


def plan_facts(plan: Plan) -> dict[str, Any]:
    predicted = plan.predicted and round(plan.predicted, 3)
    (few, most, least), (few_captured, _, least_captured) = (plan.tokens(captured=c) for c in (False, True))
    numbers = {"cap": plan.cap, "min_tokens": least, "few_tokens": few, "union_tokens": most if most > few else 0}
    captured = {"min_tokens_captured": least_captured, "few_tokens_captured": few_captured}
    return {"hot": len(plan.hot), **numbers, **captured, "predicted": predicted}


def _plan(case: Case, inputs: cases.FFNInputs, *, in_fp8: bool = False) -> Plan:
    """From the counts of other tokens than are timed."""
    r = torch.relu(nnf.linear(inputs.x[-PLAN_TOKENS:], inputs.w_gate))
    costs = costs_for(r.device, fp8=in_fp8)
    return choose_plan((r != 0).sum(0), len(r), costs, width=case.D, gated=case.gated)


# ---------------------------------------------------------------------------------------------------------
# Dense and sparse layers
# ---------------------------------------------------------------------------------------------------------


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
    """On the very memory of ``weight``."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made


@torch.inference_mode(False)  # what is made in inference mode cannot be kept
@torch.no_grad()
def make_layers(case: Case, inputs: cases.FFNInputs, plan: Plan | None, n: int) -> dict[str, list[Any]]:
    """n layers of equal weights, each with memory of its own, of every way."""
    in_fp8 = fp8.ways(case.M) if case.is_fp8 else {}
    sparse = (*_SPARSE, SPARSE_FP8) if case.is_sparse_fp8 else _SPARSE
    made: dict[str, list[Any]] = {name: [] for name in ("dense", *in_fp8, *sparse)}
    plan_fp8 = _plan(case, inputs, in_fp8=True) if case.is_sparse_fp8 and plan is not None else None
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
            elif name == SPARSE_FP8:
                quantize_(layer)  # which lets go of a plan by other costs
                layer.set_plan(plan_fp8)
            made[name].append(layer)
    if _compiles(torch.device(case.device)):
        compiled = {"compiled": [_compiled(layer) for layer in made["dense"]]}
        for name, (_, how) in in_fp8.items():
            compiled[name] = [_compiled(layer, **how) for layer in made[name]]
        made = {"dense": made["dense"], **compiled, **{name: made[name] for name in sparse}}
    return made


def _compiles(device: torch.device) -> bool:
    """On a CPU it would be a question to a C++ compiler."""
    return device.type == "cuda"


def _compiled(layer: nn.Module, **how: Any) -> Any:
    return torch.compile(layer, fullgraph=True, dynamic=False, **how)  # layers share what is compiled once


def sparse_layer(dense: DenseFFN, backend: str, plan: Plan | None) -> SparseFFNBase:
    """On the weights of a dense one, which it shares."""
    made_of: type[SparseFFNBase] = SparseFFN if dense.gate_proj is None else GatedSparseFFN
    layer = made_of.from_dense(dense, backend=backend)
    layer.set_plan(plan)
    return layer


@contextlib.contextmanager
def as_if_captured(*modules: nn.Module) -> Iterator[None]:
    """Sparse FFNs run by the thresholds they have in CUDA graphs: what they need is then compiled before a capture."""
    ffns = [ffn for module in modules for _, ffn in sparse_ffns(module)]
    eager = [ffn._plan_eager for ffn in ffns]
    for ffn in ffns:
        ffn._plan_eager = ffn._plan_captured
    try:
        yield
    finally:
        for ffn, plan in zip(ffns, eager, strict=True):
            ffn._plan_eager = plan


def alternatives(case: Case, inputs: cases.FFNInputs, x: Tensor, plan: Plan | None) -> dict[str, Callable[[], Tensor]]:
    """Every way, one layer of it; or as ``GRAPHS`` CUDA graphs of ``GRAPH_LAYERS`` layers each."""
    layers = make_layers(case, inputs, plan, GRAPH_LAYERS if case.graph else 1)
    runs = {name: [functools.partial(layer, x) for layer in each] for name, each in layers.items()}
    if not case.graph:
        return {name: calls[0] for name, calls in runs.items()}
    for name in layers.keys() - {*DENSE}:
        with as_if_captured(*layers[name]):
            runs[name][0]()
    return {name: in_turn([replayed(calls) for _ in range(GRAPHS)]) for name, calls in runs.items()}


def in_turn(runs: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """The first one when called, then the second, and after the last the first again."""
    cycle = itertools.cycle(runs)
    return lambda: next(cycle)()


def replayed(runs: Sequence[Callable[[], Tensor]], before: Callable[[], Any] = lambda: None) -> Callable[[], Tensor]:
    """``runs``, one after the other, as one CUDA graph: what the host does is done once. Returns what the last does.

    Each is run before it is captured, to compile what it needs, after ``before``. What they hold lives as long as the
    graph, which would go on reading weights that are freed.
    """
    for run in (*runs, *runs, *runs):
        before()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *_, out = (run() for run in runs)
    return functools.partial(_replay, graph, out, runs)


def _replay(graph: torch.cuda.CUDAGraph, out: Tensor, _held: Sequence[Callable[[], Tensor]]) -> Tensor:
    graph.replay()
    return out


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


def _check_all(case: Case, inputs: cases.FFNInputs, x: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    names = (*_SPARSE, *(name for name in ("sparse_compiled",) if name in outputs))
    errors = {name: check(x, inputs, case.gated, outputs["dense"], outputs[name]) for name in names}
    return {"dense": errors["sparse"]["dense"], **{name: of["sparse"] for name, of in errors.items()}}


def check_fp8(
    x: Tensor, inputs: cases.FFNInputs, gated: bool, outputs: Mapping[str, Tensor]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Relative errors of FP8 FFNs against float64, on rows as ``check`` takes them: of weights and x as FP8 has them
    (``fp8.meant``), and as they were before. Raises WrongResult where FP8 is broken."""
    errors: dict[str, float | None] = {}
    quantisation: dict[str, float | None] = {}
    rows = slice(None, None, max(1, len(x) // _TRUTH_ROWS))
    w = reference.Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    if "fp8" not in outputs:
        return errors, quantisation
    truth = reference.forward(x[rows].double(), w.to(torch.float64), want_stats=False).y
    for name in (name for name in (*fp8.NAMES, SPARSE_FP8) if name in outputs):
        y = outputs[name][rows]
        error = relative_error(y, fp8.meant(name, x[rows], w))
        allowed = _FP8_ERROR
        if name == SPARSE_FP8:  # all rows, too: the sample may miss the wrong one
            allowed = 1.05 * (errors["fp8"] or 0.0) + 1e-3  # where both are dense
            apart = (outputs[name].double() - outputs["fp8"].double()).norm(dim=1).max()
            error = max(error, 0.0 if apart <= _FP8_ROW * truth.norm(dim=1).median() else math.inf)
        if not error <= (allowed if len(y) >= _FP8_ROWS else math.inf):
            raise WrongResult(f"{name} output is wrong: relative error {error:.2e}; no speedup is reported")
        errors[name], quantisation[name] = _rounded(error), _rounded(relative_error(y, truth))
    return errors, quantisation


def _rounded(error: float) -> float | None:
    return float(f"{error:.3g}") if error < 1e6 else None  # where the truth is 0


def _check_same(y: Tensor, checked: Tensor, name: str) -> None:
    if not torch.equal(y, checked):
        raise WrongResult(f"{name} output is not what it was before it was timed; no speedup is reported")


def check(x: Tensor, inputs: cases.FFNInputs, gated: bool, dense: Tensor, sparse: Tensor) -> dict[str, float]:
    """Relative errors against float64 on up to 256 rows spread over x; raises WrongResult beyond the tolerance.

    All rows are compared between dense and sparse as well, since the sample may miss the wrong one.
    """
    step = max(1, len(x) // _TRUTH_ROWS)
    up = inputs.w_up if gated else None
    w = reference.Weights(inputs.w_gate, up, inputs.w_down).to(torch.float64)
    truth = reference.forward(x[::step].double(), w, want_stats=False).y
    errors = {"dense": relative_error(dense[::step], truth), "sparse": relative_error(sparse[::step], truth)}
    allowed = 2 * errors["dense"] + _SLACK[x.dtype]
    usual = truth.norm(dim=1).median().clamp(min=torch.finfo(x.dtype).tiny)  # 0 where no neuron fires
    row_error = ((sparse.double() - dense.double()).norm(dim=1) / usual).max().item()
    if not errors["sparse"] <= allowed or not row_error <= 10 * allowed:
        raise WrongResult(
            f"sparse output is wrong: relative error {errors['sparse']:.2e} (dense {errors['dense']:.2e}, allowed "
            f"{allowed:.2e}), worst row {row_error:.2e} from dense; no speedup is reported"
        )
    return {name: float(f"{e:.3g}") for name, e in errors.items()}


def relative_error(y: Tensor, truth: Tensor) -> float:
    """Where the truth is 0, so is the error of exactly 0."""
    return ((y.double() - truth).norm() / truth.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()
