"""Rows of results in JSON Lines files: several processes may append to one file, and a killed one costs one row."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
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
    with path.open("ab", buffering=0) as file:
        is_alone = _lock(file.fileno())  # until the file is closed
        rest = _last_line(path, file.fileno())
        if rest and (_is_json(rest) or not is_alone):  # without a lock another process may still be writing it
            line = b"\n" + line
        elif rest:
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - len(rest))
        while line:  # more than once only where a full disk or a signal cuts a write short
            line = line[file.write(line) :]


def _lock(descriptor: int) -> bool:
    """Wait until no other process appends. False where there are no locks: one write in append mode has to do."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
    return False


def _last_line(path: Path, descriptor: int) -> bytes:
    """What follows the last line break; nothing in an empty file, or a pipe."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size == 0:
        return b""
    with path.open("rb") as file:
        back = 1 << 16
        while True:  # once: rows are short
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
            for name, is_right, what in _fields_of(row.get("bench")):
                if name in row and not is_right(row[name]):
                    raise ValueError(f"{path}, line {number}: {name} must be {what}, got {row[name]!r}")
            found.append(row)
    return found


def measured(row: Row) -> Row:
    """The speed that a run of ``twell sweep`` was measured at; any other row as it is."""
    return row.get("speed") or row


# ---------------------------------------------------------------------------------------------------------
# The type of each field that readers rely on. Any field may be missing.
# ---------------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Finite and not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 1


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_spread(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(value.get(name)) for name in ("p20", "p50", "p80"))


def _is_object_of(is_right: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


def _is_ffns(value: Any) -> bool:
    numbers = ("tokens", "mean_active", "speedup")
    return isinstance(value, list) and all(
        isinstance(ffn, dict) and isinstance(ffn.get("name"), str) and all(is_number(ffn.get(name)) for name in numbers)
        for ffn in value
    )


_Field = tuple[str, Callable[[Any], bool], str]  # name, its check, what is expected


def _fields_of(bench: Any) -> list[_Field]:
    if bench not in ("ffn", "model", "decode", "train"):
        return _LOG_FIELDS
    return [*_FIELDS, *_MODEL_FIELDS] if bench == "model" else _FIELDS


def _all_of(names: str, is_right: Callable[[Any], bool], what: str) -> list[_Field]:
    return [(name, is_right, what) for name in names.split(" ")]


_LOG_FIELDS = [  # of a training run
    *_all_of("step", is_number, "a number"),
    *_all_of("ce_loss eval_loss", lambda value: value is None or isinstance(value, int | float), "a number"),
    *_all_of("bench", lambda value: isinstance(value, str), "a name"),
]
_FIELDS = [
    *_all_of("M D F batch length", _is_count, "a whole number of at least 1"),
    *_all_of("workload dtype kind gpu cpu model", _is_text, "a text"),
    *_all_of("speedup speedup_over_fp8 speedup_fp8 mean_active", is_number, "a number"),
    *_all_of("memory joules_per_token", lambda value: value is None or isinstance(value, dict), "an object"),
    *_all_of(
        "dense_ms compiled_ms fp8_ms fp8_weights_ms sparse_ms frozen_ms sparse_fp8_ms",
        _is_spread,
        "numbers p20, p50 and p80",
    ),
    *_all_of(
        "called_ms first_token_ms",
        lambda value: _is_object_of(_is_spread, value),
        "an object of numbers p20, p50 and p80",
    ),
    *_all_of("ffns", _is_ffns, "a list of name, tokens, mean_active and speedup"),
]
_MODEL_FIELDS = _all_of(
    "memory",
    lambda value: value is None or _is_object_of(lambda side: _is_object_of(is_number, side), value),
    "an object of numbers of each side",
)
