"""Plain PyTorch truth for every operation: what the fast paths are tested against and fall back to.

Legend: M tokens, D model width, F hidden width, H hot neurons. Weights in HF layout.

    r_MF = relu(x Wg^T + bg)     a = r, or r * r for relu2     (r is what the sparse formats store)
    u_MF = x Wu^T + bu           h = a * u; plain FFN: h = a
    y_MD = h Wd^T + bd           l1 = sum |h|

*Active* means r != 0, NaN included. relu2 squares where r is consumed, so both activations share one
stored form and the gradient needs no square root.

Sums run in the dtype of the inputs for float32 and float64, and in float32 for 16-bit inputs.

A neuron that is not active for a token adds nothing to y, l1 or gradients, whatever its weights are: NaN in Wu or Wd
reaches only tokens for which its neuron is active. ``forward`` and ``backward`` keep that on CPU tensors, for any
number of tokens. (A token with inf or NaN in x is computed as in a dense FFN, where 0 * inf = NaN.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from twell.formats import SLOTS, TILE, Hybrid, Overflow, TwELL

Activation = Literal["relu", "relu2"]
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
    """What a forward returns: the output, its statistics, and the activations a backward needs."""

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
    """The dtype sums of ``dtype`` products are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_neuron_major(w_down: Tensor) -> bool:
    """Whether Wd [D, F] lies neuron by neuron in memory, as a contiguous [F, D] does."""
    return w_down.stride() == (1, w_down.shape[0])


def finite_rows(x: Tensor) -> Tensor:
    """bool [M]: rows without inf or NaN. The others run densely, so that 0 * inf = NaN as in a dense FFN."""
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


# ---------------------------------------------------------------------------------------------------------
# FP8
# ---------------------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn
FP8_MAX = 448.0  # of it
_FP8_LEAST = 1e-12  # of a row's largest value: rows of zeros have a scale, too


class Fp8(NamedTuple):
    """Rows in e4m3, each with a scale of its own: row i is q[i] * scale[i]. Weights have a row for each output."""

    q: Tensor  # float8_e4m3fn [n, k]
    scale: Tensor  # float32 [n]

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix it stands for, exact in float64."""
        return (self.q.to(dtype) * self.scale[:, None].to(dtype)).to(dtype)


def to_fp8(rows: Tensor) -> Fp8:
    """Each row times 1 / scale, which makes its largest value 448, then rounded to nearest even. A row with inf or NaN
    becomes NaN."""
    scale = rows.abs().amax(1).float().clamp(min=_FP8_LEAST) * (1 / FP8_MAX)  # CUDA divides otherwise than CPUs
    q = (rows.float() * scale.reciprocal()[:, None]).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return Fp8(q, scale)


def fp8_forward(x: Tensor, gate: Fp8, up: Fp8 | None, down: Fp8, activation: str = "relu") -> Tensor:
    """What an FP8 FFN means, in float64: x is rounded row by row, as for a dense FP8 FFN; nothing else is."""
    f64 = torch.float64
    w = Weights(gate.to(f64), None if up is None else up.to(f64), down.to(f64))
    return forward(to_fp8(x).to(f64), w, activation, want_stats=False).y


# ---------------------------------------------------------------------------------------------------------
# Dense
# ---------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Weights,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    *,
    want_stats: bool = True,
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
    """Whether a token with finite x has a y that is not, on a CPU: then a neuron that is not active may have made it
    so, by 0 * NaN or 0 * inf. (On a GPU the question would wait for the device.)"""
    if y.device.type != "cpu" or is_finite(y):
        return False
    return bool((finite_rows(x) & ~finite_rows(y)).any())


def is_finite(t: Tensor) -> bool:
    """No inf or NaN in it, of which one sum tells most of the time."""
    t = t.detach()
    return math.isfinite(t.sum(dtype=sum_dtype(t.dtype)).item()) or bool(t.isfinite().all())  # sums may overflow


def _without_silent(h: Tensor, r: Tensor, x: Tensor) -> Tensor:
    """h with zeros where the neuron is not active; tokens whose x is not finite keep theirs."""
    return h.where((r != 0) | ~finite_rows(x)[:, None], 0)


def _weighted_sum(weight: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [M, F] @ table [F, D] + bias, where a weight of 0 takes nothing of its row, be it NaN or inf."""
    is_odd = ~finite_rows(table)
    y = weight @ table.masked_fill(is_odd[:, None], 0)
    for j in is_odd.nonzero().flatten().tolist():
        column = weight[:, j, None]
        y = y + (column * table[j]).where(column != 0, 0)
    return y if bias is None else y + bias


def no_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """What stands in for l1_sum and counts when they are not wanted: zero and nothing."""
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
    # Chosen, not multiplied by 0: dh overflows fp16 where a loss is scaled, and inf * 0 is NaN.
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
    """The gradient where it is needed; else an empty tensor, a new one each time (ops may not return aliases)."""
    return gradient() if needed else x.new_empty(0)


def l1_gradient(h: Tensor, dl1: Tensor, token_mask: Tensor | None) -> Tensor:
    """d l1_sum / dh, [M, F]: the sign of h at counted tokens."""
    sign = (h.sign() * dl1.to(h.dtype)).where(h != 0, 0)  # dl1 may be inf in fp16
    return sign if token_mask is None else sign.where(token_mask[:, None], 0)


def gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "relu",
) -> Tensor:
    """y = (a(relu(x Wg^T + bg)) * (x Wu^T + bu)) Wd^T + bd for x [M, D]."""
    return forward(x, Weights(w_gate, w_up, w_down, b_gate, b_up, b_down), activation).y


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "relu",
) -> Tensor:
    """y = a(relu(x Wu^T + bu)) Wd^T + bd for x [M, D]."""
    return forward(x, Weights(w_up, None, w_down, b_up, None, b_down), activation).y


# ---------------------------------------------------------------------------------------------------------
# TwELL: the two halves of the inference path
# ---------------------------------------------------------------------------------------------------------


def gate_and_pack(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None = None,
    *,
    tile: int = TILE,
    slots: int = SLOTS,
    compact: bool = False,
    overflow: Overflow = "error",
) -> TwELL:
    """relu(x Wg^T + bg) as TwELL: the gate projection with packing in its epilogue."""
    r = torch.relu(nnf.linear(x, w_gate, b_gate))
    return TwELL.pack(r, tile=tile, slots=slots, compact=compact, overflow=overflow)


def up_and_down(x: Tensor, gate: TwELL, w: Weights, activation: str = "relu") -> Tensor:
    """y [M, D] from the packed gate: up dot, gate product and down sum at the stored positions only.

    Rows whose tiles overflowed, or whose x is not finite, are computed densely: slots never change a result.
    """
    row, col, r = gate.entries(skip_overflowed=True)
    y = _sampled_ffn(x, row, col, r, w, activation)
    dense_rows = gate.overflowed | ~finite_rows(x)
    y[dense_rows] = forward(x[dense_rows], w, activation).y
    return y


def _sampled_ffn(x: Tensor, row: Tensor, col: Tensor, r: Tensor, w: Weights, activation: str) -> Tensor:
    """The FFN of the given active entries alone, sums in ``sum_dtype``, rounded once at the end."""
    acc = sum_dtype(x.dtype)
    h = _sampled_h(x.to(acc), row, col, r.to(acc), w.to(acc), activation)
    h_MF = _scatter(row, col, h, (x.shape[0], w.gate.shape[0]))
    return nnf.linear(h_MF, w.down.to(acc), None if w.down_bias is None else w.down_bias.to(acc)).to(x.dtype)


def _sampled_h(x: Tensor, row: Tensor, col: Tensor, r: Tensor, w: Weights, activation: str) -> Tensor:
    """h at the entries (row, col) with rectified gate r."""
    a = activate(r, activation)
    return a if w.up is None else a * nnf.linear(x, w.up, w.up_bias)[row, col]


def _scatter(row: Tensor, col: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
    dense = torch.zeros(shape, dtype=value.dtype, device=value.device)
    dense[row, col] = value
    return dense


# ---------------------------------------------------------------------------------------------------------
# The three-part split: dense where it is dense, sparse where it is sparse
# ---------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """A gate matrix r [M, F] cut into three parts. Each active element lies in exactly one of them."""

    hot: Tensor  # [H] int64, the neurons run densely
    heavy: Tensor  # bool [M], the tokens run densely
    hot_gate: Tensor  # [M, H] r at the hot neurons; zero in heavy rows
    tail: TwELL  # the rest: light rows outside the hot columns; rows that overflow are heavy


def split(
    r: Tensor,
    hot: Tensor,
    cap: int,
    *,
    tile: int = TILE,
    slots: int = SLOTS,
    force_heavy: Tensor | None = None,
) -> Split:
    """Cut r into hot neurons, heavy tokens and the cold tail.

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
    x: Tensor,
    w: Weights,
    hot: Tensor,
    cap: int,
    activation: str = "relu",
    *,
    tile: int = TILE,
    slots: int = SLOTS,
) -> Tensor:
    """The FFN as the sum of its three parts; equal to the dense FFN for every ``hot``, ``cap``, ``slots``.

    Why it is equal: y is a sum over neurons, one term per active neuron, and an inactive one adds nothing.
    A light token's sum is regrouped into its hot and its cold neurons; a heavy token's is not touched.
    A token whose x is not finite is heavy.
    """
    r = torch.relu(nnf.linear(x, w.gate, w.gate_bias))
    parts = split(r, hot, cap, tile=tile, slots=slots, force_heavy=~finite_rows(x))
    light = ~parts.heavy
    acc = sum_dtype(x.dtype)
    xs, wide = x[light].to(acc), w.to(acc)

    # 1. hot neurons: a small dense FFN of width H
    h_hot = activate(parts.hot_gate[light].to(acc), activation)
    if wide.up is not None:
        h_hot = h_hot * nnf.linear(xs, wide.up[hot], None if wide.up_bias is None else wide.up_bias[hot])
    y_hot = nnf.linear(h_hot, wide.down[:, hot], wide.down_bias)

    # 2. the cold tail: a handful of entries a token
    row, col, value = parts.tail.entries()
    h_tail = _scatter(row, col, _sampled_h(x.to(acc), row, col, value.to(acc), wide, activation), r.shape)
    y_tail = nnf.linear(h_tail[light], wide.down)

    # 3. heavy tokens: whole rows, densely
    y = x.new_empty(x.shape[0], w.down.shape[0])
    y[light] = (y_hot + y_tail).to(x.dtype)
    y[parts.heavy] = forward(x[parts.heavy], w, activation).y
    return y


# ---------------------------------------------------------------------------------------------------------
# Hybrid: the training path, forward and explicit backward at the stored positions
# ---------------------------------------------------------------------------------------------------------


class HybridSaved(NamedTuple):
    """What the sparse forward keeps for its backward, besides x and the weights."""

    gate: Hybrid  # r
    up: Tensor | None  # [nnz] u at the entries of the sparse rows
    dense_rows: Tensor  # bool [M]: rows that overflowed or are not finite; recomputed from x


def _sparse_entries(gate: Hybrid, dense_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row, col, r = gate.entries(skip_overflowed=True)
    kept = ~dense_rows[row]
    return row[kept], col[kept], r[kept]


def hybrid_forward(
    x: Tensor,
    w: Weights,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    *,
    cap: int = 128,
    backup: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, HybridSaved]:
    """(y, l1_sum, counts, saved): the training forward on the Hybrid format.

    Rows that fit neither the ELL part nor the backup run densely, so capacities never change the result.
    """
    r_MF = torch.relu(nnf.linear(x, w.gate, w.gate_bias))
    gate = Hybrid.pack(r_MF, cap=cap, backup=backup, overflow="mark")
    dense_rows = gate.overflowed | ~finite_rows(x)
    row, col, r = _sparse_entries(gate, dense_rows)
    u = None if w.up is None else nnf.linear(x, w.up, w.up_bias)[row, col]
    h = activate(r, activation) if u is None else activate(r, activation) * u
    h_MF = _scatter(row, col, h, gate.shape)
    y = nnf.linear(h_MF, w.down, w.down_bias)
    l1_sum, counts = statistics(_scatter(row, col, r, gate.shape), h_MF, token_mask)

    rest = forward(x[dense_rows], w, activation, _at(token_mask, dense_rows))
    y[dense_rows] = rest.y
    return y, l1_sum + rest.l1_sum, counts + rest.counts, HybridSaved(gate, u, dense_rows)


def hybrid_backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    saved: HybridSaved,
    activation: str = "relu",
    token_mask: Tensor | None = None,
) -> Gradients:
    """All gradients from the stored positions alone; ``dense_rows`` are recomputed from x.

    The formulas are those of ``backward``, each taken at the entries (row, col) of ``saved.gate``.
    """
    shape, dense_rows = saved.gate.shape, saved.dense_rows
    row, col, r = _sparse_entries(saved.gate, dense_rows)
    a, u = activate(r, activation), saved.up
    h = a if u is None else a * u
    sparse_dy = dy.where(~dense_rows[:, None], 0)
    dh = (sparse_dy @ w.down)[row, col]
    if dl1 is not None:
        sign = (h.sign() * dl1.to(h.dtype)).where(h != 0, 0)
        dh = dh + (sign if token_mask is None else sign.where(token_mask[row], 0))
    dz = (dh if u is None else dh * u) * slope(r, activation)
    dz_MF, h_MF = _scatter(row, col, dz, shape), _scatter(row, col, h, shape)
    du_MF = None if u is None else _scatter(row, col, dh * a, shape)
    sparse_x = x.where(~dense_rows[:, None], 0)

    mask = _at(token_mask, dense_rows)
    again = forward(x[dense_rows], w, activation, mask)
    rest = backward(dy[dense_rows], dl1, x[dense_rows], w, again.gate, again.up, activation, mask)

    dx = dz_MF @ w.gate if du_MF is None or w.up is None else dz_MF @ w.gate + du_MF @ w.up
    dx[dense_rows] = rest.x
    gradients = Weights(
        gate=dz_MF.T @ sparse_x,
        up=None if du_MF is None else du_MF.T @ sparse_x,
        down=sparse_dy.T @ h_MF,
        gate_bias=dz_MF.sum(0),
        up_bias=None if du_MF is None else du_MF.sum(0),
        down_bias=sparse_dy.sum(0),
    )
    total = (p if q is None or p is None else p + q for p, q in zip(gradients, rest.weights, strict=True))
    return Gradients(dx, Weights._make(total))


def _at(token_mask: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if token_mask is None else token_mask[rows]
