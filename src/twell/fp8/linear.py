"""``Fp8Linear``, a linear layer with FP8 weights, and the conversion of other libraries' FP8 layers to it.

A weight is e4m3 with one float32 scale per output row. x is rounded row by row in the call, each row scaled by its
own largest value: ``reference.to_fp8``. ``twell.quantize_`` makes these layers. A sparse FFN calls them, or where there
are kernels reads their weights: gpu/fp8.py.

Names and shapes of the parameters are those of compressed-tensors: ``weight`` [out, in], ``weight_scale`` [out, 1]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from twell.reference import E4M3, Fp8, to_fp8

MULTIPLE = 16  # both sizes of a weight must be multiples for FP8 matrix products
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INFERENCE = (
    "FP8 layers are for inference, and x requires a gradient: call the model under torch.no_grad() or "
    "torch.inference_mode(), or make its weights plain again by twell.dequantize_(model)"
)
_WAY_OUT = (
    "move the model to such a GPU, make its weights plain again by twell.dequantize_(model), or compute the same "
    "slowly by twell.quantize_(model, 'fp8', emulate=True)"
)
_TRANSFORMERS = "transformers.integrations.compressed_tensors.CompressedTensorsFP8Linear"
_capable: set[torch.device] = set()  # devices that can run FP8 products: that does not change


def why_unavailable(device: torch.device) -> str | None:
    """Why FP8 matrix products cannot run on ``device``; None if they can."""
    needed = "FP8 matrix products need an NVIDIA GPU of compute capability 8.9 or newer"
    if device.type != "cuda":
        return f"{needed}, and this is {device.type}"
    if torch.version.hip is not None:  # torch calls AMD's GPUs cuda, too
        return f"{needed}, and this torch is built for AMD's (ROCm)"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 9) else f"{needed}, and this one has {capability[0]}.{capability[1]}"


def why_not_sizes(in_features: int, out_features: int) -> str | None:
    """Why a weight of these sizes cannot be FP8; None if it can."""
    if in_features % MULTIPLE or out_features % MULTIPLE or not in_features * out_features:
        sizes = f"{in_features} and {out_features}"
        return f"FP8 weights need in_features and out_features that are multiples of {MULTIPLE}, got {sizes}"
    return None


def _has_rowwise_cublas(device: torch.device) -> bool:
    """Whether ``_scaled_mm`` with row scales uses cuBLAS, which gives any dtype; PyTorch's kernel is safe for bf16
    only."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


class Fp8Linear(nn.Module):
    """y = x W^T + b with W in FP8, for inference. y has the dtype of x.

    Runs on GPUs of compute capability 8.9 or newer. Elsewhere a call raises, unless the layer has ``emulate=True``: it
    then multiplies the values of W and of the rounded x in float32, slowly.

    >>> layer = Fp8Linear.from_linear(nn.Linear(32, 16), emulate=True)
    >>> layer(torch.ones(2, 32)).shape
    torch.Size([2, 16])
    >>> {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters() if name != "bias"}
    {'weight': ((16, 32), torch.float8_e4m3fn), 'weight_scale': ((16, 1), torch.float32)}
    """

    bias: nn.Parameter | None
    dtype: torch.dtype | None = None  # of the weight before it was rounded, if known

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        emulate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A layer of zeros. ``dtype``: of the bias."""
        q = torch.zeros(out_features, in_features, dtype=E4M3, device=device)
        scale = torch.ones(out_features, dtype=torch.float32, device=device)
        b = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self._build(Fp8(q, scale), b, emulate)

    def _build(self, rows: Fp8, bias: nn.Parameter | None, emulate: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = rows.q.shape
        reason = why_not_sizes(self.in_features, self.out_features)
        if reason is not None:
            raise ValueError(reason)
        self.emulate = emulate
        self.weight = nn.Parameter(rows.q.contiguous(), requires_grad=False)
        self.weight_scale = nn.Parameter(rows.scale.float().reshape(-1, 1), requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, rows: Fp8, bias: nn.Parameter | None = None, *, emulate: bool = False) -> Self:
        """The layer whose weight is ``rows``, unchanged."""
        new = cls.__new__(cls)
        new._build(rows, bias, emulate)
        return new

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, *, emulate: bool = False) -> Self:
        """A layer with the weight rounded to FP8; it shares the bias."""
        new = cls.of(to_fp8(linear.weight.detach()), linear.bias, emulate=emulate)
        new.dtype = linear.weight.dtype
        return new.train(linear.training)

    def fp8(self) -> Fp8:
        """q [out, in] and scale [out]."""
        return Fp8(self.weight.detach(), self.weight_scale.detach()[:, 0])

    @torch.no_grad()
    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain layer with the values of the weight; it shares a bias of the same dtype."""
        dtype = dtype or self.dtype or torch.get_default_dtype()
        new = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        wide = torch.promote_types(dtype, torch.float32)
        new.weight = nn.Parameter(self.fp8().to(wide).to(dtype))
        if self.bias is not None:
            new.bias = self.bias if self.bias.dtype == dtype else nn.Parameter(self.bias.to(dtype))
        return new.train(self.training)

    # -- forward -----------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(_INFERENCE)
        self._check(x)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rows = x.reshape(-1, self.in_features)
        y = self._emulated(rows) if self.emulate else self._scaled_mm(rows)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"Fp8Linear: x must have {self.in_features} features, got {x.shape[-1]}")
        if x.device != self.weight.device:
            raise ValueError(f"Fp8Linear: x is on {x.device}, the weight on {self.weight.device}")
        if x.dtype not in _DTYPES and not (self.emulate and x.dtype == torch.float64):
            raise ValueError(f"Fp8Linear: x must be bfloat16, float16 or float32, got {x.dtype}")
        if not self.emulate and x.device not in _capable:
            reason = why_unavailable(x.device)
            if reason is not None:
                raise RuntimeError(f"{reason}; {_WAY_OUT}")
            if not torch.compiler.is_compiling():
                _capable.add(x.device)

    def _scaled_mm(self, rows: Tensor) -> Tensor:
        dtype, bias = rows.dtype, None if self.bias is None else self.bias.detach().to(rows.dtype)
        if rows.shape[0] == 0:
            return rows.new_empty(0, self.out_features)
        q, scale = to_fp8(rows)
        any_dtype = _has_rowwise_cublas(rows.device)
        out = dtype if any_dtype else torch.bfloat16
        inside = None if dtype == torch.float32 or not any_dtype else bias  # _scaled_mm adds no bias in float32
        y = torch._scaled_mm(
            q,
            self.weight.detach().t(),
            scale_a=scale[:, None],
            scale_b=self.weight_scale.detach().t(),
            bias=inside,
            out_dtype=out,
            use_fast_accum=True,
        ).to(dtype)
        return y if bias is None or inside is not None else y + bias

    def _emulated(self, rows: Tensor) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            q, scale = to_fp8(rows)
            y = nn.functional.linear(q.to(wide), self.weight.detach().to(wide))  # products of two e4m3 are exact
            y = y * scale[:, None] * self.weight_scale.detach().t()
            return (y if self.bias is None else y + self.bias.detach()).to(rows.dtype)

    # -- what PyTorch does to modules ----------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let ``to(dtype)`` and ``half()`` change the bias alone: ``fn`` sees weight and scale as integers."""
        kept = {id(self.weight): torch.uint8, id(self.weight_scale): torch.int32}

        def apply(t: Tensor) -> Tensor:
            if id(t) not in kept:
                return fn(t)
            bits = fn(t.view(kept[id(t)]))
            return bits.view(t.dtype) if bits.dtype == kept[id(t)] else t.to(bits.device)  # module.type()

        return super()._apply(apply, recurse)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        found = state_dict.get(f"{prefix}weight")
        if isinstance(found, Tensor) and found.dtype != E4M3:  # copy_ would round it without a scale
            errors: list[str] = args[-1]
            errors.append(f"{prefix}weight is {found.dtype}, expected {E4M3} with {prefix}weight_scale")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, emulate=True" if self.emulate else sizes


@contextlib.contextmanager
def emulated(module: nn.Module) -> Iterator[None]:
    """Let a module's FP8 layers run on any device, slowly: for a few tokens."""
    layers = [m for m in module.modules() if isinstance(m, Fp8Linear)]
    before = [layer.emulate for layer in layers]
    for layer in layers:
        layer.emulate = True
    try:
        yield
    finally:
        for layer, emulate in zip(layers, before, strict=True):
            layer.emulate = emulate


# -- FP8 layers of other libraries -----------------------------------------------------------------------
# Recognised by the names of their classes, so that none of the libraries needs to be installed.


class _Found(NamedTuple):
    weight: Tensor  # [out, in]: e4m3, or the values that compressed-tensors has decompressed
    scale: Tensor  # one per row


def is_foreign(linear: nn.Module) -> bool:
    """Whether it is another library's layer of the same scheme: rows of e4m3, x rounded row by row."""
    return _find(linear) is not None


@torch.no_grad()
def take_over(linear: nn.Module) -> Fp8Linear | None:
    """Another library's FP8 layer as an ``Fp8Linear`` with the same values and scales; None for any other layer."""
    found = _find(linear)
    if found is None or why_not_sizes(found.weight.shape[1], found.weight.shape[0]) is not None:
        return None
    scale = found.scale.detach().reshape(-1, 1)
    q = found.weight.detach()
    if q.dtype != E4M3:
        q = (q.float() / scale.float()).to(E4M3)  # exact: q * scale was rounded by far less than a step of e4m3
        if not (q.to(scale.dtype) * scale).equal(found.weight):
            return None
    theirs: Any = linear
    new = Fp8Linear.of(Fp8(q, scale.float().reshape(-1)), theirs.bias)
    new.dtype = scale.dtype if theirs.weight.dtype == E4M3 else theirs.weight.dtype
    return new.train(linear.training)


def _find(linear: nn.Module) -> _Found | None:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    if any(hooks) or not isinstance(linear, nn.Linear):
        return None
    kind, weight, scale = type(linear), linear._parameters.get("weight"), linear._parameters.get("weight_scale")
    if weight is None:
        return None
    own = linear.__dict__.get("forward")
    if kind is nn.Linear and own is None and type(weight).__module__.startswith("torchao."):
        return _torchao(weight)
    if scale is None or scale.numel() != len(weight):
        return None
    if f"{kind.__module__}.{kind.__name__}" == _TRANSFORMERS:
        return _Found(weight, scale) if own is None and weight.dtype == E4M3 else None
    code = getattr(getattr(own, "__func__", own), "__globals__", {}).get("__name__", "")
    is_theirs = kind is nn.Linear and code.startswith("compressed_tensors.")
    is_scheme = _is_rowwise_scheme(getattr(linear, "quantization_scheme", None))
    state = str(getattr(getattr(linear, "quantization_status", None), "value", ""))
    expected = weight.dtype == E4M3 if state == "compressed" else state == "decompressed"
    return _Found(weight, scale) if is_theirs and is_scheme and expected else None


def _is_rowwise_scheme(scheme: Any) -> bool:
    """Whether a QuantizationScheme of compressed-tensors has one scale per row, and dynamic ones per token."""

    def says(args: Any, strategy: str, dynamic: bool) -> bool:
        kind, by = getattr(args, "type", None), getattr(args, "strategy", None)
        named = str(getattr(kind, "value", kind)), str(getattr(by, "value", by))
        is_plain = getattr(args, "num_bits", None) == 8 and getattr(args, "symmetric", None) is True
        return is_plain and named == ("float", strategy) and getattr(args, "dynamic", None) is dynamic

    if scheme is None or scheme.output_activations is not None:
        return False
    return says(scheme.weights, "channel", False) and says(scheme.input_activations, "token", True)


def _torchao(weight: Any) -> _Found | None:
    """The weight of a Float8Tensor made by Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())."""
    x = getattr(weight, "act_quant_kwargs", None)
    if type(weight).__name__ != "Float8Tensor" or x is None or weight.dim() != 2:
        return None
    is_by_rows = type(x.granularity).__name__ == "PerRow" and list(weight.block_size) == [1, weight.shape[1]]
    is_e4m3 = weight.qdata.dtype == x.float8_dtype == E4M3
    is_bounded = x.hp_value_lb is not None or x.hp_value_ub is not None  # bounds on a row's largest value
    return _Found(weight.qdata, weight.scale) if is_by_rows and is_e4m3 and not is_bounded else None
