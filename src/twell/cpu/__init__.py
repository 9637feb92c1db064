"""Sparse FFN on the CPU, built from PyTorch's operations: exact at any sparsity, forward and backward.

The gate is a dense GEMM. Its active elements, listed as CSR, then cost one dot product with a row of Wu
(``torch.sparse.sampled_addmm``) and one scaled row of Wd (``embedding_bag``) each. CSR has no capacity, so
nothing can overflow. A block of tokens runs densely where sparsity would not pay; else it is cut by cost:

- hot neurons fire for many tokens of the block: ``index_select`` of their rows, then GEMM;
- the tail is everything else: gathered.

Bytes, fp32, D 2048, F 5632: a dense FFN reads 138 MB of weights, the gate alone 46 MB, an active element
16 KB. So the gate bounds what a sparse layer takes, with one token by its bytes, with many by its FLOPs.
A gathered element costs about as much as 7 elements of a large GEMM (2 cores, AVX-512).

Every call reads the weights anew and keeps nothing made from them. A neuron-major Wd [D, F] (``w.t()`` is contiguous)
holds a neuron as a row. Otherwise the used columns are gathered in slices of Wd, or the down projection runs on a dense
h. ``freeze`` makes copies that are read faster, for weights that stay: Wd neuron-major, and for one fp32 token an int8
gate of 11.5 MB that rules most neurons out.

Blocks are small enough for the allocator to reuse their buffers: a dense FFN of 2048 tokens spends much of its time on
fresh pages for [M, F] intermediates. Legend: m rows of a block, D and F as everywhere.

one_token.py and block.py: one and many tokens; training.py: the backward; products.py and rows.py: the operations they
are made of; frozen.py: what ``freeze`` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twell import reference
from twell.cpu.block import Block, fewest_tokens
from twell.cpu.frozen import FrozenTensors, down_rows, freeze
from twell.cpu.one_token import in_time
from twell.cpu.training import backward
from twell.reference import Forward, Weights, has_silent_nan, no_statistics

__all__ = ["backward", "fewest_tokens", "forward", "freeze"]

BLOCK_BYTES = 24 << 20  # of a [m, F] buffer; malloc keeps freed buffers up to 32 MiB


def forward(
    x: Tensor,
    w: Weights,
    activation: str = "relu",
    token_mask: Tensor | None = None,
    *,
    want_stats: bool = True,
    save: bool = False,
    frozen: Sequence[Tensor] = (),
) -> Forward:
    """Gated or plain FFN of x [M, D] with its statistics; the twin of ``reference.forward``.

    ``save`` also returns the activations that the backward needs (u only where r is active, zero elsewhere).
    ``frozen`` is what ``freeze`` made from these weights; ignored with ``save``.
    """
    (M, D), F = x.shape, w.gate.shape[0]
    if fewest_tokens(D, F) > M:
        return reference.forward(x, w, activation, token_mask, want_stats=want_stats)
    result = _forward(x, w, activation, token_mask, want_stats, save, frozen)
    if has_silent_nan(x, result.y):  # in a weight: dense products include inactive neurons
        return reference.forward(x, w, activation, token_mask, want_stats=want_stats)
    return result


def _forward(
    x: Tensor,
    w: Weights,
    activation: str,
    token_mask: Tensor | None,
    want_stats: bool,
    save: bool,
    frozen: Sequence[Tensor],
) -> Forward:
    (M, _), F = x.shape, w.gate.shape[0]
    state = FrozenTensors(*frozen) if frozen and not save else None
    if M == 1 and not want_stats and not save:
        return Forward(in_time(x, w, activation, state), *no_statistics(x), x.new_empty(0, F), None)
    down_FD = down_rows(w.down, state)
    y = x.new_empty(M, w.down.shape[0])
    l1_sum, counts = no_statistics(x)
    if want_stats:
        counts = torch.zeros(F, dtype=torch.int32)
    gate = x.new_empty(M if save else 0, F)
    up = None if w.up is None else torch.zeros_like(gate)

    n_blocks = -(-M * F * x.element_size() // BLOCK_BYTES)
    step = max(1, -(-M // max(1, n_blocks)))
    for start in range(0, M, step):
        rows = slice(start, start + step)
        block = Block(x[rows], w, down_FD, activation, None if token_mask is None else token_mask[rows])
        block.run(y[rows], gate[rows] if save else None, up[rows] if save and up is not None else None)
        if want_stats:
            block_l1, block_counts = block.statistics()
            l1_sum += block_l1
            counts += block_counts
    return Forward(y, l1_sum, counts, gate, up)
