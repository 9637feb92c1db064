"""Traces as files: an ``.npz`` with two arrays for each FFN layer L = 0, 1, ...

    counts_L    uint16 [tokens]          active neurons of each token
    neurons_L   uint16 [sum of counts]   their indices, token after token, ascending

and, where twell recorded it, ``hidden_L`` (the layer's width F) and ``name_L``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from twell.workbench.trace import Trace


def save(trace: Trace, path: Path) -> None:
    arrays: dict[str, Any] = {}
    for layer, (name, F) in enumerate(zip(trace.names, trace.hidden_sizes, strict=True)):
        arrays[f"counts_{layer}"], arrays[f"neurons_{layer}"] = trace.counts[layer], trace.neurons[layer]
        arrays[f"hidden_{layer}"], arrays[f"name_{layer}"] = np.array(F), np.array(name)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path, hidden: int) -> Trace:
    """``hidden``: F of the layers of a file that does not hold it."""
    with np.load(path, allow_pickle=False) as file:
        layers = range(sum(name.startswith("counts_") for name in file.files))
        trace = Trace(
            counts=[file[f"counts_{i}"] for i in layers],
            neurons=[file[f"neurons_{i}"] for i in layers],
            hidden_sizes=[int(file[f"hidden_{i}"]) if f"hidden_{i}" in file else hidden for i in layers],
            names=[str(file[f"name_{i}"]) if f"name_{i}" in file else f"layer {i}" for i in layers],
        )
    if not trace.counts or any(int(n.sum()) != len(of) for n, of in zip(trace.counts, trace.neurons, strict=True)):
        raise ValueError(f"{path} is no trace, or damaged")
    return trace
