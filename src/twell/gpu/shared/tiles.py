"""Tile sizes by architecture, and device functions that several kernels use."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # no PTX there


class GateTile(NamedTuple):
    """Block sizes of a GEMM: rows, columns, depth; warps and pipeline stages."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


class RowTile(NamedTuple):
    """The tail kernels: neurons gathered at a time, warps per token, pipeline stages."""

    neurons: int
    warps: int
    stages: int

    def warps_for(self, wide: int) -> int:
        """The table is for D 2048; above 4096 a thread would run out of registers. ``wide``: a power of 2 >= D."""
        return max(self.warps, wide // 1024)


class Tiles(NamedTuple):
    """Tile sizes of the split's kernels for one architecture."""

    gate: GateTile
    heavy: GateTile
    use_tma: bool
    heavy_tma: bool = False  # heavy tokens' rows of x are packed, so that TMA can read them
    tail: RowTile = RowTile(2, 4, 1)
    long_tail: RowTile = RowTile(2, 4, 1)  # from about 20 neurons a token on
    tail_backward: RowTile = RowTile(1, 4, 1)


# sm_90 was measured (H200). The others were chosen by shared memory per program: 99 KiB on 86, 89 and 120,
# 163 on 80, 227 on 90 and 100.
_BY_CAPABILITY: dict[int, Tiles] = {
    80: Tiles(GateTile(128, 128, 64, 8, 3), GateTile(64, 128, 64, 8, 3), use_tma=False),
    86: Tiles(GateTile(128, 128, 32, 8, 3), GateTile(64, 128, 32, 8, 3), use_tma=False),
    89: Tiles(GateTile(128, 128, 32, 8, 3), GateTile(64, 128, 32, 8, 3), use_tma=False),
    90: Tiles(
        GateTile(128, 256, 64, 8, 3),
        GateTile(128, 128, 64, 8, 4),
        use_tma=True,
        heavy_tma=True,
        long_tail=RowTile(1, 2, 4),
    ),
    100: Tiles(
        GateTile(128, 128, 64, 8, 4),
        GateTile(64, 128, 64, 8, 3),
        use_tma=True,
        long_tail=RowTile(1, 2, 4),
    ),
    120: Tiles(GateTile(128, 128, 32, 8, 3), GateTile(64, 128, 32, 8, 3), use_tma=False),
}


def narrowed(tile: GateTile) -> GateTile:
    """The heavy kernel's tile for few heavy tokens: narrow, so that every SM has one, and deep."""
    return tile._replace(BM=max(16, tile.BM // 2), BN=max(16, tile.BN // 2), BK=tile.BK * 2)


@functools.cache
def tiles_for(capability: int, dtype: torch.dtype) -> Tiles:
    """The table's entry for a compute capability (major * 10 + minor), or the nearest older one."""
    known = [c for c in _BY_CAPABILITY if c <= capability]
    if not known:
        raise ValueError(f"the Triton kernels need compute capability 8.0 or newer, got {capability / 10}")
    tiles = _BY_CAPABILITY[max(known)]
    if dtype == torch.float32:  # twice the bytes: half the depth, smaller tiles, 8 warps to hold the sums, no TMA
        gate = tiles.gate._replace(BN=128, BK=tiles.gate.BK // 2, warps=8)
        heavy = tiles.heavy._replace(BM=64, BN=64, BK=tiles.heavy.BK // 2, warps=8)
        tiles = tiles._replace(gate=gate, heavy=heavy, use_tma=False, heavy_tma=False)
    return tiles


@functools.cache
def device_facts(index: int) -> tuple[int, int]:
    """(compute capability, multiprocessors) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


# ---------------------------------------------------------------------------------------------------------
# Device functions
# ---------------------------------------------------------------------------------------------------------


@triton.jit
def start_after(OVERLAPS: tl.constexpr):
    """Let the next kernel start early, then wait for everything that the preceding kernel wrote.

    Must be the first statement of a kernel, or absent: a kernel that went on without waiting would let the next one
    start before its inputs are written."""
    let_next_kernel_start(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)


@triton.jit
def let_next_kernel_start(OVERLAPS: tl.constexpr):
    """Takes effect once all programs of this kernel have reached it."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernel_before(OVERLAPS: tl.constexpr):
    """Wait until the preceding kernel's writes are visible."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(i_rows, row, wanted, D, LANES: tl.constexpr):
    """Prefetch rows of D elements (D * element size is a multiple of 16 bytes) into L2 for the next kernel.

    Several threads hold the same elements of ``row``. Only those whose thread number has none of the bits of LANES
    issue the prefetch."""
    address = (i_rows + row.to(tl.int64) * D).to(tl.int64)
    size = 0 * row + D * (i_rows.dtype.element_ty.primitive_bitwidth // 8)
    others = 0 * row + LANES
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 t;
            mov.u32 t, %tid.x;
            and.b32 t, t, $4;
            setp.eq.u32 p, t, 0;
            setp.ne.and.u32 p, $3, 0, p;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [address, size, wanted.to(tl.int32), others],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def take(numbers, wanted, first, n, SLOTS: tl.constexpr):
    """(int32 [SLOTS], bool [SLOTS]): compact those of ``numbers`` whose ``wanted`` is 1 (it is 1 or 0; n of them are
    1), and return the first-th of them on, with a mask of the filled slots."""
    rank = tl.cumsum(wanted, axis=0) - wanted
    slot = first + tl.arange(0, SLOTS)
    chosen = (wanted[:, None] > 0) & (rank[:, None] == slot[None, :])
    return tl.sum(tl.where(chosen, numbers[:, None], 0), axis=0), slot < n


@triton.jit
def relu(x):
    """tl.maximum would drop NaN."""
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def popcount(words):
    """Set bits of each uint32."""
    if INTERPRETED:
        words = words - ((words >> 1) & 0x55555555)
        words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
        words = (words + (words >> 4)) & 0x0F0F0F0F
        n = ((words * 0x01010101) >> 24).to(tl.int32)
    else:
        n = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], tl.int32, True, 1)
    return n


@triton.jit
def popcount64(words):
    """Set bits of each uint64."""
    if INTERPRETED:
        n = popcount(words.to(tl.uint32)) + popcount((words >> 32).to(tl.uint32))
    else:
        n = tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [words], tl.int32, True, 1)
    return n


@triton.jit
def _nth_bit(word, n):
    """Position of the n-th set bit (from 0) of each word, by bisection."""
    place = tl.zeros_like(n)
    for level in tl.static_range(5):
        width = 16 >> level
        below = popcount((word >> place.to(tl.uint32)) & ((1 << width) - 1))
        is_above = below <= n
        n = tl.where(is_above, n - below, n)
        place = tl.where(is_above, place + width, place)
    return place


@triton.jit
def nth_neurons(bits, counts, start, total, BW: tl.constexpr, BU: tl.constexpr):
    """int32 [BU]: positions of the set bits of ``bits`` [BW words], from the start-th on; 0 past the last. ``counts``:
    set bits per word; ``total``: their sum.

    The i-th set bit lies in the word whose number is the number of words that end at or before i: a histogram of the
    words' ends, summed up."""
    ends = tl.cumsum(counts, axis=0)
    local = ends - start
    before = tl.sum((local < 0).to(tl.int32), axis=0)
    inside = (local >= 0) & (local < BU)
    ending = tl.histogram(tl.where(inside, local, 0), BU, mask=inside)
    word = tl.minimum(tl.cumsum(ending, axis=0) + before, BW - 1)
    u = start + tl.arange(0, BU)
    n = u - tl.gather(ends - counts, word, 0)
    place = _nth_bit(tl.gather(bits, word, 0).to(tl.uint32, bitcast=True), n)
    return tl.where(u < total, word * 32 + place, 0)


@triton.jit
def relu_pairs(acc, dtype: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """relu of fp32 [BM, BN] in a 16-bit dtype, two columns per word: uint32 [BM, BN / 2], the first column in the low
    half."""
    first, second = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    if INTERPRETED:
        low = relu(first).to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = relu(second).to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        pairs = low | (high << 16)
    else:
        if dtype == tl.bfloat16:
            pairs = tl.inline_asm_elementwise(
                "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.uint32, True, 1
            )
        else:
            pairs = tl.inline_asm_elementwise(
                "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.uint32, True, 1
            )
    return pairs


@triton.jit
def quarters(t, BM: tl.constexpr, BN: tl.constexpr):
    """Four neighbouring column blocks [BM, BN / 4] of ``t`` [BM, BN]. An epilogue lacks the registers for all of t at
    once."""
    left, right = tl.split(tl.permute(tl.reshape(t, (BM, 2, BN // 2)), (0, 2, 1)))
    first, second = tl.split(tl.permute(tl.reshape(left, (BM, 2, BN // 4)), (0, 2, 1)))
    third, fourth = tl.split(tl.permute(tl.reshape(right, (BM, 2, BN // 4)), (0, 2, 1)))
    return first, second, third, fourth


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile, in an order that walks GROUP_M row tiles together, so that their x stays in L2."""
    in_group = GROUP_M * tiles_n
    group = index // in_group
    first = group * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    return first + (index % in_group) % rows, (index % in_group) // rows
