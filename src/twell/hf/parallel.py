"""Tensor parallel FFNs: each process has a share of the neurons, runs the fused op on it, and one all-reduce gives y.

In a transformers plan (``base_model_tp_plan``) the style ``twell_ffn`` names a whole FFN. The stock styles give the
projections forwards of their own, for which the FFN's stands in; they are used here for what they do to parameters:
gate and up are cut by rows, down by columns, its bias is whole everywhere. Parameters stay DTensors of the whole
shape, so loading, saving, optimisers and ``state_dict`` are those of the base model. (transformers 5.16 or newer.)

Outside the FFN everything is of the whole layer and the same on every process: y, l1_sum, counts, the running counts.
So the loss, its gradients and what is calibrated are those of one process. Only the plan is of a process's own neurons.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from twell.fp8 import Fp8Linear
from twell.hf.configs import FFN_STYLE
from twell.nn import SparseFFNBase, why_called
from twell.ops import Stats
from twell.plan import Plan

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class ParallelFFN(SparseFFNBase):
    """What an FFN does differently once its neurons are shared out over the processes of ``mesh``."""

    mesh: DeviceMesh
    own: slice  # this process's neurons

    def _ffn(self, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        with self._as_own_neurons():
            result = super()._ffn(_gradients_summed(x, self.mesh), token_mask, return_stats)
        y, stats = result if return_stats else (result, None)
        y = _summed(y, self.mesh)
        bias = getattr(self, self.projections[-1]).bias
        if bias is not None:
            y = y + _local(bias).to(y.dtype)
        return (y, self._of_all(stats)) if stats is not None else y

    def _call_projections(self, x: Tensor, token_mask: Tensor | None, return_stats: bool) -> Any:
        forwards = [(linear, _stock_forward(linear)) for linear in (getattr(self, name) for name in self.projections)]
        for linear, forward in forwards:
            if forward is not None:
                del linear.forward
        try:
            return super()._call_projections(x, token_mask, return_stats)
        finally:
            for linear, forward in forwards:
                if forward is not None:
                    linear.forward = forward

    def _of_all(self, stats: Stats) -> Stats:
        counts = stats.counts.new_zeros(self.n_neurons)
        counts[self.own] = stats.counts
        dist.all_reduce(counts, group=self.mesh.get_group())  # a sum, not a gather: shares may differ in size
        return Stats(_summed(stats.l1_sum, self.mesh), counts, stats.tokens)

    @contextlib.contextmanager
    def _as_own_neurons(self) -> Iterator[None]:
        """Within it the module is an ordinary FFN of its own neurons, without the bias that is to be added once."""
        linears = [getattr(self, name) for name in self.projections]
        whole = [dict(linear._parameters) for linear in linears]
        counts = self._buffers["neuron_counts"]
        for linear, parameters in zip(linears, whole, strict=True):
            linear._parameters.update({name: _local(p) for name, p in parameters.items()})
        if "bias" in whole[-1]:
            linears[-1]._parameters["bias"] = None
        self._buffers["neuron_counts"] = self._of_own(self.neuron_counts)
        try:
            yield
        finally:
            for linear, parameters in zip(linears, whole, strict=True):
                linear._parameters.update(parameters)
            self._buffers["neuron_counts"] = counts

    @property
    def n_neurons(self) -> int:
        """F, of the whole layer."""
        return getattr(self, self.projections[0]).out_features

    def _of_own(self, counts: Tensor) -> Tensor:
        return counts[self.own] if len(counts) == self.n_neurons else counts

    # -- plan: of the process's own neurons ------------------------------------------------------------------

    def set_plan(self, plan: Plan | None) -> None:
        """As ``SparseFFNBase.set_plan``; the plan is for this process's neurons."""
        n_own = self.own.stop - self.own.start
        if plan is not None and plan.n_neurons != n_own:
            raise ValueError(
                f"the plan is for {plan.n_neurons} neurons, and this process has {n_own} of the layer's "
                f"{self.n_neurons}; plan_from_counts takes counts of the whole layer"
            )
        with self._as_own_neurons():
            super().set_plan(plan)

    def plan_from_counts(
        self, counts: Tensor | None = None, tokens: int | None = None, *, training: bool = False
    ) -> Plan:
        """As ``SparseFFNBase.plan_from_counts``, with the counts of the whole layer or of this process's neurons."""
        counts = self._of_own(self.neuron_counts if counts is None else counts)
        return super().plan_from_counts(counts, tokens, training=training)

    def _place_plan(self, device: torch.device | None = None) -> None:
        with self._as_own_neurons():
            super()._place_plan(device)

    def _look_at(self, x: Tensor) -> None:
        with self._as_own_neurons():
            super()._look_at(x)

    # -- frozen state: of the process's own weights ----------------------------------------------------------

    @torch.no_grad()  # in which parts of parameters are the same tensors every time
    def freeze(self) -> None:
        with self._as_own_neurons():
            super().freeze()

    @torch.no_grad()
    def refresh(self) -> None:
        with self._as_own_neurons():
            super().refresh()

    def why_called(self) -> str | None:
        with self._as_own_neurons():
            return super().why_called()

    @staticmethod
    def _why_called(linear: nn.Module, name: str) -> str | None:
        return why_called(linear, name, _stock_forward(linear))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, neurons {self.own.start} to {self.own.stop - 1} here"


@functools.cache
def _parallel(cls: Any) -> Any:
    return type(f"Parallel{cls.__name__}", (ParallelFFN, cls), {})


def parallelize_(ffn: SparseFFNBase, mesh: DeviceMesh) -> None:
    """Make a parallel FFN of one whose weights are laid out for it; ``mesh`` has one dimension. Instances only."""
    F, n = getattr(ffn, ffn.projections[0]).out_features, mesh.size()
    each = -(-F // n)
    if each * (n - 1) >= F:
        raise ValueError(f"an FFN of {F} neurons cannot be shared out over {n} processes: the last would have none")
    start = each * mesh.get_local_rank()
    parallel: Any = ffn
    parallel.__class__ = _parallel(parallel.__class__)
    parallel.mesh, parallel.own = mesh, slice(start, min(start + each, F))
    parallel.plan = None  # one of the whole layer would not fit
    parallel._place_plan()


def _stock_forward(linear: nn.Module) -> Any:
    """What a stock style has put in the place of a projection's forward, or None."""
    forward = linear.__dict__.get("forward")
    return forward if getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel" else None


def is_sharded(module: nn.Module) -> bool:
    """Whether any of its parameters is divided over processes."""
    return dist.is_available() and any(isinstance(p, DTensor) for p in module.parameters())


def tensor_parallel_mesh(ffn: SparseFFNBase) -> DeviceMesh | None:
    """The mesh over which the neurons of an FFN are shared out already; None where its weights are not laid out so."""
    weights: list[Any] = [getattr(ffn, name).weight for name in ffn.projections]
    if not is_sharded(ffn) or not all(isinstance(w, DTensor) for w in weights):
        return None
    mesh = weights[0].device_mesh
    placements = [w.placements for w in weights]
    by_neurons = [(Shard(0),)] * (len(weights) - 1) + [(Shard(1),)]
    return mesh if all(w.device_mesh == mesh for w in weights) and placements == by_neurons else None


def register_style() -> None:
    """Make the style known to transformers. One that is too old for it refuses plans with the style by itself."""
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
    except ImportError:
        return

    class SparseFFNParallel(TensorParallelLayer):
        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            if not isinstance(module, SparseFFNBase):
                raise ValueError(f"the parallel style {FFN_STYLE} is for sparse FFNs, not for {type(module).__name__}")
            *inputs, output = (getattr(module, name) for name in module.projections)
            if any(isinstance(linear, Fp8Linear) for linear in (*inputs, output)):
                raise ValueError("FP8 weights cannot be shared out over processes: load the model without a tp_plan")
            for linear, cut in [*((linear, "colwise") for linear in inputs), (output, "rowwise")]:
                for parameter in linear._parameters:
                    ALL_PARALLEL_STYLES[cut].shard_param(linear, parameter, mesh)
            parallelize_(module, mesh)
            return module

    style: Any = SparseFFNParallel()
    ALL_PARALLEL_STYLES.register(FFN_STYLE, style)


# ---------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------


def _local(parameter: Tensor | None) -> Any:
    """This process's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _summed(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over processes; its gradient goes to each of them as it is. May overwrite what has no gradient."""
    if not partial.requires_grad:
        dist.all_reduce(partial, group=mesh.get_group())
        return partial
    return DTensor.from_local(partial, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()


def _gradients_summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, the same on every process, whose gradient is the sum of what each of them finds."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
