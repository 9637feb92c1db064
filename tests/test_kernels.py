"""The Triton kernels against the reference, in Triton's interpreter (fp16 and fp32: its bf16 products are wrong)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import interpreted
from interpreted import shorten_lists
from twell import GatedSparseFFN, SparseFFN, gpu, reference
from twell.formats import Hybrid, TwELL
from twell.gpu.shared import gate, heavy, lists, rows, tiles
from twell.gpu.shared.layout import aligned, biases_of, by_rows, lay_out
from twell.ops import backends
from twell.ops import functional as ops
from twell.plan import Plan, costs_for, dense_plan
from twell.reference import Weights
from twell.saved import COUNTERS, Turns
from twell.workbench.bench.parts import Parts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

TILE = gpu._INTERPRETED.gate
LAUNCH = {"tile": TILE, "programs": 2, "use_tma": False}
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}
f16, f32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def few_tokens_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.plan.choose._MIN_TOKENS", 0)
    monkeypatch.setattr("twell.plan.costs._COSTS", {90: costs_for(torch.device("cpu"))._replace(batch=0)})
    shorten_lists(monkeypatch.setattr)


def make_weights(D: int, F: int, dtype: torch.dtype, *, gated: bool = True, bias: bool = False) -> Weights:
    """With a bias about an eighth of the neurons fire, without one half."""

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape) / 4).to(dtype)

    return Weights(
        normal(F, D),
        normal(F, D) if gated else None,
        normal(D, F),
        normal(F) - D**0.5 / 16 if bias else None,
        normal(F) if bias and gated else None,
        normal(D) if bias else None,
    )


def make_plan(F: int, n_hot: int, cap: int) -> Plan:
    return Plan(n_neurons=F, hot=torch.randperm(F)[:n_hot], cap=cap, first=cap // 2, min_tokens=0)


def run(x: Tensor, w: Weights, plan: Plan | None, activation: str = "relu", frozen: Sequence[Tensor] = ()) -> Tensor:
    return gpu.forward(x, w, activation, None if plan is None else plan.on(x.device), frozen)


def truth(x: Tensor, w: Weights, activation: str = "relu") -> Tensor:
    return reference.forward(x.double(), w.to(torch.float64), activation, want_stats=False).y


def assert_right(y: Tensor, x: Tensor, w: Weights, activation: str = "relu") -> None:
    expected = truth(x, w, activation)
    assert y.shape == expected.shape and y.dtype == x.dtype
    finite = expected.isfinite().all(1)
    assert torch.equal(y.isfinite().all(1), finite)
    if finite.any():
        error = (y[finite].double() - expected[finite]).norm() / expected[finite].norm().clamp(min=1e-30)
        assert error <= TOLERANCE[x.dtype]


# -- the gate ---------------------------------------------------------------------------------------------


def assert_is_gate(got: TwELL, x: Tensor, w: Weights) -> None:
    """All counts are right, and all values of tokens that fit; exact where the products are."""
    assert got.words is not None
    checked = TwELL.from_words(got.words, got.counts, shape=got.shape, dtype=got.dtype)
    expected = torch.relu(x.double() @ w.gate.double().T + (0 if w.gate_bias is None else w.gate_bias.double()))
    rounded = expected.to(x.dtype)
    fits = ~checked.overflowed
    r = checked.unpack(skip_overflowed=True)[fits].double()
    assert (r - expected[fits]).norm() <= TOLERANCE[x.dtype] * expected[fits].norm()
    packed = TwELL.pack(rounded, compact=True, overflow="mark")
    assert torch.equal(packed.counts, checked.counts)


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "D", "F", "dtype"), [(40, 64, 256, f16), (33, 48, 400, f32), (1, 16, 16, f16)])
def test_gate_in_twell(M: int, D: int, F: int, dtype: torch.dtype, bias: bool, use_tma: bool) -> None:
    w, x = make_weights(D, F, dtype, bias=bias), torch.randn(M, D, dtype=dtype)
    bits, counters = torch.full((100, 30), 9, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    launch = LAUNCH | {"use_tma": use_tma, "bits": bits, "counters": counters}
    assert_is_gate(gate.gate_in_twell(x, w.gate, w.gate_bias, **launch), x, w)
    assert not bits.any() and not counters.any()


@pytest.mark.parametrize("programs", [1, 2, 5, 64])
@pytest.mark.parametrize(("F", "use_tma"), [(768, False), (400, False), (768, True)])
def test_a_last_wave_of_half_tiles(F: int, use_tma: bool, programs: int) -> None:
    """Two or three tiles; the last wave is halved if at most half of the programs would have a tile."""
    tile = tiles.GateTile(16, 256, 16, 4, 2)
    w, x = make_weights(32, F, f32, bias=True), torch.randn(16, 32)
    assert_is_gate(gate.gate_in_twell(x, w.gate, w.gate_bias, tile=tile, programs=programs, use_tma=use_tma), x, w)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_hot_activations(gated: bool, squared: bool) -> None:
    w, x = make_weights(48, 256, f32, gated=gated, bias=True), torch.randn(37, 48)
    hot = torch.randperm(256)[:128]
    rows, order = by_rows(w), Plan(n_neurons=256, hot=hot, cap=8).on(x.device).order
    layout = lay_out(rows, order, 128, biases_of(rows, order, 128))
    h = torch.full((37, 128), torch.nan)
    gate.hot_activations(x, layout.hot, layout.hot_bias, h, gated=gated, squared=squared, **LAUNCH)
    out = reference.forward(x.double(), w.to(torch.float64))
    a = out.gate**2 if squared else out.gate
    expected = (a if out.up is None else a * out.up)[:, hot]
    assert (h.double() - expected).norm() <= 1e-6 * expected.norm()


def test_nan_is_active_and_tiny_values_that_round_to_zero_are_not() -> None:
    x = torch.ones(2, 16, dtype=f16)
    x[1, 0] = float("nan")
    w_gate = torch.full((16, 16), 1e-7 / 4, dtype=f16)  # sums to less than the smallest fp16
    got = gate.gate_in_twell(x, w_gate, None, **LAUNCH)
    r = got.unpack()
    assert not r[0].any() and r[1].isnan().all() and got.counts.tolist() == [[0], [16]]


# -- the split ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_hot", "cap"), [(0, 1), (0, 24), (128, 1), (128, 16), (256, 300)])
def test_any_plan_gives_the_dense_result(n_hot: int, cap: int, bias: bool, gated: bool, activation: str) -> None:
    w, x = make_weights(32, 384, f32, gated=gated, bias=bias), torch.randn(9, 32)
    assert_right(run(x, w, make_plan(384, n_hot, cap), activation), x, w, activation)


def test_with_real_list_sizes_and_the_gather_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real list sizes and gather kernel, which other tests replace."""
    monkeypatch.undo()
    w, x = make_weights(16, 304, f32, bias=True), torch.randn(6, 16)
    x[:2] *= 20
    assert_right(run(x, w, make_plan(304, 32, 16)), x, w)
    for gated in (True, False):
        w = w if gated else w._replace(up=None, up_bias=None)
        order = make_plan(304, 32, 16).on(x.device).order
        for which in ({}, {"cold": False}, {"hot": False}):
            arguments = (w.gate, w.up, w.down.T.contiguous(), order, 32)
            assert torch.equal(rows.gathered(*arguments, **which), interpreted.gathered(*arguments, **which))


@pytest.mark.parametrize("plan", [None, dense_plan(256)])
def test_without_a_split_the_layer_is_dense(plan: Plan | None) -> None:
    for gated in (True, False):
        for activation in ("relu", "relu2"):
            w, x = make_weights(32, 256, f32, gated=gated, bias=True), torch.randn(9, 32)
            assert_right(run(x, w, plan, activation), x, w, activation)
            w, x = make_weights(80, 256, f16, gated=gated), torch.randn(2, 35, 80, dtype=f16)  # gate and up in one GEMM
            assert_right(run(x, w, plan, activation).view(70, 80), x.view(70, 80), w, activation)


def test_half_precision_and_tma_free_shapes() -> None:
    w, x = make_weights(80, 272, f16, bias=True), torch.randn(21, 80, dtype=f16)
    for n_hot, cap in ((0, 20), (128, 10)):
        assert_right(run(x, w, make_plan(272, n_hot, cap)), x, w)


@pytest.mark.parametrize("n_hot", [0, 128])
@pytest.mark.parametrize("M", [0, 1, 7])
def test_odd_token_counts(M: int, n_hot: int) -> None:
    w, x = make_weights(16, 256, f32, bias=True), torch.randn(M, 16)
    y = run(x, w, make_plan(256, n_hot, 8))
    assert y.shape == (M, 16)
    if M:
        assert_right(y, x, w)


def test_light_heavy_empty_and_non_finite_tokens() -> None:
    """Token 0 fires all neurons, 1 none, 2 and 3 hold NaN and inf, 4 turns every gate off with -inf."""
    D, F = 16, 256
    w, x = make_weights(D, F, f32), torch.randn(8, D) / 8
    gate_row = w.gate.clone()
    gate_row[:, 0] = 1 + gate_row[:, 0].abs()
    gate_row[:, 1] = 0.25
    w = w._replace(gate=gate_row)
    x[0, 0], x[1, 0] = 100.0, -100.0
    x[2, 3], x[3, 3], x[4, 0] = float("nan"), float("inf"), float("-inf")
    for n_hot, cap in ((0, 100), (0, 1), (128, 100), (128, 256)):
        y = run(x, w, make_plan(F, n_hot, cap))
        assert_right(y, x, w)
        assert not y[2:5].isfinite().any()


def test_weights_that_are_not_finite() -> None:
    """Every token that fires the neuron gets NaN or inf; so may others in GEMMs: heavy tokens, hot neurons."""
    w, x = make_weights(16, 64, f32, bias=True), torch.randn(4, 16)
    w.gate[5], x[:, 0] = torch.eye(16)[0], torch.tensor([1.0, -1.0, 1.0, -1.0])
    w.gate_bias[:] = -2  # type: ignore[index]
    w.gate_bias[5] = 0  # type: ignore[index]
    finite = reference.forward(x, w, want_stats=False).y
    w.up[5, 3] = w.down[2, 5] = float("nan")  # type: ignore[index]
    for n_hot, cap in ((0, 64), (0, 1)):
        y = run(x, w, make_plan(64, n_hot, cap))
        assert not y[::2].isfinite().all(1).any()
        assert cap == 1 or torch.allclose(y[1::2], finite[1::2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_all_tokens_empty_or_full(density: float) -> None:
    w, x = make_weights(16, 256, f32, bias=True), torch.randn(6, 16)
    assert w.gate_bias is not None
    w = w._replace(gate_bias=torch.full_like(w.gate_bias, 100.0 if density else -100.0))
    for n_hot, cap in ((0, 16), (0, 256), (128, 16)):
        assert_right(run(x, w, make_plan(256, n_hot, cap)), x, w)


def test_inputs_that_are_not_contiguous() -> None:
    w = make_weights(32, 256, f32)
    plan = make_plan(256, 128, 8)
    wide, tall = torch.randn(9, 70), torch.randn(32, 9)
    for x in (wide[:, 3:35], tall.T, torch.randn(18, 32)[::2], torch.randn(1, 32).expand(9, 32)):
        assert_right(run(x, w, plan), x, w)
    copied = aligned(torch.randn(9, 64)[:, 3:35])  # rows 256 B apart, but none at a multiple of 16 B
    assert copied.data_ptr() % 16 == 0 and copied.is_contiguous()
    odd = Weights(w.gate.T.contiguous().T, w.up.T.contiguous().T, w.down.T.contiguous().T)
    x = torch.randn(9, 32)
    assert_right(run(x, odd, plan), x, odd)


def test_rows_are_copied_only_where_kernels_could_not_read_them() -> None:
    w = make_weights(32, 48, f32, bias=True)
    w = w._replace(down=w.down.T.contiguous().T)  # neuron-major
    rows = by_rows(w)
    assert [r.data_ptr() for r in rows if r is not None] == [t.data_ptr() for t in w if t is not None]
    off = torch.randn(48 * 32 + 1)[1:].view(48, 32)  # 4 bytes beyond a multiple of 16
    for t in (off, w.gate.T.contiguous().T, torch.randn(48, 40)[:, :32]):
        copy = by_rows(w._replace(gate=t, down=t.T)).gate
        assert torch.equal(copy, t) and copy.is_contiguous() and copy.data_ptr() % 16 == 0
    assert torch.equal(by_rows(w._replace(down=off.T)).down, off)
    contiguous = w.down.contiguous()
    assert torch.equal(by_rows(w._replace(down=contiguous)).down, contiguous.T)
    assert by_rows(w, rows.down).down is rows.down


@pytest.mark.parametrize("gated", [True, False])
def test_frozen_state_changes_no_bit(gated: bool) -> None:
    w, x = make_weights(16, 96, f16, gated=gated, bias=gated), torch.randn(6, 16, dtype=f16)
    for down in (w.down, w.down.T.contiguous().T):
        w = w._replace(down=down)
        for n_hot in (0, 32, 96):
            plan = Plan(n_neurons=96, hot=torch.randperm(96)[:n_hot], cap=8, min_tokens=5, few_tokens=3)
            kept = gpu.freeze(w, plan)
            assert (kept.down.numel() > 0) == down.is_contiguous()
            assert (kept.cold.shape == (64, 16)) == (n_hot == 32)
            for M in (2, 4, 6):  # few, dense, split
                y = run(x[:M], w, plan, frozen=kept)
                assert_right(y, x[:M], w)
                if M > 2 or not down.is_contiguous():  # few tokens of a contiguous Wd run densely unless frozen
                    assert torch.equal(run(x[:M], w, plan), y)
    assert gpu.freeze(w, None) == ()


def test_same_bits_every_time() -> None:
    w, x = make_weights(32, 256, f32), torch.randn(12, 32)
    plan = make_plan(256, 128, 20)
    first = run(x, w, plan)
    for _ in range(3):
        assert torch.equal(run(x, w, plan), first)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    M=st.integers(1, 12),
    D=st.integers(1, 4).map(lambda n: 16 * n),
    F=st.integers(1, 24).map(lambda n: 16 * n),
    hot_tiles=st.integers(0, 3),
    cap=st.integers(1, 64),
    gated=st.booleans(),
    bias=st.booleans(),
)
def test_random_shapes(M: int, D: int, F: int, hot_tiles: int, cap: int, gated: bool, bias: bool) -> None:
    w, x = make_weights(D, F, f32, gated=gated, bias=bias), torch.randn(M, D)
    assert_right(run(x, w, make_plan(F, min(F, 128 * hot_tiles), cap)), x, w)


# -- through the operation --------------------------------------------------------------------------------


def call(x: Tensor, w: Weights, plan: Plan | None = None) -> Tensor:
    return ops.gated_ffn(x, w.gate, w.up, w.down, backend="triton", plan=plan)


def test_operation_takes_plans() -> None:
    w, x = make_weights(32, 256, f32), torch.randn(2, 5, 32)
    assert_right(call(x, w, make_plan(256, 128, 8)).flatten(0, 1), x.flatten(0, 1), w)
    with torch.inference_mode():
        assert_right(call(x, w, make_plan(256, 128, 8)).flatten(0, 1), x.flatten(0, 1), w)


def test_statistics_gradients_and_odd_widths_take_the_reference() -> None:
    w, x = make_weights(24, 40, f32), torch.randn(6, 24, requires_grad=True)
    y, stats = ops.gated_ffn(x, w.gate, w.up, w.down, backend="triton", return_stats=True)
    assert int(stats.counts.sum()) == int((torch.relu(x @ w.gate.T) != 0).sum())
    y.sum().backward()
    assert x.grad is not None
    assert_right(call(x.detach(), w), x.detach(), w)


def test_why_triton_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.why_unavailable("triton", torch.device("cpu")) is None  # in the interpreter
    assert backends.choose_backend("auto", torch.device("cpu")) == "cpu"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "on the CPU" in (backends.why_unavailable("triton", torch.device("cpu")) or "")
    monkeypatch.setattr("twell.ops.backends._HAS_TRITON", False)
    assert backends.why_unavailable("triton", torch.device("cuda")) == "triton is not installed"


def test_tiles_of_architectures() -> None:
    assert tiles.tiles_for(90, torch.bfloat16).use_tma
    assert not tiles.tiles_for(90, torch.float32).use_tma
    assert tiles.tiles_for(87, torch.bfloat16) == tiles.tiles_for(86, torch.bfloat16)
    with pytest.raises(ValueError, match=r"need compute capability 8.0 or newer, got 7.5"):
        tiles.tiles_for(75, torch.bfloat16)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 3, 32), (2, 0, 32), (1, 1, 32)], ids=str)
@pytest.mark.parametrize("few_tokens", [0, 8])
@pytest.mark.parametrize("min_tokens", [0, 99])
def test_tokens_of_any_shape(shape: tuple[int, ...], few_tokens: int, min_tokens: int) -> None:
    w = make_weights(32, 256, f32)
    w = w._replace(down=w.down.T.contiguous().T)
    plan = Plan(n_neurons=256, hot=torch.arange(128), cap=8, min_tokens=min_tokens, few_tokens=few_tokens)
    x = torch.randn(shape)
    y = ops.gated_ffn(x, w.gate, w.up, w.down, plan=plan, backend="triton")
    assert y.shape == shape
    assert_right(y.reshape(-1, 32), x.reshape(-1, 32), w)
    odd = torch.randn(64).as_strided((1, 32), (7, 1))  # contiguous for torch, which knows that there is one row
    assert_right(ops.gated_ffn(odd, w.gate, w.up, w.down, plan=plan, backend="triton"), odd, w)


# -- in a module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GatedSparseFFN, SparseFFN])
def test_modules_plan_from_their_counts(cls: type) -> None:
    layer = cls(32, 512, bias=True, backend="triton", track_counts=True)
    first = getattr(layer, layer.projections[0])
    with torch.no_grad():
        first.bias.fill_(-4.0)
        first.bias[100:200] = 1.0  # a hundred that fire nearly always
        x = torch.randn(20, 32)
        layer(x)
        plan = layer.plan_from_counts()
        assert set(range(100, 200)) <= set(plan.hot.tolist())
        assert "Plan(" in repr(layer)
        layer.track_counts = False
        y = layer(x)
        w = Weights(first.weight, layer.up_proj.weight if cls is GatedSparseFFN else None, layer.down_proj.weight)
        biases = (first.bias, layer.up_proj.bias if cls is GatedSparseFFN else None, layer.down_proj.bias)
        assert_right(y, x, Weights(*w[:3], *biases))
        layer.set_plan(None)
        assert torch.allclose(layer(x), y, atol=1e-5)
    assert not any("plan" in key for key in layer.state_dict())
    with pytest.raises(ValueError, match="the plan is for 16 neurons, the layer has 512"):
        layer.set_plan(dense_plan(16))


def test_layers_plan_by_their_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.nn.planned.LOOK_TOKENS", 40)
    monkeypatch.setattr("twell.nn.planned.LOOK_AT_LEAST", 10)
    monkeypatch.setattr("twell.nn.planned.FIRST_LOOK", 0)
    layer = GatedSparseFFN(32, 2048, bias=True, backend="triton")
    with torch.no_grad():
        layer.gate_proj.weight.mul_(0.1)
        layer.gate_proj.bias.fill_(-4.0)
        layer.gate_proj.bias[300:400] = 4.0
        layer(torch.randn(9, 32))  # too small to be looked at
        assert layer._first_batches is None
        layer(torch.randn(2, 15, 32))
        assert layer.plan is None and layer._first_batches is not None and layer._first_batches[1] == 30
        x = torch.randn(30, 32)
        planned = layer(x)
    assert layer.plan is not None and layer._first_batches is None
    assert len(layer.plan.hot) == 256 and set(range(300, 400)) <= set(layer.plan.hot.tolist())
    with torch.no_grad():
        layer.set_plan(None)
        assert torch.allclose(layer(x), planned, atol=1e-4)
        assert layer.plan is None  # plan=None stays None


def test_training_and_other_backends_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.nn.planned.LOOK_AT_LEAST", 1)
    layer = GatedSparseFFN(32, 256, backend="triton")
    layer(torch.randn(9, 32))  # with gradients
    assert layer._first_batches is None
    layer.backend = "cpu"
    with torch.no_grad():
        layer(torch.randn(9, 32))
    assert layer._first_batches is None


# -- classes of tokens ------------------------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tokens have 6 to 12 active neurons, and there may be two."""
    shorten_lists(monkeypatch.setattr, long=12)


def with_counts(counts: list[int], C: int) -> Tensor:
    """bool [tokens, C] with the given number of active neurons in each row."""
    return torch.stack([torch.randperm(C) < n for n in counts])


def of_cold_neurons(parts: Parts, w: Weights, r: Tensor) -> Tensor:
    w = w.to(torch.float64)
    assert w.up is not None
    return (r.double() * (parts.x.double() @ w.up[parts.cold].T)) @ w.down[:, parts.cold].T


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("n_hot", [0, 128])
@pytest.mark.parametrize(
    ("counts", "long", "heavy"),
    [
        ([0, 1, 2, 3, 5, 6, 12, 0, 4], {5, 6}, set()),  # both long ones have a place
        ([6, 7, 0, 12, 5], set(), {0, 1, 3}),  # three have not
        ([13, 6, 0, 128], {1}, {0, 3}),  # heavy by themselves
        ([13, 6, 7, 8, 13, 0], set(), {0, 1, 2, 3, 4}),
        ([3] * 40, set(), set()),  # more early tokens than there is room for
        ([0] * 5, set(), set()),
        ([128] * 3, set(), {0, 1, 2}),
    ],
)
def test_every_token_is_in_one_class(counts: list[int], long: set[int], heavy: set[int], n_hot: int) -> None:
    torch.manual_seed(0)
    M, D, F = len(counts), 32, 128 + n_hot
    w, x = make_weights(D, F, f32), torch.randn(M, D)
    parts = Parts(x, w, Plan(n_neurons=F, hot=torch.arange(n_hot), cap=5, first=2, min_tokens=0))
    r = parts.replace_gate(with_counts(counts, 128))
    counters, entries, listed, early_tokens = (t.tolist() for t in parts.lists.turns)
    of_token = [n if n >= 0 else -1 - n for n in entries]
    overfull = parts.in_twell.overflowed.tolist()
    assert of_token == [lists.OVERFULL.value if over else n for n, over in zip(counts, overfull, strict=True)]
    in_turn = {i for i, n in enumerate(entries) if n >= 0}
    early = set(early_tokens[: counters[2]])
    over = set(listed[M - counters[1] :])
    assert heavy == set(listed[: counters[0]]) | (over if counters[1] > 2 else set())
    assert long == (over if counters[1] <= 2 else set())
    classes = [in_turn, early, long, heavy]
    assert sorted(i for c in classes for i in c) == list(range(M))

    parts.y.fill_(torch.inf)
    parts.tail(parts.tiles.tail)
    assert {i for i in range(M) if parts.y[i].isinf().all()} == heavy  # and only heavy rows are left to others
    parts.heavy(parts.tiles.heavy)
    parts.restore()
    expected = of_cold_neurons(parts, w, r)
    parts.tail(parts.tiles.tail)
    parts.heavy(parts.tiles.heavy)
    assert (parts.y.double() - expected).norm() <= 1e-6 * expected.norm()


def test_lists_equal_those_of_hybrid() -> None:
    """Lists of tokens within cap equal those of ``Hybrid``, which marks the other tokens."""
    w, x = make_weights(32, 304, f32), torch.randn(60, 32)
    parts = Parts(x, w, make_plan(304, 48, 24))
    r = parts.replace_gate(with_counts([int(n) for n in torch.randint(0, 40, (60,))], 256))
    whole = torch.zeros(60, 304)
    whole[:, parts.cold] = r
    packed = Hybrid.pack(whole, cap=24, backup=0, overflow="mark")
    light = (~packed.overflowed).nonzero()[:, 0]
    assert 0 < len(light) < 60
    rows, values = (t[: 60 * 24].view(60, 24) for t in (parts.lists.rows, parts.lists.values))
    for token in light.tolist():
        n = int(packed.counts[token])
        order = rows[token, :n].argsort()
        assert torch.equal(rows[token, :n][order], packed.indices[token, :n])
        assert torch.equal(values[token, :n][order], packed.values[token, :n])


@pytest.mark.usefixtures("little_room")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_counts_caps_and_firsts(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 144), min_size=1, max_size=12))
    cap, first, n_hot = (
        data.draw(st.integers(0, 20)),
        data.draw(st.integers(0, 20)),
        data.draw(st.sampled_from([0, 112])),
    )
    torch.manual_seed(len(counts))
    F = 144 + n_hot
    w, x = make_weights(16, F, f32), torch.randn(len(counts), 16)
    parts = Parts(x, w, Plan(n_neurons=F, hot=torch.arange(n_hot), cap=cap, first=first, min_tokens=0))
    expected = of_cold_neurons(parts, w, parts.replace_gate(with_counts(counts, 144)))
    parts.tail(parts.tiles.tail)
    parts.heavy(parts.tiles.heavy)
    assert (parts.y.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(("use_tma", "programs"), [(True, 40), (True, 2), (False, 40)])
@pytest.mark.parametrize("n_heavy", [0, 5, 16, 20, 67])
@pytest.mark.parametrize("gated", [True, False])
def test_heavy_tokens_alone(n_heavy: int, gated: bool, use_tma: bool, programs: int) -> None:
    """Few tokens, with and without shared sums, three chunks; rows of hot neurons, scattered, are not read."""
    torch.manual_seed(n_heavy)
    M, D, F = 70, 48, 304  # no whole tiles
    w, x = make_weights(D, F, f16, gated=gated, bias=True), torch.randn(M, D, dtype=f16)
    plan = make_plan(F, 62, 8).on(x.device)
    hot, cold = plan.order[:62].long(), plan.order[62:].long()
    rows = by_rows(w)._replace(gate_bias=biases_of(w, plan.order, 62)[1])
    rows.gate[hot] = torch.nan
    tokens, mask = torch.randperm(M)[:n_heavy], torch.rand(M) < 0.5
    if n_heavy > 2:
        x[tokens[0], 3], x[tokens[1], 5] = torch.nan, torch.inf
    turns, half = Turns(*(torch.zeros(n, dtype=torch.int32) for n in (COUNTERS, M, M, 1))), n_heavy // 2
    turns.counters[:2] = torch.tensor([half, n_heavy - half])
    turns.heavy[:half], turns.heavy[M - n_heavy + half :] = tokens[:half], tokens[half:].flip(0)
    y, l1, counts = torch.full_like(x, 7), torch.full((M,), 7.0), torch.full((len(cold),), 5, dtype=torch.int32)
    heavy.write_heavy_(
        y, x, turns, rows, plan.places, squared=not gated, tile=gpu._INTERPRETED.heavy, programs=programs,
        use_tma=use_tma, statistics=(l1, counts), token_mask=mask,
    )  # fmt: skip
    others = torch.ones(M, dtype=torch.bool)
    others[tokens] = False
    assert (y[others] == 7).all() and (l1[others] == 7).all() and int(turns.counters[3]) == 0
    of_cold = Weights(*(None if t is None else t[cold] for t in (w.gate, w.up, w.down.T, w.gate_bias, w.up_bias)))  # type: ignore[arg-type]
    of_cold = of_cold._replace(down=of_cold.down.T, down_bias=w.down_bias)
    z = x[tokens].double() @ of_cold.gate.double().T + of_cold.gate_bias.double()  # type: ignore[union-attr]
    assert torch.equal(counts - 5, (torch.relu(z).to(f16)[mask[tokens]] != 0).sum(0))
    assert_right(y[tokens], x[tokens], of_cold, "relu" if gated else "relu2")
    finite = [i for i in range(n_heavy) if i > 1 or n_heavy <= 2]
    out = reference.forward(x[tokens][finite].double(), of_cold.to(torch.float64), "relu" if gated else "relu2")
    assert torch.allclose(l1[tokens][finite].sum().double(), out.l1_sum, rtol=1e-3)


@pytest.mark.usefixtures("little_room")
def test_a_watched_call_counts_pairs_and_heavy_tokens() -> None:
    w, x = make_weights(16, 144, f32, bias=True), torch.randn(40, 16)
    n = (torch.relu(x @ w.gate.T + w.gate_bias) != 0).sum(1)
    cap = int(n.median())
    plan, listed = make_plan(144, 0, cap), n <= cap
    assert 0 < listed.sum() < 40
    watch = torch.tensor([1000, 100], dtype=torch.int32)  # added to
    y = gpu.infer_here(x, w, "relu", plan.on(x.device), *plan.tokens(captured=False), (), watch)
    assert_right(y, x, w)
    assert watch.tolist() == [1000 + int(n[listed].sum()), 100 + int((~listed).sum())]


def test_tokens_that_turn_every_neuron_off_by_minus_infinity() -> None:
    """Dense: 0 * u with u = inf or NaN is NaN, though no neuron is active."""
    w, x = make_weights(32, 64, f32), torch.randn(4, 32).abs()
    w = w._replace(gate=w.gate.abs())
    x[2] = -x[2]
    x[2, 5] = -torch.inf
    for n_hot in (0, 32):
        y = run(x, w, make_plan(64, n_hot, 300))
        assert y.isfinite().all(1).tolist() == [True, True, False, True] == truth(x, w).isfinite().all(1).tolist()
    plain = w._replace(up=None)
    y = run(x, plain, make_plan(64, 0, 300))
    assert y.isfinite().all() and truth(x, plain).isfinite().all()
