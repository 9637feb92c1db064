"""Configurations of sparse models: a base model's fields, and ``sparsity_*`` fields for the FFNs and their training.

The names are those of the released SparseLM checkpoints. Fields that this package does not know are kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

from twell.fp8.compressed import OWN_FIELD, is_rowwise_fp8

_NOT_PREDICTIONS = ["past_key_values", "ce_loss", "l1_loss", "sparsity"]  # the Trainer must not gather these


@dataclasses.dataclass(kw_only=True, repr=False, eq=False)
class SparsityFields:
    """The ``sparsity_*`` fields that the models use.

    ``sparsity_l1_coeff`` is the weight of the L1 term, ``sparsity_new_intermediate_size`` the width of the FFNs if it
    differs from ``intermediate_size``. The released checkpoints have more fields, which are kept. Loading ignores
    ``sparsity_reinitialize`` on purpose: in the code that wrote it, it means fresh FFN weights at construction.
    """

    sparsity_l1_coeff: float | int = 0.0
    sparsity_gated_mlp: bool = True  # False: plain FFNs
    sparsity_new_intermediate_size: int | None = None
    sparsity_do_track: bool | None = None  # count firing neurons
    # A file's ``quantization_config`` if it describes ``Fp8Linear``s, which our models read themselves. Under its
    # original name transformers would ask for the library that wrote it.
    fp8_quantization: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if is_rowwise_fp8(kwargs.get("quantization_config")):
            found = kwargs.pop("quantization_config")
            self.fp8_quantization = found if isinstance(found, dict) else found.to_dict()
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        found = output.pop(OWN_FIELD, None)
        return output if found is None else {**output, "quantization_config": found}


@dataclasses.dataclass(kw_only=True, repr=False, eq=False)
class LlamaSparseReluConfig(SparsityFields, LlamaConfig):
    """A Llama whose FFNs are sparse: ReLU whatever ``hidden_act`` says."""

    model_type = "llama_sparse_relu"
    keys_to_ignore_at_inference = _NOT_PREDICTIONS


@dataclasses.dataclass(kw_only=True, repr=False, eq=False)
class Qwen2SparseReluConfig(SparsityFields, Qwen2Config):
    """A Qwen2 whose FFNs are sparse: ReLU whatever ``hidden_act`` says."""

    model_type = "qwen2_sparse_relu"
    keys_to_ignore_at_inference = _NOT_PREDICTIONS
