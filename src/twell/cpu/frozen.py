"""What ``freeze`` keeps: Wd with a neuron as a row, and an int8 gate that rules neurons out for one token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from twell import int8
from twell.cpu import products
from twell.reference import Weights, is_neuron_major

MIN_INT8_GATE = 8 << 20  # elements of a gate below which its int8 copy does not pay
MAX_CANDIDATES = 1 / 16  # share of the neurons above which reading the whole gate is faster than the candidates' rows
_FIRST_LOOK = 16  # one sixteenth of the neurons shows whether there are too many candidates
_U_BF16 = 2.0**-8  # half the relative distance of neighbouring bf16 numbers
INT8_WIDTH = 32  # D must be a multiple: _weight_int8pack_mm reads past rows of other widths
_CHUNK_ROWS = 64  # rows of a weight quantised at once: they stay in the L2 cache


class FrozenTensors(NamedTuple):
    """What ``freeze`` returns. A field that does not apply is an empty tensor."""

    down_FD: Tensor  # Wd neuron-major, unless Wd itself is
    q_FD: Tensor  # these three: the int8 gate, see ``Int8Gate``
    per_reach_F: Tensor
    per_unit_F: Tensor


def down_rows(w_down: Tensor, frozen: FrozenTensors | None) -> Tensor | None:
    """Wd [D, F] as contiguous [F, D]; None if that would take a copy."""
    if is_neuron_major(w_down):
        return w_down.detach().t()
    if frozen is None or frozen.down_FD.numel() == 0 or frozen.down_FD.dtype != w_down.dtype:  # autocast
        return None
    return frozen.down_FD


def freeze(w: Weights) -> tuple[Tensor, ...]:
    """Copies that ``forward`` reads faster than the weights, in the order of ``FrozenTensors``; () if there are none.

    Made again they have the same shapes, unless the gate's values no longer allow an int8 copy, or allow one again.
    """
    none = w.down.new_empty(0)
    down_FD = none if is_neuron_major(w.down) else w.down.detach().t().contiguous()
    gate = make_int8_gate(w.gate.detach())
    frozen = FrozenTensors(down_FD, *((none, none, none) if gate is None else gate))
    return tuple(frozen) if any(t.numel() for t in frozen) else ()


class Int8Gate(NamedTuple):
    """A gate [F, D] as int8 rows q, w = s (q + e), and a bound on |x . w / s - x . q| as a multiple of |x|.

    With xb, x rounded to bf16, |xb - x| <= 2^-8 |x|, so, by Cauchy and Schwarz,

        |x . w / s - xb . q| = |x . e + (x - xb) . q| <= |x| (|e| + 2^-8 |q|) =: |x| reach

    plus the roundings of fp32 sums of D products, in any order, here and in the dense layer. So a neuron
    whose xb . q / reach is at most -|x| cannot fire. The others are candidates: their fp32 rows decide. (Rows of
    zeros are always candidates; their reach is set to 1.)
    """

    q_FD: Tensor  # int8
    per_reach_F: Tensor  # bf16: 1 / reach
    per_unit_F: Tensor  # fp32: 1 / (s reach), which brings a bias to the same scale


def _margin(D: int) -> float:
    """Bound on the relative error from rounding ``Int8Gate``'s factors and the sum to bf16."""
    return 4 * _U_BF16 + 2 * int8.roundings(D)


def find_candidates(x: Tensor, w: Weights, frozen: FrozenTensors) -> Tensor | None:
    """The neurons that may be active for one token, ascending; None if the whole gate must be read."""
    F = len(frozen.q_FD)
    if F == 0 or x.dtype != torch.float32:  # autocast
        return None
    norm = torch.linalg.vector_norm(x).item()
    if not int8.RANGE[0] <= norm <= int8.RANGE[1]:  # NaN is in no range
        return None
    n_first, margin, x_bf16 = F // _FIRST_LOOK, _margin(x.shape[1]), x.to(torch.bfloat16)
    least: Tensor | float = -norm * (1 + margin)  # a neuron fires only if its sum is larger
    least_first = least
    if w.gate_bias is not None:
        least = least - w.gate_bias * frozen.per_unit_F
        least = least.sub_(least.abs(), alpha=margin).nan_to_num_(-math.inf)  # a bias may be inf or NaN
        least_first = least[:n_first]
    first = torch._weight_int8pack_mm(x_bf16, frozen.q_FD[:n_first], frozen.per_reach_F[:n_first])
    if len((first > least_first).nonzero()) > MAX_CANDIDATES * n_first:
        return None
    rest = torch._weight_int8pack_mm(x_bf16, frozen.q_FD[n_first:], frozen.per_reach_F[n_first:])
    candidates = (torch.cat((first, rest), 1).view(-1) > least).nonzero().view(-1)
    return candidates if len(candidates) <= MAX_CANDIDATES * F else None


def make_int8_gate(w_gate: Tensor) -> Int8Gate | None:
    """None if it would not pay, or if weights are not finite, or too large or small for the bound."""
    D = w_gate.shape[1]
    pays = w_gate.dtype == torch.float32 and w_gate.numel() >= MIN_INT8_GATE and products.blas_habits().int8_gate
    if not pays or not w_gate.is_contiguous() or D % INT8_WIDTH:
        return None
    rows = int8.quantise_rows(w_gate, _CHUNK_ROWS)
    if rows is None:
        return None
    rounding = int8.roundings(D)
    reach_F = (rows.e_norm + rows.q_norm * (_U_BF16 + rounding)) * (1 + rounding)
    reach_F.masked_fill_(rows.is_zero, 1)
    return Int8Gate(rows.q, reach_F.reciprocal().to(torch.bfloat16), rows.per_s / reach_F)
