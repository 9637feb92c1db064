"""Make the FFNs of an existing model sparse, in place and on instances only; and the way back.

``sparsify_``    FFNs that compute relu or relu2 run through ``twell``: same function, same weights, same state dict.
``desparsify_``  undoes it exactly.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from twell.hf.classify import (
    BACKEND_BEFORE,
    CALLED,
    GATED_NAMES,
    INLINE_NAMES,
    LEFT_ALONE,
    SPARSE,
    classify,
    find_ffns,
    projection_names,
    sparse_ffn_of,
)
from twell.hf.counts import NeuronCounts, find_counts
from twell.hf.hooks import share_hooks, without_hooks
from twell.hf.inline import InlineFFN
from twell.hf.parallel import is_sharded, parallelize_, tensor_parallel_mesh
from twell.nn import (
    GatedSparseFFN,
    SparseFFN,
    SparseFFNBase,
    activation_of,
    neuron_major_,
    restore_layout_,
    sparse_ffns,
)

_ALREADY = "already sparse"
_CHECKED_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """What happened to one FFN. ``became`` is None where nothing was changed; ``why`` says why, or why it is called."""

    layer: str
    was: str
    became: str | None
    why: str = ""
    plan: str = ""
    kind: str = ""  # sparse, called or left alone; empty where a report does not tell


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion did, FFN by FFN; prints as a table."""

    rows: tuple[Row, ...]

    @property
    def changed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.became is not None)

    @property
    def skipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.became is None)

    @property
    def n_sparse(self) -> int:
        """How many layers ``sparsify_`` has made, or found, sparse."""
        return sum(row.kind == SPARSE for row in self.rows)

    def summary(self) -> str:
        """In a few words."""
        n_sparse = self.n_sparse
        if n_sparse == len(self.rows) > 0:
            return f"all {n_sparse} feed-forward layers can run sparsely"
        reasons = Counter(row.why for row in self.rows if row.kind != SPARSE)
        why = "; ".join(f"{n} dense: {reason}" for reason, n in reasons.items()) or "no feed-forward layers were found"
        if n_sparse == 0:
            return f"nothing is sparse: {why}"
        return f"{n_sparse} of {len(self.rows)} feed-forward layers can run sparsely; {why}"

    def __str__(self) -> str:
        if not self.rows:
            return "no feed-forward layers found"
        cells = [("layer", "was", "became")]
        for row in self.rows:
            why = "" if not row.why else f"called: {row.why}" if row.kind == CALLED else f"skipped: {row.why}"
            cells.append((row.layer, row.was, "; ".join(part for part in (row.became, why, row.plan) if part)))
        widths = [max(len(row[i]) for row in cells) for i in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in cells)


# ---------------------------------------------------------------------------------------------------------
# sparsify_ and desparsify_
# ---------------------------------------------------------------------------------------------------------


def sparsify_(model: nn.Module, counts: NeuronCounts | None = None) -> Report:
    """Run every FFN of ``model`` that computes relu or relu2 through ``twell``, in place.

    Knows gated FFNs (gate_proj, up_proj, down_proj: Llama, Mistral, Qwen, Gemma and their like), plain ones
    (up_proj, down_proj: Nemotron) and OPT's fc1 / fc2. Each is compared with the dense one on a few random tokens
    before it is taken, so a block that computes something else is skipped, not broken. A model that was loaded with a
    tensor parallel plan stays parallel; call it on every process.

    Unless the model is in training mode or sharded, the weights of down projections are laid out neuron by neuron: the
    same parameters, shapes and values with other strides (``restore_layout_`` makes them contiguous again).

    ``counts`` make the plans of the layers; by default those that ``twell calibrate`` left beside the model.
    """
    rows = [_sparsify_one(*found) for found in list(find_ffns(model))]
    if not model.training:
        for _, ffn in sparse_ffns(model):
            _lay_out(ffn)
    if counts is None:
        counts = find_counts(getattr(getattr(model, "config", None), "_name_or_path", None))
    return Report(tuple(rows if counts is None else _with_plans(model, rows, counts)))


def _lay_out(ffn: SparseFFNBase) -> None:
    down = getattr(ffn, ffn.projections[-1])
    if ffn.training or ffn.backend == "reference" or is_sharded(ffn) or ffn.why_called() is not None:
        return
    if down.weight.device.type != "meta":
        neuron_major_(down)


def _with_plans(model: nn.Module, rows: list[Row], counts: NeuronCounts) -> list[Row]:
    ffns = dict(sparse_ffns(model))
    if not ffns:
        return rows
    widths, counted = [len(f.neuron_counts) for f in ffns.values()], [len(c) for c in counts.fired]
    if widths != counted:
        raise ValueError(f"the counts are of {len(counted)} FFNs {counted}, the model has {len(widths)} {widths}")
    fired = dict(zip(ffns, counts.fired, strict=True))
    plans = {name: ffn.plan_from_counts(fired[name], counts.tokens) for name, ffn in ffns.items()}
    return [dataclasses.replace(row, plan=repr(plans[row.layer])) if row.layer in plans else row for row in rows]


def desparsify_(model: nn.Module, *, restore_layout: bool = True) -> Report:
    """Undo ``sparsify_`` exactly; the FFNs of sparse model types run densely until the next ``sparsify_``.

    ``restore_layout=False`` leaves weights as they lie, for a dense twin that shares them with a sparse model.
    """
    rows = []
    for name, parent, attribute, ffn in list(find_ffns(model)):
        sparse, was = sparse_ffn_of(ffn), type(ffn).__name__
        if sparse is None:
            rows.append(Row(name, was, None, "is dense"))
            continue
        if restore_layout:
            restore_layout_(sparse)
        dense = vars(sparse).get("dense_block")
        if isinstance(sparse, InlineFFN):
            sparse.take_out()
            rows.append(Row(name, "SparseFFN (fc1, fc2)", was))
        elif dense is not None:
            for projection in sparse.projections:  # an adapter may have taken a linear's place
                setattr(dense, projection, getattr(sparse, projection))
            dense.train(sparse.training)
            setattr(parent, attribute, dense)
            rows.append(Row(name, was, type(dense).__name__))
        else:
            if BACKEND_BEFORE not in vars(sparse):
                setattr(sparse, BACKEND_BEFORE, sparse.backend)
            sparse.backend = "reference"
            rows.append(Row(name, was, f"{was}, run densely"))
    return Report(tuple(rows))


def _sparsify_one(name: str, parent: nn.Module, attribute: str, ffn: nn.Module) -> Row:
    was, (kind, why) = type(ffn).__name__, classify(ffn)
    if kind == LEFT_ALONE:
        return Row(name, was, None, why, kind=kind)
    sparse = sparse_ffn_of(ffn)
    if sparse is not None:
        if BACKEND_BEFORE not in vars(sparse):
            return Row(name, was, None, why or _ALREADY, kind=kind)
        sparse.backend = getattr(sparse, BACKEND_BEFORE)
        delattr(sparse, BACKEND_BEFORE)
        return Row(name, was, f"{was}, run sparsely", why, kind=kind)
    sparse = wrap(ffn)
    if isinstance(sparse, InlineFFN):
        sparse.put_in()
        return Row(name, was, f"SparseFFN (fc1, fc2), {sparse.activation}", why, kind=kind)
    if is_sharded(ffn):
        mesh = tensor_parallel_mesh(sparse)
        if mesh is None:
            why = "its weights are sharded, but not by neurons (colwise, rowwise)"
            return Row(name, was, None, why, kind=LEFT_ALONE)
        parallelize_(sparse, mesh)
        kind, why = classify(sparse)
    if not _computes_the_same(ffn, sparse):
        why = f"its forward is not that of a {'gated' if isinstance(sparse, GatedSparseFFN) else 'plain'} FFN"
        return Row(name, was, None, why, kind=LEFT_ALONE)
    if "forward" in vars(ffn):  # moves what it gets between devices, for example (accelerate)
        return Row(name, was, None, "it has a forward of its own", kind=LEFT_ALONE)
    share_hooks(ffn, sparse)
    object.__setattr__(sparse, "dense_block", ffn)  # not a submodule: the state dict stays as it is
    setattr(parent, attribute, sparse)
    return Row(name, was, f"{_class_of(ffn).__name__}, {sparse.activation}", why, kind=kind)


def _class_of(ffn: nn.Module) -> type[SparseFFNBase]:
    names = projection_names(ffn)
    return InlineFFN if names is INLINE_NAMES else GatedSparseFFN if names is GATED_NAMES else SparseFFN


def wrap(ffn: nn.Module, cls: type[SparseFFNBase] | None = None, activation: str | None = None) -> Any:
    """The sparse FFN of a dense block, in nobody's place yet. As ``from_dense``, which takes no LoRA's linears."""
    new = (cls or _class_of(ffn)).__new__(cls or _class_of(ffn))
    new._build([getattr(ffn, name) for name in projection_names(ffn)], activation or activation_of(ffn), "auto", False)
    new.train(ffn.training)
    if isinstance(new, InlineFFN):
        new.belong_to(ffn)
    return new


@torch.no_grad()
def _computes_the_same(dense: nn.Module, sparse: SparseFFNBase) -> bool:
    """On random tokens, by which the layer must not plan; in training mode too, where there may be dropout."""
    first = getattr(sparse, sparse.projections[0])
    weight = first.weight
    if weight.device.type == "meta":
        return True  # nothing to compare yet
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _CHECKED_TOKENS, first.in_features, generator=generator).to(weight.device, dtype)
    modes = [(module, module.training) for module in dense.modules()]
    sparse._plans_itself = False
    try:
        with without_hooks(dense), torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
            try:
                expected = [dense.train(mode)(x) for mode in (False, True)]
            except (TypeError, ValueError, RuntimeError):
                return False
            got = sparse(x).double()
    finally:
        sparse._plans_itself = True
        for module, mode in modes:
            module.training = mode
    tolerance = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    return all(
        isinstance(y, Tensor)
        and y.shape == x.shape
        and bool((got - y.double()).norm() <= tolerance * y.double().norm())
        for y in expected
    )
