"""``relufy_`` replaces the activation of a model's FFNs by ReLU, with L1 in the loss for further training."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from twell.hf.classify import activation_name, classify, find_ffns, sparse_ffn_of
from twell.hf.hooks import share_hooks
from twell.hf.known import ACTIVATION_FIELDS, REFUSED, class_name
from twell.hf.models import GatedSparseMLP, LlamaSparseReluForCausalLM, Qwen2SparseReluForCausalLM
from twell.hf.sparsify import Report, Row, wrap
from twell.nn import find_activation

_SPARSE_TYPES: dict[type, Any] = {
    LlamaForCausalLM: LlamaSparseReluForCausalLM,
    Qwen2ForCausalLM: Qwen2SparseReluForCausalLM,
}


def relufy_(model: PreTrainedModel, l1: float = 2e-5) -> Report:
    """Make ReLU the activation of every FFN, in place. The model then computes something else and needs training.

    A Llama or Qwen2 causal LM becomes its ``*_sparse_relu`` type with ``sparsity_l1_coeff = l1``. Both are saved with
    the model, and its loss has the L1 term in any Trainer. Other models get ReLU, also in their configuration, but no
    L1, and the report says so.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"relufy_: expected a transformers model, got {type(model).__name__}")
    if not 0 <= l1 < math.inf:
        raise ValueError(f"relufy_: l1 must be a finite number of at least 0, got {l1}")
    if type(model) in _SPARSE_TYPES:
        return _become_sparse_type(model, l1)
    fields = [field for field in ACTIVATION_FIELDS if hasattr(model.config, field)]
    became = "relu, without L1 in the model's own loss"
    if not fields:  # as Bloom's, whose GELU is written into its code
        became += "; its configuration has no place for it, so call relufy_ after every from_pretrained"
    rows = []
    for name, _, _, ffn in list(find_ffns(model)):
        was = "relu" if sparse_ffn_of(ffn) is not None else activation_name(ffn)
        found = find_activation(ffn)
        if was == "relu":
            rows.append(Row(name, was, None, "is ReLU already"))
        elif class_name(type(ffn)) in REFUSED:
            rows.append(Row(name, was, None, REFUSED[class_name(type(ffn))]))
        elif found is None:
            rows.append(Row(name, was, None, "does not tell its activation"))
        else:
            setattr(ffn, found[0], nn.ReLU())
            rows.append(Row(name, was, became))
    if any(row.became for row in rows):
        for field in fields:
            setattr(model.config, field, "relu")
    return Report(tuple(rows))


def _become_sparse_type(model: Any, l1: float) -> Report:
    causal_lm = _SPARSE_TYPES[type(model)]
    base, config_class = causal_lm.model_class, causal_lm.config_class
    ffns = [wrap(layer.mlp, GatedSparseMLP, "relu") for layer in model.model.layers]
    shares = [ffn.share() for ffn in ffns]
    if (model.tp_size or 1) > 1 and not all(share is not None and share.is_whole for share in shares):
        raise ValueError("relufy_: tensor parallel FFNs must be sharded by neurons, as transformers 5.16 does")
    fields = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    config = config_class.from_dict({**fields, "sparsity_l1_coeff": l1})
    config._attn_implementation = model.config._attn_implementation
    if hasattr(model.config, "distributed_config"):
        config.distributed_config = model.config.distributed_config
    rows = []
    for i, (layer, ffn) in enumerate(zip(model.model.layers, ffns, strict=True)):
        was = activation_name(layer.mlp)
        share_hooks(layer.mlp, ffn)
        layer.mlp = ffn
        layer.__class__ = base.decoder_layer
        kind, why = classify(ffn)
        rows.append(Row(f"model.layers.{i}.mlp", was, f"relu, l1 {l1:g}", why, kind=kind))
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(model.config)):
            module.config = config
    model.model.__class__, model.__class__ = base, causal_lm
    for module in (model, model.model):  # instances hold the base class's, which names the old layer class
        module._no_split_modules = list(type(module)._no_split_modules)
    return Report(tuple(rows))
