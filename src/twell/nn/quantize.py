"""``quantize_`` and ``dequantize_``: convert the projections of sparse FFNs to FP8 and back, in place."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import nn

from twell.fp8 import E4M3, Fp8Linear, take_over, why_not_sizes
from twell.fp8.compressed import forget_, other_quantization, others, record_
from twell.nn.layers import SparseFFNBase
from twell.nn.projections import why_called
from twell.nn.whole_model import sparse_ffns

CONFIGS = ("fp8",)
_ALREADY = "its weights are FP8 already"


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """What ``quantize_`` did; prints as one line."""

    layers: tuple[str, ...]
    bytes_before: int  # of the weights, scales and biases of these layers
    bytes_after: int
    left_alone: tuple[tuple[str, str], ...]  # name and reason
    thawed: int  # how many of the layers were frozen

    def __str__(self) -> str:
        line = (
            f"{len(self.layers)} feed-forward layers in FP8, {self.bytes_before / 1e6:,.1f} MB of weights before, "
            f"{self.bytes_after / 1e6:,.1f} MB now"
        )
        if self.thawed:
            line += f"; {self.thawed} were frozen and are no longer"
        for reason, n in Counter(reason for _, reason in self.left_alone).items():
            line += f"; {n} left alone: {reason}"
        return line

    __repr__ = __str__


@torch.inference_mode(False)  # writes to tensors of inference mode are invisible
@torch.no_grad()
def quantize_(model: nn.Module, config: str = "fp8", *, emulate: bool = False) -> QuantizeReport:
    """Round the projections of a model's sparse FFNs to FP8, in place, for inference; biases stay as they are.

    Weights become e4m3 with one scale per output row; x is rounded token by token in the call. On Hopper GPUs few
    and many tokens then run sparsely; all other calls run densely in FP8, on GPUs of compute capability 8.9 or newer.
    ``emulate=True`` computes the same slowly, on any device. Plans made from counts are made anew, since costs differ.

    Layers whose projections are more than a plain ``nn.Linear``, and layers with weights that are not finite, are left
    alone; the report says why. FP8 weights of compressed-tensors and torchao are taken over unchanged, also in
    attention. Layers that are FP8 already stay so, and ``emulate`` is set on them, too. Frozen layers are thawed.

    ``save_pretrained`` then writes compressed-tensors' keys and configuration: pass the whole model.

    The report counts bytes of weights, scales and biases. Layers that run sparsely on a GPU keep copies of some weights
    beside them (docs/kernels.md), which it does not count.
    """
    if config not in CONFIGS:
        raise ValueError(f"quantize_: unknown config {config!r}, expected one of: {', '.join(CONFIGS)}")
    ffns = list(sparse_ffns(model))
    if not ffns:
        raise ValueError("quantize_: the model has no sparse feed-forward layers; call sparsify_ first")
    method = other_quantization(model)
    if method is not None:
        raise ValueError(
            f"quantize_: the model is already quantised by {method}, and can be saved with one method only"
        )
    names, left_alone, before, after, thawed = [], [], 0, 0, 0
    known: dict[int, tuple[nn.Module, Fp8Linear]] = {}  # projections that several layers may share
    for name, ffn in ffns:
        linears = [getattr(ffn, projection) for projection in ffn.projections]
        made = _in_fp8(ffn, linears, known)
        if isinstance(made, str):
            left_alone.append((name, made))
            continue
        thawed += ffn.frozen is not None
        ffn.frozen = None
        before += sum(map(_bytes_of, linears))
        after += sum(map(_bytes_of, made))
        for projection, new in zip(ffn.projections, made, strict=True):
            ffn.set_projection(projection, new)
        ffn.forget_counted_plan()
        names.append(name)
    record_(model)
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.emulate = emulate
    return QuantizeReport(tuple(names), before, after, tuple(left_alone), thawed)


def _in_fp8(
    ffn: SparseFFNBase, linears: list[Any], known: dict[int, tuple[nn.Module, Fp8Linear]]
) -> list[Fp8Linear] | str:
    """A layer's projections in FP8, or the reason why they stay as they are."""
    if all(isinstance(linear, Fp8Linear) for linear in linears):
        return _ALREADY
    made = []
    for projection, linear in zip(ffn.projections, linears, strict=True):
        _, shared = known.get(id(linear), (None, None))
        new = shared or (linear if isinstance(linear, Fp8Linear) else take_over(linear))
        if new is None:
            forward, steps = vars(linear).get("forward"), getattr(ffn, "steps", ())  # of OPT's FFN: see hf/inline.py
            reason = why_called(linear, projection, forward if forward in steps else None)
            reason = reason or why_not_sizes(linear.in_features, linear.out_features)
            if reason is not None:
                return reason
            new = Fp8Linear.from_linear(linear)
            if not new.weight.is_meta and not bool(new.weight_scale.isfinite().all()):
                return f"{projection} has weights that are not finite"
        made.append(new)
    for linear, new in zip(linears, made, strict=True):
        known[id(linear)] = linear, new
    return made


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Give every FP8 layer of a model plain weights with the same values, in place; returns how many layers there were.

    Layers of compressed-tensors and torchao with the same scheme are among them, also in attention. If the model has
    other quantised layers of a checkpoint, it raises before anything changes.

    ``dtype``: by default the dtype of the model's other weights; if there are none, the one that a layer had. To lay
    ``down_proj`` out neuron by neuron again, call ``sparsify_``."""
    ffns = list(sparse_ffns(model))
    taken = {layer: layer if isinstance(layer, Fp8Linear) else take_over(layer) for layer in model.modules()}
    fp8 = {layer: found for layer, found in taken.items() if found is not None}
    if not fp8:
        return 0
    left = others(model)
    if left:
        raise ValueError(
            f"dequantize_: {len(left)} layers are quantised in another way ({left[0]} is one): "
            f"load the model with quantization_config=CompressedTensorsConfig(dequantize=True) instead"
        )
    dtype = dtype or _dtype_of_others(model)
    plain = {layer: found.to_linear(dtype) for layer, found in fp8.items()}
    for _, ffn in ffns:
        for projection in ffn.projections:
            layer = getattr(ffn, projection)
            if layer in plain:
                ffn.set_projection(projection, plain[layer])
                ffn.forget_counted_plan()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer in plain:
                setattr(parent, name, plain[layer])
    forget_(model)
    return len(plain)


def _dtype_of_others(model: nn.Module) -> torch.dtype | None:
    scales = {id(module.weight_scale) for module in model.modules() if isinstance(module, Fp8Linear)}
    dtypes = (p.dtype for p in model.parameters() if id(p) not in scales and p.is_floating_point() and p.dtype != E4M3)
    return next(dtypes, None)


def _bytes_of(linear: nn.Module) -> int:
    """A tensor subclass of another library reports its own size."""
    return sum(p.nbytes for p in linear.parameters())
