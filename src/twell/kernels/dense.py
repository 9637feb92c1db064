"""h = a(z) * u in one pass, for layers that run densely: what a compiler would fuse, without one.

Bytes: z and u in, h out over z: 3 * M * F elements, 0.55 GB at M 16384, F 5632 in bf16 (0.13 ms on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.launch import ceil_div, launch
from twell.kernels.tiles import relu

_BLOCK = 2048


@triton.jit
def _activate_kernel(m_z, i_u, n, BLOCK: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = relu(tl.load(m_z + at, mask=inside, other=0.0).to(tl.float32))
    if SQUARED:
        a = a * a
    if GATED:
        a = a * tl.load(i_u + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(m_z + at, a.to(m_z.dtype.element_ty), mask=inside)


def activate_(z: Tensor, u: Tensor | None, *, squared: bool) -> Tensor:
    """relu(z), squared if asked, times u; in place of z. Both contiguous."""
    if z.numel():
        launch(
            _activate_kernel,
            ceil_div(z.numel(), _BLOCK),
            (z, z if u is None else u, z.numel()),
            {"BLOCK": _BLOCK, "GATED": u is not None, "SQUARED": squared},
            warps=8,
            stages=1,
        )
    return z
