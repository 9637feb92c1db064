"""Find the hooks of a module, share them with another module, or disable them for a while."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # run in a call
_OTHER_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _CALL_HOOKS)


def share_hooks(module: nn.Module, new: nn.Module) -> None:
    """Let both modules have the same hooks, now and after later changes to either."""
    for name in (*_CALL_HOOKS, *_OTHER_HOOKS):
        new.__dict__[name] = module.__dict__[name]


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Within this context ``module`` runs without its hooks, which are for real tokens."""
    hooks = [(m, name, m.__dict__[name]) for m in module.modules() for name in _CALL_HOOKS]
    for m, name, _ in hooks:
        m.__dict__[name] = OrderedDict()
    try:
        yield
    finally:
        for m, name, own in hooks:
            m.__dict__[name] = own
