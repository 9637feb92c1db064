"""A run's files: written whole or not at all, checked by size and checksum, and used by one process at a time.

A checkpoint, and a folder of tokens, has a ``manifest.json``, written last, which says what the folder is and lists
every other file with size and checksum. Without a manifest the folder is unfinished; if a file differs from it, the
folder is damaged. No run uses either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST_FILE = "manifest.json"
LOCK_FILE = ".lock"
PART = ".part"  # suffix of a file that is being written
NOT_FINISHED = "was not finished"
_PREFIX = "checkpoint-"


def write_whole(path: Path, text: str) -> None:
    """Write under another name, then rename: a reader finds the old text or the new text, nothing in between."""
    part = path.with_name(path.name + PART)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn any error of a library that writes into ``folder`` into a RuntimeError of one line."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"could not write {folder} (disk full?): {reason}") from error


# ---------------------------------------------------------------------------------------------------------
# checksums
# ---------------------------------------------------------------------------------------------------------


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file below a folder, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST_FILE)
    return {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": _checksum(p)} for p in files}


def flaw_of_files(folder: Path, described: dict[str, dict[str, Any]]) -> str | None:
    """What is wrong with the first file that differs from its description; None if all files are as described."""
    for name, facts in described.items():  # all sizes before any checksum: they cost nothing
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != facts["bytes"]:
            return f"{name} has {size:,} bytes instead of {facts['bytes']:,}"
    for name, facts in described.items():
        try:
            if _checksum(folder / name) != facts["sha256"]:
                return f"{name} has another checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finish_folder(folder: Path, what: Mapping[str, Any]) -> None:
    """Write the manifest, the last file of a folder. ``what``: what the folder is."""
    write_whole(folder / MANIFEST_FILE, json.dumps({**what, "files": describe_files(folder)}, indent=1))


def flaw_of_folder(folder: Path, what: Mapping[str, Any]) -> str | None:
    """Why a folder cannot be used; None if it is whole, and what it should be."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return NOT_FINISHED
    flaw: str | None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = dict(manifest.pop("files"))
        if manifest != what:
            others = [key for key in sorted({*manifest, *what}) if manifest.get(key) != what.get(key)]
            return f"is something else ({', '.join(f'its {key} is {manifest.get(key)}' for key in others)})"
        flaw = flaw_of_files(folder, files) if files else f"{MANIFEST_FILE} names no files"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        flaw = f"{MANIFEST_FILE} cannot be read"
    return flaw and f"is damaged ({flaw})"


# ---------------------------------------------------------------------------------------------------------
# checkpoints
# ---------------------------------------------------------------------------------------------------------


def checkpoint_folder(out: Path, step: int) -> Path:
    return out / f"{_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoints(out: Path) -> list[Path]:
    """Every checkpoint of a run, sound or not, newest first."""
    found = [p for p in out.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdecimal() and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def newest_sound(out: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint to resume from, if there is one, and what is wrong with newer ones."""
    flaws: list[str] = []
    for folder in checkpoints(out):
        flaw = flaw_of_folder(folder, {"step": step_of(folder)})
        if flaw is None:
            return folder, flaws
        flaws.append(f"{folder.name} {flaw}")
    return None, flaws


def remove_older(newest: Path, keep: int | None, spared: str | None = None) -> None:
    """Delete checkpoints up to ``newest`` except the last ``keep`` and the one named ``spared``."""
    older = [p for p in checkpoints(newest.parent) if step_of(p) <= step_of(newest)]
    for folder in older[max(1, keep) :] if keep is not None else []:
        if spared is None or folder.name != Path(spared).name:
            shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------------------
# one process at a time
# ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The operating system frees the lock when the process ends, however it ends.

    The lock's file stays if anything else was written there; otherwise it goes, and so do folders made here. (filelock
    is no help: without flock its newer versions lock by a file that a killed process leaves behind, and its older ones
    have no such case.)
    """
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with path.open("a+", encoding="utf-8") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by {file.read() or 'another process'}: wait for its end, or choose another folder"
            ) from None
        except OSError:  # a file system without locks, as some network ones
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            if list(folder.iterdir()) == [path]:
                path.unlink()
                for made in new:
                    made.rmdir()
