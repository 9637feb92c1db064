"""What kernels of the split read besides x: weights as they need them, in the plan's order, and sizes of the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.formats import TwELL
from twell.gpu.shared.replay import Space
from twell.gpu.shared.rows import gathered, transposed
from twell.gpu.shared.tiles import RowTile, Tiles
from twell.plan import PlanTensors, sizes_of
from twell.reference import Fp8, Weights, is_neuron_major
from twell.saved import COUNTERS, Turns, turn_sizes

_LONG_TAIL = 48  # threshold for Plan.first: a mean of 20 active cold neurons per token


class SplitSizes(NamedTuple):
    """Numbers of a plan: H hot neurons; ``cap`` and ``first`` as in ``Plan``."""

    n_hot: int
    cap: int
    first: int

    @classmethod
    def of(cls, plan: PlanTensors) -> SplitSizes:
        return cls(*sizes_of(plan))


class Layout(NamedTuple):
    """Rows of weights in a plan's order; H hot, C = F - H cold neurons."""

    hot: Tensor  # [2 H, D]: gate and up rows of the hot neurons, interleaved; plain FFN: [H, D]
    hot_bias: Tensor | None
    hot_down: Tensor  # [H, D] neuron-major
    cold: Tensor  # [C, D]: gate rows of the cold neurons
    cold_bias: Tensor | None


class Fp8Weights(NamedTuple):
    """Weights of a layer. Scales are fp32: of gate and up per neuron, of down per column of y."""

    gate: Tensor  # e4m3 [F, D]
    gate_scale: Tensor  # [F]
    up: Tensor | None  # e4m3 [F, D]
    up_scale: Tensor | None  # [F]
    down: Tensor | None  # e4m3 [F, D], neuron-major; None if all batches are dense
    down_scale: Tensor  # [D]
    model_down: Tensor  # e4m3 [D, F], the model's own

    @classmethod
    def of(cls, gate: Fp8, up: Fp8 | None, down: Fp8, *, by_neurons: bool = False) -> Fp8Weights:
        """``down`` [D, F]; ``by_neurons``: add its transpose."""
        of_up, up_scale = (None, None) if up is None else up
        rows_of_down = down.q.t().contiguous() if by_neurons else None
        return cls(gate.q, gate.scale, of_up, up_scale, rows_of_down, down.scale, down.q)


def by_rows(w: Weights, down: Tensor | None = None) -> Weights:
    """The weights as kernels read them: contiguous, aligned, Wd as [F, D]. Copies only where necessary. ``down``: an
    existing neuron-major copy of Wd."""
    if down is not None:
        return ready(w._replace(down=down))
    own = ready(w)
    if not is_neuron_major(own.down):
        return own._replace(down=transposed(own.down))
    return own if own.down is w.down else own._replace(down=own.down.t())  # unchanged: kernels go by its address


def ready(w: Weights) -> Weights:
    """The weights as recorded calls take them: contiguous and aligned, Wd row-major or neuron-major."""
    gate, up, down, b_gate, b_up, b_down = w
    if (  # nearly always: one check
        gate.is_contiguous()
        and (up is None or (up.is_contiguous() and up.data_ptr() % 16 == 0))
        and (is_neuron_major(down) or down.is_contiguous())
        and (gate.data_ptr() | down.data_ptr()) % 16 == 0
        and b_gate is None
        and b_up is None
        and b_down is None
    ):
        return w
    if not is_neuron_major(down):
        down = plain(down)
    elif down.data_ptr() % 16:  # keep its layout: the gradient has the same
        down = plain(down.t()).t()
    return Weights(plain(gate), plain(up), down, plain(b_gate), plain(b_up), plain(b_down))


def plain(t: Any) -> Any:
    """``t``, or a copy if it is not contiguous or not aligned to 16 bytes."""
    if t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def aligned(t: Tensor) -> Tensor:
    """``t``, or a copy if TMA cannot read it. TMA can read aligned tensors that are contiguous [..., D], or [n, D] with
    a row stride that is a multiple of 16 elements."""
    apart, step = t.stride()[-2:]
    if t.data_ptr() % 16 == 0 and step == 1:
        if apart == t.shape[-1] and t.is_contiguous():
            return t
        if t.dim() == 2 and apart >= t.shape[1] and apart % 16 == 0:
            return t
    return t.clone(memory_format=torch.contiguous_format)


def lay_out(
    rows: Weights,
    order: Tensor,
    n_hot: int,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    cold: bool = True,
    space: Space | None = None,
) -> Layout:
    """``rows``: see ``by_rows``; ``biases``: see ``biases_of``. A backward needs no cold gate rows (``cold`` False)."""
    if n_hot == 0:
        return Layout(rows.gate[:0], None, rows.gate[:0], rows.gate, rows.gate_bias)
    buffer = gathered(rows.gate, rows.up, rows.down, order, n_hot, cold=cold, space=space)
    n = (2 if rows.up is not None else 1) * n_hot
    return Layout(buffer[:n], biases[0], buffer[n : n + n_hot], buffer[n + n_hot :], biases[1])


def biases_of(w: Weights, order: Tensor, n_hot: int) -> tuple[Tensor | None, Tensor | None]:
    """Biases of the hot neurons, interleaved like their rows, and of the cold ones."""
    b_gate, b_up = w.gate_bias, w.up_bias
    if n_hot == 0 or (b_gate is None and b_up is None):
        return None, b_gate
    hot, cold = order[:n_hot], order[n_hot:]
    zeros = w.gate.new_zeros(len(hot))
    hot_bias = zeros if b_gate is None else b_gate[hot]
    if w.up is not None:
        hot_bias = torch.stack([hot_bias, zeros if b_up is None else b_up[hot]], 1).flatten()
    return hot_bias, None if b_gate is None else b_gate[cold]


def tail_tile(tiles: Tiles, x: Tensor, first: int) -> RowTile:
    """Long tails: one row at a time, prefetched; its buffers must leave room for several programs per SM."""
    is_long = first > _LONG_TAIL and x.shape[1] * x.element_size() <= 8192
    return tiles.long_tail if is_long else tiles.tail


def given_gate(cold_gate: TwELL | None, order: Tensor) -> tuple[Tensor | None, ...]:
    """Words, counts and counters set to 0 (the gate kernel sets them otherwise), or three times None."""
    if cold_gate is None:
        return None, None, None
    return cold_gate.words, cold_gate.counts, order.new_zeros(COUNTERS)


def room_for_turns(tokens: int, space: Space) -> Turns:
    return Turns(*(space.take(n, dtype=torch.int32) for n in turn_sizes(tokens)))
