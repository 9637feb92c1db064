"""What tests share that run kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def speed_up_triton() -> None:
    """Patches that make the interpreter about twice as fast and change no result. None where kernels are compiled: the
    compiler's types, which share these classes, also have layouts.

    Triton 3.6 and 3.7: before every call of a device function it looks through Triton's language for what to replace,
    for 1.5 ms, though it was replaced when the kernel started; it computes checks for integer overflow that are dropped
    unless a kernel is debugged; and it works out types and shapes anew for every operation."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    replace, languages = interpreter._patch_lang, {}
    if replace.__name__ == "replace_once" or not triton.knobs.runtime.interpret:
        return

    def replace_once(function: Any) -> Any:
        if function not in languages:
            languages[function] = [m for m in (tl, tl.core) if any(v is m for v in function.__globals__.values())]
        if any(tl.core.is_builtin(m.load) for m in languages[function]):
            return replace(function)
        return interpreter._LangPatchScope()

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if "twell_shape" not in type.__dict__:
            init(self, handle, type)
            type.twell_shape = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.twell_shape

    def numpy_dtype(type: Any) -> Any:
        if "twell_dtype" not in type.__dict__:
            type.twell_dtype = dtype_of(type)
        return type.twell_dtype

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(s.value if type(s) is tl.constexpr else s for s in shape)
        if key not in block_types:
            init_block(self, element_ty, shape)
            block_types[key] = self.__dict__
        self.__dict__ = block_types[key]  # types do not change

    block_types: dict[Any, dict[str, Any]] = {}
    init, init_block, dtype_of = tl.tensor.__init__, tl.core.block_type.__init__, interpreter._get_np_dtype
    tl.tensor.__init__, tl.core.block_type.__init__ = init_tensor, init_block_type
    interpreter._get_np_dtype = numpy_dtype
    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def gather_in_torch(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """The kernel has a program a row, which the interpreter takes a second for; test_kernels.py tests it."""
    from twell.gpu.shared import layout
    from twell.gpu.training import split_training

    set_attribute(layout, "gathered", gathered)
    set_attribute(split_training, "gathered", gathered)


def gathered(
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    order: Tensor,
    n_hot: int,
    *,
    hot: bool = True,
    cold: bool = True,
    space: Any = None,
) -> Tensor:
    """As gpu/shared/rows.py's, which goes by down's address."""
    down = down if down.is_contiguous() else down.t()
    first, others = order[:n_hot].long(), order[n_hot:].long()
    both = gate[first] if up is None else torch.stack([gate[first], up[first]], 1).flatten(0, 1)
    rows = torch.cat([*([both, down[first]] if hot else []), gate[others if cold else others[:0]]])
    return rows if space is None else space.take(*rows.shape).copy_(rows)


def shorten_lists(set_attribute: Callable[[Any, str, Any], None] = setattr, *, long: int = 24) -> None:
    """Two long tokens, of up to 24 neurons, short chunks, neurons split from 7 tokens on: tiny shapes have
    heavy tokens, chunks and split neurons, too. And tiles of TwELL with room for half of their neurons, since
    so many fire there: else every token would be heavy.

    The interpreter runs a program for each long token there could be: fewer are also faster.
    """
    import triton.language as tl

    from twell import saved
    from twell.gpu.prefill import heavy_fp8
    from twell.gpu.shared import gate, heavy, lists, tail, words
    from twell.gpu.training import columns, split_training, tail_backward, weight_gradients
    from twell.workbench.bench import parts

    def rooms(M: Any) -> tuple[Any, Any]:
        return M * 0 + 2, M // 8

    values = {"LONG": long, "CHUNK": 32, "SPLIT": 6, "n_long": lambda tokens: 2, "rooms": rooms, "SLOTS": 80}
    set_attribute(words, "_SLOTS", tl.constexpr(80))
    set_attribute(heavy, "FEW", 16)
    kernels = gate, lists, tail, heavy, heavy_fp8, columns, tail_backward, weight_gradients
    for module in (saved, *kernels, split_training, parts):
        for name, value in values.items():
            # In weight_gradients.py LONG declares a number of 64 bits.
            if hasattr(module, name) and (module, name) != (weight_gradients, "LONG"):
                set_attribute(module, name, value)
        for name in ("_kernel", "_kernels", "_pairs"):  # those that are kept have the old lengths
            if hasattr(module, name):
                set_attribute(module, name, functools.cache(getattr(module, name).__wrapped__))
