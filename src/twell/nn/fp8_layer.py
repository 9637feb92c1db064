"""How a layer runs whose projections are all ``Fp8Linear``: by the GPU kernels for FP8 weights, where they can run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from twell import reference
from twell.fp8 import Fp8Linear
from twell.nn.planned import KeptOfFp8, Planned
from twell.nn.projections import PARAMETERS_AND_HOOKS
from twell.ops import backends, registered
from twell.plan import sizes_of, tokens_of

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # builds without CUDA have neither
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
KERNELS = ("auto", "triton")  # backends that are the kernels on a GPU


def _with_weight(linear: Any, weight: Tensor, scale: Tensor, x: Tensor) -> Any:
    return torch.func.functional_call(linear, {"weight": weight, "weight_scale": scale}, (x,))


class Fp8Layer(Planned):
    """A planned layer that can also run with FP8 weights."""

    def in_fp8(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """y of a layer whose projections are all ``Fp8Linear``, for compiled code.

        ``weights``: see ``_fp8_tensors``. They are copies if the compiled code has written to them and the layer does
        not have the new values yet."""
        index, linears = self._kernels_on, [self._modules[name] for name in self.projections]
        if index is None or not self._has_fp8():
            return self._call_projections(x, None, False)
        if any(a.data_ptr() != b.data_ptr() for a, b in zip(weights, self._fp8_tensors(), strict=True)):
            given = zip(linears, weights[::2], weights[1::2], strict=True)
            gate, *up, down = [functools.partial(_with_weight, linear, q, scale) for linear, q, scale in given]
            h = reference.activate(torch.relu(gate(x)), self.activation)
            return down(h * up[0](x) if up else h)
        y = self._by_fp8_kernels(x, index)
        return self._call_projections(x, None, False) if y is None else y

    def _plain_fp8(self) -> list[Tensor] | None:
        """``_fp8_tensors`` if the projections do nothing but multiply by them, else None. Every eager call runs it."""
        modules, tensors = self._modules, list[Tensor]()
        for name in self.projections:
            linear: Any = modules[name]
            own = linear.__dict__
            if type(linear) is not Fp8Linear or own["emulate"] or "forward" in own:
                return None
            parameters, a, b, c, d = PARAMETERS_AND_HOOKS(own)
            if a or b or c or d or parameters["bias"] is not None:
                return None
            tensors += parameters["weight"], parameters["weight_scale"]
        return tensors

    def _by_fp8_kernels(self, x: Tensor, index: int) -> Tensor | None:
        """y by the FP8 kernels; None if the projections must be called."""
        tensors = None if self._number is None or torch_module._has_any_global_hook() else self._plain_fp8()
        if (
            tensors is None
            or torch.is_grad_enabled()
            or type(x) is not Tensor
            or x.dtype != torch.bfloat16
            or x.dim() < 2
            or x.shape[-1] != tensors[0].shape[1]
            or not x.get_device() == tensors[0].get_device() == index == current_device()
            or self.backend not in KERNELS
            or not registered.nothing_intercepts("cuda")
        ):
            return None
        captured = is_capturing()
        if self._plans_itself and not captured:
            self._look_at(x)
        plan: Any = self._plan_captured if captured else self._plan_eager  # read once: another thread may change it
        (few, _, least), drift, tokens = self._plan_tokens[captured], self._drift, x.numel() // x.shape[-1]
        is_sparse = captured and (
            0 < tokens <= few or (tokens >= least and sizes_of(plan)[0] < len(self.neuron_counts))
        )
        before, kept = self._fp8, self._kept_of_fp8(tensors, plan, is_sparse=is_sparse, captured=captured)
        if kept is None:
            return None
        if captured:
            self._keep_for_graphs(plan)
            self._keep_for_graphs(kept)
        watch = None if drift is None or captured or tokens < least else drift.room(x.device)
        given = kept.w, self.activation, plan, few, least, kept.layout, watch
        y: Tensor = backends.kernels().fp8.forward(x, *given, settled=before is self._fp8 and before is not None)
        if watch is not None and drift is not None:
            drift.send(watch, tokens)
        elif drift is not None and not captured and tokens >= least and drift.is_too_far():
            self._plan_anew()
        return y

    def _kept_of_fp8(self, tensors: list[Tensor], plan: Any, *, is_sparse: bool, captured: bool) -> Any:
        """What kernels read, made anew after a weight or the plan has changed; None if kernels cannot read the weights.
        ``is_sparse``: this batch is captured and runs sparsely."""
        found, states = self._fp8, [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]
        if found is not None and found.states == states and found.order is plan.order:
            return found.kept
        kernels = backends.kernels().fp8
        gate, *up, down = weights = [linear.fp8() for linear in (getattr(self, name) for name in self.projections)]
        if not kernels.can_read(*weights):
            kept = None
        elif captured:  # a graph would own tensors made here, but dense batches need none
            if is_sparse:
                raise RuntimeError("FP8 weights are new or have changed: call the layer once before capturing it")
            return kernels.keep(gate, up[0] if up else None, down, None)
        else:
            plans: list[Any] = [plan, self._plan_captured]
            few = max(tokens_of(p)[0] for p in plans if p[0] is plan.order)  # CUDA graphs read the same tensors
            with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode cannot be rewritten
                kept = kernels.keep(gate, up[0] if up else None, down, plan, few=few)
            if found is not None and found.order is plan.order and found.kept is not None:
                found.kept.rewrite_(kept)  # CUDA graphs read them, too
                kept = type(kept)(kept.w._replace(down=found.kept.w.down), found.kept.layout)
        self._fp8 = KeptOfFp8(states, plan.order, kept)
        return kept

    def _fp8_tensors(self) -> list[Tensor]:
        """Weights and scales of projections that are all ``Fp8Linear``."""
        linears: list[Any] = [self._modules[name] for name in self.projections]
        return [t for linear in linears for t in (linear.weight, linear.weight_scale)]

    def refresh_fp8(self) -> bool:
        """Rewrite what kernels keep of FP8 weights; returns whether they keep anything."""
        found, plan = self._fp8, self._plan_eager
        if found is None:
            return False
        self._fp8 = found._replace(states=[])
        self._kept_of_fp8(self._fp8_tensors(), plan, is_sparse=False, captured=False)
        return True

    def is_laid_out(self) -> bool:
        """Whether FP8 weights are laid out for the split, as they are from the first call with a sparse plan on."""
        return self._fp8 is not None and self._fp8.kept is not None and self._fp8.kept.layout is not None
