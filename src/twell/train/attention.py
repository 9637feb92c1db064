"""Causal attention without a mask, for training on full blocks of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_CAUSAL = "twell_causal_sdpa"  # transformers makes no mask for an attention that it does not know
AttentionInterface.register(_CAUSAL, sdpa_attention_forward)


@contextlib.contextmanager
def causal_without_a_mask(model: Any) -> Iterator[None]:
    """Within this context the model's scaled dot-product attention is causal and gets no mask.

    Only for sequences without padding. In a compiled model transformers would build a mask [batch, 1, length, length],
    and attention would take twice as long.
    """
    config = model.config
    is_plain = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())  # no windows
    if config._attn_implementation != "sdpa" or not is_plain:
        yield
        return
    model.set_attn_implementation(_CAUSAL)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
