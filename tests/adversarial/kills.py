"""Kill training runs at random moments, and damage their files at random.

A killed run is resumed, killed again, and in the end left to finish; a damaged run is resumed. Each must end with the
bits of an undisturbed run (weights, and metrics without times), or with an error of one line. After an error all files
must be unchanged, unless it says that it could not write. The seed decides what is tried; the moment of a kill also
depends on the machine.

    python tests/adversarial/kills.py --kills 40 --damages 200      # prints what was tried, and the outcomes
    python tests/adversarial/kills.py --kills 0 --only 17           # repeats one damage with all its output
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# Large enough for the sparse path on a CPU, and for files that take some time to write.
RECIPE = ["hidden_size=64", "intermediate_size=1280", "layers=2", "heads=2", "context=32", "vocab_size=300"]
RECIPE += ["sequences_per_step=8", "micro_batch=8", "lr_warmup=2", "log_every=1", "dead_after_tokens=500"]
RECIPE += ["steps=20", "eval_every=4", "save_every=3", "restart_every=5"]

# Moments to kill a process: (pattern of files, seconds); at a random time after such a file is new or changed.
MOMENTS = {
    "at any time": (None, 1.0),  # times the duration of an undisturbed run
    "at its first files": (".lock", 0.5),
    "as the run begins": ("tokenizer*", 0.05),
    "between steps": ("metrics.jsonl", 1.0),
    "in a checkpoint": ("checkpoint-*", 0.1),
    "at a checkpoint's end": ("checkpoint-*/manifest.json*", 0.03),
    "at the very end": ("model", 0.3),
}


# -- damage ---------------------------------------------------------------------------------------------------


def _overwritten(path: Path, chance: random.Random, n: int, by: Callable[[bytes], bytes]) -> None:
    content = path.read_bytes()
    where = chance.randrange(max(1, len(content)))
    path.write_bytes(content[:where] + by(content[where : where + n]) + content[where + n :])


def _copied_over(path: Path, chance: random.Random) -> None:
    near = sorted({*path.parent.rglob("*"), *path.parents[1].glob(f"*/{path.name}")} - {path})
    shutil.copyfile(chance.choice([p for p in near if p.is_file()] or [Path(__file__)]), path)


DAMAGES: dict[str, Callable[[Path, random.Random], Any]] = {
    "deleted": lambda path, chance: path.unlink(),
    "emptied": lambda path, chance: path.write_bytes(b""),
    "cut": lambda path, chance: path.write_bytes(path.read_bytes()[: chance.randrange(max(1, path.stat().st_size))]),
    "a bit flipped": lambda path, chance: _overwritten(
        path, chance, 1, lambda part: bytes(b ^ 1 << chance.randrange(8) for b in part)
    ),
    "zeros inside": lambda path, chance: _overwritten(path, chance, 64, lambda part: bytes(len(part))),
    "noise inside": lambda path, chance: _overwritten(path, chance, 16, lambda part: chance.randbytes(len(part))),
    "longer": lambda path, chance: path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 99))),
    "another file": _copied_over,
    "a folder": lambda path, chance: (path.unlink(), path.mkdir()),
}


def damage(case: Path, chance: random.Random) -> list[tuple[str, str]]:
    """Damage one to three files of a run or its text, mostly in checkpoints; returns which ones, and how."""
    done = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        groups = collections.defaultdict(list)
        for path in sorted(p for p in case.rglob("*") if p.is_file()):
            groups["/".join(path.relative_to(case).parts[:2])].append(path)
        weights = [4 if "checkpoint" in name else 1 for name in groups]
        path = chance.choice(chance.choices(list(groups.values()), weights)[0])
        how = chance.choice(list(DAMAGES))
        DAMAGES[how](path, chance)
        done.append((str(path.relative_to(case)), how))
    return done


# -- outcomes ---------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def verdict(code: int, errors: str, out: Path, wanted: dict[str, Any], before: dict[str, bytes] | None = None) -> str:
    """``equal``, ``refused: (the line)`` or ``WRONG: (why)``."""
    from small_runs import result

    lines = errors.strip().splitlines()
    if code == 0:
        try:
            now = result(out)
            differing = [name for name in wanted | now if now.get(name) != wanted.get(name)]
            return f"WRONG: other {', '.join(differing)}" if differing else "equal"
        except Exception as error:
            return f"WRONG: it ended well, and cannot be read: {type(error).__name__}: {error}"
    if code != 2 or len(lines) != 1 or not lines[0].startswith("twell: error: "):
        return f"WRONG: exit code {code}: {errors.strip()[-2000:]}"
    if before is not None and "could not write" not in lines[0] and files(out) != before:
        return f"WRONG: refused, and files changed: {lines[0]}"
    return f"refused: {lines[0]}"


def twell(*args: str | Path) -> tuple[int, str, str]:
    """The command line in this process: exit code, standard output and error."""
    from twell.workbench import cli

    said, errors = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["twell", *map(str, args)]), contextlib.redirect_stdout(said):
        try:
            with contextlib.redirect_stderr(errors):
                cli.main()
        except SystemExit as stop:
            return int(stop.code or 0), said.getvalue(), errors.getvalue()
    return 0, said.getvalue(), errors.getvalue()


def one_damage(number: int, work: Path, wanted: dict[str, Any]) -> tuple[list[tuple[str, str]], str, str]:
    """(damages, verdict, all output)."""
    chance, case = random.Random(number), work / "damaged"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(work / chance.choice(("whole", "stopped", "stopped")), case / "run")
    shutil.copy(work / "text.txt", case / "text.txt")
    done = damage(case, chance)
    before = files(case / "run")
    code, said, errors = twell("train", "--resume", "--out", case / "run", "--data", case / "text.txt")
    return done, verdict(code, errors, case / "run", wanted, before), said + errors


# -- kills ------------------------------------------------------------------------------------------------------


def start(work: Path, out: Path) -> subprocess.Popen[str]:
    """The command that a user would give: resume, or the first command again if there is no run yet."""
    args = ["--resume"] if (out / "recipe.json").exists() else ["--data", str(work / "text.txt"), *RECIPE]
    command = [sys.executable, "-m", "twell", "train", "--out", str(out), *args]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str], out: Path, pattern: str | None, seconds: float) -> bool:
    """Kill it ``seconds`` after a file that matches the pattern has changed; returns whether it still ran."""

    def seen() -> set[tuple[Path, int]]:
        with contextlib.suppress(FileNotFoundError):  # a file was moved meanwhile
            return {(path, path.stat().st_mtime_ns) for path in out.glob(pattern or "*")}
        return set()

    before = seen()
    while pattern is not None and process.poll() is None and seen() <= before:
        time.sleep(0.001)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return False
    process.kill()
    return process.wait() == -9


def killed_run(number: int, most: int, work: Path, seconds: float) -> tuple[list[str], int, str]:
    """Start a run, kill it up to ``most`` times, let it finish: (moments of the kills, exit code, standard error)."""
    chance, out, kills = random.Random(number), work / f"killed-{number}", []
    for _ in range(min(most, chance.randint(1, 4))):
        moment = chance.choice(list(MOMENTS))
        pattern, window = MOMENTS[moment]
        process = start(work, out)
        is_killed = kill(process, out, pattern, chance.random() * (window if pattern else seconds))
        errors = process.communicate()[1]
        if not is_killed:
            return kills, process.returncode, errors
        kills.append(moment)
    process = start(work, out)
    errors = process.communicate()[1]
    return kills, process.returncode, errors


# -- many -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Training under SIGKILL, and with damaged files.")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one damage by its number, with all that is said")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in what is started
    from rich.progress import Progress

    from small_runs import result, write_text

    found: list[tuple[str, str]] = []  # killed or damaged, and the verdict
    tried: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def add(part: str, verdict: str, about: str) -> None:
        found.append((part, verdict))
        if verdict.startswith("WRONG"):
            progress.console.print(f"{verdict} ({part}, {about})", markup=False, highlight=False)

    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        work = Path(folder)
        write_text(work / "text.txt")
        begun = time.monotonic()
        process = start(work, work / "whole")
        errors = process.communicate()[1]
        seconds = time.monotonic() - begun
        if process.returncode:
            print(errors)
            return 1
        wanted = result(work / "whole")
        kill(start(work, work / "stopped"), work / "stopped", "checkpoint-18/manifest.json", 0)
        if options.only is not None:
            progress.stop()
            print(*one_damage(options.only, work, wanted), sep="\n")
            return 0
        bar = progress.add_task("kills", total=options.kills)
        n_kills, number = 0, options.seed
        while n_kills < options.kills:
            moments, code, errors = killed_run(number, options.kills - n_kills, work, seconds)
            now = verdict(code, errors, work / f"killed-{number}", wanted)
            add("killed", now, f"run {number}: {', '.join(moments) or 'never'}")
            tried["killed"].update(moments)
            shutil.rmtree(work / f"killed-{number}", ignore_errors=True)
            n_kills, number = n_kills + len(moments), number + 1
            progress.update(bar, completed=n_kills)
        bar = progress.add_task("damages", total=options.damages)
        for number in range(options.seed, options.seed + options.damages):
            done, now, _ = one_damage(number, work, wanted)
            add("damaged", now, f"run {number}: {', '.join(' '.join(one) for one in done)}")
            tried["files"].update(re.sub(r"-\d+", "", what) for what, _ in done)
            tried["damage"].update(how for _, how in done)
            progress.advance(bar)
    print(f"{n_kills} kills; an undisturbed run takes {seconds:.1f} s")
    for what, counts in tried.items():
        print(f"{what}: " + ", ".join(f"{name} {n}" for name, n in counts.most_common()))
    about = re.compile(r"\(.*\)|/\S*/|\d+")  # numbers, paths, and what is wrong exactly
    lines = collections.Counter(about.sub("#", v) for _, v in found if v.startswith("refused"))
    for line, n in lines.most_common():
        print(f"{n:4} {line}")
    for part in ("killed", "damaged"):
        kinds = collections.Counter(v.partition(":")[0] for which, v in found if which == part)
        print(f"{part}: {kinds.total()} runs, " + ", ".join(f"{kinds[k]} {k}" for k in ("equal", "refused", "WRONG")))
    return int(any(v.startswith("WRONG") for _, v in found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests share
    sys.exit(main())
