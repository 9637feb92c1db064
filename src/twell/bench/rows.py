"""Rows of results in JSON lines files: several processes may append to one file, and a killed one costs one row."""

from __future__ import annotations

import contextlib
import json
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
            found.append(row)
    return found


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
