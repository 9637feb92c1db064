"""The FP8 kernels against the reference, in Triton's interpreter (fp16: its bf16 products are wrong)."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import twell
from interpreted import shorten_lists
from twell import GatedSparseFFN, gpu, reference
from twell.gpu import dense_fp8
from twell.gpu.decode import few_fp8
from twell.gpu.prefill import split_fp8
from twell.gpu.shared import round_fp8
from twell.gpu.shared.layout import Fp8Weights, SplitSizes
from twell.nn.quantize import quantize_
from twell.plan import Plan, dense_plan, tokens_of
from twell.reference import Fp8, to_fp8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
f16, f64 = torch.float16, torch.float64
TOLERANCE = 1.5e-3  # of fp16 values of the gate, h of hot neurons and y


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_lists(monkeypatch.setattr)


def make(M: int, D: int, F: int, *, gated: bool = True, shift: float = 0.4) -> tuple[Tensor, list[Fp8 | None]]:
    """About an eighth of the neurons fire."""
    x = torch.randn(M, D) / 4
    x[:, 0] = 1
    gate, up, down = torch.randn(F, D) / 4, torch.randn(F, D) / 4, torch.randn(D, F) / 4
    gate[:, 0] -= shift
    return x.to(f16), [to_fp8(gate), to_fp8(up) if gated else None, to_fp8(down)]


def run(x: Tensor, w: list[Fp8 | None], n_hot: int, cap: int, activation: str = "relu") -> Tensor:
    rows = Fp8Weights.of(*w, by_neurons=True)  # type: ignore[arg-type]
    F = len(rows.gate)
    plan = Plan(n_neurons=F, hot=torch.randperm(F)[:n_hot], cap=cap, first=cap // 2, min_tokens=0).on(x.device)
    layout = split_fp8.lay_out(rows, plan, n_hot, x.dtype)
    tiles = split_fp8.tiles_for(0)
    assert tiles is not None
    split = SplitSizes.of(plan)
    return split_fp8.forward(x, rows, layout, plan.order, plan.places, split, activation, tiles, 2)


def assert_right(y: Tensor, x: Tensor, w: list[Fp8 | None], activation: str = "relu") -> None:
    truth = reference.fp8_forward(x, *w, activation)  # type: ignore[arg-type]
    finite = truth.isfinite().all(1)
    assert torch.equal(y.isfinite().all(1), finite) and y.dtype == x.dtype
    assert (y[finite].double() - truth[finite]).norm() <= TOLERANCE * truth[finite].norm()


def test_rows_are_rounded_as_the_reference_does() -> None:
    x = torch.randn(37, 48).to(f16)
    x[3], x[4] = 0, 1e-4
    x[5, 7], x[6, 1] = float("nan"), float("inf")
    x[7] *= 60000 / x[7].abs().max()
    q, scale = out = round_fp8.room_for(37, 48, x.new_empty)
    round_fp8.round_rows(x, out)
    want = to_fp8(x)
    fine = [i for i in range(37) if i not in (5, 6)]
    assert torch.equal(q.float()[fine], want.q.float()[fine]) and torch.equal(scale[fine], want.scale[fine])
    assert Fp8(q, scale).to(f64)[[5, 6]].isnan().all()


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_h_is_rounded_as_in_a_dense_ffn(gated: bool, activation: str) -> None:
    z, u = torch.randn(5, 176).to(f16), torch.randn(5, 176).to(f16)
    h = reference.activate(torch.relu(z).float(), activation) * (u.float() if gated else 1)
    q, scale = out = round_fp8.room_for(5, 176, z.new_empty)
    round_fp8.round_hidden(z, u if gated else None, activation == "relu2", out)
    want = to_fp8(h.to(f16))
    assert torch.equal(q.float(), want.q.float()) and torch.equal(scale, want.scale)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("n_hot", "cap"), [(0, 1), (0, 48), (128, 1), (128, 300)])
def test_any_plan_gives_the_same(n_hot: int, cap: int, gated: bool, activation: str) -> None:
    x, w = make(11, 48, 272, gated=gated)
    assert_right(run(x, w, n_hot, cap, activation), x, w, activation)


def test_all_kinds_of_tokens_side_by_side() -> None:
    """All neurons fire, none fires, NaN, inf and zeros; more heavy tokens than a chunk holds."""
    x, w = make(45, 48, 272)
    x[0, 0], x[1, 0] = -20.0, 20.0
    x[2, 3], x[3, 3], x[4] = float("nan"), float("inf"), 0
    for n_hot, cap in ((0, 48), (128, 48), (0, 1)):
        assert_right(run(x, w, n_hot, cap), x, w)


def test_tensors_that_a_layer_keeps() -> None:
    x, w = make(20, 48, 272)
    plan = Plan(n_neurons=272, hot=torch.arange(128), cap=48, first=16, min_tokens=0)
    tensors = plan.on(x.device)
    kept = gpu.fp8.keep(*w, tensors, f16)  # type: ignore[arg-type]
    assert sum(t.nbytes for t in kept.derived()) == 272 * 48 + 2 * 128 * 52 + 128 * 48 * 2 + 144 * 52
    assert_right(gpu.fp8.forward(x, kept.w, "relu", tensors, 0, 0, kept.layout), x, w)
    assert gpu.fp8.forward(x[:0], kept.w, "relu", tensors, 0, 0, kept.layout).shape == (0, 48)
    for dense in (None, dense_plan(272).on(x.device)):
        assert gpu.fp8.keep(*w, dense).derived() == ()  # type: ignore[arg-type]
    _, other = make(20, 48, 272)
    before = kept.derived()
    kept.rewrite_(gpu.fp8.keep(*other, tensors, f16))  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(before, kept.derived(), strict=True))
    assert torch.equal(kept.w.down.float(), other[2].q.t().float())  # type: ignore[union-attr]


def test_kept_tensors_follow_weights_and_plans() -> None:
    torch.manual_seed(0)
    layer = GatedSparseFFN(48, 272).eval()
    quantize_(layer)

    def kept(captured: bool = False, is_sparse: bool = True) -> Any:
        return layer._kept_of_fp8(layer._fp8_tensors(), layer._plan_eager, is_sparse=is_sparse, captured=captured)

    def plan(n_hot: int) -> Plan:
        return Plan(n_neurons=272, hot=torch.randperm(272)[:n_hot], cap=48, min_tokens=0)

    assert kept(captured=True, is_sparse=False).derived() == () and layer._fp8 is None
    layer.set_plan(plan(128))
    with pytest.raises(RuntimeError, match="call the layer once before capturing"):
        kept(captured=True)
    first = kept()
    assert kept() is first and kept(captured=True) is first and layer.frozen_bytes() > 272 * 48
    tensors, before = first.derived(), first.layout.hot_down.clone()
    with torch.no_grad():
        layer.down_proj.weight_scale.mul_(2)
    with pytest.raises(RuntimeError, match="call the layer once before capturing"):
        kept(captured=True)
    second = kept()
    assert all(a is b for a, b in zip(tensors, second.derived(), strict=True))
    assert torch.equal(second.layout.hot_down, 2 * before)
    layer.down_proj.weight_scale.data.div_(2)  # which nobody sees
    assert torch.equal(kept().layout.hot_down, 2 * before)
    assert twell.refresh_(layer) == 1 and torch.equal(kept().layout.hot_down, before)
    layer.set_plan(plan(128))  # as many hot neurons, and others
    assert kept().derived()[0] is not tensors[0] and not torch.equal(kept().layout.hot_down, before)
    assert twell.thaw_(layer) == 0 and layer._fp8 is None and copy.deepcopy(layer)._fp8 is None


@pytest.mark.parametrize(("few", "captured"), [(0, None), (0, 16), (16, 0), (16, None)])
def test_few_tokens_of_graphs_alone_need_the_neuron_major_weight(few: int, captured: int | None) -> None:
    layer = GatedSparseFFN(48, 272).eval()
    quantize_(layer)
    layer.set_plan(dataclasses.replace(dense_plan(272, few), few_tokens_captured=captured))
    plans: Any = layer._plan_eager, layer._plan_captured
    kept = layer._kept_of_fp8(layer._fp8_tensors(), plans[0], is_sparse=False, captured=False)
    assert (kept.w.down is not None) == (max(few, captured or 0) > 0) and kept.layout is None
    assert layer._kept_of_fp8(layer._fp8_tensors(), plans[1], is_sparse=True, captured=True) is kept
    with torch.no_grad():
        layer.down_proj.weight_scale.mul_(2)
    assert len(layer._kept_of_fp8(layer._fp8_tensors(), plans[0], is_sparse=False, captured=False).derived()) == (
        kept.w.down is not None
    )


def test_which_weights_can_be_read() -> None:
    _, (gate, _, down) = make(1, 48, 272)
    assert gate is not None and down is not None and gpu.fp8.can_read(gate, down)
    assert not gpu.fp8.can_read(gate, Fp8(down.q.t().contiguous().t(), down.scale))
    assert not gpu.fp8.can_read(gate, Fp8(down.q, down.scale.bfloat16()))
    assert not gpu.fp8.can_read(Fp8(gate.q.to(f16), gate.scale), down)
    wide = Fp8(torch.zeros(40000, 16, dtype=gate.q.dtype), torch.ones(40000))
    assert not gpu.fp8.can_read(wide, down)


def test_shapes_of_x() -> None:
    x, w = make(12, 48, 272)
    assert torch.equal(run(x.view(3, 4, 48), w, 0, 48).view(12, 48), run(x, w, 0, 48))
    wide = torch.zeros(12, 64, dtype=f16)
    wide[:, :48] = x
    assert torch.equal(run(wide[:, :48], w, 0, 48), run(x, w, 0, 48))


# -- small dense batches ----------------------------------------------------------------------------------


def hidden_of(x: Tensor, w: list[Fp8 | None], activation: str = "relu") -> Fp8:
    """h of a dense FFN with fp16 GEMMs, rounded to e4m3."""
    gate, up, _ = w
    assert gate is not None and up is not None
    z, u = (to_fp8(x).to(f64) @ of.to(f64).T for of in (gate, up))
    a = reference.activate(torch.relu(z).to(f16).double(), activation)
    return to_fp8((a * u.to(f16).double()).to(f16))


def assert_dense(y: Tensor, x: Tensor, w: list[Fp8 | None], activation: str = "relu") -> None:
    assert w[2] is not None and y.dtype == x.dtype
    want = hidden_of(x, w, activation).to(f64) @ w[2].to(f64).T
    finite = want.isfinite().all(1)
    assert torch.equal(y.isfinite().all(1), finite)
    assert (y[finite].double() - want[finite]).norm() <= TOLERANCE * want[finite].norm()


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("M", [1, 33, 70])
def test_small_dense_batches(M: int, activation: str) -> None:
    """Neither D nor F fills a tile."""
    x, w = make(M, 80, 176)
    kept = gpu.fp8.keep(*w, None).w  # type: ignore[arg-type]
    assert_dense(gpu.fp8.dense(x, kept, activation), x, w, activation)


def test_depths_are_shared_among_any_number_of_programs() -> None:
    """F has 6 steps: 2 of 8 shares have nothing to add. Hundreds of tiles' counters are set to 0."""
    x, w = make(40, 80, 176)
    kept = gpu.fp8.keep(*w, None).w  # type: ignore[arg-type]
    tiles = dense_fp8.tiles_for(40, 80, 176, x.device)
    assert tiles is not None
    for programs in (1, 12, 18, 24, 1000):
        assert_dense(dense_fp8.forward(x, kept, "relu", tiles._replace(programs=programs)), x, w)
    narrow = tiles._replace(down=tiles.down._replace(BM=16, BN=16), programs=1000)
    assert_dense(dense_fp8.forward(x, kept, "relu", narrow), x, w)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1, 5, 17, 64])
def test_few_tokens(M: int, gated: bool, activation: str) -> None:
    x, w = make(M, 80, 176, gated=gated)
    kept = Fp8Weights.of(*w, by_neurons=True)  # type: ignore[arg-type]
    assert_right(few_fp8.forward(x, kept, activation), x, w, activation)


def test_few_tokens_of_inf_nan_zeros_and_other_shapes() -> None:
    x, w = make(12, 80, 176)
    x[3, 5], x[4, 5], x[5] = float("nan"), float("inf"), 0
    kept = Fp8Weights.of(*w, by_neurons=True)  # type: ignore[arg-type]
    y = few_fp8.forward(x, kept, "relu")
    assert_right(y, x, w)
    assert y.isfinite().all(1).nonzero()[:, 0].tolist() == [i for i in range(12) if i not in (3, 4)]
    wide = torch.zeros(12, 96, dtype=f16)
    wide[:, :80] = x
    for same in (x.view(3, 4, 80), wide[:, :80]):
        assert torch.equal(few_fp8.forward(same, kept, "relu").view(12, 80)[5:], y[5:])


def test_a_layer_runs_few_tokens_sparsely() -> None:
    """Also where large batches are dense: Wd is kept neuron-major then, too."""
    x, w = make(20, 80, 176)
    plan = dense_plan(176, few_tokens=16).on(x.device)
    kept = gpu.fp8.keep(*w, plan, f16)  # type: ignore[arg-type]
    assert kept.w.down is not None and kept.layout is None and len(kept.derived()) == 1
    few, _, least = tokens_of(plan)
    assert few == 16
    for M in (0, 1, 16):
        assert_right(gpu.fp8.forward(x[:M], kept.w, "relu", plan, few, least, None), x[:M], w)
    assert_dense(gpu.fp8.forward(x, kept.w, "relu", plan, few, least, None), x, w)


def test_small_batches_of_inf_nan_zeros_and_other_shapes() -> None:
    x, w = make(12, 80, 176)
    x[3, 5], x[4, 5], x[5] = float("nan"), float("inf"), 0
    kept = gpu.fp8.keep(*w, None).w  # type: ignore[arg-type]
    y = gpu.fp8.dense(x, kept, "relu")
    assert_dense(y, x, w)
    assert y.isfinite().all(1).nonzero()[:, 0].tolist() == [i for i in range(12) if i not in (3, 4)]
    wide = torch.zeros(12, 96, dtype=f16)
    wide[:, :80] = x
    for same in (x.view(3, 4, 80), wide[:, :80]):
        assert torch.equal(gpu.fp8.dense(same, kept, "relu").view(12, 80)[5:], y[5:])
