"""Tensor parallel FFNs: each process has a share of the neurons, runs the fused op on it, and one all-reduce sums y.

An FFN is parallel if its weights are DTensors, gate and up cut by rows, down by columns. The styles "colwise" and
"rowwise" of transformers' plans, which other engines know too, lay weights out so. The layer reads its share from its
weights in every call and keeps nothing, so it loads, saves, copies and pickles wherever DTensors do.

The styles also replace the forwards of the projections. The fused op stands in for these forwards. They stay in place:
the FFN calls them if a projection has an adapter or a hook, which then acts as in the dense block. A style's forward
also marks weights as tensor parallel: FSDP2 may use the same layout, but its weights are whole in every call.

Outside the FFN every result covers the whole layer and is the same on every process: y, l1_sum, counts, the running
counts. So losses, gradients and calibration equal those of one process. Only the plan covers a process's own neurons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell.ops import Stats
from twell.reference import Weights


class Share(NamedTuple):
    """The neurons of a layer that this process owns."""

    mesh: Any  # the weights' DeviceMesh
    own: slice
    n_neurons: int  # of the layer

    @property
    def n_own(self) -> int:
        return int(self.own.stop - self.own.start)

    @property
    def is_whole(self) -> bool:
        """False while FSDP divides the weights further: it gathers them to run the layer."""
        return bool(self.mesh.ndim == 1)

    def counts_of_own(self, counts: Tensor) -> Tensor:
        """``counts`` are of the whole layer or already of these neurons."""
        return counts[self.own] if len(counts) == self.n_neurons else counts

    def weights_of_own(self, w: Weights) -> Weights:
        """The weights of the own neurons. Down's bias is left out: ``run`` adds it once."""
        return Weights._make(None if t is None else _local(t) for t in w._replace(down_bias=None))

    def run(self, ffn: Callable[[Tensor], Any], x: Tensor, down_bias: Tensor | None, return_stats: bool) -> Any:
        """y and statistics of the whole layer. ``ffn`` computes them for the own neurons."""
        result = ffn(_gradients_summed(x, self.mesh))
        y = _summed(result[0] if return_stats else result, self.mesh)
        if down_bias is not None:
            y = y + _local(down_bias).to(y.dtype)
        return (y, self.stats_of_all(result[1])) if return_stats else y

    def stats_of_all(self, stats: Stats) -> Stats:
        counts = stats.counts.new_zeros(self.n_neurons)
        counts[self.own] = stats.counts
        torch.distributed.all_reduce(counts, group=self.mesh.get_group())  # not a gather: shares may differ in size
        return Stats(_summed(stats.l1_sum, self.mesh), counts, stats.tokens)


def share_of(projections: Sequence[nn.Module]) -> Share | None:
    """This process's share by the layout of the weights; None if they are not divided by neurons.

    An input projection without a weight of its own, for example a wrapper, counts as divided like the others.
    """
    *inputs, down = map(_wrapped, projections)
    weight: Any = down._parameters.get("weight")
    if weight is None or not is_distributed(weight) or stock_forward(down) is None:
        return None
    mesh, F = weight.device_mesh, weight.shape[1]
    dims = [dim for dim, placement in enumerate(weight.placements) if placement.is_shard(1)]
    owned = [linear._parameters for linear in inputs]
    parts = [p for own in owned if own.get("weight") is not None for p in own.values() if p is not None]
    if len(dims) != 1 or not all(_is_cut_by_rows(p, mesh, dims[0]) for p in parts):
        return None
    n, rank = mesh.size(dims[0]), mesh.get_coordinate()[dims[0]]
    each = -(-F // n)
    if each * (n - 1) >= F:
        raise ValueError(f"an FFN of {F} neurons cannot be divided over {n} processes: the last would have none")
    return Share(mesh, slice(each * rank, min(each * (rank + 1), F)), F)


def _wrapped(linear: nn.Module) -> Any:
    """The linear inside an adapter of PEFT, or the linear itself."""
    return linear if "weight" in linear._parameters else getattr(linear, "base_layer", linear)


def _is_cut_by_rows(parameter: Any, mesh: Any, dim: int) -> bool:
    return is_distributed(parameter) and parameter.device_mesh == mesh and parameter.placements[dim].is_shard(0)


def is_distributed(parameter: Tensor) -> bool:
    """Whether it is a DTensor, without importing DTensor's slow module."""
    return hasattr(parameter, "device_mesh")


def is_sharded(module: nn.Module) -> bool:
    """Whether any of its parameters is divided over processes."""
    return any(is_distributed(p) for p in module.parameters())


# -- Forwards of the projections -------------------------------------------------------------------------


def stock_forward(linear: nn.Module) -> Any:
    """The forward that a tensor parallel style gave a projection, or None."""
    forward = linear.__dict__.get("forward")
    is_ours = isinstance(forward, functools.partial) and forward.func is _forward_in_style
    is_theirs = getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel"
    return forward if is_ours or is_theirs else None


def bind_forwards_(projections: Sequence[nn.Module]) -> None:
    """Make the styles' forwards copy and pickle with their projections. Those of transformers are closures: they
    cannot be pickled, and a copied one would compute with the original's weights."""
    for i, linear in enumerate(map(_wrapped, projections)):
        if stock_forward(linear) is not None:
            style = "colwise" if i < len(projections) - 1 else "rowwise"
            linear.forward = functools.partial(_forward_in_style, linear, style)


def _forward_in_style(linear: Any, style: str, *args: Any, **kwargs: Any) -> Any:
    """The forward that ``TensorParallelLayer.install_forward`` of transformers installs."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    known, mesh = ALL_PARALLEL_STYLES[style], linear.weight.device_mesh
    args, kwargs = known.transform_inputs_pre_forward(linear, args, kwargs, mesh)
    with known.context_around_forward(linear, mesh):
        output = type(linear).forward(linear, *args, **kwargs)
    return known.transform_output_post_forward(linear, output, mesh)


# -- Tensors ---------------------------------------------------------------------------------------------


def _local(parameter: Any) -> Any:
    """This process's shard of a parameter."""
    return parameter.to_local() if is_distributed(parameter) else parameter


def _summed(partial: Tensor, mesh: Any) -> Tensor:
    """The sum over processes; each receives its gradient unchanged. May overwrite ``partial`` if it needs no
    gradient."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not partial.requires_grad:
        torch.distributed.all_reduce(partial, group=mesh.get_group())
        return partial
    return DTensor.from_local(partial, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()


def _gradients_summed(x: Tensor, mesh: Any) -> Tensor:
    """x, which is the same on every process; its gradient is the sum of theirs."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not (torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
