"""A differential fuzz: random layers, tokens and ways of calling, against dense formulas in float64.

A case is a seed. It decides shapes, dtype, layouts, sparsity, values (also inf, NaN, and small integers, of which all
sums are exact), the way of calling (function, layer, frozen, weights written between two calls, with gradients), and
costs that drive the CPU path into each of its branches. Results must not be further from float64 than twice as far as
dense PyTorch's are, in units that allow for rounding alone; integers must come out equal; what is not finite in a dense
layer is not finite here, and the other way round.

    python tests/adversarial/fuzz.py --cases 100000         # prints what was tried, and the worst errors
    python tests/adversarial/fuzz.py --only 4711            # one case again
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as nnf
from torch import Tensor

import twell
from twell import cpu
from twell.nn import neuron_major_
from twell.plan import Plan
from twell.reference import Weights

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = ("function", "layer", "inference mode", "frozen", "written", "trained", "trained layer")
LAYOUTS = ("contiguous", "turned", "wide rows", "every other", "three dimensions", "repeated")
MOST_UNITS = 2.0  # of dense's error and what rounding may do


class Difference(AssertionError):
    """A silent one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """All that a seed decides, but for the values."""

    seed: int
    D: int
    F: int
    M: int
    dtype: str
    gated: bool
    activation: str
    biases: tuple[bool, bool, bool]
    way: str
    layout: str  # of x
    neuron_major: bool
    values: str  # normal, integers, poisoned
    active: float  # share of the neurons, about
    masked: bool
    device: str = "cpu"

    @classmethod
    def of(cls, seed: int, device: str = "cpu") -> Case:
        rng = random.Random(seed)
        step = 16 if device == "cuda" and rng.random() < 0.7 else 1
        values = rng.choices(("normal", "integers", "poisoned"), (6, 3, 1))[0]
        way = rng.choice([w for w in WAYS if values != "poisoned" or not w.startswith("trained")])
        exact = values == "integers"
        dtype = rng.choice(("float64", "float32") if exact else tuple(DTYPES))
        few_shapes = DTYPES[dtype].itemsize == 2  # each is compiled by oneDNN, which takes longer than a case
        return cls(
            seed=seed,
            D=step * rng.choice((1, 31, 64) if few_shapes else (1, 2, 3, 8, 16, 24) if exact else (1, 2, 5, 32, 96)),
            F=step * rng.choice((1, 33, 64) if few_shapes else (1, 2, 7, 16, 33, 64, 96)),
            M=rng.choice((0, 1, 1, 17, 70) if few_shapes else (0, 1, 1, 1, 2, 3, 17, 64, 65, 70)),
            dtype=dtype,
            gated=rng.random() < 0.7,
            activation="relu" if exact else rng.choice(("relu", "relu2")),
            biases=tuple(rng.random() < 0.3 for _ in range(3)),  # type: ignore[arg-type]
            way=way,
            layout=rng.choice(LAYOUTS),
            neuron_major=rng.random() < 0.5,
            values=values,
            active=rng.choice((0.0, 0.01, 0.1, 0.5, 1.0)),
            masked=rng.random() < 0.3,
            device=device,
        )


# -- making a case --------------------------------------------------------------------------------------------


def _numbers(case: Case, *shape: int, scale: float = 1.0) -> Tensor:
    if case.values == "integers":
        return torch.randint(-1, 2, shape, dtype=torch.float64)
    return torch.randn(shape, dtype=torch.float64) * scale


def weights_of(case: Case) -> Weights:
    D, F, (on_gate, on_up, on_down) = case.D, case.F, case.biases
    gate, up, down = (_numbers(case, *s, scale=s[1] ** -0.5) for s in ((F, D), (F, D), (D, F)))
    shift = {0.0: -4.0, 0.01: -2.3, 0.1: -1.3, 0.5: 0.0, 1.0: 4.0}[case.active]
    if case.values == "integers":
        shift = float(round(shift * D**0.5))
    gate_bias = torch.full((F,), shift, dtype=torch.float64) if on_gate or case.active != 0.5 else None
    w = Weights(
        gate, up if case.gated else None, down, gate_bias,
        _numbers(case, F) if on_up and case.gated else None, _numbers(case, D) if on_down else None,
    )  # fmt: skip
    return Weights._make(None if t is None else t.to(case.device, DTYPES[case.dtype]) for t in w)


def tokens_of(case: Case) -> Tensor:
    """x [..., D] in the case's layout, and not finite in a token or two of a poisoned one."""
    M, D, dtype = case.M, case.D, DTYPES[case.dtype]
    if case.layout == "repeated" and M:
        x = _numbers(case, 1, D).expand(M, D) if case.values != "poisoned" else _numbers(case, M, D)
    elif case.layout == "three dimensions":
        x = _numbers(case, 2, M, D).transpose(0, 1)
    elif case.layout == "turned":
        x = _numbers(case, D, M).t()
    elif case.layout == "wide rows":
        x = _numbers(case, M, D + 5)[:, 3 : 3 + D]
    elif case.layout == "every other":
        x = _numbers(case, 2 * M, 2 * D)[::2, ::2]
    else:
        x = _numbers(case, M, D)
    x = _moved(x, case.device, dtype)
    if case.values == "poisoned" and M:
        rng = random.Random(case.seed)
        for value in rng.sample((float("nan"), float("inf"), float("-inf")), 2):
            x[tuple(rng.randrange(n) for n in x.shape)] = value
    return x


def _moved(x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """To another dtype and device with the same strides."""
    if 0 in x.stride():
        return x[:1].to(device, dtype).expand(x.shape)
    n = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.zeros(n, device=device, dtype=dtype).as_strided(x.shape, x.stride()).copy_(x)


@contextlib.contextmanager
def any_branch(seed: int) -> Iterator[None]:
    """Costs of the CPU path that lead small layers into all of its branches, not into the dense one alone."""
    rng = random.Random(~seed)
    column = rng.choice((1.0, 500.0))
    gather = cpu.block.GatherCost(rng.choice((0.0, 35.0)), rng.choice((0.0, 1.0, 7.0)), column, read=0.1, line=16)
    habits = cpu.products.blas_habits()._replace(
        slow_matvec=rng.random() < 0.5, transposed_rows=range(rng.choice((0, 99))),
        transposed_bf16_rows=range(rng.choice((0, 99))), rows_in_pieces=range(rng.choice((0, 99))),
    )  # fmt: skip
    changed: dict[Any, dict[str, Any]] = {
        cpu: {"BLOCK_BYTES": rng.choice((1 << 12, 24 << 20))},
        cpu.block: {
            "MIN_WORK": 1, "MIN_HOT_ROWS": rng.choice((1, 64)), "GATHER": gather, "GATHER_BF16": gather,
            "_SMALL": rng.choice((0, 10**9)),
        },
        cpu.frozen: {"MIN_INT8_GATE": 0, "MAX_CANDIDATES": rng.choice((1 / 16, 1.0))},
        cpu.products: {"blas_habits": lambda: habits},
        cpu.training: {"MIN_TRAIN_ROWS": 1},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module, values in changed.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        stack.enter_context(mock.patch.object(torch, "get_num_threads", lambda: 2))  # products in parts
        yield


# -- what is compared -------------------------------------------------------------------------------------------


def dense(x: Tensor, w: Weights, case: Case, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """y, sum |h| of the masked tokens and how often each neuron fires for them, by PyTorch."""
    r = torch.relu(nnf.linear(x, w.gate, w.gate_bias))
    h = r if case.activation == "relu" else r * r
    h = h if w.up is None else h * nnf.linear(x, w.up, w.up_bias)
    y, flat, fired = nnf.linear(h, w.down, w.down_bias), h.reshape(-1, case.F), (r != 0).reshape(-1, case.F)
    if mask is not None:
        flat, fired = flat[mask.reshape(-1)], fired[mask.reshape(-1)]
    return y, flat.abs().sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32), fired.sum(0)


def sparse(x: Tensor, w: Weights, case: Case, mask: Tensor | None) -> tuple[Any, ...]:
    """The same by the case's way; (y,) alone where that has no statistics."""
    plan = _plan_of(case) if case.device == "cuda" else None
    options: dict[str, Any] = {"token_mask": mask, "return_stats": True}
    if case.way in ("function", "trained", "inference mode"):
        given = [w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.down_bias] if case.gated else [*w[:4:2], w[3], w[5]]
        call = twell.gated_ffn if case.gated else twell.ffn
        with torch.inference_mode(case.way == "inference mode"):
            y, stats = call(x, *given, activation=case.activation, plan=plan, **options)
        return y, stats.l1_sum, stats.counts
    layer = layer_of(w, case)
    if plan is not None:
        layer.set_plan(plan)
    if case.way == "trained layer":
        y, stats = layer.train()(x, **options)
        return y, stats.l1_sum, stats.counts
    layer.eval()
    with torch.no_grad():
        if case.way == "frozen":
            twell.freeze_(layer)
        if case.way == "written":  # behind its back, between two calls
            right = [p.detach().clone() for p in layer.parameters()]
            for p in layer.parameters():
                p.data.copy_(torch.randn_like(p))
            layer(x)
            for p, value in zip(layer.parameters(), right, strict=True):
                p.data[:] = value
        return (layer(x),)


def _plan_of(case: Case) -> Plan:
    rng = random.Random(case.seed)
    hot = torch.randperm(case.F)[: rng.choice((0, case.F // 2, case.F))]
    return Plan(
        n_neurons=case.F, hot=hot, cap=rng.choice((1, 16, case.F)), min_tokens=rng.choice((0, 64)), few_tokens=64
    )


def layer_of(w: Weights, case: Case) -> Any:
    kind = twell.GatedSparseFFN if case.gated else twell.SparseFFN
    options: dict[str, Any] = {"dtype": w.gate.dtype, "device": case.device}
    layer = kind(case.D, case.F, activation=case.activation, bias=any(b is not None for b in w[3:]), **options)
    linears = [getattr(layer, name) for name in layer.projections]
    given = [(w.gate, w.gate_bias), (w.up, w.up_bias), (w.down, w.down_bias)]
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, [g for g in given if g[0] is not None], strict=True):
            linear.weight.copy_(weight)
            if linear.bias is not None:
                linear.bias.copy_(torch.zeros_like(linear.bias) if bias is None else bias)
    if case.neuron_major:
        neuron_major_(linears[-1])
    return layer


def units(
    name: str, got: Tensor, by_dense: Tensor, truth: Tensor, allowed: float, of_terms: float, exact: bool
) -> float:
    """How far from float64, in units of dense's error and of what rounding may do, ``allowed`` of the result and
    ``of_terms`` that cancel; raises Difference."""
    if got.shape != by_dense.shape:
        raise Difference(f"{name} has shape {tuple(got.shape)}, dense has {tuple(by_dense.shape)}")
    if exact and not torch.equal(got.double(), truth.double()):
        raise Difference(f"{name} of integers is not exact: off by {(got.double() - truth).abs().max():g}")
    there = by_dense.isfinite()
    if not torch.equal(got.isfinite(), there):
        raise Difference(f"{name} is finite at {int(got.isfinite().sum())} places, dense at {int(there.sum())}")
    off, dense_off = ((t.double() - truth)[there].norm().item() for t in (got, by_dense))
    if off == 0:
        return 0.0
    found = off / (dense_off + allowed * truth[there].norm().item() + of_terms + 1e-300)
    if not found <= MOST_UNITS:
        raise Difference(f"{name} is {off:.3g} from float64, dense {dense_off:.3g}")
    return found


def rounding(x: Tensor, w: Weights, case: Case) -> float:
    """What a few roundings may do, relative: more where large terms give small sums."""
    x, w = x.double(), w.to(torch.float64)
    parts = [(x, w.gate, w.gate_bias)] + ([] if w.up is None else [(x, w.up, w.up_bias)])
    sums = [nnf.linear(*of) for of in parts]
    sizes = [nnf.linear(*(None if t is None else t.abs() for t in of)) for of in parts]
    r, power = torch.relu(sums[0]), 2 if case.activation == "relu2" else 1
    h, most = r**power, sizes[0] * r ** (power - 1) * (r > 0)
    if w.up is not None:
        h, most = h * sums[1], most * sizes[1]
    bias = None if w.down_bias is None else w.down_bias.abs()
    y = nnf.linear(h, w.down, w.down_bias)
    y_terms, y_most = (nnf.linear(t, w.down.abs(), bias) for t in (h.abs(), most))

    def times(terms: Tensor, total: Tensor) -> float:
        there = terms.isfinite() & total.isfinite()
        norm = total[there].norm().item()
        return max(1.0, terms[there].norm().item() / norm) if norm > 0 else 1.0

    eps = torch.finfo(DTYPES[case.dtype]).eps  # of what is kept; sums are of at least fp32
    return 4 * eps * times(y_terms, y) + 4 * min(eps, 2.0**-23) * max(times(most, h), times(y_most, y))


def gradient_terms(x: Tensor, w: Weights, case: Case, mask: Tensor | None, dy: Tensor, dl1: float) -> dict[str, Tensor]:
    """What gradients would be if none of their terms cancelled: each is rounded by its share of that."""
    x, dy = x.double().reshape(-1, case.D), dy.double().reshape(-1, case.D).abs()
    w = w.to(torch.float64)
    r = torch.relu(nnf.linear(x, w.gate, w.gate_bias))
    a, slope = (r, (r > 0).double()) if case.activation == "relu" else (r * r, 2 * r)
    u = torch.ones_like(r) if w.up is None else nnf.linear(x, w.up, w.up_bias).abs()
    counted = 1.0 if mask is None else mask.reshape(-1, 1).double()
    dh = dy @ w.down.abs() + dl1 * counted
    dz, du = dh * u * slope, dh * a
    of_x = dz @ w.gate.abs() + (0 if w.up is None else du @ w.up.abs())
    return {"dx": of_x, "dgate": dz.T @ x.abs(), "dup": du.T @ x.abs(), "ddown": dy.T @ (a * u)}


def run(case: Case) -> dict[str, float]:
    """Errors in units, by what they are of."""
    torch.manual_seed(case.seed)
    w, x = weights_of(case), tokens_of(case)
    mask = None
    if case.masked and case.way not in ("layer", "frozen", "written"):
        mask = torch.rand(x.shape[:-1], device=x.device) < 0.5
    trains, exact = case.way.startswith("trained"), case.values == "integers"
    results = []
    dy, dl1 = _numbers(case, *x.shape).to(x), 1.0 if exact else 0.1
    for way in (sparse, dense, dense):
        is_truth = len(results) == 2
        own = [t if t is None else t.detach().double() if is_truth else t.detach() for t in (x, *w)]
        own = [t if t is None else t.requires_grad_(trains) for t in own]
        x_own, w_own = own[0], Weights._make(own[1:])
        with any_branch(case.seed) if way is sparse else contextlib.nullcontext():
            if way is sparse and case.way == "trained layer":
                layer = layer_of(w_own, case).train()
                y, stats = layer(x_own, token_mask=mask, return_stats=True)
                out: tuple[Any, ...] = y, stats.l1_sum, stats.counts
                linears = [getattr(layer, n) for n in layer.projections]
                inputs = [x_own, *(lin.weight for lin in linears)]
            else:
                with contextlib.nullcontext() if trains else torch.no_grad():
                    out = way(x_own, w_own, case, mask)
                inputs = [x_own, *(t for t in w_own[:3] if t is not None)]
            if trains:
                loss_terms, factors = [out[0], out[1]], [dy.to(out[0].dtype), torch.full_like(out[1], dl1)]
                out = *out, *torch.autograd.grad(loss_terms, inputs, factors)
        results.append(out)
    got, by_dense, truth = results
    names = ("y", "l1", "counts", "dx", *(("dgate", "dup", "ddown") if case.gated else ("dgate", "ddown")))
    found = {}
    allowed, eps = rounding(x, w, case), torch.finfo(DTYPES[case.dtype]).eps
    terms = gradient_terms(x, w, case, mask, dy, dl1) if trains else {}
    for name, a, b, t in zip(names, got, by_dense, truth, strict=False):
        if name == "counts":
            off, dense_off = (int((c.long() - t.long()).abs().sum()) for c in (a, b))
            if off > (0 if exact else 2 * dense_off + 2):  # a sum that is 0 but for rounding
                raise Difference(f"counts are off by {off}, dense's by {dense_off}")
            continue
        of_terms = 4 * eps * terms[name].nan_to_num(0, 0).norm().item() if name in terms else 0.0
        found[name] = units(name, a, b, t, allowed, of_terms, exact)
    return found


# -- many ---------------------------------------------------------------------------------------------------------


def tried(
    seeds: range, device: str
) -> tuple[dict[str, collections.Counter[str]], dict[str, tuple[float, int]], list[str]]:
    """What was tried, the worst errors with their seeds, and what went wrong."""
    torch.set_num_threads(1)
    what: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    worst: dict[str, tuple[float, int]] = {}
    wrong = []
    for seed in seeds:
        case = Case.of(seed, device)
        for field in ("dtype", "way", "layout", "values"):
            what[field][str(getattr(case, field))] += 1
        try:
            for name, found in run(case).items():
                worst[name] = max(worst.get(name, (0.0, seed)), (found, seed))
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    return dict(what), worst, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Random layers against dense formulas in float64.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="one seed, with its traceback")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.only is not None:
        case = Case.of(options.only, options.device)
        print(case)
        print(run(case))
        return 0
    from rich.progress import track

    ends = range(options.first, options.first + options.cases, 500)
    parts = [range(start, min(start + 500, options.first + options.cases)) for start in ends]
    what: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    worst: dict[str, tuple[float, int]] = {}
    wrong: list[str] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        results = pool.map(tried, parts, [options.device] * len(parts))
        for counted, errors, failures in track(results, total=len(parts), description="cases by 500"):
            for field, counts in counted.items():
                what[field].update(counts)
            for name, found in errors.items():
                worst[name] = max(worst.get(name, (0.0, 0)), found)
            wrong += failures
    print(f"{options.cases:,} cases, {len(wrong)} wrong")
    for field, counts in what.items():
        print(f"{field}: " + ", ".join(f"{name} {n:,}" for name, n in counts.most_common()))
    units_text = ", ".join(f"{name} {found:.2f} (seed {seed})" for name, (found, seed) in worst.items())
    print(f"worst error, in units of dense's and of rounding (at most {MOST_UNITS:g}): {units_text}")
    for line in wrong[:20]:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
