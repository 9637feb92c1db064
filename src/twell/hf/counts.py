"""How often each neuron of a model fires on a text. The counts lie beside the model and decide its plans."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

COUNTS_FILE = "neuron_counts.npz"
_REMEDY = "delete the file, or write it anew with twell calibrate"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NeuronCounts:
    """For each FFN, in the model's order: int64 [F], for how many of ``tokens`` tokens each neuron fired."""

    fired: list[Tensor]
    tokens: int
    path: Path | None = None  # the file that they were loaded from

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("counts must be of at least one token")
        for layer, counts in enumerate(self.fired):
            if counts.dim() != 1 or counts.is_floating_point():
                raise ValueError(f"layer {layer}: expected integers [F], got {counts.dtype} {tuple(counts.shape)}")
            if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= self.tokens:
                raise ValueError(f"layer {layer}: counts must lie between 0 and the {self.tokens:,} tokens counted")

    def check(self, widths: list[int]) -> None:
        """Refuse counts of another model than one whose FFNs have these numbers of neurons."""
        counted = [len(counts) for counts in self.fired]
        if counted != widths:
            said = f"the counts are of {len(counted)} FFNs {counted}, the model has {len(widths)} {widths}"
            raise ValueError(said if self.path is None else f"{self.path}: {said}: {_REMEDY}")

    def save(self, path: Path) -> None:
        """Write an .npz with ``tokens`` and ``fired_0``, ``fired_1``, ...; it appears whole or not at all."""
        part = path.with_name(f"{path.name}.part")
        with part.open("wb") as f:
            arrays: dict[str, Any] = {f"fired_{i}": counts.numpy() for i, counts in enumerate(self.fired)}
            np.savez_compressed(f, tokens=self.tokens, **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> NeuronCounts:
        try:
            with np.load(path) as saved:
                layers = sum(name.startswith("fired_") for name in saved.files)
                fired = [torch.from_numpy(saved[f"fired_{i}"].astype(np.int64)) for i in range(layers)]
                return cls(fired=fired, tokens=int(saved["tokens"]), path=path)
        except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{path} holds no neuron counts: {error}: {_REMEDY}") from None


def counts_path(name: str, revision: str | None = None) -> Path | None:
    """The path of the counts in a model's folder or its repository on the hub; None if there are none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(name, COUNTS_FILE, revision=revision)
    except OSError:  # it has no such file, or the hub cannot be reached
        return None
    return None if path is None else Path(path)


def find_counts(name_or_path: str | None) -> NeuronCounts | None:
    """The counts in the folder that a model was loaded from; None if there are none. It never asks the hub, as
    ``counts_path`` does: where the hub cannot be reached, asking takes 20 seconds."""
    path = Path(name_or_path or "") / COUNTS_FILE
    return NeuronCounts.load(path) if name_or_path and path.is_file() else None
