"""The int8 gate of frozen state: it may rule out only neurons that no fp32 product would let fire."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import test_cpu
from test_cpu import INF, LAYERS, NAN, assert_no_worse_than_dense, each_layer, f64, nonfinite_pattern
from twell import cpu, reference
from twell.reference import Weights
from twell.workbench.bench import cases

f32 = torch.float32


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What each search for candidates returned; on any CPU, for gates of any size and any number of candidates."""
    found: list[Tensor | None] = []
    candidates = cpu.frozen.find_candidates

    def spy(*args):
        found.append(candidates(*args))
        return found[-1]

    monkeypatch.setattr(cpu.one_token, "find_candidates", spy)
    monkeypatch.setattr(cpu.frozen, "MIN_INT8_GATE", 0)
    monkeypatch.setattr(cpu.frozen, "MAX_CANDIDATES", 1.0)
    monkeypatch.setattr(cpu.products, "blas_habits", lambda: cpu.products.BlasHabits(int8_gate=True))
    return found


def case(*args, **kwargs) -> tuple[Tensor, Weights]:
    """The case of test_cpu.py in fp32, without the column that dominates the others (and that x does not use)."""
    x, w = test_cpu.case(*args, dtype=f32, **kwargs)
    w.gate[:, test_cpu.WAKES_ALL] = 0
    return x, w


def frozen_forward(x: Tensor, w: Weights, activation: str = "relu") -> Tensor:
    return cpu.forward(x, w, activation, want_stats=False, frozen=cpu.freeze(w)).y


def rectified(x: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """r [1, F] as the CPU path computes it: a plain FFN whose output is its neurons."""
    return frozen_forward(x, Weights(gate, None, torch.eye(len(gate)), bias))


def assert_same_tokens(x: Tensor, w: Weights, activation: str = "relu") -> None:
    got = torch.cat([frozen_forward(token, w, activation) for token in x.split(1)])
    dense, truth = reference.forward(x, w, activation).y, reference.forward(x.double(), w.to(f64), activation).y
    assert_no_worse_than_dense(got, dense, truth)


# -- Values ----------------------------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("F", [256, 97])
def test_tokens_are_the_reference(
    F: int, gated: bool, activation: str, biases: str, looks: list[Tensor | None]
) -> None:
    x, w = case(24, 64, F, 0.03, gated=gated, biases=biases)
    assert_same_tokens(x, w, activation)
    assert len(looks) == 24
    assert all(found is not None and len(found) < F / 2 for found in looks)


def test_few_candidates_of_a_workload(looks: list[Tensor | None]) -> None:
    inputs = cases.make("skew29", 12, 512, 1408, dtype=f32)
    w = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    assert_same_tokens(inputs.x, w)
    for r, candidates in zip(torch.relu(inputs.x @ w.gate.t()), looks, strict=True):
        active = r.nonzero().flatten().tolist()
        assert candidates is not None
        assert set(active) <= set(candidates.tolist())
        assert len(candidates) < 5 * len(active) + 20


@given(
    D=st.sampled_from((32, 64, 160)),
    F=st.integers(1, 150),
    density=st.sampled_from((0.0, 0.05, 0.5)),
    layer=st.sampled_from(LAYERS),
    exponents=st.tuples(*[st.floats(-11, 10)] * 3),
    outlier=st.sampled_from((1.0, 1e2, 1e5)),
    seed=st.integers(0, 2**16),
)
def test_candidates_hold_all_that_fire(D, F, density, layer, exponents, outlier, seed) -> None:
    """Rows of any norm, tokens of any norm, with single large values in both."""
    gated, _, biases = layer
    x, w = case(1, D, F, density, gated=gated, biases=biases, seed=seed)
    x_exponent, low, high = exponents
    scale_F = 10 ** (low + (high - low) * torch.rand(F))
    x[:, D // 2] *= outlier
    x *= 10**x_exponent / x.norm()
    w.gate[:, D // 3] *= outlier
    w.gate.mul_((scale_F / w.gate.abs().amax(1)).unsqueeze(1))
    if w.gate_bias is not None:
        w.gate_bias.mul_(x.norm() * scale_F)
    with (
        mock.patch.multiple(cpu.frozen, MIN_INT8_GATE=0, MAX_CANDIDATES=1.0),
        mock.patch.object(cpu.products, "blas_habits", lambda: cpu.products.BlasHabits(int8_gate=True)),
    ):
        candidates = cpu.frozen.find_candidates(x, w, cpu.frozen.FrozenTensors(*cpu.freeze(w)))
    assert candidates is not None
    for dtype in (f32, f64):
        fires = reference.forward(x.to(dtype), w.to(dtype)).gate[0].nonzero().flatten()
        assert set(fires.tolist()) <= set(candidates.tolist())


@pytest.mark.parametrize("with_bias", [False, True])
def test_pre_activations_next_to_zero(with_bias: bool, looks: list[Tensor | None]) -> None:
    """Whole numbers, whose sums are exact in any order, so that a pre-activation is 0 or as small as planted."""
    D, F = 64, 90
    x = torch.randint(-8, 9, (1, D)).float()
    x[0, 0] = 1
    gate = torch.randint(-8, 9, (F, D)).float()
    planted = torch.tensor([0, 2.0**-12, -(2.0**-12), 1, -1, -(2.0**12)]).repeat(F // 6)
    remainder = planted - (gate[:, 1:] @ x[0, 1:])
    gate[:, 0], bias = (0, remainder) if with_bias else (remainder, None)
    r = rectified(x, gate, bias)
    assert torch.equal(r[0], planted.relu())
    assert looks[-1] is not None
    assert not set(looks[-1].tolist()) & set((planted < -4000).nonzero().flatten().tolist())


def test_roundings_to_bf16_that_all_go_one_way(looks: list[Tensor | None]) -> None:
    """What pushes the neuron up is rounded down, and what pushes it down is rounded up."""
    D = 2048
    up, down = torch.tensor([1.001, 0.999]) * 2**-8 + 1
    x = torch.cat((up.expand(D // 2), down.expand(D // 2))).unsqueeze(0)
    gate = torch.ones(32, D)
    gate[:, : D // 2] = -1
    gate[:, 0] = 0
    assert (torch.relu(x.double() @ gate.double().t()) > 0.9).all()
    assert (x.bfloat16().double() @ gate.double().t() < -6).all()
    assert (rectified(x, gate) > 0.9).all()
    assert looks[-1] is not None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_that_all_but_cancels_the_sum(sign: int, looks: list[Tensor | None]) -> None:
    """Sums far larger than their reach, so that their own rounding to bf16 matters."""
    gate, x = sign * torch.ones(256, 256).tril(), torch.ones(1, 256)
    bias = 2**-10 - sign * torch.arange(1.0, 257)
    assert torch.equal(rectified(x, gate, bias), torch.full((1, 256), 2**-10))
    assert looks[-1] is not None


@pytest.mark.parametrize("x_scale", [1e-38, 1e-30, 1e-14, 1e-10, 1, 1e10, 1e14, 1e30])
@pytest.mark.parametrize("w_scale", [1e-38, 1e-30, 1e-10, 1, 1e10, 1e30])
def test_huge_and_tiny_scales(x_scale: float, w_scale: float, looks: list[Tensor | None]) -> None:
    x, w = case(1, 64, 96, 0.1)
    x, gate = x * x_scale, w.gate * w_scale
    want = reference.forward(x, Weights(gate, None, torch.eye(96))).gate
    got = rectified(x, gate)
    assert torch.equal(nonfinite_pattern(got), nonfinite_pattern(want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * x_scale * w_scale, equal_nan=True)
    in_range = 1e-11 < x_scale < 1e11 and 1e-11 < w_scale < 1e11
    assert (looks[-1] is not None) == in_range


def test_rows_of_zeros_and_of_tiny_norm(looks: list[Tensor | None]) -> None:
    x, w = case(1, 64, 96, 0.5)
    gate, bias = w.gate, torch.zeros(96)
    gate[::4] = 0
    gate[1::4] *= 1e-11
    bias[::8], bias[4::8] = 1e-40, -1e-40
    for b in (None, bias):
        got, want = rectified(x, gate, b), torch.relu(torch.nn.functional.linear(x, gate, b))
        assert torch.equal(got != 0, want != 0)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert looks[-1] is not None


def test_zero_token(looks: list[Tensor | None]) -> None:
    _, w = case(1, 64, 96, biases="gud")
    assert_same_tokens(torch.zeros(1, 64), w)
    assert looks == [None]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["x", "gate"])
def test_nonfinite_values_give_the_reference_result(where: str, value: float, looks: list[Tensor | None]) -> None:
    for layer in LAYERS:
        gated, activation, biases = layer
        x, w = case(1, 64, 96, 0.05, gated=gated, biases=biases)
        {"x": x, "gate": w.gate}[where][0, 5] = value
        got, want = frozen_forward(x, w, activation), reference.forward(x, w, activation).y
        assert torch.equal(nonfinite_pattern(got), nonfinite_pattern(want))
        assert looks[-1] is None


def test_nonfinite_bias(looks: list[Tensor | None]) -> None:
    for value in (NAN, INF, -INF):
        x, w = case(1, 64, 96, 0.05, biases="g")
        w.gate_bias[3] = value
        got, want = frozen_forward(x, w), reference.forward(x, w).y
        assert torch.equal(nonfinite_pattern(got), nonfinite_pattern(want))


# -- Where it is used ------------------------------------------------------------------------------------


def test_too_many_candidates_are_seen_early(looks: list[Tensor | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.frozen, "MAX_CANDIDATES", 0.25)
    product = mock.Mock(wraps=torch._weight_int8pack_mm)
    monkeypatch.setattr(torch, "_weight_int8pack_mm", product)
    for density, calls in ((0.001, 2), (0.9, 1)):
        product.reset_mock()
        x, w = case(1, 64, 320, density)
        assert_same_tokens(x, w)
        assert product.call_count == calls
        assert (looks[-1] is None) == (calls == 1)


def test_only_for_single_fp32_tokens_of_frozen_layers(looks: list[Tensor | None]) -> None:
    x, w = case(2, 64, 96)
    frozen = cpu.freeze(w)
    cpu.forward(x, w, want_stats=False, frozen=frozen)
    cpu.forward(x[:1], w, frozen=frozen)
    cpu.forward(x[:1], w, want_stats=False, save=True, frozen=frozen)
    cpu.forward(x[:1], w, want_stats=False)
    assert looks == []
    for dtype in (torch.bfloat16, torch.float16, f64):
        narrow = w.to(dtype)
        assert not has_int8_gate(narrow)
        for state in (frozen, cpu.freeze(narrow)):  # autocast brings that of fp32
            cpu.forward(x[:1].to(dtype), narrow, want_stats=False, frozen=state)
            assert looks.pop() is None


def has_int8_gate(w: Weights) -> bool:
    sizes = {t.numel() for t in cpu.freeze(w)[1:]}
    assert sizes in ({0}, {w.gate.numel(), len(w.gate)})
    return sizes != {0}


def test_gates_without_an_int8_gate(looks: list[Tensor | None], monkeypatch: pytest.MonkeyPatch) -> None:
    _, w = case(1, 64, 96)
    assert has_int8_gate(w)
    assert not has_int8_gate(w._replace(gate=w.gate.t().contiguous().t()))
    assert not has_int8_gate(case(1, 48, 96)[1])
    for habits, size in itertools.product((False, True), (0, 1)):
        monkeypatch.setattr(cpu.frozen, "MIN_INT8_GATE", 64 * 96 + size)
        monkeypatch.setattr(cpu.products, "blas_habits", lambda on=habits: cpu.products.BlasHabits(int8_gate=on))
        assert has_int8_gate(w) == (habits and size == 0)


def test_neuron_major_down_needs_no_frozen_rows(looks: list[Tensor | None]) -> None:
    x, w = case(1, 64, 96, 0.05)
    w = w._replace(down=w.down.t().contiguous().t())
    assert [t.numel() for t in cpu.freeze(w)] == [0, 96 * 64, 96, 96]
    assert_same_tokens(x, w)
    assert looks[-1] is not None


def test_older_torch_versions_have_no_int8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    amd = mock.mock_open(read_data="vendor_id : AuthenticAMD")
    with mock.patch("builtins.open", amd):
        assert cpu.products.blas_habits.__wrapped__().int8_gate
        monkeypatch.delattr(torch, "_weight_int8pack_mm")
        assert not cpu.products.blas_habits.__wrapped__().int8_gate


# -- The int8 gate itself --------------------------------------------------------------------------------


def test_a_new_int8_gate_fits_in_place_of_the_old(looks: list[Tensor | None]) -> None:
    """Shapes and dtypes stay, so that frozen tensors can be written over where they are."""
    x, w = case(1, 64, 96, 0.05)
    frozen = cpu.freeze(w)
    for write in (lambda: w.gate.data.neg_(), lambda: w.gate.detach().numpy().__setitem__(slice(3, 9), 0.5)):
        write()
        for old, new in zip(frozen, cpu.freeze(w), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
            old.copy_(new)
        y, dense = cpu.forward(x, w, want_stats=False, frozen=frozen).y, reference.forward(x, w).y
        truth = reference.forward(x.double(), w.to(f64)).y
        assert_no_worse_than_dense(y, dense, truth)
        assert looks[-1] is not None


def test_int8_errors_are_within_the_reach(looks: list[Tensor | None]) -> None:
    w = torch.randn(50, 64) * 10 ** torch.linspace(-11, 11, 50).unsqueeze(1)
    gate = cpu.frozen.make_int8_gate(w)
    assert gate is not None
    scale_F = gate.per_unit_F.double() / gate.per_reach_F.double()  # 1 / s
    e = w.double() * scale_F[:, None] - gate.q_FD.double()
    assert gate.q_FD.abs().amax() == 127
    assert (e.abs() <= 1.01).all()  # half a step, and per_reach has 8 bits
    q_norm = gate.q_FD.double().norm(dim=1)
    assert (1 / gate.per_reach_F.double() * (1 + 2.0**-8) > q_norm * 2.0**-8).all()


@pytest.mark.usefixtures("looks")
def test_same_token_gives_the_same_bits() -> None:
    x, w = case(1, 64, 96, 0.05, biases="gud")
    assert torch.equal(*(frozen_forward(x, w) for _ in range(2)))
