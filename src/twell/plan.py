"""The plan of a layer: which neurons are hot, how many active neurons make a token heavy, or that it runs densely.

A plan follows from how often each neuron fires and from what things cost on a GPU. Costs are counted in units of one
element of a large GEMM: one token, one neuron, one projection. A gated FFN of F neurons costs 3 F a token densely. In
the three-part split a token pays

    hot neuron        2 + down               gate, up and down densely
    cold neuron       gate + p * gather      its gate, and two gathered rows whenever it fires (with frequency p)
    heavy token       3 * heavy * C          gate, up and down of the C cold neurons densely, by GEMMs over listed rows
    any token         token                  its lists, x and y once more; + hot if any neuron is: y another time

and a batch pays ``batch`` once. (A plain FFN has no up projection: 1 + down, gate + p * gather / 2, 2 * heavy * C.) The
hot set that costs least is chosen among those that leave whole tiles of cold neurons; a token is heavy where gathering
would cost more than the GEMMs. A plan changes time, never a result.

Training counts forward and backward: densely 3 * dense * F a token, a hot neuron 3 * dense - 1 + down; the cold gate
has no dense backward, a pair gathers seven rows instead of two. It keeps what it computed, so a smaller hot set and
shorter lists are worth a little time; and it plans for a longer tail than was counted, since too small a hot set costs
more than too large a one when other text comes.

A few tokens, as in generation, are bound by the bytes of the weights, and split otherwise (gpu/decode/few.py): all of
the gate is read, of up and down the U neurons that fire for any of M tokens, densely 3 F rows. That pays where

    start + gate * F + 2 * gather * U(M)  <  3 F / 1.05        U(M) = sum over neurons of 1 - (1 - p)^M

Between few and many tokens it is the same with tiles of 64 tokens, U(64) (gpu/prefill/union.py).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell import tuned


class Costs(NamedTuple):
    """What a GPU takes, in elements of a large dense FFN: 5.8 ps on an H200 at D 2048, bf16."""

    gate: float  # an element of the cold gate
    down: float  # an element of the hot down projection
    gather: float  # the two gathered rows of one active (token, neuron) pair
    heavy: float  # an element of a GEMM over listed rows
    token: float  # what a token costs besides
    hot: float  # what it costs more once any neuron is hot
    batch: float  # what a batch costs besides, at D 2048
    dense: float = 1.0  # an element of a projection run densely; in training with its backward
    few: float = 1.0  # factor of what few tokens cost, in rows of weights read


# Fitted to an H200's times of 8 layers of a trained model and of synthetic workloads, 1024 to 131072 tokens.
_COSTS: dict[int, Costs] = {
    90: Costs(gate=0.93, down=0.71, gather=147.0, heavy=1.5, token=650.0, hot=440.0, batch=1.2e7),
}


class Fp8Costs(Costs):
    """Of FP8 weights, in elements of a dense FP8 FFN, 3.5 ps: few tokens have a table of their own, and there are no
    tiles of tokens."""


# From an H200's times of parts, 16384 tokens of skew29.
_FP8_COSTS: dict[int, Costs] = {
    90: Fp8Costs(gate=0.83, down=1.17, gather=210.0, heavy=2.5, token=1200.0, hot=730.0, batch=1e7),
}
# Fitted to an H200's forward and backward with L1, 16384 tokens of skew29, skew100, iid29 and a trained model's layers;
# dense: compiled.
_TRAINING_COSTS: dict[int, Costs] = {
    90: Costs(gate=0.93, down=0.25, gather=690.0, heavy=4.9, token=4600.0, hot=1000.0, batch=3.6e7, dense=2.95),
}
_TILE = 256  # cold neurons of one tile of the gate kernel
_MIN_GAIN = 1.05  # every sparse way must promise this much over dense
# More in training: counts do not tell of heavy tokens. Where later text had twice the cold activations, 1.17x promised
# were 0.89x (H200).
_MIN_GAIN_TRAINING = 1.25
_STEP = 16  # of cap and first: kernels are compiled anew where a number stops being a multiple of it
_LATER_TAIL = 1.4  # in training: the tail that is planned for, in terms of the one counted, since text changes
_MEMORY_MARGIN = 0.035  # time that training gives for a smaller hot set: it keeps z and u of hot neurons
# Fewer tokens leave parts of the GPU idle in every kernel, and in eager calls all of it while the host launches them:
# 0.08 ms a forward, half as much again inside a model, where its code is cold; 0.8 ms a forward and backward. Forward,
# then training; the second ones for calls that are captured.
_MIN_TOKENS, _MIN_TOKENS_CAPTURED = 3072, 2048
_MIN_TOKENS_TRAINING, _MIN_TOKENS_TRAINING_CAPTURED = 4096, 4096
MAX_FEW_TOKENS = 64  # that gpu/decode/few.py takes at once
# In rows of a dense FFN's weights that take as long to read, by tokens at once: what there is to do besides, and a
# gathered row. Fitted to an H200's times of 4 to 3800 neurons of 5632 (D 2048), as CUDA graphs. Where hopper.py's first
# kernel cannot run, up to 16 tokens take longer: at 8 by 2000 rows.
_FEW_COSTS = {
    1: (550.0, 2.2),
    2: (550.0, 2.2),
    4: (650.0, 2.0),
    8: (900.0, 2.0),
    16: (1400.0, 2.0),
    32: (3000.0, 1.2),
    MAX_FEW_TOKENS: (4300.0, 0.85),
}
_FEW_DENSE = {32: 0.88, MAX_FEW_TOKENS: 0.78}  # of a compiled dense FFN's time where gate and up are one GEMM: dense.py
# Of FP8 weights, in rows of the dense layer of gpu/dense_fp8.py. From an H200's times of skew29, as CUDA graphs; of one
# token also of 1000 and 2800 neurons (9.5 and 15.4 us, densely 23.1). With few it takes less than the gate's rows.
_FEW_COSTS_FP8 = {
    1: (-450.0, 1.15),
    2: (1460.0, 2.2),
    4: (2700.0, 2.0),
    8: (2900.0, 2.0),
    16: (5400.0, 2.0),
    32: (7500.0, 1.2),
    MAX_FEW_TOKENS: (12300.0, 0.85),
}
# Likewise, of gpu/prefill/union.py: beside the gate, and a neuron that fires for any of a tile of tokens.
TILE_TOKENS = 64
_UNION_COSTS = {128: (6050.0, 0.85), 256: (5200.0, 1.2), 512: (2750.0, 1.95), 1024: (1950.0, 2.2), 4095: (1200.0, 2.2)}
_FEW_GATE, _FEW_GATE_MANY = 0.95, 1.45  # a row of the gate; of F 14336 (D 4096), where processors have two programs
_MANY_NEURONS = 64 * 132  # on an H200, above which they do


_UNKNOWN = Costs(gate=1e9, down=1e9, gather=1e9, heavy=1e9, token=1e9, hot=1e9, batch=1e9, few=1e9)  # all is dense
_PROCESSORS, _BANDWIDTH = 132, 4.8  # of the H200 that was measured; TB/s
_LEAST_BANDWIDTH = 2.0  # of GPUs with compute capability 9.0: taken where torch does not tell one's


class Scale(NamedTuple):
    """What costs of a GPU depend on, relative to the H200 that was measured."""

    capability: int  # 10 * major + minor
    processors: float = 1.0
    bandwidth: float = 1.0

    @property
    def is_measured(self) -> bool:
        return self.processors == self.bandwidth == 1.0


def scale_of(device: torch.device) -> Scale:
    """A CPU counts as the H200: what is planned there is what that GPU would do."""
    if device.type != "cuda":
        return Scale(90)
    facts: Any = torch.cuda.get_device_properties(device)
    if "H200" in facts.name and facts.multi_processor_count == _PROCESSORS:
        return Scale(10 * facts.major + facts.minor)
    clock, bits = getattr(facts, "memory_clock_rate", 0), getattr(facts, "memory_bus_width", 0)  # kHz; two a clock
    bandwidth = 2e3 * clock * bits / 8 / 1e12 or _LEAST_BANDWIDTH
    relative = facts.multi_processor_count / _PROCESSORS, bandwidth / _BANDWIDTH
    return Scale(10 * facts.major + facts.minor, *relative)


def costs_for(device: torch.device, *, training: bool = False, fp8: bool = False) -> Costs:
    """What ``twell tune`` has measured on the device; else the measured costs of an H200, scaled to it; of a compute
    capability without any such that all runs densely. ``fp8``: of FP8 weights, which ``twell tune`` does not measure.

    The scaling is a guess by what bounds each cost: a GEMM takes as much longer as there are fewer multiprocessors,
    gathers and what tokens cost besides as there is less bandwidth, and a batch's start always takes the same time.
    """
    own, _ = _tuned(device)
    if own is not None and not fp8:
        return Costs(**own["training" if training else "inference"])
    of = scale_of(device)
    table = _TRAINING_COSTS if training else _FP8_COSTS if fp8 else _COSTS
    known = table.get(of.capability, _UNKNOWN)
    if of.is_measured or known is _UNKNOWN:
        return known
    bytes_bound = of.processors / of.bandwidth  # the unit of all costs is an element of a GEMM
    return known._replace(
        gather=known.gather * bytes_bound,
        token=known.token * bytes_bound,
        hot=known.hot * bytes_bound,
        batch=known.batch * of.processors,
        few=known.few * max(1.0, of.bandwidth),  # its start takes the same time, in which more rows are read
    )


def _tuned(device: torch.device) -> tuple[dict[str, dict[str, float]] | None, str]:
    return tuned.read(tuned.path_for(device), Costs._fields) if device.type == "cuda" else (None, "")


def costs_are(device: torch.device) -> str:
    """Where the costs of a device come from, in words."""
    of, (own, why) = scale_of(device), _tuned(device)
    if own is not None:
        return why
    if of.capability not in _COSTS:
        return f"none, so layers run densely: no GPU with sm_{of.capability} was measured, and {why}; it takes a minute"
    if of.is_measured:
        return f"measured costs of sm_{of.capability}"
    return (
        f"an H200's costs, scaled to {of.processors:.0%} of its multiprocessors and {of.bandwidth:.0%} of its bandwidth"
        f": a guess, and {why}; it takes a minute"
    )


class PlanTensors(NamedTuple):
    """A plan as operations take it: on the layer's device, with nothing on the host to read.

    ``sizes`` and ``tokens`` hold numbers as a size of theirs, [0, number], and no memory. A compiler treats sizes as
    symbols, so a new plan compiles nothing anew; each symbol costs compiled code a call of Python, so several numbers
    are packed into one. Large offsets keep them from being equal to other sizes, which would become one symbol."""

    order: Tensor  # int32 [F]: the neurons, hot ones first
    places: Tensor  # int32 [F]: of a cold neuron among the cold ones; -1 for hot ones
    sizes: Tensor  # H, cap, first, of 18 bits each
    tokens: Tensor  # see ``Plan.tokens``: of 7, 14 and 22 bits


_SIZE, _TOKENS, _UNION = 1 << 18, 1 << 22, 1 << 14  # which numbers are below; more tokens are run as so many are
_OFFSET_SIZES, _OFFSET_TOKENS = 1 << 60, 1 << 61


def as_size(number: int, device: torch.device) -> Tensor:
    """A number, from 2 on, as the size of an empty tensor: compiled code takes it as a symbol."""
    t = torch.empty(0, 1, dtype=torch.int8, device=device).expand(0, number)  # of no elements: it may be copied
    if not torch.compiler.is_compiling():  # symbols from the first time on: else layers would compile anew one by one
        torch._dynamo.maybe_mark_dynamic(t, 1)
    return t


def sizes_of(plan: PlanTensors) -> tuple[int, int, int]:
    """H, cap, first."""
    packed = plan.sizes.shape[1] - _OFFSET_SIZES
    return packed // (_SIZE * _SIZE), packed // _SIZE % _SIZE, packed % _SIZE


def tokens_of(plan: PlanTensors) -> tuple[int, int, int]:
    """See ``Plan.tokens``."""
    packed = plan.tokens.shape[1] - _OFFSET_TOKENS
    return packed // (_UNION * _TOKENS), packed // _TOKENS % _UNION, packed % _TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How one layer runs on a GPU. Changes time, never a result.

    Calls that are captured in a CUDA graph have thresholds of their own: a graph replays without the host, which
    otherwise takes longer than a small batch does on the GPU.
    """

    n_neurons: int
    hot: Tensor  # int64 [H], most frequent first; all F neurons where batches run densely
    cap: int  # a token with more active cold neurons is heavy, unless there are few of them
    first: int = 32  # the tail starts with tokens that have more than this
    min_tokens: int = _MIN_TOKENS  # a smaller batch runs densely
    few_tokens: int = 0  # but not one of at most so many tokens
    union_tokens: int = 0  # nor of so many: by the neurons that fire for any of a tile of tokens
    min_tokens_captured: int | None = None  # in a CUDA graph; None: the same
    few_tokens_captured: int | None = None
    predicted: float | None = None  # speedup over dense
    mean_active: float | None = None  # neurons that a token fires, where it was counted
    tail: float | None = None  # cold ones of them; for plans that inference may replace: see drift.py

    def __post_init__(self) -> None:
        """A neuron that is hot twice, or not there, would silently change what the layer computes."""
        object.__setattr__(self, "_on", {})
        hot = self.hot.unique()
        inside = len(hot) == 0 or (int(hot[0]) >= 0 and int(hot[-1]) < self.n_neurons)
        numbers = (self.cap, self.first, *self.tokens(captured=False), *self.tokens(captured=True))
        if len(hot) != len(self.hot) or not inside or min(numbers) < 0:
            raise ValueError(
                f"a plan needs different hot neurons of 0 to {self.n_neurons - 1} and numbers of at least 0, got "
                f"{len(self.hot)} hot neurons, {len(hot)} of them different, cap {self.cap}, first {self.first}, "
                f"min_tokens {self.min_tokens}, few_tokens {self.few_tokens}"
            )
        if max(self.few_tokens, self.few_tokens_captured or 0) > MAX_FEW_TOKENS:
            raise ValueError(f"few_tokens must be at most {MAX_FEW_TOKENS}, got {self.few_tokens}")
        if not 0 <= self.union_tokens < _UNION:
            raise ValueError(f"union_tokens must be 0 to {_UNION - 1}, got {self.union_tokens}")
        if self.n_neurons % 2 == 0 and len(hot) % 2:
            raise ValueError(f"a plan needs an even number of hot neurons, since kernels write pairs; got {len(hot)}")
        if max(self.n_neurons, self.cap, self.first) >= 1 << 18:
            raise ValueError(f"a plan is for less than {1 << 18:,} neurons, got {self.n_neurons:,}")

    @property
    def is_dense(self) -> bool:
        """Of batches that are not few tokens."""
        return len(self.hot) == self.n_neurons

    def tokens(self, *, captured: bool) -> tuple[int, int, int]:
        """Sparse: as few tokens up to the first number, by tiles up to the second, in parts from the last on."""
        few, least = self.few_tokens, self.min_tokens
        if captured:
            few = few if self.few_tokens_captured is None else self.few_tokens_captured
            least = least if self.min_tokens_captured is None else self.min_tokens_captured
        return few, max(few, self.union_tokens), least

    def in_parts(self, tokens: int, *, captured: bool) -> bool:
        """Whether a batch of so many tokens runs in three parts."""
        return not self.is_dense and tokens >= self.tokens(captured=captured)[2]

    def __repr__(self) -> str:
        few, most, least = self.tokens(captured=False)
        few_captured, _, least_captured = self.tokens(captured=True)
        of_few = f", sparse up to {few} tokens" if few else ""
        of_few += f" ({few_captured} in graphs)" if few_captured != few else ""
        of_few += f", by tiles up to {most}" if most > few else ""
        if self.is_dense:
            return f"Plan(dense, {self.n_neurons} neurons{of_few})"
        predicted = "" if self.predicted is None else f", predicted {self.predicted:.2f}x"
        in_graphs = f" ({least_captured} in graphs)" if least_captured != least else ""
        return (
            f"Plan({len(self.hot)} of {self.n_neurons} neurons hot, tokens heavy above {self.cap}, "
            f"from {least} tokens on{in_graphs}{predicted}{of_few})"
        )

    def order(self) -> Tensor:
        """int64 [F] on the CPU: the hot neurons, then the cold ones."""
        cold = torch.ones(self.n_neurons, dtype=torch.bool, device="cpu")  # whatever the default device is
        cold[self.hot.cpu()] = False
        return torch.cat([self.hot.cpu(), cold.nonzero()[:, 0]])

    def on(self, device: torch.device, *, captured: bool = False) -> PlanTensors:
        """What operations take, kept for the next time. Made outside of graphs only: they would own it."""
        kept: dict[tuple[torch.device, bool], PlanTensors] = self.__dict__["_on"]
        tensors = kept.get((device, captured))
        if tensors is None:
            tensors = self._make(device, captured)
            kept[device, captured] = tensors
        return tensors

    def _make(self, device: torch.device, captured: bool) -> PlanTensors:
        other = self.__dict__["_on"].get((device, not captured))
        few, most, least = self.tokens(captured=captured)
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be kept
            packed = (len(self.hot) * _SIZE + self.cap) * _SIZE + self.first
            sizes = as_size(packed + _OFFSET_SIZES, device)
            tokens = as_size((few * _UNION + most) * _TOKENS + min(least, _TOKENS - 1) + _OFFSET_TOKENS, device)
            if other is not None:
                return PlanTensors(other.order, other.places, sizes, tokens)
            order = self.order()
            places = torch.full_like(order, -1)
            places[order[len(self.hot) :]] = torch.arange(self.n_neurons - len(self.hot), device="cpu")
            return PlanTensors(order.int().to(device), places.int().to(device), sizes, tokens)

    def __reduce__(self) -> Any:
        """Copies and pickles make tensors of their own: they may be for another device."""
        return Plan.from_state_dict, (self.state_dict(),)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and one tensor, for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Plan:
        return cls(**state)


def dense_plan(n_neurons: int, few_tokens: int = 0, mean_active: float | None = None, union_tokens: int = 0) -> Plan:
    """Dense but for batches of so many tokens."""
    hot, given = torch.arange(n_neurons, device="cpu"), {"few_tokens": few_tokens, "union_tokens": union_tokens}
    return Plan(n_neurons=n_neurons, hot=hot, cap=0, predicted=1.0, mean_active=mean_active, **given)


def choose_plan(counts: Tensor, tokens: int, costs: Costs, *, width: int = 2048, gated: bool = True) -> Plan:
    """The plan for neurons that fired ``counts`` [F] times in ``tokens`` tokens; ``width``: D.

    >>> counts = torch.tensor([900] * 256 + [3] * 1792)  # of 1000 tokens: some neurons fire nearly always, most hardly
    >>> costs = Costs(gate=1.0, down=1.0, gather=150.0, heavy=1.4, token=0.0, hot=100.0, batch=1e7)
    >>> choose_plan(counts, 1000, costs)
    Plan(256 of 2048 neurons hot, tokens heavy above 48, from 3734 tokens on, predicted ...)
    >>> choose_plan(torch.full((2048,), 500), 1000, costs)
    Plan(dense, 2048 neurons)
    """
    F = len(counts)
    if tokens < 1:
        raise ValueError("a plan needs the counts of at least one token")
    frequency, order = (counts.double().cpu() / tokens).sort(descending=True, stable=True)
    projections, gather = (3, costs.gather) if gated else (2, costs.gather / 2)
    tail = frequency.sum() - torch.cat([frequency.new_zeros(1), frequency.cumsum(0)])  # [H]: pairs a token left
    n_hot = torch.tensor([0, *range(F % _TILE or _TILE, F, _TILE)], device="cpu")  # those that leave whole tiles
    cost = (projections * costs.dense - 1 + costs.down) * n_hot + costs.hot * (n_hot > 0)
    cost = cost + costs.gate * (F - n_hot) + gather * tail[n_hot] + costs.token
    training = costs.dense > 1
    later = cost + (_LATER_TAIL - 1 if training else 0) * gather * tail[n_hot]
    near = later <= later.min() * (1 + (_MEMORY_MARGIN if training else 0))
    best = int(near.nonzero()[0])  # the smallest of them
    dense = projections * costs.dense * F
    H, predicted = int(n_hot[best]), dense / float(cost[best])
    fp8 = isinstance(costs, Fp8Costs)
    few_tokens = few_tokens_for(frequency, tokens, gated=gated, factor=costs.few, fp8=fp8)
    union_tokens = 0 if fp8 else union_tokens_for(frequency, tokens, width, gated=gated, factor=costs.few)
    if predicted < (_MIN_GAIN_TRAINING if training else _MIN_GAIN):
        return dense_plan(F, few_tokens, float(frequency.sum()), union_tokens)
    cap = projections * costs.heavy * (F - H) / gather
    if training:  # which keeps the lists; the few tokens beyond have lists of their own
        cap = _STEP * math.ceil(min(cap, 6 + 4 * float(tail[H])) / _STEP)
    captured = _MIN_TOKENS_CAPTURED if union_tokens < _MIN_TOKENS_CAPTURED else _MIN_TOKENS  # up to there by tiles
    pays_from = int(costs.batch * 2048 / width / (dense - float(cost[best])))
    return Plan(
        n_neurons=F,
        hot=order[:H],
        cap=max(_STEP, _rounded(cap)),
        first=_rounded(8 + 2 * float(tail[H])),
        min_tokens=max(_MIN_TOKENS_TRAINING if training else _MIN_TOKENS, pays_from),
        min_tokens_captured=max(_MIN_TOKENS_TRAINING_CAPTURED if training else captured, pays_from),
        few_tokens=few_tokens,
        union_tokens=union_tokens,
        predicted=predicted,
        mean_active=float(frequency.sum()),
        tail=None if training else float(tail[H]),
    )


def gain_left(plan: Plan, costs: Costs, pairs: float, heavy: float, *, gated: bool) -> float:
    """What a text leaves of the gain that a plan promised for another: 1, less, or below 0 where it is slower than
    dense. ``pairs``: active cold neurons a token; ``heavy``: heavy tokens a token.

    >>> counts = torch.tensor([900] * 256 + [3] * 1792)
    >>> costs = Costs(gate=1.0, down=1.0, gather=150.0, heavy=1.4, token=0.0, hot=100.0, batch=1e7)
    >>> plan = choose_plan(counts, 1000, costs)
    >>> [round(gain_left(plan, costs, plan.tail + more, 0.0, gated=True), 2) for more in (0, 5, 20)]
    [1.0, 0.72, -0.12]
    """
    if plan.predicted is None or plan.tail is None or plan.predicted <= 1:
        return 1.0
    projections, gather = (3, costs.gather) if gated else (2, costs.gather / 2)
    promised = projections * costs.dense * plan.n_neurons * (1 - 1 / plan.predicted)
    lost = gather * (pairs - plan.tail) + projections * costs.heavy * (plan.n_neurons - len(plan.hot)) * heavy
    return 1 - lost / promised


def union_of(frequency: Tensor, tokens: int) -> float:
    """How many neurons fire for any of so many tokens, if they are independent of each other: U."""
    return float((1 - (1 - frequency.clamp(max=1)) ** tokens).sum())


def few_tokens_for(frequency: Tensor, tokens: int, *, gated: bool, factor: float = 1.0, fp8: bool = False) -> int:
    """The most tokens up to which every batch pays by gpu/decode/few.py, or few_fp8.py; 0: none. ``frequency`` [F] of
    neurons.

    Not more than the ``tokens`` that were seen: of neurons that wait for rarer ones nothing is known.
    """
    F, others = len(frequency), 2 if gated else 1  # projections beside the gate
    gate = _FEW_GATE if F <= _MANY_NEURONS else _FEW_GATE_MANY
    is_fused = gated and not fp8 and _MANY_NEURONS // 2 <= F <= _MANY_NEURONS
    few_tokens = 0
    for M, (start, gather) in (_FEW_COSTS_FP8 if fp8 else _FEW_COSTS).items():
        cost = factor * (start + gate * F + others * gather * union_of(frequency, M))
        dense = (1 + others) * F * (_FEW_DENSE.get(M, 1.0) if is_fused else 1.0)
        if tokens < M or cost > dense / _MIN_GAIN:
            break
        few_tokens = M
    return few_tokens


def union_tokens_for(frequency: Tensor, tokens: int, width: int, *, gated: bool, factor: float = 1.0) -> int:
    """The most tokens up to which every batch pays by gpu/prefill/union.py, from few tokens on; 0: none."""
    F, others, union_tokens = len(frequency), 2 if gated else 1, 0
    if tokens < TILE_TOKENS:
        return 0
    union = union_of(frequency, TILE_TOKENS)
    for M, (start, gather) in _UNION_COSTS.items():
        cost = factor * (start * max(1, 2048 / width) + F + others * gather * union)
        if cost > (1 + others) * F / _MIN_GAIN:
            break
        union_tokens = M
    return union_tokens


def _rounded(n: float) -> int:
    return _STEP * round(n / _STEP)
