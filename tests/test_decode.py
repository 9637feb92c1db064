"""The kernels for few tokens against the reference, in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import tune_few_tiles as tune_few
from test_kernels import assert_right, make_weights
from twell import GatedSparseFFN, SparseFFN, gpu, reference
from twell.gpu.decode import few as decode
from twell.gpu.decode import few_tiles, screen
from twell.gpu.shared.layout import by_rows
from twell.nn import neuron_major_
from twell.ops import functional as ops
from twell.plan import dense_plan
from twell.reference import Weights
from twell.workbench.bench import cases

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

f16, f32 = torch.float16, torch.float32
WAYS = [{}, {"slots": 16, "BS": 2}, {"BN": 64, "TN": 20, "programs": 9, "BS": 2, "BW": 4}]
ONE_TOKEN_WAYS = [*WAYS, {"screened": True}]


def run(x: Tensor, w: Weights, activation: str = "relu", *, screened: bool = False, **tile: int) -> Tensor:
    neurons = few_tiles.NeuronTile(16, 32, 4, 2)
    sums = few_tiles.SumTile(32, 4, 2, BW=2)
    neurons = neurons._replace(**{k: v for k, v in tile.items() if k in neurons._fields})
    sums = sums._replace(**{k: v for k, v in tile.items() if k in sums._fields})
    copy = screen.screen_of(w.gate) if screened else None
    return decode.forward(x, by_rows(w), activation, (neurons, sums), copy)


def ways(M: int) -> list[dict[str, bool]]:
    """Tiles by which M tokens may be computed."""
    return ONE_TOKEN_WAYS if M == 1 else WAYS


def spread(D: int, F: int, dtype: torch.dtype, share: float, *, gated: bool = True) -> Weights:
    """Weights with which about ``share`` of the neurons fire, by their bias."""
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


@pytest.mark.slow
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
def test_inf_and_nan_are_as_in_a_dense_layer(M: int) -> None:
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
    for way in ways(M):  # z is -inf for every neuron: none is active, and 0 * u is NaN all the same
        w, x = make_weights(32, 64, f32), torch.randn(M, 32)
        w.gate[:, 7], x[0, 7] = -1.0, float("inf")
        assert run(x, w, **way)[0].isnan().all()
    w = make_weights(32, 64, f32)
    w.gate[5, 3] = float("nan")  # a neuron that is nan for all tokens
    assert run(torch.randn(M, 32), w).isnan().all()
    for sign in (1, -1):
        w, x = make_weights(32, 64, f32), torch.randn(M, 32)
        w.gate[5], x[:, 0] = torch.eye(32)[0], sign  # a neuron that all tokens wake, or none
        expected = reference.forward(x, w, want_stats=False).y
        w.down[2, 5] = w.up[5, 3] = float("nan")  # type: ignore[index]
        y = run(x, w, **ways(M)[-1])
        assert not y.isfinite().all(1).any() if sign > 0 else torch.allclose(y, expected, rtol=1e-4, atol=1e-4)


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


def test_the_same_bits_every_time_and_in_any_batch() -> None:
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
        neurons, sums = few_tiles.tiles_for(M, 2048, 5632)
        assert neurons.BN == 64 and neurons.TN == 44 and neurons.programs == 132
        assert isinstance(sums, few_tiles.HopperSumTile) == (M <= 32)
        assert isinstance(neurons, few_tiles.HopperTile) == (M <= 16)
        narrow, _ = few_tiles.tiles_for(M, 2048, 5632, element_size=4)
        assert isinstance(narrow, few_tiles.NeuronTile) and narrow.slots == 0  # those dots are tf32
        for capability in (80, 86, 100, 120):  # test_cross_compile sees that they fit
            tile, sums = few_tiles.tiles_for(M, 2048, 5632, capability=capability)
            assert isinstance(tile, few_tiles.NeuronTile) and 1 <= tile.stages <= 6
            assert isinstance(sums, few_tiles.SumTile) and 1 <= sums.stages <= 4
            assert (44 if capability == 120 else 0) == tile.TN


@pytest.mark.parametrize("M", [17, 32, 33, 64])
def test_an_sm_with_many_neurons_runs_two_programs(M: int) -> None:
    neurons, sums = few_tiles.tiles_for(M, 4096, 14336)
    assert isinstance(neurons, few_tiles.NeuronTile) and 132 < neurons.programs <= 2 * 132
    BM = 32 if M <= 32 else 64
    assert 2 * neurons.stages * (neurons.BN + BM) * neurons.BK * 2 <= 227 * 1024
    assert sums == (few_tiles.HopperSumTile(6, 8) if M <= 32 else few_tiles.SumTile(32, 4, 4, BS=2))
    narrower, sums = few_tiles.tiles_for(M, 4096, 8448)  # one program per SM
    assert isinstance(narrower, few_tiles.NeuronTile) and narrower.stages == 6 and narrower.programs == 132
    assert sums == few_tiles.tiles_for(M, 2048, 5632)[1]
    for how in ({"element_size": 4}, {"capability": 120}):
        _, sums = few_tiles.tiles_for(M, 4096, 14336, **how)
        assert isinstance(sums, few_tiles.SumTile) and sums.BD == 16


def test_up_to_16_tokens_of_many_neurons_keep_all_stages() -> None:
    neurons, _ = few_tiles.tiles_for(16, 4096, 14336)
    assert isinstance(neurons, few_tiles.NeuronTile) and neurons.stages == 6


def test_hopper_has_its_own_kernel_where_the_gate_fits() -> None:
    def kind(D: int, F: int, **facts: int) -> type:
        return type(few_tiles.tiles_for(8, D, F, **facts)[0])

    assert kind(2048, 5632) is kind(1024, 4096) is kind(16, 16) is few_tiles.HopperTile
    for D, F in ((2048, 8192), (4096, 5632), (8192, 28672)):
        assert kind(D, F) is few_tiles.NeuronTile
    assert kind(2048, 5632, element_size=4) is kind(2048, 5632, processors=66) is few_tiles.NeuronTile
    for version, answer in (("3.6.0", None), ("3.7.1", None), ("3.8.0", "tried with Triton 3.6 and 3.7, not 3.8.0")):
        assert few_tiles.why_not_hopper(90, version) == answer
    assert few_tiles.why_not_hopper(100) == few_tiles.why_not_hopper(89) == "for sm_90"


@given(F=st.integers(1, 30000), most=st.sampled_from([16, 64]), processors=st.integers(1, 200))
def test_neurons_are_divided_among_all_sms(F: int, most: int, processors: int) -> None:
    TN, programs = few_tiles._divided(F, most, processors)
    assert 1 <= TN <= most and TN * programs >= F
    assert programs % processors == 0 and (programs - processors) * most < F  # not a round more than needed


def test_tune_has_candidates_for_every_gpu() -> None:
    facts = {"processors": 132, "sixteen_bits": True, "hopper": True}
    few, many = (list(tune_few.neuron_candidates(M, 2048, 5632, **facts)) for M in (8, 64))
    assert {*map(type, few)} == {few_tiles.NeuronTile, few_tiles.HopperTile}
    assert {*map(type, many)} == {few_tiles.NeuronTile}
    assert {*map(type, tune_few.sum_candidates(hopper=True))} == {few_tiles.SumTile, few_tiles.HopperSumTile}
    assert {*map(type, tune_few.sum_candidates(hopper=False))} == {few_tiles.SumTile}


# -- one token, by the int8 copy of the gate ----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    D=st.sampled_from([16, 48, 256, 1024]),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 1e6]),
    kind=st.sampled_from(["normal", "steps", "one", "sign", "cancelling"]),
    dtype=st.sampled_from([torch.bfloat16, f16, f32]),
    seed=st.integers(0, 9999),
)
def test_neurons_that_are_ruled_out_cannot_fire(D: int, scale: float, kind: str, dtype: torch.dtype, seed: int) -> None:
    """Against z in fp64, for weights and tokens that maximise the rounding."""
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


def test_the_bound_is_tight() -> None:
    """As many candidates as the docs say: about 2.4 for each neuron of skew29 that fires."""
    inputs = cases.make("skew29", 256, 512, 1408, dtype=torch.bfloat16, device="cpu")
    copy = screen.screen_of(inputs.w_gate)
    assert copy is not None
    fired = (inputs.x.float() @ inputs.w_gate.float().t() > 0).sum()
    assert fired <= (screen.bounds(copy, inputs.x, None) > 0).sum() <= 4 * fired


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


def test_no_screen_of_weights_that_are_not_finite_or_out_of_range() -> None:
    for value in (float("nan"), float("inf"), 1e20):
        gate = torch.randn(16, 32)
        gate[3, 4] = value
        assert screen.screen_of(gate) is None
    gate[3] = 0  # rows of zeros are fine
    copy = screen.screen_of(gate)
    assert copy is not None and (copy.q[3] == 128).all()
    assert screen.screen_of(torch.randn(16, 32) * 1e-20) is None


def test_only_one_token_is_screened() -> None:
    with pytest.raises(ValueError, match="one token, got 2"):
        run(torch.randn(2, 32), make_weights(32, 48, f32), screened=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For every call: whether the gate was screened, and whether it may be read early."""
    calls: list[tuple[bool, bool]] = []
    forward = decode.forward

    def watched(*a: Any, settled: bool) -> Tensor:
        calls.append((a[4] is not None, settled))
        return forward(*a, settled=settled)

    monkeypatch.setattr(decode, "forward", watched)
    return calls


@pytest.mark.parametrize(
    ("share", "dtype", "helps"), [(0.005, f16, True), (0.02, f16, False), (None, f16, False), (0.005, f32, False)]
)
def test_one_token_is_screened_where_few_neurons_fire(
    share: float | None, dtype: torch.dtype, helps: bool, seen: list[tuple[bool, bool]]
) -> None:
    """Only in frozen layers; otherwise the copy might be of another gate."""
    w, x = spread(32, 160, dtype, 0.01), torch.randn(2, 32).to(dtype)
    plan = dense_plan(160, few_tokens=4, mean_active=None if share is None else share * 160)
    kept = gpu.freeze(w, plan)
    for tokens in (x, x[:1]):
        assert_right(gpu.forward(tokens, w, "relu", plan.on(x.device), kept), tokens, w)
    assert seen == [(False, True), (helps, True)]
    assert gpu.freeze(w, dense_plan(160, mean_active=1.0)).q.numel() == 0  # no few tokens


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_a_frozen_screen_is_never_of_an_older_gate(value: float) -> None:
    """Even if the new gate has no screen."""
    layer = GatedSparseFFN(64, 160, backend="triton", dtype=f16).eval().requires_grad_(False)
    layer.set_plan(dense_plan(160, few_tokens=4, mean_active=1.0))
    layer.freeze()
    x = torch.randn(1, 64, dtype=f16)
    layer(x)
    for write in (layer.gate_proj.weight, layer.gate_proj.weight.data):  # that is seen, and that is not
        before = [t.data_ptr() for t in layer.frozen._tensors]
        write.neg_()
        write[7, 3] *= value
        if write is not layer.gate_proj.weight:
            layer.refresh()
        y, w = layer(x), layer._weights()
        truth = reference.forward(x.double(), w.to(torch.float64), want_stats=False).y
        assert torch.equal(y.isnan(), truth.isnan())
        if value == 1.0:
            assert_right(y, x, w)
            assert [t.data_ptr() for t in layer.frozen._tensors] == before  # where a graph reads them


def test_only_a_frozen_aligned_gate_is_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the preceding kernel may be the one that writes it."""
    kernels_of, settled = decode.kernels_of, []
    monkeypatch.setattr(decode, "kernels_of", lambda *a: settled.append(a[5]) or kernels_of(*a))
    w, x, plan = make_weights(32, 64, f32), torch.randn(2, 32), dense_plan(64, few_tokens=4)
    w = w._replace(down=w.down.t().contiguous().t())
    loose = w._replace(gate=w.gate.t().contiguous().t())
    for weights in (w, loose):
        for kept in ((), gpu.freeze(weights, plan)):
            gpu.forward(x, weights, "relu", plan.on(x.device), kept)
    assert settled == [False, True, False, False]


# -- callers --------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens with which the kernels were called."""
    seen: list[int] = []
    forward = decode.forward

    def watched(x: Tensor, *rest: object, **options: bool) -> Tensor:
        seen.append(x.numel() // x.shape[-1])
        return forward(x, *rest, **options)

    monkeypatch.setattr(decode, "forward", watched)
    return seen


def test_the_plan_limits_the_tokens(calls: list[int]) -> None:
    w, plan = make_weights(32, 64, f32), dense_plan(64, few_tokens=4).on(torch.device("cpu"))
    w = w._replace(down=w.down.t().contiguous().t())
    for M in (0, 1, 4, 5):
        x = torch.randn(M, 32)
        assert_right(gpu.forward(x, w, "relu", plan), x, w) if M else gpu.forward(x, w, "relu", plan)
    assert calls == [1, 4]
    assert_right(gpu.forward(x[:1], w, "relu", None), x[:1], w)
    assert calls == [1, 4]


def test_without_a_neuron_major_down_they_run_densely(calls: list[int]) -> None:
    w, x, plan = make_weights(32, 64, f32), torch.randn(2, 32), dense_plan(64, few_tokens=4)
    assert_right(gpu.forward(x, w, "relu", plan.on(x.device)), x, w)
    assert not calls
    assert_right(gpu.forward(x, w, "relu", plan.on(x.device), gpu.freeze(w, plan)), x, w)
    assert calls == [2]


def of_few_tokens(kind: type, few_tokens: int = 8, **options: Any) -> Any:
    layer = kind(32, 64, backend="triton", **options).eval().requires_grad_(False)
    neuron_major_(layer.down_proj)
    layer.set_plan(dense_plan(64, few_tokens=few_tokens))
    return layer


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_change_are_read_again(frozen: bool, calls: list[int]) -> None:
    layer, x = of_few_tokens(GatedSparseFFN), torch.randn(2, 32)
    if frozen:
        layer.freeze()
    first = layer(x)
    layer.down_proj.weight.mul_(2)
    assert torch.allclose(layer(x), 2 * first, rtol=1e-5, atol=1e-6)
    layer.down_proj.weight.data.mul_(2)  # which cannot be seen
    layer.refresh()
    assert torch.allclose(layer(x), 4 * first, rtol=1e-5, atol=1e-6)
    assert calls == [2, 2, 2]


@pytest.mark.parametrize("kind", [GatedSparseFFN, SparseFFN])
def test_layers_plan_for_few_tokens_by_the_first_ones(
    kind: type, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.nn.planned.FIRST_LOOK", 8)
    monkeypatch.setattr("twell.plan.choose.FEW_COSTS", dict.fromkeys((1, 2, 4, 8, 16, 32, 64), (0.0, 2.0)))
    layer = kind(32, 64, bias=True, backend="triton")
    neuron_major_(layer.down_proj)
    with torch.no_grad():
        getattr(layer, layer.projections[0]).bias.fill_(-1.0)  # few fire
        layer(torch.randn(5, 32))
        assert layer.plan is None and not calls
        layer(torch.randn(1, 3, 32))  # the eighth token was seen: this batch runs by the plan
        assert layer.plan is not None and layer.plan.is_dense and layer.plan.few_tokens == 8
        assert layer._first_batches[1] == 8 and calls == [3]
        layer(torch.randn(1, 32))
        assert layer._first_batches[1] == 8  # no more looks at small batches
        layer(torch.randn(300, 32))
        assert layer._first_batches[1] == 308
    assert calls == [3, 1]


@pytest.mark.parametrize("which", range(4))
def test_nothing_need_be_aligned(which: int, calls: list[int]) -> None:
    """With TWELL_CHECK_LAUNCHES the launcher checks alignment."""
    w, plan = make_weights(32, 64, f32), dense_plan(64, few_tokens=8).on(torch.device("cpu"))
    w = w._replace(down=w.down.T.contiguous().T)
    given = [torch.randn(3, 32), w.gate, w.up, w.down]
    t = given[which]
    assert t is not None
    given[which] = t.new_empty(t.numel() + 1)[1:].as_strided(t.shape, t.stride()).copy_(t)
    assert given[which].data_ptr() % 16  # type: ignore[union-attr]
    x, *weights = given
    assert_right(gpu.forward(x, Weights(*weights), "relu", plan), x, w)  # type: ignore[arg-type]
    assert calls == [3]


def test_training_does_not_use_them(calls: list[int]) -> None:
    layer = of_few_tokens(GatedSparseFFN).requires_grad_(True)
    layer(torch.randn(2, 32)).sum().backward()
    assert not calls


@pytest.mark.parametrize("kind", [GatedSparseFFN, SparseFFN])
def test_one_operation_for_the_compiler_whatever_the_plan(kind: type, calls: list[int]) -> None:
    layer, x = of_few_tokens(kind), torch.randn(2, 32)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x), layer(x))
    assert calls == [2, 2]
    layer.set_plan(dense_plan(64))
    assert torch.allclose(compiled(x), layer(x))
    assert calls == [2, 2]  # densely
    (graph,) = graphs
    operations = [n.target for n in graph.graph.nodes if "twell" in str(n.target)]
    assert operations == [torch.ops.twell.ffn.default]


def test_under_autocast(calls: list[int]) -> None:
    """Autocast casts weights; frozen tensors are not made of the cast ones."""
    layer, x = of_few_tokens(GatedSparseFFN), torch.randn(2, 32)
    expected = layer(x)
    for _ in range(2):
        with torch.autocast("cpu", dtype=f16):
            y = layer(x)
        assert y.dtype == f16
        assert torch.allclose(y.float(), expected, atol=1e-2)
        layer.freeze()
    assert calls == [2, 2, 2]


def test_weights_of_inference_mode(calls: list[int]) -> None:
    with torch.inference_mode():
        w, x = make_weights(32, 64, f32), torch.randn(2, 32)
        w = w._replace(down=w.down.t().contiguous().t())
        assert_right(gpu.forward(x, w, "relu", dense_plan(64, few_tokens=8).on(x.device)), x, w)
    assert calls == [2]
