"""The meaning of every operation in plain PyTorch: what the fast paths are tested against and fall back to.

Legend: M tokens, D model width, F hidden width, H hot neurons. Weights in HF layout.

    r_MF = relu(x Wg^T + bg)     a = r, or r * r for relu2     (r is what the sparse formats store)
    u_MF = x Wu^T + bu           h = a * u; plain FFN: h = a
    y_MD = h Wd^T + bd           l1 = sum |h|

*Active* means r != 0, NaN included. relu2 squares r where it is used, so both activations share one
stored form and the gradient needs no square root.

Sums run in the dtype of the inputs for float32 and float64, and in float32 for 16-bit inputs.

An inactive neuron adds nothing to y, l1 or gradients, whatever its weights are: NaN in Wu or Wd reaches only tokens
for which its neuron is active. ``forward`` and ``backward`` guarantee that on CPU tensors. (A token with inf or NaN
in x is computed as in a dense FFN, where 0 * inf = NaN.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell.formats import SLOTS, TILE, TwELL

ACTIVATIONS: tuple[str, ...] = ("relu", "relu2")


class Weights(NamedTuple):
    """One FFN's weights. ``gate`` is the projection that carries the activation; a plain FFN has no ``up``."""

    gate: Tensor  # [F, D]
    up: Tensor | None  # [F, D]
    down: Tensor  # [D, F]
    gate_bias: Tensor | None = None  # [F]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [D]

    def to(self, dtype: torch.dtype) -> Weights:
        return Weights._make(None if w is None else w.to(dtype) for w in self)

    def states(self) -> list[tuple[int, int]]:
        """Address and version of each; tensors of inference mode have no version."""
        return [(0, -1) if t is None else (t.data_ptr(), -1 if t.is_inference() else t._version) for t in self]


class Forward(NamedTuple):
    """The output of a forward, its statistics, and the activations that a backward needs."""

    y: Tensor  # [M, D]
    l1_sum: Tensor  # scalar, accumulation dtype: sum of |h| over counted tokens
    counts: Tensor  # [F] int32: counted tokens for which each neuron was active
    gate: Tensor  # [M, F] r
    up: Tensor | None  # [M, F] u, needed only where r is active


class Gradients(NamedTuple):
    """Gradients of a forward's inputs, in the order of ``Weights`` after x."""

    x: Tensor
    weights: Weights


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over products of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_neuron_major(w_down: Tensor) -> bool:
    """Whether Wd [D, F] lies neuron by neuron in memory, as a contiguous [F, D] does."""
    return w_down.stride() == (1, w_down.shape[0])


def finite_rows(x: Tensor) -> Tensor:
    """bool [M]: rows without inf or NaN. Other rows run densely, so that 0 * inf = NaN as in a dense FFN."""
    return x.isfinite().all(1)


def activate(r: Tensor, activation: str) -> Tensor:
    """a(r) of a rectified pre-activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return r * r if activation == "relu2" else r


def slope(r: Tensor, activation: str) -> Tensor:
    """da/dz at rectified values, 0 where inactive. (r != 0 also holds for NaN, as in torch's relu.)"""
    active = (r != 0).to(r.dtype)
    return 2 * r * active if activation == "relu2" else active


# -- FP8 -------------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest e4m3
_FP8_LEAST = 1e-12  # a row's largest value counts as at least this, so that rows of zeros have a scale


class Fp8(NamedTuple):
    """Rows in e4m3, each with its own scale: row i is q[i] * scale[i]. A weight has one row per output."""

    q: Tensor  # float8_e4m3fn [n, k]
    scale: Tensor  # float32 [n]

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix of values, exact in float64."""
        return (self.q.to(dtype) * self.scale[:, None].to(dtype)).to(dtype)


def to_fp8(rows: Tensor) -> Fp8:
    """Scale each row so that its largest value becomes 448, then round to nearest even. A row with inf or NaN becomes
    NaN."""
    scale = rows.abs().amax(1).float().clamp(min=_FP8_LEAST) * (1 / FP8_MAX)  # not / 448: CUDA divides otherwise
    q = (rows.float() * scale.reciprocal()[:, None]).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return Fp8(q, scale)


def fp8_forward(x: Tensor, gate: Fp8, up: Fp8 | None, down: Fp8, activation: str = "relu") -> Tensor:
    """An FP8 FFN in float64: x is rounded row by row, as in a dense FP8 FFN; nothing else is rounded."""
    f64 = torch.float64
    w = Weights(gate.to(f64), None if up is None else up.to(f64), down.to(f64))
    return forward(to_fp8(x).to(f64), w, activation, want_stats=False).y


# -- Dense -----------------------------------------------------------------------------------------------


def forward(
    x: Tensor, w: Weights, activation: str = "relu", token_mask: Tensor | None = None, *, want_stats: bool = True
) -> Forward:
    """Dense forward of a gated or plain FFN with its statistics. ``token_mask`` bool [M]: tokens that count."""
    r = torch.relu(nnf.linear(x, w.gate, w.gate_bias))
    u = None if w.up is None else nnf.linear(x, w.up, w.up_bias)
    h = activate(r, activation)
    h = h if u is None else h * u
    y = nnf.linear(h, w.down, w.down_bias)
    if has_silent_nan(x, y):
        h = _without_silent(h, r, x)
        y = _weighted_sum(h, w.down.t(), w.down_bias).where(finite_rows(x)[:, None], y)
    l1_sum, counts = statistics(r, h, token_mask) if want_stats else no_statistics(x)
    return Forward(y, l1_sum, counts, r, u)


def has_silent_nan(x: Tensor, y: Tensor) -> bool:
    """Whether a token with finite x has a y that is not finite, on a CPU: an inactive neuron may have caused that, by
    0 * NaN or 0 * inf. (On a GPU the check would wait for the device.)"""
    if y.device.type != "cpu" or is_finite(y):
        return False
    return bool((finite_rows(x) & ~finite_rows(y)).any())


def is_finite(t: Tensor) -> bool:
    """No inf or NaN in t. One finite sum usually proves it."""
    t = t.detach()
    return math.isfinite(t.sum(dtype=sum_dtype(t.dtype)).item()) or bool(t.isfinite().all())  # sums may overflow


def _without_silent(h: Tensor, r: Tensor, x: Tensor) -> Tensor:
    """h with zeros at inactive neurons, except in tokens whose x is not finite."""
    return h.where((r != 0) | ~finite_rows(x)[:, None], 0)


def _weighted_sum(weight: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [M, F] @ table [F, D] + bias, where 0 * NaN and 0 * inf are 0."""
    is_odd = ~finite_rows(table)
    y = weight @ table.masked_fill(is_odd[:, None], 0)
    for j in is_odd.nonzero().flatten().tolist():
        column = weight[:, j, None]
        y = y + (column * table[j]).where(column != 0, 0)
    return y if bias is None else y + bias


def no_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """l1_sum and counts when they are not wanted: zero and an empty tensor."""
    return torch.zeros((), dtype=sum_dtype(x.dtype), device=x.device), x.new_zeros(0, dtype=torch.int32)


def statistics(r: Tensor, h: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """l1_sum and counts of dense r and h [M, F]."""
    row_l1, active = h.abs().sum(1, dtype=sum_dtype(h.dtype)), r != 0
    if token_mask is not None:
        row_l1 = row_l1.where(token_mask, 0)  # not a product: padding may hold NaN
        active = active & token_mask[:, None]
    return row_l1.sum(), active.sum(0, dtype=torch.int32)


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    r: Tensor,
    u: Tensor | None,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    needs: tuple[bool, ...] = (True,) * 7,
) -> Gradients:
    """The backward formulas, dense. ``needs``: which of x, then the six ``Weights``, get a gradient.

    dh = dy Wd + dl1 sign(h)    du = dh a    dz = dh u a'(r)    dx = du Wu + dz Wg
    dWu = du^T x    dWg = dz^T x    dWd = dy^T h    biases: sums over tokens
    Gradients that are not needed come back empty.
    """
    a, active = activate(r, activation), r != 0
    h = a if u is None else a * u
    if has_silent_nan(x, h):
        h = _without_silent(h, r, x)
    dh = dy @ w.down
    if dl1 is not None:
        dh = dh + l1_gradient(h, dl1, token_mask)
    # Selected, not multiplied by 0: dh overflows fp16 when a loss is scaled, and inf * 0 is NaN.
    du = None if u is None else (dh * a).where(active, 0)
    dz = ((dh if u is None else dh * u) * slope(r, activation)).where(active, 0)

    when = functools.partial(gradient_if, x)

    def dx() -> Tensor:
        parts = [(dz, w.gate)] if du is None or w.up is None else [(dz, w.gate), (du, w.up)]
        total = functools.reduce(torch.add, (part @ table for part, table in parts))
        if has_silent_nan(dz if du is None else dz + du, total):
            total = functools.reduce(torch.add, (_weighted_sum(part, table) for part, table in parts))
        return total

    return Gradients(
        when(needs[0], dx),
        Weights(
            gate=when(needs[1], lambda: dz.T @ x),
            up=None if du is None else when(needs[2], lambda: du.T @ x),
            down=when(needs[3], lambda: dy.T @ h),
            gate_bias=when(needs[4], lambda: dz.sum(0)),
            up_bias=None if du is None else when(needs[5], lambda: du.sum(0)),
            down_bias=when(needs[6], lambda: dy.sum(0)),
        ),
    )


def gradient_if(x: Tensor, needed: bool, gradient: Callable[[], Tensor]) -> Tensor:
    """The gradient if it is needed, else a new empty tensor (operations may not return aliases)."""
    return gradient() if needed else x.new_empty(0)


def l1_gradient(h: Tensor, dl1: Tensor, token_mask: Tensor | None) -> Tensor:
    """d l1_sum / dh, [M, F]: the sign of h at counted tokens."""
    sign = (h.sign() * dl1.to(h.dtype)).where(h != 0, 0)  # dl1 may be inf in fp16
    return sign if token_mask is None else sign.where(token_mask[:, None], 0)


# -- The split into hot neurons, heavy tokens and tail: dense where it is dense, sparse where it is sparse


class Split(NamedTuple):
    """A gate matrix r [M, F], split. Each active element lies in exactly one of hot_gate, heavy rows and tail."""

    hot: Tensor  # [H] int64, the neurons run densely
    heavy: Tensor  # bool [M], the tokens run densely
    hot_gate: Tensor  # [M, H] r at the hot neurons; zero in heavy rows
    tail: TwELL  # the rest: light rows outside the hot columns; rows that overflow are heavy


def split(
    r: Tensor, hot: Tensor, cap: int, *, tile: int = TILE, slots: int = SLOTS, force_heavy: Tensor | None = None
) -> Split:
    """Split r into hot neurons, heavy tokens and the tail.

    A token is heavy when it has more than ``cap`` active neurons outside ``hot``, when one of its TwELL
    tiles overflows, or where ``force_heavy`` (bool [M]) says so.
    """
    if len(hot.unique()) != len(hot):
        raise ValueError("split: a hot neuron is listed twice")
    cold = r.clone()
    cold[:, hot] = 0
    packed = TwELL.pack(cold, tile=tile, slots=slots, overflow="mark")
    heavy = packed.overflowed | (packed.counts.sum(1) > cap)
    if force_heavy is not None:
        heavy = heavy | force_heavy
    cold[heavy] = 0
    hot_gate = r[:, hot].where(~heavy[:, None], 0)
    return Split(hot, heavy, hot_gate, TwELL.pack(cold, tile=tile, slots=slots))


def split_ffn(
    x: Tensor, w: Weights, hot: Tensor, cap: int, activation: str = "relu", *, tile: int = TILE, slots: int = SLOTS
) -> Tensor:
    """The FFN as the sum of hot neurons, heavy tokens and tail; equal to the dense FFN for every ``hot``, ``cap``,
    ``slots``.

    Why it is equal: y is a sum over neurons, one term per active neuron, and an inactive one adds nothing.
    A light token's sum is regrouped into its hot and its cold neurons; a heavy token's sum is unchanged.
    A token whose x is not finite is heavy.
    """
    r = torch.relu(nnf.linear(x, w.gate, w.gate_bias))
    cut = split(r, hot, cap, tile=tile, slots=slots, force_heavy=~finite_rows(x))
    light = ~cut.heavy
    acc = sum_dtype(x.dtype)
    xs, wide = x[light].to(acc), w.to(acc)

    # 1. hot neurons: a small dense FFN of width H
    h_hot = activate(cut.hot_gate[light].to(acc), activation)
    if wide.up is not None:
        h_hot = h_hot * nnf.linear(xs, wide.up[hot], None if wide.up_bias is None else wide.up_bias[hot])
    y_hot = nnf.linear(h_hot, wide.down[:, hot], wide.down_bias)

    # 2. the tail: a handful of entries a token
    row, col, value = cut.tail.entries()
    h_tail = activate(value.to(acc), activation)
    if wide.up is not None:
        h_tail = h_tail * nnf.linear(x.to(acc), wide.up, wide.up_bias)[row, col]
    h_MF = torch.zeros(r.shape, dtype=acc, device=r.device)
    h_MF[row, col] = h_tail
    y_tail = nnf.linear(h_MF[light], wide.down)

    # 3. heavy tokens: whole rows, densely
    y = x.new_empty(x.shape[0], w.down.shape[0])
    y[light] = (y_hot + y_tail).to(x.dtype)
    y[cut.heavy] = forward(x[cut.heavy], w, activation).y
    return y
