"""Causal language models with sparse FFNs: Llama and Qwen2, with the weights of transformers' base models.

The loss is ``ce_loss + sparsity_l1_coeff * l1_loss``. The output also holds both parts, and the statistics of every
layer. ``l1_loss`` is the mean over layers of the mean over tokens of sum_j |h_j|. Its tokens are those whose prediction
counts in the cross-entropy, and it is normalised in the same way: by ``num_items_in_batch`` if the Trainer passes it,
else by the number of these tokens. So neither accumulation steps nor the number of processes change the gradient.

How statistics leave the layers: the model's forward makes a ``_Sink`` and passes it down as a keyword argument. A
decoder layer binds it to its thread while it runs, and its FFN finds it there. A checkpointed layer runs again in the
backward with the same sink, which is closed by then: nothing is counted twice. This needs non-reentrant checkpointing,
where the results of the first run are part of the graph; reentrant checkpointing is refused.

L1 acts through the loss, so it needs labels. In training mode with gradients, a forward without labels is refused: its
loss would lack L1. It is allowed if ``sparsity_l1_coeff`` is 0 or the caller takes the statistics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2Model

from twell.fp8 import Fp8Linear
from twell.fp8.compressed import place_fp8_
from twell.hf.configs import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.hf.loading import refuse_missing
from twell.hf.losses import chunked_cross_entropy, counted_tokens, l1_loss, loss_in_chunks
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase
from twell.nn.parallel import is_sharded
from twell.ops import Stats

_REENTRANT = (
    "gradient checkpointing with use_reentrant=True loses the L1 term of checkpointed layers; "
    "use gradient_checkpointing_kwargs={'use_reentrant': False}"
)
_NO_LABELS = (
    "without labels the loss has no L1 term, and sparsity_l1_coeff is {l1:g}: a model in training mode needs them in "
    "its forward. The Trainer's label_smoothing_factor and compute_loss_func keep them back: leave those out, or set "
    "model.config.sparsity_l1_coeff = 0 to train without L1. For a loss of your own pass output_sparsity=True and add "
    "L1 from output.sparsity; for predictions call model.eval() or use torch.no_grad()"
)


@dataclasses.dataclass
class SparseCausalLMOutput(CausalLMOutputWithPast):
    """A causal LM's output with the two parts of the loss and the statistics of every FFN.

    ce_loss, l1_loss: scalars, ``loss = ce_loss + sparsity_l1_coeff * l1_loss``; only with labels.
    sparsity: one ``Stats`` per layer; with labels, or on ``output_sparsity=True``.
    """

    ce_loss: Tensor | None = None
    l1_loss: Tensor | None = None
    sparsity: tuple[Stats, ...] | None = None


class _Sink:
    """Collects the statistics of one forward pass, layer after layer."""

    def __init__(self, token_mask: Tensor | None) -> None:
        self.token_mask = token_mask
        self.stats: list[Stats] = []
        self.is_open = True
        self.wants_gradients = torch.is_grad_enabled()

    def add(self, stats: Stats) -> None:
        if not self.is_open:
            return
        if self.wants_gradients and not torch.is_grad_enabled():  # reentrant checkpointing runs a layer so
            raise ValueError(_REENTRANT)
        self.stats.append(stats)

    def close(self) -> tuple[Stats, ...]:
        self.is_open = False
        stats, self.stats = tuple(self.stats), []
        return stats


class _Bound(threading.local):
    """The sink of the decoder layer that runs in this thread."""

    def __init__(self) -> None:  # runs in each thread; a class attribute would fail a guard of torch.compile
        self.sink: _Sink | None = None


_bound = _Bound()


@contextlib.contextmanager
def _reporting_to(sink: _Sink | None) -> Iterator[None]:
    before, _bound.sink = _bound.sink, sink
    try:
        yield
    finally:
        _bound.sink = before


class _ReportingMixin:
    """An FFN that adds its statistics to its decoder layer's sink; without a sink it computes none."""

    _ffn: Any

    def forward(self, x: Tensor) -> Tensor:
        sink = _bound.sink
        if sink is None:
            return super().forward(x)
        mask = sink.token_mask
        y, stats = self._ffn(x, None if mask is None else mask.expand(x.shape[:-1]), return_stats=True)
        sink.add(stats)  # the model commits them, once, outside checkpointed blocks
        return y


class GatedSparseMLP(_ReportingMixin, GatedSparseFFN):
    """The gated FFN of a decoder layer."""


class SparseMLP(_ReportingMixin, SparseFFN):
    """The plain FFN of a decoder layer."""


def make_mlp(config: Any) -> SparseFFNBase:
    """A decoder layer's FFN according to the configuration."""
    cls = GatedSparseMLP if config.sparsity_gated_mlp else SparseMLP
    width = config.sparsity_new_intermediate_size or config.intermediate_size
    track = bool(config.sparsity_do_track)
    return cls(config.hidden_size, width, bias=getattr(config, "mlp_bias", False), track_counts=track)


class _SparseDecoderLayerMixin(nn.Module):
    mlp: Any
    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    saves_memory = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = make_mlp(config)

    def forward(self, hidden_states: Tensor, *args: Any, sparsity_sink: _Sink | None = None, **kwargs: Any) -> Any:
        with _reporting_to(sparsity_sink):
            if not (self.saves_memory and self.training and torch.is_grad_enabled()) or args:
                return super().forward(hidden_states, *args, **kwargs)
            residual, x = checkpoint(self._up_to_the_ffn, hidden_states, use_reentrant=False, **kwargs)
            return residual + self.mlp(x)

    def _up_to_the_ffn(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        attended, *_ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        residual = hidden_states + attended
        return residual, self.post_attention_layernorm(residual)


@contextlib.contextmanager
def _without_layers(config: Any) -> Iterator[None]:
    """Keep the base class from building layers that would be thrown away."""
    n_layers, config.num_hidden_layers = config.num_hidden_layers, 0
    try:
        yield
    finally:
        config.num_hidden_layers = n_layers


class _PretrainedMixin:
    """Overrides of PreTrainedModel that both models share."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As PreTrainedModel's, but refuses a checkpoint that lacks weights instead of making random ones."""
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        refuse_missing(name, info)
        for module in model.modules():
            if isinstance(module, Fp8Linear):
                if is_sharded(module):
                    raise ValueError(
                        "FP8 weights cannot be shared out over processes: load the model without a tp_plan"
                    )
                module.requires_grad_(False)  # transformers makes every float parameter require a gradient
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Set buffers: those made on the meta device hold nothing, and checkpoints contain no counts."""
        super()._init_weights(module)
        if isinstance(module, SparseFFNBase):
            module.reset_counts()
            module._place_plan()


class _SparseModelMixin(_PretrainedMixin, nn.Module):
    """The base model with sparse decoder layers."""

    decoder_layer: type[nn.Module]

    def __init__(self, config: Any) -> None:
        with _without_layers(config):
            super().__init__(config)
        self.layers = nn.ModuleList([self.decoder_layer(config, i) for i in range(config.num_hidden_layers)])
        if config.fp8_quantization is not None:
            place_fp8_(self, config.fp8_quantization, prefix=f"{self.base_model_prefix}.")
        self.post_init()


class _SparseCausalLMMixin(_PretrainedMixin, nn.Module):
    model_class: type[nn.Module]
    model: Any
    lm_head: Any
    saves_memory = False

    def __init__(self, config: Any) -> None:
        if not 0 <= config.sparsity_l1_coeff < math.inf:
            l1 = config.sparsity_l1_coeff
            raise ValueError(f"sparsity_l1_coeff must be a finite number of at least 0, got {l1}")
        with _without_layers(config):
            super().__init__(config)
        self.model = self.model_class(config)
        if config.fp8_quantization is not None:
            place_fp8_(self, config.fp8_quantization)
        self.__dict__.pop("_no_split_modules", None)  # names the base class's layer, which FSDP would not find
        self.post_init()

    def save_memory(self, on: bool = True) -> None:
        """Save memory in training forwards with labels: same gradients, slower.

        Each layer keeps its input and its FFN's input, and computes attention and norms again in the backward. The loss
        takes some tokens at a time, so there are never all logits, and the output has none. It is torch's
        ``linear_cross_entropy`` (torch 2.13 or newer), or Liger-Kernel's if that is installed.
        """
        if on:
            chunked_cross_entropy()
            if type(self.lm_head) is not nn.Linear:
                raise ValueError(f"save_memory: lm_head is {type(self.lm_head).__name__}, not a plain nn.Linear")
        self.saves_memory = on
        for layer in self.model.layers:
            layer.saves_memory = on

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_sparsity: bool = False,
        **kwargs: Any,
    ) -> SparseCausalLMOutput:
        """As the base model's forward, with both parts of the loss. ``output_sparsity``: statistics without labels.

        The signature repeats the base model's: pipeline stages pass on, for example the cache, only by these names.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        if labels is None and not output_sparsity:
            if self.training and torch.is_grad_enabled() and self.config.sparsity_l1_coeff:
                raise ValueError(_NO_LABELS.format(l1=self.config.sparsity_l1_coeff))
            return super().forward(**inputs, **kwargs)
        layers: Any = self.model.layers
        if not all(hasattr(layer, "mlp") for layer in layers):  # wrappers of layers pass the attribute on
            raise ValueError("the loss and statistics need all layers in a process: pipeline parallel only predicts")
        kwargs.pop("return_dict", None)
        mask = counted_tokens(labels, kwargs.get("shift_labels"), attention_mask)
        sink = _Sink(mask)
        if self.saves_memory and labels is not None and self.training and torch.is_grad_enabled():
            del inputs["logits_to_keep"]
            hidden = self.model(**inputs | {"use_cache": False}, sparsity_sink=sink, **kwargs).last_hidden_state
            out: Any = CausalLMOutputWithPast(loss=loss_in_chunks(hidden, self.lm_head, labels, kwargs))
        else:
            out = super().forward(**inputs, labels=labels, sparsity_sink=sink, **kwargs)
        stats = sink.close()
        for layer, seen in zip(layers, stats, strict=True):
            if layer.mlp.track_counts:
                layer.mlp.commit(seen)
        result = SparseCausalLMOutput(**out, sparsity=stats)
        if labels is not None:
            result.ce_loss = out.loss
            result.l1_loss = l1_loss(stats, kwargs.get("num_items_in_batch"))
            result.loss = out.loss + self.config.sparsity_l1_coeff * result.l1_loss
        return result


# ---------------------------------------------------------------------------------------------------------
# Llama and Qwen2
# ---------------------------------------------------------------------------------------------------------


class LlamaSparseReluDecoderLayer(_SparseDecoderLayerMixin, LlamaDecoderLayer):
    pass


class LlamaSparseReluModel(_SparseModelMixin, LlamaModel):
    config_class = LlamaSparseReluConfig
    decoder_layer = LlamaSparseReluDecoderLayer
    _no_split_modules: ClassVar = ["LlamaSparseReluDecoderLayer"]


class LlamaSparseReluForCausalLM(_SparseCausalLMMixin, LlamaForCausalLM):
    config_class = LlamaSparseReluConfig
    model_class = LlamaSparseReluModel
    _no_split_modules: ClassVar = ["LlamaSparseReluDecoderLayer"]


class Qwen2SparseReluDecoderLayer(_SparseDecoderLayerMixin, Qwen2DecoderLayer):
    pass


class Qwen2SparseReluModel(_SparseModelMixin, Qwen2Model):
    config_class = Qwen2SparseReluConfig
    decoder_layer = Qwen2SparseReluDecoderLayer
    _no_split_modules: ClassVar = ["Qwen2SparseReluDecoderLayer"]


class Qwen2SparseReluForCausalLM(_SparseCausalLMMixin, Qwen2ForCausalLM):
    config_class = Qwen2SparseReluConfig
    model_class = Qwen2SparseReluModel
    _no_split_modules: ClassVar = ["Qwen2SparseReluDecoderLayer"]
