"""``twell bench train``: forward and backward of one FFN, dense against sparse.

Timed: y and sum |h|, which L1 training adds to the loss, and the gradients of x and all weights from fixed gradients of
the two. Every alternative first drops the old gradients. Before anything is timed, y, the sum and every gradient are
compared with float64: sparse may err at most twice as much as dense PyTorch does.

*As called*: the same by modules in a plain loop, the host's time included, with a step of fused AdamW after every
backward. The step writes all weights and changes none (its rate is 0), so results are compared again afterwards.

``train_ffn_trace.py`` times layers of a trace, ``train_model.py`` whole models.

Legend: M tokens, D model width, F hidden width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell import energy, reference
from twell.ops import backends
from twell.ops import functional as ops
from twell.plan import Plan
from twell.reference import Weights
from twell.workbench.bench import cases, ffn, timing
from twell.workbench.bench.checks import SLACK, WrongResult, relative_error, require_same

_DL1 = 0.25  # where dy is of size 1: a missing or doubled L1 gradient is far outside the tolerance
_TRUTH_TOKENS = 4096  # at once in float64: 185 MB a tensor at F 5632
NEEDS = (True, True, True, True, False, False, False)  # gradients of x, gate, up, down; no biases
ENERGY_SECONDS = 2.0

Forward = Callable[..., tuple[Tensor, Tensor]]  # (x, gate, up or none, down) -> y, sum |h|


class Problem(NamedTuple):
    """x and weights, whose gradients are wanted, and the gradients of y and of sum |h|."""

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
        """y and sum |h|; leaves the gradients at the leaves. This is what is timed."""
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
    """Measure each case; yield its JSON-ready row as soon as it is done."""
    for case in cases_:
        backend = backends.choose_backend(case.backend, torch.device(case.device))
        n_seen = ffn.PLAN_TOKENS if backend == "triton" else 0
        inputs = cases.make(case.workload, case.M + n_seen, case.D, case.F, dtype=case.dtype, device=case.device)
        w = Weights(inputs.w_gate, inputs.w_up if case.gated else None, inputs.w_down)
        seen = inputs.x[case.M :]
        plan = ffn.plan_for(seen, w.gate, gated=case.gated, training=True) if n_seen else None
        yield _run_case(case, Problem.of(inputs.x[: case.M], w), plan, seconds)


def _run_case(case: ffn.Case, p: Problem, plan: Plan | None, seconds: float) -> dict[str, Any]:
    device = p.x.device
    ffn.forget_compiled(device)
    forwards: dict[str, Forward] = {**dense_forwards(p.x.device), "sparse": sparse_forward(case.backend, plan)}
    truth, counts = _truth(p)
    dense = p.results(forwards["dense"])
    errors = check(truth, dense, p.results(forwards["sparse"]))
    loops = _loops(p, case.backend, plan) if case.is_called else {}
    checked = {name: loop.results() for name, loop in loops.items() if name == "sparse"}
    for found in checked.values():
        check(truth, dense, found)
    del truth, dense
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(p.solve, forward) for name, forward in forwards.items()
    }
    memory = {name: _peak_bytes(runs[name], p) for name in ("dense", "sparse")}
    times = timing.compare(runs, seconds=seconds, device=device)
    p.drop_gradients()
    called = _as_called(p, loops, seconds) if loops else {}
    for name, found in checked.items():
        again = loops[name].results()
        for key, value in found.items():
            require_same(again[key], value, f"{name} {key}")
    del loops, checked
    return make_row(
        case,
        backends.choose_backend(case.backend, device),
        plan,
        mean_active=counts.sum().item() / case.M,
        times=times,
        **called,
        error=errors,
        memory={**memory, "ratio": ratio(memory["sparse"], memory["dense"])},
        joules=_joules(runs, device, seconds),
    )


# ---------------------------------------------------------------------------------------------------------
# As called
# ---------------------------------------------------------------------------------------------------------


class TrainedFFN(ffn.DenseFFN):
    """A dense block that also gives sum |h|."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.hidden(x)
        return self.down_proj(h), h.abs().sum(dtype=reference.sum_dtype(h.dtype))


class _Loop:
    """A layer with its own weights, and what a training loop does with it. ``call``: x -> y, sum |h|."""

    def __init__(self, p: Problem, block: ffn.DenseFFN, call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self.call, self.dy, self.dl1 = call, p.dy, p.dl1
        self.x = p.x.detach().clone().requires_grad_()
        linears = {"dw_gate": block.gate_proj, "dw_up": block.up_proj, "dw_down": block.down_proj}
        if block.gate_proj is None:  # a plain FFN: its gate is called up_proj
            linears = {"dw_gate": block.up_proj, "dw_down": block.down_proj}
        self.weights = {name: linear.weight for name, linear in linears.items() if linear is not None}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0, fused=True)

    def forward_backward(self) -> tuple[Tensor, Tensor]:
        y, l1 = self.call(self.x)
        torch.autograd.backward([y, l1], [self.dy, self.dl1])
        return y, l1

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.x.grad = None

    def iteration(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.drop_gradients()

    def results(self) -> dict[str, Tensor]:
        """As ``Problem.results``."""
        self.drop_gradients()
        y, l1 = self.forward_backward()
        gradients: dict[str, Any] = {"dx": self.x.grad, **{name: w.grad for name, w in self.weights.items()}}
        self.drop_gradients()
        return {"y": y.detach(), "l1": l1.detach(), **gradients}


def _block(p: Problem) -> TrainedFFN:
    """Dense, with its own weights: contiguous, as ``sparsify_`` leaves them in training."""
    w_gate, w_up, w_down = (None if w is None else w.detach().clone() for w in (p.w.gate, p.w.up, p.w.down))
    assert w_gate is not None and w_down is not None
    return (TrainedFFN(None, w_gate, w_down) if w_up is None else TrainedFFN(w_gate, w_up, w_down)).train()


def _loops(p: Problem, backend: str, plan: Plan | None) -> dict[str, _Loop]:
    """A loop of dense, on a GPU of dense compiled, and of sparse."""
    dense, shared = _block(p), _block(p)
    loops = {"dense": _Loop(p, dense, dense)}
    if p.x.device.type == "cuda":
        compiled = _block(p)
        loops["compiled"] = _Loop(p, compiled, torch.compile(compiled, fullgraph=True, dynamic=False))
    sparse = ffn.sparse_layer(shared, backend, plan)

    def call_sparse(x: Tensor) -> tuple[Tensor, Tensor]:
        y, stats = sparse(x, return_stats=True)
        return y, stats.l1_sum

    loops["sparse"] = _Loop(p, shared, call_sparse)
    return loops


def _as_called(p: Problem, loops: dict[str, _Loop], seconds: float) -> dict[str, Any]:
    """Fields of a row: what an iteration takes in a plain loop."""
    device, block = p.x.device, _block(p)
    stepping = _Loop(p, block, block)  # the step alone, on gradients that stay
    stepping.forward_backward()

    def drop_gradients() -> None:
        for loop in loops.values():
            loop.drop_gradients()

    iterations: dict[str, list[Callable[[], Any]]] = {name: [loop.iteration] for name, loop in loops.items()}
    times = timing.as_called({**iterations, "step": [stepping.optimizer.step]}, seconds=seconds, device=device)
    calls: dict[str, list[Callable[[], Any]]] = {name: [loop.forward_backward] for name, loop in loops.items()}
    host = timing.host_us(calls, device=device, after=drop_gradients)
    step = times.pop("step")
    without = {name: _less(spread, step.p50) for name, spread in times.items()}
    return {
        "called_ms": timing.by_way(without),
        "called_with_step_ms": timing.by_way(times),
        "optimizer_ms": step._asdict(),
        "host_us": host,
        "speedup_called": ffn.speedup(without, "sparse"),
        "speedup_called_with_step": ffn.speedup(times, "sparse"),
    }


def _less(spread: timing.Spread, ms: float) -> timing.Spread:
    """``spread`` less ``ms``, but above 0, which it may not be on a noisy machine."""
    return timing.Spread(*(round(max(t - ms, 1e-3), 4) for t in spread))


def make_row(
    case: ffn.Case,
    backend: str,
    plan: Plan | None,
    *,
    mean_active: float,
    times: dict[str, timing.Spread],
    **more: Any,
) -> dict[str, Any]:
    return {
        **ffn.fields(case, "train", backend, mean_active, times),
        "level": "ffn",
        "speedup": ffn.speedup(times, "sparse"),
        "speedup_eager": round(times["dense"].p50 / times["sparse"].p50, 3),
        **more,
        **({} if plan is None else {"plan": ffn.plan_facts(plan)}),
    }


def dense_forward(x: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
    """By PyTorch. ``w``: gate, up and down, or up and down of a plain FFN."""
    first, *up, w_down = w
    h = torch.relu(nnf.linear(x, first))
    h = h * nnf.linear(x, up[0]) if up else h
    return nnf.linear(h, w_down), h.abs().sum(dtype=reference.sum_dtype(h.dtype))


def dense_forwards(device: torch.device) -> dict[str, Forward]:
    """Dense, on a GPU also dense compiled."""
    if device.type != "cuda":
        return {"dense": dense_forward}
    return {"dense": dense_forward, "compiled": torch.compile(dense_forward, fullgraph=True, dynamic=False)}


def sparse_forward(backend: str, plan: Plan | None) -> Forward:
    def forward(x: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        op: Any = ops.gated_ffn if len(w) == 3 else ops.ffn
        y, stats = op(x, *w, backend=backend, plan=plan, return_stats=True)
        return y, stats.l1_sum

    return forward


def _peak_bytes(run: Callable[[], Any], p: Problem) -> int:
    """The most bytes that one forward and backward takes besides x, dy and weights; gradients are part of them."""
    run()  # so that memory taken once is not counted
    p.drop_gradients()
    return timing.peak_bytes(run, p.x.device)


def ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None


def _joules(runs: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float | None] | None:
    """Joules of a call of each alternative; None where they cannot be measured."""
    per_call = {name: energy.joules(run, device, min(seconds, ENERGY_SECONDS)) for name, run in runs.items()}
    return None if None in per_call.values() else per_call


# ---------------------------------------------------------------------------------------------------------
# Correctness
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _clear_of_zero(x: Tensor, w_gate: Tensor) -> Tensor:
    """x, with other tokens of it in place of those for which a gate is within rounding of 0.

    relu has no gradient at 0, and the order of a sum decides on which side of 0 it falls: dense and sparse would differ
    and both be right. About one token in 400 is replaced at D 2048, F 5632.
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


def formulas(x: Tensor, w: Weights, dy: Tensor, dl1: Tensor, r: Tensor) -> dict[str, Tensor]:
    """y, sum |h| and the gradients from the gate r [M, F] by their formulas, in the dtype of the arguments."""
    u = None if w.up is None else nnf.linear(x, w.up)
    h = r if u is None else r * u
    gradients = reference.backward(dy, dl1, x, w, r, u, needs=NEEDS)
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
    """``Problem.results`` in float64, in chunks of tokens, and for how many tokens each neuron fired: [F]."""
    w, dl1 = p.w.to(torch.float64), p.dl1.double()
    counts = torch.zeros(len(w.gate), dtype=torch.int64, device=p.x.device)
    by_token: dict[str, list[Tensor]] = {"y": [], "dx": []}
    sums: dict[str, Tensor] = {}
    for x, dy in zip(p.x.split(_TRUTH_TOKENS), p.dy.split(_TRUTH_TOKENS), strict=True):
        r = torch.relu(nnf.linear(x.double(), w.gate))
        counts += (r != 0).sum(0)
        for name, part in formulas(x.double(), w, dy.double(), dl1, r).items():
            if name in by_token:
                by_token[name].append(part)
            else:
                sums[name] = sums[name] + part if name in sums else part
    return sums | {name: torch.cat(parts) for name, parts in by_token.items()}, counts


def errors_of(p: Problem, backend: str, plan: Plan | None) -> dict[str, dict[str, float]]:
    """``check`` of a backend's forward and backward, without timing."""
    return check(_truth(p)[0], p.results(dense_forward), p.results(sparse_forward(backend, plan)))


def check(truth: dict[str, Tensor], dense: dict[str, Tensor], sparse: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Relative errors of both against float64; raises WrongResult where sparse errs beyond the tolerance.

    The worst row of y is checked on its own: one wrong token of many hardly shows in the whole.
    """
    slack = SLACK[dense["y"].dtype]
    errors = {
        kind: {name: relative_error(got[name], truth[name]) for name in dense}
        for kind, got in (("dense", dense), ("sparse", sparse))
    }
    for name, error in errors["sparse"].items():
        allowed = 2 * errors["dense"][name] + slack
        if not error <= allowed:
            raise WrongResult(
                f"sparse {name} is wrong: relative error {error:.2e} (dense {errors['dense'][name]:.2e}, allowed "
                f"{allowed:.2e}); no speedup is reported"
            )
    off = (sparse["y"].double() - truth["y"]).norm(dim=1) / truth["y"].norm(dim=1).median()
    if not off.max() <= 10 * (2 * errors["dense"]["y"] + slack):
        raise WrongResult(f"sparse y of token {int(off.argmax())} is wrong; no speedup is reported")
    return {kind: {name: float(f"{e:.3g}") for name, e in of.items()} for kind, of in errors.items()}
