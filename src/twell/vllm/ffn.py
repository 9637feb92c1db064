"""The FFN in vLLM's model: one process's share of the neurons, called by compiled code and CUDA graphs.

This module does not import vLLM, so tests can run the kernels under vLLM's conditions where it cannot be installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase, neuron_major_
from twell.ops import functional as ops


class VllmFFN(SparseFFNBase):
    """An FFN with one process's share of the neurons."""

    n_shares: int
    own: slice  # this process's neurons of the layer
    summed: Callable[[Tensor], Tensor]  # sums y over all processes
    _kept_compiled: tuple[Tensor, ...] = ()  # frozen tensors; vLLM cannot save compiled code with other types

    def forward(self, x: Tensor, token_mask: Tensor | None = None, return_stats: bool = False) -> Any:
        """y, summed over all shares."""
        if torch.compiler.is_compiling():
            # The operation chooses by the plan when it runs. A choice in Python would be made only once, for the
            # largest batch, with which vLLM compiles.
            w, kept = self._weights(), () if self.frozen is None else self._kept_compiled
            y = ops.run(x, w, self.activation, self.backend, self._plan_compiled, kept, None, False)
        else:
            y = self._ffn(x, None, False)
        return self.summed(y) if self.n_shares > 1 else y

    def plan_own(self, fired: Tensor, tokens: int) -> None:
        """Plan by counts [F] of the whole layer. The plan is final: in vLLM no layer looks at tokens."""
        self.set_plan(dataclasses.replace(self._plan_for(fired[self.own], tokens), tail=None))

    def _place_plan(self, device: torch.device | None = None) -> None:
        """vLLM takes every symbolic size in compiled code for the number of tokens. So compiled code gets detached
        tensors, which are not marked as symbolic as the plan's own are, and the plan's sizes become constants."""
        super()._place_plan(device)
        self._plan_compiled = tuple(None if t is None else t.detach() for t in self._plan_eager)

    def freeze(self) -> None:
        super().freeze()
        self._keep_for_compiled_code()

    def refresh(self) -> None:
        super().refresh()
        self._keep_for_compiled_code()

    def _keep_for_compiled_code(self) -> None:
        self._kept_compiled = () if self.frozen is None else tuple(self.frozen.tensors(self._weights(), self.plan))

    def compiled_for(self) -> list[Any]:
        """The sizes and types that are constants in compiled code."""
        given = (*self._plan_compiled, *self._kept_compiled)
        return [(tuple(t.shape), str(t.dtype)) for t in given if t is not None]


class GatedVllmFFN(VllmFFN, GatedSparseFFN):
    pass


class PlainVllmFFN(VllmFFN, SparseFFN):
    pass


def vllm_ffn_of(
    ffn: SparseFFNBase,
    rank: int,
    n_shares: int,
    device: torch.device,
    dtype: torch.dtype,
    summed: Callable[[Tensor], Tensor],
) -> VllmFFN:
    """The FFN of one process's neurons. Its weights are allocated and not yet set."""
    first: Any = getattr(ffn, ffn.projections[0])
    D, F = first.in_features, first.out_features
    if F % n_shares:
        raise ValueError(f"feed-forward layers of {F} neurons cannot be shared out evenly over {n_shares} processes")
    own, cls = F // n_shares, GatedVllmFFN if len(ffn.projections) == 3 else PlainVllmFFN
    with_bias = first.bias is not None
    share = cls(D, own, activation=ffn.activation, bias=with_bias, device="meta", dtype=dtype).to_empty(device=device)
    share.n_shares, share.own, share.summed = n_shares, slice(rank * own, (rank + 1) * own), summed
    share.reset_counts()
    share.eval().requires_grad_(False)
    neuron_major_(getattr(share, share.projections[-1]))
    return share


@torch.inference_mode()
def compile_kernels(ffns: Iterable[VllmFFN], most_tokens: int) -> None:
    """Compile the kernels for large batches: run each FFN on 128, 256, 512, ... and ``most_tokens`` tokens. vLLM itself
    runs only the sizes of its CUDA graphs; the first longer prompts would wait for seconds."""
    sizes = [n for n in (128 << i for i in range(24)) if n < most_tokens]
    for ffn in ffns:
        gate = getattr(ffn, ffn.projections[0]).weight
        x = gate.new_zeros(most_tokens, gate.shape[1])
        for n in (*sizes, most_tokens):
            ffn._ffn(x[:n], None, False)  # without the sum over processes
