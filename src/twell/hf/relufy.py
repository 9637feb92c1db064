"""``relufy_`` replaces the activation of a model's FFNs by ReLU, with L1 in the loss for further training."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
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
_NOT_SAVED = "; the configuration cannot say so of these layers alone: call relufy_ after every from_pretrained"


def relufy_(model: PreTrainedModel, l1: float = 2e-5) -> Report:
    """Make ReLU the activation of a language model's FFNs, in place. The model then computes something else and needs
    training.

    A Llama or Qwen2 causal LM becomes its ``*_sparse_relu`` type with ``sparsity_l1_coeff = l1``. Both are saved with
    the model, and its loss has the L1 term in any Trainer. Other models get ReLU, but no L1, and the report says so.
    Their configuration names ReLU, too, unless other modules would follow it, such as routed experts or Mamba: then the
    report says that a saved model loads without ReLU.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"relufy_: expected a transformers model, got {type(model).__name__}")
    if not 0 <= l1 < math.inf:
        raise ValueError(f"relufy_: l1 must be a finite number of at least 0, got {l1}")
    if type(model) in _SPARSE_TYPES:
        return _become_sparse_type(model, l1)
    readers = _readers(model)
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
        elif readers and name not in readers:
            rows.append(Row(name, was, None, "the language model's configuration does not name its activation"))
        else:
            setattr(ffn, found[0], nn.ReLU())
            rows.append(Row(name, was, "relu, without L1 in the model's own loss"))
    changed = {row.layer for row in rows if row.became}
    relu = changed | {row.layer for row in rows if row.was == "relu"}
    if set() < changed <= readers <= relu:
        _set_relu(model.config)
    else:
        rows = [dataclasses.replace(row, became=row.became and row.became + _NOT_SAVED) for row in rows]
    return Report(tuple(rows))


def _set_relu(config: Any) -> None:
    """For the language model of a composite model as for a model of text."""
    text = config.get_text_config()
    for field in ACTIVATION_FIELDS:
        if hasattr(text, field):
            setattr(text, field, "relu")


def _readers(model: PreTrainedModel) -> set[str]:
    """The names of the modules that would have another activation if the configuration named ReLU."""
    config = copy.deepcopy(model.config)
    before = _attributes(type(model), config)
    _set_relu(config)
    after = _attributes(type(model), config)
    return {name for name, key in before.keys() & after.keys() if before[name, key] != after[name, key]}


def _attributes(model_class: Any, config: Any) -> dict[tuple[str, str], Any]:
    """{(module, attribute): its value, or of what type it is} of a new model on the meta device."""
    with torch.device("meta"):
        model = model_class(config)
    return {
        (name, key): value if isinstance(value, str | int) else getattr(value, "__name__", type(value))
        for name, module in model.named_modules()
        for key, value in (*vars(module).items(), *module._modules.items())
    }


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
