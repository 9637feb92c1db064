"""Dense FFNs in FP8, as people run them on Hopper: baselines of ``twell bench ffn``, ``model`` and ``decode``.

Weights are e4m3 with a scale for each output, by ``reference.to_fp8``. Both FFNs are timed compiled: Inductor fuses the
operations between the GEMMs. On a CPU they multiply dequantised matrices, for tests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from twell import reference
from twell.fp8 import why_not_sizes, why_unavailable
from twell.nn import sparse_ffns
from twell.ops import backends
from twell.reference import Fp8, Weights, to_fp8

NAMES = ("fp8", "fp8_weights")  # of the dense ways, in rows
SPARSE = "sparse_fp8"  # of the sparse way
FEW_TOKENS = 64  # up to which Fp8WeightsFFN is timed
_SHRINK = 2.0**-8  # for weights up to 448, exact in 16 bits: keeps sums in the range of float16


def applies(device: torch.device, dtype: torch.dtype, D: int, F: int) -> bool:
    """Whether dense FP8 FFNs run there: FP8 tensor cores, a dtype of 16 bits, sizes that ``_scaled_mm`` takes."""
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    return in_16_bits and why_not_sizes(D, F) is None and why_unavailable(device) is None


def applies_sparsely(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the sparse kernels for FP8 weights run there."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return backends.kernels().fp8.why_not(torch.device("cuda", device.index or 0)) is None


class _Weight(nn.Module):
    """q, e4m3 [outputs, inputs], and scale, float32 [outputs]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows = to_fp8(weight.contiguous())  # a sparse layer's may lie neuron by neuron
        self.q, self.scale = (nn.Parameter(t, requires_grad=False) for t in rows)


class _Fp8FFN(nn.Module):
    def __init__(self, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> None:
        super().__init__()
        self.gate = None if w_gate is None else _Weight(w_gate)
        self.up, self.down = _Weight(w_up), _Weight(w_down)


class DenseFp8FFN(_Fp8FFN):
    """x [..., D] and h [..., F] are rounded in the call, with a scale for each row; products are FP8 GEMMs."""

    def forward(self, x: Tensor) -> Tensor:
        rows = to_fp8(x.flatten(0, -2))
        h = self._product(rows, self.up)
        h = torch.relu(h) if self.gate is None else torch.relu(self._product(rows, self.gate)) * h
        return self._product(to_fp8(h), self.down).to(x.dtype).view(x.shape)

    def _product(self, a: Fp8, w: _Weight) -> Tensor:
        if a.q.device.type == "cpu":
            return a.to(torch.float32) @ Fp8(w.q, w.scale).to(torch.float32).T
        return torch._scaled_mm(
            a.q,
            w.q.t(),
            scale_a=a.scale[:, None],
            scale_b=w.scale[None],
            out_dtype=torch.bfloat16,  # some versions refuse float16 with scales of rows
            use_fast_accum=True,
        )


class Fp8WeightsFFN(_Fp8FFN):
    """Only weights are FP8, half the bytes to read for few tokens; x and h keep their 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        h = self._product(x, self.up)
        h = torch.relu(h) if self.gate is None else torch.relu(self._product(x, self.gate)) * h
        return self._product(h, self.down)

    def _product(self, a: Tensor, w: _Weight) -> Tensor:
        return (nnf.linear(a, w.q.to(a.dtype) * _SHRINK) * (w.scale / _SHRINK)).to(a.dtype)


# Without this option Inductor leaves one token to cuBLAS and writes the converted weights to memory, as it does for
# more tokens in any case.
_FUSED = {"options": {"coordinate_descent_tuning": True}}


def ways(M: int) -> dict[str, tuple[type[_Fp8FFN], dict[str, Any]]]:
    """The dense ways to time for M tokens, each with its options of ``torch.compile``."""
    both: dict[str, tuple[type[_Fp8FFN], dict[str, Any]]] = {
        "fp8": (DenseFp8FFN, {}),
        "fp8_weights": (Fp8WeightsFFN, _FUSED),
    }
    return {name: way for name, way in both.items() if name == "fp8" or M <= FEW_TOKENS}


def options(names: Iterable[str]) -> dict[str, Any]:
    """Of ``torch.compile`` for whole models, if those in ``names`` are to be compared: all are compiled alike."""
    return {key: value for name in NAMES if name in names for key, value in ways(1)[name][1].items()}


def weights_of(sparse: Any) -> dict[str, Weights] | None:
    """Of each sparse FFN of a model, by name. None if one of them is not ReLU between plain linears without biases, of
    sizes that FP8 takes."""
    found: dict[str, Weights] = {}
    for name, layer in sparse_ffns(sparse):
        linears = [getattr(layer, projection) for projection in layer.projections]
        if layer.activation != "relu" or sparse.get_submodule(name) is not layer:  # OPT's is a part of a block
            return None
        if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
            return None
        if why_not_sizes(*linears[-1].weight.shape) is not None:
            return None
        first, *up, down = (linear.weight for linear in linears)
        found[name] = Weights(first, up[0] if up else None, down)
    return found


def in_model(dense: Any, kind: type[_Fp8FFN], weights: Mapping[str, Weights]) -> Any:
    """A copy of a dense model whose FFNs are ``kind``; it shares all other parameters."""
    made = copy.deepcopy(dense, {id(t): t for t in (*dense.parameters(), *dense.buffers())})
    for name, w in weights.items():
        made.set_submodule(name, (kind(None, w.gate, w.down) if w.up is None else kind(w.gate, w.up, w.down)).eval())
    return made


def compile_ffns_(models: Mapping[str, Any]) -> None:
    """Compile the dense FFNs in FP8 of models that are not compiled as a whole."""
    for name, (kind, how) in ways(1).items():
        for module in models[name].modules() if name in models else ():
            if isinstance(module, kind):
                module.compile(fullgraph=True, dynamic=False, **how)


def meant(name: str, x: Tensor, w: Weights) -> Tensor:
    """What the way ``name`` should give, in float64: from rounded weights, and from rounded x where it rounds x."""
    gate, up, down = to_fp8(w.gate), None if w.up is None else to_fp8(w.up), to_fp8(w.down)
    if name != "fp8_weights":
        return reference.fp8_forward(x, gate, up, down)
    f64 = torch.float64
    rounded = Weights(gate.to(f64), None if up is None else up.to(f64), down.to(f64))
    return reference.forward(x.double(), rounded, want_stats=False).y
