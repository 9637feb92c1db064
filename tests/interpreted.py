"""What tests share that run kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def shorten_lists(set_attribute: Callable[[Any, str, int], None] = setattr) -> None:
    """Two long tokens, of up to 24 neurons, short chunks, neurons split from 7 tokens on: tiny shapes have
    heavy tokens, chunks and split neurons, too.

    The interpreter runs a program for each long token there could be: fewer are also faster.
    """
    from twell.kernels import heavy, hybrid, lists, tail_backward, transpose, up_down, weight_gradients  # needs triton

    for module in (lists, up_down, heavy, transpose, tail_backward, weight_gradients, hybrid):
        for name, value in (("N_LONG", 2), ("LONG", 24), ("CHUNK", 32), ("SPLIT", 6)):
            if hasattr(module, name):
                set_attribute(module, name, value)
