"""``twell bench ffn``: one FFN, dense against sparse, on workloads of known sparsity.

A case is checked before it is timed: sparse output may err at most twice as much as PyTorch's own dense
output does against float64. After it, the sparse output must still be the same. A case that fails raises, and no
speedup is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import ops, reference
from twell.bench import cases, timing
from twell.plan import Plan, choose_plan, costs_for

PLAN_TOKENS = 4096  # whose counts make the plan; they are not timed
GRAPH_LAYERS = 16  # of a CUDA graph, with weights of their own: as in a model, none finds its weights in the L2 cache
GRAPHS = 3  # of each way, timed in turn: where kernels overlap, each graph may place their programs otherwise
_TRUTH_ROWS = 256  # rows compared with float64
_SLACK = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}


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
    seed: int = 0


@torch.inference_mode()
def run(cases_: list[Case], *, seconds: float = 3.0) -> Iterator[dict[str, Any]]:
    """Measure each case; yields one JSON-ready row per case, as it is done."""
    inputs, made_for = None, None
    for case in cases_:
        # Weights do not depend on M, so cases that differ in M alone share one build: the largest.
        key = dataclasses.replace(case, M=0)
        if inputs is None or made_for != key:
            largest = max(c.M for c in cases_ if dataclasses.replace(c, M=0) == key)
            if ops.choose_backend(case.backend, torch.device(case.device)) == "triton":
                largest += PLAN_TOKENS
            with torch.inference_mode(False):  # weights as a model has them, with version counters
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
    backend = ops.choose_backend(case.backend, x.device)
    plan = _plan(case, inputs) if backend == "triton" else None
    runs = alternatives(case, inputs, x, plan)
    checked = runs["sparse"]().clone()
    errors = check(x, inputs, case.gated, runs["dense"](), checked)
    times = timing.compare(runs, seconds=seconds, device=x.device)
    if not torch.equal(runs["sparse"](), checked):
        raise WrongResult("sparse output is not what it was before it was timed; no speedup is reported")
    if case.graph:
        times = {name: timing.Spread(*(round(t / GRAPH_LAYERS, 5) for t in spread)) for name, spread in times.items()}
    fastest_dense = min(times[name].p50 for name in times if name != "sparse")
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
        "speedup": round(fastest_dense / times["sparse"].p50, 3),
        "error": errors,
        **timing.environment(x.device),
    }
    if plan is not None:
        row["plan"] = plan_facts(plan)
        row["parts_ms"] = _parts(case, inputs, x, plan, seconds)
    return row


def plan_facts(plan: Plan) -> dict[str, Any]:
    predicted = plan.predicted and round(plan.predicted, 3)
    numbers = {"cap": plan.cap, "min_tokens": plan.min_tokens, "few_tokens": plan.few_tokens}
    return {"hot": len(plan.hot), **numbers, "predicted": predicted}


def _plan(case: Case, inputs: cases.FFNInputs) -> Plan:
    """From the counts of other tokens than are timed."""
    r = torch.relu(nnf.linear(inputs.x[-PLAN_TOKENS:], inputs.w_gate))
    return choose_plan((r != 0).sum(0), len(r), costs_for(r.device), width=case.D, gated=case.gated)


def alternatives(case: Case, inputs: cases.FFNInputs, x: Tensor, plan: Plan | None) -> dict[str, Callable[[], Tensor]]:
    """dense, on a GPU also dense compiled, and sparse; as ``GRAPHS`` CUDA graphs, of ``GRAPH_LAYERS`` layers each."""
    with torch.inference_mode(False):  # what is made in inference mode cannot be kept
        encoded = None if plan is None else plan.encode()
        own = (inputs.w_gate, inputs.w_up, inputs.w_down)
        copies = [tuple(w.clone() for w in own) for _ in range(GRAPH_LAYERS - 1 if case.graph else 0)]

    def dense_gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return nnf.linear(torch.relu(nnf.linear(x, w_gate)) * nnf.linear(x, w_up), w_down)

    def dense_plain(x: Tensor, w_gate: Tensor, _: Tensor, w_down: Tensor) -> Tensor:
        return nnf.linear(torch.relu(nnf.linear(x, w_gate)), w_down)

    def sparse(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        if case.gated:
            return ops.gated_ffn(x, w_gate, w_up, w_down, backend=case.backend, plan=encoded)
        return ops.ffn(x, w_gate, w_down, backend=case.backend, plan=encoded)

    dense = dense_gated if case.gated else dense_plain
    ways: dict[str, Callable[..., Tensor]] = {"dense": dense}
    if x.device.type == "cuda":
        ways["compiled"] = torch.compile(dense, fullgraph=True, dynamic=False)
    ways["sparse"] = sparse
    runs = {name: [functools.partial(way, x, *w) for w in (own, *copies)] for name, way in ways.items()}
    if not case.graph:
        return {name: layers[0] for name, layers in runs.items()}
    return {name: in_turn([replayed(layers) for _ in range(GRAPHS)]) for name, layers in runs.items()}


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
    from twell.bench.parts import Parts  # needs triton, which a machine without a GPU may lack

    if plan.is_dense or plan.min_tokens > case.M:
        return {}
    w = reference.Weights(inputs.w_gate, inputs.w_up if case.gated else None, inputs.w_down)
    return parts_ms(Parts(x, w, plan), w, seconds)


def parts_ms(parts: Any, w: reference.Weights, seconds: float) -> dict[str, float]:
    """Medians of the parts of the split, each timed alone, and of the dense gate."""
    tiles, x = parts.tiles, parts.x
    runs: dict[str, Callable[[], Any]] = {
        "dense gate": lambda: nnf.linear(x, w.gate),
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
    row_error = ((sparse.double() - dense.double()).norm(dim=1) / truth.norm(dim=1).median()).max().item()
    if not errors["sparse"] <= allowed or not row_error <= 10 * allowed:
        raise WrongResult(
            f"sparse output is wrong: relative error {errors['sparse']:.2e} (dense {errors['dense']:.2e}, allowed "
            f"{allowed:.2e}), worst row {row_error:.2e} from dense; no speedup is reported"
        )
    return {name: float(f"{e:.3g}") for name, e in errors.items()}


def relative_error(y: Tensor, truth: Tensor) -> float:
    return ((y.double() - truth).norm() / truth.norm()).item()
