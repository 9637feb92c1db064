"""Find the FFNs of a model and decide what ``sparsify_`` makes of each.

``classify`` gives one of three verdicts, with a reason:

    sparse       it runs through ``twell``'s operation
    called       its projections do more than multiply by a weight (adapters, hooks, quantisation): ``twell``'s module
                 calls them one by one, as the dense block does, and runs sparsely once they are plain again
    left alone   nothing changes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from twell.hf.hooks import has_hooks
from twell.hf.known import GATED_NAMES, KNOWN, LINEARS, NAMES, REFUSED, class_name
from twell.nn import INLINE, SparseFFNBase, activation_of, find_activation, why_called
from twell.nn.parallel import is_sharded

SPARSE, CALLED, LEFT_ALONE = "sparse", "called", "left alone"
BACKEND_BEFORE = "_backend_before_desparsify"  # attribute of an own layer that ``desparsify_`` has made dense
_RELU2_CLASS = "transformers.activations.ReLUSquaredActivation"


def find_ffns(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, attribute, FFN) of every module that has an FFN's projections or is of a refused class."""
    for name, module in model.named_modules():
        is_found = isinstance(module, SparseFFNBase) or is_known(module) or bool(_held_names(module))
        if name and (is_found or class_name(type(module)) in REFUSED):
            parent_name, _, attribute = name.rpartition(".")
            yield name, model.get_submodule(parent_name), attribute, module


def _held_names(module: nn.Module) -> tuple[str, ...]:
    """The first names in the table of known classes that are all submodules of ``module``."""
    held = module._modules
    return next((names for names in NAMES if all(isinstance(held.get(name), nn.Module) for name in names)), ())


def projection_names(ffn: nn.Module) -> tuple[str, ...]:
    """The names of its projections; the one before the activation comes first."""
    if isinstance(ffn, SparseFFNBase):
        return ffn.projections
    return KNOWN[class_name(type(ffn))].projections if is_known(ffn) else _held_names(ffn)


def is_known(ffn: nn.Module) -> bool:
    """Whether its class, not a base class, is in the table."""
    return class_name(type(ffn)) in KNOWN


def is_inline(ffn: nn.Module) -> bool:
    return is_known(ffn) and KNOWN[class_name(type(ffn))].is_inline


def as_plain(linear: nn.Module) -> nn.Module:
    """For a linear of a known class: an ``nn.Linear`` with the same parameters. Others are returned as they are."""
    if class_name(type(linear)) not in LINEARS or has_hooks(linear) or "forward" in vars(linear):
        return linear
    own: Any = linear
    new = nn.Linear(own.in_features, own.out_features, bias=own.bias is not None, device="meta")
    new.weight, new.bias = own.weight, own.bias
    return new.train(own.training)


def sparse_ffn_of(ffn: nn.Module) -> SparseFFNBase | None:
    """The sparse FFN that a block is or holds; None if it is dense."""
    found = ffn if isinstance(ffn, SparseFFNBase) else vars(ffn).get(INLINE)
    return found if isinstance(found, SparseFFNBase) else None


def activation_name(ffn: nn.Module) -> str:
    found = find_activation(ffn)
    return "unknown activation" if found is None else found[1].removesuffix("Activation").lower()


# ---------------------------------------------------------------------------------------------------------
# the verdict
# ---------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    kind: str
    why: str = ""


def classify(ffn: nn.Module, is_requested: bool = False) -> Verdict:
    """What ``sparsify_`` makes of a dense or sparse FFN, judged by its parts; nothing is run.

    ``is_requested``: the user vouches for its class."""
    if class_name(type(ffn)) in REFUSED:
        return Verdict(LEFT_ALONE, REFUSED[class_name(type(ffn))])
    if sparse_ffn_of(ffn) is None and not is_known(ffn) and not is_requested:
        return Verdict(LEFT_ALONE, _why_unknown(ffn))
    for kind, question in _QUESTIONS if sparse_ffn_of(ffn) is not None else (*_DENSE_QUESTIONS, *_QUESTIONS):
        reason = question(ffn)
        if reason is not None:
            return Verdict(kind, reason)
    return Verdict(SPARSE)


def _why_unknown(ffn: nn.Module) -> str:
    name, names = class_name(type(ffn)), projection_names(ffn)
    formula = "down(act(gate(x)) * up(x))" if names == GATED_NAMES else f"{names[1]}(act({names[0]}(x)))"
    return f"{name} is no known class; pass also={name!r} if it computes {formula} and nothing else"


def _why_not_linear(ffn: nn.Module) -> str | None:
    """Linears of LoRA and quantisers may be of any class, but have the sizes of an nn.Linear."""
    for name in projection_names(ffn):
        linear = getattr(ffn, name, None)
        if not all(isinstance(getattr(linear, size, None), int) for size in ("in_features", "out_features")):
            return f"{name} is {type(linear).__name__}, not a plain nn.Linear"
    return None


def _why_not_relu(ffn: nn.Module) -> str | None:
    try:
        activation_of(ffn)
    except ValueError:
        return f"{activation_name(ffn)}: call relufy_ first"
    attribute = (find_activation(ffn) or ("", ""))[0]
    function = getattr(ffn, attribute)
    kind = class_name(type(function))
    if isinstance(function, nn.Module) and type(function) is not nn.ReLU and kind != _RELU2_CLASS:
        return f"{attribute} is {kind}, not torch.nn.ReLU"  # a class of the same name may compute something else
    return f"{attribute} has a forward of its own" if "forward" in getattr(function, "__dict__", {}) else None


def _why_more_parts(ffn: nn.Module) -> str | None:
    """A sparse FFN has no place for more parts, and would lose what they add, now or once they are trained."""
    if is_inline(ffn):
        return None  # the block stays as it is
    activation = KNOWN[class_name(type(ffn))].activation if is_known(ffn) else (find_activation(ffn) or ("", ""))[0]
    known = {*projection_names(ffn), activation}
    held = (*ffn._modules.items(), *ffn._parameters.items(), *ffn._buffers.items())
    parts = [name for name, part in held if part is not None and name not in known]
    return f"it has more parts than an FFN: {', '.join(parts)}" if parts else None


def _why_own_forward(ffn: nn.Module) -> str | None:
    """A forward set on the instance may compute anything, or move tensors between devices, as accelerate's does."""
    return "it has a forward of its own" if "forward" in vars(ffn) else None


def _why_activation_called(ffn: nn.Module) -> str | None:
    """A sparse FFN drops the block's activation, and with it its hooks; inline FFNs keep it."""
    found = find_activation(ffn)
    if found is None or is_inline(ffn):
        return None
    function = getattr(ffn, found[0])
    return f"{found[0]} has hooks" if isinstance(function, nn.Module) and has_hooks(function) else None


def _why_not_inline(ffn: nn.Module) -> str | None:
    if not is_inline(ffn):
        return None
    if is_sharded(ffn):
        return f"{type(ffn).__name__} does not run on sharded weights"
    if getattr(ffn, "slow_but_exact", False) and getattr(ffn, "pretraining_tp", 1) > 1:  # Bloom
        return "slow_but_exact reads the weight of its down projection in parts"
    for name in projection_names(ffn):  # they get a forward of ours, so they must not have another
        linear = getattr(ffn, name)
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            return why_called(linear, name)
    return None


def _why_reference(ffn: nn.Module) -> str | None:
    """The user, and not ``desparsify_``, has chosen the reference."""
    sparse = sparse_ffn_of(ffn)
    chosen = sparse is not None and sparse.backend == "reference" and BACKEND_BEFORE not in vars(sparse)
    return "backend='reference' was chosen for it" if chosen else None


def _why_projections_called(ffn: nn.Module) -> str | None:
    sparse = sparse_ffn_of(ffn)
    share = None if sparse is None else sparse.share()
    if is_sharded(ffn) and (share is None or not share.is_whole):
        return None  # FSDP2's weights are plain during a call; parallel.py replaces tensor parallel forwards
    if sparse is not None:
        return sparse.why_called()
    if _has_any_global_hook():
        return "there are global hooks on modules"
    reasons = (why_called(as_plain(getattr(ffn, name)), name) for name in projection_names(ffn))
    return next((reason for reason in reasons if reason is not None), None)


# The first question that gives a reason decides. Dense blocks are asked all of them.
_DENSE_QUESTIONS: tuple[tuple[str, Callable[[nn.Module], str | None]], ...] = tuple(
    (LEFT_ALONE, question)
    for question in (
        _why_not_linear,
        _why_not_relu,
        _why_activation_called,
        _why_more_parts,
        _why_own_forward,
        _why_not_inline,
    )
)
_QUESTIONS: tuple[tuple[str, Callable[[nn.Module], str | None]], ...] = (
    (LEFT_ALONE, _why_reference),
    (CALLED, _why_projections_called),
)
