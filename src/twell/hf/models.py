"""Causal language models with sparse FFNs: Llama and Qwen2, weight for weight the base models of transformers.

The loss is ``ce_loss + sparsity_l1_coeff * l1_loss``; both parts are returned beside it, with the statistics of
every layer. ``l1_loss`` is the mean over layers of the mean over tokens of sum_j |h_j|, taken over the tokens whose
prediction counts in the cross-entropy and normalised exactly as that is: by ``num_items_in_batch`` where the Trainer
gives it, else by their number. So neither accumulation steps nor the number of processes change the gradient.

How statistics leave the layers: the model's forward makes a ``_Sink`` and passes it down as a keyword argument. A
decoder layer binds it for the thread in which it runs, and its FFN finds it there: another thread has its own. A
checkpointed layer that runs again in the backward gets the same sink with its arguments, makes the same calls, and
finds the sink closed: nothing is counted twice. (This needs non-reentrant checkpointing, where what leaves the first
run is part of the graph; the reentrant kind is refused.)

``save_memory`` has a training forward keep little: see there.

L1 acts through the loss, so it needs labels. A forward with gradients in training mode without them is refused, unless
``sparsity_l1_coeff`` is 0 or the caller takes the statistics: the loss it goes into would lack L1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator
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
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase
from twell.nn.parallel import is_sharded
from twell.ops import Stats

IGNORED_LABEL = -100
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
    """A causal LM's output with the two parts of the loss, and per layer what the FFN did.

    ce_loss, l1_loss: scalars, ``loss = ce_loss + sparsity_l1_coeff * l1_loss``; given when labels are.
    sparsity: one ``Stats`` per layer; given with labels, or on ``output_sparsity=True``.
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
        if self.wants_gradients and not torch.is_grad_enabled():  # so runs a layer under reentrant checkpointing
            raise ValueError(_REENTRANT)
        self.stats.append(stats)

    def close(self) -> tuple[Stats, ...]:
        self.is_open = False
        stats, self.stats = tuple(self.stats), []
        return stats


class _Bound(threading.local):
    """The sink of the decoder layer that runs in this thread."""

    sink: _Sink | None = None


_bound = _Bound()


@contextlib.contextmanager
def _reporting_to(sink: _Sink | None) -> Iterator[None]:
    before, _bound.sink = _bound.sink, sink
    try:
        yield
    finally:
        _bound.sink = before


class _ReportingMixin:
    """An FFN that hands its statistics to the sink of its decoder layer, and skips them where there is none."""

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
    """A decoder layer's FFN, as the configuration has it."""
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
    """The base class's own layers would be built only to be thrown away."""
    n_layers, config.num_hidden_layers = config.num_hidden_layers, 0
    try:
        yield
    finally:
        config.num_hidden_layers = n_layers


class _PretrainedMixin:
    """What both models override of PreTrainedModel."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As PreTrainedModel's, but a checkpoint that lacks weights is refused instead of filled up at random."""
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        refuse_missing(name, info)
        for module in model.modules():
            if isinstance(module, Fp8Linear):
                if is_sharded(module):
                    raise ValueError(
                        "FP8 weights cannot be shared out over processes: load the model without a tp_plan"
                    )
                module.requires_grad_(False)  # transformers has every float require a gradient
        return (model, info) if output_loading_info else model

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kw: Any):
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant", False):
            raise ValueError(_REENTRANT)
        return super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, **kw)

    def _init_weights(self, module: nn.Module) -> None:
        """Buffers made on the meta device hold nothing until set, and a loaded checkpoint does not bring counts."""
        super()._init_weights(module)
        if isinstance(module, SparseFFNBase):
            module.reset_counts()
            module._place_plan()
        if hasattr(module, "l1_scale"):  # not yet, where the base class's constructor calls this
            module.set_l1_scale(1.0)


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
    l1_scale: Tensor
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
        self.add_l1_scale()
        self.__dict__.pop("_no_split_modules", None)  # has the base class's layer, which FSDP would look for in vain
        self.post_init()

    def add_l1_scale(self) -> None:
        # A tensor, since a compiled model is compiled again for every new value of a plain number.
        lm_head: Any = self.lm_head
        scale = torch.ones((), dtype=torch.float32, device=lm_head.weight.device)
        self.register_buffer("l1_scale", scale, persistent=False)

    def save_memory(self, on: bool = True) -> None:
        """Have a training forward with labels keep of a layer its input and its FFN's, compute attention and norms
        again in the backward, and give the loss without logits, from some tokens at a time. The same gradients, about
        a tenth slower.

        The loss is torch's ``linear_cross_entropy`` (from 2.13 on), or Liger-Kernel's where that is installed.
        """
        if on:
            _find_chunked_loss()
            if type(self.lm_head) is not nn.Linear:
                raise ValueError(f"save_memory: lm_head is {type(self.lm_head).__name__}, not a plain nn.Linear")
        self.saves_memory = on
        for layer in self.model.layers:
            layer.saves_memory = on

    @torch.no_grad()
    def set_l1_scale(self, value: float) -> None:
        """What ``sparsity_l1_coeff`` is multiplied by from now on: 1, or less while a schedule warms L1 up."""
        self.l1_scale.fill_(value)

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
        """As the base model's, with both parts of the loss. ``output_sparsity``: statistics without labels, too.

        It names all that the base model's names: pipeline stages pass on nothing else, the cache for one.
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
        if not all(hasattr(layer, "mlp") for layer in layers):  # which wrappers of layers pass on
            raise ValueError("the loss and statistics need all layers in a process: pipeline parallel only predicts")
        kwargs.pop("return_dict", None)
        mask = _counted_tokens(labels, kwargs.get("shift_labels"), attention_mask)
        sink = _Sink(mask)
        if self.saves_memory and labels is not None and self.training and torch.is_grad_enabled():
            del inputs["logits_to_keep"]
            hidden = self.model(**inputs | {"use_cache": False}, sparsity_sink=sink, **kwargs).last_hidden_state
            out: Any = CausalLMOutputWithPast(loss=_loss_in_chunks(hidden, self.lm_head, labels, kwargs))
        else:
            out = super().forward(**inputs, labels=labels, sparsity_sink=sink, **kwargs)
        stats = sink.close()
        for layer, seen in zip(layers, stats, strict=True):
            if layer.mlp.track_counts:
                layer.mlp.commit(seen)
        result = SparseCausalLMOutput(**out, sparsity=stats)
        if labels is not None:
            result.ce_loss = out.loss
            result.l1_loss = _l1_loss(stats, kwargs.get("num_items_in_batch"))
            coefficient = self.config.sparsity_l1_coeff * self.l1_scale
            result.loss = out.loss + coefficient * result.l1_loss
        return result


def _counted_tokens(labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """bool [B, S]: the tokens that count in L1 and statistics.

    With labels the tokens whose prediction counts in the cross-entropy, else those that are not padding.
    """
    if labels is not None and shift_labels is None:
        shift_labels = _shifted(labels)
    if shift_labels is not None:
        return shift_labels != IGNORED_LABEL
    if attention_mask is not None and attention_mask.dim() == 2:
        return attention_mask.bool()
    return None


def _shifted(labels: Tensor) -> Tensor:
    """What each token is to predict."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)


def _find_chunked_loss() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Sum of the cross-entropies of hidden states [M, D] under weights [V, D] for labels [M], without all logits."""
    if hasattr(nn.functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
        return functools.partial(
            nn.functional.linear_cross_entropy, reduction="sum", ignore_index=IGNORED_LABEL, options=options
        )
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        raise RuntimeError(
            f"save_memory needs torch 2.13, or pip install liger-kernel; this is torch {torch.__version__}"
        ) from None
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED_LABEL, reduction="sum", accum_dtype=torch.float32)
    # Dynamo of torch 2.11 cannot trace it: a compiled model leaves its graph for the loss.
    return torch.compiler.disable(lambda hidden, weight, labels: loss(weight, hidden, labels))


def _loss_in_chunks(hidden: Tensor, lm_head: nn.Linear, labels: Tensor, kwargs: dict[str, Any]) -> Any:
    """As transformers' loss of causal language models; ``kwargs``: of the model's forward."""
    shift_labels = kwargs.get("shift_labels")
    wanted = (_shifted(labels) if shift_labels is None else shift_labels).reshape(-1).to(hidden.device)
    weight, device_type = lm_head.weight, hidden.device.type
    if torch.is_autocast_enabled(device_type):  # as it would do for the linear layer
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device_type, enabled=False):
        total = _find_chunked_loss()(hidden.reshape(-1, hidden.shape[-1]), weight, wanted)
    n = kwargs.get("num_items_in_batch")
    return total.float() / torch.as_tensor((wanted != IGNORED_LABEL).sum() if n is None else n, device=total.device)


def _l1_loss(stats: tuple[Stats, ...], num_items_in_batch: Tensor | int | None) -> Tensor:
    total = torch.stack([s.l1_sum for s in stats]).mean()
    if num_items_in_batch is None:
        return total / stats[0].tokens
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


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
