"""Rows of results in JSON Lines files: several processes may append to one file, and a killed one costs one row."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

Row = dict[str, Any]


def append(row: Mapping[str, Any], path: Path) -> None:
    """Add a row at the end of a file; the file and its folders are made where they are missing.

    The line is one write under a lock, so the rows of processes that write at once stay whole. An incomplete last line,
    left by a killed writer, is dropped; a complete last line without a line break gets one.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected a .jsonl file to append to")
    line = json.dumps(row).encode() + b"\n"  # before the file is opened: a row that is not JSON leaves it alone
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        is_alone = _lock(file.fileno())  # until the file is closed
        rest = path.read_bytes().rpartition(b"\n")[2] if path.is_file() else b""  # nothing in a pipe
        if rest and (_is_json(rest) or not is_alone):  # without a lock another process may still be writing it
            line = b"\n" + line
        elif rest:
            os.ftruncate(file.fileno(), path.stat().st_size - len(rest))
        file.write(line)


def _lock(descriptor: int) -> bool:
    """Wait until no other process appends. False where there are no locks: one write in append mode has to do."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
    return False


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode()), dict)
    except ValueError:
        return False


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of the files, in order. A line that is not a row raises a ValueError that names the line.

    A last line without a line break that is not JSON is left out with a warning: its writer was interrupted.
    """
    found = []
    for path in paths:
        # Not str.splitlines: it also splits at characters that a JSON string may hold.
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except ValueError as error:  # of JSON, or of UTF-8
                if number == len(lines):
                    warnings.warn(f"{path}, line {number} is incomplete and left out: {error}", stacklevel=2)
                    continue
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            for name, value in row.items():
                if not _is_right(name, value, row.get("bench")):
                    raise ValueError(f"{path}, line {number}: {name} is not as twell writes it: {value!r}")
            found.append(row)
    return found


def measured(row: Row) -> Row:
    """The speed that a run of ``twell sweep`` was measured at; any other row as it is."""
    return row.get("speed") or row


# ---------------------------------------------------------------------------------------------------------
# The fields that readers rely on. Any may be missing.
# ---------------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Finite and not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_right(name: str, value: Any, bench: Any) -> bool:
    """Whether a field of a row of the benchmark ``bench``, or of a training run's log, is as twell writes it."""
    if name == "bench":
        return isinstance(value, str)
    if bench not in ("ffn", "model", "decode", "train"):
        is_loss = value is None or isinstance(value, int | float)
        return is_number(value) if name == "step" else is_loss if name in ("ce_loss", "eval_loss") else True
    if name in ("M", "D", "F", "batch", "length"):
        return is_number(value) and isinstance(value, int) and value >= 1
    if name in ("workload", "dtype", "kind", "gpu", "cpu", "model"):
        return value is None or isinstance(value, str)
    if name == "mean_active" or name.startswith("speedup"):
        return is_number(value)
    if name in ("called_ms", "called_with_step_ms", "first_token_ms"):
        return isinstance(value, dict) and all(map(_is_spread, value.values()))
    if name.endswith("_ms") and name not in ("parts_ms", "tokens_per_ms"):
        return _is_spread(value)
    if name == "ffns":
        return isinstance(value, list) and all(map(_is_layer, value))
    if name == "memory" and bench == "model":
        return isinstance(value, dict) and all(
            isinstance(side, dict) and all(map(is_number, side.values())) for side in value.values()
        )
    return True


def _is_spread(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(value.get(name)) for name in ("p20", "p50", "p80"))


def _is_layer(value: Any) -> bool:
    numbers = ("tokens", "mean_active", "speedup")
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and all(is_number(value.get(name)) for name in numbers)
    )
