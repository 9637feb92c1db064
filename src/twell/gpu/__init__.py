"""Which GPU kernels run a call. The choice changes time, never a result.

M tokens, D model width, F neurons, of which H hot and C = F - H cold. ``few``, ``most`` and ``least`` are numbers of
the plan (``Plan.tokens``; other ones for CUDA graphs). Rows are tried from the top; "cuBLAS" stands for PyTorch's
GEMMs. Letters mark launches that not every call has: (f) unless the layer is frozen; (d) unless Wd is neuron-major or
the layer frozen; (h) if H > 0; (s) with statistics. float64, and D or F that are no multiple of 16, never come here:
ops/registered.py calls reference.py.

    Inference, ``infer_here``              file                  kernels, in order of launch
    ---------------------------------------------------------------------------------------------------------------
    1 <= M <= few, Wd neuron-major or      decode/few.py
      the layer frozen
      M 1, with an int8 screen (frozen)    screen.py, steps.py   screened_neurons_kernel, sum_kernel
      Hopper, 16 bits, M <= 16, gate fits  hopper.py             hopper_neurons_kernel, hopper_sums_kernel
      Hopper, 16 bits, M <= 32             steps.py, hopper.py   neurons_kernel, hopper_sums_kernel
      otherwise                            steps.py              neurons_kernel, sums_kernel
    few < M <= most, M < least, 16 bits,   prefill/union.py      cuBLAS (gate), _marks_kernel, _up_kernel, _down_kernel
      Wd neuron-major or the layer frozen
    M >= least, H < F, 16 bits             prefill/split.py      _transpose_kernel (d), _gather_kernel (f, h),
                                                                 _gate_kernel (cold), _list_kernel, _heavy_kernel,
                                                                 _gate_kernel (hot, h), _tail_kernel, cuBLAS (hot
                                                                 down, h)
    otherwise                              dense.py
      sm_90, 16 bits, gated, one wave      dense.py              _gate_up_kernel, cuBLAS (down)
      otherwise                            dense.py              cuBLAS (gate, up), _activate_kernel, cuBLAS (down)

    Inference, FP8 weights, ``fp8.forward``: sm_90, x in bf16, no biases, D and F <= 32768, no gradients, statistics,
    mask or autocast. Otherwise the layer calls its projections.
    ---------------------------------------------------------------------------------------------------------------
    1 <= M <= few                          decode/few_fp8.py
      Hopper, M 1, gate fits               hopper_fp8_one.py     hopper_one_kernel, hopper_add_kernel
      Hopper, M <= 16, gate fits           hopper_fp8.py         hopper_fp8_neurons_kernel, hopper_fp8_sums_kernel
      Hopper                               steps.py, hopper_fp8  _round_kernel, neurons_kernel, hopper_fp8_sums_kernel
      otherwise                            steps.py              _round_kernel, neurons_kernel, sums_kernel
    M >= least, H < F                      prefill/split_fp8.py  _round_kernel, _gate_kernel (cold), _list_kernel,
                                                                 _heavy_fp8_kernel, _gate_kernel (hot, h),
                                                                 _tail_kernel, cuBLAS (hot down, h)
    otherwise: gated, one wave             dense_fp8.py          _round_kernel, _gate_up_kernel, _round_kernel,
                                                                 _down_fp8_kernel
    otherwise                              fp8.py                _round_kernel, cuBLAS (gate, up), _round_kernel,
                                                                 cuBLAS (down)

    With gradients or statistics: ``train``, ``backward`` (never few tokens or union)
    ---------------------------------------------------------------------------------------------------------------
    M >= least, H < F, not too many        training/             _gather_kernel (cold rows, h), _transpose_kernel (d),
      tokens, forward                      split_training.py     _gather_kernel (hot rows, h), _gate_kernel (cold),
                                                                 _list_kernel, _count_kernel, _total_kernel,
                                                                 _add_up_kernel and _pair_kernel (columns.py),
                                                                 _gate_kernel (hot, h), _forward_kernel (activation.py;
                                                                 h, s), _heavy_kernel, _tail_kernel, _add_kernel
                                                                 (hot.py; M < 8192, h), _statistics_kernel (s),
                                                                 cuBLAS (hot down; M >= 8192, h)
    the same, backward                     split_training.py     _transpose_kernel (d), _tail_backward_kernel,
                                                                 _share_kernel, _neuron_kernel,
                                                                 _heavy_backward_kernel, _gather_kernel (hot rows, h),
                                                                 _gradient_kernel (hot.py; h), _add_kernel (dx;
                                                                 M < 8192, h), cuBLAS (h: dx for M >= 8192; gate and
                                                                 up; down), _put_rows_kernel (h), _transpose_kernel
                                                                 (dWd; d)
    otherwise                              dense.py              cuBLAS (gate, up), _forward_kernel,
                                                                 _statistics_kernel (s), cuBLAS (down); backward:
                                                                 cuBLAS (dh), _backward_kernel (activation.py), cuBLAS
                                                                 (dx twice, gate, up, down)

A backward leaves out what the wanted gradients do not need. The words in the table:

- Hopper: sm_90, with Triton 3.6 or 3.7. Gate fits: at most 64 neurons per SM and D <= 2048; in 16 bits also an SM's
  gate rows in 192 KiB of shared memory (48 neurons at D 2048). See few_tiles.py.
- An int8 screen exists in 16 bits, if the plan counted at most 1 % active neurons (screen.py).
- One wave: the tiles of h fill at least half of the SMs, and all at once (FP8: up to 4/3 of a wave), for F of 32 to 64
  times the number of SMs and D of 1024 to 4096. In 16 bits only without biases of gate and up, and for contiguous
  tensors. See ``dense.fused_tile``.
- Not too many tokens: M < 2^31 / (cap + 16) and M C < 2^34 (``saved.trains_split``).
- A second stream runs, in inference, _list_kernel and then _heavy_kernel, beside the hot gate; the tail waits for the
  lists only. (If H = 0, _heavy_kernel alone, beside the tail.) In a training forward it runs Wd's transpose and the
  hot rows, beside the cold gate and the lists.

The kernels of the split (gate.py, lists.py, heavy.py, tail.py) are in shared/: inference and training launch them.
They are the same for all architectures; shared/tiles.py says where TMA reads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from twell.gpu import dense
from twell.gpu import fp8 as fp8
from twell.gpu.decode import few as few_tokens
from twell.gpu.decode import screen
from twell.gpu.prefill import split, union
from twell.gpu.shared.layout import Layout, SplitSizes, biases_of, by_rows, lay_out, plain
from twell.gpu.shared.tiles import GateTile, RowTile, Tiles, device_facts, tiles_for
from twell.gpu.training import split_training
from twell.plan import Plan, PlanTensors, sizes_of, tokens_of
from twell.reference import Gradients, Weights, is_neuron_major
from twell.saved import trains_split

P = ParamSpec("P")
R = TypeVar("R")

_INTERPRETED = Tiles(  # tiny, for Triton's interpreter
    gate=GateTile(32, 128, 32, 4, 2),
    heavy=GateTile(16, 32, 32, 4, 2),
    tail=RowTile(4, 4, 2),
    long_tail=RowTile(1, 4, 2),
    tail_backward=RowTile(2, 4, 2),
    use_tma=False,
)


class Frozen(NamedTuple):
    """Copies of a layer's weights that ``freeze`` makes; empty where a copy is not needed."""

    down: Tensor  # [F, D]: a neuron-major copy of Wd; empty where Wd is neuron-major
    hot: Tensor  # see Layout, as the next four
    hot_bias: Tensor
    hot_down: Tensor
    cold: Tensor
    cold_bias: Tensor
    q: Tensor  # see Screen, as the next two
    scale: Tensor
    reach: Tensor


def _on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Makes the first argument's device the current one: Triton launches there."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        device = cast(Tensor, args[0]).device
        if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return guarded


# ---------------------------------------------------------------------------------------------------------
# Inference
# ---------------------------------------------------------------------------------------------------------


@_on_its_device
def forward(x: Tensor, w: Weights, activation: str, plan: PlanTensors | None, frozen: Sequence[Tensor] = ()) -> Tensor:
    """y [..., D] for x [..., D]; dense without a plan. ``frozen``: the tensors of ``Frozen``, or empty."""
    if plan is None:
        return dense.infer(x, w, activation)
    return infer_here(x, w, activation, plan, *tokens_of(plan), frozen)


def infer_here(
    x: Tensor,
    w: Weights,
    activation: str,
    plan: PlanTensors,
    few: int,
    most: int,
    least: int,
    frozen: Sequence[Tensor],
    watch: Tensor | None = None,
) -> Tensor:
    """``forward`` by a plan, where x's device is the current one. Up to ``few`` tokens run by the kernels for few
    tokens, up to ``most`` by tiles of tokens, and from ``least`` on by the split; all others densely. ``watch``: see
    ``split.forward``."""
    M = x.numel() // x.shape[-1]
    kept = (frozen if type(frozen) is Frozen else Frozen(*frozen)) if frozen else None
    down = kept.down if kept is not None and kept.down.numel() else None
    by_neurons = down is not None or is_neuron_major(w.down)  # transposing Wd would take as long as dense
    if 0 < M <= few and by_neurons:
        screened = None
        if kept is not None and M == 1 and kept.q.numel():
            screened = screen.Screen(kept.q, kept.scale, kept.reach)
        rows = w if down is None else w._replace(down=down)
        return few_tokens.forward(x, rows, activation, None, screened, settled=kept is not None)
    if few < M <= most and M < least and by_neurons and x.element_size() == 2:
        return union.forward(x, w, activation, launch_facts(x)[0], down)
    sizes = SplitSizes.of(plan)
    if least > M or M == 0 or sizes.n_hot == w.gate.shape[0] or _is_slow(x):
        return dense.infer(x, w, activation)
    layout = None
    if kept is not None and kept.cold.numel():
        layout = Layout(*(t if t.numel() else None for t in kept[1:6]))  # type: ignore[arg-type]
    return split.forward(x, w, plan.order, plan.places, sizes, activation, *launch_facts(x), down, layout, watch)


def _is_slow(t: Tensor) -> bool:
    """Whether the split takes longer than dense: in fp32 on a GPU, where Triton's gate has no tensor cores."""
    return t.is_cuda and t.element_size() == 4


def freeze(w: Weights, plan: Plan | None) -> tuple[Tensor, ...]:
    """The tensors of ``Frozen`` for weights that stay; empty where kernels have no use for them."""
    (D, F), gate = w.down.shape, w.gate
    if plan is None or gate.dtype == torch.float64 or D % 16 or F % 16:
        return ()
    with torch.cuda.device(gate.device) if gate.device.type == "cuda" else contextlib.nullcontext():
        nothing = gate.new_empty(0)
        rows = by_rows(w)
        kept = Frozen(nothing if is_neuron_major(w.down) else rows.down, *[nothing] * 8)
        n_hot = len(plan.hot)
        if 0 < n_hot < F and not _is_slow(gate):
            order = plan.on(gate.device).order
            layout = lay_out(rows, order, n_hot, biases_of(rows, order, n_hot))
            kept = Frozen._make([kept.down, *(nothing if t is None else t for t in layout), *kept[6:]])
        if max(plan.few_tokens, plan.few_tokens_captured or 0) and screen.is_worth_it(plan, gate.dtype):
            screened = screen.screen_of(rows.gate)
            kept = kept if screened is None else kept._replace(**screened._asdict())
    return kept


# ---------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------


@_on_its_device
def train(
    x: Tensor,
    w: Weights,
    activation: str,
    plan: PlanTensors | None,
    token_mask: Tensor | None,
    *,
    want_stats: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, l1_sum, counts, tensor kept for the backward: see saved.py)."""
    token_mask = plain(token_mask)
    given: Sequence[Tensor]
    if plan is not None and _trains_split(len(x), len(w.gate), plan):
        facts = plan.order, plan.places, SplitSizes.of(plan), activation, token_mask, *launch_facts(x)
        *given, kept = split_training.forward(x, w, *facts, want_stats=want_stats)
    else:
        *given, kept = dense.forward(x, w, activation, token_mask, want_stats=want_stats)
    return *given, kept if save else x.new_empty(0)  # type: ignore[return-value]


def _trains_split(tokens: int, n_neurons: int, plan: PlanTensors) -> bool:
    n_hot, cap, _ = sizes_of(plan)
    return bool(trains_split(tokens, n_neurons, n_hot, cap, tokens_of(plan)[2]))


@_on_its_device
def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w: Weights,
    kept: Tensor,
    activation: str,
    plan: PlanTensors | None,
    token_mask: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """Empty or None where a gradient is not needed."""
    dy, dl1, token_mask = plain(dy), plain(dl1), plain(token_mask)
    if plan is not None and _trains_split(len(x), len(w.gate), plan):
        given = plan.order, plan.places, SplitSizes.of(plan), activation, token_mask, *launch_facts(x), needs
        return split_training.backward(dy, dl1, x, w, kept, *given)
    return dense.backward(dy, dl1, x, w, kept, activation, token_mask, needs)


# ---------------------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------------------


def launch_facts(x: Tensor) -> tuple[Tiles, int]:
    """Tile sizes for x's dtype and device, and the number of programs that fill the device."""
    if x.device.type == "cpu":
        return _INTERPRETED, 2
    capability, processors = device_facts(x.device.index)
    return tiles_for(capability, x.dtype), processors
