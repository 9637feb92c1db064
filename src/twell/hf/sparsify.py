"""Make the FFNs of an existing model sparse, in place and on instances only; and undo it.

``sparsify_``    runs FFNs that compute relu or relu2 through ``twell``: same function, same weights, same state dict.
``desparsify_``  undoes it exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from twell.fp8 import take_over
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
    """What happened to one FFN. ``became`` is None if nothing changed; ``why`` gives the reason for that or a call."""

    layer: str
    was: str
    became: str | None
    why: str = ""
    plan: str = ""
    kind: str = ""  # sparse, called or left alone; empty in reports without these verdicts


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion did to each FFN; prints as a table."""

    rows: tuple[Row, ...]

    @property
    def changed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.became is not None)

    @property
    def skipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.became is None)

    @property
    def n_sparse(self) -> int:
        """How many layers are sparse after ``sparsify_``."""
        return sum(row.kind == SPARSE for row in self.rows)

    def summary(self) -> str:
        """In one line."""
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
            why = f"{'called' if row.kind == CALLED else 'skipped'}: {row.why}" if row.why else ""
            cells.append((row.layer, row.was, "; ".join(part for part in (row.became, why, row.plan) if part)))
        widths = [max(len(row[i]) for row in cells) for i in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in cells)


# ---------------------------------------------------------------------------------------------------------
# sparsify_
# ---------------------------------------------------------------------------------------------------------


def sparsify_(model: nn.Module, counts: NeuronCounts | None = None, *, also: Also = NOBODY) -> Report:
    """Run every FFN of ``model`` that computes relu or relu2 through ``twell``, in place.

    Takes FFNs of the classes in ``twell.hf.known``: gated ones (Llama, Mistral, Qwen, Gemma and others) and plain ones
    (Nemotron, OPT, GPT-NeoX, Falcon and others); docs/models.md lists the models. Leaves alone a block that has more
    parts than an FFN, and one that differs from its sparse twin on random tokens, in training or in evaluation mode.
    The report gives the reason.

    ``also``: blocks of other classes that compute the same with the same names of projections: a class, its full name,
    several of them, or a function of a block.

    ``counts`` decide the plans of the layers; by default those that ``twell calibrate`` left in the model's folder.

    A model loaded with a tensor parallel plan stays parallel; call this on every process.

    Unless the model is in training mode or sharded, the weights of down projections become neuron-major: the same
    parameters, shapes and values with other strides. ``restore_layout_`` makes them contiguous again.

    FP8 weights of compressed-tensors and torchao become ``Fp8Linear``s with the same values, with those of FFNs also
    those in attention, and ``desparsify_`` keeps them. Not in training mode, and not in a model that is loaded to be
    dequantised.
    """
    return _sparsify(model, counts, requested(also), may_be_empty=False)


def sparsify_empty_(model: nn.Module, counts: NeuronCounts | None = None) -> Report:
    """``sparsify_`` for a model on the meta device: shows what would become of its layers, without running a block."""
    return _sparsify(model, counts, requested(NOBODY), may_be_empty=True)


def _sparsify(
    model: nn.Module, counts: NeuronCounts | None, is_requested: Callable[[nn.Module], bool], *, may_be_empty: bool
) -> Report:
    check_model(model)
    if counts is None:
        counts = find_counts(getattr(getattr(model, "config", None), "_name_or_path", None))
    fired = {} if counts is None else _fired(model, counts, is_requested)  # refuses them before anything changes
    takes = not model.training and _keeps_fp8(model)
    rows = []
    for name, parent, attribute, ffn in list(find_ffns(model)):
        became, why, kind = _sparsify_one(parent, attribute, ffn, is_requested(ffn), may_be_empty, takes)
        rows.append(Row(name, type(ffn).__name__, became, why, kind=kind))
    if takes:
        record_(model)
    if not model.training:
        for _, ffn in sparse_ffns(model):
            _lay_out(ffn)
    return Report(tuple(rows if counts is None else _with_plans(model, rows, fired, counts.tokens)))


def _sparsify_one(
    parent: nn.Module, attribute: str, ffn: nn.Module, is_requested: bool, may_be_empty: bool, takes: bool
) -> tuple[str | None, str, str]:
    """What an FFN has become, why, and the kind of verdict."""
    was, (kind, why) = type(ffn).__name__, classify(ffn, is_requested)
    if kind == LEFT_ALONE:
        return None, why, kind
    sparse = sparse_ffn_of(ffn)
    if sparse is not None:
        if takes and not isinstance(sparse, InlineFFN) and _take_over_(sparse, sparse.projections):
            kind, why = classify(ffn, is_requested)
            return f"{was}, its FP8 weights taken over", why, kind
        if BACKEND_BEFORE not in vars(sparse):
            return None, why or _ALREADY, kind
        before = vars(sparse).pop(BACKEND_BEFORE)
        if sparse.backend == "reference":  # else another was chosen since
            sparse.backend = before
        return f"{was}, run sparsely", why, kind
    is_empty = any(p.device.type == "meta" for p in ffn.parameters())
    if is_empty and not may_be_empty:
        return None, _EMPTY, LEFT_ALONE
    replaced = _take_over_(ffn, projection_names(ffn)) if takes else {}
    if replaced:
        kind, why = classify(ffn, is_requested)
    sparse = wrap(ffn)
    if isinstance(sparse, InlineFFN):
        sparse.put_in()
        return f"SparseFFN ({', '.join(projection_names(ffn))}), {sparse.activation}", why, kind
    if is_sharded(ffn):
        share = sparse.share()
        if share is None or not share.is_whole:
            return None, "its weights are sharded, but not by neurons (colwise, rowwise)", LEFT_ALONE
        kind, why = classify(sparse)
    reason = None if is_empty else why_not_the_same(ffn, sparse, must_tell=not is_known(ffn))
    if reason is not None:
        for projection, linear in replaced.items():
            setattr(ffn, projection, linear)
        return None, reason, LEFT_ALONE
    share_hooks(ffn, sparse)
    object.__setattr__(sparse, "dense_block", ffn)  # not a submodule: the state dict stays as it is
    setattr(parent, attribute, sparse)
    return f"{_class_of(ffn).__name__}, {sparse.activation}", why, kind


def _class_of(ffn: nn.Module) -> type[SparseFFNBase]:
    if is_inline(ffn):
        return InlineFFN
    return GatedSparseFFN if len(projection_names(ffn)) == 3 else SparseFFN


def wrap(ffn: nn.Module, cls: type[SparseFFNBase] | None = None, activation: str | None = None) -> Any:
    """The sparse FFN of a dense block, not yet put in its place.

    Unlike ``from_dense`` it takes LoRA's linears, and projections keep their names, and so does the state dict.
    """
    cls, names = cls or _class_of(ffn), projection_names(ffn)
    new = cls.__new__(cls)
    linears: list[Any] = [as_plain(getattr(ffn, name)) for name in names]
    own_names = None if isinstance(new, InlineFFN) else names
    new._build(linears, activation or activation_of(ffn), "auto", False, own_names)
    new.train(ffn.training)
    if isinstance(new, InlineFFN):
        new.belong_to(ffn)
    return new


def _lay_out(ffn: SparseFFNBase) -> None:
    down = getattr(ffn, ffn.projections[-1])
    if ffn.training or ffn.backend == "reference" or is_sharded(ffn) or ffn.why_called() is not None:
        return
    if down.weight.device.type != "meta":
        neuron_major_(down)


def _fired(model: nn.Module, counts: NeuronCounts, is_requested: Callable[[nn.Module], bool]) -> dict[str, Tensor]:
    """{name: its counts} for each FFN that is sparse or can be. Counts of another model are refused."""
    widths = {}
    for name, _, _, ffn in find_ffns(model):
        sparse = sparse_ffn_of(ffn)
        if sparse is not None:
            widths[name] = len(sparse.neuron_counts)
        elif classify(ffn, is_requested(ffn)).kind != LEFT_ALONE:
            widths[name] = getattr(ffn, projection_names(ffn)[0]).out_features
    if widths:
        counts.check(list(widths.values()))
    return dict(zip(widths, counts.fired, strict=False))


def _with_plans(model: nn.Module, rows: list[Row], fired: dict[str, Tensor], tokens: int) -> list[Row]:
    plans = {name: ffn.plan_from_counts(fired[name], tokens) for name, ffn in sparse_ffns(model) if name in fired}
    return [dataclasses.replace(row, plan=repr(plans[row.layer])) if row.layer in plans else row for row in rows]


# -- FP8 weights -------------------------------------------------------------------------------------------


def _keeps_fp8(model: nn.Module) -> bool:
    """False if compressed-tensors is to dequantise the model: its configuration then no longer mentions FP8."""
    is_configured = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    return is_configured or not any(hasattr(module, "quantization_scheme") for module in model.modules())


def _take_over_(block: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Replace other libraries' FP8 projections by ours; returns the replaced ones by name."""
    replaced = {}
    for name in names:
        linear = getattr(block, name)
        new = take_over(linear)
        if new is not None:
            replaced[name] = linear
            put = block.set_projection if isinstance(block, SparseFFNBase) else functools.partial(setattr, block)
            put(name, new)
    return replaced


# ---------------------------------------------------------------------------------------------------------
# desparsify_
# ---------------------------------------------------------------------------------------------------------


def desparsify_(model: nn.Module, *, restore_layout: bool = True) -> Report:
    """Undo ``sparsify_`` exactly. FFNs of the sparse model types run densely until the next ``sparsify_``.

    Parts that were put into a sparse layer move to its dense block.

    ``restore_layout=False`` keeps the layout of the weights, for a dense twin that shares them with a sparse model.
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
            rows.append(Row(name, f"SparseFFN ({', '.join(projection_names(ffn))})", was))
        elif dense is not None:
            _give_back(sparse, dense)
            setattr(parent, attribute, dense)
            rows.append(Row(name, was, type(dense).__name__))
        else:
            if sparse.backend != "reference":
                setattr(sparse, BACKEND_BEFORE, sparse.backend)
            sparse.backend = "reference"
            rows.append(Row(name, was, f"{was}, run densely"))
    return Report(tuple(rows))


def _give_back(sparse: SparseFFNBase, dense: nn.Module) -> None:
    """Move everything that was put into the sparse layer, or set on its linears, to its dense block."""
    for part in (*sparse._modules, *sparse._parameters):
        now = getattr(sparse, part)
        own: Any = getattr(dense, part, None)
        if class_name(type(own)) in LINEARS and type(now) is nn.Linear:  # a plain twin of it
            own.weight, own.bias = now.weight, now.bias
        else:
            setattr(dense, part, now)
    dense.train(sparse.training)
