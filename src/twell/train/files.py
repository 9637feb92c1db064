"""A run's files: written whole or not at all, checked by size and checksum, and used by one process at a time.

A checkpoint is a folder. Its ``manifest.json``, written last, lists every other file with size and checksum. Without a
manifest a checkpoint is unfinished; if a file differs from the manifest, it is damaged. No run resumes from either.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST_FILE = "manifest.json"
LOCK_FILE = ".lock"
PART = ".part"  # suffix of a file that is being written
NOT_FINISHED = "was not finished"
_PREFIX = "checkpoint-"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # from file systems without locks: some network ones


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
    return {p.relative_to(folder).as_posix(): describe_file(p) for p in files}


def describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _checksum(path)}


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


def finish_checkpoint(folder: Path) -> None:
    """Write the manifest, the last file of a checkpoint."""
    manifest = {"step": step_of(folder), "files": describe_files(folder)}
    write_whole(folder / MANIFEST_FILE, json.dumps(manifest, indent=1))


def flaw_of_checkpoint(folder: Path) -> str | None:
    """Why no run may resume from this checkpoint; None if it is sound."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return NOT_FINISHED
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        step, files = int(manifest["step"]), dict(manifest["files"])
        flaw = flaw_of_files(folder, files) if files else f"{MANIFEST_FILE} names no files"
    except (OSError, ValueError, TypeError, KeyError):
        flaw = f"{MANIFEST_FILE} cannot be read"
    else:
        if step != step_of(folder):
            flaw = f"it is a copy of {_PREFIX}{step}"
    return flaw and f"is damaged ({flaw})"


class Found(NamedTuple):
    """The newest sound checkpoint, if there is one, and the flaws of newer checkpoints."""

    checkpoint: Path | None
    flaws: dict[Path, str]

    def __str__(self) -> str:
        """The flaws in one line."""
        return ", ".join(f"{path.name} {flaw}" for path, flaw in self.flaws.items())


def newest_sound(out: Path) -> Found:
    """Find the checkpoint to resume from, newest first. Reads every file of the checkpoints it looks at."""
    flaws: dict[Path, str] = {}
    for folder in checkpoints(out):
        flaw = flaw_of_checkpoint(folder)
        if flaw is None:
            return Found(folder, flaws)
        flaws[folder] = flaw
    return Found(None, flaws)


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

    Folders made here are removed again if they stay empty. (filelock is no help: without flock its newer versions lock
    by a file that a killed process leaves behind, and its older ones have no such case.)
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = _lock(folder / LOCK_FILE) if fcntl else None
    try:
        yield
    finally:
        if file is not None:
            (folder / LOCK_FILE).unlink(missing_ok=True)  # before it is freed: see the end of _lock
            os.close(file)
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _lock(path: Path) -> int:
    """The descriptor of the locked file."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace") or "another process"
            os.close(file)
            raise ValueError(
                f"{path.parent} is in use by {holder}: wait for its end, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return file
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {platform.node()}".encode())
            return file
        os.close(file)  # its owner has just removed it: lock a new one
