"""The reference against plain formulas and autograd; the split is exact at any capacity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twell import reference as ref
from twell.reference import Gradients, Weights

f64 = torch.float64
WIDE = {"tile": 8, "slots": 8}

# (gated, activation, biases present: g(ate), u(p), d(own))
ALL_OR_NO_BIAS = [
    (gated, activation, biases)
    for gated in (True, False)
    for activation in ("relu", "relu2")
    for biases in ("", "gud" if gated else "gd")
]
LAYERS = [*ALL_OR_NO_BIAS, *((True, "relu2", b) for b in "gud"), *((False, "relu", b) for b in "gd")]


def layer_id(layer: tuple[bool, str, str]) -> str:
    gated, activation, biases = layer
    return f"{'gated' if gated else 'plain'}-{activation}-{biases or 'no bias'}"


each_layer = pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
each_activation_and_kind = pytest.mark.parametrize("layer", ALL_OR_NO_BIAS, ids=layer_id)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
each_16_bit_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


# -- Helpers: inputs, and the formula in its plainest form -----------------------------------------------


def build(draw: Callable[..., Tensor], sizes: tuple[int, int, int], gated: bool, biases: str) -> tuple[Tensor, Weights]:
    M, D, F = sizes
    x, gate, up, down = draw(M, D), draw(F, D), draw(F, D), draw(D, F)
    bias = {b: draw(n) for b, n in (("g", F), ("u", F), ("d", D))}
    given_biases = (bias[b] if b in biases else None for b in "gud")
    return x, Weights(gate, up if gated else None, down, *given_biases)


def normal_case(
    seed: int, sizes: tuple[int, int, int], gated: bool = True, biases: str = "", dtype: torch.dtype = f64
) -> tuple[Tensor, Weights]:
    gen = torch.Generator().manual_seed(seed)
    x, w = build(lambda *n: torch.randn(*n, generator=gen, dtype=f64), sizes, gated, biases)
    return x.to(dtype), w.to(dtype)


def integer_case(
    seed: int, sizes: tuple[int, int, int], gated: bool = True, biases: str = "", dtype: torch.dtype = f64
) -> tuple[Tensor, Weights]:
    """Small integers: every product and sum is exact, so results are equal in whatever order they are taken."""
    gen = torch.Generator().manual_seed(seed)
    x, w = build(lambda *n: torch.randint(-2, 3, n, generator=gen), sizes, gated, biases)
    return x.to(dtype), w.to(dtype)


def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def formula(x: Tensor, w: Weights, activation: str, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(y, l1_sum, r), written plainly."""
    r = torch.relu(projected(x, w.gate, w.gate_bias))
    h = r**2 if activation == "relu2" else r
    if w.up is not None:
        h = h * projected(x, w.up, w.up_bias)
    y = projected(h, w.down, w.down_bias)
    return y, (h if mask is None else h[mask]).abs().sum(), r


def autograd_of_formula(
    x: Tensor, w: Weights, activation: str, dy: Tensor, dl1: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of (y * dy).sum() + dl1 * l1_sum for x and the six weights, None where there is no such weight."""
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in (x, *w)]
    y, l1_sum, _ = formula(inputs[0], Weights(*inputs[1:]), activation, mask)
    loss = (y * dy).sum() + (0 if dl1 is None else dl1 * l1_sum)
    found = iter(torch.autograd.grad(loss, [t for t in inputs if t is not None]))
    return tuple(None if t is None else next(found) for t in inputs)


def assert_gradients(got: Gradients, expected: tuple[Tensor | None, ...]) -> None:
    for name, g, e in zip(("x", *Weights._fields), (got.x, *got.weights), expected, strict=True):
        if e is not None:
            torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"d{name}: {m}")


def alternating_mask(M: int) -> Tensor:
    return torch.arange(M) % 3 != 1


def random_like(t: Tensor, seed: int = 7) -> Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(t.dtype)


# -- Dense forward and backward --------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
def test_forward_is_the_formula(layer: tuple[bool, str, str], masked: bool) -> None:
    gated, activation, biases = layer
    x, w = normal_case(1, (7, 5, 11), gated, biases)
    mask = alternating_mask(7) if masked else None
    got = ref.forward(x, w, activation, mask)
    y, l1_sum, r = formula(x, w, activation, mask)
    torch.testing.assert_close(got.y, y)
    torch.testing.assert_close(got.l1_sum, l1_sum)
    torch.testing.assert_close(got.gate, r)
    assert got.counts.tolist() == (r if mask is None else r[mask]).count_nonzero(0).tolist()
    if gated:
        torch.testing.assert_close(got.up, projected(x, w.up, w.up_bias))
    else:
        assert got.up is None


def test_forward_may_leave_the_statistics_out() -> None:
    x, w = normal_case(1, (3, 4, 5), dtype=torch.bfloat16)
    with_stats, without = ref.forward(x, w), ref.forward(x, w, want_stats=False)
    assert torch.equal(with_stats.y, without.y) and torch.equal(with_stats.gate, without.gate)
    assert without.l1_sum.dtype == with_stats.l1_sum.dtype and without.l1_sum == 0
    assert without.counts.dtype == torch.int32 and without.counts.shape == (0,)


@each_layer
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
@pytest.mark.parametrize("dl1", [None, 0.3], ids=["no dl1", "dl1"])
def test_backward_is_autograd_of_the_formula(layer: tuple[bool, str, str], masked: bool, dl1: float | None) -> None:
    gated, activation, biases = layer
    x, w = normal_case(3, (7, 5, 11), gated, biases)
    mask = alternating_mask(7) if masked else None
    dl1 = None if dl1 is None else torch.tensor(dl1, dtype=f64)
    dy = random_like(x)
    saved = ref.forward(x, w, activation, mask)
    got = ref.backward(dy, dl1, x, w, saved.gate, saved.up, activation, mask)
    assert_gradients(got, autograd_of_formula(x, w, activation, dy, dl1, mask))
    if not gated:
        assert got.weights.up is None and got.weights.up_bias is None


def test_backward_computes_what_is_needed_and_leaves_the_rest_empty() -> None:
    x, w = normal_case(3, (4, 3, 6), biases="gud")
    dy, saved = random_like(x), ref.forward(x, w)
    full = ref.backward(dy, None, x, w, saved.gate, saved.up)
    for wanted in range(7):
        needs = tuple(i == wanted for i in range(7))
        got = ref.backward(dy, None, x, w, saved.gate, saved.up, needs=needs)
        for i, (g, e) in enumerate(zip((got.x, *got.weights), (full.x, *full.weights), strict=True)):
            assert torch.equal(g, e) if i == wanted else g.numel() == 0


def test_backward_in_zero_takes_the_subgradient_of_torch() -> None:
    x, w = integer_case(4, (9, 4, 12), biases="gud")
    saved = ref.forward(x, w)
    assert (projected(x, w.gate, w.gate_bias) == 0).any() and (saved.up == 0).any()
    dy, dl1 = random_like(x), torch.tensor(0.5, dtype=f64)
    got = ref.backward(dy, dl1, x, w, saved.gate, saved.up)
    assert_gradients(got, autograd_of_formula(x, w, "relu", dy, dl1, None))


seeds = st.integers(0, 2**32 - 1)
layers = st.sampled_from(ALL_OR_NO_BIAS)
sizes = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 24))


# -- Statistics ------------------------------------------------------------------------------------------


def test_statistics_of_a_small_example() -> None:
    r = torch.tensor([[1.0, 0, 2], [0, 0, 3], [float("nan"), 0, 4]])
    h = torch.tensor([[-1.0, 0, 2], [0, 0, -3], [1, 0, 4]])
    l1_sum, counts = ref.statistics(r, h, None)
    assert l1_sum == 11 and counts.tolist() == [2, 0, 3] and counts.dtype == torch.int32
    l1_sum, counts = ref.statistics(r, h, torch.tensor([True, False, True]))
    assert l1_sum == 8 and counts.tolist() == [2, 0, 2] and counts.dtype == torch.int32
    l1_sum, counts = ref.statistics(r, h, torch.zeros(3, dtype=torch.bool))
    assert l1_sum == 0 and counts.tolist() == [0, 0, 0]


def test_counts_take_active_from_r_and_not_from_h() -> None:
    """A neuron whose up value is 0 is active."""
    w = Weights(torch.eye(2), torch.zeros(2, 2), torch.eye(2))
    x = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    assert ref.forward(x, w).counts.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (f64, f64)],
)
def test_l1_sum_is_taken_in_the_sum_dtype(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert ref.sum_dtype(dtype) == expected
    h = torch.full((4, 1000), 1.0).to(dtype)
    l1_sum, _ = ref.statistics(h, h, None)
    assert l1_sum.dtype == expected and l1_sum == 4000  # neither bf16 nor a sum in bf16 reaches 4000
    h = torch.full((40, 1000), 3.0).to(dtype)
    assert ref.statistics(h, h, None)[0] == 120000  # out of fp16's range


@each_activation_and_kind
def test_masked_tokens_that_hold_nan_do_not_leak_into_the_statistics(layer: tuple[bool, str, str]) -> None:
    gated, activation, biases = layer
    x, w = integer_case(6, (8, 4, 10), gated, biases)
    mask = alternating_mask(8)
    padding = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=f64)
    x[~mask] = padding[: int((~mask).sum()), None]
    clean = ref.forward(x[mask], w, activation)
    dense = ref.forward(x, w, activation, mask)
    assert torch.equal(dense.l1_sum, clean.l1_sum) and torch.equal(dense.counts, clean.counts)


def test_masked_tokens_that_hold_nan_get_no_l1_gradient() -> None:
    h = torch.tensor([[1.0, -2.0, 0.0], [float("nan"), 1.0, 1.0]])
    got = ref.l1_gradient(h, torch.tensor(0.5), torch.tensor([True, False]))
    assert got.tolist() == [[0.5, -0.5, 0], [0, 0, 0]]
    assert ref.l1_gradient(h, torch.tensor(0.5), None)[0].tolist() == [0.5, -0.5, 0]


# -- The split -------------------------------------------------------------------------------------------


@st.composite
def hot_sets(draw: st.DrawFn, F: int) -> Tensor:
    """No neuron, every neuron, or some in any order."""
    kind = draw(st.sampled_from(("none", "all", "some")))
    order = torch.randperm(F, generator=torch.Generator().manual_seed(draw(seeds)))
    return order[: {"none": 0, "all": F, "some": draw(st.integers(0, F))}[kind]]


@given(st.data(), seeds, st.integers(0, 9), st.integers(0, 40), st.integers(1, 20), st.integers(1, 6))
def test_split_puts_every_active_element_in_exactly_one_part(data, seed, M, F, tile, slots) -> None:
    gen = torch.Generator().manual_seed(seed)
    r = torch.randn(M, F, generator=gen).relu()
    r[torch.rand(M, F, generator=gen) < 0.5] = 0
    r[torch.rand(M, F, generator=gen) < 0.03] = float("nan")
    hot = data.draw(hot_sets(F))
    cap = data.draw(st.sampled_from((0, 1, 4, 128)))
    forced = data.draw(st.sampled_from((None, torch.arange(M) % 4 == 2)))
    before = r.clone()
    parts = ref.split(r, hot, cap, tile=tile, slots=slots, force_heavy=forced)
    assert torch.equal(r.view(torch.int32), before.view(torch.int32))

    from_heavy = torch.where(parts.heavy[:, None], r, 0)
    from_hot = torch.zeros_like(r)
    from_hot[:, hot] = parts.hot_gate
    pieces = torch.stack([from_heavy, from_hot, parts.tail.unpack()])
    holders = (pieces != 0).sum(0)
    assert torch.equal(holders, (r != 0).long())
    whole = pieces.gather(0, (pieces != 0).long().argmax(0, keepdim=True))[0]
    assert torch.equal(whole.view(torch.int32), r.view(torch.int32))

    cold = (r != 0).index_fill(1, hot, False)
    tile_counts = torch.stack([t.sum(1) for t in cold.split(tile, 1)], 1) if F else torch.zeros(M, 1)
    heavy = (cold.sum(1) > cap) | (tile_counts > slots).any(1)
    assert torch.equal(parts.heavy, heavy if forced is None else heavy | forced)
    assert torch.equal(parts.hot, hot)


@given(st.data(), seeds, sizes, layers, st.sampled_from((0, 1, 3, 128)), st.integers(1, 30), st.sampled_from((1, 2, 8)))
def test_split_ffn_is_exact_on_integers_for_any_split(data, seed, sizes, layer, cap, tile, slots) -> None:
    gated, activation, biases = layer
    x, w = integer_case(seed, sizes, gated, biases)
    hot = data.draw(hot_sets(sizes[2]))
    y = ref.split_ffn(x, w, hot, cap, activation, tile=tile, slots=slots)
    assert torch.equal(y, ref.forward(x, w, activation).y)


@each_16_bit_dtype
@each_activation_and_kind
@pytest.mark.parametrize("hot", [torch.arange(0), torch.tensor([7, 3, 20]), torch.arange(24)], ids=len)
def test_split_ffn_in_16_bits_rounds_the_exact_result_once(
    dtype: torch.dtype, layer: tuple[bool, str, str], hot: Tensor
) -> None:
    gated, activation, biases = layer
    x, w = integer_case(13, (9, 16, 24), gated, biases, dtype)
    exact = formula(x.to(f64), w.to(f64), activation)[0].to(dtype)
    assert torch.equal(ref.split_ffn(x, w, hot, 24, activation, slots=24), exact)  # no token is heavy


# -- NaN and inf in x ------------------------------------------------------------------------------------

SPARSE_FFNS = {
    "one slot": lambda x, w, a: ref.split_ffn(x, w, torch.arange(0), 128, a, tile=4, slots=1),
    "nothing hot": lambda x, w, a: ref.split_ffn(x, w, torch.arange(0), 128, a, **WIDE),
    "all light": lambda x, w, a: ref.split_ffn(x, w, torch.tensor([5, 0]), 128, a, **WIDE),
    "some heavy": lambda x, w, a: ref.split_ffn(x, w, torch.tensor([1, 2]), 3, a, **WIDE),
    "all hot": lambda x, w, a: ref.split_ffn(x, w, torch.arange(len(w.gate)), 0, a, **WIDE),
}
each_sparse_ffn = pytest.mark.parametrize("sparse_ffn", SPARSE_FFNS.values(), ids=SPARSE_FFNS)


def kinds(y: Tensor) -> list[list[str]]:
    """'nan', 'inf', '-inf' or 'finite' for every element."""
    return [[str(v) if v != v or abs(v) == float("inf") else "finite" for v in row] for row in y.tolist()]


@each_sparse_ffn
@each_dtype
@each_activation_and_kind
def test_non_finite_tokens_give_the_dense_result(sparse_ffn, dtype: torch.dtype, layer: tuple[bool, str, str]) -> None:
    gated, activation, biases = layer
    clean, w = integer_case(8, (9, 4, 12), gated, biases, dtype)
    x = clean.clone()
    x[1, 2], x[4, 0], x[5, 3], x[8, :2] = float("nan"), float("inf"), -float("inf"), float("inf")
    bad = torch.tensor([1, 4, 5, 8])
    good = torch.tensor([0, 2, 3, 6, 7])
    y = sparse_ffn(x, w, activation)
    dense = ref.forward(x, w, activation).y
    assert kinds(y) == kinds(dense)
    assert not y[bad].isfinite().all() and y[good].isfinite().all()
    assert torch.equal(y[good], sparse_ffn(clean, w, activation)[good])


@each_sparse_ffn
@each_dtype
def test_infinite_tokens_of_a_plain_ffn_may_be_finite_or_infinite(sparse_ffn, dtype: torch.dtype) -> None:
    """If -inf closes every gate the output is the bias; if inf opens them it has the sign of the weights."""
    w = Weights(torch.ones(6, 2), None, torch.tensor([[1.0] * 6, [-1.0] * 6]), None, None, torch.tensor([3.0, 4.0]))
    x = torch.tensor([[-float("inf"), 1], [float("inf"), 1], [float("inf"), -float("inf")], [1, 2]])
    y = sparse_ffn(x.to(dtype), w.to(dtype), "relu")
    assert kinds(y) == [["finite"] * 2, ["inf", "-inf"], ["nan"] * 2, ["finite"] * 2]
    assert y[0].tolist() == [3, 4] and y[3].tolist() == [21, -14]


@each_sparse_ffn
def test_closed_gate_does_not_hide_an_infinite_up_value(sparse_ffn) -> None:
    """0 * inf = NaN: the dense result of a token whose gates are all closed."""
    w = Weights(-torch.ones(6, 2), torch.ones(6, 2), torch.ones(2, 6))
    x = torch.tensor([[float("inf"), 1], [-1, -1]])
    assert kinds(sparse_ffn(x, w, "relu")) == [["nan"] * 2, ["finite"] * 2]


def test_finite_rows() -> None:
    x = torch.tensor([[1.0, 2], [float("nan"), 0], [0, float("inf")], [-float("inf"), 0], [3.4e38, 1e-45]])
    assert ref.finite_rows(x).tolist() == [True, False, False, False, True]


# -- 16-bit accuracy -------------------------------------------------------------------------------------


def errors(got: Tensor, truth: Tensor) -> tuple[float, float]:
    off = (got.to(f64) - truth).abs()
    return off.max().item(), off.norm().item()


def assert_at_most_twice(got: Tensor, dense: Tensor, truth: Tensor) -> None:
    slack = 1e-6 * truth.abs().max().item()
    for sparse_error, dense_error in zip(errors(got, truth), errors(dense, truth), strict=True):
        assert sparse_error <= 2 * dense_error + slack


def accuracy_case(dtype: torch.dtype, gated: bool) -> tuple[Tensor, Weights]:
    x, w = normal_case(10, (24, 64, 256), gated, "gud" if gated else "gd")
    return x.to(dtype), w._replace(gate=w.gate / 8, down=w.down / 8, up=None if w.up is None else w.up / 8).to(dtype)


@each_16_bit_dtype
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_16_bit_error_is_at_most_twice_the_dense_one(dtype: torch.dtype, gated: bool, activation: str) -> None:
    x, w = accuracy_case(dtype, gated)
    truth = formula(x.to(f64), w.to(f64), activation)[0]
    y = ref.split_ffn(x, w, torch.arange(0, 256, 5), 100, activation, tile=64, slots=64)
    assert y.dtype == dtype
    assert_at_most_twice(y, ref.forward(x, w, activation).y, truth)


@each_16_bit_dtype
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_16_bit_errors_of_the_dense_reference_are_at_most_twice_those_of_torch(
    dtype: torch.dtype, gated: bool, activation: str
) -> None:
    """Results, and gradients against those that autograd takes of the formula in the same dtype."""
    x, w = accuracy_case(dtype, gated)
    dy, dl1 = random_like(x), torch.tensor(0.01)
    got = ref.forward(x, w, activation)
    exact, theirs = formula(x.to(f64), w.to(f64), activation), formula(x, w, activation)
    assert got.y.dtype == dtype
    assert_at_most_twice(got.y, theirs[0], exact[0])
    gradients = ref.backward(dy, dl1, x, w, got.gate, got.up, activation)
    truth = autograd_of_formula(x.to(f64), w.to(f64), activation, dy.to(f64), dl1.to(f64), None)
    dense = autograd_of_formula(x, w, activation, dy, dl1.to(dtype), None)
    for g, d, t in zip((gradients.x, *gradients.weights), dense, truth, strict=True):
        if t is not None:
            assert g.dtype == dtype
            assert_at_most_twice(g, d, t)


# -- No tokens -------------------------------------------------------------------------------------------


@each_activation_and_kind
def test_no_tokens_give_no_output_and_zero_gradients(layer: tuple[bool, str, str]) -> None:
    gated, activation, biases = layer
    x, w = normal_case(11, (0, 3, 5), gated, biases)
    mask = torch.zeros(0, dtype=torch.bool)
    dense = ref.forward(x, w, activation, mask)
    for got in (dense.y, ref.split_ffn(x, w, torch.tensor([1]), 2, activation)):
        assert got.shape == (0, 3) and got.dtype == f64
    assert dense.l1_sum == 0 and dense.counts.tolist() == [0] * 5

    dl1 = torch.tensor(1.0, dtype=f64)
    g = ref.backward(x, dl1, x, w, dense.gate, dense.up, activation, mask)
    assert g.x.shape == (0, 3)
    for name, like, got in zip(Weights._fields, w, g.weights, strict=True):
        assert like is None or (got.shape == like.shape and not got.any()), name


def test_unknown_activation_and_doubled_hot_neuron_are_refused() -> None:
    x, w = torch.ones(1, 1), Weights(torch.ones(2, 1), None, torch.ones(1, 2))
    with pytest.raises(ValueError, match="activation must be one of relu, relu2, got 'gelu'"):
        ref.forward(x, w, "gelu")
    with pytest.raises(ValueError, match="listed twice"):
        ref.split_ffn(x, w, torch.tensor([1, 1]), 9)


# -- FP8 ---------------------------------------------------------------------------------------------------


def test_each_fp8_row_has_its_own_scale() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-20, 0.0, 0.0], [3e38, 1.0, -1.0]])
    q, scale = ref.to_fp8(rows)
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert q.float()[:, 0].tolist() == [224.0, 0.0, 0.0, 448.0]  # of 1e-20 nothing is left: 448 stands for 1e-12
    assert q.float()[0].tolist() == [224.0, -448.0, 112.0]
    assert torch.allclose(ref.to_fp8(rows[:2]).to(torch.float64), rows[:2].double(), rtol=1e-7)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_fp8_rows_with_inf_or_nan_become_nan(bad: float) -> None:
    rows = torch.ones(3, 16)
    rows[1, 5] = bad
    exact = ref.to_fp8(rows).to(torch.float64)
    assert exact[1].isnan().all() and torch.allclose(exact[[0, 2]], rows[[0, 2]].double(), rtol=1e-7)


@pytest.mark.parametrize("gated", [True, False])
def test_fp8_forward_rounds_only_weights_and_x(gated: bool) -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(32, 16), torch.randn(32, 16), torch.randn(16, 32)
    x = torch.randn(5, 16)
    q = [ref.to_fp8(w) for w in (gate, up, down)]
    y = ref.fp8_forward(x, q[0], q[1] if gated else None, q[2])
    rounded = [ref.to_fp8(t).to(torch.float64) for t in (x, gate, up, down)]
    r = torch.relu(rounded[0] @ rounded[1].T)
    want = (r * (rounded[0] @ rounded[2].T) if gated else r) @ rounded[3].T
    assert torch.allclose(y, want, rtol=1e-12)
    exact = (torch.relu(x @ gate.T) * (x @ up.T) if gated else torch.relu(x @ gate.T)) @ down.T
    assert 1e-3 < (y - exact).norm() / exact.norm() < 0.15
