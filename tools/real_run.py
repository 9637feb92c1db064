"""Train 0.5b models on 45M tokens, score them, and write rows for results/. On one H200, 8 to 11 minutes a run.

    python tools/real_run.py sparse relu silu --data DATA --out OUT     # two epochs of 45M tokens each
    python tools/real_run.py half-sparse-1 half-relu-1 --data DATA --out OUT    # one epoch, seed 1
    python tools/real_run.py sparse --speed --data DATA --out OUT       # then: how fast is the trained model? 5 minutes

DATA holds train.u16.xz, val.u16, val.txt, tokenizer.json and, in eval/, WikiText-2, LAMBADA and the seven tasks. A run
is the folder OUT/NAME. Its summary goes to OUT/runs.jsonl, its log to OUT/curves.jsonl, its scores to OUT/eval.jsonl,
its speed on val.txt (whole passes, steps of decoding, a server) and its FP8 losses to OUT/speed.jsonl. Half runs are
not scored: they are for the spread of the loss. Repeated, the command scores a finished run again, and its new rows
replace the old ones. An interrupted run has no checkpoint: delete its folder, and it starts again. ``--commit`` says
which commit this tree is, where .git does not.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RECIPE = ("sequences_per_step=24", "micro_batch=24", "lr_warmup=100", "dead_after_tokens=5000000", "log_every=15")
EPOCH = 915  # steps
KINDS = {"silu": ("activation=silu",), "relu": ("l1=0", "plan_every=0"), "sparse": ("target_active=0.01",)}
BUILT_IN = ("--engine", "twell", "--port", "0")
SPEED = {
    "whole passes": [
        *["bench", "model", "MODEL", "--text", "TEXT", "--layers", "--seconds", "2"],
        *(word for shape in ("1x256", "1x2048", "8x2048", "32x2048") for word in ("--shape", shape)),
    ],
    "decoding": [
        *["bench", "decode", "MODEL", "--text", "TEXT", "--seconds", "2"],
        *(word for batch in ("1", "8", "32", "64") for word in ("--batch", batch)),
    ],
    "FP8": ["eval", "MODEL", "--fp8", "--text", "TOKENS"],
}


def changes_of(name: str) -> list[str]:
    """The recipe of a run, as ``twell train`` takes it.

    >>> changes_of("half-relu-2")[-5:]
    ['steps=915', 'seed=2', 'eval_every=915', 'l1=0', 'plan_every=0']
    """
    match = re.fullmatch(rf"(half-)?({'|'.join(KINDS)})(?:-([0-9]+))?", name)
    if match is None:
        raise SystemExit(f"{name!r}: expected silu, relu or sparse, after half- for one epoch, before -N for a seed")
    half, kind, seed = match.groups()
    steps = EPOCH if half else 2 * EPOCH
    return [*RECIPE, "save_every=100000", f"steps={steps}", f"seed={seed or 0}", f"eval_every={EPOCH}", *KINDS[kind]]


def train(folder: Path, data: Path, changes: list[str], options: list[str]) -> None:
    files = {"--data": "train.u16.xz", "--validation": "val.u16", "--tokenizer": "tokenizer.json"}
    given = [argument for option, name in files.items() for argument in (option, str(data / name))]
    command = [sys.executable, "-m", "twell", "train", "--out", str(folder), "--preset", "0.5b"]
    subprocess.run([*command, *given, *options, *changes], check=True)


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


def measure(folder: Path, data: Path, commands: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Rows of the trained model's speed, and its loss in FP8. A command that fails is reported; the others run."""
    rows = folder / "speed.jsonl"
    rows.unlink(missing_ok=True)
    places = {"MODEL": str(folder / "model"), "TEXT": str(data / "val.txt"), "TOKENS": str(data / "val.u16")}
    for name, command in commands.items():
        whole = [sys.executable, "-m", "twell", *(places.get(word, word) for word in command), "--out", str(rows)]
        if subprocess.run(whole, check=False).returncode:
            print(f"{name}: failed", file=sys.stderr)
    prompts = (data / "val.txt").read_text(encoding="utf-8").split("\n\n")
    prompts = [text for text in prompts if 200 < len(text) < 800]
    for way in ([], ["--dense"]):
        try:
            append(rows, served(places["MODEL"], way, prompts))
        except OSError as error:
            print(f"twell serve {' '.join(way)}: {error}", file=sys.stderr)
    return read(rows) if rows.exists() else []


def served(model: str, way: list[str], prompts: list[str], n_tokens: int = 128) -> list[dict[str, Any]]:
    """Tokens a second of ``twell serve`` with 1, 8 and 32 clients that each send prompts one after the other."""
    command = [sys.executable, "-m", "twell", "serve", model, "--name", "model", *BUILT_IN, *way]
    server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said: list[str] = []
        for line in server.stdout:
            said.append(line)
            if line.startswith("address:"):
                break
        else:
            print(f"twell serve {' '.join(way)}: failed\n{''.join(said[-5:])}", file=sys.stderr)
            return []
        address = said[-1].split()[-1]
        threading.Thread(target=server.stdout.read, daemon=True).start()  # a full pipe would stop the server
        ask = functools.partial(_ask, address, n_tokens)
        rows: list[dict[str, Any]] = []
        for clients in (1, 8, 32):
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(ask, prompts[:clients]))
                begin = time.perf_counter()
                tokens = sum(pool.map(ask, prompts[clients : 4 * clients]))
                rate = tokens / (time.perf_counter() - begin)
            rows.append({"bench": "serve", "dense": bool(way), "clients": clients, "tokens_per_second": round(rate, 1)})
        return rows
    finally:
        server.kill()
        server.wait()


def _ask(address: str, n_tokens: int, prompt: str) -> int:
    """How many tokens the answer has."""
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def replace(path: Path, rows: list[dict[str, Any]], key: str) -> None:
    """Write rows instead of those of the same run, whose name is under ``key``."""
    names = {row[key] for row in rows}
    kept = [row for row in read(path) if row[key] not in names] if path.exists() else []
    path.unlink(missing_ok=True)
    append(path, kept + rows)


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def run(name: str, given: argparse.Namespace) -> None:
    """One run, from training to its rows; or, with ``--speed``, the speed of its model."""
    folder = given.out / name
    where = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": given.commit or commit(),
        "command": f"tools/real_run.py {name}{' --speed' if given.speed else ''}",
    }
    if given.speed:
        rows = measure(folder, given.data, SPEED)
        replace(given.out / "speed.jsonl", [{**row, **where, "model": name} for row in rows], "model")
        return
    changes = [argument for argument in given.names if "=" in argument]
    if not (folder / "summary.json").exists():
        train(folder, given.data, [*changes_of(name), *changes], [] if given.no_compile else ["--compile"])
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        replace(given.out / "runs.jsonl", [{"run": name, **summary, **where, "gpu": summary["device"]}], "run")
        curve = [{"run": name, **row} for row in read(folder / "metrics.jsonl")]
        replace(given.out / "curves.jsonl", curve, "run")
    limit = [] if given.limit is None else ["--limit", str(given.limit)]
    scores = [] if name.startswith("half-") else score(folder, given.data, limit)
    replace(given.out / "eval.jsonl", [{**row, "model": name} for row in scores], "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of runs; KEY=VALUE changes the recipe, for trials")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--limit", type=int, help="items of each task")
    parser.add_argument("--commit", help="the commit of this tree, where .git does not say it")
    parser.add_argument("--speed", action="store_true", help="measure trained models instead")
    given = parser.parse_intermixed_args()  # changes may follow options
    given.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in given.names if "=" not in name]
    for name in names:
        changes_of(name)  # a wrong name is told before the first run
    for name in names:
        run(name, given)


if __name__ == "__main__":
    main()
