"""The kernels for few tokens against the reference, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from test_kernels import assert_right, make_weights
from twell import GatedSparseFFN, SparseFFN, gpu, ops, reference, weights
from twell.bench import cases, tune, tune_few
from twell.kernels import decode, screen
from twell.plan import Plan, dense_plan
from twell.reference import Weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

f16, f32 = torch.float16, torch.float32
WAYS = [{}, {"slots": 16, "BS": 2}, {"BN": 64, "TN": 20, "programs": 9, "BS": 2, "BW": 4}]
ONE_TOKEN_WAYS = [*WAYS, {"screened": True}]


def run(x: Tensor, w: Weights, activation: str = "relu", *, screened: bool = False, **tile: int) -> Tensor:
    neurons = decode.NeuronTile(16, 32, 4, 2)
    sums = decode.SumTile(32, 4, 2, BW=2)
    neurons = neurons._replace(**{k: v for k, v in tile.items() if k in neurons._fields})
    sums = sums._replace(**{k: v for k, v in tile.items() if k in sums._fields})
    copy = screen.screen_of(w.gate) if screened else None
    return decode.forward(x, w, w.down.t().contiguous(), activation, (neurons, sums), copy)


def ways(M: int) -> list[dict[str, bool]]:
    """How M tokens may be computed."""
    return ONE_TOKEN_WAYS if M == 1 else WAYS


def spread(D: int, F: int, dtype: torch.dtype, share: float, *, gated: bool = True) -> Weights:
    """Weights of which about ``share`` of the neurons fire, by their bias."""
    w = make_weights(D, F, dtype, gated=gated, bias=True)
    sigma = D**0.5 / 4
    bias = torch.full((F,), sigma * torch.special.ndtri(torch.tensor(share, dtype=torch.float64)).item())
    return w._replace(gate_bias=bias.to(dtype))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("M", "D", "F", "dtype"), [(1, 48, 80, f16), (5, 64, 96, f32), (16, 32, 48, f16), (33, 32, 48, f32)]
)
def test_few_tokens(M: int, D: int, F: int, dtype: torch.dtype, bias: bool, gated: bool, activation: str) -> None:
    w, x = make_weights(D, F, dtype, gated=gated, bias=bias), torch.randn(M, D, dtype=dtype)
    for way in ways(M):
        assert_right(run(x, w, activation, **way), x, w, activation)


@settings(max_examples=25, deadline=None)
@given(
    M=st.integers(1, 64),
    D=st.integers(1, 6),
    F=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    BN=st.sampled_from([16, 32, 64]),
    BW=st.sampled_from([2, 8]),
    way=st.sampled_from(ONE_TOKEN_WAYS),
    seed=st.integers(0, 99),
)
def test_any_shape_and_any_share(
    M: int, D: int, F: int, share: float, BN: int, BW: int, way: dict[str, int], seed: int
) -> None:
    torch.manual_seed(seed)
    M = 1 if "screened" in way else M
    w, x = spread(16 * D, 16 * F, f32, min(max(share, 1e-9), 1 - 1e-9)), torch.randn(M, 16 * D)
    y = run(x, w, **{"BN": BN, "BW": BW} | way)
    truth = reference.forward(x.double(), w.to(torch.float64), want_stats=False).y
    eager = reference.forward(x, w, want_stats=False).y  # where one neuron fires with z near 0, both lose digits
    assert (y - truth).norm() <= 1e-6 * truth.norm() + 2 * (eager - truth).norm()


@pytest.mark.parametrize("M", [1, 3])
def test_infinite_and_missing_numbers_are_as_in_a_dense_layer(M: int) -> None:
    for value, way in itertools.product((float("inf"), float("-inf"), float("nan")), ways(M)):
        for gated in (True, False):
            w, x = make_weights(32, 64, f32, gated=gated), torch.randn(M, 32)
            x[0, 7] = value
            y = run(x, w, **way)
            expected = (
                ops.gated_ffn(x, *w, backend="reference") if gated else ops.ffn(x, w.gate, w.down, backend="reference")
            )
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.allclose(y[1:], expected[1:], rtol=1e-4, atol=1e-4)
    w = make_weights(32, 64, f32)
    w.gate[5, 3] = float("nan")  # a neuron that is nan for all tokens
    assert run(torch.randn(M, 32), w).isnan().all()


def test_where_nothing_fires_the_bias_is_left() -> None:
    w = spread(32, 64, f32, 1e-12)
    w = w._replace(gate_bias=torch.full((64,), -1e9))
    for M in (1, 4):
        for way in ways(M):
            assert torch.equal(run(torch.randn(M, 32), w, **way), w.down_bias.expand(M, 32))


def test_one_dense_token_among_sparse_ones() -> None:
    w, x = spread(64, 160, f32, 0.02), torch.randn(6, 64)
    x[3] = 40 * w.gate.mean(0) + 30 * torch.randn(64)
    for way in WAYS:
        assert_right(run(x, w, **way), x, w)


def test_the_same_bits_every_time_and_whatever_else_is_in_the_batch() -> None:
    w, x = make_weights(64, 160, f32), torch.randn(7, 64)
    y = run(x, w)
    assert torch.equal(run(x, w), y)


def test_inputs_need_not_be_contiguous() -> None:
    w, x = make_weights(32, 48, f32), torch.randn(4, 64)
    assert_right(run(x[:, :32], w), x[:, :32], w)
    assert_right(run(x.t()[:32, :].t(), w), x.t()[:32, :].t(), w)
    loose = w._replace(gate=w.gate.t().contiguous().t())
    assert_right(run(x[:, 32:], loose), x[:, 32:], w)


def test_only_few_tokens_are_taken() -> None:
    w = make_weights(32, 48, f32)
    for M in (0, 65):
        with pytest.raises(ValueError, match=f"1 to 64 tokens, got {M}"):
            run(torch.randn(M, 32), w)


def test_tiles_fit_every_count() -> None:
    for M in range(1, 65):
        neurons, sums = decode.tiles_for(M, 2048, 5632)
        assert neurons.BN == 64 and neurons.TN == 44 and neurons.programs == 132
        assert isinstance(sums, decode.HopperSumTile) == (M <= 32)
        assert isinstance(neurons, decode.HopperTile) == (M <= 16)
        narrow, _ = decode.tiles_for(M, 2048, 5632, element_size=4)
        assert isinstance(narrow, decode.NeuronTile) and narrow.slots == 0  # those dots are tf32
        for capability in (80, 86, 100, 120):  # test_cross_compile sees that they fit
            tile, sums = decode.tiles_for(M, 2048, 5632, capability=capability)
            assert isinstance(tile, decode.NeuronTile) and 1 <= tile.stages <= 6
            assert isinstance(sums, decode.SumTile) and 1 <= sums.stages <= 4
            assert (44 if capability == 120 else 0) == tile.TN


@pytest.mark.parametrize("M", [17, 32, 33, 64])
def test_more_neurons_than_one_program_a_processor_takes_run_two_at_once(M: int) -> None:
    neurons, sums = decode.tiles_for(M, 4096, 14336)
    assert isinstance(neurons, decode.NeuronTile) and 132 < neurons.programs <= 2 * 132
    BM = 32 if M <= 32 else 64
    assert 2 * neurons.stages * (neurons.BN + BM) * neurons.BK * 2 <= 227 * 1024
    assert sums == (decode.HopperSumTile(6, 8) if M <= 32 else decode.SumTile(32, 4, 4, BS=2))
    in_triton = decode.tiles_for(M, 4096, 14336, aligned=False)
    assert in_triton == (neurons, decode.SumTile(32, 4, 4, BS=2))
    narrower, sums = decode.tiles_for(M, 4096, 8448)  # one program a processor
    assert isinstance(narrower, decode.NeuronTile) and narrower.stages == 6 and narrower.programs == 132
    assert sums == decode.tiles_for(M, 2048, 5632)[1]
    for how in ({"element_size": 4}, {"capability": 120}):
        _, sums = decode.tiles_for(M, 4096, 14336, **how)
        assert isinstance(sums, decode.SumTile) and sums.BD == 16


def test_up_to_16_tokens_of_many_neurons_keep_all_stages() -> None:
    neurons, _ = decode.tiles_for(16, 4096, 14336)
    assert isinstance(neurons, decode.NeuronTile) and neurons.stages == 6


def test_hopper_has_its_own_kernel_where_the_gate_fits() -> None:
    def kind(D: int, F: int, **facts: int) -> type:
        return type(decode.tiles_for(8, D, F, **facts)[0])

    assert kind(2048, 5632) is kind(1024, 4096) is kind(16, 16) is decode.HopperTile
    for D, F in ((2048, 8192), (4096, 5632), (8192, 28672), (2040, 5632)):
        assert kind(D, F) is decode.NeuronTile
    assert kind(2048, 5632, aligned=False) is kind(2048, 5632, processors=66) is decode.NeuronTile
    for version, answer in (("3.6.0", None), ("3.7.1", None), ("3.8.0", "tried with Triton 3.6 and 3.7, not 3.8.0")):
        assert decode.why_not_hopper(90, version) == answer
    assert decode.why_not_hopper(100) == decode.why_not_hopper(89) == "for sm_90"


@given(F=st.integers(1, 30000), most=st.sampled_from([16, 64]), processors=st.integers(1, 200))
def test_neurons_are_divided_among_all_processors(F: int, most: int, processors: int) -> None:
    TN, programs = decode._divided(F, most, processors)
    assert 1 <= TN <= most and TN * programs >= F
    assert programs % processors == 0 and (programs - processors) * most < F  # not a round more than needed


def test_tune_tries_tiles_and_checks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons, sums = decode.NeuronTile(32, 16, 4, 2), decode.SumTile(16, 4, 2, BW=4)
    impossible = decode.NeuronTile(24, 16, 4, 2)
    monkeypatch.setattr(tune_few, "neuron_candidates", lambda *_, **__: [neurons, impossible])
    monkeypatch.setattr(tune_few, "sum_candidates", lambda **_: [sums])
    arguments = ("skew10", 4, 32, 96, f32, torch.device("cpu"))
    seen: list[tuple[int, int]] = []
    trials = list(tune.tune(*arguments, progress=lambda tried, total: seen.append((tried, total))))
    usual = gpu._INTERPRETED_FEW
    assert [(t.kernel, t.tile) for t in trials] == [
        ("neurons", usual[0]),
        ("neurons", neurons),
        ("sums", usual[1]),
        ("sums", sums),
    ]
    assert all(t.ms > 0 for t in trials) and seen[-1] == (3, 3)
    with pytest.raises(ValueError, match="unknown kernel 'tail': 4 tokens have neurons, sums"):
        next(tune.tune(*arguments, only=["tail"]))
    forward = decode.forward

    def wrong(*a: object, settled: bool) -> Tensor:
        return forward(*a, settled=settled) + (a[4][1] == sums)

    monkeypatch.setattr(decode, "forward", wrong)
    with pytest.raises(RuntimeError, match="another result with"):
        list(tune.tune(*arguments, only=["sums"]))


def test_tune_has_candidates_for_every_gpu() -> None:
    facts = {"processors": 132, "sixteen_bits": True, "hopper": True}
    few, many = (list(tune_few.neuron_candidates(M, 2048, 5632, **facts)) for M in (8, 64))
    assert {*map(type, few)} == {decode.NeuronTile, decode.HopperTile}
    assert {*map(type, many)} == {decode.NeuronTile}
    assert {*map(type, tune_few.sum_candidates(hopper=True))} == {decode.SumTile, decode.HopperSumTile}
    assert {*map(type, tune_few.sum_candidates(hopper=False))} == {decode.SumTile}


# -- one token, by the int8 copy of the gate ----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    D=st.sampled_from([16, 48, 256, 1024]),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 1e6]),
    kind=st.sampled_from(["normal", "steps", "one", "sign", "cancelling"]),
    dtype=st.sampled_from([torch.bfloat16, f16, f32]),
    seed=st.integers(0, 9999),
)
def test_what_is_ruled_out_cannot_fire(D: int, scale: float, kind: str, dtype: torch.dtype, seed: int) -> None:
    """Against z in fp64, for weights and tokens that make the most of the rounding."""
    torch.manual_seed(seed)
    gate, x = torch.randn(64, D), torch.randn(32, D)
    if kind == "steps":  # halfway between two values of q, the error against the token's sign
        gate = (torch.randint(-126, 126, (64, D)) + 0.5) / 127
        gate[:, 0] = 1
    elif kind == "one":
        gate = torch.eye(D)[torch.randint(D, (64,))] + 1e-3 * torch.randn(64, D)
    elif kind == "sign":
        gate, x = gate.sign() * (1 + torch.rand(64, D) / 64), x.sign()
    gate, x = (gate * (scale if dtype != f16 else 1.0)).to(dtype), x.to(dtype)
    if kind == "cancelling":  # z near 0
        first = x[:, :1].double()
        gate[:, 0] = (-(gate[:, 1:].double() @ x[0, 1:].double()) / first[0]).to(dtype)
    copy = screen.screen_of(gate)
    if copy is None:
        assert not gate.isfinite().all() or gate.abs().amax(1).min() < 1e-12
        return
    z = x.double() @ gate.double().t()
    assert (screen.bounds(copy, x, None)[z > 0] > 0).all()


def test_the_bound_is_no_wider_than_it_need_be() -> None:
    """As many candidates as the docs say: about 2.4 for each of the neurons of skew29 that fire."""
    inputs = cases.make("skew29", 256, 512, 1408, dtype=torch.bfloat16, device="cpu")
    copy = screen.screen_of(inputs.w_gate)
    assert copy is not None
    fired = (inputs.x.float() @ inputs.w_gate.float().t() > 0).sum()
    assert fired <= (screen.bounds(copy, inputs.x, None) > 0).sum() <= 4 * fired
    assert screen.is_worth_it(copy, inputs.x, None, screen.MOST_CANDIDATES)
    assert not screen.is_worth_it(copy, inputs.x, torch.full((1408,), 100.0), screen.MOST_CANDIDATES)


def test_a_bias_may_be_anything() -> None:
    for value in (float("inf"), float("-inf"), float("nan"), 1e30, -1e30):
        w, x = make_weights(32, 64, f32, bias=True), torch.randn(1, 32)
        w.gate_bias[3] = value  # type: ignore[index]
        expected = ops.gated_ffn(x, *w, backend="reference")
        y = run(x, w, screened=True)
        assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4, equal_nan=True) or not expected.isfinite().all()
        assert torch.equal(y.isfinite(), expected.isfinite())


def test_tokens_of_zeros_and_of_tiny_numbers() -> None:
    w = make_weights(32, 64, f32)
    for scale in (0.0, 1e-30, 1e-42):
        x = scale * torch.randn(1, 32)
        assert_right(run(x, w, screened=True), x, w)


def test_no_copy_of_weights_that_are_not_finite_or_out_of_range() -> None:
    for value in (float("nan"), float("inf"), 1e20):
        gate = torch.randn(16, 32)
        gate[3, 4] = value
        assert screen.screen_of(gate) is None
    gate[3] = 0  # rows of zeros are fine
    copy = screen.screen_of(gate)
    assert copy is not None and (copy.q[3] == 128).all()
    assert screen.screen_of(torch.randn(16, 32) * 1e-20) is None


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_a_graphs_screen_is_never_of_an_older_gate(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the new gate has no screen, or one that is not worth it: all that may fire are candidates."""
    capturing = False
    monkeypatch.setattr(weights, "_is_capturing", lambda: capturing)
    w, x = spread(64, 160, f16, 0.01), torch.randn(1, 64).half()

    def its_screen() -> screen.Screen | None:
        return gpu._screen(x, w, screen.MOST_CANDIDATES)

    in_graph = its_screen()
    assert in_graph is not None
    capturing = True
    assert its_screen() is in_graph
    capturing = False
    w.gate.mul_(50)
    w.gate[7, 3] *= value
    assert its_screen() is in_graph
    candidates = ~(screen.bounds(in_graph, x, w.gate_bias) <= 0)
    z = x.double() @ w.gate.double().T + w.gate_bias.double()
    assert (candidates | (z <= 0)).all() and (z > 0).sum() > 0.06 * 160
    down = w.down.t().contiguous()
    y = decode.forward(x, w, down, "relu", gpu._INTERPRETED_FEW, in_graph)
    truth = reference.forward(x.double(), w.to(torch.float64), want_stats=False).y
    assert torch.equal(y.isnan(), truth.isnan())
    if value == 1.0:
        assert_right(y, x, w)


def test_only_one_token_is_screened() -> None:
    with pytest.raises(ValueError, match="one token, got 2"):
        run(torch.randn(2, 32), make_weights(32, 48, f32), screened=True)


@pytest.mark.parametrize(
    ("tile", "most"),
    [(decode.HopperTile(44, 132, 256), screen.MOST_BESIDE_HOPPER), (gpu._INTERPRETED_FEW[0], screen.MOST_CANDIDATES)],
    ids=["hopper", "triton"],
)
def test_fewer_candidates_are_screened_where_hopper_has_a_kernel(
    tile: Any, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two limits: by the one that is screened, by the other not."""
    share = 0.04
    assert screen.MOST_BESIDE_HOPPER < share < screen.MOST_CANDIDATES
    monkeypatch.setattr(gpu, "few_tiles", lambda *_: (tile, gpu._INTERPRETED_FEW[1]))
    bounds = torch.where(torch.arange(1000) < 1000 * share, 1.0, -1.0)[None]
    monkeypatch.setattr(screen, "bounds", lambda *_: bounds)
    screened: list[bool] = []
    monkeypatch.setattr(decode, "forward", lambda *a, **_: screened.append(a[5] is not None))
    gpu.few_tokens_forward(torch.randn(1, 32).half(), make_weights(32, 48, f16), "relu")
    assert screened == [share < most]


def test_the_copy_is_made_once_and_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    screen_of = screen.screen_of
    monkeypatch.setattr(screen, "screen_of", lambda gate: made.append(gate) or screen_of(gate))
    used: list[bool] = []
    forward = decode.forward
    monkeypatch.setattr(decode, "forward", lambda *a, **k: used.append(a[5] is not None) or forward(*a, **k))
    plan, x = dense_plan(160, few_tokens=4).encode(), torch.randn(1, 64).half()
    sparse, dense = spread(64, 160, f16, 0.01), spread(64, 160, f16, 0.5)
    for w, helps in ((sparse, True), (dense, False)):
        for tokens in (x.expand(9, -1), x.expand(2, -1), x, x):
            assert len(made) == (len(used) > 1)  # by the first token that comes alone
            assert_right(gpu.forward(tokens, w, "relu", plan), tokens, w)
        assert len(made) == 1 and used == [False, helps, helps]
        made.clear(), used.clear()
    sparse.gate.mul_(1)  # a new version
    gpu.forward(x, sparse, "relu", plan)
    assert len(made) == 1 and used == [True]
    gpu.forward(x.float(), Weights(*(None if t is None else t.float() for t in sparse)), "relu", plan)
    assert len(made) == 1 and used == [True, False]  # fp32 has no use for it


def test_a_gate_is_read_early_only_if_an_earlier_call_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel before may be what writes it."""
    seen: list[bool] = []
    forward = decode.forward
    monkeypatch.setattr(decode, "forward", lambda *a, settled: seen.append(settled) or a[0])
    monkeypatch.setattr(gpu, "few_tiles", lambda *_: (decode.HopperTile(1, 1, 64), decode.SumTile(16, 4, 2)))
    w, plan, x = make_weights(32, 64, f32), dense_plan(64, few_tokens=4).encode(), torch.randn(2, 32)

    def call(w: Weights = w) -> bool:
        gpu.forward(x, w, "relu", plan)
        return seen.pop()

    assert [call(), call(), call()] == [False, True, True]
    w.gate.mul_(1)
    assert [call(), call()] == [False, True]
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()  # fused optimisers move no version counter
    assert [call(), call()] == [False, True]
    assert [call(w._replace(gate=w.gate + 0)) for _ in range(2)] == [False, False]  # computed each time
    with torch.inference_mode():
        made_there = w._replace(gate=w.gate + 0)
        assert [call(made_there), call(made_there)] == [False, False]  # counts no versions
    monkeypatch.setattr(gpu, "few_tiles", lambda *_: gpu._INTERPRETED_FEW)
    assert [call(), call()] == [False, False]  # that kernel does not read early
    monkeypatch.setattr(decode, "_several_tokens", lambda *a: seen.append(a[-1]) or a[0])
    for gate, answer in ((w.gate, True), (w.gate.t().contiguous().t(), False)):  # of which a copy is made at once
        forward(x, w._replace(gate=gate), w.down.t().contiguous(), "relu", gpu._INTERPRETED_FEW, settled=True)
        assert seen.pop() == answer


# -- who calls them ---------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Token counts that came to the kernels."""
    seen: list[int] = []
    forward = decode.forward

    def watched(x: Tensor, *rest: object, **options: bool) -> Tensor:
        seen.append(len(x))
        return forward(x, *rest, **options)

    monkeypatch.setattr(decode, "forward", watched)
    return seen


def test_the_plan_says_up_to_how_many_tokens(calls: list[int]) -> None:
    w = make_weights(32, 64, f32)
    plan = dense_plan(64, few_tokens=4).encode()
    for M in (0, 1, 4, 5):
        x = torch.randn(M, 32)
        assert_right(gpu.forward(x, w, "relu", plan), x, w) if M else gpu.forward(x, w, "relu", plan)
    assert calls == [1, 4]
    assert_right(gpu.forward(x[:1], w, "relu", None), x[:1], w)
    assert calls == [1, 4]


def test_a_split_layer_and_few_tokens_share_the_copy_of_down(calls: list[int]) -> None:
    w = make_weights(32, 256, f32)
    plan = Plan(n_neurons=256, hot=torch.arange(128), cap=16, min_tokens=0, few_tokens=2).encode()
    before = weights.copied_bytes()
    gpu.forward(torch.randn(8, 32), w, "relu", plan)
    with_layout = weights.copied_bytes()
    gpu.forward(torch.randn(2, 32), w, "relu", plan)
    assert calls == [2] and before < with_layout == weights.copied_bytes()


def test_weights_that_change_are_read_again(calls: list[int]) -> None:
    layer = GatedSparseFFN(32, 64, backend="triton")
    layer.set_plan(dense_plan(64, few_tokens=8))
    x = torch.randn(2, 32)
    with torch.no_grad():
        first = layer(x)
        layer.down_proj.weight.mul_(2)
        assert torch.allclose(layer(x), 2 * first, rtol=1e-5, atol=1e-6)
    assert calls == [2, 2]


@pytest.mark.parametrize("kind", [GatedSparseFFN, SparseFFN])
def test_layers_plan_for_few_tokens_by_the_first_ones(
    kind: type, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.nn.FIRST_LOOK", 8)
    monkeypatch.setattr("twell.plan._FEW_COSTS", dict.fromkeys((1, 2, 4, 8, 16, 32, 64), (0.0, 2.0)))
    layer = kind(32, 64, bias=True, backend="triton")
    with torch.no_grad():
        getattr(layer, layer.projections[0]).bias.fill_(-1.0)  # few fire
        layer(torch.randn(5, 32))
        assert layer.plan is None and not calls
        layer(torch.randn(1, 3, 32))  # the eighth token was seen: this batch runs by the plan
        assert layer.plan is not None
        plan = Plan.decode(layer.plan)
        assert plan.is_dense and plan.few_tokens == 8
        assert layer._first_batches[1] == 8 and calls == [3]
        layer(torch.randn(1, 32))
        assert layer._first_batches[1] == 8  # no more looks at small batches
        layer(torch.randn(300, 32))
        assert layer._first_batches[1] == 308
    assert calls == [3, 1]


def test_training_does_not_use_them(calls: list[int]) -> None:
    layer = GatedSparseFFN(32, 64, backend="triton")
    layer.set_plan(dense_plan(64, few_tokens=8))
    layer(torch.randn(2, 32)).sum().backward()
    assert not calls


@pytest.mark.parametrize("kind", [GatedSparseFFN, SparseFFN])
def test_one_operation_for_the_compiler_and_no_input_on_the_cpu(kind: type, calls: list[int]) -> None:
    """On a GPU an input on the CPU, as the plan is, would keep the compiler from capturing a CUDA graph."""
    layer = kind(32, 64, backend="triton").requires_grad_(False)
    layer.set_plan(dense_plan(64, few_tokens=8))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append((graph, inputs))
        return graph

    x = torch.randn(2, 32)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
        assert calls == [2, 2]
        ((graph, inputs),) = graphs
        assert [n.target for n in graph.graph.nodes if "twell" in str(n.target)] == [torch.ops.twell.few_tokens_ffn]
        assert layer.plan is not None and all(t.dtype != torch.int32 for t in inputs)
        layer.set_plan(dense_plan(64))
        assert torch.allclose(compiled(x), layer(x))  # compiled anew: now densely
    assert calls == [2, 2] and len(graphs) == 2


def test_opcheck() -> None:
    w, x = make_weights(32, 64, f32, bias=True), torch.randn(3, 32)
    torch.library.opcheck(torch.ops.twell.few_tokens_ffn.default, (x, *w, "relu"))


def test_under_autocast(calls: list[int]) -> None:
    layer = GatedSparseFFN(32, 64, backend="triton").requires_grad_(False)
    layer.set_plan(dense_plan(64, few_tokens=8))
    x = torch.randn(2, 32)
    expected = layer(x)
    with torch.autocast("cpu", dtype=f16):
        y = layer(x)
    assert y.dtype == f16 and calls == [2, 2]
    assert torch.allclose(y.float(), expected, atol=1e-2)


def test_weights_of_inference_mode_run_densely(calls: list[int]) -> None:
    with torch.inference_mode():
        w, x = make_weights(32, 64, f32), torch.randn(2, 32)
        assert_right(gpu.forward(x, w, "relu", dense_plan(64, few_tokens=8).encode()), x, w)
        assert_right(torch.ops.twell.few_tokens_ffn(x, *w, "relu"), x, w)
    assert not calls


def test_a_prompt_leaves_the_copy_that_later_tokens_need(calls: list[int]) -> None:
    layer = GatedSparseFFN(32, 64, backend="triton").requires_grad_(False)
    layer.set_plan(dense_plan(64, few_tokens=2))
    before = weights.copied_bytes()
    with torch.no_grad():
        layer(torch.randn(9, 32))
        after_prompt = weights.copied_bytes()
        layer(torch.randn(1, 32))
    assert before < after_prompt == weights.copied_bytes() and calls == [1]


def test_older_plans_of_a_checkpoint_are_forgotten() -> None:
    from twell.sparsity import Planner

    layer = GatedSparseFFN(32, 64, backend="triton")
    planner = Planner([layer])
    layer.set_plan(dataclasses.replace(dense_plan(64), few_tokens=4))
    state = planner.state_dict()
    planner.load_state_dict(state)
    assert layer.plan is not None
    state["plans"] = [torch.cat([state["plans"][0][:4], state["plans"][0][5:]])]  # before few_tokens
    planner.load_state_dict(state)
    assert layer.plan is None
    state["plans"] = [dense_plan(48, few_tokens=4).encode()]  # not older, but of another layer
    with pytest.raises(ValueError, match="the plan is for 48 neurons, the layer has 64"):
        planner.load_state_dict(state)
