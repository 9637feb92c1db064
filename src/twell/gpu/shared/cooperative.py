"""Barriers between the programs of a cooperative launch, which all run at the same time."""

from __future__ import annotations

import triton
import triton.language as tl

from twell.gpu.shared.tiles import INTERPRETED


@triton.jit
def fence(KIND: tl.constexpr):
    """A PTX fence, executed by every thread. ``KIND``: the instruction."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(KIND + "; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, False, 1)


@triton.jit
def wait_for_all(counter):
    """Wait until every program has called this as often as this one. Writes before the call are visible after it."""
    tl.debug_barrier()  # one thread's atomic stands for the program
    before = tl.atomic_add(counter, 1, sem="release", scope="gpu")
    all_here = (before // tl.num_programs(0) + 1) * tl.num_programs(0)
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < all_here:
        pass
    tl.debug_barrier()


@triton.jit
def leave_for_all(counter):
    """The last program to call this resets the counter to 0: nobody waits any more."""
    if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") % tl.num_programs(0) == tl.num_programs(0) - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
