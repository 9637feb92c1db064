"""The backward of heavy tokens, densely on tensor cores: one launch, for as many tokens as the device counted.

A heavy token keeps nothing for the backward: its cold neurons are computed again from x. With r = relu(x Wg^T + bg), u
= x Wu^T + bu, a = r or r^2, h = a u and dh = dy Wd^T + l1 sign(h) (h = a, and no u, in a plain FFN):

    dz = dh u a'(r)    du = dh a    dx += dz Wg + du Wu    dWg += dz^T x    dWu += du^T x    dWd += h^T dy

The tail's kernels have written dx and the weights' gradients before; this kernel adds to them in fp32.

One cooperative launch of at most one program per SM. Usually there is no heavy token, and it returns at once.
    1. Sort the heavy tokens: sums over them must not depend on the order of the list. Program p takes the p-th share
       of all tokens, flags the heavy ones and counts those before its share.
    2. For every chunk of them: dz, du and h, into a workspace of [chunk, C] each; then dx and the weights' gradients.
All programs wait for each other between steps. Tiles are dealt out in turn; no sum is shared between programs.

More than one chunk is summed chunk by chunk, and a 16-bit gradient is rounded as often, where a dense backward rounds
once. So there are at most four chunks, or each chunk's rounding errors are kept for the next one ("rests").

Bytes, bf16, C 5632, D 2048, few tokens: the weights once and Wg and Wu once more (115 MB), their gradients read and
written (138 MB).
Workspace: 3 C values per token of a chunk, 69 MB up to M 8192, and at most 3 C D for rests: 138 MB.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.gpu.shared.cooperative import leave_for_all, wait_for_all
from twell.gpu.shared.launch import ANY, MULTIPLE, Kernel, ceil_div
from twell.gpu.shared.lists import N_WAITING, count_heavy
from twell.gpu.shared.replay import INTERPRETED, Space
from twell.gpu.shared.tiles import device_facts
from twell.gpu.training.heavy_backward_steps import bias_tiles, dx_tiles, factor_tiles, sort_heavy, weight_tiles
from twell.gpu.training.weight_gradients import NeuronGradients
from twell.saved import Turns

_CHUNK = 2048  # heavy tokens at once
_ROUNDINGS = 4  # of a 16-bit gradient, at most, without rests
_SORT = 1024  # tokens processed at once while sorting


class HeavyTiles(NamedTuple):
    """Tiles of the GEMMs: BM tokens x BN neurons, then BM tokens or neurons x BD, both BK deep.

    Up to FEW tokens they are FEW_BM x FEW_BN and FEW_BM x FEW_BD: narrow, so that every SM has one, and deep."""

    BM: int
    BN: int
    BD: int
    BK: int
    FEW: int
    FEW_BM: int
    FEW_BN: int
    FEW_BD: int
    FEW_BK: int
    warps: int
    stages: int


_BY_CAPABILITY = {
    80: HeavyTiles(128, 128, 128, 64, 128, 64, 64, 32, 64, 8, 4),
    86: HeavyTiles(128, 128, 128, 64, 128, 64, 64, 32, 64, 8, 3),
    90: HeavyTiles(128, 128, 256, 64, 256, 64, 64, 32, 128, 8, 4),
    100: HeavyTiles(128, 128, 128, 64, 256, 64, 64, 32, 128, 8, 4),
    120: HeavyTiles(128, 128, 128, 64, 128, 64, 64, 32, 64, 8, 3),
}
_TINY = HeavyTiles(32, 32, 64, 32, 16, 16, 16, 16, 32, 4, 1)  # for Triton's interpreter


def heavy_tiles(capability: int, dtype: torch.dtype) -> HeavyTiles:
    """Chosen by registers and shared memory (tests/test_cross_compile.py), not by measurement."""
    tiles = _BY_CAPABILITY[max(c for c in _BY_CAPABILITY if c <= capability)]
    if dtype == torch.float32:
        tiles = tiles._replace(BM=64, BN=64, BD=64, BK=32, FEW_BK=32, stages=3)
    return tiles


@triton.jit
def _heavy_backward_kernel(
    i_dy,  # [M, D]
    i_l1,  # [] or unused: the gradient of sum |h|
    i_x,  # [M, D]
    i_gate,  # [F, D]
    i_up,  # [F, D] or unused
    i_down,  # [F, D], neuron-major
    i_gate_bias,  # [F] or unused
    i_up_bias,  # [F] or unused
    i_order,  # int32 [F] or unused: rows of the weights, H hot neurons first
    i_counted,  # bool [M] or unused: tokens whose |h| counts
    m_counters,  # see Turns
    i_heavy,  # see Turns
    m_dx,  # [M, D] or unused, as the next five
    m_gate,  # [F, D]
    m_up,  # [F, D]
    m_down,  # [F, D], neuron-major
    m_gate_bias,  # [F]
    m_up_bias,  # [F]
    m_space,  # see _size_of_space
    M,
    D,
    C,
    H,
    x_stride,
    chunk,  # tokens at once
    keeps_rests,  # 0 or 1
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_L1: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WANTS_DX: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    WANTS_DOWN: tl.constexpr,
    WANTS_GATE_BIAS: tl.constexpr,
    WANTS_UP_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SORT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    FEW: tl.constexpr,
    FEW_BM: tl.constexpr,
    FEW_BN: tl.constexpr,
    FEW_BD: tl.constexpr,
    FEW_BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_order += H
    n_first, n_heavy = count_heavy(m_counters, M)
    if n_heavy > 0:
        programs = tl.num_programs(0)
        width = tl.cdiv(C, 16) * 16
        tokens = m_space.to(tl.pointer_type(tl.int32))
        size = chunk.to(tl.int64) * width
        dz = m_space + tl.cdiv(M, 16).to(tl.int64) * (16 * 64 // m_space.dtype.element_ty.primitive_bitwidth)
        du = dz + size
        h = du + size
        rests = h + size
        sort_heavy(i_heavy, tokens + M, tokens, n_first, n_heavy, M, SORT)
        wait_for_all(m_counters + N_WAITING)
        for first in range(0, n_heavy, chunk):
            n = min(chunk, n_heavy - first)
            is_last = first + n == n_heavy
            own = tokens + first
            if n <= FEW:
                factor_tiles(
                    i_dy, i_l1, i_x, i_gate, i_up, i_down, i_gate_bias, i_up_bias, i_order, i_counted, own, n,
                    dz, du, h, D, C, width, x_stride, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_ORDER, HAS_L1,
                    HAS_MASK, FEW_BM, FEW_BN, FEW_BK, STAGES, PRECISION,
                )  # fmt: skip
            else:
                factor_tiles(
                    i_dy, i_l1, i_x, i_gate, i_up, i_down, i_gate_bias, i_up_bias, i_order, i_counted, own, n,
                    dz, du, h, D, C, width, x_stride, GATED, SQUARED, HAS_GATE_BIAS, HAS_UP_BIAS, HAS_ORDER, HAS_L1,
                    HAS_MASK, BM, BN, BK, STAGES, PRECISION,
                )  # fmt: skip
            wait_for_all(m_counters + N_WAITING)
            turn = tl.program_id(0)  # deal on: programs that had no tile of the last round go first
            if WANTS_DX:
                if n <= FEW:
                    done = dx_tiles(i_gate, i_up, i_order, own, n, dz, du, m_dx, D, C, width, GATED, HAS_ORDER,
                                     FEW_BM, FEW_BD, FEW_BK, STAGES, PRECISION)  # fmt: skip
                else:
                    done = dx_tiles(i_gate, i_up, i_order, own, n, dz, du, m_dx, D, C, width, GATED, HAS_ORDER,
                                     BM, BD, BK, STAGES, PRECISION)  # fmt: skip
                turn = (turn + programs - done % programs) % programs
            goes_on = (first > 0) & (keeps_rests != 0)
            keeps = (is_last == 0) & (keeps_rests != 0)
            if WANTS_GATE | WANTS_UP | WANTS_DOWN:
                weight_tiles(turn, i_x, i_dy, i_order, own, n, dz, du, h, m_gate, m_up, m_down, rests, goes_on, keeps,
                              D, C, width, x_stride, WANTS_GATE, WANTS_UP, WANTS_DOWN, HAS_ORDER,
                              BM, BD, BK, STAGES, PRECISION)  # fmt: skip
            if WANTS_GATE_BIAS | WANTS_UP_BIAS:
                bias_tiles(i_order, n, dz, du, m_gate_bias, m_up_bias, rests + 3 * C.to(tl.int64) * D, goes_on, keeps,
                            C, width, WANTS_GATE_BIAS, WANTS_UP_BIAS, HAS_ORDER, BM, FEW_BD)  # fmt: skip
            if is_last == 0:
                wait_for_all(m_counters + N_WAITING)
        leave_for_all(m_counters + N_WAITING)


@functools.cache
def _kernel(
    dtype: torch.dtype,
    l1_dtype: torch.dtype | None,
    aligned: bool,
    wants: tuple[bool, ...],
    tiles: HeavyTiles,
    **flags: bool,
) -> Kernel:
    """``aligned``: C is a multiple of 16. ``wants``: dx and the fields of NeuronGradients. ``flags``: GATED, SQUARED,
    HAS_GATE_BIAS, HAS_UP_BIAS, HAS_ORDER, HAS_MASK."""
    values = (dtype,) * 6
    arguments = (dtype, l1_dtype or dtype, *values, torch.int32, torch.bool if flags["HAS_MASK"] else dtype)
    of_turns = (torch.int32, torch.int32)
    names = ("DX", *(name.upper() for name in NeuronGradients._fields))
    blocks = tiles._asdict()
    warps, stages = blocks.pop("warps"), blocks.pop("stages")
    return Kernel(
        _heavy_backward_kernel,
        (*arguments, *of_turns, *values, dtype, ANY, MULTIPLE, MULTIPLE if aligned else ANY, ANY, MULTIPLE, ANY, ANY),
        {**flags, "HAS_L1": l1_dtype is not None}
        | {f"WANTS_{name}": wanted for name, wanted in zip(names, wants, strict=True)}
        | {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", "SORT": _SORT}
        | blocks
        | {"STAGES": stages},
        warps=warps,
        stages=stages,
        cooperative=True,
    )


def _chunks(M: int, D: int, dtype: torch.dtype) -> tuple[int, bool]:
    """(tokens at once, whether rests are kept): a few roundings, or rests, whichever takes less memory."""
    chunk = max(_CHUNK, ceil_div(M, _ROUNDINGS))
    if dtype == torch.float32 or chunk > _CHUNK + D:  # rests take as much memory as D tokens
        return min(M, _CHUNK), dtype != torch.float32
    return min(M, chunk), False


def _size_of_space(x: Tensor, n_cold: int, chunk: int, keeps_rests: bool) -> int:
    """Elements: int32 [M] heavy tokens and [M] flags, together a multiple of 128 bytes; dz, du, h [chunk, C rounded up
    to 16s]; rests of the weights' gradients [3, C, D] and of the biases' [2, C]."""
    M, D = x.shape
    size = ceil_div(M, 16) * (128 // x.element_size()) + 3 * chunk * ceil_div(n_cold, 16) * 16
    return size + (n_cold * (3 * D + 2) if keeps_rests else 0)


def add_heavy_gradients_(
    dx: Tensor | None,
    out: NeuronGradients,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    order: Tensor,
    n_hot: int,
    turns: Turns,
    token_mask: Tensor | None,
    *,
    squared: bool,
    programs: int,
    space: Space | None = None,
    chunk: int | None = None,
    tiles: HeavyTiles | None = None,
) -> None:
    """Add the gradients of the heavy tokens' cold neurons to dx [M, D] and ``out``. All tensors on one device, aligned
    to 16 bytes.

    x: the row stride is a multiple of 16 elements; the others are contiguous, ``gate``, ``up``, ``down`` [F, D].
    ``order`` int32 [F]: the ``n_hot`` hot neurons first. ``dl1`` []: the gradient of sum abs(h) over the tokens in
    ``token_mask`` bool [M]. ``turns``: its last counter is 0 before and after, but not during the launch, so two
    streams must not share it. ``programs``: at most the number of SMs. ``chunk``, ``tiles``: for tests."""
    (M, D), n_cold = x.shape, len(gate) - n_hot
    targets = (dx, *out)
    wants = tuple(t is not None for t in targets)
    if M == 0 or n_cold == 0 or not any(wants):
        return
    at_once, keeps_rests = _chunks(M, D, x.dtype) if chunk is None else (min(M, chunk), M > chunk)
    if tiles is None:
        tiles = _TINY if INTERPRETED else heavy_tiles(device_facts(x.device.index)[0], x.dtype)
    has_mask = dl1 is not None and token_mask is not None
    kernel = _kernel(
        x.dtype, None if dl1 is None else dl1.dtype, n_cold % 16 == 0, wants, tiles, GATED=up is not None,
        SQUARED=squared, HAS_GATE_BIAS=gate_bias is not None, HAS_UP_BIAS=up_bias is not None, HAS_ORDER=n_hot > 0,
        HAS_MASK=has_mask,
    )  # fmt: skip
    weights = gate, x if up is None else up, down  # where a tensor is not used: any other
    biases = x if gate_bias is None else gate_bias, x if up_bias is None else up_bias
    workspace = (x.new_empty if space is None else space.take)(_size_of_space(x, n_cold, at_once, keeps_rests))
    tensors = *weights, *biases, order, token_mask if has_mask else x, turns.counters, turns.heavy
    outputs = *(x if t is None else t for t in targets), workspace
    numbers = M, D, n_cold, n_hot, x.stride(0), at_once, int(keeps_rests)
    programs = 1 if INTERPRETED else programs  # the interpreter runs programs one after the other
    kernel(programs, dy, dy if dl1 is None else dl1, x, *tensors, *outputs, *numbers)
