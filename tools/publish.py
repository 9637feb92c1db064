"""Measure the rows in results/ anew, all at one clean commit: ``make publish``.

    python tools/publish.py --list                                      # steps, their time, their commands
    python tools/publish.py --trace TRACE.npz --data DATA               # on a GPU: everything that is not finished
    python tools/publish.py --only ffn-h200 --time-limit 540            # some steps or files, for at most 9 minutes
    python tools/publish.py --machine cpu                               # the steps of the CPU
    python tools/publish.py --commit 0123456789ab                       # in a copy of the tree without its .git

Each step is a command of ``twell`` or of tools/; publish_steps.py has them all. A finished step keeps its rows in the
folder --rows and is skipped at the same commit, so the same command continues after an interruption. (Models lie there
too: a step whose model is needed and gone runs again.) A step that fails is reported, and the others run. When all
steps of a file are finished its rows replace the file in results/, but only if no row of another commit remains there.
--keep names files that may stay as they are; logs of training, which have no commit, always may.

Exit code: 0 results/ was replaced, 1 a step failed, 2 something is left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from publish_steps import STEPS, Step, logs

ROOT = Path(__file__).parents[1]
TWELL = (sys.executable, "-m", "twell")
Row = dict[str, Any]


class StepFailed(RuntimeError):
    pass


def clean_commit() -> str:
    """The commit of a tree without changes; SystemExit where there are changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    if changes := git("status", "--porcelain"):
        raise SystemExit(f"the tree has changes: commit them, or say with --commit which commit it is\n{changes}")
    return git("rev-parse", "--short=12", "HEAD")


class Publisher:
    """Runs steps at one commit, and keeps their rows in a folder."""

    def __init__(self, folder: Path, commit: str, places: dict[str, Path], twell: Sequence[str], is_git: bool) -> None:
        self.folder, self.commit, self.twell, self.is_git = folder / commit, commit, twell, is_git
        self.places = {"work": self.folder / "work", **places}

    def path(self, step: Step) -> Path:
        return self.folder / f"{step.name}.jsonl"

    def log(self, step: Step) -> Path:
        return self.folder / f"{step.name}.log"

    def has_rows(self, step: Step) -> bool:
        return self.path(step).exists() and {row.get("commit") for row in read(self.path(step))} == {self.commit}

    def is_finished(self, step: Step, steps: Sequence[Step] = ()) -> bool:
        """Whether it has rows, and its model is there if one of the other ``steps`` still needs it."""
        work = self.places["work"]
        needed = {folder for other in steps if not self.has_rows(other) for folder in other.needs}
        return self.has_rows(step) and all(
            (work / folder).exists() for folder in needed if folder.split("/")[0] == step.name
        )

    def missing(self, step: Step) -> list[str]:
        """Options that the step needs and that were not given."""
        named = [name for name in ("trace", "data") if f"{{{name}}}" in step.command + step.scores]
        return [f"--{name}" for name in named if name not in self.places]

    def run(self, step: Step) -> None:
        """Run a step; its rows appear in the folder all at once."""
        if absent := [folder for folder in sorted(step.needs) if not (self.places["work"] / folder).exists()]:
            raise StepFailed(f"it needs {', '.join(absent)}, which another step makes")
        part = self.path(step).with_suffix(".part")
        part.unlink(missing_ok=True)
        self.places["work"].mkdir(parents=True, exist_ok=True)
        out = self.places["work"] / step.name
        if step.gives == "rows":
            self._call(f"{step.command} --out {shlex.quote(str(part))}")
            rows = read(part)
        else:
            if not (out / "summary.json").exists():
                shutil.rmtree(out, ignore_errors=True)
                self._call(step.command)
            rows = [self._row_of_run(step, out)]
            if step.curves:
                logged = [{"run": rows[0]["name"], **row} for row in read(out / "metrics.jsonl")]
                self.log(step).write_text("".join(json.dumps(row) + "\n" for row in logged))
        if step.scores:
            part.unlink(missing_ok=True)
            self._call(f"{step.scores} --out {shlex.quote(str(part))}")
            for score in read(part):
                name = "wikitext2" if score["eval"] == "text" else "lambada"
                rows[0][name] = {k: v for k, v in score.items() if isinstance(v, float)}
        if self.is_git and any(str(row.get("commit", "")).endswith("-dirty") for row in rows):
            raise StepFailed("the tree was changed meanwhile")
        if not rows:
            raise StepFailed("it gave no rows")
        for row in rows:
            row["commit"] = self.commit
        lines = map(json.dumps, rows)
        part.write_text("".join(self._without_places(line) + "\n" for line in lines))
        part.replace(self.path(step))

    def _row_of_run(self, step: Step, out: Path) -> Row:
        code = (
            "import json, torch; from twell.workbench.bench.timing import environment; "
            f"gpu = {step.machine == 'gpu'} and torch.cuda.is_available(); "
            "print(json.dumps(environment(torch.device('cuda' if gpu else 'cpu'))))"
        )  # in a process of its own: this one must hold no memory of the GPU while the next step is measured
        said = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=_environment(), capture_output=True, text=True, check=True
        )
        where = json.loads(said.stdout)
        command = self._without_places(f"twell {step.command}".format(**self.places))
        return {
            "name": step.label or step.name,
            "command": command,
            **where,
            **json.loads((out / "summary.json").read_text()),
        }

    def _without_places(self, text: str) -> str:
        """No row names a folder of the machine it was measured on."""
        for place in self.places.values():
            text = text.replace(f"{place}/", "").replace(str(place), place.name)
        return text

    def _call(self, command: str) -> None:
        words = [word.format(**self.places) for word in shlex.split(command)]
        words = [sys.executable, *words[1:]] if words[0] == "python" else [*self.twell, *words]
        code = subprocess.run(words, cwd=ROOT, env=_environment(), check=False).returncode
        if code:
            raise StepFailed(f"exit code {code}")


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def replace_results(publisher: Publisher, steps: Sequence[Step], results: Path, keep: Sequence[str]) -> bool:
    """Replace the files of results/ whose steps are all finished, unless rows of another commit would remain there."""
    of_file: dict[str, list[Step]] = {}
    for step in steps:
        of_file.setdefault(step.file, []).append(step)
    complete = {file: found for file, found in of_file.items() if all(map(publisher.is_finished, found))}
    stays = {*complete, *keep, *logs(steps)}
    others = [path for path in sorted(results.glob("*.jsonl")) if path.stem not in stays]
    old = [path.name for path in others if {row.get("commit") for row in read(path)} != {publisher.commit}]
    if old:
        print(f"results/ stays as it is: rows of another commit would remain in {', '.join(old)}", file=sys.stderr)
        return False
    texts = {file: [publisher.path(step) for step in found] for file, found in complete.items()}
    for step in (step for found in complete.values() for step in found if step.curves):
        texts.setdefault(step.curves, []).append(publisher.log(step))
    for file, paths in texts.items():
        text = "".join(path.read_text(encoding="utf-8") for path in paths)
        part = results / f"{file}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(results / f"{file}.jsonl")
    print(f"replaced in results/: {', '.join(texts)}; now: make tables")
    return True


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS, twell: Sequence[str] = TWELL) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    parser.add_argument("--only", action="append", metavar="NAME", help="a step, or a file in results/; repeatable")
    parser.add_argument("--machine", choices=("gpu", "cpu"), default="gpu", help="whose steps to run")
    parser.add_argument("--trace", type=Path, help="a trace of a trained model (tools/trace_bench.py)")
    parser.add_argument("--data", type=Path, help="a folder with texts to train on and to evaluate on")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="start no step that would take longer"
    )
    parser.add_argument("--commit", help="the commit of this tree, where .git does not say it")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="FILE", help="a file whose old rows may stay; repeatable"
    )
    parser.add_argument(
        "--rows", type=Path, default=ROOT / "scratch" / "publish", help="where rows are kept until then"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    given = parser.parse_args(arguments)
    if unknown := set(given.only or ()) - {name for step in steps for name in (step.name, step.file)}:
        parser.error(f"no step or file is called {', '.join(sorted(unknown))}")
    commit = (given.commit or clean_commit())[:12] if not given.list or given.commit else ""
    places = {name: path.resolve() for name, path in (("trace", given.trace), ("data", given.data)) if path}
    publisher = Publisher(given.rows.resolve(), commit, places, twell, given.commit is None)
    chosen = [
        step
        for step in steps
        if step.machine == given.machine and (not given.only or {step.name, step.file} & {*given.only})
    ]
    if given.list:
        for step in chosen:
            state = "finished" if commit and publisher.is_finished(step, steps) else f"about {step.seconds:.0f} s"
            print(f"{step.name} ({step.file}.jsonl, {state}): {step.command}")
        print(f"{len(chosen)} steps, about {sum(step.seconds for step in chosen) / 60:.0f} minutes")
        return 0
    failed, left, started = [], [], time.monotonic()
    for number, step in enumerate(chosen, 1):
        if publisher.is_finished(step, steps):
            continue
        if missing := publisher.missing(step):
            left.append(f"{step.name} needs {' and '.join(missing)}")
            continue
        remaining = given.time_limit - (time.monotonic() - started)
        if remaining < step.seconds:
            left.append(f"{step.name}: no time, it takes about {step.seconds:.0f} s")
            continue
        print(f"[{number}/{len(chosen)}] {step.name}, about {step.seconds:.0f} s", flush=True)
        begun = time.monotonic()
        try:
            publisher.run(step)
        except (StepFailed, OSError, ValueError, KeyError) as error:
            failed.append(f"{step.name} failed: {error}")
            print(failed[-1], file=sys.stderr)
        else:
            print(f"{step.name}: {time.monotonic() - begun:.0f} s", flush=True)
    for line in (*failed, *left):
        print(line, file=sys.stderr)
    if failed or left:
        return 1 if failed else 2
    return 0 if replace_results(publisher, steps, given.results, given.keep) else 2


if __name__ == "__main__":
    sys.exit(main())
