"""The FFN blocks that ``sparsify_`` knows, by exact class, and those that it refuses, each with the reason.

Classes are given by name, so nothing is imported. A subclass is another class: it may compute something else. Blocks of
other classes are converted only on request: ``sparsify_(model, also=...)``. ``tools/covered_models.py`` lists
the models of transformers that have these blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")  # down(act(gate(x)) * up(x))
PLAIN_NAMES = ("up_proj", "down_proj")  # down(act(up(x)))

# The fields of configurations that name the FFN's activation.
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act", "activation")

# Subclasses of nn.Linear that compute the same as nn.Linear.
LINEARS = ("transformers.models.falcon.modeling_falcon.FalconLinear",)

Also = type[nn.Module] | str | Iterable["type[nn.Module] | str"] | Callable[[nn.Module], bool]
NOBODY: tuple[str, ...] = ()  # the default of ``also``


class PartNames(NamedTuple):
    """The names that a known class gives its parts."""

    projections: tuple[str, ...]  # the one before the activation first, the output last
    activation: str
    is_inline: bool = False  # the block does more than an FFN: it stays, and its three parts are replaced (inline.py)


def _full_name(short: str) -> str:
    """Of a class in transformers' models: "llama.LlamaMLP" -> "transformers.models.llama.modeling_llama.LlamaMLP"."""
    folder, _, name = short.partition(".")
    return f"transformers.models.{folder}.modeling_{folder}.{name}"


def _classes(shorts: str, projections: tuple[str, ...], activation: str, *, inline: bool = False) -> dict:
    return {_full_name(short): PartNames(projections, activation, inline) for short in shorts.split()}


_GATED = """
    cohere.CohereMLP cohere2.Cohere2MLP cwm.CwmMLP deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP
    diffllama.DiffLlamaMLP doge.DogeMLP dots1.Dots1MLP ernie4_5.Ernie4_5MLP exaone4.Exaone4MLP exaone_moe.ExaoneMoeMLP
    gemma.GemmaMLP gemma2.Gemma2MLP gemma3.Gemma3MLP glm4_moe.Glm4MoeMLP granite.GraniteMLP helium.HeliumMLP
    hunyuan_v1_dense.HunYuanDenseV1MLP hyperclovax.HyperCLOVAXMLP jamba.JambaMLP llama.LlamaMLP minicpm3.MiniCPM3MLP
    ministral.MinistralMLP ministral3.Ministral3MLP mistral.MistralMLP mllama.MllamaTextMLP olmo.OlmoMLP olmo2.Olmo2MLP
    olmo3.Olmo3MLP qwen2.Qwen2MLP qwen2_5_vl.Qwen2MLP qwen2_moe.Qwen2MoeMLP qwen2_vl.Qwen2MLP qwen3.Qwen3MLP
    qwen3_5.Qwen3_5MLP qwen3_moe.Qwen3MoeMLP qwen3_next.Qwen3NextMLP qwen3_vl.Qwen3VLTextMLP smollm3.SmolLM3MLP
    stablelm.StableLmMLP vaultgemma.VaultGemmaMLP
"""
_PLAIN = "apertus.ApertusMLP arcee.ArceeMLP jais2.Jais2MLP nemotron.NemotronMLP nemotron_h.NemotronHMLP"
_FC = ("fc1", "fc2")
_DENSE_H = ("dense_h_to_4h", "dense_4h_to_h")
KNOWN: dict[str, PartNames] = {
    **_classes(_GATED, GATED_NAMES, "act_fn"),
    **_classes("llama4.Llama4TextMLP", GATED_NAMES, "activation_fn"),
    **_classes(_PLAIN, PLAIN_NAMES, "act_fn"),
    **_classes("nanochat.NanoChatMLP phi.PhiMLP", _FC, "activation_fn"),
    **_classes("falcon.FalconMLP gpt_neox.GPTNeoXMLP persimmon.PersimmonMLP", _DENSE_H, "act"),
    # These add the residual, have dropout, or are whole decoder layers.
    **_classes("opt.OPTDecoderLayer", _FC, "activation_fn", inline=True),
    **_classes("bloom.BloomMLP", _DENSE_H, "gelu_impl", inline=True),
    **_classes("mpt.MptMLP", PLAIN_NAMES, "act", inline=True),
    **_classes("codegen.CodeGenMLP gptj.GPTJMLP", ("fc_in", "fc_out"), "act", inline=True),
    **_classes(
        "gpt_bigcode.GPTBigCodeMLP gpt_neo.GPTNeoMLP starcoder2.Starcoder2MLP", ("c_fc", "c_proj"), "act", inline=True
    ),
}
NAMES = tuple(dict.fromkeys(parts.projections for parts in KNOWN.values()))  # names of projections to look for

_FUSED = "gate_up_proj holds the gate and the up projection in one weight, and the sparse operation takes two"
_CONV1D = "its Conv1D weights are the transposes of nn.Linear's, and the state dict has to keep them so"
REFUSED: dict[str, str] = {
    _full_name(short): reason
    for short, reason in {
        "bitnet.BitNetMLP": "ffn_sub_norm divides a token's neurons by their root mean square before down_proj, "
        "and the sparse operation returns y without that number",
        "ctrl.EncoderLayer": "its FFN is a bare nn.Sequential, which no class tells from others",
        "gemma3n.Gemma3nTextMLP": "no ReLU: a GELU of what exceeds a cut that is computed from the whole token",
        "glm.GlmMLP": _FUSED,
        "glm4.Glm4MLP": _FUSED,
        "gpt2.GPT2MLP": _CONV1D,
        "openai.MLP": _CONV1D,
        "phi3.Phi3MLP": _FUSED,
        "reformer.ChunkReformerFeedForward": "its projections are in two modules with dropout before the "
        "activation, run in chunks, and reversible layers run them again in the backward",
        "rwkv.RwkvFeedForward": "its ReLU² is written into a forward that also mixes neighbouring tokens and gates y",
        "xlm.TransformerFFN": "GELU by default, ReLU with gelu_activation=False; its forward runs in chunks",
    }.items()
}


def class_name(cls: type) -> str:
    """The full name of a class, as in the tables above."""
    return f"{cls.__module__}.{cls.__qualname__}"


def requested(also: Also) -> Callable[[nn.Module], bool]:
    """A function that says whether ``also`` asks for a block."""
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
    """The names of projections that are looked for, in one line."""
    return "; ".join(", ".join(names) for names in NAMES)
