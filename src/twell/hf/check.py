"""Check that a dense block and its sparse twin compute the same, on random tokens in both modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twell import cpu
from twell.fp8 import emulated
from twell.hf.hooks import without_hooks
from twell.nn import SparseFFNBase
from twell.ops import DTYPES

# Tokens of a trained model have channels far above 1. Only such tokens show a clamp.
_SCALES = (1.0, 30.0, 1000.0)
_SCALES_FP16 = (1.0, 4.0, 16.0)  # with larger ones h leaves the range of fp16
_TOKENS_A_SCALE = 4
_MAX_TOKENS = 8192
_SEED = 0


@torch.no_grad()
def why_not_the_same(dense: nn.Module, sparse: SparseFFNBase, *, must_tell: bool) -> str | None:
    """Why ``dense`` does not compute what ``sparse`` does; None if it does. The layer makes no plan for these tokens.

    ``must_tell``: results that are all 0 or not finite, which prove nothing, are a reason, too.
    """
    x = _tokens(sparse)
    not_the_same = f"its forward is not that of a {'gated' if len(sparse.projections) == 3 else 'plain'} FFN"
    modes = [(module, module.training) for module in (*dense.modules(), sparse)]
    sparse._plans_itself = False
    try:
        with (
            without_hooks(dense),
            emulated(sparse),
            torch.random.fork_rng([x.device] if x.device.type == "cuda" else []),
        ):
            expected = [_run(dense, x, mode) for mode in (False, True)]
            got = [_run(sparse, x, mode) for mode in (False, True)]
    except Exception as error:  # blocks and quantised weights may raise anything; the model stays as it was
        lines = str(error).strip().splitlines()
        return f"it cannot be run to check it: {type(error).__name__}{': ' + lines[0] if lines else ''}"
    finally:
        sparse._plans_itself = True
        for module, mode in modes:
            module.training = mode
    if not all(isinstance(y, Tensor) and y.shape == x.shape for y in expected):
        return not_the_same
    if sparse.why_called() is None and not _is_alike(*expected):
        return "it computes something else in training mode than in evaluation mode"
    tolerance = 0.05 if x.dtype in (torch.bfloat16, torch.float16) else 1e-3
    told = False
    for y_dense, y_sparse in zip(expected, got, strict=True):
        a, b = y_dense[0].double(), y_sparse[0].double()
        compared = a.isfinite().all(1)  # the largest tokens may overflow
        told = told or bool((a[compared] != 0).any())
        if bool(((a - b).norm(dim=1) > tolerance * a.norm(dim=1))[compared].any()):
            return not_the_same
    if must_tell and not told:
        return "its results are all 0 or not finite, which does not tell what it computes"
    return None


def _is_alike(evaluated: Tensor, trained: Tensor) -> bool:
    """Compares elements: the norm of a token hides a rare dropout."""
    a, b = evaluated[0].double(), trained[0].double()
    compared = a.isfinite().all(1)
    limit = 0.05 * a.square().mean(1, keepdim=True).sqrt() + 0.01 * a.abs()
    return bool(((a - b).abs() <= limit)[compared].all())


def _run(module: nn.Module, x: Tensor, mode: bool) -> Any:
    """Each time with the same random numbers: adapters with dropout are allowed."""
    torch.manual_seed(_SEED)
    return module.train(mode)(x)


def _tokens(sparse: SparseFFNBase) -> Tensor:
    """[1, M, D], with M large enough for the CPU's sparse code (small layers compute fewer tokens densely)."""
    linear: Any = getattr(sparse, sparse.projections[0])
    weight, D = linear.weight, linear.in_features
    dtype = weight.dtype if weight.dtype in DTYPES else torch.get_default_dtype()
    # On the CPU, whatever the default device: a model may be loaded under ``with torch.device(...)``.
    scales = torch.tensor(_SCALES_FP16 if dtype == torch.float16 else _SCALES, device="cpu")
    n_tokens = min(max(cpu.fewest_tokens(D, linear.out_features), len(scales) * _TOKENS_A_SCALE), _MAX_TOKENS)
    generator = torch.Generator("cpu").manual_seed(_SEED)
    x = torch.randn(1, n_tokens, D, generator=generator, device="cpu")
    x *= scales[torch.arange(n_tokens, device="cpu") % len(scales)][:, None]
    return x.to(weight.device, dtype)
