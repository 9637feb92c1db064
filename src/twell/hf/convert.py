"""Make the FFNs of an existing model sparse, in place and on instances only; and the way back.

``sparsify_``    FFNs that compute relu or relu2 run through ``twell``: same function, same weights, same state dict.
``desparsify_``  undoes it exactly.
``relufy_``      changes the function: the gate's activation becomes ReLU, and L1 is set up for further training.

``classify`` decides what becomes of an FFN, with the reason:

    sparse       it runs through ``twell``'s operation
    called       its projections do more than multiply by a weight (adapters, hooks, quantisation): ``twell``'s module
                 calls them one by one, as the dense block does, and runs sparsely once they are plain again
    left alone   nothing is changed
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from twell import reference
from twell.hf.configs import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.hf.counts import NeuronCounts, find_counts
from twell.hf.models import (
    GatedSparseMLP,
    LlamaSparseReluDecoderLayer,
    LlamaSparseReluForCausalLM,
    LlamaSparseReluModel,
    Qwen2SparseReluDecoderLayer,
    Qwen2SparseReluForCausalLM,
    Qwen2SparseReluModel,
)
from twell.hf.parallel import ParallelFFN, is_sharded, parallelize_, tensor_parallel_mesh
from twell.nn import (
    INLINE,
    GatedSparseFFN,
    SparseFFN,
    SparseFFNBase,
    activation_of,
    find_activation,
    neuron_major_,
    restore_layout_,
    sparse_ffns,
    why_called,
)
from twell.ops import Stats

_GATED = ("gate_proj", "up_proj", "down_proj")
_PLAIN = ("up_proj", "down_proj")
_INLINE = ("fc1", "fc2")  # OPT: the decoder layer itself holds and applies them
_INLINE_MARK = INLINE
SPARSE, CALLED, LEFT_ALONE = "sparse", "called", "left alone"
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
# sparse, called or left alone
# ---------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    kind: str
    why: str = ""


def classify(ffn: nn.Module) -> Verdict:
    """What ``sparsify_`` makes of an FFN, dense or sparse already, as far as its parts tell; nothing is run."""
    for kind, question in _QUESTIONS:
        reason = question(ffn)
        if reason is not None:
            return Verdict(kind, reason)
    return Verdict(SPARSE)


def _why_not_linear(ffn: nn.Module) -> str | None:
    """LoRA's and quantisers' linears need not be of the class, but tell their sizes as it does."""
    for name in _names(ffn):
        linear = getattr(ffn, name)
        if not all(isinstance(getattr(linear, size, None), int) for size in ("in_features", "out_features")):
            return f"{name} is {type(linear).__name__}, not a plain nn.Linear"
    return None


def _why_not_relu(ffn: nn.Module) -> str | None:
    if _sparse_of(ffn) is not None:
        return None
    try:
        activation_of(ffn)
    except ValueError:
        return f"{_activation_name(ffn)}: call relufy_ first"
    return None


def _why_activation_called(ffn: nn.Module) -> str | None:
    """A gated or plain block's activation is not kept; OPT's is (``_InlineActivation``)."""
    found = find_activation(ffn)
    if found is None or _names(ffn) is _INLINE:
        return None
    function = getattr(ffn, found[0])
    return f"{found[0]} has hooks" if isinstance(function, nn.Module) and _has_hooks(function) else None


def _why_not_inline(ffn: nn.Module) -> str | None:
    if _names(ffn) is not _INLINE or _sparse_of(ffn) is not None:
        return None
    if type(ffn).__name__ != "OPTDecoderLayer":
        return "of FFNs with fc1 and fc2 only OPT's is known"
    if is_sharded(ffn):
        return "OPT's FFN does not run on sharded weights"
    for name in _INLINE:  # they are to get a forward, which has to be the only one
        linear = getattr(ffn, name)
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            return why_called(linear, name)
    return None


def _why_reference(ffn: nn.Module) -> str | None:
    sparse = _sparse_of(ffn)
    chosen = sparse is not None and sparse.backend == "reference" and _BACKEND_BEFORE not in vars(sparse)
    return "backend='reference' was chosen for it" if chosen else None


def _why_called(ffn: nn.Module) -> str | None:
    sparse = _sparse_of(ffn)
    if is_sharded(ffn) and not isinstance(sparse, ParallelFFN):
        return None  # FSDP2's weights are plain during a call; parallel.py stands in for tensor parallel forwards
    if sparse is not None:
        return sparse.why_called()
    if _has_any_global_hook():
        return "there are global hooks on modules"
    reasons = (why_called(getattr(ffn, name), name) for name in _names(ffn))
    return next((reason for reason in reasons if reason is not None), None)


# In this order: the first that gives a reason decides.
_QUESTIONS: tuple[tuple[str, Callable[[nn.Module], str | None]], ...] = (
    (LEFT_ALONE, _why_not_linear),
    (LEFT_ALONE, _why_not_relu),
    (LEFT_ALONE, _why_activation_called),
    (LEFT_ALONE, _why_not_inline),
    (LEFT_ALONE, _why_reference),
    (CALLED, _why_called),
)


def _names(ffn: nn.Module) -> tuple[str, ...]:
    """Its projections."""
    return _INLINE if hasattr(ffn, "fc1") else _GATED if hasattr(ffn, "gate_proj") else _PLAIN


def _sparse_of(ffn: nn.Module) -> SparseFFNBase | None:
    """The sparse FFN that a block is, or has; None where it is dense."""
    found = ffn if isinstance(ffn, SparseFFNBase) else vars(ffn).get(INLINE)
    return found if isinstance(found, SparseFFNBase) else None


def _activation_name(ffn: nn.Module) -> str:
    found = find_activation(ffn)
    return "unknown activation" if found is None else found[1].removesuffix("Activation").lower()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # that act in a call
_MORE_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _share_hooks(module: nn.Module, new: nn.Module) -> None:
    """What ``module`` has of hooks, and what it or ``new`` gets or loses later, both have."""
    for name in (*_HOOKS, *_MORE_HOOKS):
        new.__dict__[name] = module.__dict__[name]


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Hooks are for real tokens."""
    hooks = [(m, name, m.__dict__[name]) for m in module.modules() for name in _HOOKS]
    for m, name, _ in hooks:
        m.__dict__[name] = OrderedDict()
    try:
        yield
    finally:
        for m, name, own in hooks:
            m.__dict__[name] = own


# ---------------------------------------------------------------------------------------------------------
# sparsify_ and desparsify_
# ---------------------------------------------------------------------------------------------------------

_BACKEND_BEFORE = "_backend_before_desparsify"


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
    rows = [_sparsify_one(*found) for found in list(_ffns(model))]
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
    for name, parent, attribute, ffn in list(_ffns(model)):
        sparse, was = _sparse_of(ffn), type(ffn).__name__
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
            if _BACKEND_BEFORE not in vars(sparse):
                setattr(sparse, _BACKEND_BEFORE, sparse.backend)
            sparse.backend = "reference"
            rows.append(Row(name, was, f"{was}, run densely"))
    return Report(tuple(rows))


def _ffns(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, attribute, FFN) of every module that has the projections of one."""
    for name, module in model.named_modules():
        if not name:
            continue
        has = {
            attribute for attribute in (*_GATED, *_INLINE) if isinstance(getattr(module, attribute, None), nn.Module)
        }
        if has.issuperset(_PLAIN) or has.issuperset(_INLINE):
            parent_name, _, attribute = name.rpartition(".")
            yield name, model.get_submodule(parent_name), attribute, module


def _sparsify_one(name: str, parent: nn.Module, attribute: str, ffn: nn.Module) -> Row:
    was, (kind, why) = type(ffn).__name__, classify(ffn)
    if kind == LEFT_ALONE:
        return Row(name, was, None, why, kind=kind)
    sparse = _sparse_of(ffn)
    if sparse is not None:
        if _BACKEND_BEFORE not in vars(sparse):
            return Row(name, was, None, why or _ALREADY, kind=kind)
        sparse.backend = getattr(sparse, _BACKEND_BEFORE)
        delattr(sparse, _BACKEND_BEFORE)
        return Row(name, was, f"{was}, run sparsely", why, kind=kind)
    sparse = _wrap(ffn)
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
    _share_hooks(ffn, sparse)
    object.__setattr__(sparse, "dense_block", ffn)  # not a submodule: the state dict stays as it is
    setattr(parent, attribute, sparse)
    return Row(name, was, f"{_class_of(ffn).__name__}, {sparse.activation}", why, kind=kind)


def _class_of(ffn: nn.Module) -> type[SparseFFNBase]:
    names = _names(ffn)
    return InlineFFN if names is _INLINE else GatedSparseFFN if names is _GATED else SparseFFN


def _wrap(ffn: nn.Module, cls: type[SparseFFNBase] | None = None, activation: str | None = None) -> Any:
    """The sparse FFN of a dense block, in nobody's place yet. As ``from_dense``, which takes no LoRA's linears."""
    new = (cls or _class_of(ffn)).__new__(cls or _class_of(ffn))
    new._build([getattr(ffn, name) for name in _names(ffn)], activation or activation_of(ffn), "auto", False)
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
        with _without_hooks(dense), torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
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


# ---------------------------------------------------------------------------------------------------------
# OPT
# ---------------------------------------------------------------------------------------------------------


class InlineFFN(SparseFFN):
    """The FFN of a decoder layer that calls fc1, activation_fn and fc2 itself.

    The layer has it as an attribute, not as a submodule, so its state dict stays. fc1 then computes the whole FFN, and
    the two after it pass its result on. Each of the three asks ``why_called`` first, and does as it did before where
    there is a reason, so that an adapter or a hook on any of them acts as in the dense model.
    """

    layer: Any
    steps: tuple[Any, Any, Any]  # what stands in for the forwards of fc1 and fc2, and for the activation

    def belong_to(self, layer: Any) -> None:
        object.__setattr__(self, "layer", layer)  # not a submodule: it is the layer that has the FFN
        self.steps = _FirstStep(self), _LastStep(self), _InlineActivation(self, layer.activation_fn)

    def put_in(self) -> None:
        for linear, step in zip((self.up_proj, self.down_proj), self.steps, strict=False):
            vars(linear)["forward"] = step
        self._set_activation(self.steps[2])
        self.layer.__dict__[INLINE] = self

    def take_out(self) -> None:
        """A step that something else holds, such as a wrapper of fc1's forward, does as it did before from now on."""
        del self.layer.__dict__[INLINE]
        for linear, step in zip((self.up_proj, self.down_proj), self.steps, strict=False):
            if vars(linear).get("forward") is step:
                del linear.forward
        if self.layer.activation_fn is self.steps[2]:
            self._set_activation(self.steps[2].before)

    def _set_activation(self, function: Any) -> None:
        if not isinstance(function, nn.Module):
            del self.layer.activation_fn  # else a module could not make room for a function
        self.layer.activation_fn = function

    def why_called(self) -> str | None:
        modules = self.layer._modules
        if self.layer.__dict__.get(INLINE) is not self:
            return "it is not in its layer"
        if _has_any_global_hook():
            return "there are global hooks on modules"
        first, last, activation = self.steps
        for name, held, step in (("fc1", self._modules["up_proj"], first), ("fc2", self._modules["down_proj"], last)):
            linear = modules[name]
            if linear is not held and type(linear) is nn.Linear:
                return f"{name} is another linear"
            reason = why_called(linear, name, step)
            if reason is not None:
                return reason
        if modules.get("activation_fn") is not activation:
            return "activation_fn is another one"
        return "activation_fn has hooks" if _has_hooks(activation) else None


class _FirstStep:
    """fc1's forward: the whole FFN. An object, so that deep copies refer to each other."""

    def __init__(self, ffn: InlineFFN) -> None:
        self.ffn = ffn

    def __call__(self, x: Tensor) -> Tensor:
        if self.ffn.why_called() is None:
            return self.ffn(x)
        linear = self.ffn.up_proj
        return type(linear).forward(linear, x)


class _LastStep:
    """fc2's forward: passes y on."""

    def __init__(self, ffn: InlineFFN) -> None:
        self.ffn = ffn

    def __call__(self, h: Tensor) -> Tensor:
        if self.ffn.why_called() is None:
            return h
        linear = self.ffn.down_proj
        return type(linear).forward(linear, h)


class _InlineActivation(nn.Module):
    """The layer's activation: passes y on. What moves the layer, or sets its mode, reaches the FFN through it."""

    def __init__(self, ffn: InlineFFN, before: Any) -> None:
        super().__init__()
        object.__setattr__(self, "ffn", ffn)
        object.__setattr__(self, "before", before)
        if isinstance(before, nn.Module):
            _share_hooks(before, self)

    def forward(self, z: Tensor) -> Tensor:
        ffn: InlineFFN = self.__dict__["ffn"]
        if ffn.why_called() is None:
            return z
        before = self.__dict__["before"]
        h = before.forward(z) if isinstance(before, nn.Module) else before(z)  # hooks are shared: not twice
        if ffn.track_counts:
            l1_sum, counts = reference.statistics(torch.relu(z).flatten(0, -2), h.flatten(0, -2), None)
            ffn.commit(Stats(l1_sum, counts, counts.new_full((), z[..., 0].numel(), dtype=torch.int64)))
        return h

    def train(self, mode: bool = True) -> _InlineActivation:
        self.__dict__["ffn"].train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _InlineActivation:
        self.__dict__["ffn"]._apply(fn, recurse=False)  # its counts; the layer has its weights
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"of a SparseFFN, {self.__dict__['ffn'].extra_repr()}"


# ---------------------------------------------------------------------------------------------------------
# relufy_
# ---------------------------------------------------------------------------------------------------------

_SPARSE_TYPES: dict[type, tuple[type, type, type, Any]] = {
    LlamaForCausalLM: (
        LlamaSparseReluForCausalLM,
        LlamaSparseReluModel,
        LlamaSparseReluDecoderLayer,
        LlamaSparseReluConfig,
    ),
    Qwen2ForCausalLM: (
        Qwen2SparseReluForCausalLM,
        Qwen2SparseReluModel,
        Qwen2SparseReluDecoderLayer,
        Qwen2SparseReluConfig,
    ),
}


def relufy_(model: PreTrainedModel, l1: float = 2e-5) -> Report:
    """Make ReLU the activation of every FFN, in place: the model computes something else and needs training.

    A Llama or Qwen2 causal LM becomes its ``*_sparse_relu`` type with ``sparsity_l1_coeff = l1``: save and load keep
    both, and any Trainer sees the L1 term in the loss. Other models get ReLU, in their configuration too; their
    forward knows no L1, and the report says so.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"relufy_: expected a transformers model, got {type(model).__name__}")
    if not l1 >= 0:
        raise ValueError(f"relufy_: l1 must not be negative, got {l1}")
    if type(model) in _SPARSE_TYPES:
        return _become_sparse_type(model, l1)
    rows = []
    for name, _, _, ffn in list(_ffns(model)):
        was = "relu" if _sparse_of(ffn) is not None else _activation_name(ffn)
        found = find_activation(ffn)
        if was == "relu":
            rows.append(Row(name, was, None, "is ReLU already"))
        elif found is None:
            rows.append(Row(name, was, None, "does not tell its activation"))
        else:
            setattr(ffn, found[0], nn.ReLU())
            rows.append(Row(name, was, "relu, without L1 in the model's own loss"))
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        if hasattr(model.config, field):
            setattr(model.config, field, "relu")
    return Report(tuple(rows))


def _become_sparse_type(model: Any, l1: float) -> Report:
    causal_lm, base, decoder_layer, config_class = _SPARSE_TYPES[type(model)]
    ffns = [_wrap(layer.mlp, GatedSparseMLP, "relu") for layer in model.model.layers]
    meshes = [tensor_parallel_mesh(ffn) for ffn in ffns]
    if (model.tp_size or 1) > 1 and None in meshes:
        raise ValueError("relufy_: tensor parallel FFNs must be sharded by neurons, as transformers 5.16 does")
    fields = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    config = config_class.from_dict({**fields, "sparsity_l1_coeff": l1})
    config._attn_implementation = model.config._attn_implementation
    if hasattr(model.config, "distributed_config"):
        config.distributed_config = model.config.distributed_config
    rows = []
    for i, (layer, ffn, mesh) in enumerate(zip(model.model.layers, ffns, meshes, strict=True)):
        was = _activation_name(layer.mlp)
        _share_hooks(layer.mlp, ffn)
        layer.mlp = ffn
        if mesh is not None:
            parallelize_(ffn, mesh)
        layer.__class__ = decoder_layer
        kind, why = classify(ffn)
        rows.append(Row(f"model.layers.{i}.mlp", was, f"relu, l1 {l1:g}", why, kind=kind))
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(model.config)):
            module.config = config
    model.model.__class__, model.__class__ = base, causal_lm
    for module in (model, model.model):  # instances carry the base class's, which names a layer class that is gone
        module._no_split_modules = list(type(module)._no_split_modules)
    model.add_l1_scale()
    return Report(tuple(rows))
