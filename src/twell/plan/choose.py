"""Choose a layer's plan: which neurons are hot, how many active neurons make a token heavy, or that it runs densely.

A plan follows from how often each neuron fires and from what things cost on a GPU, in units of one element of a large
GEMM: one token, one neuron, one projection. A dense gated FFN of F neurons costs 3 F a token. In the split a token pays

    hot neuron        2 + down               gate, up and down densely
    cold neuron       gate + p * gather      its gate, and two gathered rows whenever it fires (with frequency p)
    heavy token       3 * heavy * C          gate, up and down of the C cold neurons, by GEMMs over listed rows
    any token         token                  its lists, x and y once more; + hot if any neuron is hot: y another time

and a batch pays ``batch`` once. (A plain FFN has no up projection: 1 + down, gate + p * gather / 2, 2 * heavy * C.) The
cheapest hot set is chosen among those that leave whole tiles of cold neurons; a token is heavy if gathering would cost
more than the GEMMs. A plan changes time, never a result.

Training counts forward and backward: dense costs 3 * dense * F a token, a hot neuron 3 * dense - 1 + down; the cold
gate has no dense backward; a pair gathers seven rows instead of two. The forward keeps what it computed, so a smaller
hot set and shorter lists are worth a little time. The plan assumes a longer tail than was counted: when the text
changes, too small a hot set costs more than too large a one.

A few tokens, as in generation, are bound by the bytes of the weights, and run otherwise (gpu/decode/few.py): all of the
gate is read, and of up and down the U neurons that fire for any of the M tokens; dense reads 3 F rows. This pays if

    start + gate * F + 2 * gather * U(M)  <  3 F / 1.05        U(M) = sum over neurons of 1 - (1 - p)^M

Between few and many tokens the same holds for tiles of 64 tokens, with U(64) (gpu/prefill/union.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twell.plan.costs import Costs, Fp8Costs
from twell.plan.plan import MAX_FEW_TOKENS, MIN_TOKENS, Plan, dense_plan

_TILE = 256  # cold neurons of one tile of the gate kernel
_MIN_GAIN = 1.05  # speedup over dense that every sparse way must promise
# More in training, since counts do not show heavy tokens: when later text had twice the cold activations, a promised
# 1.17x was 0.89x (H200).
_MIN_GAIN_TRAINING = 1.25
_STEP = 16  # cap and first are multiples: Triton recompiles a kernel when an argument stops being a multiple of 16
_LATER_TAIL = 1.4  # training plans for this multiple of the counted tail, since text changes
_MEMORY_MARGIN = 0.035  # share of the time that training gives for a smaller hot set: it keeps z and u of hot neurons
# Fewer tokens leave SMs idle in every kernel, and in eager calls the whole GPU while the host launches: 0.08 ms a
# forward, half as much again inside a model, where the code is cold in the caches; 0.8 ms a forward and backward.
# Inference, then training; eager, then captured.
_MIN_TOKENS, _MIN_TOKENS_CAPTURED = MIN_TOKENS, 2048
_MIN_TOKENS_TRAINING, _MIN_TOKENS_TRAINING_CAPTURED = 4096, 4096
# {tokens at once: (fixed cost, a gathered row)}, in rows of a dense FFN's weights that take as long to read. Fitted to
# an H200's times of 4 to 3800 neurons of 5632 (D 2048), as CUDA graphs. Where hopper.py's first kernel cannot run, up
# to 16 tokens take longer: 8 tokens by 2000 rows.
FEW_COSTS = {
    1: (550.0, 2.2),
    2: (550.0, 2.2),
    4: (650.0, 2.0),
    8: (900.0, 2.0),
    16: (1400.0, 2.0),
    32: (3000.0, 1.2),
    MAX_FEW_TOKENS: (4300.0, 0.85),
}
_FEW_DENSE = {32: 0.88, MAX_FEW_TOKENS: 0.78}  # factor on dense where gate and up are one GEMM: gpu/dense.py
# The same with FP8 weights, in rows of the dense layer of gpu/dense_fp8.py. From an H200's times of skew29, as CUDA
# graphs; one token also with 1000 and 2800 neurons (9.5 and 15.4 us, dense 23.1). One token costs less than the gate's
# rows.
_FEW_COSTS_FP8 = {
    1: (-450.0, 1.15),
    2: (1460.0, 2.2),
    4: (2700.0, 2.0),
    8: (2900.0, 2.0),
    16: (5400.0, 2.0),
    32: (7500.0, 1.2),
    MAX_FEW_TOKENS: (12300.0, 0.85),
}
# The same for gpu/prefill/union.py: (fixed cost beside the gate, a neuron that fires for any of a tile of tokens).
TILE_TOKENS = 64
_UNION_COSTS = {128: (6050.0, 0.85), 256: (5200.0, 1.2), 512: (2750.0, 1.95), 1024: (1950.0, 2.2), 4095: (1200.0, 2.2)}
FEW_GATE, _FEW_GATE_MANY = 0.95, 1.45  # a row of the gate; of F 14336 (D 4096), where an SM runs two programs
_MANY_NEURONS = 64 * 132  # above which an H200's SMs run two programs


def choose_plan(counts: Tensor, tokens: int, costs: Costs, *, width: int = 2048, gated: bool = True) -> Plan:
    """The plan for neurons that fired ``counts`` [F] times in ``tokens`` tokens; ``width``: D.

    >>> counts = torch.tensor([900] * 256 + [3] * 1792)  # of 1000 tokens: some neurons fire nearly always, most hardly
    >>> costs = Costs(gate=1.0, down=1.0, gather=150.0, heavy=1.4, token=0.0, hot=100.0, batch=1e7)
    >>> choose_plan(counts, 1000, costs)
    Plan(256 of 2048 neurons hot, tokens long or heavy above 48, from 3734 tokens on, predicted ...)
    >>> choose_plan(torch.full((2048,), 500), 1000, costs)
    Plan(dense, 2048 neurons)
    """
    F = len(counts)
    if tokens < 1:
        raise ValueError("a plan needs the counts of at least one token")
    frequency, order = (counts.double().cpu() / tokens).sort(descending=True, stable=True)
    if F and not 0 <= float(frequency[-1]) <= float(frequency[0]) <= 1:
        raise ValueError(f"counts of {tokens} tokens must be 0 to {tokens}, got {counts.min()} to {counts.max()}")
    projections, gather = (3, costs.gather) if gated else (2, costs.gather / 2)
    tail = frequency.sum() - torch.cat([frequency.new_zeros(1), frequency.cumsum(0)])  # [H]: pairs left, per token
    n_hot = torch.tensor([0, *range(F % _TILE or _TILE, F, _TILE)], device="cpu")  # the rest is whole tiles
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
    if training:  # it keeps the lists; the few tokens above cap have lists of their own
        cap = _STEP * math.ceil(min(cap, 6 + 4 * float(tail[H])) / _STEP)
    captured = _MIN_TOKENS_CAPTURED if union_tokens < _MIN_TOKENS_CAPTURED else _MIN_TOKENS  # below it, by tiles
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
    """The share of a plan's promised gain that is left on another text: 1 or less, below 0 if slower than dense.
    ``pairs``: active cold neurons per token; ``heavy``: heavy tokens per token.

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
    """U: the expected number of neurons that fire for any of so many tokens, if tokens are independent."""
    return float((1 - (1 - frequency.clamp(max=1)) ** tokens).sum())


def few_tokens_for(frequency: Tensor, tokens: int, *, gated: bool, factor: float = 1.0, fp8: bool = False) -> int:
    """The largest batch up to which gpu/decode/few.py, or few_fp8.py, pays; 0: none. ``frequency`` [F]: of neurons.

    At most the ``tokens`` that were seen: they tell nothing about neurons that fire more rarely.
    """
    F, others = len(frequency), 2 if gated else 1  # others: projections beside the gate
    gate = FEW_GATE if F <= _MANY_NEURONS else _FEW_GATE_MANY
    is_fused = gated and not fp8 and _MANY_NEURONS // 2 <= F <= _MANY_NEURONS
    few_tokens = 0
    for M, (start, gather) in (_FEW_COSTS_FP8 if fp8 else FEW_COSTS).items():
        cost = factor * (start + gate * F + others * gather * union_of(frequency, M))
        dense = (1 + others) * F * (_FEW_DENSE.get(M, 1.0) if is_fused else 1.0)
        if tokens < M or cost > dense / _MIN_GAIN:
            break
        few_tokens = M
    return few_tokens


def union_tokens_for(frequency: Tensor, tokens: int, width: int, *, gated: bool, factor: float = 1.0) -> int:
    """The largest batch, above few tokens, up to which gpu/prefill/union.py pays; 0: none."""
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
