"""The Triton kernels on a GPU, at real shapes: within the tolerance law, for any plan, the same bits every time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton")

import twell
from twell import gpu, reference
from twell.formats import TwELL
from twell.gpu import dense as dense_path
from twell.gpu.prefill import split, union
from twell.gpu.shared import gate, launch, replay
from twell.gpu.shared.tiles import device_facts, tiles_for
from twell.nn import neuron_major_
from twell.plan import Plan, choose_plan, costs_for, dense_plan
from twell.reference import Weights
from twell.workbench.bench import cases, ffn
from twell.workbench.bench.parts import Parts

pytestmark = pytest.mark.gpu
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
SLACK = {bf16: 1e-3, f16: 1e-4, f32: 1e-6}


def plan_for(inputs: cases.FFNInputs, gated: bool = True) -> Plan:
    r = torch.relu(inputs.x[:4096] @ inputs.w_gate.T)
    plan = choose_plan((r != 0).sum(0), len(r), costs_for(r.device), gated=gated)
    return dataclasses.replace(plan, min_tokens=0, min_tokens_captured=0)


def sparse(inputs: cases.FFNInputs, plan: Plan, gated: bool = True, **how: Any) -> Any:
    if gated:
        return twell.gated_ffn(inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, backend="triton", plan=plan, **how)
    return twell.ffn(inputs.x, inputs.w_gate, inputs.w_down, backend="triton", plan=plan, **how)


def dense(inputs: cases.FFNInputs, gated: bool = True) -> Tensor:
    w = Weights(inputs.w_gate, inputs.w_up if gated else None, inputs.w_down)
    return reference.forward(inputs.x, w, want_stats=False).y


def assert_within_the_law(y: Tensor, x: Tensor, w: Weights, activation: str = "relu") -> None:
    """Error against float64 at most twice that of the dense formulas in the same dtype."""
    truth = reference.forward(x.double(), w.to(torch.float64), activation, want_stats=False).y
    eager = reference.forward(x, w, activation, want_stats=False).y
    if truth.norm() > 0 and eager.isfinite().all():  # fp16 may not hold it
        assert ffn.relative_error(y, truth) <= 2 * ffn.relative_error(eager, truth) + SLACK[x.dtype]


def neuron_major(w: Weights) -> Weights:
    return w._replace(down=w.down.t().contiguous().t())


def unaligned(t: Tensor) -> Tensor:
    """The same values and strides, one element beyond an aligned address."""
    room = t.new_empty(t.untyped_storage().nbytes() // t.element_size() + 1)
    return room[1:].as_strided(t.shape, t.stride()).copy_(t)


def layer_of(inputs: cases.FFNInputs, plan: Plan | None, *, turned: bool = True) -> twell.GatedSparseFFN:
    (D, F), dtype = inputs.w_down.shape, inputs.x.dtype
    layer = twell.GatedSparseFFN(D, F, device="cuda", dtype=dtype).eval().requires_grad_(False)
    linears = (layer.gate_proj, layer.up_proj, layer.down_proj)
    for linear, weight in zip(linears, (inputs.w_gate, inputs.w_up, inputs.w_down), strict=True):
        linear.weight.copy_(weight)
    if turned:
        neuron_major_(layer.down_proj)
    if plan is not None:
        layer.set_plan(plan)
    return layer


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("workload", ["iid29", "skew29", "skew100", "skew300", "skew1000", "skew2800"])
def test_workloads(workload: str, gated: bool) -> None:
    inputs = cases.make(workload, 4099, dtype=bf16, device="cuda")
    ffn.check(inputs.x, inputs, gated, dense(inputs, gated), sparse(inputs, plan_for(inputs, gated), gated))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize(("D", "F"), [(2048, 5632), (4096, 14336), (1040, 5104)])
def test_dense_layers_of_small_batches(D: int, F: int, activation: str) -> None:
    """By gate and up in one GEMM, of every tile, and by GEMMs of their own."""
    inputs, tiles = cases.make("skew300", 400, D, F, dtype=bf16, device="cuda"), set()
    w = neuron_major(Weights(inputs.w_gate, inputs.w_up, inputs.w_down))
    for M in (1, 63, 64, 65, 80, 100, 128, 129, 192, 193, 200, 255, 256, 257, 384, 385, 400):
        x = inputs.x[:M]
        tiles.add(dense_path._fused_tile(x, w))
        assert_within_the_law(gpu.forward(x, w, activation, None), x, w, activation)
    assert len(tiles) == 5 or F != 5632


@pytest.mark.parametrize(("n_hot", "cap"), [(0, 1), (0, 32), (0, 5632), (512, 1), (512, 64), (5504, 16)])
def test_forced_plans_change_nothing(n_hot: int, cap: int) -> None:
    """With a cap of 1 nearly all tokens are heavy: three chunks of them."""
    inputs = cases.make("skew100", 5003, dtype=bf16, device="cuda")
    plan = Plan(n_neurons=5632, hot=torch.randperm(5632)[:n_hot], cap=cap, first=cap // 2, min_tokens=0)
    ffn.check(inputs.x, inputs, True, dense(inputs), sparse(inputs, plan))


@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("n_heavy", [1, 64, 65, 128, 129, 512, 1024, 1100, 2048, 2049, 4096, 4097, 9000])
def test_heavy_tokens(n_heavy: int, dtype: torch.dtype) -> None:
    """Of cold neurons alone, in any order of the list the same bits; other rows are left alone."""
    inputs = cases.make("skew100", 9000, dtype=dtype, device="cuda")
    w = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    parts = Parts(inputs.x, w, Plan(n_neurons=5632, hot=torch.randperm(5632)[:512], cap=64, min_tokens=0))
    parts.pretend_heavy(n_heavy)
    parts.restore()
    got = parts.heavy(parts.tiles.heavy).clone()
    assert not got[n_heavy:].any()
    of_cold = Weights(w.gate[parts.cold], w.up[parts.cold], w.down[:, parts.cold])  # type: ignore[index]
    some = slice(0, n_heavy, max(1, n_heavy // 256))
    assert_within_the_law(got[some], inputs.x[some], of_cold)
    for _ in range(3):
        parts.lists.turns.heavy[:n_heavy] = torch.randperm(n_heavy, device="cuda", dtype=torch.int32)
        parts.restore()
        assert torch.equal(parts.heavy(parts.tiles.heavy), got)


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_words_as_other_gpus_write_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value by itself: where registers do not hold what words.py expects."""
    inputs = cases.make("skew100", 300, 1024, 2816 - 48, dtype=dtype, device="cuda")
    capability, processors = device_facts(0)
    facts = {"tile": tiles_for(80, dtype).gate, "programs": processors, "use_tma": False}
    expected = gate.gate_in_twell(inputs.x, inputs.w_gate, None, **facts)
    monkeypatch.setattr(gate, "capability", lambda: 80)
    got = gate.gate_in_twell(inputs.x, inputs.w_gate, None, **facts)
    assert got.words is not None and capability >= 80
    assert TwELL.from_words(got.words, got.counts, shape=got.shape, dtype=dtype) == expected


@pytest.mark.parametrize("dtype", [bf16, f16, f32])
@pytest.mark.parametrize(("workload", "M", "F"), [("skew29", 1027, 5632), ("skew1000", 384, 2816), ("iid29", 129, 80)])
def test_gate_in_twell(workload: str, M: int, F: int, dtype: torch.dtype) -> None:
    """Words and counts are those of the reference; of tiles that overflow, the counts. Half tiles, parts of tiles."""
    inputs = cases.make(workload, M, 1024, F, dtype=dtype, device="cuda")
    x, w, bits = inputs.x[:M], inputs.w_gate, torch.full((5000,), 7, dtype=torch.int32, device="cuda")
    x[3], x[5, 7] = 0, torch.nan
    capability, processors = device_facts(0)
    tiles = tiles_for(capability, dtype)
    facts = {"tile": tiles.gate, "programs": processors, "use_tma": tiles.use_tma}
    if capability == 90 and dtype != f32:  # else it would still be right, and slower
        flags = dict.fromkeys(("HOT", "SAVES", "GATED", "SQUARED", "HAS_BIAS"), False)
        kernel = gate._kernel(
            dtype, dtype, tiles.gate, True, True, **flags, WHOLE=True, BY_REGISTERS=True, OVERLAPS=True
        )
        assert kernel.constants["BY_REGISTERS"]
    got = gate.gate_in_twell(x, w, None, bits=bits, **facts)
    assert got.words is not None and not bits.any()
    checked = TwELL.from_words(got.words, got.counts, shape=(M, F), dtype=dtype)
    assert checked.counts[3].sum() == 0 and checked.counts[5].sum() == F
    x[5, 7] = 0
    in_order = gate.gate_in_twell(x.flip(0), w.flip(0), None, **facts)  # each value by another thread
    expected = torch.relu(x.double() @ w.double().T)
    fits = ~checked.overflowed
    r = checked.unpack(skip_overflowed=True)
    assert torch.equal(in_order.unpack(skip_overflowed=True).flip(0, 1)[fits], r[fits])
    error, allowed = ((t[fits].double() - expected[fits]).norm() for t in (r, torch.relu(x @ w.T)))
    assert error <= 2 * allowed + 1e-6 * expected[fits].norm()
    if dtype != f32:  # the same sums as cuBLAS's, where the reference packs what that gives
        packed = TwELL.pack(torch.relu(x @ w.T), compact=True, overflow="mark")
        others = torch.arange(M, device="cuda") != 5
        assert (packed.counts[others] != checked.counts[others]).float().mean() < 1e-3


def random_weights(
    D: int, F: int, dtype: torch.dtype, shift: float, *, gated: bool, bias: bool, device: str = "cuda"
) -> Weights:
    """With a bias fewer neurons fire, by ``shift`` standard deviations."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return Weights(
        normal(F, D) / 4,
        normal(F, D) / 4 if gated else None,
        normal(D, F) / 4,
        normal(F) - shift * D**0.5 / 4 if bias else None,
        normal(F) if bias and gated else None,
        normal(D) if bias else None,
    ).to(dtype)


@pytest.mark.parametrize("seed", range(200))
def test_random_shapes_sparsities_and_layouts(seed: int) -> None:
    rng = random.Random(seed)
    M = rng.choice([1, 7, 64, 513, 1000, 2049])
    D, F = 16 * rng.randint(1, 96), 16 * rng.randint(1, 200)
    dtype, gated, bias = rng.choice([bf16, f16]), rng.random() < 0.7, rng.random() < 0.3
    torch.manual_seed(seed)
    w = random_weights(D, F, dtype, rng.uniform(-1, 3), gated=gated, bias=bias)
    w = neuron_major(w) if rng.random() < 0.5 else w
    if rng.random() < 0.2:
        w = Weights._make(None if t is None else unaligned(t) for t in w)
    wide = D + rng.choice([0, 0, 0, 1, 8, 16])  # rows that lie apart
    x = torch.randn(M, wide, device="cuda").to(dtype)[:, wide - D :]
    hot = torch.randperm(F)[: min(F, 128 * rng.randint(0, 6))]
    activation = rng.choice(["relu", "relu2"])
    plan = Plan(n_neurons=F, hot=hot, cap=rng.choice([1, 16, 100, F]), first=rng.choice([0, 4, 64]), min_tokens=0)
    y = gpu.forward(x, w, activation, plan.on(x.device))
    assert_within_the_law(y, x, w, activation)
    frozen = gpu.forward(x, w, activation, plan.on(x.device), gpu.freeze(w, plan))
    assert torch.equal(frozen.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("seed", range(40))
def test_between_few_and_many_tokens(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    M, D, F = rng.choice([1, 64, 65, 128, 200, 513, 1000, 2049]), 16 * rng.randint(1, 96), 16 * rng.randint(1, 200)
    dtype, gated, bias = rng.choice([bf16, f16]), rng.random() < 0.7, rng.random() < 0.3
    w = neuron_major(random_weights(D, F, dtype, rng.uniform(-1, 4), gated=gated, bias=bias))
    if rng.random() < 0.2:
        w = Weights._make(None if t is None else unaligned(t) for t in w)
    wide = D + rng.choice([0, 0, 8, 16])
    x = torch.randn(M, wide, device="cuda").to(dtype)[:, wide - D :]
    activation, plan = rng.choice(["relu", "relu2"]), dense_plan(F, union_tokens=4095)
    y = gpu.forward(x, w, activation, plan.on(x.device))
    assert_within_the_law(y, x, w, activation)
    for _ in range(3):
        assert torch.equal(gpu.forward(x, w, activation, plan.on(x.device)).nan_to_num(), y.nan_to_num())
    turned = w._replace(down=w.down.contiguous())
    frozen = gpu.forward(x, turned, activation, plan.on(x.device), gpu.freeze(turned, plan))
    assert torch.equal(frozen.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("M", [128, 1000, 2048])
@pytest.mark.parametrize("workload", ["skew29", "skew1000"])
def test_tiles_of_tokens_in_graphs(workload: str, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with weights written in place, and with a poisoned token."""
    inputs = cases.make(workload, M, dtype=bf16, device="cuda")
    layer = layer_of(inputs, dense_plan(5632, union_tokens=4095))
    calls: list[int] = []
    forward = union.forward
    monkeypatch.setattr(union, "forward", lambda x, *rest: calls.append(len(x)) or forward(x, *rest))  # type: ignore[func-returns-value]
    with torch.no_grad():
        y = layer(inputs.x)
        ffn.check(inputs.x, inputs, True, dense(inputs), y)
        graph, out = captured(lambda: layer(inputs.x))
        inputs.x[M // 2, 7] = float("nan")
        layer.up_proj.weight.mul_(2)
        graph.replay()
        expected = 2 * y
    assert set(calls) == {M}
    rows = torch.arange(M, device="cuda") // 64 != M // 2 // 64  # in its tile all neurons fire: sums of other parts
    assert out[M // 2].isnan().all() and torch.equal(out[rows], expected[rows])


def test_poisoned_tokens() -> None:
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    inputs.x[3, 5], inputs.x[700, 0], inputs.x[2047, 1] = float("nan"), float("inf"), float("-inf")
    expected = dense(inputs).isfinite().all(1)
    assert torch.equal(sparse(inputs, plan_for(inputs)).isfinite().all(1), expected)
    assert int((~expected).sum()) == 3


def test_same_bits_every_time() -> None:
    inputs = cases.make("skew100", 4096, dtype=bf16, device="cuda")
    plan = plan_for(inputs)
    first = sparse(inputs, plan)
    for _ in range(20):
        assert torch.equal(sparse(inputs, plan), first)


@pytest.mark.parametrize("M", [1, 8, 64, 2048])
def test_launches_without_checks_give_the_same_bits(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests compare all arguments with their declarations, and have tensors in place of bare addresses."""
    inputs = cases.make("skew100", M, dtype=bf16, device="cuda")
    w, mask = neuron_major(Weights(inputs.w_gate, inputs.w_up, inputs.w_down)), torch.rand(M, device="cuda") < 0.5
    plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=64, min_tokens=65, few_tokens=64)
    tensors, dl1 = plan.on(inputs.x.device), torch.tensor(0.1, device="cuda")
    results = []
    for checked in (True, False):
        monkeypatch.setattr(launch, "CHECKED", checked)
        y = gpu.forward(inputs.x, w, "relu", tensors)
        *out, saved = gpu.train(inputs.x, w, "relu", tensors, mask, want_stats=True, save=True)
        gradients = gpu.backward(inputs.x, dl1, inputs.x, w, saved, "relu", tensors, mask, (True,) * 7)
        results.append([y, *out, gradients.x, *(g for g in gradients.weights if g is not None)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_hot_neurons_beside_the_tail_in_threads_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one stream, without recordings, and on two the bits are the same."""
    inputs = cases.make("skew29", 8192, dtype=bf16, device="cuda")
    layer = layer_of(inputs, Plan(n_neurons=5632, hot=torch.arange(512), cap=64, min_tokens=65))
    monkeypatch.setattr(replay, "CHECKED", False)
    xs = list(inputs.x.split(1000))[:8]
    with monkeypatch.context() as without_the_c_module:
        without_the_c_module.setattr(replay, "_replay", lambda: None)
        expected = [layer(x) for x in xs]
    layer(xs[0])
    assert split._launch._programs
    torch.cuda.synchronize()

    def calls(stream: torch.cuda.Stream | None) -> bool:
        with torch.no_grad(), torch.cuda.stream(stream):
            ys = [layer(x) for _ in range(5) for x in xs]
            return all(torch.equal(y, expected[i % len(xs)]) for i, y in enumerate(ys))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(calls, [torch.cuda.Stream() for _ in range(4)] + [None] * 2))


def test_cuda_graph_and_compile() -> None:
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    plan = plan_for(inputs)
    x, w_gate, w_up, w_down = inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down

    def call(x: Tensor) -> Tensor:
        return twell.gated_ffn(x, w_gate, w_up, w_down, backend="triton", plan=plan)

    expected = call(x)
    static = x.clone()
    graph, out = captured(lambda: call(static))
    static.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(out, call(x.flip(0)))
    static.copy_(x)
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(torch.compile(call, fullgraph=True)(x), expected)


@torch.no_grad()
def test_a_mask_that_does_not_fit_is_refused() -> None:
    inputs = cases.make("skew29", 8, dtype=bf16, device="cuda")
    layer = layer_of(inputs, dense_plan(5632, few_tokens=8))
    with pytest.raises(ValueError, match="token_mask must have shape"):
        layer(inputs.x, token_mask=torch.ones(3, dtype=torch.bool, device="cuda"))


@torch.no_grad()
def test_compiled_layers_compile_nothing_anew_for_another_plan() -> None:
    """One graph for few tokens, one for batches that run densely, one for those in parts."""
    inputs = cases.make("skew29", 2048, dtype=bf16, device="cuda")
    counter = CompileCounterWithBackend("inductor")
    layer = layer_of(inputs, None)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for few, least, n_hot in ((8, 1000, 512), (16, 1500, 256), (4, 2048, 0)):
        layer.set_plan(
            Plan(n_neurons=5632, hot=torch.arange(n_hot), cap=64, first=16, min_tokens=least, few_tokens=few)
        )
        for M in (3, 300, 2048):
            torch.testing.assert_close(compiled(inputs.x[:M]), layer(inputs.x[:M]), rtol=0.02, atol=0.02)
    assert counter.frame_count == 3


@pytest.mark.parametrize("M", [1, 8, 64, 2048])
@pytest.mark.parametrize("kind", ["turned", "contiguous", "frozen"])
@torch.no_grad()
def test_graphs_replay_with_the_weights_as_they_are(M: int, kind: str) -> None:
    """Written in any way; a frozen layer after ``refresh_``."""
    inputs = cases.make("skew29", M, dtype=bf16, device="cuda")
    plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=64, min_tokens=65, few_tokens=64, mean_active=29.0)
    layer = layer_of(inputs, plan, turned=kind == "turned")
    if kind == "frozen":
        assert twell.freeze_(layer).layers == 1
    graph, out = captured(lambda: layer(inputs.x))
    weights = [p for p in layer.parameters() if p.dim() == 2]
    for write in (
        lambda p: p.copy_(p.flip(0)),
        lambda p: p.data.copy_(p.data.roll(1, 0)),
        lambda p: p.data[: len(p) // 3].neg_(),
    ):
        for p in weights:
            write(p)
        if kind == "frozen":
            twell.refresh_(layer)
        filler = [torch.randn_like(p) for p in weights]  # would take the place of what was freed
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, layer(inputs.x))
        assert_within_the_law(out, inputs.x, layer._weights())
        del filler


@pytest.mark.parametrize("M", [3, 2048])
@torch.no_grad()
def test_a_frozen_layer_in_a_graph_keeps_its_sizes(M: int) -> None:
    inputs = cases.make("skew29", M, dtype=bf16, device="cuda")
    plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=64, min_tokens=0, few_tokens=64)
    layer = layer_of(inputs, plan)
    layer.freeze()
    graph, out = captured(lambda: layer(inputs.x))
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        layer.set_plan(dataclasses.replace(plan, hot=torch.arange(256)))
    graph.replay()
    assert_within_the_law(out, inputs.x, layer._weights())


@pytest.mark.parametrize("M", [5, 2048])
@torch.no_grad()
def test_unaligned_tensors(M: int) -> None:
    inputs = cases.make("skew100", M, dtype=bf16, device="cuda")
    own = Weights(inputs.w_gate, inputs.w_up, inputs.w_down)
    plan = Plan(n_neurons=5632, hot=torch.arange(512), cap=64, min_tokens=65, few_tokens=64)
    wide = torch.randn(M, 2048 + 16, device="cuda", dtype=bf16)
    for w in (own, neuron_major(own)):
        expected = gpu.forward(inputs.x, w, "relu", plan.on(inputs.x.device))
        odd = Weights._make(None if t is None else unaligned(t) for t in w)
        assert odd.gate.data_ptr() % 16 and odd.down.stride() == w.down.stride()
        ys = []
        for first in (0, 1, 8, 16):  # columns of a wider matrix
            x = wide[:, first : first + 2048].copy_(inputs.x)
            ys.append(gpu.forward(x, w, "relu", plan.on(x.device)))
        ys.append(gpu.forward(unaligned(inputs.x), odd, "relu", plan.on(x.device)))
        for y in ys:
            if M > 64 or w is not own:  # few tokens run densely: by which kernel depends on alignment
                assert torch.equal(y, expected)
            assert_within_the_law(y, inputs.x, w)


@torch.no_grad()
def test_few_tokens_of_a_contiguous_down_projection_run_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    from twell.gpu.decode import few as decode

    seen: list[int] = []
    forward = decode.forward
    monkeypatch.setattr(decode, "forward", lambda x, *a, **k: seen.append(len(x)) or forward(x, *a, **k))
    inputs = cases.make("skew29", 8, dtype=bf16, device="cuda")
    layer = layer_of(inputs, dense_plan(5632, 64), turned=False)
    for expected in ([], [8]):
        assert_within_the_law(layer(inputs.x), inputs.x, layer._weights())
        assert seen == expected
        layer.freeze()
        seen.clear()
    twell.thaw_(layer)
    neuron_major_(layer.down_proj)
    layer(inputs.x)
    assert seen == [8]


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    M, D, F = 400_000, 128, 5632  # M * F = 2.25e9
    w = Weights(*(torch.randn(s, device="cuda", dtype=bf16) / 8 for s in ((F, D), (F, D), (D, F))))
    w = w._replace(gate_bias=torch.full((F,), -4.0, device="cuda", dtype=bf16))
    x = torch.randn(M, D, device="cuda", dtype=bf16)
    plan = Plan(n_neurons=F, hot=torch.arange(128), cap=64)
    y = gpu.forward(x, w, "relu", plan.on(x.device))
    for rows in (slice(0, 500), slice(M - 500, M)):
        truth = reference.forward(x[rows].double(), w.to(torch.float64), want_stats=False).y
        assert ffn.relative_error(y[rows], truth) < 1e-2


@torch.no_grad()
def test_a_layer_plans_itself_and_stays_right() -> None:
    """Few tokens by the first batch, many once it has seen 4096."""
    inputs = cases.make("skew29", 8192, dtype=bf16, device="cuda")
    layer = layer_of(inputs, None)
    first = layer(inputs.x[:3000])
    assert layer.plan is not None and layer.plan.is_dense and layer.plan.few_tokens > 0
    y = layer(inputs.x)  # plans, then runs by the plan
    assert layer.plan.runs_split(8192, captured=False) and 0 < len(layer.plan.hot) < 5632
    ffn.check(inputs.x, inputs, True, dense(inputs), y)
    assert ffn.relative_error(layer(inputs.x[:3000]), first.double()) < 1e-2
    assert_within_the_law(layer(inputs.x[:8]), inputs.x[:8], layer._weights())


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_wide_models(dtype: torch.dtype) -> None:
    """The shape of a 70B model, with fewer neurons: a thread must not run out of registers."""
    inputs = cases.make("skew29", 2048, 8192, 4096, dtype=dtype, device="cuda")
    with_statistics, _ = sparse(inputs, plan_for(inputs), return_stats=True)  # the split in fp32, too
    ffn.check(inputs.x, inputs, True, dense(inputs), with_statistics)


def test_many_tokens_in_fp32_run_densely() -> None:
    """The cold gate without tensor cores takes longer than all of the dense layer."""
    inputs = cases.make("skew29", 4096, 512, 2048, dtype=f32, device="cuda")
    assert torch.equal(sparse(inputs, plan_for(inputs)), sparse(inputs, dense_plan(2048)))
