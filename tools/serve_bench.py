"""Tokens a second of ``twell serve``, sparse and dense, for 1, 8 and 32 clients that each ask one thing after another.

    python tools/serve_bench.py my-run/model --text book.txt --out rows.jsonl

The prompts are paragraphs of the text.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CLIENTS = (1, 8, 32)


def served(model: str, way: list[str], prompts: list[str], n_tokens: int) -> list[dict[str, Any]]:
    """Rows of one server; ``way``: its options."""
    command = [
        sys.executable,
        "-m",
        "twell",
        "serve",
        model,
        "--name",
        "model",
        "--engine",
        "twell",
        "--port",
        "0",
        *way,
    ]
    server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said: list[str] = []
        for line in server.stdout:
            said.append(line)
            if line.startswith("address:"):
                break
        else:
            raise SystemExit(f"twell serve {' '.join(way)}: failed\n{''.join(said[-5:])}")
        address = said[-1].split()[-1]
        threading.Thread(target=server.stdout.read, daemon=True).start()  # a full pipe would stop the server
        ask = functools.partial(_ask, address, n_tokens)
        rows: list[dict[str, Any]] = []
        for clients in CLIENTS:
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
    try:
        with urllib.request.urlopen(request) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{error}: {error.read().decode()}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new", type=int, default=128, metavar="N", help="tokens to generate for each prompt")
    given = parser.parse_args()
    prompts = [part for part in given.text.read_text(encoding="utf-8").split("\n\n") if 200 < len(part) < 800]
    if len(prompts) < 4 * max(CLIENTS):
        raise SystemExit(
            f"{given.text} has {len(prompts)} paragraphs of 200 to 800 characters: {4 * max(CLIENTS)} needed"
        )
    rows = [row for way in ([], ["--dense"]) for row in served(given.model, way, prompts, given.new)]

    import torch

    from twell.workbench.bench.timing import environment  # now that no server needs the GPU

    where = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with given.out.open("a", encoding="utf-8") as file:
        file.writelines(
            json.dumps({**row, "model": given.model, "new_tokens": given.new, **where}) + "\n" for row in rows
        )


if __name__ == "__main__":
    main()
