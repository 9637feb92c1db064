"""FFNs with FP8 weights: which kernels run a call (table: gpu/__init__.py).

Every path rounds x row by row, as ``reference.fp8_forward`` does. Dense batches also round h, which the reference does
not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twell.gpu import dense_fp8
from twell.gpu.decode import few_fp8
from twell.gpu.prefill import split_fp8
from twell.gpu.prefill.split_fp8 import Fp8Layout
from twell.gpu.shared.layout import Fp8Weights, SplitSizes, aligned
from twell.gpu.shared.replay import INTERPRETED, Recorded, Space
from twell.gpu.shared.round_fp8 import room_for, round_hidden, round_rows
from twell.gpu.shared.tiles import device_facts
from twell.plan import PlanTensors, tokens_of
from twell.reference import E4M3, Fp8

_WIDEST = 1 << 15  # D and F at most: one program rounds a row


class Kept(NamedTuple):
    """The tensors that kernels read for a layer: its weights; a neuron-major Wd if some batches are sparse; rows in its
    plan's order if large batches are."""

    w: Fp8Weights
    layout: Fp8Layout | None  # None: large batches are dense

    def derived(self) -> tuple[Tensor, ...]:
        """All tensors that are not the model's own."""
        return () if self.w.down is None else (self.w.down, *(self.layout or ()))

    def rewrite_(self, new: Kept) -> None:
        """Overwrite with the tensors of another one with the same plan: CUDA graphs read them in place."""
        for t, now in zip(self.derived(), new.derived(), strict=True):
            t.copy_(now)


def why_not(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device, or None."""
    if INTERPRETED or (device.type == "cuda" and split_fp8.tiles_for(device_facts(device.index)[0]) is not None):
        return None
    return "the sparse kernels for FP8 weights are for Hopper GPUs (compute capability 9.0)"


def can_read(*weights: Fp8) -> bool:
    """Whether kernels can read these weights by their addresses."""
    device, sizes = weights[0].q.device, weights[0].q.shape
    return max(sizes) <= _WIDEST and all(
        t.is_contiguous() and t.dtype == dtype and t.device == device and t.data_ptr() % 16 == 0
        for w in weights
        for t, dtype in zip(w, (E4M3, torch.float32), strict=True)
    )


def keep(
    gate: Fp8,
    up: Fp8 | None,
    down: Fp8,
    plan: PlanTensors | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    few: int | None = None,
) -> Kept:
    """The tensors for a layer with these weights, down [D, F], and a plan. ``few``: the most tokens that count as few
    in eager calls or in CUDA graphs, which share the tensors; None: the plan's."""
    F = len(gate.q)
    n_hot, own_few = (F, 0) if plan is None else (SplitSizes.of(plan).n_hot, tokens_of(plan)[0])
    w = Fp8Weights.of(gate, up, down, by_neurons=(own_few if few is None else few) > 0 or n_hot < F)
    return Kept(w, None if plan is None or n_hot == F else split_fp8.lay_out(w, plan, n_hot, dtype))


def forward(
    x: Tensor,
    w: Fp8Weights,
    activation: str,
    plan: PlanTensors,
    few: int,
    least: int,
    layout: Fp8Layout | None,
    watch: Tensor | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """y [..., D] for x [..., D] in bf16: sparse up to ``few`` tokens (needs the neuron-major Wd), split from ``least``
    on (needs a layout). ``settled``: see few.py."""
    M = x.numel() // x.shape[-1]
    if 0 < M <= few and w.down is not None:
        return few_fp8.forward(x, w, activation, settled=settled)
    if layout is None or least > M or M == 0:
        return dense(x, w, activation)
    capability, processors = (90, 2) if INTERPRETED else device_facts(x.device.index)
    tiles = split_fp8.tiles_for(capability)
    assert tiles is not None
    facts = SplitSizes.of(plan), activation, tiles, processors, watch
    return split_fp8.forward(x, w, layout, plan.order, plan.places, *facts)


def dense(x: Tensor, w: Fp8Weights, activation: str) -> Tensor:
    """y [..., D] for x [..., D]; GEMMs by cuBLAS, except for small gated batches."""
    given, x = x, aligned(x)
    D, dtype = x.shape[-1], x.dtype
    M = x.numel() // D
    if M == 0:
        return torch.empty_like(given)
    tiles = None if w.up is None else dense_fp8.tiles_for(M, D, len(w.gate), x.device)
    if tiles is not None:
        return dense_fp8.forward(x, w, activation, tiles)
    q, scale = rounded = room_for(M, D, x.new_empty)
    _round((x.shape, x.stride(-2), dtype), (x, *rounded), x, rounded)
    z = multiplied(q, scale, w.gate, w.gate_scale, dtype)
    u = None if w.up is None or w.up_scale is None else multiplied(q, scale, w.up, w.up_scale, dtype)
    q, scale = rounded = room_for(M, z.shape[1], x.new_empty)
    _round_hidden((z.shape, dtype, u is None, activation), (z, u, *rounded), z, u, activation == "relu2", rounded)
    return multiplied(q, scale, w.model_down, w.down_scale, dtype).view(x.shape)


def multiplied(q: Tensor, scale: Tensor, rows: Tensor, of_rows: Tensor, dtype: torch.dtype) -> Tensor:
    """x rows^T [M, N] of e4m3 [M, K] and [N, K] with scales [M] and [N]; sums in Hopper's fast, less precise mode."""
    scales = scale[:, None], of_rows[None, :]
    return torch._scaled_mm(q, rows.t(), *scales, out_dtype=dtype, use_fast_accum=True)


@Recorded
def _round(space: Space, x: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    round_rows(x if x.dim() == 2 else x.view(-1, x.shape[-1]), out)
    return ()


@Recorded
def _round_hidden(
    space: Space, z: Tensor, u: Tensor | None, squared: bool, out: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    round_hidden(z, u, squared, out)
    return ()
