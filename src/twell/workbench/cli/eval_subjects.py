"""The subjects of ``twell eval``: each model, in each way it is run, one after the other."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twell.workbench.cli.common import load_model, run_name


class EvalSubject(NamedTuple):
    """A model in one of the ways it is run."""

    label: str
    model: Any
    tokenizer: Any
    facts: dict[str, Any]  # for its rows
    baseline: int | None  # index of the subject it is compared with
    twin: Any = None  # the same model run densely, to compare predictions with

    @property
    def sparse_layers(self) -> dict[str, int]:
        """With FP8 weights: in how many layers the sparse kernels ran."""
        from twell.nn import sparse_ffns

        if self.twin is None:
            return {}
        return {"sparse_layers": sum(ffn.is_laid_out() for _, ffn in sparse_ffns(self.model))}


def subjects(models: Sequence[str], ways: str | None, device: Any, dtype: str | None) -> Iterator[EvalSubject]:
    """One after the other, so that only one model is in memory. ``ways``: compare or fp8, or None: as the model is."""
    import torch

    from twell.workbench.bench import timing

    environment = timing.environment(device)
    environment["versions"]["transformers"] = importlib.metadata.version("transformers")
    n_subjects = 0
    for name, label in zip(models, _labels(models), strict=True):
        if n_subjects:  # free the memory of the previous model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        model, tokenizer = load_model(name, str(device), dtype)
        facts = {"model": name, "dtype": str(model.dtype).removeprefix("torch."), **environment}
        baseline = 0 if n_subjects else None  # of the first way; each further way is compared with the one before it
        for mode, run, twin, more in _ways(model, name, ways, device):
            shown = mode if mode and len(models) == 1 else f"{label} {mode}".rstrip()
            yield EvalSubject(shown, run, tokenizer, {**facts, **more}, baseline, twin)
            baseline = n_subjects
            n_subjects += 1
            del run, twin  # or they would stay in memory while the next model loads
        del model


def _ways(model: Any, name: str, ways: str | None, device: Any) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """(mode, the model, its dense twin, facts). compare: densely, then sparsely. fp8: densely, then with FP8 weights
    densely, then with them sparsely."""
    from twell.fp8 import Fp8Linear, why_unavailable
    from twell.hf.sparsify import desparsify_, sparsify_
    from twell.nn import sparse_ffns
    from twell.nn.quantize import quantize_
    from twell.workbench.evaluate.fp8_plans import counting, plan_all_
    from twell.workbench.generate import dense_twin

    if ways is None:
        yield "", model, None, {}
        return
    report = sparsify_(model)
    if not list(sparse_ffns(model)):
        raise ValueError(f"{name} has no FFN that can run sparsely: {report.summary()}")
    if ways == "fp8" and any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise ValueError(f"{name} already has FP8 weights: give --fp8 the model before quantisation, or use --compare")
    desparsify_(model)
    yield "dense", model, None, {"mode": "dense"}
    sparsify_(model)
    if ways == "compare":
        yield "sparse", model, None, {"mode": "sparse"}
        return
    is_emulated = why_unavailable(device) is not None
    quantized = quantize_(model, emulate=is_emulated)
    if not quantized.layers:
        raise ValueError(f"{name}: {quantized}")
    facts = {"fp8_layers": len(quantized.layers), "emulated": is_emulated}
    twin = dense_twin(model)
    with counting(model, twin) as fired:
        yield "FP8 dense", twin, None, {"mode": "FP8 dense", **facts}
    plan_all_(model, fired)
    yield "FP8 sparse", model, twin, {"mode": "FP8 sparse", **facts}


def _labels(models: Sequence[str]) -> list[str]:
    """Folder names, or the parent's for a folder called ``model``; if two are the same, the names as given."""
    folders = [Path(name).resolve() if Path(name).is_dir() else Path(name) for name in models]
    short = [run_name(folder) for folder in folders]
    return short if len(set(short)) == len(short) else list(models)
