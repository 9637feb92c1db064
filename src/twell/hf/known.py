"""The FFN blocks that ``sparsify_`` knows: one table, by exact class.

A class stands here by module and name, so that nothing is imported that is not there. A subclass is another class: it
may compute something else. Blocks of other classes are converted only by request: ``sparsify_(model, also=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")  # down(act(gate(x)) * up(x))
PLAIN_NAMES = ("up_proj", "down_proj")  # down(act(up(x)))
INLINE_NAMES = ("fc1", "fc2")  # OPT: the decoder layer itself holds and applies them

Also = type[nn.Module] | str | Iterable["type[nn.Module] | str"] | Callable[[nn.Module], bool]


NOBODY: tuple[str, ...] = ()  # the default of ``also``


class Block(NamedTuple):
    """What a known class calls its parts."""

    projections: tuple[str, ...]
    activation: str


def _blocks(projections: tuple[str, ...], activation: str, **classes: str) -> dict[str, Block]:
    """Of transformers' models by folder: class names, several with a space between them."""
    return {
        f"transformers.models.{folder}.modeling_{folder}.{name}": Block(projections, activation)
        for folder, names in classes.items()
        for name in names.split()
    }


KNOWN: dict[str, Block] = {
    **_blocks(
        GATED_NAMES,
        "act_fn",
        llama="LlamaMLP",
        mistral="MistralMLP",
        ministral="MinistralMLP",
        ministral3="Ministral3MLP",
        mllama="MllamaTextMLP",
        qwen2="Qwen2MLP",
        qwen2_moe="Qwen2MoeMLP",
        qwen2_5_vl="Qwen2MLP",
        qwen2_vl="Qwen2MLP",
        qwen3="Qwen3MLP",
        qwen3_5="Qwen3_5MLP",
        qwen3_moe="Qwen3MoeMLP",
        qwen3_next="Qwen3NextMLP",
        qwen3_vl="Qwen3VLTextMLP",
        gemma="GemmaMLP",
        gemma2="Gemma2MLP",
        gemma3="Gemma3MLP",
        granite="GraniteMLP",
        olmo="OlmoMLP",
        olmo2="Olmo2MLP",
        olmo3="Olmo3MLP",
        cohere="CohereMLP",
        cohere2="Cohere2MLP",
        deepseek_v2="DeepseekV2MLP",
        deepseek_v3="DeepseekV3MLP",
        diffllama="DiffLlamaMLP",
        doge="DogeMLP",
        dots1="Dots1MLP",
        ernie4_5="Ernie4_5MLP",
        exaone4="Exaone4MLP",
        glm4_moe="Glm4MoeMLP",
        helium="HeliumMLP",
        hunyuan_v1_dense="HunYuanDenseV1MLP",
        jamba="JambaMLP",
        smollm3="SmolLM3MLP",
        stablelm="StableLmMLP",
    ),
    **_blocks(GATED_NAMES, "activation_fn", llama4="Llama4TextMLP"),
    **_blocks(
        PLAIN_NAMES,
        "act_fn",
        arcee="ArceeMLP",
        jais2="Jais2MLP",
        nemotron="NemotronMLP",
        nemotron_h="NemotronHMLP",
    ),
    **_blocks(INLINE_NAMES, "activation_fn", opt="OPTDecoderLayer"),
}


def class_name(cls: type) -> str:
    """As the table has it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def requested(also: Also) -> Callable[[nn.Module], bool]:
    """Whether a block was asked for: by its class, the class's full name, several of them, or a function."""
    if isinstance(also, (type, str)):
        also = (also,)
    if callable(also):
        return also
    names = []
    for one in also:
        if not isinstance(one, (type, str)):
            raise ValueError(
                f"sparsify_: also takes classes, full names of classes or a function of a block, got {one!r}"
            )
        names.append(one if isinstance(one, str) else class_name(one))
    return lambda block: class_name(type(block)) in names


def describe() -> str:
    """What is looked for in a model, in a few words."""
    return "; ".join(", ".join(names) for names in (GATED_NAMES, PLAIN_NAMES, INLINE_NAMES))
