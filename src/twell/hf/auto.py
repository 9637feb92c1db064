"""``twell.auto()``: ReLU models are sparse as soon as ``from_pretrained`` or ``from_config`` returns them.

It wraps these two methods of ``PreTrainedModel``, only when the user asks, and reversibly, in every version of
transformers that twell supports. transformers' own patch mapping (``transformers.monkey_patching``) does not fit: it
replaces classes by name while a model is built on the meta device. There a block has no weights to check it by, to lay
out or to take over from FP8; nothing sets the buffers of a sparse FFN; OPT's decoder layer is no FFN; and a model that
fails to load leaves the classes replaced.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from twell.hf.sparsify import sparsify_

_METHODS = ("from_pretrained", "_from_config")  # AutoModel.from_config calls the second
_logger = logging.getLogger(__name__)


class _Depth(threading.local):
    calls = 0  # nested calls of wrapped methods in this thread: a model may build another in its constructor


class _Switch:
    is_on = False


_depth = _Depth()


def auto(on: bool = True) -> None:
    """From now on ``sparsify_`` every model that transformers loads, or makes from a configuration.

    Models without ReLU and models on the meta device stay as they are. The outcome is logged at level INFO;
    ``print(twell.sparsify_(model))`` shows it layer by layer. ``auto(False)`` stops it for later models;
    ``desparsify_`` undoes it for one model. Repeated calls change nothing.
    """
    _Switch.is_on = on
    for name in _METHODS:
        method: Any = vars(PreTrainedModel)[name]
        wrapped = getattr(method.__func__, "twell_wraps", None)
        if on and wrapped is None:
            setattr(PreTrainedModel, name, classmethod(_then_sparse(method)))
        elif not on and wrapped is not None:
            setattr(PreTrainedModel, name, wrapped)


def _then_sparse(method: Any) -> Callable[..., Any]:
    """A class method's function, followed by ``sparsify_`` of the model it returns."""

    @functools.wraps(method.__func__)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        _depth.calls += 1
        try:
            loaded = method.__func__(cls, *args, **kwargs)
        finally:
            _depth.calls -= 1
        if _Switch.is_on and not _depth.calls:  # off, yet called: another library wraps this function
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info
            _logger.info("%s: %s", type(model).__name__, sparsify_(model).summary())
        return loaded

    load.twell_wraps = method  # type: ignore[attr-defined]
    return load
