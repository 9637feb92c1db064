"""Recipes: what to train and how, in plain Python. The defaults are the paper's settings.

A recipe is a frozen dataclass, and a preset is a function that returns one. ``override`` changes fields by strings
``key=value``, as the command line does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and its training. Tokens a step = ``sequences_per_step`` x ``context``."""

    # model (Llama)
    hidden_size: int = 2048
    intermediate_size: int = 5632
    layers: int = 28
    heads: int = 32
    context: int = 2048
    rope_theta: float = 1e5
    gated: bool = True
    activation: str = "relu"  # "silu": the ordinary dense Llama, for comparison
    vocab_size: int = 49152  # for a tokenizer trained on the data; a given tokenizer has its own

    # sparsity
    target_active: float = 0.01  # active neurons a token, as a share (below 1) or a number; steers l1
    l1: float | None = None  # a fixed coefficient instead; target_active then has no effect
    l1_warmup_start: int = 0  # for a fixed l1
    l1_warmup_end: int = 0
    dead_after_tokens: int = 10_000_000
    restart_every: int = 0  # steps between fresh weights for dead neurons; 0: never
    restart_until: int = 0  # the last step with fresh weights; 0: no limit
    plan_every: int = 50  # steps between plans for the sparse kernels, on a GPU; 0: all layers stay dense

    # optimisation
    steps: int = 30_000
    sequences_per_step: int = 512
    micro_batch: int = 8  # most sequences that a process computes at once
    lr: float = 1e-3
    lr_warmup: int = 600
    weight_decay: float = 0.1
    clip: float = 1.0  # largest gradient norm; 0: no limit
    seed: int = 0

    # housekeeping, in steps
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 1000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), str(field.type))
        if self.hidden_size % self.heads or self.hidden_size // self.heads % 2:
            raise ValueError(f"hidden_size {self.hidden_size} is no even multiple of heads {self.heads}")
        for name, needed in (("l1_warmup_start", "l1_warmup_end"), ("restart_until", "restart_every")):
            if getattr(self, name) and not getattr(self, needed):
                raise ValueError(f"{name} does nothing without {needed}")
        if self.l1_warmup_end and self.l1 is None:
            raise ValueError("l1_warmup_end is for a fixed l1: steered, l1 rises by itself")
        if self.target_active > self.intermediate_size:
            raise ValueError(
                f"target_active {self.target_active:g} is more than all {self.intermediate_size} neurons: give a share "
                "below 1, or a number of neurons"
            )
        if self.l1_warmup_start > self.l1_warmup_end:
            raise ValueError(f"l1_warmup_start {self.l1_warmup_start} is after l1_warmup_end {self.l1_warmup_end}")
        if self.activation not in ("relu", "silu"):
            raise ValueError(f"activation must be relu or silu, got {self.activation!r}")
        if self.activation == "silu" and (self.l1 or self.restart_every or not self.gated):
            raise ValueError(
                "activation=silu makes a dense gated model: it takes no l1, restart_every=0 and gated=true"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.context

    @property
    def target_neurons(self) -> float | None:
        """The active neurons a token that l1 is steered to; None if l1 is fixed, and for a SiLU model."""
        if self.l1 is not None or self.activation == "silu":
            return None
        return self.target_active * (self.intermediate_size if self.target_active < 1 else 1)


_KINDS: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float | int,
    "float | None": float | int | None,
    "str": str,
}
_SIZES = ("hidden_size", "intermediate_size", "layers", "heads", "vocab_size", "rope_theta")
_COUNTS = ("steps", "sequences_per_step", "micro_batch", "log_every", "eval_every", "save_every")
_LEAST = {**dict.fromkeys(_SIZES + _COUNTS, 1), "context": 2}  # other numbers: 0
_ABOVE_ZERO = ("lr", "target_active")
_MOST = {"seed": 2**32 - 1, "vocab_size": 2**22}  # other numbers: 2**63 - 1


def _check(name: str, value: Any, kind: str) -> None:
    """Refuse a value of the wrong type, not finite or out of range."""
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be of type {kind}, got {value!r}")
    if kind in ("bool", "str") or value is None:
        return
    least, most = _LEAST.get(name, 0), _MOST.get(name, 2**63 - 1)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    if name in _ABOVE_ZERO and value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if isinstance(value, int) and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def tiny() -> Recipe:
    """Trains in a few minutes on two CPU cores."""
    return Recipe(
        hidden_size=128,
        intermediate_size=512,
        layers=4,
        heads=4,
        context=128,
        vocab_size=2048,
        steps=600,
        sequences_per_step=16,
        micro_batch=16,
        lr=3e-3,
        lr_warmup=30,
        dead_after_tokens=200_000,
        eval_every=100,
        save_every=100,
    )


def small() -> Recipe:
    """About 100M parameters, GPT-2's vocabulary."""
    return Recipe(
        hidden_size=768,
        intermediate_size=2048,
        layers=10,
        heads=12,
        context=1024,
        vocab_size=50257,
        steps=1500,
        sequences_per_step=48,
        micro_batch=48,
        lr_warmup=100,
        dead_after_tokens=5_000_000,
    )


PRESETS: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    "small": small,
    "0.5b": lambda: Recipe(layers=8, steps=10_000),
    "1b": lambda: Recipe(layers=18, steps=20_000),
    "1.5b": lambda: Recipe(layers=28, steps=30_000),
    "2b": lambda: Recipe(layers=38, steps=40_000),
}


def preset(name: str) -> Recipe:
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def override(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Apply ``key=value`` strings.

    >>> override(tiny(), ["target_active=0.02", "gated=false"]).target_neurons
    10.24
    >>> override(tiny(), ["l1=2e-4"]).target_neurons is None
    True
    """
    fields = {f.name: f.type for f in dataclasses.fields(recipe)}
    values: dict[str, Any] = {}
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator or key not in fields:
            raise ValueError(f"{change!r}: expected key=value with a key of {', '.join(fields)}")
        values[key] = _parse(text, str(fields[key]))
    changed = dataclasses.replace(recipe, **values)
    if "target_active" in values and changed.target_neurons is None:
        raise ValueError("target_active does nothing with a fixed l1 or activation=silu: leave one of them out")
    return changed


def _parse(text: str, kind: str) -> bool | int | float | str:
    """The value that a text stands for; the text itself if it is none of this kind, which the recipe then refuses."""
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return text if kind == "str" else int(text) if kind == "int" else float(text)
    except ValueError:
        return text
