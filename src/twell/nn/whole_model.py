"""Functions of a whole model: find its sparse FFNs, freeze them, restore the layout of their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from twell.nn.layers import INLINE, SparseFFNBase
from twell.reference import is_neuron_major


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = "; load it first: AutoModelForCausalLM.from_pretrained(...)" if isinstance(model, str) else ""
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")


def sparse_ffns(model: nn.Module) -> Iterator[tuple[str, SparseFFNBase]]:
    """(name, FFN) of every sparse FFN in the model's order, including those that a block runs itself, as OPT's does."""
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, SparseFFNBase):
            yield name, module
        elif INLINE in module.__dict__:
            yield name, module.__dict__[INLINE]


def restore_layout_(model: nn.Module) -> int:
    """Make weights that ``sparsify_`` has laid out neuron by neuron contiguous again; returns how many."""
    changed = 0
    for _, ffn in sparse_ffns(model):
        for weight in getattr(ffn, ffn.projections[-1]).parameters():  # of the linear, or of the one an adapter wraps
            if weight.dim() == 2 and not weight.is_contiguous() and is_neuron_major(weight):
                weight.data = weight.data.contiguous()
                changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class FreezeReport:
    """What ``freeze_`` did; prints as one line."""

    layers: int
    bytes: int
    skipped: tuple[tuple[str, str], ...]  # name and reason

    def __str__(self) -> str:
        line = f"{self.layers} feed-forward layers frozen, {self.bytes / 1e6:,.1f} MB beside their weights"
        return line + (f"; {len(self.skipped)} not: {self.skipped[0][1]}" if self.skipped else "")


def freeze_(model: nn.Module) -> FreezeReport:
    """Declare that the weights of a model's sparse FFNs stay as they are, and keep beside them copies that kernels read
    faster.

    After a write through ``.data`` call ``refresh_``; other changes of weights are seen. Not for layers in training.
    """
    layers, skipped = list(sparse_ffns(model)), []
    if any(ffn.training for _, ffn in layers):
        raise ValueError("freeze_: the model is in training mode; call model.eval() first")
    for name, ffn in layers:
        reason = ffn.why_called()
        if reason is None:
            ffn.freeze()
        else:
            skipped.append((name, reason))
    frozen = [ffn for _, ffn in layers if ffn.frozen is not None]
    return FreezeReport(len(frozen), sum(ffn.frozen_bytes() for ffn in frozen), tuple(skipped))


def thaw_(model: nn.Module) -> int:
    """Drop the copies that ``freeze_`` made, and those that kernels keep of FP8 weights until their next sparse call;
    returns how many layers were frozen."""
    frozen = 0
    for _, ffn in sparse_ffns(model):
        frozen += ffn.frozen is not None
        ffn.frozen = ffn._fp8 = None
    return frozen


def refresh_(model: nn.Module) -> int:
    """Rewrite frozen state, and the kernels' copies of FP8 weights, in place from the present weights; returns how many
    layers have either."""
    refreshed = 0
    for _, ffn in sparse_ffns(model):
        has_fp8 = ffn.refresh_fp8()
        ffn.refresh()
        refreshed += has_fp8 or ffn.frozen is not None
    return refreshed
