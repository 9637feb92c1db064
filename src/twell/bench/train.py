"""``twell bench train``: forward and backward, dense against sparse: of one FFN, of a trace's layers, of a whole model.

One FFN (``run``). Timed are y and sum |h|, which L1 training adds to the loss, and the gradients of x and all weights
from fixed gradients of the two; old gradients are dropped first, in every alternative. Before that, y, the sum and
every gradient are compared with float64: sparse may err at most twice as much as dense PyTorch does, or WrongResult is
raised and no speedup is reported.

Layers of a trace (``measure_trace``). A trace holds positions, no values: as in ``traced.py`` the cold gate is timed on
a synthetic input, everything else of forward and backward on random values at the trace's positions.

A model (``measure_model``). A whole step: forward with cross-entropy and L1, backward, AdamW. As in ``model.py`` every
FFN has the weights of a workload and its input, written over the hidden states by a hook through which gradients pass.

Legend: M tokens, D model width, F hidden width.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from twell import ops, reference, weights
from twell.bench import cases, energy, ffn, timing
from twell.nn import SparseFFNBase
from twell.plan import Plan, choose_plan, costs_for
from twell.reference import Weights

if TYPE_CHECKING:
    from twell.bench import traced  # needs triton

_DL1 = 0.25  # against dy of size 1: a missing or doubled L1 gradient is far outside the tolerance. Time knows no values
_TRUTH_TOKENS = 4096  # in float64 at once: 185 MB a tensor at F 5632
_NEEDS = (True, True, True, True, False, False, False)  # gradients of x, gate, up, down; no biases
_CHECKED_TOKENS = 512  # of a trace
_LEARNING_RATE = 1e-7  # weights are written at every step, and stay as sparse as they were
_MAX_LOSS_DIFFERENCE = 0.01
_ENERGY_SECONDS = 2.0
OUT_OF_MEMORY = "out of memory"

Forward = Callable[..., tuple[Tensor, Tensor]]  # (x, gate, up or none, down) -> y, sum |h|


# ---------------------------------------------------------------------------------------------------------
# One FFN
# ---------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """What is given: x and weights, whose gradients are wanted, and the gradients of y and of sum |h|."""

    x: Tensor  # [M, D]
    w: Weights
    dy: Tensor  # [M, D]
    dl1: Tensor  # []

    @classmethod
    def of(cls, x: Tensor, w: Weights) -> Problem:
        def leaf(t: Tensor) -> Tensor:
            return t.detach().clone().requires_grad_()

        generator = torch.Generator(x.device).manual_seed(1)
        dy = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
        dl1 = torch.tensor(_DL1, dtype=reference.sum_dtype(x.dtype), device=x.device)
        own = Weights(leaf(w.gate), None if w.up is None else leaf(w.up), leaf(w.down))
        return cls(leaf(_clear_of_zero(x, w.gate)), own, dy, dl1)

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"dx": self.x, "dw_gate": self.w.gate, "dw_up": self.w.up, "dw_down": self.w.down}
        return {name: t for name, t in named.items() if t is not None}

    def drop_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def solve(self, forward: Forward) -> tuple[Tensor, Tensor]:
        """y and sum |h|; the gradients are left at the leaves. This is what is timed."""
        leaves = self.leaves
        self.drop_gradients()
        y, l1 = forward(*leaves.values())
        torch.autograd.backward([y, l1], [self.dy, self.dl1])
        return y.detach(), l1.detach()

    def results(self, forward: Forward) -> dict[str, Tensor]:
        y, l1 = self.solve(forward)
        gradients: dict[str, Any] = {name: leaf.grad for name, leaf in self.leaves.items()}
        return {"y": y, "l1": l1, **gradients}


def run(cases_: Sequence[ffn.Case], *, seconds: float = 3.0) -> Iterator[dict[str, Any]]:
    """Measure each case; yields one JSON-ready row per case, as it is done."""
    for case in cases_:
        backend = ops.choose_backend(case.backend, torch.device(case.device))
        n_seen = ffn.PLAN_TOKENS if backend == "triton" else 0
        inputs = cases.make(
            case.workload, case.M + n_seen, case.D, case.F, seed=case.seed, dtype=case.dtype, device=case.device
        )
        w = Weights(inputs.w_gate, inputs.w_up if case.gated else None, inputs.w_down)
        plan = _plan_by(inputs.x[case.M :], w) if n_seen else None
        yield _run_case(case, Problem.of(inputs.x[: case.M], w), plan, seconds)


def _plan_by(seen: Tensor, w: Weights) -> Plan:
    """From the counts of other tokens than are timed."""
    fired = (torch.relu(nnf.linear(seen, w.gate)) != 0).sum(0)
    costs = costs_for(seen.device, training=True)
    return choose_plan(fired, len(seen), costs, width=seen.shape[1], gated=w.up is not None)


def _run_case(case: ffn.Case, p: Problem, plan: Plan | None, seconds: float) -> dict[str, Any]:
    device = p.x.device
    forwards: dict[str, Forward] = {**_dense_forwards(p), "sparse": _sparse(case.backend, plan)}
    truth, counts = _truth(p)
    errors = check(truth, p.results(forwards["dense"]), p.results(forwards["sparse"]))
    del truth
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(p.solve, forward) for name, forward in forwards.items()
    }
    memory = {name: _peak_bytes(runs[name], p) for name in ("dense", "sparse")}
    times = timing.compare(runs, seconds=seconds, device=device)
    # An optimiser step makes the sparse path's copies of weights old; the next call makes them again, and only that.
    after_step = timing.compare(
        {"sparse": runs["sparse"]}, seconds=seconds / 3, device=device, before=functools.partial(_touch, p.w)
    )
    return _row(
        case,
        ops.choose_backend(case.backend, device),
        plan,
        mean_active=counts.sum().item() / case.M,
        times=times,
        error=errors,
        after_step_ms=after_step["sparse"]._asdict(),
        memory={**memory, "ratio": _ratio(memory["sparse"], memory["dense"]), "copies": weights.copied_bytes()},
        joules=_joules(runs, device, seconds),
    )


def _row(
    case: ffn.Case,
    backend: str,
    plan: Plan | None,
    *,
    mean_active: float,
    times: dict[str, timing.Spread],
    **more: Any,
) -> dict[str, Any]:
    dense, sparse = times["dense"].p50, times["sparse"].p50
    return {
        "bench": "train",
        "level": "ffn",
        "workload": case.workload,
        "kind": "gated" if case.gated else "plain",
        "M": case.M,
        "D": case.D,
        "F": case.F,
        "dtype": str(case.dtype).removeprefix("torch."),
        "backend": backend,
        "mean_active": round(mean_active, 2),
        **{f"{name}_ms": spread._asdict() for name, spread in times.items()},
        "speedup": round(min(dense, times["compiled"].p50 if "compiled" in times else dense) / sparse, 3),
        "speedup_eager": round(dense / sparse, 3),
        **more,
        **({} if plan is None else {"plan": ffn.plan_facts(plan)}),
        **timing.environment(torch.device(case.device)),
    }


def _dense_gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(nnf.linear(x, w_gate)) * nnf.linear(x, w_up)
    return nnf.linear(h, w_down), h.abs().sum(dtype=reference.sum_dtype(h.dtype))


def _dense_plain(x: Tensor, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(nnf.linear(x, w_up))
    return nnf.linear(h, w_down), h.abs().sum(dtype=reference.sum_dtype(h.dtype))


def _dense_forwards(p: Problem) -> dict[str, Forward]:
    """dense, on a GPU also dense compiled."""
    dense: Forward = _dense_plain if p.w.up is None else _dense_gated
    if p.x.device.type != "cuda":
        return {"dense": dense}
    return {"dense": dense, "compiled": torch.compile(dense, fullgraph=True, dynamic=False)}


def _sparse(backend: str, plan: Plan | None) -> Forward:
    encoded = None if plan is None else plan.encode()

    def forward(x: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        op: Any = ops.gated_ffn if len(w) == 3 else ops.ffn
        y, stats = op(x, *w, backend=backend, plan=encoded, return_stats=True)
        return y, stats.l1_sum

    return forward


@torch.no_grad()
def _touch(w: Weights) -> None:
    """Write every weight, as an optimiser does, without changing it."""
    for t in w:
        if t is not None:
            t.mul_(1)


def _peak_bytes(run: Callable[[], Any], p: Problem) -> int:
    """The most memory that one forward and backward takes besides x, dy and the weights; gradients are part of it."""
    device = p.x.device
    run()  # what is made once is not counted
    p.drop_gradients()
    if device.type != "cuda":
        return timing.peak_bytes(run)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None


def _joules(runs: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float | None] | None:
    """Joules of a call of each alternative; None where they cannot be measured."""
    per_call = {name: energy.joules(run, device, min(seconds, _ENERGY_SECONDS)) for name, run in runs.items()}
    return None if None in per_call.values() else per_call


# ---------------------------------------------------------------------------------------------------------
# What is right
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _clear_of_zero(x: Tensor, w_gate: Tensor) -> Tensor:
    """x with tokens repeated in place of those for which a gate is within rounding of 0.

    There relu has no gradient, and which side of 0 a sum falls on depends on its order: dense and sparse would both be
    right and differ. It takes about one token in 400 at D 2048, F 5632.
    """
    rounding = 4 * torch.finfo(reference.sum_dtype(x.dtype)).eps
    gate = w_gate.double()
    is_clear = torch.cat(
        [
            ((part @ gate.T).abs() > rounding * torch.outer(part.norm(dim=1), gate.norm(dim=1))).all(1)
            for part in (chunk.double() for chunk in x.split(_TRUTH_TOKENS))
        ]
    )
    clear, unclear = is_clear.nonzero()[:, 0], (~is_clear).nonzero()[:, 0]
    if len(clear) == 0 or len(unclear) == 0:
        return x
    source = torch.arange(len(x), device=x.device)
    source[unclear] = clear[torch.arange(len(unclear), device=x.device) % len(clear)]
    return x[source]


def _formulas(x: Tensor, w: Weights, dy: Tensor, dl1: Tensor, r: Tensor) -> dict[str, Tensor]:
    """y, sum |h| and the gradients by their formulas at the gate r [M, F], in the dtype of the arguments."""
    u = None if w.up is None else nnf.linear(x, w.up)
    h = r if u is None else r * u
    gradients = reference.backward(dy, dl1, x, w, r, u, needs=_NEEDS)
    dw = gradients.weights
    of_up = {} if dw.up is None else {"dw_up": dw.up}
    return {
        "y": nnf.linear(h, w.down),
        "l1": h.abs().sum(dtype=reference.sum_dtype(h.dtype)),
        "dx": gradients.x,
        "dw_gate": dw.gate,
        **of_up,
        "dw_down": dw.down,
    }


@torch.no_grad()
def _truth(p: Problem) -> tuple[dict[str, Tensor], Tensor]:
    """``Problem.results`` in float64, some tokens at a time, and how many tokens each neuron fired for: [F]."""
    w, dl1 = p.w.to(torch.float64), p.dl1.double()
    counts = torch.zeros(len(w.gate), dtype=torch.int64, device=p.x.device)
    by_token: dict[str, list[Tensor]] = {"y": [], "dx": []}
    sums: dict[str, Tensor] = {}
    for x, dy in zip(p.x.split(_TRUTH_TOKENS), p.dy.split(_TRUTH_TOKENS), strict=True):
        r = torch.relu(nnf.linear(x.double(), w.gate))
        counts += (r != 0).sum(0)
        for name, part in _formulas(x.double(), w, dy.double(), dl1, r).items():
            if name in by_token:
                by_token[name].append(part)
            else:
                sums[name] = sums[name] + part if name in sums else part
    return sums | {name: torch.cat(parts) for name, parts in by_token.items()}, counts


def check(truth: dict[str, Tensor], dense: dict[str, Tensor], sparse: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Relative errors of both against float64; raises WrongResult where sparse errs beyond the tolerance.

    Of y also the worst row is looked at: one wrong token of many hardly shows in the whole.
    """
    slack = ffn._SLACK[dense["y"].dtype]
    errors = {
        kind: {name: ffn.relative_error(got[name], truth[name]) for name in dense}
        for kind, got in (("dense", dense), ("sparse", sparse))
    }
    for name, error in errors["sparse"].items():
        allowed = 2 * errors["dense"][name] + slack
        if not error <= allowed:
            raise ffn.WrongResult(
                f"sparse {name} is wrong: relative error {error:.2e} (dense {errors['dense'][name]:.2e}, allowed "
                f"{allowed:.2e}); no speedup is reported"
            )
    off = (sparse["y"].double() - truth["y"]).norm(dim=1) / truth["y"].norm(dim=1).median()
    if not off.max() <= 10 * (2 * errors["dense"]["y"] + slack):
        raise ffn.WrongResult(f"sparse y of token {int(off.argmax())} is wrong; no speedup is reported")
    return {kind: {name: float(f"{e:.3g}") for name, e in of.items()} for kind, of in errors.items()}


# ---------------------------------------------------------------------------------------------------------
# The layers of a trace
# ---------------------------------------------------------------------------------------------------------


def measure_trace(
    layer: traced.Layer, M: int, D: int, *, dtype: torch.dtype, device: torch.device, seconds: float = 3.0
) -> dict[str, Any]:
    """A JSON-ready row for one layer, as a gated FFN on a GPU (or in Triton's interpreter)."""
    from twell.bench.traced import plan_and_rest  # needs triton

    active = layer.active.to(device)
    _, timed = plan_and_rest(active, M, D)
    half = len(active) // 2
    plan = choose_plan(active[:half].sum(0), half, costs_for(device, training=True), width=D)
    F, mean = timed.shape[1], timed.sum().item() / M
    inputs = cases.make(f"skew{max(1, round(mean))}", M, D, F, dtype=dtype, device=device)
    p = Problem.of(inputs.x, Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    del inputs
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(p.solve, forward) for name, forward in _dense_forwards(p).items()
    }
    errors = None
    if plan.is_dense or plan.min_tokens > M:
        runs["sparse"] = functools.partial(p.solve, _sparse("triton", None))
        times = timing.compare(runs, seconds=seconds, device=device)
    else:
        errors = _check_replay(p, plan, timed)
        replay = _Replay(p, plan, timed)
        runs |= {"gate": replay.cold_gate, "rest": replay.rest}
        times = timing.compare(runs, seconds=seconds, device=device, before=replay.restore)
        both = zip(times["gate"], times["rest"], strict=True)
        times["sparse"] = timing.Spread(*(round(gate + rest, 4) for gate, rest in both))
    case = ffn.Case(workload=layer.name, M=M, D=D, F=F, dtype=dtype, device=str(device), backend="triton")
    return _row(case, "triton", plan, mean_active=mean, times=times, error=errors, memory=None, joules=None)


class _Replay:
    """Forward and backward of an FFN with recorded positions: its cold gate, and everything else."""

    def __init__(self, p: Problem, plan: Plan, active: Tensor) -> None:
        from twell.bench.parts import Parts  # needs triton
        from twell.kernels import lists

        self.p, self.plan = p, plan
        self.x = p.x.detach()
        self.w = Weights._make(None if t is None else t.detach() for t in p.w)
        self.parts = Parts(self.x, self.w, plan)
        self.parts.replay(active)
        self.marks = lists.new_marks(len(self.x), self.x.device)

    def restore(self) -> None:
        """What ``rest`` needs before: it writes over gate and marks."""
        self.parts.restore()
        self.marks[:4] = 0

    def cold_gate(self) -> Tensor:
        return self.parts.cold_gate(self.parts.tiles.gate, self.parts.tiles.use_tma)

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        from twell.kernels import hybrid

        parts, tiles = self.parts, self.parts.tiles
        common = (self.x, self.w, parts.layout)
        gate = (parts.r, parts.bitmap, self.marks)
        y, l1, _, saved = hybrid.after_gate(
            *common, "relu", self.plan, None, tiles, parts.programs, *gate, want_stats=True
        )
        gradients = hybrid.backward(self.p.dy, self.p.dl1, *common, saved, "relu", self.plan, None, tiles, _NEEDS)
        dw = gradients.weights
        assert dw.up is not None
        return {"y": y, "l1": l1, "dx": gradients.x, "dw_gate": dw.gate, "dw_up": dw.up, "dw_down": dw.down}


@torch.no_grad()
def _check_replay(p: Problem, plan: Plan, active: Tensor) -> dict[str, dict[str, float]]:
    """Errors of everything after the gate on the first tokens, beside those of dense formulas at the same positions."""
    few = p._replace(x=p.x[:_CHECKED_TOKENS], dy=p.dy[:_CHECKED_TOKENS])
    replay = _Replay(few, plan, active[:_CHECKED_TOKENS])
    replay.restore()
    cold = replay.parts.r.double()
    sparse = replay.rest()
    x, w, dy, dl1 = few.x.double(), few.w.to(torch.float64), few.dy.double(), few.dl1.double()
    of_x = torch.relu(nnf.linear(x, w.gate))
    r = of_x.clone()  # hot neurons' gate follows from x, the cold ones' from the trace
    rows = replay.parts.layout.cold_rows
    r[:, slice(None) if rows is None else rows.long()] = cold
    # The backward computes the gate of heavy tokens again from x: there it follows x, not the trace.
    r_back = of_x.where(_is_heavy(cold, plan)[:, None], r)

    def both(x: Tensor, w: Weights, dy: Tensor, dl1: Tensor) -> dict[str, Tensor]:
        forward, backward = (_formulas(x, w, dy, dl1, gate.to(x.dtype)) for gate in (r, r_back))
        return forward | {name: g for name, g in backward.items() if name.startswith("d")}

    return check(both(x, w, dy, dl1), both(few.x, few.w, few.dy, few.dl1), sparse)


def _is_heavy(cold: Tensor, plan: Plan) -> Tensor:
    """bool [M]: tokens without a list, see ``lists.py``."""
    from twell.kernels import lists

    n = (cold != 0).sum(1)
    too_many = ((n > plan.cap) & (n <= lists.LONG)).sum() > lists.N_LONG  # for lists of their own
    return (n > plan.cap) & ((n > lists.LONG) | too_many)


# ---------------------------------------------------------------------------------------------------------
# A model
# ---------------------------------------------------------------------------------------------------------


def measure_model(
    config: Any,
    workload: str,
    *,
    batch: int,
    length: int,
    l1: float,
    dtype: torch.dtype,
    device: torch.device,
    backend: str = "auto",
    variants: Sequence[str] = ("dense", "sparse"),
    seconds: float = 3.0,
) -> dict[str, Any]:
    """A JSON-ready row. ``config``: of a Llama with ReLU. One variant after the other, each alone in memory.

    A variant is a dict, or "out of memory". Its ``memory``, in bytes: ``peak`` of a step; ``activations``, the peak
    less weights, gradients and optimiser state; ``kept``, what a forward leaves for its backward (None on a CPU).
    """
    results: dict[str, Any] = {}
    for name in variants:
        try:
            results[name] = _measure_variant(name, config, workload, batch, length, l1, dtype, device, backend, seconds)
        except torch.OutOfMemoryError:
            results[name] = OUT_OF_MEMORY
        gc.collect()  # modules and their hooks refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "bench": "train",
        "level": "model",
        "workload": workload,
        "layers": config.num_hidden_layers,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "batch": batch,
        "length": length,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": ops.choose_backend(backend, device),
        **results,
        **_compared(results),
        **timing.environment(device),
    }


def _compared(results: dict[str, Any]) -> dict[str, Any]:
    """What follows from both variants; raises where they do not compute the same."""
    dense, sparse = results.get("dense"), results.get("sparse")
    if not isinstance(dense, dict) or not isinstance(sparse, dict):
        return {}
    for name in ("cross_entropy", "l1"):
        if not abs(sparse[name] - dense[name]) <= _MAX_LOSS_DIFFERENCE * abs(dense[name]):
            raise ffn.WrongResult(
                f"the sparse model's first {name} is {sparse[name]:.5g}, the dense model's {dense[name]:.5g}; "
                "no speedup is reported"
            )
    ratios = {"speedup": round(dense["step_ms"]["p50"] / sparse["step_ms"]["p50"], 3)}
    ratios |= {
        f"{name}_ratio": _ratio(sparse["memory"][name], dense["memory"][name]) for name in ("peak", "activations")
    }
    if dense["memory"]["kept"] is not None:
        ratios["kept_ratio"] = _ratio(sparse["memory"]["kept"], dense["memory"]["kept"])
    if dense["joules"] is not None:
        ratios["joules_ratio"] = _ratio(sparse["joules"], dense["joules"])
    return ratios


def _measure_variant(
    name: str,
    config: Any,
    workload: str,
    batch: int,
    length: int,
    l1: float,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    seconds: float,
) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, length))
    model.to(dtype).train()
    tokens = batch * length
    inputs = cases.make(
        workload, tokens + ffn.PLAN_TOKENS, config.hidden_size, config.intermediate_size, dtype=dtype, device=device
    )
    fired = (torch.relu(nnf.linear(inputs.x[tokens:], inputs.w_gate)) != 0).sum(0)
    x = inputs.x[:tokens].view(batch, length, -1).clone()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight.copy_(inputs.w_gate)
            layer.mlp.up_proj.weight.copy_(inputs.w_up)
            layer.mlp.down_proj.weight.copy_(inputs.w_down)
    del inputs
    plan = _make_sparse(model, fired, backend) if name == "sparse" else None
    for layer in model.model.layers:
        layer.mlp = _MeasuredFFN(layer.mlp, x)
    training = _Training(model, ids, l1)
    first = training.first_losses()
    training.step()  # the second warm-up
    memory = training.memory()
    times = timing.compare({"step": training.step}, seconds=seconds, warmups=0, device=device)["step"]
    return {
        "step_ms": times._asdict(),
        "tokens_per_ms": round(tokens / times.p50, 2),
        **first,
        "memory": memory,
        "joules": energy.joules(training.step, device, min(seconds, 2 * _ENERGY_SECONDS)),
        **({} if plan is None else {"plan": ffn.plan_facts(plan)}),
    }


def _make_sparse(model: Any, fired: Tensor, backend: str) -> Plan | None:
    """Convert the FFNs; returns their plan, if they have one: all see the same counts."""
    from twell.hf.convert import sparsify_

    sparsify_(model)
    plan = None
    for layer in model.model.layers:
        layer.mlp.backend = backend
        if ops.choose_backend(backend, fired.device) == "triton":
            plan = layer.mlp.plan_from_counts(fired, ffn.PLAN_TOKENS, training=True)
    return plan


class _Overwrite(torch.autograd.Function):
    """Other values in place of hidden states; gradients pass through. Costs no memory: what an FFN keeps of its input
    for the backward is, as in a real model, the one tensor of the layer's own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(hidden)
        return hidden.copy_(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


class _MeasuredFFN(nn.Module):
    """A dense or sparse block that runs on x [batch, length, D] and keeps sum |h| for the loss."""

    def __init__(self, block: Any, x: Tensor) -> None:
        super().__init__()
        self.block, self.x = block, x
        self.l1_sum: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        x = _Overwrite.apply(hidden, self.x)
        if isinstance(self.block, SparseFFNBase):
            y, stats = self.block(x, return_stats=True)
            self.l1_sum = stats.l1_sum
        else:
            projections = (self.block.gate_proj, self.block.up_proj, self.block.down_proj)
            y, self.l1_sum = _dense_gated(x, *(linear.weight for linear in projections))
        return y


class _Training:
    """A model, its optimiser, and one batch."""

    def __init__(self, model: Any, ids: Tensor, l1: float) -> None:
        self.model, self.ids, self.l1 = model, ids, l1
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=_LEARNING_RATE, fused=True if ids.device.type == "cuda" else None
        )

    def losses(self) -> tuple[Tensor, Tensor]:
        """Cross-entropy as the model computes it, and sum |h| of a token, in the mean over tokens and layers."""
        cross_entropy = self.model(self.ids, labels=self.ids, use_cache=False).loss
        ffns = [layer.mlp for layer in self.model.model.layers]
        l1_sum = torch.stack([ffn.l1_sum for ffn in ffns]).mean()
        for each in ffns:
            each.l1_sum = None
        return cross_entropy, l1_sum / self.ids.numel()

    def learn_from(self, cross_entropy: Tensor, l1: Tensor) -> None:
        (cross_entropy + self.l1 * l1).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def first_losses(self) -> dict[str, float]:
        """Of a step."""
        losses = self.losses()
        self.learn_from(*losses)
        return dict(zip(("cross_entropy", "l1"), (loss.item() for loss in losses), strict=True))

    def step(self) -> None:
        self.learn_from(*self.losses())

    def memory(self) -> dict[str, int | None]:
        """Of one more step; see ``measure_model``."""
        device = self.ids.device
        of_weights = sum(p.nbytes for p in self.model.parameters())
        of_optimizer = sum(
            t.nbytes for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        )
        kept = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            losses = self.losses()
            kept = torch.cuda.memory_allocated(device) - before
            self.learn_from(*losses)
            peak = torch.cuda.max_memory_allocated(device)
        else:
            peak = timing.peak_bytes(self.step) + of_weights + of_optimizer
        return {
            "peak": peak,
            "activations": peak - 2 * of_weights - of_optimizer,  # gradients are as large as the weights
            "kept": kept,
            "weights": of_weights,
            "optimizer": of_optimizer,
        }
