"""Configurations of sparse models: a base model's, plus what the sparse FFNs and their training need.

The field names are those of the released SparseLM checkpoints. Fields this package does not know are kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

from twell.fp8.compressed import OWN_FIELD, is_rowwise_fp8

_NOT_PREDICTIONS = ["past_key_values", "ce_loss", "l1_loss", "sparsity"]  # what the Trainer must not gather


@dataclasses.dataclass(kw_only=True, repr=False, eq=False)
class SparsityFields:
    """The ``sparsity_*`` fields.

    Acted on here: ``sparsity_l1_coeff`` (weight of the L1 term), ``sparsity_gated_mlp`` (False: plain FFN),
    ``sparsity_new_intermediate_size`` (width of the FFNs where it differs from ``intermediate_size``).
    Acted on in training: the warm-up steps and ``sparsity_tokens_until_dead``. The rest is read and written back,
    so that checkpoints keep them; ``sparsity_reinitialize`` in particular means fresh FFN weights at
    construction in the code that wrote it, and is never acted on when loading.
    """

    sparsity_l1_coeff: float | int = 0.0
    sparsity_gated_mlp: bool = True
    sparsity_new_intermediate_size: int | None = None
    sparsity_start_warmup_step: int | None = None
    sparsity_end_warmup_step: int | None = None
    sparsity_tokens_until_dead: int | None = None
    sparsity_do_track: bool | None = None
    sparsity_use_hybrid_kernel: bool | None = None
    sparsity_l0_cutoff: float | int | None = None
    sparsity_reinitialize: bool | None = None
    sparsity_mlp_execution_logic: str | None = None
    sparsity_baseline_run: bool | None = None
    # A file's ``quantization_config`` where it is one of ``Fp8Linear``s. Our models read it themselves; under its own
    # name transformers would look for the library that wrote it.
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
