"""``twell.auto()``: ReLU models come out sparse of ``from_pretrained`` and ``from_config``.

It wraps these two methods of ``PreTrainedModel``, at the user's request and reversibly, in every version of
transformers that twell supports. The patch mapping of transformers itself (``transformers.monkey_patching``) does not
fit: it replaces classes by name while a model is built on the meta device. There are no weights yet to check a block
by, to lay out or to take over from FP8; nothing would set the buffers of a sparse FFN; OPT's decoder layer is no FFN;
and a model that fails to load leaves the classes replaced.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from twell.hf.sparsify import sparsify_

_METHODS = ("from_pretrained", "_from_config")  # the second is what AutoModel.from_config calls
_logger = logging.getLogger(__name__)


class _Depth(threading.local):
    calls = 0  # of wrapped methods in this thread: a model may build another in its constructor


class _Switch:
    is_on = False


_depth = _Depth()


def auto(on: bool = True) -> None:
    """From now on ``sparsify_`` every model that transformers loads, or makes from a configuration.

    Models that are not ReLU stay as they are, and so do those on the meta device. What became of each model is logged
    at level INFO; ``print(twell.sparsify_(model))`` tells it again, layer by layer. ``auto(False)`` ends it for models
    to come; ``desparsify_`` undoes it for a model. Calling it again changes nothing.
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
    """The function of a class method, followed by ``sparsify_`` of the model that it gives."""

    @functools.wraps(method.__func__)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        _depth.calls += 1
        try:
            loaded = method.__func__(cls, *args, **kwargs)
        finally:
            _depth.calls -= 1
        if _Switch.is_on and not _depth.calls:  # another library may have wrapped this, so that it could not be removed
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
            _logger.info("%s: %s", type(model).__name__, sparsify_(model).summary())
        return loaded

    load.twell_wraps = method  # type: ignore[attr-defined]
    return load
