"""Checkpoints that lack weights are refused: transformers makes up what is missing at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMED = 5


def load_causal_lm(name: Any, **options: Any) -> Any:
    """``AutoModelForCausalLM.from_pretrained`` of a checkpoint that has all weights of its model."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    model, info = loaded
    refuse_missing(name, info)
    return model


def refuse_missing(name: Any, info: Mapping[str, Any]) -> None:
    """A ValueError with the names of what is missing; ``info``: transformers' loading info."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueError(
            f"{name} lacks {len(missing)} of its model's weights: {', '.join(missing[:_NAMED])}{more}. They would be "
            f"random; the checkpoint is incomplete, or config.json is of another model"
        )
