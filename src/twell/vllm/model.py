"""The sparse models in vLLM: vLLM's transformers backend for everything except the FFNs, which stay ``twell``'s.

vLLM replaces every linear layer of a transformers model by its own. The FFNs are removed while it does, and return as
FFNs with this process's share of the neurons: rows of gate and up, columns of down, and one all-reduce for y. Weights
arrive through vLLM's own ``load_weights``, the first time and later.

vLLM compiles a model once and drops the compiler's guards, so layers cannot look at tokens and make plans. Plans come
from the counts beside the model, before vLLM measures how much memory is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.transformers import TransformersForCausalLM

from twell.hf.counts import COUNTS_FILE, NeuronCounts, counts_path
from twell.nn import SparseFFNBase, freeze_, sparse_ffns
from twell.vllm.ffn import VllmFFN, compile_kernels, vllm_ffn_of

logger = init_logger("vllm.twell")  # vLLM shows loggers below its own name

_NO_COUNTS = (
    "%s has no %s beside it: its feed-forward layers run densely. vLLM lets no layer look at tokens, so plans need "
    "counts: twell calibrate MODEL --text FILE writes them."
)
_LORA = (
    "LoRA cannot act on %s: sparse feed-forward layers run as one operation. Merge the adapter into the model (peft's "
    "merge_and_unload), or name other modules only: --lora-target-modules q_proj k_proj v_proj o_proj"
)
_QUANTISED = (
    "%s would quantise %s, and sparse feed-forward layers run with 16- and 32-bit weights in vLLM: exclude them in the "
    "quantisation's configuration, or serve the model without it"
)
_FP8 = (
    "the model has FP8 weights, which twell does not run in vLLM yet: save it with plain ones (twell.dequantize_), or "
    "serve it with twell serve"
)
_PACKED = {"gate_up_proj": ["gate_proj", "up_proj"]}  # vLLM's name for both
_SLEEP = "sleep mode would lose the plans of sparse feed-forward layers: leave enable_sleep_mode out"


class SparseForCausalLM(TransformersForCausalLM):
    """Any sparse model type; the configuration says which."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if getattr(vllm_config.model_config.hf_config, "fp8_quantization", None) is not None:
            raise ValueError(_FP8)
        if vllm_config.model_config.enable_sleep_mode:
            raise ValueError(_SLEEP)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Replace transformers' layers by vLLM's, except the FFNs."""
        ffns = dict(sparse_ffns(self.model))
        self._refuse_changes(ffns)
        for name in ffns:
            self.model.set_submodule(name, nn.Identity())
        super().recursive_replace()
        rank, n_shares = self.tp_group.rank_in_group, self.tp_group.world_size
        device, dtype = torch.device(self.device_config.device), self.model_config.dtype
        for name, ffn in ffns.items():
            share = vllm_ffn_of(ffn, rank, n_shares, device, dtype, tensor_model_parallel_all_reduce)
            _set_loaders(share, rank)
            self.model.set_submodule(name, share)

    def _refuse_changes(self, ffns: dict[str, SparseFFNBase]) -> None:
        """Refuse LoRA and quantised weights for FFNs: vLLM would skip the FFNs without saying so."""
        names = [f"model.{name}.{projection}" for name, ffn in ffns.items() for projection in ffn.projections]
        lora, quantisation = self.vllm_config.lora_config, self.quant_config
        for name in names:
            if lora is not None and is_in_target_modules(name, lora.target_modules, _PACKED):
                raise ValueError(_LORA % name)
            if quantisation is not None:
                with torch.device("meta"):
                    method = quantisation.get_quant_method(ReplicatedLinear(16, 16, bias=False), prefix=name)
                if method is not None and not isinstance(method, UnquantizedLinearMethod):
                    raise ValueError(_QUANTISED % (quantisation.get_name(), name))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Also updates frozen state in place when vLLM later loads new weights, or some of them."""
        loaded: set[str] = super().load_weights(weights)
        for _, ffn in sparse_ffns(self.model):
            if not any(parameter.is_meta for parameter in ffn.parameters()):  # they are while vLLM waits for the rest
                ffn.refresh()
        return loaded

    def process_weights_after_loading(self) -> None:
        """vLLM calls this after loading, and measures memory afterwards."""
        plan_(self.model, _find_counts(self.model_config), self.device_config.device)
        self.model.eval()
        logger.info("%s", freeze_(self.model))
        ffns: list[Any] = [ffn for _, ffn in sparse_ffns(self.model)]
        for ffn in ffns:
            if ffn.frozen is not None and not self.model_config.enforce_eager:
                ffn.frozen.is_captured = True  # read by compiled code and CUDA graphs: its sizes must not change
        if isinstance(self.vllm_config.additional_config, dict):  # part of the key of vLLM's cache of compiled code
            given = repr([ffn.compiled_for() for ffn in ffns])
            self.vllm_config.additional_config["twell"] = hashlib.sha256(given.encode()).hexdigest()
        if self.device_config.device.type == "cuda":
            compile_kernels(ffns, self.vllm_config.scheduler_config.max_num_batched_tokens)


def _set_loaders(share: VllmFFN, rank: int) -> None:
    """Give parameters loaders that pick this share's rows or columns from a file's tensor."""
    *inputs, down = (getattr(share, name) for name in share.projections)
    for linear in inputs:
        for parameter in linear.parameters():
            parameter.weight_loader = _loader(0, share.own)
    down.weight.weight_loader = _loader(1, share.own)
    if down.bias is not None and rank > 0:  # y gets it once
        down.bias.weight_loader = _load_zeros


def _loader(dim: int, own: slice) -> Callable[[Tensor, Tensor], None]:
    """A loader that vLLM calls with a parameter and the whole tensor of a file."""

    def load(param: Tensor, loaded_weight: Tensor) -> None:
        default_weight_loader(param, loaded_weight.narrow(dim, own.start, own.stop - own.start))

    return load


def _load_zeros(param: Tensor, loaded_weight: Tensor) -> None:
    default_weight_loader(param, torch.zeros_like(loaded_weight))


def _find_counts(model_config: Any) -> NeuronCounts | None:
    """The counts in the model's folder or repository; None if there are none."""
    path = counts_path(model_config.model, model_config.revision)
    return None if path is None else NeuronCounts.load(path)


def plan_(model: Any, counts: NeuronCounts | None, device: torch.device) -> None:
    """Give every FFN a plan for its share of the neurons; without counts it runs densely."""
    ffns: dict[str, Any] = dict(sparse_ffns(model))
    if counts is None:
        for ffn in ffns.values():
            ffn.set_plan(None)
        if device.type == "cuda":  # a CPU needs no plan
            logger.warning_once(_NO_COUNTS, model.config.name_or_path, COUNTS_FILE)
        return
    counted, n_layers = [len(fired) for fired in counts.fired], model.config.num_hidden_layers
    for name, ffn in ffns.items():
        layer, n_neurons = int(name.split(".")[-2]), len(ffn.neuron_counts) * ffn.n_shares
        if len(counted) != n_layers or counted[layer] != n_neurons:
            raise ValueError(
                f"{COUNTS_FILE} is of {len(counted)} layers {counted}, and the model has {n_layers} of {n_neurons} "
                f"neurons: it belongs to another model"
            )
        ffn.plan_own(counts.fired[layer], counts.tokens)
