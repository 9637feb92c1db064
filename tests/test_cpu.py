"""The CPU path against the reference: every way to compute, at any shape, density and memory layout."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twell import cpu, reference
from twell.reference import Gradients, Weights

f64 = torch.float64
NARROW = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = math.nan, math.inf
reference_backward = reference.backward  # itself, where a test spies on it

# (gated, activation, biases present: g(ate), u(p), d(own))
LAYERS = [(gated, a, b) for gated in (True, False) for a in ("relu", "relu2") for b in ("", "gud" if gated else "gd")]
each_layer = pytest.mark.parametrize(("gated", "activation", "biases"), LAYERS)
each_kind = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
each_m = pytest.mark.parametrize("M", [1, 2, 16, 64, 65, 257])

SLOW_MATVEC = cpu.products.BlasHabits(slow_matvec=True)
IN_PARTS = cpu.products.BlasHabits(rows_in_pieces=range(1, 300))
TRANSPOSED = cpu.products.BlasHabits(transposed_rows=range(1, 300), transposed_bf16_rows=range(1, 300))
HABITS = [cpu.products.BlasHabits(), SLOW_MATVEC, TRANSPOSED, IN_PARTS]

ALWAYS_ON, WAKES_HOT, WAKES_ALL, FREE = 0, 1, 2, 3  # what the columns of x are for, in `case`


# -- Helpers: inputs with a chosen sparsity, the ways taken, and comparisons -----------------------------


def case(
    M: int,
    D: int = 24,
    F: int = 96,
    density: float = 0.1,
    *,
    gated: bool = True,
    biases: str = "",
    hot: int = 0,
    dtype: torch.dtype = f64,
    seed: int = 0,
) -> tuple[Tensor, Weights]:
    """x and weights whose gate has about ``density`` active elements, and ``hot`` neurons that always fire.

    x[:, ALWAYS_ON] = 1 carries the thresholds. x[i, WAKES_HOT] = 1 fires the hot neurons, 0 leaves them as
    the others. x[i, WAKES_ALL] = 0; 1 there fires every neuron, -1 none.
    """
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=f64)

    x = normal(M, D)
    x[:, ALWAYS_ON], x[:, WAKES_HOT], x[:, WAKES_ALL] = 1, 1, 0
    w_gate, w_up, w_down = normal(F, D) / math.sqrt(D), normal(F, D) / math.sqrt(D), normal(D, F) / math.sqrt(F)
    w_gate[:, ALWAYS_ON] = -torch.special.ndtri(torch.tensor(1 - density, dtype=f64)).clamp(-30, 30)
    w_gate[:, WAKES_HOT], w_gate[:hot, WAKES_HOT], w_gate[:, WAKES_ALL] = 0, 50, 100
    bias = {k: 0.1 * normal(n) if k in biases else None for k, n in (("g", F), ("u", F), ("d", D))}
    w = Weights(w_gate, w_up if gated else None, w_down, bias["g"], bias["u"], bias["d"])
    return x.to(dtype), w.to(dtype)


def every_third_left_out(M: int) -> Tensor:
    return torch.arange(M) % 3 != 1


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways taken, in order: one for each block or single token, and one or two for a backward."""
    taken: list[str] = []
    run_dense, run_sparse, at_neurons = (
        cpu.block.Block._run_dense,
        cpu.block.Block._run_sparse,
        cpu.one_token.at_neurons,
    )
    one_token, tail_backward = cpu.one_token.one_token, cpu.training.tail_backward

    def down(rows: Tensor | None, is_dense: bool) -> str:
        return ", dense down" if is_dense else ", columns" if rows is None else ""

    def spy_dense(block, *args):
        taken.append("dense")
        run_dense(block, *args)

    def spy_sparse(block, y, split, up_out):
        run_sparse(block, y, split, up_out)
        taken.append(("hot" if len(split.hot) else "tail") + down(block.down_FD, split.down_is_dense))

    def spy_at_neurons(x, w, frozen, col, *args):
        rows = cpu.frozen.down_rows(w.down, frozen)
        is_dense = rows is None and len(col) > cpu.one_token.MAX_COLUMNS * w.down.shape[1]
        taken[-1] = "one token" + down(rows, is_dense)
        return at_neurons(x, w, frozen, col, *args)

    def spy_one_token(*args):
        taken.append("one token, dense")
        return one_token(*args)

    def spy_tail_backward(*args):
        taken.append("tail" + down(args[4], False))
        return tail_backward(*args)

    def spy_backward(*args):
        taken.append("hot" if taken[-1:] and taken[-1].startswith("tail") else "reference")
        return reference_backward(*args)

    monkeypatch.setattr(cpu.block.Block, "_run_dense", spy_dense)
    monkeypatch.setattr(cpu.block.Block, "_run_sparse", spy_sparse)
    monkeypatch.setattr(cpu.one_token, "at_neurons", spy_at_neurons)
    monkeypatch.setattr(cpu.one_token, "one_token", spy_one_token)
    monkeypatch.setattr(cpu.training, "tail_backward", spy_tail_backward)
    monkeypatch.setattr(reference, "backward", spy_backward)
    return taken


DOWN = {"rows": "", "frozen": "", "columns": ", columns", "dense": ", dense down"}  # and what ``ways`` calls it


def price_columns(monkeypatch: pytest.MonkeyPatch, price: float) -> None:
    """0: neurons are always gathered as columns of Wd; inf: the down projection is dense instead."""
    for name in ("GATHER", "GATHER_BF16"):
        monkeypatch.setattr(cpu.block, name, getattr(cpu.block, name)._replace(column=price, read=0.0))
    monkeypatch.setattr(cpu.one_token, "MAX_COLUMNS", 0.0 if price else 1.0)
    monkeypatch.setattr(cpu.rows, "SLICE", 7)  # D is no multiple of it


@pytest.fixture(params=DOWN)
def down(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the rows of active neurons are read from Wd."""
    price_columns(monkeypatch, INF if request.param == "dense" else 0.0)
    return request.param


def laid(w: Weights, down: str) -> tuple[Weights, tuple[Tensor, ...]]:
    """The weights and the frozen state for a way in ``DOWN``."""
    if down == "rows":
        return w._replace(down=transposed(w.down)), ()
    return w, cpu.freeze(w) if down == "frozen" else ()


def close(got: Tensor, want: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m: f"{what}: {m}")


def assert_forward(
    x: Tensor,
    w: Weights,
    activation: str = "relu",
    mask: Tensor | None = None,
    *,
    want_stats: bool = True,
    save: bool = False,
    frozen: tuple[Tensor, ...] = (),
) -> reference.Forward:
    """cpu.forward is reference.forward; returns the latter."""
    got = cpu.forward(x, w, activation, mask, want_stats=want_stats, save=save, frozen=frozen)
    want = reference.forward(x, w, activation, mask, want_stats=want_stats)
    close(got.y, want.y, "y")
    close(got.l1_sum, want.l1_sum, "l1_sum")
    assert got.counts.dtype == torch.int32
    assert torch.equal(got.counts, want.counts)
    if not save:
        assert len(got.gate) == 0
        assert got.up is None or len(got.up) == 0
        return want
    close(got.gate, want.gate, "gate")
    assert (got.up is None) == (w.up is None)
    if got.up is not None and want.up is not None:
        active = want.gate != 0
        close(got.up[active], want.up[active], "up")
        if x.isfinite().all():
            assert got.up.isfinite().all()  # no uninitialised memory where r is not active
    return want


def error(got: Tensor, truth: Tensor) -> float:
    return (got.double() - truth).norm().item()


def assert_no_worse_than_dense(got: Tensor, dense: Tensor, truth: Tensor, what: str = "") -> None:
    """Error against float64 at most twice dense's own, and a few roundings where the order of a sum decides."""
    assert got.dtype == dense.dtype and got.shape == dense.shape
    roundings = 4 if dense.dtype in (torch.float32, f64) else 0.25
    slack = roundings * torch.finfo(dense.dtype).eps * truth.norm().item()
    assert error(got, truth) <= 2 * error(dense, truth) + slack, what


def nonfinite_pattern(t: Tensor) -> Tensor:
    """0 finite, 1 inf, 2 -inf, 3 NaN."""
    return t.isposinf() * 1 + t.isneginf() * 2 + t.isnan() * 3


# -- Forward: values, statistics, saved activations ------------------------------------------------------


@each_layer
@pytest.mark.parametrize("M", [0, 1, 2, 16, 64, 65, 257])
def test_forward_is_the_reference(M: int, gated: bool, activation: str, biases: str) -> None:
    x, w = case(M, gated=gated, biases=biases, hot=4, seed=M)
    for want_stats, save, mask in itertools.product((True, False), (True, False), (None, every_third_left_out(M))):
        assert_forward(x, w, activation, mask, want_stats=want_stats, save=save)


@pytest.mark.parametrize("dtype", NARROW)
@each_layer
@pytest.mark.parametrize("M", [2, 65, 257])
def test_forward_errs_at_most_twice_as_dense(
    M: int, gated: bool, activation: str, biases: str, dtype: torch.dtype, down: str, ways: list[str]
) -> None:
    x, w = case(M, 64, 256, 0.01 if M == 65 else 0.03, gated=gated, biases=biases, hot=6, dtype=dtype, seed=M)
    truth, dense = reference.forward(x.double(), w.to(f64), activation), reference.forward(x, w, activation)
    w, frozen = laid(w, down)
    got = cpu.forward(x, w, activation, save=down != "frozen", frozen=frozen)
    assert ways == [("tail" if M == 2 else "hot") + DOWN[down]]
    if down == "frozen":
        assert_no_worse_than_dense(got.y, dense.y, truth.y)
        return
    assert_no_worse_than_dense(got.y, dense.y, truth.y)
    assert_no_worse_than_dense(got.gate, dense.gate, truth.gate)
    assert_no_worse_than_dense(got.l1_sum, dense.l1_sum, truth.l1_sum)
    assert torch.equal(got.counts, (got.gate != 0).sum(0, dtype=torch.int32))


@pytest.mark.parametrize("dtype", NARROW)
@each_layer
def test_single_tokens_err_at_most_twice_as_dense(
    gated: bool, activation: str, biases: str, dtype: torch.dtype, down: str, ways: list[str]
) -> None:
    x, w = case(24, 64, 256, 0.03, gated=gated, biases=biases, hot=6, dtype=dtype)
    truth = reference.forward(x.double(), w.to(f64), activation).y
    dense = torch.cat([reference.forward(token, w, activation).y for token in x.split(1)])
    w, frozen = laid(w, down)
    got = torch.cat([cpu.forward(token, w, activation, want_stats=False, frozen=frozen).y for token in x.split(1)])
    assert set(ways) == {"one token" + DOWN[down]}
    assert_no_worse_than_dense(got, dense, truth)


def test_l1_of_16_bit_inputs_is_summed_in_float32() -> None:
    x, w = case(257, hot=4, dtype=torch.float16)
    assert cpu.forward(x, w).l1_sum.dtype == torch.float32


@given(
    M=st.integers(0, 90),
    D=st.integers(4, 40),
    F=st.integers(1, 150),
    density=st.sampled_from((0.0, 0.01, 0.05, 0.2, 0.6, 1.0)),
    layer=st.sampled_from(LAYERS),
    hot=st.integers(0, 5),
    masked=st.booleans(),
    block_rows=st.integers(1, 100),
    down=st.sampled_from(list(DOWN)),
    seed=st.integers(0, 2**16),
)
def test_forward_at_any_shape_and_density(M, D, F, density, layer, hot, masked, block_rows, down, seed) -> None:
    gated, activation, biases = layer
    x, w = case(M, D, F, density, gated=gated, biases=biases, hot=hot, seed=seed)
    mask = every_third_left_out(M) if masked else None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu, "BLOCK_BYTES", block_rows * F * 8)
        monkeypatch.setattr(cpu.block, "MIN_HOT_ROWS", 8)
        price_columns(monkeypatch, INF if down == "dense" else 0.0)
        w, frozen = laid(w, down)
        assert_forward(x, w, activation, mask, save=True)
        assert_forward(x, w, activation, mask, want_stats=False, frozen=frozen)


# -- Forward: the ways through it ------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize(
    ("way", "M", "density", "hot"),
    [
        ("dense", 16, 0.8, 0),
        ("dense", 80, 0.3, 0),  # worth listing, not worth gathering
        ("tail", 16, 0.02, 0),
        ("tail", 80, 0.02, 0),
        ("hot", 64, 0.02, 8),
        ("hot", 257, 0.05, 8),
        ("one token", 1, 0.1, 2),
        ("one token, dense", 1, 0.5, 0),
        ("one token, dense", 1, 0.8, 0),
    ],
)
def test_each_way(
    way: str, M: int, density: float, hot: int, gated: bool, activation: str, biases: str, down: str, ways: list[str]
) -> None:
    x, w = case(M, density=density, hot=hot, gated=gated, biases=biases)
    w, frozen = laid(w, down)
    assert_forward(x, w, activation, want_stats=False, frozen=frozen)
    expected = way if "dense" in way else way + DOWN[down]
    assert ways == [expected]
    if M > 1:
        assert_forward(x, w, activation, every_third_left_out(M), frozen=frozen)
        assert ways == [expected] * 2


@pytest.mark.parametrize(
    ("way", "M", "F", "density"),
    [
        ("one token, columns", 1, 512, 0.02),
        ("one token, dense down", 1, 512, 0.1),
        ("tail, columns", 16, 1024, 0.004),
        ("tail, dense down", 16, 1024, 0.06),
        ("dense", 16, 1024, 0.3),
    ],
)
def test_columns_are_gathered_where_they_are_few(way: str, M: int, F: int, density: float, ways: list[str]) -> None:
    """With the real costs."""
    assert_forward(*case(M, 64, F, density), want_stats=False)
    assert ways == [way]


@pytest.mark.parametrize(("M", "way"), [(cpu.block.MIN_HOT_ROWS - 1, "tail"), (cpu.block.MIN_HOT_ROWS, "hot")])
def test_few_tokens_have_no_hot_neurons(M: int, way: str, ways: list[str]) -> None:
    x, w = case(M, density=0.02, hot=8)
    assert_forward(x, laid(w, "rows")[0])
    assert ways == [way]


def test_a_single_token_with_statistics_runs_as_a_block(ways: list[str]) -> None:
    x, w = case(1)
    w, _ = laid(w, "rows")
    assert_forward(x, w, want_stats=True)
    assert_forward(x, w, want_stats=False, save=True)
    assert ways == ["tail"] * 2


@pytest.fixture(params=HABITS, ids=["plain", "slow_matvec", "transposed", "in_parts"])
def habits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> cpu.products.BlasHabits:
    """Each way to compute a dense product, on any CPU."""
    monkeypatch.setattr(cpu.products, "blas_habits", lambda: request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return request.param


@each_m
def test_each_way_to_compute_a_dense_product(M: int, habits: cpu.products.BlasHabits) -> None:
    for density, layout in itertools.product((0.02, 0.9), (torch.clone, transposed)):
        x, w = case(M, density=density, biases="gud")
        w = w._replace(gate=layout(w.gate), up=layout(w.up), down=layout(w.down))
        assert_forward(layout(x), w, want_stats=False)
        assert_forward(layout(x), w, save=True)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@each_kind
@pytest.mark.parametrize("density", [0.02, 0.9])
def test_large_matrix_vector_products(
    gated: bool, dtype: torch.dtype, density: float, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = case(1, 512, 1408, density, gated=gated, biases="gud" if gated else "gd", dtype=dtype)
    columns = mock.Mock(wraps=cpu.products.full_column)
    monkeypatch.setattr(cpu.products, "full_column", columns)
    monkeypatch.setattr(cpu.products, "blas_habits", lambda: SLOW_MATVEC)
    got = cpu.forward(x, w, want_stats=False).y
    wide = reference.forward(x.double(), w.to(f64)).y
    torch.testing.assert_close(got.double(), wide, rtol=1e-4, atol=1e-5)
    assert ways == ["one token, columns" if density < 0.5 else "one token, dense"]
    n_full = 1 if density < 0.5 else 3 if gated else 2
    assert columns.call_count == n_full


def test_an_unknown_cpu_takes_plain_products() -> None:
    with mock.patch("builtins.open", side_effect=FileNotFoundError):
        assert cpu.products.blas_habits.__wrapped__() == cpu.products.BlasHabits()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("F", [32, 36])
def test_every_way_of_a_linear_is_right(F: int, M: int, dtype: torch.dtype, habits: cpu.products.BlasHabits) -> None:
    """Also if F does not divide into pieces, and if weights do not lie row by row."""
    x, bias = torch.randn(M, 48).to(dtype), torch.randn(F).to(dtype)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    for layout, b in itertools.product((torch.clone, transposed, every_other_row), (None, bias)):
        weight = layout(torch.randn(F, 48).to(dtype) / 7)
        y = cpu.products.linear(x, weight, b)
        assert y.is_contiguous()
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, b), rtol=error, atol=error)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("n", [0, 1, cpu.rows.LONG_SUM, cpu.rows.LONG_SUM + 1, 1000])
def test_weighted_sums_of_any_length(n: int, dtype: torch.dtype) -> None:
    table, weight, bias = (random_like(torch.empty(s, dtype=dtype)) for s in ((1000, 24), (n,), (24,)))
    index = torch.randperm(1000)[:n]
    for b in (None, bias):
        got = cpu.rows.weighted_sum(table, index, weight, b)
        truth = (weight.double() @ table.double()[index]).unsqueeze(0) + (0 if b is None else b.double())
        dense = torch.nn.functional.linear(weight.unsqueeze(0), table[index].t(), b)
        assert_no_worse_than_dense(got, dense, truth)


def test_column_major_weights_avoid_slow_products(habits: cpu.products.BlasHabits) -> None:
    """sampled_addmm and W x^T take 20 to 100 times as long with them."""
    weight = transposed(torch.randn(32, 48))
    with mock.patch.object(torch, "mm") as mm, mock.patch.object(torch.sparse, "sampled_addmm") as sampled_addmm:
        for M in (1, 2, 16):
            cpu.products.linear(torch.randn(M, 48), weight, None)
    assert not mm.called
    assert not sampled_addmm.called


def test_products_in_pieces_need_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.products, "blas_habits", lambda: IN_PARTS)
    in_parts = mock.Mock(wraps=cpu.products.linear_in_pieces)
    monkeypatch.setattr(cpu.products, "linear_in_pieces", in_parts)
    x, weight = torch.randn(2, 48), torch.randn(32, 48)
    for threads, calls in ((1, 0), (2, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        cpu.products.linear(x, weight, None)
        assert in_parts.call_count == calls


def test_small_work_is_left_to_the_reference(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = case(70)
    work = w.gate.numel() * (70 + cpu.block.WEIGHT_READ_ROWS)
    for min_work in (work, work + 1):
        monkeypatch.setattr(cpu.block, "MIN_WORK", min_work)
        assert_forward(x, w, save=True)
        assert len(ways) == 1


@each_layer
def test_each_block_chooses_its_own_way(
    gated: bool, activation: str, biases: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = case(210, density=0.02, hot=8, gated=gated, biases=biases)
    x[:70, WAKES_ALL] = 1
    x[70:140, WAKES_HOT] = 0
    w, _ = laid(w, "rows")
    monkeypatch.setattr(cpu, "BLOCK_BYTES", 70 * w.gate.shape[0] * 8)
    for mask, save in itertools.product((None, every_third_left_out(210)), (True, False)):
        ways.clear()
        assert_forward(x, w, activation, mask, save=save)
        assert ways == ["dense", "tail", "hot"]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_blocks_of_a_few_rows(rows: int, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = case(23, biases="gud")
    monkeypatch.setattr(cpu, "BLOCK_BYTES", rows * w.gate.shape[0] * 8)
    assert_forward(x, w, "relu2", every_third_left_out(23), save=True)
    assert len(ways) >= 23 / rows


# -- Forward: adversarial inputs -------------------------------------------------------------------------


def all_full(x: Tensor) -> None:
    x[:, WAKES_ALL] = 1


def all_empty(x: Tensor) -> None:
    x[:, WAKES_ALL] = -1


def one_full_row(x: Tensor) -> None:
    x[:, WAKES_ALL] = -1
    x[-1, WAKES_ALL] = 1


def one_neuron_for_all(x: Tensor) -> None:
    x[:, WAKES_ALL] = -0.3  # -30: all but the hot neuron, at +50
    x[:, FREE:] *= 0.1


@each_m
@each_layer
@pytest.mark.parametrize("shape", [all_full, all_empty, one_full_row, one_neuron_for_all])
def test_extreme_rows(
    shape: Callable[[Tensor], None], M: int, gated: bool, activation: str, biases: str, ways: list[str]
) -> None:
    x, w = case(M, gated=gated, biases=biases, hot=1 if shape is one_neuron_for_all else 0)
    shape(x)
    counts = assert_forward(x, w, activation, save=True).counts
    expected = {all_full: M, all_empty: 0, one_full_row: 1, one_neuron_for_all: 0}[shape]
    assert (counts[1:] == expected).all()
    assert counts[0] == (M if shape is one_neuron_for_all else expected)
    assert_forward(x, w, activation, want_stats=False)
    if shape is not one_full_row:
        assert ("dense" in ways[0]) == (shape is all_full)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [ALWAYS_ON, WAKES_ALL, FREE])
@pytest.mark.parametrize("M", [1, 2, 65, 257])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_nonfinite_rows_give_the_result_of_the_reference(
    layout: str, gated: bool, M: int, column: int, value: float, ways: list[str]
) -> None:
    """Infinity times a common sign empties or fills the row; in a free column it does some of both."""
    row = M // 2
    for dtype, want_stats in itertools.product((f64, *NARROW), (True, False)):
        x, w = case(M, density=0.02, gated=gated, dtype=dtype)
        x[row, column] = value
        w, _ = laid(w, layout)
        got, want = cpu.forward(x, w, want_stats=want_stats), reference.forward(x, w, want_stats=want_stats)
        assert torch.equal(nonfinite_pattern(got.y), nonfinite_pattern(want.y))
        assert got.y[torch.arange(M) != row].isfinite().all()
        assert torch.equal(nonfinite_pattern(got.l1_sum), nonfinite_pattern(want.l1_sum))
        if want_stats:
            assert got.counts.sum() >= want.gate[row].count_nonzero()
    assert all("dense" in way for way in ways)


@pytest.mark.parametrize("M", [1, 2, 65])
@each_kind
def test_minus_infinity_at_every_gate(gated: bool, M: int) -> None:
    """No neuron is active, and yet 0 * inf is NaN in a gated FFN; a plain one gives its bias."""
    x, w = case(M, density=0.02, gated=gated, biases="d")
    x[0, ALWAYS_ON] = INF
    want = assert_forward(x, w, want_stats=False)
    assert (want.gate[0] == 0).all()
    assert want.y[0].isnan().all() if gated else torch.equal(want.y[0], w.down_bias)


def test_padding_that_is_nan_stays_out_of_the_statistics() -> None:
    x, w = case(20)
    clean = reference.forward(x[1:], w)
    x[0] = NAN
    got = cpu.forward(x, w, token_mask=torch.arange(20) > 0)
    close(got.l1_sum, clean.l1_sum)
    assert torch.equal(got.counts, clean.counts)


@pytest.mark.parametrize(
    ("dtype", "huge"), [(torch.float16, 6e4), (torch.bfloat16, 1e38), (torch.float32, 1e38), (f64, 1e307)]
)
@pytest.mark.parametrize("M", [1, 16, 80])
def test_huge_finite_values_are_not_taken_for_infinite(
    M: int, dtype: torch.dtype, huge: float, ways: list[str]
) -> None:
    x, w = case(M, 64, density=0.01, dtype=dtype)
    x[:, FREE:] = huge
    for weight in (w.gate, w.up):
        weight[:, FREE:] *= 1 / huge
    assert x.sum().isinf()
    truth, dense = reference.forward(x.double(), w.to(f64)).y, reference.forward(x, w).y
    assert dense.isfinite().all()
    assert_no_worse_than_dense(cpu.forward(x, laid(w, "rows")[0], want_stats=False).y, dense, truth)
    assert ways[0] in ("tail", "one token")


# -- Forward: memory layouts -----------------------------------------------------------------------------


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def every_other_column(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=1)[:, ::2]


def every_other_row(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=0)[::2]


def inner_columns(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (3, 5), value=NAN)[:, 3:-5]


each_layout = pytest.mark.parametrize("layout", [transposed, every_other_column, every_other_row, inner_columns])


@each_layout
@each_m
def test_noncontiguous_x(layout: Callable[[Tensor], Tensor], M: int) -> None:
    x, w = case(M, hot=4, biases="gud")
    for save in (True, False):
        assert_forward(layout(x), w, want_stats=save, save=save)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_layout
@each_m
def test_noncontiguous_x_and_weights_at_lower_precision(
    layout: Callable[[Tensor], Tensor], M: int, dtype: torch.dtype
) -> None:
    x, w = case(M, density=0.03, hot=4, dtype=dtype)
    truth, dense = reference.forward(x.double(), w.to(f64)).y, reference.forward(x, w).y
    w = w._replace(gate=layout(w.gate), up=layout(w.up), down=layout(w.down))
    assert_no_worse_than_dense(cpu.forward(layout(x), w, want_stats=False).y, dense, truth)


@pytest.mark.parametrize("M", [1, 16, 257])
def test_one_row_expanded(M: int) -> None:
    x, w = case(1)
    assert_forward(x.expand(M, -1), w, save=True)


@each_layout
@pytest.mark.parametrize("name", ["gate", "up", "down"])
@each_m
def test_noncontiguous_weights(name: str, layout: Callable[[Tensor], Tensor], M: int) -> None:
    x, w = case(M, hot=4)
    w = w._replace(**{name: layout(getattr(w, name))})
    for save in (True, False):
        assert_forward(x, w, want_stats=save, save=save)


@pytest.mark.usefixtures("habits")
def test_noncontiguous_weights_of_large_matrix_vector_products() -> None:
    x, w = case(1, 512, 1408, 0.02)
    assert_forward(transposed(x), Weights(transposed(w.gate), inner_columns(w.up), w.down), want_stats=False)


# -- Weights as they are now, and frozen state -----------------------------------------------------------


@each_m
def test_layouts_and_frozen_state_give_equal_results(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = case(M, 48, density=0.02, hot=8, biases="gud", dtype=torch.float32)
    price_columns(monkeypatch, 0.0)
    ways = [laid(w, down) for down in ("rows", "frozen", "columns")]
    ys = [cpu.forward(x, way, want_stats=False, frozen=frozen).y for way, frozen in ways]
    assert torch.equal(ys[0], ys[1])
    torch.testing.assert_close(ys[0], ys[2], rtol=1e-5, atol=1e-5)


def test_freeze_copies_wd_by_rows() -> None:
    _, w = case(1)
    down_FD, *int8_gate = cpu.freeze(w)
    assert torch.equal(down_FD, w.down.t())
    assert down_FD.is_contiguous()
    assert down_FD.untyped_storage().data_ptr() != w.down.untyped_storage().data_ptr()
    assert [t.numel() for t in int8_gate] == [0, 0, 0]
    assert cpu.freeze(laid(w, "rows")[0]) == ()


@pytest.mark.parametrize("M", [1, 65])
def test_frozen_state_is_that_of_its_layer_alone(M: int) -> None:
    """Neither other layers nor what happens to them can be seen in a layer's result."""
    x, a = case(M, density=0.02, dtype=torch.float32)
    _, b = case(M, density=0.02, dtype=torch.float32, seed=1)
    frozen_a, frozen_b = cpu.freeze(a), cpu.freeze(b)
    copies = [t.clone() for t in frozen_a]
    alone = cpu.forward(x, a, want_stats=False, frozen=frozen_a).y
    cpu.forward(x, b, want_stats=False, frozen=frozen_b)
    for weight in (b.gate, b.up, b.down, frozen_b[0]):
        weight.data.fill_(NAN)
    cpu.forward(x, b, want_stats=False, frozen=frozen_b)
    del b, frozen_b, weight
    assert all(torch.equal(t, c) for t, c in zip(frozen_a, copies, strict=True))
    assert torch.equal(cpu.forward(x, a, want_stats=False, frozen=frozen_a).y, alone)


def test_frozen_state_is_not_for_training_or_other_dtypes() -> None:
    for M in (1, 65):
        x, w = case(M, density=0.05, dtype=torch.float32)
        poisoned = tuple(torch.full_like(t, 1e3) for t in cpu.freeze(w))
        read, right = (cpu.forward(x, w, want_stats=False, frozen=frozen).y for frozen in (poisoned, ()))
        assert not torch.allclose(read, right)
        for save, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16)):  # as by autocast
            got = cpu.forward(x.to(dtype), w.to(dtype), want_stats=False, save=save, frozen=poisoned).y
            assert torch.equal(got, cpu.forward(x.to(dtype), w.to(dtype), want_stats=False, save=save).y)


def test_neuron_major_weights_are_read_instead_of_frozen_rows() -> None:
    """The layout of a weight may change after freezing."""
    x, w = case(65, density=0.02)
    rows, _ = laid(w, "rows")
    assert_forward(x, rows, want_stats=False, frozen=cpu.freeze(w))
    assert_forward(x, w, want_stats=False, frozen=cpu.freeze(rows))


def test_no_copy_of_a_weight_outlives_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def n_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) and o.numel() >= 24 * 96 for o in gc.get_objects())

    monkeypatch.setattr(cpu.training, "MIN_TRAIN_ROWS", 1)
    x, w = case(257, density=0.02, hot=2)
    dy, before = random_like(x), n_tensors()
    for down in (w, laid(w, "rows")[0]):
        out = cpu.forward(x, down, save=True)
        cpu.backward(dy, None, x, down, out.gate, out.up)
        cpu.forward(x, down)
        cpu.forward(x[:1], down, want_stats=False)
    del out, down
    assert n_tensors() == before


# -- Backward --------------------------------------------------------------------------------------------


def saved_activations(x: Tensor, w: Weights, activation: str) -> tuple[Tensor, Tensor | None]:
    out = reference.forward(x, w, activation)
    return out.gate, out.up


def random_like(t: Tensor, seed: int = 7) -> Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(t.dtype)


def named(gradients: Gradients) -> dict[str, Tensor]:
    fields = {"x": gradients.x, **gradients.weights._asdict()}
    return {name: g for name, g in fields.items() if g is not None}


def assert_backward(
    x: Tensor,
    w: Weights,
    activation: str = "relu",
    mask: Tensor | None = None,
    *,
    dy: Tensor | None = None,
    dl1: Tensor | None = None,
    needs: tuple[bool, ...] = (True,) * 7,
) -> None:
    r, u = saved_activations(x, w, activation)
    dy = random_like(x) if dy is None else dy
    got = named(cpu.backward(dy, dl1, x, w, r, u, activation, mask, needs))
    want = named(reference_backward(dy, dl1, x, w, r, u, activation, mask, needs))
    assert got.keys() == want.keys()
    for name, g in got.items():
        close(g, want[name], f"d{name}")


@pytest.fixture
def train_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.training, "MIN_TRAIN_ROWS", 1)


DL1 = torch.tensor(0.3, dtype=f64)


@each_layer
@each_m
@pytest.mark.parametrize("down", ["rows", "columns"], indirect=True)
def test_backward_is_the_reference(
    M: int, gated: bool, activation: str, biases: str, down: str, ways: list[str], train_any_size: None
) -> None:
    x, w = case(M, density=0.03, hot=2, gated=gated, biases=biases, seed=M)
    w, _ = laid(w, down)
    for dl1, mask in itertools.product((None, DL1), (None, every_third_left_out(M))):
        ways.clear()
        assert_backward(x, w, activation, mask, dl1=dl1)
        assert ways == ["tail" + DOWN[down], "hot"][: 2 if M >= 64 else 1]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("down", ["rows", "columns"], indirect=True)
@each_layer
def test_backward_errs_at_most_twice_as_dense(
    gated: bool, activation: str, biases: str, dtype: torch.dtype, down: str, ways: list[str]
) -> None:
    x, w = case(257, 64, 256, 0.02, hot=2, gated=gated, biases=biases, dtype=dtype)
    x[:, WAKES_HOT] *= 0.1
    w, _ = laid(w, down)
    r, u = saved_activations(x, w, activation)
    dy, wide_u = random_like(x), None if u is None else u.double()
    got = named(cpu.backward(dy, DL1, x, w, r, u, activation))
    assert ways == ["tail" + DOWN[down], "hot"]
    dense = named(reference_backward(dy, DL1, x, w, r, u, activation))
    truth = named(reference_backward(dy.double(), DL1, x.double(), w.to(f64), r.double(), wide_u, activation))
    for name, g in got.items():
        assert_no_worse_than_dense(g, dense[name], truth[name], f"d{name}")


@pytest.mark.parametrize(
    ("fewer", "density", "way"), [(1, 0.02, ["reference"]), (0, 0.02, ["tail"]), (0, 0.3, ["reference"])]
)
def test_backward_is_sparse_if_that_pays(fewer: int, density: float, way: list[str], ways: list[str]) -> None:
    x, w = case(cpu.training.MIN_TRAIN_ROWS - fewer, density=density)
    assert_backward(x, laid(w, "rows")[0])
    assert ways == way


def test_backward_is_dense_if_columns_are_expensive(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    price_columns(monkeypatch, INF)
    assert_backward(*case(cpu.training.MIN_TRAIN_ROWS, density=0.02))
    assert ways == ["reference"]


def test_backward_of_no_tokens() -> None:
    assert_backward(*case(0), dl1=DL1)


ONE_NEEDED = [tuple(i == k for i in range(7)) for k in range(7)]


@each_kind
@pytest.mark.parametrize("needs", [(False,) * 7, (True,) + (False,) * 6, (False,) + (True,) * 6, *ONE_NEEDED])
def test_backward_computes_only_needed_gradients(
    needs: tuple[bool, ...], gated: bool, ways: list[str], train_any_size: None
) -> None:
    x, w = case(65, density=0.02, hot=2, gated=gated, biases="gud" if gated else "gd")
    w, _ = laid(w, "rows")
    assert_backward(x, w, dl1=DL1, needs=needs)
    assert "reference" not in ways
    assert ways[0] == "tail"
    r, u = saved_activations(x, w, "relu")
    got = named(cpu.backward(random_like(x), None, x, w, r, u, needs=needs))
    wanted = dict(zip(("x", *Weights._fields), needs, strict=True))
    assert {name: g.numel() > 0 for name, g in got.items()} == {name: wanted[name] for name in got}


@pytest.mark.parametrize("shape", [all_empty, one_full_row, one_neuron_for_all])
@each_kind
def test_backward_of_extreme_rows(shape: Callable[[Tensor], None], gated: bool, ways: list[str]) -> None:
    x, w = case(257, gated=gated, hot=1 if shape is one_neuron_for_all else 0)
    shape(x)
    assert_backward(x, laid(w, "rows")[0], "relu2", every_third_left_out(257), dl1=DL1)
    assert ways == (["tail", "hot"] if shape is one_neuron_for_all else ["tail"])


@pytest.mark.parametrize("dy_shape", [(1, 1), (1, 24), (257, 1)])
def test_backward_of_zero_stride_gradients(dy_shape: tuple[int, int], ways: list[str]) -> None:
    x, w = case(257, density=0.03)
    dy = random_like(torch.empty(dy_shape, dtype=f64)).expand(257, 24)
    assert_backward(x, w, dy=dy, dl1=DL1)
    assert "reference" not in ways


@each_layout
def test_backward_of_noncontiguous_tensors(layout: Callable[[Tensor], Tensor], ways: list[str]) -> None:
    x, w = case(257, density=0.03)
    dy = layout(random_like(x))
    w = Weights(layout(w.gate), layout(w.up), layout(w.down))
    assert_backward(layout(x), w, dy=dy, dl1=DL1)
    r, u = saved_activations(x, w, "relu")
    got = named(cpu.backward(dy, None, x, w, layout(r), layout(u)))
    for name, g in named(reference_backward(dy, None, x, w, r, u)).items():
        close(got[name], g, f"d{name}")
    assert "reference" not in ways


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["x", "dy"])
def test_backward_of_nonfinite_values(where: str, value: float) -> None:
    x, w = case(257, density=0.03)
    dy = random_like(x)
    {"x": x, "dy": dy}[where][5, FREE] = value
    assert_backward(x, w, dy=dy, dl1=DL1)


@given(
    M=st.integers(0, 60),
    D=st.integers(4, 40),
    F=st.integers(1, 150),
    density=st.sampled_from((0.0, 0.01, 0.05, 0.2, 1.0)),
    layer=st.sampled_from(LAYERS),
    needs=st.tuples(*[st.booleans()] * 7),
    with_l1=st.booleans(),
    masked=st.booleans(),
    down=st.sampled_from(("rows", "columns")),
    seed=st.integers(0, 2**16),
)
def test_backward_at_any_shape_and_density(M, D, F, density, layer, needs, with_l1, masked, down, seed) -> None:
    gated, activation, biases = layer
    x, w = case(M, D, F, density, gated=gated, biases=biases, seed=seed)
    mask = every_third_left_out(M) if masked else None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu.training, "MIN_TRAIN_ROWS", 1)
        price_columns(monkeypatch, 0.0)
        assert_backward(x, laid(w, down)[0], activation, mask, dl1=DL1 if with_l1 else None, needs=needs)


# -- Both ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NARROW, f64])
@pytest.mark.parametrize("M", [1, 16, 257])
def test_same_input_gives_the_same_bits(M: int, dtype: torch.dtype, train_any_size: None) -> None:
    def run() -> list[Tensor]:
        x, w = case(M, density=0.03, hot=2, biases="gud", dtype=dtype)
        out = cpu.forward(x, w, save=True)
        gradients = cpu.backward(random_like(x), DL1, x, w, out.gate, out.up)
        return [*out, cpu.forward(x, w, want_stats=False).y, *named(gradients).values()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_inputs_are_not_changed() -> None:
    x, w = case(257, density=0.03, hot=4, biases="gud")
    before = [t.clone() for t in (x, *w)]
    out = cpu.forward(x, w, save=True)
    dy = random_like(x)
    cpu.backward(dy, DL1, x, w, out.gate, out.up)
    cpu.forward(x[:1], w, want_stats=False)
    assert all(torch.equal(t, b) for t, b in zip((x, *w), before, strict=True))
    assert torch.equal(dy, random_like(x))


def test_one_token_keeps_to_one_thread_while_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a call that takes far longer than on one thread. After a while all threads are tried again."""
    now, threads, seen, takes = [100.0], [2], [], [1e-4]

    def one_token(x: Tensor, *_: object) -> Tensor:
        seen.append(threads[0])
        now[0] += takes[0]
        return x

    monkeypatch.setattr(cpu.one_token, "one_token", one_token)
    monkeypatch.setattr(cpu.one_token, "crowded_until", 0.0)
    monkeypatch.setattr(cpu.one_token.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.__setitem__(0, n))
    w = Weights(torch.zeros(64, 32), None, torch.zeros(32, 64), None, None, None)
    for ms in (0.1, 30.0, 0.1, 0.1):
        takes[0] = ms / 1e3
        cpu.one_token.in_time(torch.zeros(1, 32), w, "relu", None)
    assert seen == [2, 2, 1, 1] and threads == [2]
    now[0] += cpu.one_token.CROWDED
    cpu.one_token.in_time(torch.zeros(1, 32), w, "relu", None)
    assert seen[4:] == [2]
