"""Rows of results in JSON lines files: several processes may append to one file, and a killed one costs one row."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

Row = dict[str, Any]

# What readers rely on, where a row has it.
_WHOLE = ("M", "D", "F", "batch", "length")  # numbers of at least 1
_TEXTS = ("workload", "dtype", "kind", "gpu", "cpu", "model")
_SPREADS = ("dense_ms", "compiled_ms", "fp8_ms", "fp8_weights_ms", "sparse_ms", "frozen_ms", "sparse_fp8_ms")
_SPREADS_BY_SIDE = ("called_ms", "first_token_ms")
_FFN = {"name": str, "tokens": int, "mean_active": float, "speedup": float}  # of the list "ffns"


def append(row: Mapping[str, Any], path: Path) -> None:
    """Add a row at the end of a file, which is made if need be, with the folders above it.

    The whole line is one write under a lock, so rows of processes that write at once stay whole. What a killed writer
    left of a last line is dropped; a last line that only lacks its end gets it.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected a .jsonl file to append to")
    line = json.dumps(row).encode() + b"\n"  # before the file is touched: what is no JSON leaves it alone
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        is_alone = _lock(file.fileno())  # until the file is closed
        rest = _unended(path, file.fileno())
        if rest and (_is_json(rest) or not is_alone):  # it may be a row that another process is writing
            line = b"\n" + line
        elif rest:
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - len(rest))
        while line:  # once, but for a write that a full disk or a signal cuts short
            line = line[file.write(line) :]


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of the files, in order. A line that is no row raises a ValueError that names it.

    Only a last line without an end is left out where it is no JSON, with a warning: its writer was interrupted.
    """
    found = []
    for path in paths:
        # Not splitlines of the text: it also splits at characters that a JSON string may hold.
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
            if wrong := _wrong_field(row):
                raise ValueError(f"{path}, line {number}: {wrong}")
            found.append(row)
    return found


def _wrong_field(row: Row) -> str | None:
    """What is not of its type in a measured row, or in a row of a training's log; None: nothing."""
    if "step" in row and not _is(row["step"], float):
        return f"step must be a number, got {row['step']!r}"
    for name in ("ce_loss", "eval_loss"):
        if "step" in row and name in row and not isinstance(row[name], int | float | None):
            return f"{name} must be a number, got {row[name]!r}"
    if "bench" in row and not isinstance(row["bench"], str):
        return f"bench must be a name, got {row['bench']!r}"
    if row.get("bench") not in ("ffn", "model", "decode", "train"):
        return None
    for names, kind, what in (
        (_WHOLE, int, "a whole number of at least 1"),
        (_TEXTS, str, "a text"),
        (("speedup", "speedup_over_fp8", "speedup_fp8", "mean_active"), float, "a number"),
        (("memory", "joules_per_token"), dict, "an object"),
    ):
        for name in names:
            unknown = row.get(name) is None and kind in (str, dict)
            if name in row and not unknown and not _is(row[name], kind):
                return f"{name} must be {what}, got {row[name]!r}"
    spreads = {name: row[name] for name in _SPREADS if name in row}
    for name in _SPREADS_BY_SIDE:
        by_side = row.get(name, {})
        if not isinstance(by_side, dict):
            return f"{name} must be an object, got {by_side!r}"
        spreads |= {f"{name} of {side}": value for side, value in by_side.items()}
    for name, spread in spreads.items():
        if not isinstance(spread, dict) or not all(_is(spread.get(p), float) for p in ("p20", "p50", "p80")):
            return f"{name} must be numbers p20, p50 and p80, got {spread!r}"
    sides = row.get("memory") or {}
    if row["bench"] == "model" and not all(
        isinstance(side, dict) and all(_is(number, float) for number in side.values()) for side in sides.values()
    ):
        return f"memory must be numbers of each side, got {sides!r}"
    ffns = row.get("ffns", [])
    if not isinstance(ffns, list) or not all(
        isinstance(ffn, dict) and all(_is(ffn.get(name), kind) for name, kind in _FFN.items()) for ffn in ffns
    ):
        return f"ffns must be a list of {', '.join(_FFN)}"
    return None


def _is(value: Any, kind: type) -> bool:
    """Of JSON: an int is a float, too, NaN is none, and numbers of rows are not negative."""
    if kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and value >= (1 if kind is int else 0)
    return isinstance(value, kind)


def _lock(descriptor: int) -> bool:
    """Wait until no other process appends. Where there are no locks, a single write in append mode has to do."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
    return False


def _unended(path: Path, descriptor: int) -> bytes:
    """What follows the last end of a line; nothing in an empty file, or a pipe."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size == 0:
        return b""
    with path.open("rb") as file:
        back = 1 << 16
        while True:  # rows are short: once
            file.seek(max(0, facts.st_size - back))
            tail = file.read()
            if b"\n" in tail or back >= facts.st_size:
                return tail.rpartition(b"\n")[2]
            back *= 16


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode()), dict)
    except ValueError:
        return False
