"""Train a 0.5b model on 45M tokens, score it, and write rows for results/. On one H200, 8 to 11 minutes a run.

    python tools/real_run.py sparse --data DATA --out OUT             # or relu, silu: two epochs of 45M tokens
    python tools/real_run.py half-sparse-1 --data DATA --out OUT      # or half-relu-1: one epoch, seed 1

DATA holds train.u16.xz, val.u16, tokenizer.json and, in eval/, WikiText-2, LAMBADA and the seven tasks. The run is the
folder OUT/NAME. Its summary goes to OUT/runs.jsonl, its log to OUT/curves.jsonl, its scores to OUT/eval.jsonl.
``--pause-at STEP`` stops after that step's checkpoint; the same command without it resumes. ``--commit`` says which
commit this tree is, where .git does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPE = ("sequences_per_step=24", "micro_batch=24", "lr_warmup=100", "dead_after_tokens=5000000", "log_every=15")
EPOCH = 915  # steps
KINDS = {"silu": ("activation=silu",), "relu": ("l1=0", "plan_every=0"), "sparse": ("target_active=0.01",)}


def changes_of(name: str) -> list[str]:
    """The recipe of a run, as ``twell train`` takes it.

    >>> changes_of("half-relu-2")[-5:]
    ['steps=915', 'seed=2', 'eval_every=915', 'l1=0', 'plan_every=0']
    """
    half, _, rest = name.rpartition("half-")
    kind, _, seed = rest.partition("-")
    if kind not in KINDS or half or (seed and not seed.isdigit()):
        raise SystemExit(f"{name!r}: expected silu, relu or sparse, after half- for one epoch, before -N for a seed")
    steps = EPOCH if name.startswith("half-") else 2 * EPOCH
    return [*RECIPE, f"steps={steps}", f"seed={seed or 0}", f"eval_every={EPOCH}", *KINDS[kind]]


def train(folder: Path, data: Path, changes: list[str], pause_at: int | None, options: list[str]) -> bool:
    """Whether the run is finished."""
    command = [sys.executable, "-m", "twell", "train", "--out", str(folder)]
    if (folder / "recipe.json").exists():
        command += ["--resume", *options]
    else:
        files = {"--data": "train.u16.xz", "--validation": "val.u16", "--tokenizer": "tokenizer.json"}
        given = [argument for option, name in files.items() for argument in (option, str(data / name))]
        command += ["--preset", "0.5b", *given, *options, *changes]
    process = subprocess.Popen(command)
    while process.poll() is None:
        if pause_at is not None and (folder / f"checkpoint-{pause_at}" / "manifest.json").exists():
            process.send_signal(signal.SIGINT)
            process.wait()
            return False
        time.sleep(1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return True


def score(folder: Path, data: Path, limit: list[str]) -> list[dict[str, Any]]:
    """Rows of ``twell eval``."""
    tasks, rows = data / "eval", folder / "eval.jsonl"
    rows.unlink(missing_ok=True)
    command: list[Any] = [sys.executable, "-m", "twell", "eval", folder / "model", "--out", rows, *limit]
    command += ["--dtype", "bfloat16"]
    texts = ["--text", tasks / "wikitext2_raw_test.txt", "--last-words", tasks / "lambada_test.jsonl"]
    for what in (texts, ["--data", tasks]):
        subprocess.run([*map(str, [*command, *what])], check=True)
    return read(rows)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes to the recipe, for trials")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pause-at", type=int, metavar="STEP")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--limit", type=int, help="items of each task")
    parser.add_argument("--commit", help="the commit of this tree, where .git does not say it")
    given = parser.parse_intermixed_args()  # changes may follow options
    changes = [*changes_of(given.name), f"save_every={given.pause_at or 100_000}", *given.changes]
    folder, options = given.out / given.name, [] if given.no_compile else ["--compile"]
    given.out.mkdir(parents=True, exist_ok=True)
    if not train(folder, given.data, changes, given.pause_at, options):
        print(f"paused after step {given.pause_at}; the same command without --pause-at goes on")
        return
    scores = score(folder, given.data, [] if given.limit is None else ["--limit", str(given.limit)])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = {
        "gpu": summary["device"],
        "time": now,
        "commit": given.commit or commit(),
        "command": f"tools/real_run.py {given.name}",
    }
    append(given.out / "runs.jsonl", [{"run": given.name, **summary, **where}])
    append(given.out / "eval.jsonl", [{**row, "model": given.name} for row in scores])
    append(given.out / "curves.jsonl", [{"run": given.name, **row} for row in read(folder / "metrics.jsonl")])


if __name__ == "__main__":
    main()
