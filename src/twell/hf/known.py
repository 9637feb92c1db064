"""The FFN blocks that ``sparsify_`` knows: one table, by exact class; and those that it refuses, each with the reason.

A class stands here by module and name, so that nothing is imported that is not there. A subclass is another class: it
may compute something else. Blocks of other classes are converted only by request: ``sparsify_(model, also=...)``.
``tools/covered_models.py`` lists the models of transformers that have these blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")  # down(act(gate(x)) * up(x))
PLAIN_NAMES = ("up_proj", "down_proj")  # down(act(up(x)))

# The fields of configurations that name the FFN's activation.
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act", "activation")

# Subclasses of nn.Linear that multiply by their weight and add their bias, as it does.
LINEARS = ("transformers.models.falcon.modeling_falcon.FalconLinear",)

Also = type[nn.Module] | str | Iterable["type[nn.Module] | str"] | Callable[[nn.Module], bool]


NOBODY: tuple[str, ...] = ()  # the default of ``also``


class Block(NamedTuple):
    """What a known class calls its parts."""

    projections: tuple[str, ...]  # the one that the activation follows first, the output last
    activation: str
    is_inline: bool = False  # it does more than an FFN, so it stays, and its three parts are stood in for: inline.py


def _name(folder: str, cls: str) -> str:
    """The full name of a class in one of transformers' models."""
    return f"transformers.models.{folder}.modeling_{folder}.{cls}"


def _blocks(projections: tuple[str, ...], activation: str, is_inline: bool = False, **classes: str) -> dict[str, Block]:
    """Classes of transformers' models, by folder."""
    return {_name(folder, cls): Block(projections, activation, is_inline) for folder, cls in classes.items()}


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
    **_blocks(("fc1", "fc2"), "activation_fn", nanochat="NanoChatMLP", phi="PhiMLP"),
    **_blocks(
        ("dense_h_to_4h", "dense_4h_to_h"),
        "act",
        falcon="FalconMLP",
        gpt_neox="GPTNeoXMLP",
        persimmon="PersimmonMLP",
    ),
    # These add the residual, have dropout, or are whole decoder layers.
    **_blocks(("fc1", "fc2"), "activation_fn", is_inline=True, opt="OPTDecoderLayer"),
    **_blocks(("dense_h_to_4h", "dense_4h_to_h"), "gelu_impl", is_inline=True, bloom="BloomMLP"),
    **_blocks(PLAIN_NAMES, "act", is_inline=True, mpt="MptMLP"),
    **_blocks(("fc_in", "fc_out"), "act", is_inline=True, codegen="CodeGenMLP", gptj="GPTJMLP"),
    **_blocks(
        ("c_fc", "c_proj"),
        "act",
        is_inline=True,
        gpt_bigcode="GPTBigCodeMLP",
        gpt_neo="GPTNeoMLP",
        starcoder2="Starcoder2MLP",
    ),
}
NAMES = tuple(dict.fromkeys(block.projections for block in KNOWN.values()))  # of projections that are looked for

_FUSED = "gate_up_proj holds the gate and the up projection in one weight, and the sparse operation takes two"
_CONV1D = "its Conv1D weights are the transposes of nn.Linear's, and the state dict has to keep them so"
REFUSED: dict[str, str] = {
    _name("bitnet", "BitNetMLP"): "ffn_sub_norm divides a token's neurons by their root mean square before down_proj, "
    "and the sparse operation returns y without that number",
    _name("ctrl", "EncoderLayer"): "its FFN is a bare nn.Sequential, which no class tells from others",
    _name("gemma3n", "Gemma3nTextMLP"): "no ReLU: a GELU of what exceeds a cut that is computed from the whole token",
    _name("glm", "GlmMLP"): _FUSED,
    _name("glm4", "Glm4MLP"): _FUSED,
    _name("gpt2", "GPT2MLP"): _CONV1D,
    _name("openai", "MLP"): _CONV1D,
    _name("phi3", "Phi3MLP"): _FUSED,
    _name("reformer", "ChunkReformerFeedForward"): "its projections are in two modules with dropout before the "
    "activation, run in chunks, and reversible layers run them again in the backward",
    _name("rwkv", "RwkvFeedForward"): "its ReLU² is written into a forward that also mixes neighbouring tokens "
    "and gates y",
    _name("xlm", "TransformerFFN"): "GELU by default, ReLU with gelu_activation=False; its forward runs in chunks",
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
    return "; ".join(", ".join(names) for names in NAMES)
