"""Costs of a GPU that ``twell tune`` has measured: a file in the user's cache folder, one per kind of GPU.

Without a file, plans use an H200's costs, scaled, on GPUs of its generation, and are dense on others: see
``plan.costs_for``. Kernels change, and their costs with them, so a file of other versions is ignored.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

VERSION = 1  # of the file's meaning
_LEAST, _MOST = 1e-3, 1e12  # range of a cost


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twell"


def path_for(device: torch.device) -> Path:
    facts: Any = torch.cuda.get_device_properties(device)
    name = re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-")
    return folder() / f"costs-{name}-{facts.multi_processor_count}-sm{facts.major}{facts.minor}.json"


def versions() -> dict[str, str]:
    """The versions that a measurement is valid for."""
    found = {"costs": str(VERSION), "torch": torch.__version__}
    for package in ("twell", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def write(device: torch.device, costs: dict[str, dict[str, float]], **facts: Any) -> Path:
    """Write a file of costs: {"inference": {name: cost}, "training": {name: cost}}."""
    path = path_for(device)
    content = {"device": torch.cuda.get_device_name(device), "versions": versions(), **facts, **costs}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    read.cache_clear()
    return path


@functools.cache
def read(path: Path, names: tuple[str, ...]) -> tuple[dict[str, dict[str, float]] | None, str]:
    """(costs of inference and training, or None; their source, or why there are none)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "twell tune has not measured this GPU"
    except (OSError, ValueError) as error:
        return None, _warned(f"{path} cannot be read ({error})")
    if not isinstance(content, dict) or content.get("versions") != versions():
        return None, f"{path.name} was written by other versions"
    try:
        costs = {kind: {name: float(content[kind][name]) for name in names} for kind in ("inference", "training")}
    except (KeyError, TypeError, ValueError) as error:
        return None, _warned(f"{path} is damaged ({error!r})")
    numbers = [n for of_kind in costs.values() for n in of_kind.values()]
    if not all(math.isfinite(n) and (n == 0 or _LEAST <= n <= _MOST) for n in numbers):
        return None, _warned(f"{path} is damaged (costs out of range)")
    return costs, f"costs of this GPU that twell tune has measured on {content.get('date', 'an unknown day')} ({path})"


def _warned(problem: str) -> str:
    warnings.warn(f"{problem}: it is not used; run twell tune again", stacklevel=4)
    return problem
