"""Make the FFNs of an existing model sparse, in place and on instances only; and the way back.

``sparsify_``    FFNs that compute relu or relu2 run through ``twell``: same function, same weights, same state dict.
``desparsify_``  undoes it exactly.
``relufy_``      changes the function: the gate's activation becomes ReLU, and L1 is set up for further training.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from twell import ops
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
from twell.hf.parallel import is_sharded, parallelize_, tensor_parallel_mesh
from twell.nn import GatedSparseFFN, SparseFFN, SparseFFNBase, activation_of, find_activation

_GATED = ("gate_proj", "up_proj", "down_proj")
_ALREADY = "already sparse"
_PLAIN = ("up_proj", "down_proj")
_INLINE = ("fc1", "fc2")  # OPT: the decoder layer itself holds and applies them
_INLINE_MARK = "_activation_before_twell"
_CHECKED_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """What happened to one FFN. ``became`` is None where it was skipped; ``why`` says why."""

    layer: str
    was: str
    became: str | None
    why: str = ""
    plan: str = ""


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
        return sum(row.became is not None or row.why == _ALREADY for row in self.rows)

    def summary(self) -> str:
        """In a few words."""
        n_sparse = self.n_sparse
        if n_sparse == len(self.rows) > 0:
            return f"all {n_sparse} feed-forward layers can run sparsely"
        reasons = Counter(row.why for row in self.skipped if row.why != _ALREADY)
        why = "; ".join(f"{n} dense: {reason}" for reason, n in reasons.items()) or "no feed-forward layers were found"
        if n_sparse == 0:
            return f"nothing is sparse: {why}"
        return f"{n_sparse} of {len(self.rows)} feed-forward layers can run sparsely; {why}"

    def __str__(self) -> str:
        if not self.rows:
            return "no feed-forward layers found"
        cells = [("layer", "was", "became")]
        for row in self.rows:
            became = row.became or f"skipped: {row.why}"
            cells.append((row.layer, row.was, f"{became}; {row.plan}" if row.plan else became))
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

    ``counts`` make the plans of the layers; by default those that ``twell calibrate`` left beside the model.
    """
    rows = [_sparsify_one(*found) for found in list(_ffns(model))]
    if counts is None:
        counts = find_counts(getattr(getattr(model, "config", None), "_name_or_path", None))
    return Report(tuple(rows if counts is None else _with_plans(model, rows, counts)))


def _with_plans(model: nn.Module, rows: list[Row], counts: NeuronCounts) -> list[Row]:
    ffns = {name: m for name, m in model.named_modules() if isinstance(m, SparseFFNBase)}
    if not ffns:  # OPT's run inside its decoder layers, without a plan
        return rows
    widths, counted = [len(f.neuron_counts) for f in ffns.values()], [len(c) for c in counts.fired]
    if widths != counted:
        raise ValueError(f"the counts are of {len(counted)} FFNs {counted}, the model has {len(widths)} {widths}")
    fired = dict(zip(ffns, counts.fired, strict=True))
    plans = {name: ffn.plan_from_counts(fired[name], counts.tokens) for name, ffn in ffns.items()}
    return [dataclasses.replace(row, plan=repr(plans[row.layer])) if row.layer in plans else row for row in rows]


def desparsify_(model: nn.Module) -> Report:
    """Undo ``sparsify_`` exactly; the FFNs of sparse model types run densely until the next ``sparsify_``."""
    rows = []
    for name, parent, attribute, ffn in list(_ffns(model)):
        dense = getattr(ffn, "dense_block", None)
        if dense is not None:
            dense.train(ffn.training)
            setattr(parent, attribute, dense)
            rows.append(Row(name, type(ffn).__name__, type(dense).__name__))
        elif isinstance(ffn, SparseFFNBase):
            ffn.backend = "reference"
            rows.append(Row(name, type(ffn).__name__, f"{type(ffn).__name__}, run densely"))
        elif _INLINE_MARK in vars(ffn):
            _undo_inline(ffn)
            rows.append(Row(name, "SparseFFN (fc1, fc2)", type(ffn).__name__))
        else:
            rows.append(Row(name, type(ffn).__name__, None, "is dense"))
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
    was = type(ffn).__name__
    if isinstance(ffn, SparseFFNBase) or _INLINE_MARK in vars(ffn):
        if isinstance(ffn, SparseFFNBase) and ffn.backend == "reference":
            ffn.backend = "auto"
            return Row(name, was, f"{was}, run sparsely")
        return Row(name, was, None, _ALREADY)
    names = _INLINE if hasattr(ffn, "fc1") else _GATED if hasattr(ffn, "gate_proj") else _PLAIN
    for projection in names:
        linear = getattr(ffn, projection)
        if type(linear) is not nn.Linear:
            return Row(name, was, None, f"{projection} is {type(linear).__name__}, not a plain nn.Linear")
    try:
        activation = activation_of(ffn)
    except ValueError:
        return Row(name, was, None, f"{_activation_name(ffn)}: call relufy_ first")
    if names is _INLINE and was != "OPTDecoderLayer":
        return Row(name, was, None, "of FFNs with fc1 and fc2 only OPT's is known")
    if names is _INLINE and is_sharded(ffn):
        return Row(name, was, None, "OPT's FFN does not run on sharded weights")
    if names is _INLINE:
        _sparsify_inline(ffn, activation)
        return Row(name, was, f"SparseFFN (fc1, fc2), {activation}")
    cls = GatedSparseFFN if names is _GATED else SparseFFN
    sparse = cls.from_dense(ffn, activation=activation)
    if is_sharded(ffn):
        mesh = tensor_parallel_mesh(sparse)
        if mesh is None:
            return Row(name, was, None, "its weights are sharded, but not by neurons (colwise, rowwise)")
        parallelize_(sparse, mesh)
    if not _computes_the_same(ffn, sparse):
        return Row(name, was, None, f"its forward is not that of a {'gated' if cls is GatedSparseFFN else 'plain'} FFN")
    object.__setattr__(sparse, "dense_block", ffn)  # not a submodule: the state dict stays as it is
    setattr(parent, attribute, sparse)
    return Row(name, was, f"{cls.__name__}, {activation}")


@torch.no_grad()
def _computes_the_same(dense: nn.Module, sparse: SparseFFNBase) -> bool:
    weight = getattr(sparse, sparse.projections[0]).weight
    if weight.device.type == "meta":
        return True  # nothing to compare yet
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _CHECKED_TOKENS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    was_training = dense.training
    dense.eval()
    try:
        expected = dense(x)
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        dense.train(was_training)
    if not isinstance(expected, Tensor) or expected.shape != x.shape:
        return False
    got = sparse(x).double()
    tolerance = 0.05 if weight.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((got - expected.double()).norm() <= tolerance * expected.double().norm())


class _WholeFFN:
    """Stands in for fc1's forward and computes the whole FFN. An object, so that deep copies refer to each other."""

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear, activation: str) -> None:
        self.fc1, self.fc2, self.activation = fc1, fc2, activation

    def __call__(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        return ops.ffn(x, fc1.weight, fc2.weight, fc1.bias, fc2.bias, activation=self.activation)


def _pass_on(x: Tensor) -> Tensor:
    return x


def _sparsify_inline(layer: Any, activation: str) -> None:
    """fc1 computes the whole FFN, and what follows it passes its result on. Instances only."""
    object.__setattr__(layer, _INLINE_MARK, layer.activation_fn)  # not a submodule
    layer.activation_fn = nn.Identity()
    layer.fc1.forward = _WholeFFN(layer.fc1, layer.fc2, activation)
    layer.fc2.forward = _pass_on


def _undo_inline(layer: Any) -> None:
    layer.activation_fn = getattr(layer, _INLINE_MARK)
    delattr(layer, _INLINE_MARK)
    del layer.fc1.forward, layer.fc2.forward


def _activation_name(ffn: nn.Module) -> str:
    found = find_activation(ffn)
    return "unknown activation" if found is None else found[1].removesuffix("Activation").lower()


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
        was = _activation_name(ffn)
        found = find_activation(ffn)
        if isinstance(ffn, SparseFFNBase) or was == "relu":
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
    ffns = [GatedSparseMLP.from_dense(layer.mlp, activation="relu") for layer in model.model.layers]
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
        layer.mlp = ffn
        if mesh is not None:
            parallelize_(ffn, mesh)
        layer.__class__ = decoder_layer
        rows.append(Row(f"model.layers.{i}.mlp", was, f"relu, l1 {l1:g}"))
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(model.config)):
            module.config = config
    model.model.__class__, model.__class__ = base, causal_lm
    for module in (model, model.model):  # instances carry the base class's, which names a layer class that is gone
        module._no_split_modules = list(type(module)._no_split_modules)
    model.add_l1_scale()
    return Report(tuple(rows))
