"""The two parts of a sparse language model's loss, and the cross-entropy without all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from twell.ops import Stats

IGNORED_LABEL = -100


def counted_tokens(labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """bool [B, S]: the tokens that count in L1 and statistics; None if all do.

    With labels these are the tokens whose prediction counts in the cross-entropy, else those that are not padding.
    """
    if labels is not None and shift_labels is None:
        shift_labels = _shifted(labels)
    if shift_labels is not None:
        return shift_labels != IGNORED_LABEL
    if attention_mask is not None and attention_mask.dim() == 2:
        return attention_mask.bool()
    return None


def _shifted(labels: Tensor) -> Tensor:
    """The label that each token is to predict."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)


def l1_loss(stats: tuple[Stats, ...], num_items_in_batch: Tensor | int | None) -> Tensor:
    total = torch.stack([s.l1_sum for s in stats]).mean()
    if num_items_in_batch is None:
        return total / stats[0].tokens
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


def chunked_cross_entropy() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of hidden states [M, D], weights [V, D] and labels [M]: the sum of the cross-entropies, in float32."""
    if hasattr(nn.functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        # Summed here: torch 2.13 adds up losses in the dtype of the weights: in bf16 the sum is per cents off.
        return lambda hidden, weight, labels: (
            nn.functional.linear_cross_entropy(
                hidden, weight, labels, reduction="none", ignore_index=IGNORED_LABEL, options=options
            )
            .float()
            .sum()
        )
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        raise RuntimeError(
            f"save_memory needs torch 2.13, or pip install liger-kernel; this is torch {torch.__version__}"
        ) from None
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED_LABEL, reduction="sum", accum_dtype=torch.float32)
    # Dynamo of torch 2.11 cannot trace it: a compiled model leaves its graph for the loss.
    return torch.compiler.disable(lambda hidden, weight, labels: loss(weight, hidden, labels))


def loss_in_chunks(hidden: Tensor, lm_head: nn.Linear, labels: Tensor, kwargs: dict[str, Any]) -> Any:
    """The loss that transformers gives causal language models. ``kwargs``: those of the model's forward."""
    shift_labels = kwargs.get("shift_labels")
    wanted = (_shifted(labels) if shift_labels is None else shift_labels).reshape(-1).to(hidden.device)
    weight, device_type = lm_head.weight, hidden.device.type
    if torch.is_autocast_enabled(device_type):  # as autocast casts a linear layer's
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device_type, enabled=False):
        total = chunked_cross_entropy()(hidden.reshape(-1, hidden.shape[-1]), weight, wanted)
    n = kwargs.get("num_items_in_batch")
    return total.float() / torch.as_tensor((wanted != IGNORED_LABEL).sum() if n is None else n, device=total.device)
