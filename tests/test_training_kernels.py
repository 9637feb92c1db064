"""Training through the Triton kernels against the reference, in Triton's interpreter (fp16 and fp32)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreted import shorten_lists

pytest.importorskip("triton")

from twell import GatedSparseFFN, SparseFFN, gpu, reference
from twell.gpu import dense
from twell.gpu.shared import lists, rows
from twell.gpu.shared.layout import by_rows
from twell.gpu.training import hot, split_training, tail_backward
from twell.gpu.training.columns import Columns
from twell.ops import functional as ops
from twell.plan import Costs, Plan
from twell.reference import Weights
from twell.saved import SavedSplit, trains_split

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}
f16, f32 = torch.float16, torch.float32
ALL = (True,) * 7


@pytest.fixture(autouse=True)
def few_long_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_lists(monkeypatch.setattr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    M: int = 20
    D: int = 16
    F: int = 128
    dtype: torch.dtype = f32
    n_hot: int = 16
    cap: int = 16
    gated: bool = True
    bias: bool = False
    activation: str = "relu"
    masked: bool = False
    l1: bool = True
    neuron_major: bool = False  # Wd's layout
    seed: int = 0


class Inputs:
    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        M, D, F = case.M, case.D, case.F

        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / 4).to(case.dtype)

        self.w = Weights(
            normal(F, D),
            normal(F, D) if case.gated else None,
            normal(D, F),
            normal(F) - 0.5 if case.bias else None,
            normal(F) if case.bias and case.gated else None,
            normal(D) if case.bias else None,
        )
        if case.neuron_major:
            self.w = self.w._replace(down=self.w.down.t().contiguous().t())
        self.x, self.dy = normal(M, D) * 4, normal(M, D)
        if M:
            self.x[M // 2] = 0  # a token without active neurons, unless biases wake some
        self.mask = torch.rand(M, generator=generator) < 0.7 if case.masked else None
        self.dl1 = torch.tensor(0.3) if case.l1 else None
        hot = torch.randperm(F, generator=generator)[: case.n_hot]
        self.plan = Plan(n_neurons=F, hot=hot, cap=case.cap, first=case.cap // 2, min_tokens=0)

    def run(self, activation: str, needs: tuple[bool, ...] = ALL) -> tuple[Any, reference.Gradients]:
        plan = self.plan.on(self.x.device)
        *out, saved = gpu.train(self.x, self.w, activation, plan, self.mask, want_stats=True, save=True)
        gradients = gpu.backward(self.dy, self.dl1, self.x, self.w, saved, activation, plan, self.mask, needs)
        return out, gradients

    def truth(self, dtype: torch.dtype, activation: str, needs: tuple[bool, ...] = ALL) -> Any:
        x, w, dy = self.x.to(dtype), self.w.to(dtype), self.dy.to(dtype)
        dl1 = None if self.dl1 is None else self.dl1.to(dtype)
        out = reference.forward(x, w, activation, self.mask)
        return out, reference.backward(dy, dl1, x, w, out.gate, out.up, activation, self.mask, needs)


def relative_error(t: Tensor, truth: Tensor) -> float:
    return float((t.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def check(case: Case, needs: tuple[bool, ...] = ALL) -> None:
    """The error against float64 is at most twice that of the dense formulas in the same dtype."""
    inputs = Inputs(case)
    (y, l1_sum, counts), got = inputs.run(case.activation, needs)
    out, want = inputs.truth(torch.float64, case.activation, needs)
    dense_out, dense = inputs.truth(case.dtype, case.activation, needs)
    assert torch.equal(counts, dense_out.counts) or case.dtype == f16  # other rounding may wake another neuron
    pairs = {"y": (y, dense_out.y, out.y), "l1_sum": (l1_sum, dense_out.l1_sum, out.l1_sum)}
    pairs["x"] = (got.x, dense.x, want.x)
    for name in Weights._fields:
        if getattr(want.weights, name) is None:
            assert getattr(got.weights, name) is None
        else:
            pairs[name] = tuple(getattr(g.weights, name) for g in (got, dense, want))
    for name, (ours, dense_one, truth) in pairs.items():
        if ours is None:
            assert truth.numel() == 0, name
            continue
        assert ours.shape == truth.shape, name
        if truth.numel():
            assert ours.dtype == dense_one.dtype, name
            assert ours.stride() == inputs.w.down.stride() if name == "down" else ours.is_contiguous(), name
            allowed = max(TOLERANCE[case.dtype], 2 * relative_error(dense_one, truth))
            assert relative_error(ours, truth) <= allowed, name


# -- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(n_hot=0, cap=40, activation="relu2"),
        Case(bias=True, masked=True, dtype=f16, M=33, D=32),
        Case(gated=False, bias=True, masked=True),
        Case(gated=False, n_hot=0, activation="relu2", F=48),
        Case(bias=True, activation="relu2", F=80, n_hot=32, masked=True),
        Case(l1=False, n_hot=112),
        Case(M=70, F=48, cap=16, n_hot=16),  # more than one chunk of tokens
        Case(neuron_major=True, cap=8, bias=True),
        Case(neuron_major=True, gated=False, n_hot=0, cap=8),
    ],
    ids=str,
)
def test_gradients(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("cap", [0, 1, 8, 60])
@pytest.mark.parametrize("n_hot", [0, 16])
def test_capacities_change_no_gradient(cap: int, n_hot: int) -> None:
    """Tokens fire about 20 cold neurons: all tokens are heavy, or all have lists."""
    check(Case(cap=cap, n_hot=n_hot, F=64, bias=True, masked=True))


@pytest.mark.parametrize("dense_rows", [1, 2, 3, 20])
def test_long_and_heavy_tokens_among_light_ones(dense_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long tokens have lists; a third makes all of them heavy."""
    inputs = Inputs(Case(F=64, n_hot=16, cap=4))
    inputs.x[:] = 0
    inputs.w = inputs.w._replace(gate_bias=torch.linspace(-1, 0.05, 64))
    inputs.x[:dense_rows] = torch.randn(dense_rows, 16)
    _, got = inputs.run("relu")
    _, want = inputs.truth(torch.float64, "relu")
    for ours, truth in zip((got.x, *got.weights), (want.x, *want.weights), strict=True):
        assert relative_error(ours, truth) <= 1e-5


@pytest.mark.parametrize("needed", range(7))
def test_single_gradients(needed: int) -> None:
    check(Case(bias=True), tuple(i == needed for i in range(7)))


def test_a_frozen_ffn_passes_gradients_on() -> None:
    check(Case(), (True, *[False] * 6))


@pytest.mark.parametrize("M", [0, 1, 31])
def test_few_tokens(M: int) -> None:
    check(Case(M=M, F=48))


@pytest.mark.slow
@settings(max_examples=10)
@given(
    M=st.integers(1, 40),
    D=st.sampled_from([16, 48]),
    F=st.sampled_from([16, 48, 144]),
    share=st.floats(0, 0.9),
    cap=st.integers(0, 40),
    gated=st.booleans(),
    bias=st.booleans(),
    masked=st.booleans(),
    activation=st.sampled_from(["relu", "relu2"]),
    seed=st.integers(0, 99),
)
def test_any_shape(M: int, D: int, F: int, share: float, cap: int, **kinds: Any) -> None:
    check(Case(M=M, D=D, F=F, n_hot=min(2 * int(share * F / 2), F - 16), cap=cap, **kinds))


def test_the_same_bits_every_time() -> None:
    inputs = Inputs(Case(cap=8, bias=True))
    (_, first), (_, second) = inputs.run("relu"), inputs.run("relu")
    for a, b in zip((first.x, *first.weights), (second.x, *second.weights), strict=True):
        assert torch.equal(a, b)


# -- pieces ------------------------------------------------------------------------------------------------


def test_pairs_are_ordered_by_neuron_then_token() -> None:
    inputs = Inputs(Case(M=70, F=48, n_hot=0, cap=32))
    plan, rows = inputs.plan.on(inputs.x.device), by_rows(inputs.w)
    *_, kept = gpu.train(inputs.x, inputs.w, "relu", plan, None, want_stats=True, save=True)
    parts = SavedSplit.of(kept, 70, 48, 0, 32, gated=True)
    columns = Columns(parts.offsets, parts.pair_of)
    found = lists.Lists(parts.rows, parts.values, parts.turns, 32)
    tile = gpu._INTERPRETED.tail_backward
    pairs = tail_backward.write_tail_gradients(
        None, inputs.dy, None, None, found, parts.up, rows.gate, rows.up, rows.down, plan.places, columns,
        squared=False, tile=tile,
    )  # fmt: skip
    assert pairs is not None
    keys = columns.keys
    n = int(columns.offsets[0, keys])
    r = torch.relu(inputs.x @ inputs.w.gate.T)
    expected = r.t().nonzero()[:, 1].tolist()
    assert pairs.tokens[:n].tolist() == expected
    pairs_before = columns.offsets[0, : keys + 1].contiguous()  # those of each neuron
    assert pairs_before.diff().max() > tail_backward.SPLIT
    starts = torch.arange(0, n, tail_backward.SPLIT, dtype=torch.int32)
    assert torch.equal(pairs.owners[: len(starts)], torch.searchsorted(pairs_before, starts, right=True).int() - 1)


@pytest.mark.parametrize("M", [1, 2048, 16384, 34816, 131072, 1 << 20])
def test_room_for_shares_is_bounded(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the lists' real sizes
    size = lists.list_size(M, 64)
    split = tail_backward.split_at(size)
    assert -(-size // split) <= 4096 and split & (split - 1) == 0 and split >= 512
    assert split == 512 or -(-size // (split // 2)) > 4096


@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (80, 144), (0, 16)])
def test_matrices_are_transposed(shape: tuple[int, int]) -> None:
    t = torch.randn(shape)
    assert torch.equal(rows.transposed(t), t.t())
    assert rows.transposed(t).is_contiguous()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("wanted", ["gate up down", "gate", "up", "down", "up down"])
def test_rows_of_hot_neurons_are_scattered(wanted: str, gated: bool) -> None:
    D, hot = 1104, [7, 0, 8]
    names = [name for name in ("gate", "up", "down") if gated or name != "up"]
    part = {name: torch.randn(3, D) for name in names}
    targets = {name: torch.randn(9, D) for name in names if name in wanted}
    expected = {name: t.clone() for name, t in targets.items()}
    for name, t in expected.items():
        t[hot] = part[name]
    inputs = torch.stack([part["gate"], part["up"]], 1).flatten(0, 1) if gated else part["gate"]
    order = torch.tensor([*hot, 1, 2, 3, 4, 5, 6], dtype=torch.int32)
    given = tuple(targets.get(name) for name in ("gate", "up", "down"))
    rows.put_rows_(given, order, inputs, part["down"], 3, gated=gated)
    for name, t in targets.items():
        assert torch.equal(t, expected[name])


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("shape", [(37, 48, 80), (1, 16, 16), (64, 20, 32), (5, 0, 16)], ids=str)
def test_products_are_added(shape: tuple[int, int, int], use_tma: bool) -> None:
    M, K, N = shape
    out, a, b = torch.randn(M, N).half(), torch.randn(M, K).half(), torch.randn(K, N).half()
    expected = out.double() + a.double() @ b.double()
    hot.add_product_(out, a, b, tile=gpu._INTERPRETED.gate._replace(BN=32), programs=2, use_tma=use_tma)
    assert relative_error(out, expected) < TOLERANCE[f16]


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("dtype", "squared", "masked"), [(f32, False, True), (f16, True, False), (f16, False, None)])
def test_gradients_of_hot_neurons(
    dtype: torch.dtype, squared: bool, masked: bool | None, gated: bool, use_tma: bool
) -> None:
    """``masked`` None: without L1."""
    M, D, H = 21, 48, 20
    dy, down, z, u = (torch.randn(n, m).to(dtype) for n, m in ((M, D), (H, D), (M, H), (M, H)))
    mask = torch.rand(M) < 0.5 if masked else None
    dl1 = None if masked is None else torch.tensor(0.25)
    sums = torch.stack([z, u], 2).flatten(1) if gated else z
    given: Any = {"tile": gpu._INTERPRETED.heavy, "programs": 2, "use_tma": use_tma and dtype == f16}
    gradients, h = hot.hot_gradients(dy, down, sums, dl1, mask, gated=gated, squared=squared, **given)
    leaf_z, leaf_u = z.double().requires_grad_(), u.double().requires_grad_()
    a = torch.relu(leaf_z) ** (2 if squared else 1)
    expected = a * leaf_u if gated else a
    loss = (expected * (dy.double() @ down.double().T)).sum()
    if dl1 is not None:
        loss = loss + 0.25 * (expected.abs() if mask is None else expected.abs()[mask]).sum()
    loss.backward()
    assert leaf_z.grad is not None
    wanted = torch.stack([leaf_z.grad, leaf_u.grad], 2).flatten(1) if leaf_u.grad is not None else leaf_z.grad
    assert relative_error(h, expected.detach()) < TOLERANCE[dtype] and gradients.shape == sums.shape
    assert relative_error(gradients, wanted) < TOLERANCE[dtype]


# -- through the operations and modules -------------------------------------------------------------------


def leaves(case: Case) -> tuple[Inputs, list[Tensor]]:
    inputs = Inputs(case)
    return inputs, [t.clone().requires_grad_() for t in (inputs.x, *inputs.w) if t is not None]


def losses_and_gradients(tensors: list[Tensor], *, gated: bool = True, **options: Any) -> tuple[Tensor, list[Tensor]]:
    for t in tensors:
        t.grad = None
    y, stats = (ops.gated_ffn if gated else ops.ffn)(*tensors, return_stats=True, **options)
    loss = (y * y).sum() + 0.1 * stats.l1_sum
    loss.backward()
    return loss.detach(), [t.grad for t in tensors if t.grad is not None]


@pytest.fixture
def ran_split(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether any forward was split since the last question."""
    calls: list[int] = []
    forward = split_training.forward
    monkeypatch.setattr(split_training, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))

    def ask() -> bool:
        used = bool(calls)
        calls.clear()
        return used

    return ask


@pytest.mark.parametrize("gated", [True, False])
def test_operations_train_by_the_plan(gated: bool, ran_split: Callable[[], bool]) -> None:
    case = Case(gated=gated, bias=True)
    inputs, tensors = leaves(case)
    ours = losses_and_gradients(tensors, gated=gated, backend="triton", plan=inputs.plan)
    assert ran_split()
    theirs = losses_and_gradients(tensors, gated=gated, backend="reference")
    assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert relative_error(a, b.double()) < 1e-5
    (ops.gated_ffn if gated else ops.ffn)(*tensors, backend="triton")
    assert not ran_split()


@pytest.mark.parametrize(
    "case",
    [
        Case(F=48),
        Case(F=48, bias=True, masked=True, activation="relu2"),
        Case(gated=False, bias=True, masked=True),
        Case(M=70, D=32, F=528, dtype=f16, l1=False),
        Case(M=0),
        Case(M=1, gated=False, activation="relu2"),
    ],
    ids=str,
)
def test_the_dense_path_in_few_passes(case: Case) -> None:
    inputs = Inputs(case)
    y, l1_sum, counts, kept = dense.forward(inputs.x, inputs.w, case.activation, inputs.mask, want_stats=True)
    theirs, by_reference = inputs.truth(case.dtype, case.activation)
    truth, true = inputs.truth(torch.float64, case.activation)
    assert torch.equal(counts, theirs.counts)
    got = dense.backward(inputs.dy, inputs.dl1, inputs.x, inputs.w, kept, case.activation, inputs.mask, ALL)
    rows = zip(
        (y, l1_sum, got.x, *got.weights),
        (theirs.y, theirs.l1_sum, by_reference.x, *by_reference.weights),
        (truth.y, truth.l1_sum, true.x, *true.weights),
        strict=True,
    )
    for a, b, t in rows:
        if t is None:
            assert a is None
            continue
        assert a.shape == t.shape
        if t.numel():
            assert relative_error(a, t) <= max(TOLERANCE[case.dtype], 2 * relative_error(b, t))


def test_nan_in_the_dense_path() -> None:
    inputs = Inputs(Case(F=48))
    inputs.x[3, 0] = float("nan")
    y, l1_sum, counts, _ = dense.forward(inputs.x, inputs.w, "relu", None, want_stats=True)
    theirs, _ = inputs.truth(f32, "relu")
    assert torch.equal(counts, theirs.counts)  # NaN is active
    assert torch.equal(y.isnan(), theirs.y.isnan()) and l1_sum.isnan()


@pytest.mark.parametrize("needed", range(7))
def test_single_gradients_of_the_dense_path(needed: int) -> None:
    inputs, needs = Inputs(Case(F=48, bias=True)), tuple(i == needed for i in range(7))
    *_, kept = dense.forward(inputs.x, inputs.w, "relu", None, want_stats=False)
    got = dense.backward(inputs.dy, None, inputs.x, inputs.w, kept, "relu", None, needs)
    for i, gradient in enumerate((got.x, *got.weights)):
        assert gradient is not None and (gradient.numel() > 0) == (i == needed)


def test_few_tokens_and_dense_plans_train_densely(ran_split: Callable[[], bool]) -> None:
    inputs, tensors = leaves(Case())
    everything = Plan(n_neurons=128, hot=torch.arange(128), cap=0, min_tokens=0)
    for plan in (dataclasses.replace(inputs.plan, min_tokens=21), everything):
        ops.gated_ffn(*tensors, backend="triton", plan=plan)
        assert not ran_split()
    assert trains_split(1 << 20, 128, 16, 1024, 0)
    assert not trains_split(1 << 21, 128, 16, 1024, 0)  # as many pairs as 32 bits do not count


def test_only_some_weights_train() -> None:
    inputs, tensors = leaves(Case())
    for t in tensors[:2]:
        t.requires_grad_(False)
    _, ours = losses_and_gradients(tensors, backend="triton", plan=inputs.plan)
    _, theirs = losses_and_gradients(tensors, backend="reference")
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b.double()) < 1e-5


def test_losses_of_one_output_alone() -> None:
    inputs, tensors = leaves(Case())
    for through in ("y", "l1_sum"):
        grads = []
        for options in ({"backend": "triton", "plan": inputs.plan}, {"backend": "reference"}):
            y, stats = ops.gated_ffn(*tensors, return_stats=True, **options)
            loss = y.sum() if through == "y" else stats.l1_sum  # the gradient of a sum is expanded: zero strides
            grads.append(torch.autograd.grad(loss, tensors, allow_unused=True))
        for ours, theirs in zip(*grads, strict=True):
            if theirs is None or not theirs.any():
                assert ours is None or not ours.any()
            else:
                assert relative_error(ours, theirs.double()) < 1e-5


def test_inputs_that_are_not_contiguous() -> None:
    inputs, tensors = leaves(Case())
    odd = [t.detach().t().contiguous().t().requires_grad_() for t in tensors]
    assert not odd[1].is_contiguous()
    _, ours = losses_and_gradients(odd, backend="triton", plan=inputs.plan)
    _, theirs = losses_and_gradients(tensors, backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b.double()) < 1e-5


def test_gradient_accumulation_and_checkpointing() -> None:
    inputs, tensors = leaves(Case(M=24))
    _, whole = losses_and_gradients(tensors, backend="triton", plan=inputs.plan)
    whole = [g.clone() for g in whole]
    for t in tensors:
        t.grad = None
    x, *rest = tensors

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        y, stats = ops.gated_ffn(x, *rest, return_stats=True, backend="triton", plan=inputs.plan)
        return y, stats.l1_sum

    for part in x.split(8):
        y, l1_sum = torch.utils.checkpoint.checkpoint(block, part, use_reentrant=False)
        ((y * y).sum() + 0.1 * l1_sum).backward()
    for t, g in zip(tensors, whole, strict=True):
        assert t.grad is not None and relative_error(t.grad, g.double()) < 1e-5


def test_autocast_of_wide_weights(ran_split: Callable[[], bool]) -> None:
    inputs, tensors = leaves(Case(M=33, D=32))
    grads = []
    for options in ({"backend": "triton", "plan": inputs.plan}, {"backend": "reference"}):
        with torch.autocast("cpu", dtype=torch.float16):
            y, stats = ops.gated_ffn(*tensors, return_stats=True, **options)
            assert y.dtype == f16 and ran_split() == ("plan" in options)
            grads.append(torch.autograd.grad(y.float().pow(2).sum() + 0.1 * stats.l1_sum, tensors))
    _, truths = losses_and_gradients(tensors, backend="reference")
    for ours, theirs, truth in zip(*grads, truths, strict=True):
        assert ours.dtype == f32
        assert relative_error(ours, truth.double()) <= 2 * relative_error(theirs, truth.double()) + 1e-3


def test_the_kept_tensor_may_be_copied() -> None:
    """As torch.autograd.graph.save_on_cpu copies it from a GPU."""
    inputs, tensors = leaves(Case(F=48))
    _, expected = losses_and_gradients(tensors, backend="triton", plan=inputs.plan)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
    ):
        _, ours = losses_and_gradients(tensors, backend="triton", plan=inputs.plan)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_the_kept_tensor_is_small() -> None:
    inputs, tensors = leaves(Case(M=256, D=16, F=512, n_hot=0, cap=16))
    with torch.no_grad():
        tensors[1].mul_(0).add_(torch.randn(512, 1) / 50 - 0.02)  # few neurons fire
    kept = {}
    for name, options in {"sparse": {"backend": "triton", "plan": inputs.plan}, "dense": {}}.items():
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            ops.gated_ffn(*tensors, **({"backend": "reference"} | options))
        own = {id(t) for t in tensors}
        kept[name] = sum(t.nbytes for t in saved if id(t) not in own)
    assert kept["sparse"] < kept["dense"] / 2


def test_the_rest_of_a_compiled_model_trains_around_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), GatedSparseFFN(16, 128, backend="triton"), torch.nn.Tanh())
    model[1].set_plan(Inputs(Case()).plan)
    x = torch.randn(20, 16)
    grads = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(x).pow(2).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b.double()) < 1e-5


def test_modules_train_after_an_optimiser_step() -> None:
    torch.manual_seed(0)
    layers = [SparseFFN(16, 128, bias=True, backend=b) for b in ("triton", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[0].set_plan(Inputs(Case()).plan)
    x = torch.randn(20, 16)
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in layers]
    for _ in range(3):
        losses = []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            loss = layer(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.allclose(*losses, rtol=1e-4)


def test_training_has_costs_of_its_own() -> None:
    from twell.plan import choose_plan, costs_for

    training = costs_for(torch.device("cpu"), training=True)
    assert isinstance(training, Costs) and training.dense > 2
    counts = torch.cat([torch.full((512,), 200), torch.full((5120,), 2)])
    plan = choose_plan(counts, 1000, training)
    assert len(plan.hot) == 512 and plan.predicted is not None and 2 < plan.predicted < 3
    assert choose_plan(torch.full((5632,), 100), 1000, training).is_dense


@pytest.mark.parametrize("min_tokens", [0, 100])
def test_nothing_need_be_aligned(min_tokens: int) -> None:
    inputs = Inputs(Case(masked=True, F=64, cap=8, bias=True))
    inputs.plan = dataclasses.replace(inputs.plan, min_tokens=min_tokens)
    expected = inputs.run("relu")

    def odd(t: Tensor) -> Tensor:
        room = torch.cat([t.new_zeros(1), t.reshape(-1)])
        return room[1:].view(t.shape)

    inputs.x, inputs.dy, inputs.mask, inputs.dl1 = map(odd, (inputs.x, inputs.dy, inputs.mask, inputs.dl1))
    inputs.w = Weights._make(map(odd, inputs.w))
    (out, gradients), (same_out, same) = expected, inputs.run("relu")
    for a, b in zip((*out, gradients.x, *gradients.weights), (*same_out, same.x, *same.weights), strict=True):
        assert torch.equal(a, b)
