"""The backward of heavy tokens against the reference, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl

from twell import reference
from twell.gpu.shared import lists
from twell.gpu.training import heavy_backward, heavy_backward_steps
from twell.gpu.training.heavy_backward import HeavyTiles, add_heavy_gradients_
from twell.gpu.training.weight_gradients import NeuronGradients
from twell.reference import Weights
from twell.saved import Turns

f16, f32 = torch.float16, torch.float32
ROUNDING = {f16: 2.0**-11, torch.bfloat16: 2.0**-8, f32: 2.0**-24}
N_LONG = 2  # more tokens of the second kind are heavy
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@pytest.fixture(autouse=True)
def room_for_few_long_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(lists, "rooms", lambda M: (M * 0 + N_LONG, M // 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    M: int = 40
    D: int = 48
    F: int = 72
    n_hot: int = 8
    dtype: torch.dtype = f32
    gated: bool = True
    squared: bool = False
    bias: bool = False
    l1: bool = True
    masked: bool = False
    first: tuple[int, ...] = (31, 3, 4, 17, 38)  # heavy tokens, in the order they came into the list
    over: tuple[int, ...] = (9, 20, 8)  # heavy, too, if more than N_LONG
    device: str = "cpu"

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


class Inputs:
    def __init__(self, case: Case) -> None:
        self.case = case
        M, D, F, gated = case.M, case.D, case.F, case.gated
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case.device, case.dtype)

        small = D**-0.5
        self.gate, self.up = normal(F, D) * small, normal(F, D) * small if gated else None
        self.down = normal(F, D) * small
        self.gate_bias = normal(F) * 0.3 if case.bias else None
        self.up_bias = normal(F) * 0.3 if case.bias and gated else None
        self.x, self.dy = normal(M, D), normal(M, D)
        self.dl1 = torch.tensor(0.4, dtype=case.dtype, device=case.device) if case.l1 else None
        self.mask = (torch.rand(M, generator=generator) < 0.6).to(case.device) if case.masked else None
        self.dx = normal(M, D)
        self.out = NeuronGradients(
            normal(F, D),
            normal(F, D) if gated else None,
            normal(F, D),
            normal(F) if case.bias else None,
            normal(F) if case.bias and gated else None,
        )
        order = torch.randperm(F, generator=generator).to(case.device)
        self.cold = order[case.n_hot :].sort().values  # int64 [C]

    def turns(self) -> Turns:
        """As the list kernel leaves them."""
        case = self.case
        counters = torch.tensor([len(case.first), len(case.over), 3, 0], dtype=torch.int32)
        entries, heavy = (torch.randint(-300, 300, (case.M,), dtype=torch.int32) for _ in range(2))
        heavy[: len(case.first)] = torch.tensor(case.first, dtype=torch.int32)
        heavy[case.M - len(case.over) :] = torch.tensor(case.over[::-1], dtype=torch.int32)
        early = torch.randint(-300, 300, (case.M // 8,), dtype=torch.int32)
        return Turns(*(t.to(case.device) for t in (counters, entries, heavy, early)))

    def heavy(self) -> Tensor:
        case = self.case
        return torch.tensor(
            sorted(case.first + (case.over if len(case.over) > N_LONG else ())), dtype=torch.int64, device=case.device
        )


def run(
    inputs: Inputs,
    *,
    wants: tuple[bool, ...] = (True,) * 6,
    turns: Turns | None = None,
    chunk: int | None = None,
    tiles: HeavyTiles | None = None,
    programs: int = 1,
) -> list[Tensor | None]:
    """dx, then ``NeuronGradients``."""
    i, case = inputs, inputs.case
    targets = [None if t is None or not wanted else t.clone() for t, wanted in zip((i.dx, *i.out), wants, strict=True)]
    add_heavy_gradients_(
        targets[0],
        NeuronGradients(*targets[1:]),
        i.dy,
        i.dl1,
        i.x,
        i.gate,
        i.up,
        i.down,
        i.gate_bias,
        i.up_bias,
        torch.cat([i.cold.new_zeros(case.n_hot), i.cold]).to(torch.int32),  # which hot ones are first is not read
        case.n_hot,
        inputs.turns() if turns is None else turns,
        i.mask,
        squared=case.squared,
        programs=programs,
        chunk=chunk,
        tiles=tiles,
    )
    return targets


def true(inputs: Inputs, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """The same in another dtype, from the reference's formulas."""
    i, tokens, cold = inputs, inputs.heavy(), inputs.cold

    def rows(t: Tensor | None, at: Tensor) -> Tensor | None:
        return None if t is None else t[at].to(dtype)

    x, dy = i.x[tokens].to(dtype), i.dy[tokens].to(dtype)
    gate, down = i.gate[cold].to(dtype), i.down[cold].to(dtype)
    w = Weights(gate, rows(i.up, cold), down.t(), rows(i.gate_bias, cold), rows(i.up_bias, cold), None)
    activation = "relu2" if i.case.squared else "relu"
    saved = reference.forward(x, w, activation)
    mask = None if i.mask is None else i.mask[tokens]
    dl1 = None if i.dl1 is None else i.dl1.to(dtype)
    got = reference.backward(dy, dl1, x, w, saved.gate, saved.up, activation, mask)
    g = got.weights
    parts = (got.x, g.gate, g.up, None if g.down is None else g.down.t(), g.gate_bias, g.up_bias)
    sums: list[Tensor | None] = []
    for n, (before, part) in enumerate(zip((i.dx, *i.out), parts, strict=True)):
        after = None if before is None else before.to(torch.float64)
        if after is not None and part is not None:
            after = after.index_add(0, cold if n else tokens, part.to(torch.float64))
        sums.append(after)
    return sums


def assert_right(got: list[Tensor | None], inputs: Inputs) -> None:
    for name, ours, truth in zip(("dx", *NeuronGradients._fields), got, true(inputs), strict=True):
        if ours is None:
            continue
        assert truth is not None
        error = float((ours.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-3))
        assert error <= (12 if inputs.case.dtype == f32 else 3) * ROUNDING[inputs.case.dtype], (name, error)


def assert_same(a: list[Tensor | None], b: list[Tensor | None]) -> None:
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@interpreted
@pytest.mark.parametrize("dtype", [f32, f16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True, "masked": True},
        {"squared": True, "bias": True, "n_hot": 0},
        {"squared": True, "masked": True, "l1": False},
        {"gated": False, "bias": True, "n_hot": 0, "masked": True},
        {"gated": False, "squared": True},
        {"gated": False, "l1": False, "n_hot": 5},  # C is no multiple of 16, nor of 2
        {"n_hot": 24, "D": 80, "F": 136},  # several tiles of everything
    ],
)
def test_gradients(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    inputs = Inputs(Case(dtype=dtype, **changes))
    turns = inputs.turns()
    before = [t.clone() for t in turns]
    assert_right(run(inputs, turns=turns), inputs)
    assert all(torch.equal(*pair) for pair in zip(turns, before, strict=True))  # the barrier's counter is 0 again


@interpreted
def test_other_rows_keep_their_bits() -> None:
    inputs = Inputs(Case(dtype=f16, bias=True))
    dx, *out = run(inputs)
    assert dx is not None
    others = torch.ones(inputs.case.M, dtype=torch.bool)
    others[inputs.heavy()] = False
    assert torch.equal(dx[others], inputs.dx[others])
    hot = torch.ones(inputs.case.F, dtype=torch.bool)
    hot[inputs.cold] = False
    assert_same([None if t is None else t[hot] for t in out], [None if t is None else t[hot] for t in inputs.out])


@interpreted
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("wanted", range(7))
def test_single_gradients_have_the_same_bits(wanted: int, gated: bool) -> None:
    inputs = Inputs(Case(bias=True, gated=gated))
    everything = run(inputs)
    wants = (False, *(True,) * 5) if wanted == 6 else tuple(n == wanted for n in range(6))
    got = run(inputs, wants=wants)
    assert_same(got, [t if wanted else None for t, wanted in zip(everything, wants, strict=True)])


@interpreted
@pytest.mark.parametrize(("first", "over"), [((), ()), ((), (9, 20)), ((), (9, 20, 8)), ((11,), (9, 20))])
def test_which_tokens_are_heavy(first: tuple[int, ...], over: tuple[int, ...]) -> None:
    """None; too few of the second kind; enough of them; only the first kind."""
    inputs = Inputs(Case(first=first, over=over))
    got = run(inputs)
    assert_right(got, inputs)
    if not len(inputs.heavy()):
        assert_same(got, [inputs.dx, *inputs.out])


@interpreted
def test_all_tokens_heavy() -> None:
    everyone = torch.randperm(40).tolist()
    inputs = Inputs(Case(first=tuple(everyone[:25]), over=tuple(everyone[25:])))
    assert_right(run(inputs), inputs)


@triton.jit
def sort_kernel(i_heavy, o_flags, o_tokens, n_first, n_heavy, M, BLOCK: tl.constexpr):
    heavy_backward_steps.sort_heavy(i_heavy, o_flags, o_tokens, n_first, n_heavy, M, BLOCK)


@interpreted
@pytest.mark.parametrize("programs", [1, 3, 7, 64])
def test_programs_sort_their_shares(programs: int) -> None:
    """Blocks are smaller than a share and than the list; there may be more programs than tokens."""
    tokens = torch.randperm(40).tolist()
    inputs = Inputs(Case(first=tuple(tokens[:20]), over=tuple(tokens[20:29])))
    flags, got = torch.full((40,), 9, dtype=torch.int32), torch.full((40,), -1, dtype=torch.int32)
    sort_kernel[(programs,)](inputs.turns().heavy, flags, got, 20, 29, 40, BLOCK=8)
    assert got[:29].tolist() == inputs.heavy().tolist() and (got[29:] == -1).all()


@interpreted
@pytest.mark.parametrize("chunk", [16, None])
def test_the_lists_order_changes_no_bit(chunk: int | None) -> None:
    case = Case(dtype=f16, bias=True, first=tuple(range(0, 40, 2)), over=(1, 5, 7, 9))
    expected = run(Inputs(case), chunk=chunk)
    for _ in range(3):
        mixed = [tuple(t[int(n)] for n in torch.randperm(len(t))) for t in (case.first, case.over)]
        assert_same(run(Inputs(case.replace(first=mixed[0], over=mixed[1])), chunk=chunk), expected)
    tokens = torch.randperm(24).tolist()  # in which of the two lists they are does not matter either
    all_ = case.first + case.over
    other = case.replace(first=tuple(all_[t] for t in tokens[:9]), over=tuple(all_[t] for t in tokens[9:]))
    assert_same(run(Inputs(other), chunk=chunk), expected)


@interpreted
@pytest.mark.parametrize("dtype", [f32, f16])
def test_more_tokens_than_a_chunk(dtype: torch.dtype) -> None:
    """16-bit gradients are rounded once per chunk, which must not show."""
    inputs = Inputs(Case(M=50, D=16, F=40, dtype=dtype, bias=True, first=tuple(range(50)), over=()))
    got = run(inputs, chunk=6)
    assert_right(got, inputs)
    assert_right(run(inputs, chunk=49), inputs)
    if dtype == f16:
        whole = run(inputs)
        for ours, once, truth in zip(got[1:], whole[1:], true(inputs)[1:], strict=True):
            assert ours is not None and once is not None and truth is not None
            assert (ours.double() - truth).norm() <= 1.05 * (once.double() - truth).norm()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_infinite_sum_stays_infinite_over_chunks() -> None:
    inputs = Inputs(Case(dtype=f16, first=tuple(range(12)), over=()))
    assert inputs.out.down is not None
    inputs.out.down[:] = 65504
    inputs.dy[:] = 8000
    _, _, _, down, *_ = run(inputs, chunk=4)
    assert down is not None and not down.isnan().any()


@interpreted
def test_a_token_with_nan() -> None:
    inputs = Inputs(Case(bias=True))
    clean, other = run(inputs), inputs.case.first[1]
    inputs.x[other, 5] = float("nan")
    dx, *out = run(inputs)
    assert dx is not None and clean[0] is not None
    keep = torch.arange(inputs.case.M) != other
    assert dx[other].isnan().all() and torch.equal(dx[keep], clean[0][keep])
    cold = inputs.cold
    for name, target, before in zip(NeuronGradients._fields, out, inputs.out, strict=True):
        assert target is not None and before is not None
        if name != "down" and not name.endswith("bias"):
            assert target[cold][:, 5].isnan().all()
        hot = torch.ones(inputs.case.F, dtype=torch.bool)
        hot[cold] = False
        assert target[cold].isnan().any() and torch.equal(target[hot], before[hot])


@interpreted
def test_a_second_backward_on_the_same_turns() -> None:
    inputs = Inputs(Case())
    turns = inputs.turns()
    assert_same(run(inputs, turns=turns), run(inputs, turns=turns))


@interpreted
def test_nothing_to_do() -> None:
    empty = Inputs(Case(M=0, first=(), over=()))
    assert_same(run(empty), [empty.dx, *empty.out])
    all_hot = Inputs(Case(n_hot=72))
    assert_same(run(all_hot), [all_hot.dx, *all_hot.out])
    assert run(Inputs(Case()), wants=(False,) * 6) == [None] * 6


@interpreted
def test_one_token() -> None:
    inputs = Inputs(Case(M=1, first=(0,), over=()))
    assert_right(run(inputs), inputs)


def test_chunks() -> None:
    """At most four roundings without rests; with rests, no more memory than needed."""
    bf16 = torch.bfloat16
    assert [heavy_backward._chunks(M, 2048, bf16) for M in (1, 2048, 8192)] == [
        (1, False),
        (2048, False),
        (2048, False),
    ]
    assert heavy_backward._chunks(16384, 2048, bf16) == (4096, False)
    assert heavy_backward._chunks(16388, 2048, bf16) == (2048, True)
    assert heavy_backward._chunks(131072, 2048, f32) == (2048, False)
    x, rests = torch.empty(131072, 2048, dtype=bf16, device="meta"), 3 * 5632 * 2048 + 2 * 5632
    assert heavy_backward._size_of_space(x, 5632, 2048, True) == 4 * 131072 + 3 * 2048 * 5632 + rests


@interpreted
def test_x_may_have_a_row_stride() -> None:
    inputs = Inputs(Case())
    expected = run(inputs)
    apart = torch.full((inputs.case.M, 64), float("nan"))
    apart[:, :48] = inputs.x
    inputs.x = apart[:, :48]
    assert_same(run(inputs), expected)


# ---------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def on_gpu(n_heavy: int, **changes: Any) -> Case:
    tokens = torch.randperm(4096)[:n_heavy].tolist()
    shape = {"M": 4096, "D": 512, "F": 1408, "n_hot": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return Case(first=tuple(tokens), over=(), bias=True, masked=True, **(shape | changes))


@pytest.mark.gpu
@pytest.mark.parametrize("n_heavy", [0, 1, 63, 300, 2048, 2049, 4096])
@pytest.mark.parametrize("changes", [{}, {"gated": False, "squared": True, "n_hot": 0}, {"dtype": f32}, {"dtype": f16}])
def test_many_programs(n_heavy: int, changes: dict[str, Any]) -> None:
    """As exact as the dense formulas in the same dtype, the same bits each time, and the counter is 0 again."""
    inputs = Inputs(on_gpu(n_heavy, **changes))
    turns = inputs.turns()
    before = [t.clone() for t in turns]
    got = run(inputs, turns=turns, programs=processors())
    for _ in range(20):
        assert_same(run(inputs, turns=turns, programs=processors()), got)
    assert all(torch.equal(*pair) for pair in zip(turns, before, strict=True))
    if n_heavy:
        for ours, dense, truth in zip(got, true(inputs, inputs.case.dtype), true(inputs), strict=True):
            if ours is not None and dense is not None and truth is not None:
                dense = dense.to(inputs.case.dtype).double()  # summed, then rounded once
                error, allowed = (ours.double() - truth).norm(), (dense - truth).norm()
                assert error <= 2 * allowed + 1e-6 * truth.norm()
    else:
        assert_same(got, [inputs.dx, *inputs.out])


@pytest.mark.gpu
def test_number_of_programs_changes_no_bit() -> None:
    inputs = Inputs(on_gpu(700))
    expected = run(inputs, programs=processors())
    for programs in (1, 2, processors() // 2):
        assert_same(run(inputs, programs=programs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n_heavy", [2000, 2048])
def test_many_chunks(n_heavy: int) -> None:
    """Eight roundings are as exact as one."""
    inputs = Inputs(on_gpu(n_heavy))
    got, once = run(inputs, chunk=256, programs=processors()), run(inputs, chunk=2048, programs=processors())
    for _ in range(5):
        assert_same(run(inputs, chunk=256, programs=processors()), got)
    for ours, other, truth in zip(got, once, true(inputs), strict=True):
        assert ours is not None and other is not None and truth is not None
        assert (ours.double() - truth).norm() <= 1.05 * (other.double() - truth).norm()


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    inputs = Inputs(on_gpu(300))
    turns = inputs.turns()
    expected = run(inputs, turns=turns, programs=processors())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(inputs, turns=turns, programs=processors())
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, expected)
