"""Make the FFNs of an existing model sparse, in place and on instances only; and the way back.

``sparsify_``    FFNs that compute relu or relu2 run through ``twell``: same function, same weights, same state dict.
``desparsify_``  undoes it exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from twell.fp8 import Fp8Linear, is_foreign, take_over
from twell.fp8.compressed import record_
from twell.hf.check import why_not_the_same
from twell.hf.classify import (
    BACKEND_BEFORE,
    CALLED,
    LEFT_ALONE,
    SPARSE,
    as_plain,
    classify,
    find_ffns,
    is_inline,
    is_known,
    projection_names,
    sparse_ffn_of,
)
from twell.hf.counts import NeuronCounts, find_counts
from twell.hf.hooks import share_hooks
from twell.hf.inline import InlineFFN
from twell.hf.known import LINEARS, NOBODY, Also, class_name, describe, requested
from twell.nn import (
    GatedSparseFFN,
    SparseFFN,
    SparseFFNBase,
    activation_of,
    check_model,
    neuron_major_,
    restore_layout_,
    sparse_ffns,
)
from twell.nn.parallel import is_sharded

_ALREADY = "already sparse"
NONE_FOUND = f"no feed-forward layers were found; looked for modules with {describe()}"
_EMPTY = "its weights are on the meta device and hold nothing: load them first"


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
        why = "; ".join(f"{n} dense: {reason}" for reason, n in reasons.items()) or NONE_FOUND
        if n_sparse == 0:
            return f"nothing is sparse: {why}"
        return f"{n_sparse} of {len(self.rows)} feed-forward layers can run sparsely; {why}"

    def __str__(self) -> str:
        if not self.rows:
            return NONE_FOUND
        cells = [("layer", "was", "became")]
        for row in self.rows:
            why = "" if not row.why else f"called: {row.why}" if row.kind == CALLED else f"skipped: {row.why}"
            cells.append((row.layer, row.was, "; ".join(part for part in (row.became, why, row.plan) if part)))
        widths = [max(len(row[i]) for row in cells) for i in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in cells)


# ---------------------------------------------------------------------------------------------------------
# sparsify_ and desparsify_
# ---------------------------------------------------------------------------------------------------------


def sparsify_(model: nn.Module, counts: NeuronCounts | None = None, *, also: Also = NOBODY) -> Report:
    """Run every FFN of ``model`` that computes relu or relu2 through ``twell``, in place.

    Takes FFNs of the classes in ``twell.hf.known``: gated ones (Llama, Mistral, Qwen, Gemma and their like) and plain
    ones (Nemotron, OPT, GPT-NeoX, Falcon and their like); docs/models.md lists the models. A block that has more parts
    than an FFN is left alone, and so is one that gives other results than its sparse twin on random tokens, in training
    or in evaluation mode. The report says why.

    ``also``: blocks of other classes that compute the same, with the same names of projections: a class, its full
    name, several of them, or a function that says of a block whether it is one.

    A model that was loaded with a tensor parallel plan stays parallel; call it on every process.

    Unless the model is in training mode or sharded, the weights of down projections are laid out neuron by neuron: the
    same parameters, shapes and values with other strides (``restore_layout_`` makes them contiguous again).

    FP8 weights of compressed-tensors and torchao become ``Fp8Linear``s with the same values, and stay such after
    ``desparsify_``; not in training mode, and not in a model that was loaded to be dequantised.

    ``counts`` make the plans of the layers; by default those that ``twell calibrate`` left beside the model.
    """
    return _sparsify(model, counts, requested(also), may_be_empty=False)


def sparsify_empty_(model: nn.Module, counts: NeuronCounts | None = None) -> Report:
    """``sparsify_`` of a model on the meta device, to see what becomes of its layers: no block is checked."""
    return _sparsify(model, counts, requested(NOBODY), may_be_empty=True)


def _sparsify(
    model: nn.Module, counts: NeuronCounts | None, is_requested: Callable[[nn.Module], bool], *, may_be_empty: bool
) -> Report:
    check_model(model)
    takes = not model.training and _keeps_fp8(model)
    rows = [_sparsify_one(*found, is_requested(found[-1]), may_be_empty, takes) for found in list(find_ffns(model))]
    if takes and _is_fp8_ours_alone(model):
        record_(model)
    if not model.training:
        for _, ffn in sparse_ffns(model):
            _lay_out(ffn)
    if counts is None:
        counts = find_counts(getattr(getattr(model, "config", None), "_name_or_path", None))
    return Report(tuple(rows if counts is None else _with_plans(model, rows, counts)))


def _keeps_fp8(model: nn.Module) -> bool:
    """Not a model that compressed-tensors was told to dequantise: its configuration no longer tells of FP8."""
    is_told = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    return is_told or not any(hasattr(module, "quantization_scheme") for module in model.modules())


def _is_fp8_ours_alone(model: nn.Module) -> bool:
    modules = list(model.modules())
    is_any = any(isinstance(module, Fp8Linear) for module in modules)
    return is_any and not any(hasattr(module, "quantization_scheme") or is_foreign(module) for module in modules)


def _take_over_(block: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Make other libraries' FP8 projections ours; returns what was there, by name."""
    replaced = {}
    for name in names:
        linear = getattr(block, name)
        new = take_over(linear)
        if new is not None:
            replaced[name] = linear
            put = block.set_projection if isinstance(block, SparseFFNBase) else functools.partial(setattr, block)
            put(name, new)
    return replaced


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

    The next one gives layers the ``backend`` again that was chosen for them. Parts that were put into a sparse layer go
    to its dense block.

    ``restore_layout=False`` leaves weights as they lie, for a dense twin that shares them with a sparse model.
    """
    check_model(model)
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
            _remember_choice(ffn, sparse.backend)
            rows.append(Row(name, f"SparseFFN ({', '.join(projection_names(ffn))})", was))
        elif dense is not None:
            shared = vars(sparse)["dense_projections"]
            for projection, before in zip(sparse.projections, shared, strict=True):
                linear, own = getattr(sparse, projection), getattr(dense, projection)
                if linear is not before:  # an adapter has taken the linear's place, say
                    setattr(dense, projection, linear)
                elif class_name(type(own)) in LINEARS:  # of which the sparse FFN has a plain twin
                    own.weight, own.bias = linear.weight, linear.bias
            for part in (*sparse._modules, *sparse._parameters):
                if part not in sparse.projections:
                    setattr(dense, part, getattr(sparse, part))
            _remember_choice(dense, sparse.backend)
            dense.train(sparse.training)
            setattr(parent, attribute, dense)
            rows.append(Row(name, was, type(dense).__name__))
        else:
            if BACKEND_BEFORE not in vars(sparse) or sparse.backend != "reference":  # chosen since the last time
                setattr(sparse, BACKEND_BEFORE, sparse.backend)
            sparse.backend = "reference"
            rows.append(Row(name, was, f"{was}, run densely"))
    return Report(tuple(rows))


def _remember_choice(block: nn.Module, backend: str) -> None:
    """Of a backend, for the next ``sparsify_``. A block without one is left as it was before the first."""
    if backend == "auto":
        vars(block).pop(BACKEND_BEFORE, None)
    else:
        vars(block)[BACKEND_BEFORE] = backend


def _sparsify_one(
    name: str,
    parent: nn.Module,
    attribute: str,
    ffn: nn.Module,
    is_requested: bool,
    may_be_empty: bool,
    takes: bool,
) -> Row:
    was, (kind, why) = type(ffn).__name__, classify(ffn, is_requested)
    if kind == LEFT_ALONE:
        return Row(name, was, None, why, kind=kind)
    sparse = sparse_ffn_of(ffn)
    if sparse is not None:
        if takes and not isinstance(sparse, InlineFFN) and _take_over_(sparse, sparse.projections):
            kind, why = classify(ffn, is_requested)
            return Row(name, was, f"{was}, its FP8 weights taken over", why, kind=kind)
        if BACKEND_BEFORE not in vars(sparse):
            return Row(name, was, None, why or _ALREADY, kind=kind)
        before = vars(sparse).pop(BACKEND_BEFORE)
        if sparse.backend == "reference":  # else another was chosen since
            sparse.backend = before
        return Row(name, was, f"{was}, run sparsely", why, kind=kind)
    is_empty = any(p.device.type == "meta" for p in ffn.parameters())
    if is_empty and not may_be_empty:
        return Row(name, was, None, _EMPTY, kind=LEFT_ALONE)
    replaced = _take_over_(ffn, projection_names(ffn)) if takes else {}
    if replaced:
        kind, why = classify(ffn, is_requested)
    sparse = wrap(ffn)
    if sparse.backend == "reference":
        kind, why = classify(sparse)
    if isinstance(sparse, InlineFFN):
        sparse.put_in()
        return Row(name, was, f"SparseFFN ({', '.join(projection_names(ffn))}), {sparse.activation}", why, kind=kind)
    if is_sharded(ffn):
        share = sparse.share()
        if share is None or not share.is_whole:
            why = "its weights are sharded, but not by neurons (colwise, rowwise)"
            return Row(name, was, None, why, kind=LEFT_ALONE)
        kind, why = classify(sparse)
    reason = None if is_empty else why_not_the_same(ffn, sparse, must_tell=not is_known(ffn))
    if reason is not None:
        for projection, linear in replaced.items():
            setattr(ffn, projection, linear)
        return Row(name, was, None, reason, kind=LEFT_ALONE)
    share_hooks(ffn, sparse)
    object.__setattr__(sparse, "dense_block", ffn)  # not a submodule: the state dict stays as it is
    vars(sparse)["dense_projections"] = tuple(getattr(sparse, projection) for projection in sparse.projections)
    setattr(parent, attribute, sparse)
    return Row(name, was, f"{_class_of(ffn).__name__}, {sparse.activation}", why, kind=kind)


def _class_of(ffn: nn.Module) -> type[SparseFFNBase]:
    if is_inline(ffn):
        return InlineFFN
    return GatedSparseFFN if len(projection_names(ffn)) == 3 else SparseFFN


def wrap(ffn: nn.Module, cls: type[SparseFFNBase] | None = None, activation: str | None = None) -> Any:
    """The sparse FFN of a dense block, in nobody's place yet. As ``from_dense``, which takes no LoRA's linears, but
    projections keep their names, and with them the state dict."""
    cls, names = cls or _class_of(ffn), projection_names(ffn)
    new, backend = cls.__new__(cls), vars(ffn).get(BACKEND_BEFORE, "auto")
    linears: list[Any] = [as_plain(getattr(ffn, name)) for name in names]
    own_names = None if isinstance(new, InlineFFN) else names
    new._build(linears, activation or activation_of(ffn), backend, False, own_names)
    new.train(ffn.training)
    if isinstance(new, InlineFFN):
        new.belong_to(ffn)
    return new
