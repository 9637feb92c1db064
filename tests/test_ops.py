"""The operations as PyTorch sees them: opcheck, gradients, compile, autocast, shapes, plans, statistics, errors."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import twell
from interpreted import shorten_lists
from twell import cpu, reference
from twell.ops import backends
from twell.ops import functional as ops
from twell.plan import Plan, dense_plan
from twell.saved import saved_length

f64 = torch.float64
D, F = 8, 32
Weights = dict[str, Tensor | None]

GATED = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
PLAIN = ("w_up", "w_down", "b_up", "b_down")

each_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])
each_kind = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
each_activation = pytest.mark.parametrize("activation", ["relu", "relu2"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
kernels = pytest.mark.skipif(
    torch.cuda.is_available() or not backends._HAS_TRITON, reason="the interpreter runs where there is no GPU"
)


@pytest.fixture(autouse=True)
def sparse_at_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the small cases here take the sparse backward too."""
    monkeypatch.setattr(cpu.training, "MIN_TRAIN_ROWS", 1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- Helpers ---------------------------------------------------------------------------------------------


def case(
    *shape: int,
    gated: bool = True,
    bias: bool = False,
    dtype: torch.dtype = f64,
    grad: bool = False,
    seed: int = 0,
    width: tuple[int, int] = (D, F),
    neuron_major: bool = True,
) -> tuple[Tensor, Weights]:
    """x [*shape, D] and weights by argument name; about one neuron in twenty is active. Wd lies neuron by neuron, so
    that small cases run sparsely on a CPU, too."""
    D, F = width
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, dtype=f64)

    x = normal(*shape, D)
    x[..., 0] = 1
    sizes = {"w_gate": (F, D), "w_up": (F, D), "w_down": (D, F), "b_gate": (F,), "b_up": (F,), "b_down": (D,)}
    w: Weights = {name: normal(*sizes[name]) / 2 for name in (GATED if gated else PLAIN)}
    carrier = w["w_gate" if gated else "w_up"]
    assert carrier is not None
    carrier[:, 0] = -1.6 * D**0.5 / 2
    if neuron_major:
        w["w_down"] = w["w_down"].t().contiguous().t()
    if not bias:
        w = {name: None if name.startswith("b_") else t for name, t in w.items()}
    w = {name: None if t is None else t.to(dtype).requires_grad_(grad) for name, t in w.items()}
    return x.to(dtype).requires_grad_(grad), w


def call(x: Tensor, w: Weights, **options: Any) -> Any:
    return twell.gated_ffn(x, **w, **options) if "w_gate" in w else twell.ffn(x, **w, **options)


def dense(x: Tensor, w: Weights, activation: str = "relu") -> tuple[Tensor, Tensor]:
    """(y, h), the formula in plain PyTorch."""
    linear = torch.nn.functional.linear
    gated = "w_gate" in w
    r = torch.relu(linear(x, w["w_gate"], w["b_gate"]) if gated else linear(x, w["w_up"], w["b_up"]))
    h = r * r if activation == "relu2" else r
    h = h * linear(x, w["w_up"], w["b_up"]) if gated else h
    return linear(h, w["w_down"], w["b_down"]), h


def weights_of(w: Weights) -> reference.Weights:
    if "w_gate" in w:
        return reference.Weights(**{name.removeprefix("w_"): w[name] for name in GATED[:3]}, **biases_of(w))
    return reference.Weights(w["w_up"], None, w["w_down"], w["b_up"], None, w["b_down"])


def biases_of(w: Weights) -> dict[str, Tensor | None]:
    return {f"{name}_bias": w[f"b_{name}"] for name in ("gate", "up", "down")}


def infer_arguments(x: Tensor, w: Weights, backend: str, plan: Any = ops.NO_PLAN, frozen: Any = ()) -> tuple:
    return (x, *weights_of(w), *plan, list(frozen), "relu2", backend)


def train_arguments(
    x: Tensor, w: Weights, mask: Tensor | None, backend: str, save: bool, plan: Any = ops.NO_PLAN
) -> tuple:
    return (x, *weights_of(w), mask, *plan, "relu2", backend, True, save)


def backward_arguments(
    x: Tensor, w: Weights, mask: Tensor | None, dl1: Tensor | None, backend: str, needs: list, plan: Any = ops.NO_PLAN
) -> tuple:
    _, _, _, kept = train(*train_arguments(x, w, mask, backend, True, plan))
    return (torch.randn_like(x), dl1, x, *weights_of(w), mask, *plan, kept, "relu2", backend, needs)


infer, train, backward = (getattr(torch.ops.twell, name).default for name in ("ffn", "ffn_train", "ffn_backward"))


def leaves(x: Tensor, w: Weights) -> dict[str, Tensor]:
    return {name: t for name, t in {"x": x, **w}.items() if t is not None}


def gradients(loss: Tensor, x: Tensor, w: Weights) -> dict[str, Tensor]:
    wanted = {name: t for name, t in leaves(x, w).items() if t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-10}
    assert got.keys() == want.keys()
    for name, g in got.items():
        torch.testing.assert_close(g, want[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def wave(y: Tensor) -> Tensor:
    """A scalar in which every element of y counts differently."""
    return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).cos().view(y.shape)).sum()


def loss_of_dense(x: Tensor, w: Weights, activation: str = "relu", mask: Tensor | None = None) -> Tensor:
    y, h = dense(x, w, activation)
    return wave(y) + 0.3 * (h if mask is None else h[mask]).abs().sum()


def loss_of(x: Tensor, w: Weights, activation: str = "relu", mask: Tensor | None = None, **options: Any) -> Tensor:
    y, stats = call(x, w, activation=activation, token_mask=mask, return_stats=True, **options)
    return wave(y) + 0.3 * stats.l1_sum


# -- opcheck ---------------------------------------------------------------------------------------------


@each_backend
@each_kind
@pytest.mark.parametrize("extras", [True, False], ids=["bias and mask", "bare"])
def test_opcheck_training(backend: str, gated: bool, extras: bool) -> None:
    x, w = case(6, gated=gated, bias=extras, grad=True, neuron_major=extras)
    mask = torch.arange(6) != 2 if extras else None
    opcheck(train, train_arguments(x, w, mask, backend, save=True))


@each_backend
@each_kind
def test_opcheck_without_gradients(backend: str, gated: bool) -> None:
    x, w = case(6, gated=gated, dtype=torch.float32)
    opcheck(infer, infer_arguments(x, w, backend))
    opcheck(train, train_arguments(x, w, None, backend, save=False))


@each_backend
@each_kind
@pytest.mark.parametrize(("extras", "needed"), [(True, "all"), (True, "some"), (False, "all")])
def test_opcheck_backward(backend: str, gated: bool, extras: bool, needed: str) -> None:
    x, w = case(6, gated=gated, bias=extras, neuron_major=extras)
    mask, dl1 = (torch.arange(6) != 2, torch.tensor(0.3, dtype=f64)) if extras else (None, None)
    needs = [needed == "all" or i % 2 == 0 for i in range(7)]
    opcheck(backward, backward_arguments(x, w, mask, dl1, backend, needs))


@each_backend
def test_opcheck_backward_of_inputs_that_require_grad(backend: str) -> None:
    """All but the test that differentiates: a backward has no gradient of its own."""
    x, w = case(6, bias=True, grad=True)
    arguments = backward_arguments(x, w, None, None, backend, [True] * 7)
    opcheck(backward, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@each_backend
def test_opcheck_of_noncontiguous_inputs(backend: str) -> None:
    x, w = case(6, neuron_major=False)
    x = x.t().contiguous().t()
    w = {n: None if t is None else t.t().contiguous().t().requires_grad_() for n, t in w.items()}
    opcheck(train, train_arguments(x.requires_grad_(), w, None, backend, save=True))
    opcheck(backward, backward_arguments(x.detach(), detached(w), None, None, backend, [True] * 7))


def detached(w: Weights) -> Weights:
    return {n: None if t is None else t.detach() for n, t in w.items()}


@pytest.fixture
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_lists(monkeypatch.setattr)


@pytest.fixture
def numbered_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors: parts of the kept tensor are never written, and opcheck compares all of it."""
    make = torch.Tensor.new_empty

    def filled(*args: Any, **options: Any) -> Tensor:
        t = make(*args, **options)
        return t if t.device.type == "meta" else t.fill_(-7)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def plan_of(n_hot: int, cap: int = 4, **numbers: int) -> Plan:
    hot = torch.randperm(WIDE[1], generator=torch.Generator().manual_seed(n_hot))[:n_hot]
    return Plan(n_neurons=WIDE[1], hot=hot, cap=cap, first=2, **numbers)


WIDE = 16, 32  # what the kernels take
PLANS = {
    "no plan": None,
    "dense": dense_plan(WIDE[1]),
    "split": plan_of(8, min_tokens=0),
    "no hot neurons": plan_of(0, min_tokens=0),
    "too few tokens": plan_of(8, min_tokens=7),
}


def tensors_of(plan: Plan | None) -> Any:
    return ops.NO_PLAN if plan is None else plan.on(torch.device("cpu"))


@kernels
@pytest.mark.usefixtures("short_lists", "numbered_empty")
@pytest.mark.parametrize(("kind", "gated"), [("no plan", True), ("dense", False), ("split", True)])
def test_opcheck_of_the_kernels(kind: str, gated: bool) -> None:
    x, w = case(3, gated=gated, bias=True, grad=True, dtype=torch.float32, width=WIDE)
    mask, plan, needs = torch.arange(3) != 2, tensors_of(PLANS[kind]), [True, False, True, True, True, False, True]
    opcheck(train, train_arguments(x, w, mask, "triton", True, plan))
    x, w = x.detach(), detached(w)
    opcheck(infer, infer_arguments(x, w, "triton", plan))
    opcheck(backward, backward_arguments(x, w, mask, torch.tensor(0.3), "triton", needs, plan))


@kernels
def test_opcheck_of_few_tokens_and_frozen_state() -> None:
    from twell import gpu

    x, w = case(1, bias=True, dtype=torch.float32, width=WIDE)
    few = plan_of(8, few_tokens=2, min_tokens=1 << 20)
    opcheck(infer, infer_arguments(x, w, "triton", tensors_of(few), gpu.freeze(weights_of(w), few)))
    opcheck(infer, infer_arguments(x, w, "cpu", ops.NO_PLAN, cpu.freeze(weights_of(w))))


@kernels
@pytest.mark.usefixtures("short_lists")
@each_kind
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("M", [0, 1, 6])
def test_the_kept_tensor_has_the_promised_length(M: int, kind: str, gated: bool) -> None:
    """opcheck checks the other shapes."""
    if (M, gated) == (6, False) and kind != "split":
        return  # as the others
    x, w = case(M, gated=gated, dtype=torch.float32, width=WIDE)
    plan = PLANS[kind]
    numbers = (WIDE[1], 0, 0) if plan is None else (len(plan.hot), plan.cap, plan.min_tokens)
    for save in (True, False):
        *_, kept = train(*train_arguments(x, w, None, "triton", save, tensors_of(plan)))
        assert len(kept) == saved_length(M, WIDE[1], numbers, x.dtype, gated=gated, save=save)
        assert kept.dtype == x.dtype and (len(kept) > 0) == save


@each_backend
def test_nothing_is_kept_without_save(backend: str) -> None:
    x, w = case(6, grad=True)
    y, _, _, kept = train(*train_arguments(x, w, None, backend, save=False))
    assert kept.numel() == 0
    with pytest.raises(RuntimeError, match="save=False"):
        y.sum().backward()


# -- Gradients -------------------------------------------------------------------------------------------


def smooth_case(gated: bool) -> tuple[Tensor, Weights]:
    """A small case away from the kinks of relu and |h|, with a few active neurons."""
    for seed in itertools.count():
        x, w = case(4, gated=gated, bias=True, seed=seed, width=(4, 24))
        linear = torch.nn.functional.linear
        z = linear(x, w["w_gate"], w["b_gate"]) if gated else linear(x, w["w_up"], w["b_up"])
        u = linear(x, w["w_up"], w["b_up"])
        if min(z.abs().min(), u.abs().min()) > 2e-3 and 4 <= (z > 0).sum() <= 10:
            return x.requires_grad_(), {n: None if t is None else t.requires_grad_() for n, t in w.items()}
    raise AssertionError


@each_backend
@each_kind
@each_activation
def test_gradcheck(backend: str, gated: bool, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against numerical derivatives, in float64. gradcheck writes single elements through ``.data``."""
    x, w = smooth_case(gated)
    given = leaves(x, w)
    mask = torch.tensor([True, True, False, True])
    if backend == "cpu":  # the sparse backward must run, not the reference it falls back to
        monkeypatch.setattr(reference, "backward", None)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(given, tensors, strict=True))
        weights = {name: named.get(name) for name in w}
        y, stats = call(named["x"], weights, activation=activation, token_mask=mask, backend=backend, return_stats=True)
        return y, stats.l1_sum

    assert torch.autograd.gradcheck(function, tuple(given.values()))


@each_backend
@each_kind
@each_activation
@with_and_without_bias
@pytest.mark.parametrize("M", [0, 1, 7, 40])
def test_gradients_are_those_of_the_formula(M: int, backend: str, gated: bool, activation: str, bias: bool) -> None:
    for mask in (None, torch.arange(M) % 3 != 1):
        x, w = case(M, gated=gated, bias=bias, grad=True, neuron_major=mask is None)
        got = gradients(loss_of(x, w, activation, mask, backend=backend), x, w)
        assert_same(got, gradients(loss_of_dense(x, w, activation, mask), x, w))


@each_backend
@pytest.mark.parametrize(
    ("gated", "needed"),
    [(gated, {n}) for gated in (True, False) for n in ("x", *(GATED if gated else PLAIN))]
    + [(True, {"w_gate", "b_up"}), (True, {"x", "w_down"}), (True, set(GATED)), (False, set(PLAIN))],
)
def test_partial_gradients(backend: str, gated: bool, needed: set[str]) -> None:
    x, w = case(9, gated=gated, bias=True)
    for name, t in leaves(x, w).items():
        t.requires_grad_(name in needed)
    got = gradients(loss_of(x, w, backend=backend), x, w)
    assert got.keys() == needed
    assert_same(got, gradients(loss_of_dense(x, w), x, w))


@each_backend
@each_kind
@pytest.mark.parametrize("loss", ["y.sum()", "y.mean(0).sum()", "y only", "l1 only"])
def test_losses_of_one_output_or_zero_stride(backend: str, gated: bool, loss: str) -> None:
    x, w = case(9, gated=gated, bias=True, grad=True)

    def value(y: Tensor, l1_sum: Tensor) -> Tensor:
        return {"y.sum()": y.sum(), "y.mean(0).sum()": y.mean(0).sum(), "y only": wave(y), "l1 only": l1_sum}[loss]

    y, stats = call(x, w, backend=backend, return_stats=True)
    y_dense, h = dense(x, w)
    keep = {n: t for n, t in w.items() if loss != "l1 only" or n not in ("w_down", "b_down")}
    assert_same(gradients(value(y, stats.l1_sum), x, keep), gradients(value(y_dense, h.abs().sum()), x, keep))


@each_backend
def test_no_gradient_where_none_is_asked_for(backend: str) -> None:
    y, stats = call(*case(5), backend=backend, return_stats=True)
    assert not any(t.requires_grad for t in (y, stats.l1_sum, stats.counts))


@each_backend
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("M", [1, 40])
def test_without_autograd(backend: str, context: Callable[[], Any], M: int) -> None:
    x, w = case(M, bias=True, grad=True)
    with context():
        y, stats = call(x, w, backend=backend, return_stats=True)
        bare = call(x, w, backend=backend)
    assert not y.requires_grad and not bare.requires_grad
    y_dense, h = dense(x, w)
    for got in (y, bare):
        torch.testing.assert_close(got, y_dense.detach())
    torch.testing.assert_close(stats.l1_sum, h.abs().sum().detach())


@pytest.mark.parametrize("grad", [True, False])
def test_activations_are_saved_only_for_a_backward(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args, **kw: saved.append(kw.get("save", False)) or forward(*args, **kw))
    x, w = case(5, grad=grad)
    call(x, w)
    with torch.no_grad():
        call(x, w)
    assert saved == [grad, False]


@each_backend
@each_kind
def test_half_batches_accumulate_to_the_whole(backend: str, gated: bool) -> None:
    x, w = case(40, gated=gated, bias=True)
    weights = [t.requires_grad_() for t in w.values() if t is not None]

    def accumulated(*parts: Tensor) -> list[Tensor]:
        for t in weights:
            t.grad = None
        for part in parts:
            y, stats = call(part, w, backend=backend, return_stats=True)
            (y.square().sum() + 0.1 * stats.l1_sum).backward()
        return [t.grad for t in weights]

    for halves, whole in zip(accumulated(x[:13], x[13:]), accumulated(x), strict=True):
        torch.testing.assert_close(halves, whole, rtol=1e-10, atol=1e-10)


@each_backend
@each_kind
def test_checkpointing_gives_equal_gradients(backend: str, gated: bool) -> None:
    x, w = case(9, gated=gated, bias=True, grad=True)
    again = checkpoint(lambda t: loss_of(t, w, backend=backend), x, use_reentrant=False)
    assert_same(gradients(again, x, w), gradients(loss_of(x, w, backend=backend), x, w), rtol=0, atol=0)


@each_backend
@each_kind
def test_double_backward_raises(backend: str, gated: bool) -> None:
    x, w = case(5, gated=gated, grad=True)
    (dx,) = torch.autograd.grad(call(x, w, backend=backend).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.sum().backward()


@each_backend
def test_a_retained_graph_gives_the_same_gradients_again(backend: str) -> None:
    x, w = case(9, bias=True, grad=True)
    loss, given = loss_of(x, w, backend=backend), list(leaves(x, w).values())
    first, second = (torch.autograd.grad(loss, given, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_backend
@pytest.mark.parametrize("of", ["x", "w_gate", "b_down"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("return_stats", [True, False])
def test_forward_mode_raises(backend: str, of: str, grad: bool, return_stats: bool) -> None:
    """Never a zero tangent."""
    x, w = case(5, bias=True, grad=grad)
    t = {"x": x, **w}[of].detach()

    def function(t: Tensor) -> Any:
        given = {"x": x, **w, of: t}
        return call(given.pop("x"), given, backend=backend, return_stats=return_stats)

    for transform in (lambda: torch.func.jvp(function, (t,), (t,)), lambda: torch.func.jacfwd(function)(t)):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            transform()
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(torch.autograd.forward_ad.make_dual(t, t))
        assert function(t) is not None  # nothing else is refused there


def test_the_inference_operation_refuses_gradients() -> None:
    x, w = case(5, grad=True)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        infer(*infer_arguments(x, w, "cpu"))
    with torch.no_grad():
        torch.testing.assert_close(infer(*infer_arguments(x, w, "cpu")), dense(x, w, "relu2")[0])


@each_backend
def test_same_input_gives_the_same_bits(backend: str) -> None:
    x, w = case(40, bias=True, grad=True, dtype=torch.float32)
    first, second = (gradients(loss_of(x, w, backend=backend), x, w) for _ in range(2))
    assert_same(first, second, rtol=0, atol=0)


# -- torch.compile ---------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(("gated", "masked"), [(True, True), (False, True), (True, False)])
def test_compiled_training(backend: str, gated: bool, masked: bool) -> None:
    x, w = case(2, 5, gated=gated, bias=True, grad=True)
    mask = torch.arange(10).view(2, 5) % 3 != 1 if masked else None
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    got = gradients(compiled(x, w, "relu2", mask, backend=backend), x, w)
    assert_same(got, gradients(loss_of_dense(x, w, "relu2", mask), x, w))


@each_backend
@each_kind
def test_compiled_inference(backend: str, gated: bool) -> None:
    x, w = case(2, 5, gated=gated)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        y, stats = compiled(x, w, backend=backend, return_stats=True)
        expected, eager = call(x, w, backend=backend, return_stats=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(tuple(stats), tuple(eager))
    assert stats.counts.dtype == torch.int32


@each_backend
def test_compiled_once_for_any_number_of_tokens(backend: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter, dynamic=True)
    for M in (5, 12, 40):
        x, w = case(M, bias=True, grad=True)
        assert_same(gradients(compiled(x, w, backend=backend), x, w), gradients(loss_of_dense(x, w), x, w))
    assert counter.frame_count == 1


@kernels
@pytest.mark.usefixtures("short_lists")
def test_other_plans_and_numbers_of_tokens_do_not_recompile() -> None:
    """Dense, and the split with and without hot neurons; one graph for any number of tokens."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter, dynamic=True)
    for M, plan in ((5, dense_plan(WIDE[1])), (6, PLANS["split"]), (9, plan_of(0, 6, min_tokens=9)), (8, plan_of(4))):
        x, w = case(M, bias=True, grad=True, dtype=torch.float32, width=WIDE)
        plan.on(x.device)  # as modules do
        got = gradients(compiled(x, w, backend="triton", plan=plan), x, w)
        assert_same(got, gradients(loss_of_dense(x, w), x, w), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
@each_kind
def test_compiled_by_inductor(gated: bool) -> None:
    x, w = case(40, gated=gated, bias=True, grad=True, dtype=torch.float32)
    got = gradients(torch.compile(loss_of, fullgraph=True)(x, w), x, w)
    assert_same(got, gradients(loss_of_dense(x, w), x, w), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(call, fullgraph=True)(x, w), dense(x, w)[0], rtol=1e-4, atol=1e-4)


# -- autocast --------------------------------------------------------------------------------------------


def error(got: Tensor, truth: Tensor) -> float:
    return (got.double() - truth).norm().item()


@each_backend
@each_kind
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("eager", torch.bfloat16),
        ("eager", torch.float16),
        ("compiled", torch.bfloat16),
        ("compiled inside", torch.float16),
    ],
)
def test_autocast_matches_dense_under_autocast(backend: str, gated: bool, dtype: torch.dtype, how: str) -> None:
    x, w = case(40, gated=gated, bias=True, grad=True, dtype=torch.float32)

    def run(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        y, stats = call(x, w, backend=backend, return_stats=True)
        return y, stats.l1_sum

    def run_under_autocast(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype):
            return run(x, w)

    function = run if how == "compiled" else run_under_autocast
    function = function if how == "eager" else torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype, enabled=how == "compiled"):
        y, l1_sum = function(x, w)
    with torch.autocast("cpu", dtype):
        y_dense, h = dense(x, w)
    assert y.dtype == dtype
    assert l1_sum.dtype == torch.float32
    got = gradients(wave(y.float()) + 0.3 * l1_sum, x, w)
    same_in_dense = gradients(wave(y_dense.float()) + 0.3 * h.abs().sum(dtype=torch.float32), x, w)

    wide_x = x.detach().double().requires_grad_()
    wide_w = {n: t.detach().double().requires_grad_() for n, t in w.items()}
    truth = gradients(loss_of_dense(wide_x, wide_w), wide_x, wide_w)
    assert error(y, dense(wide_x, wide_w)[0]) <= 2 * error(y_dense, dense(wide_x, wide_w)[0])
    for name, g in got.items():
        assert g.dtype == torch.float32
        assert error(g, truth[name]) <= 2 * error(same_in_dense[name], truth[name]), name


@each_backend
def test_backward_inside_autocast(backend: str) -> None:
    x, w = case(40, bias=True, grad=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(call(x, w, backend=backend).sum(), x, w)
        y = call(x, w, backend=backend)
    assert_same(inside, gradients(y.sum(), x, w), rtol=0, atol=0)


def test_autocast_takes_mixed_dtypes() -> None:
    x, w = case(5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = call(x.bfloat16(), w)
        assert torch.equal(mixed, call(x, w))
        assert mixed.dtype == torch.bfloat16


@each_backend
def test_autocast_keeps_float64(backend: str) -> None:
    x, w = case(5, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x, w, backend=backend)
    torch.testing.assert_close(y, dense(x, w)[0])


# -- Shapes and layouts ----------------------------------------------------------------------------------


@each_backend
@each_kind
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 5), (2, 1, 3), (0,), (2, 0), (40, 2)])
def test_any_leading_shape(backend: str, gated: bool, leading: tuple[int, ...]) -> None:
    x, w = case(*leading, gated=gated, bias=True, grad=True)
    y, stats = call(x, w, backend=backend, return_stats=True)
    assert y.shape == (*leading, D)
    assert stats.tokens == x[..., 0].numel()
    torch.testing.assert_close(y, dense(x, w)[0])
    assert_same(gradients(wave(y) + 0.3 * stats.l1_sum, x, w), gradients(loss_of_dense(x, w), x, w))
    with torch.no_grad():
        torch.testing.assert_close(call(x, w, backend=backend), y.detach())


@each_backend
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[..., None].expand(*x.shape, 2)[..., 1],
        lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        lambda x: x[:1].expand(3, -1, -1),
    ],
    ids=["transposed", "every other token", "strided", "feature-major", "expanded"],
)
def test_noncontiguous_x(backend: str, layout: Callable[[Tensor], Tensor]) -> None:
    x, w = case(4, 6, bias=True, grad=True)
    got = gradients(loss_of(layout(x), w, backend=backend), x, w)
    assert_same(got, gradients(loss_of_dense(layout(x), w), x, w))


def test_meta_tensors_give_shapes() -> None:
    x, w = case(2, 5, bias=True)
    y, stats = call(x.to("meta"), {n: t.to("meta") for n, t in w.items()}, return_stats=True)
    assert y.device.type == stats.counts.device.type == "meta"
    assert (y.shape, stats.counts.shape) == (x.shape, (F,))


# -- Plans -----------------------------------------------------------------------------------------------


@kernels
@pytest.mark.usefixtures("short_lists")
@each_kind
@pytest.mark.parametrize("kind", PLANS)
def test_plans_change_no_result(kind: str, gated: bool) -> None:
    x, w = case(6, gated=gated, bias=True, grad=True, dtype=torch.float32, width=WIDE)
    plan = PLANS[kind]
    with torch.no_grad():
        y = call(x, w, backend="triton", plan=plan)
    torch.testing.assert_close(y, dense(x, w)[0].detach(), rtol=1e-4, atol=1e-4)
    if kind == "split" or gated:  # the rest of a backward is in test_training_kernels.py
        mask = torch.arange(6) != 2
        got = gradients(loss_of(x, w, mask=mask, backend="triton", plan=plan), x, w)
        assert_same(got, gradients(loss_of_dense(x, w, mask=mask), x, w), rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.usefixtures("short_lists")
def test_calls_without_a_plan_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where it is not known which neurons fire often."""
    from twell.gpu.shared.launch import Kernel

    launched: list[str] = []
    run = Kernel.__call__
    spy = lambda self, *args: launched.append(self.function.__name__) or run(self, *args)  # noqa: E731
    monkeypatch.setattr(Kernel, "__call__", spy)
    x, w = case(6, dtype=torch.float32, width=WIDE)
    seen = {}
    for kind, plan in PLANS.items():
        launched.clear()
        call(x, w, backend="triton", plan=plan)
        seen[kind] = "_list_kernel" in launched
    assert seen == {"no plan": False, "dense": False, "split": True, "no hot neurons": True, "too few tokens": False}


def test_plans_that_do_not_fit_are_refused() -> None:
    x, w = case(3)
    for plan, got in ((dense_plan(F + 2), f"one for {F + 2}"), (torch.arange(F + 5), "Tensor")):
        with pytest.raises(ValueError, match=f"gated_ffn: plan must be a twell.Plan for {F} neurons, got {got}"):
            call(x, w, plan=plan)


# -- Statistics ------------------------------------------------------------------------------------------


@each_backend
@each_kind
@each_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, f64])
def test_statistics(backend: str, gated: bool, activation: str, dtype: torch.dtype) -> None:
    x, w = case(3, 7, gated=gated, dtype=dtype)
    _, stats = call(x, w, activation=activation, backend=backend, return_stats=True)
    assert isinstance(stats, twell.Stats)
    assert (stats.l1_sum.dtype, stats.l1_sum.shape) == (f64 if dtype == f64 else torch.float32, ())
    assert (stats.counts.dtype, stats.counts.shape) == (torch.int32, (F,))
    assert (stats.tokens.dtype, stats.tokens.shape) == (torch.int64, ())
    _, h = dense(x, w, activation)
    torch.testing.assert_close(stats.l1_sum.double(), h.double().abs().sum(), rtol=1e-2, atol=0)
    carrier = w["w_gate" if gated else "w_up"]
    expected = (x.reshape(-1, D) @ carrier.t() > 0).sum(0)
    assert stats.counts.sum() > 0
    assert torch.equal(stats.counts.long(), expected)
    assert stats.tokens == 21


@each_backend
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.uint8])
def test_token_mask_selects_the_counted_tokens(backend: str, mask_dtype: torch.dtype) -> None:
    x, w = case(4, 6)
    mask = torch.arange(24).view(4, 6) % 3 != 1
    y, stats = call(x, w, token_mask=mask.to(mask_dtype), backend=backend, return_stats=True)
    _, kept = call(x[mask], w, backend=backend, return_stats=True)
    torch.testing.assert_close(y, dense(x, w)[0])
    torch.testing.assert_close(stats.l1_sum, kept.l1_sum)
    assert torch.equal(stats.counts, kept.counts)
    assert stats.tokens == kept.tokens == 16


@each_backend
def test_nothing_counts_under_an_empty_mask(backend: str) -> None:
    x, w = case(6, grad=True)
    _, stats = call(x, w, token_mask=torch.zeros(6, dtype=torch.bool), backend=backend, return_stats=True)
    assert stats.l1_sum == stats.tokens == stats.counts.sum() == 0
    assert all((g == 0).all() for g in gradients(stats.l1_sum, x, w).values())


@each_backend
@each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_that_is_not_finite_does_not_leak(backend: str, gated: bool, value: float) -> None:
    clean, w = case(6, gated=gated, bias=True)
    mask = torch.arange(6) != 2
    padded = clean.masked_fill(~mask[:, None], value).requires_grad_()
    clean.requires_grad_()
    _, stats = call(padded, w, token_mask=mask, backend=backend, return_stats=True)
    _, expected = call(clean, w, token_mask=mask, backend=backend, return_stats=True)
    torch.testing.assert_close(stats.l1_sum, expected.l1_sum)
    assert torch.equal(stats.counts, expected.counts)
    (got,), (want,) = torch.autograd.grad(stats.l1_sum, padded), torch.autograd.grad(expected.l1_sum, clean)
    torch.testing.assert_close(got[mask], want[mask])


# -- Backends and errors ---------------------------------------------------------------------------------


def test_choose_backend() -> None:
    assert backends.choose_backend("auto", torch.device("cpu")) == "cpu"
    assert backends.choose_backend("auto", torch.device("meta")) == "reference"
    assert backends.choose_backend("reference", torch.device("cpu")) == "reference"
    with pytest.raises(ValueError, match=r"backend 'cpu' is not available: .* CPU tensors, and these are on cuda:1"):
        backends.choose_backend("cpu", torch.device("cuda:1"))


@pytest.mark.parametrize(("backend", "ran"), [("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")])
def test_the_requested_backend_runs(backend: str, ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = case(40, grad=True)
    seen = []

    def spy(module: Any, name: str, label: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kw: seen.append(label) or original(*args, **kw))

    for name in ("forward", "backward"):
        spy(cpu, name, "cpu")
        spy(reference, name, "reference")
    call(x, w, backend=backend).sum().backward()
    assert seen[:2] == [ran, ran]


@each_kind
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "unknown backend 'cuda': expected one of auto, reference, cpu, triton"),
        ("triton", "backend 'triton' is not available: it runs on GPUs"),
    ],
)
@pytest.mark.usefixtures("without_the_interpreter")
def test_backend_errors(gated: bool, backend: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_chosen", {})
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*case(3, gated=gated), backend=backend)


def test_cpu_backend_says_what_it_needs() -> None:
    x, w = case(3)
    on_meta = {n: None if t is None else t.to("meta") for n, t in w.items()}
    message = "backend 'cpu' is not available: it runs on CPU tensors, and these are on meta"
    with pytest.raises(ValueError, match=message):
        call(x.to("meta"), on_meta, backend="cpu")


def tensor(*shape: int, dtype: torch.dtype = f64, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


ERRORS = [
    ({"activation": "silu"}, "activation must be one of relu, relu2, got 'silu'"),
    ({"x": tensor()}, "x must be [..., D], got a scalar"),
    ({"x": tensor(3, D + 1)}, f"must have shape {(F, D + 1)} (D={D + 1} from x, F={F} from"),
    ({"x": tensor(3, D, dtype=torch.int64)}, "x must be float32, bfloat16, float16 or float64, got torch.int64"),
    ({"w_up": tensor(F)}, f"w_up must be [F, D], got ({F},)"),
    ({"w_up": None}, "w_up must be [F, D], got None"),
    ({"w_down": None}, "w_down must be a tensor, got None"),
    ({"w_down": tensor(F, D)}, f"w_down must have shape ({D}, {F}) (D={D} from x, F={F} from w_up), got ({F}, {D})"),
    ({"b_up": tensor(D)}, f"b_up must have shape ({F},) (D={D} from x, F={F} from w_up), got ({D},)"),
    ({"b_down": tensor(F)}, f"b_down must have shape ({D},) (D={D} from x, F={F} from w_up), got ({F},)"),
    (
        {"w_down": tensor(D, F, dtype=torch.int8)},
        "w_down must be float32, bfloat16, float16 or float64, got torch.int8",
    ),
    (
        {"w_down": tensor(D, F, dtype=torch.float32)},
        "w_down is torch.float32 but x is torch.float64; cast one, or use torch.autocast",
    ),
    ({"w_down": tensor(D, F, device="meta")}, "w_down is on meta but x is on cpu"),
    ({"token_mask": tensor(4, dtype=torch.bool)}, "token_mask must have shape (3,), got (4,)"),
    ({"token_mask": tensor(3)}, "token_mask must be bool or integer, got torch.float64"),
    ({"token_mask": tensor(3, dtype=torch.bool, device="meta")}, "token_mask is on meta but x is on cpu"),
]


GATED_ERRORS = [
    ({"w_gate": tensor(F)}, f"w_gate must be [F, D], got ({F},)"),
    ({"w_gate": None}, "w_gate must be [F, D], got None"),
    ({"w_up": None}, "w_up must be a tensor, got None"),
    ({"w_up": tensor(F + 1, D)}, f"w_up must have shape ({F}, {D}) (D={D} from x, F={F} from w_gate)"),
    ({"b_gate": tensor(1)}, f"b_gate must have shape ({F},) (D={D} from x, F={F} from w_gate), got (1,)"),
]


@pytest.mark.parametrize(
    ("gated", "wrong", "message"), [(False, *error) for error in ERRORS] + [(True, *error) for error in GATED_ERRORS]
)
def test_errors_say_what_was_expected_and_given(gated: bool, wrong: dict[str, Any], message: str) -> None:
    x, w = case(3, gated=gated, bias=True)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        (twell.gated_ffn if gated else twell.ffn)(**{"x": x, **w, **wrong})
    assert str(raised.value).startswith("gated_ffn: " if gated else "ffn: ")
