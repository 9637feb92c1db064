"""What ``twell eval`` scores: models one after the other, and the ways to run each."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twell.workbench.cli.common import load_model

_FP8_DENSE, _FP8_SPARSE = "FP8 dense", "FP8 sparse"  # modes


class Subject(NamedTuple):
    """A model, or one of the ways to run it."""

    label: str
    model: Any
    tokenizer: Any
    facts: dict[str, Any]  # of its rows
    baseline: int | None  # the subject that it is compared with
    twin: Any = None  # the same model, dense, to compare predictions with

    @property
    def names(self) -> dict[str, Any]:
        return {name: self.facts[name] for name in ("model", "mode") if name in self.facts}

    @property
    def sparse_layers(self) -> dict[str, int]:
        """A fact of FP8 weights: in how many layers the sparse kernels have run."""
        from twell.nn import sparse_ffns

        if self.twin is None:
            return {}
        return {"sparse_layers": sum(ffn.runs_in_parts() for _, ffn in sparse_ffns(self.model))}


def subjects(models: Sequence[str], ways: str | None, device: Any, dtype: Any) -> Iterator[Subject]:
    """One after the other, so that only one model is in memory. ``ways``: compare or fp8, in which a model is run."""
    import torch

    from twell.workbench.bench import timing
    from twell.workbench.doctor import bf16_problem

    environment = timing.environment(device)
    environment["versions"]["transformers"] = importlib.metadata.version("transformers")
    n_subjects = 0
    for name, label in zip(models, _labels(models), strict=True):
        model, tokenizer = load_model(name)
        model = model.to(device=device, dtype=dtype or model.dtype)
        if model.dtype == torch.bfloat16 and device.type == "cpu" and (problem := bf16_problem()):
            raise RuntimeError(problem)
        facts = {"model": name, "dtype": str(model.dtype).removeprefix("torch."), **environment}
        first = None if n_subjects == 0 else 0
        if ways is None:
            n_subjects += 1
            yield Subject(label, model, tokenizer, facts, first)
        else:
            for way in _in_ways(Subject(label, model, tokenizer, facts, first), ways, device):
                mode = way.facts["mode"]
                baseline = first if mode == "dense" else n_subjects - 1  # the one before
                n_subjects += 1
                yield way._replace(label=mode if len(models) == 1 else f"{label} {mode}", baseline=baseline)
            del way  # or its model would stay in memory while the next is loaded
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _in_ways(subject: Subject, ways: str, device: Any) -> Iterator[Subject]:
    """A model densely, and sparsely; or with FP8 weights densely, then sparsely."""
    from twell.fp8 import Fp8Linear, why_unavailable
    from twell.hf.sparsify import desparsify_, sparsify_
    from twell.nn import sparse_ffns
    from twell.nn.quantize import quantize_
    from twell.workbench.evaluate.fp8 import counting, plan_all_
    from twell.workbench.generate import dense_twin

    model, name = subject.model, subject.facts["model"]

    def way(mode: str, **more: Any) -> Subject:
        return subject._replace(facts={**subject.facts, "mode": mode, **more})

    report = sparsify_(model)
    if not list(sparse_ffns(model)):
        raise ValueError(f"{name} has no FFN that can run sparsely:\n{report}")
    if ways == "fp8" and any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise ValueError(f"{name} has FP8 weights already: --fp8 takes the model that it was made of, or use --compare")
    desparsify_(model)
    yield way("dense")
    sparsify_(model)
    if ways == "compare":
        yield way("sparse")
        return
    is_emulated = why_unavailable(device) is not None
    quantized = quantize_(model, emulate=is_emulated)
    if not quantized.layers:
        raise ValueError(f"{name}: {quantized}")
    facts = {"fp8_layers": len(quantized.layers), "emulated": is_emulated}
    twin = dense_twin(model)
    with counting(model, twin) as fired:
        yield way(_FP8_DENSE, **facts)._replace(model=twin)
    plan_all_(model, fired)
    yield way(_FP8_SPARSE, **facts)._replace(twin=twin)


def _labels(models: Sequence[str]) -> list[str]:
    """Short names: a folder's own, or that above it where it is ``model``, as runs have it; if need be as given."""
    folders = [Path(name).resolve() if Path(name).is_dir() else Path(name) for name in models]
    short = [folder.parent.name if folder.name == "model" else folder.name for folder in folders]
    return short if len(set(short)) == len(short) else list(models)
