"""A real ``twell serve`` under many clients at once, of which some leave, some send nonsense, and one failing step.

Every good request must get the text that ``model.generate`` gives alone, greedily, or a 5xx that names no path, and
that only if it was under way when the step failed. Prompts have one token up to the whole context, as text or as
tokens, one or several, answered whole or as a stream, or scored. At the end the process must be idle, healthy and
without a traceback in its log but those of the failed step, and leave on SIGTERM with exit code 0.

    python tests/adversarial/clients.py --clients 64 --seconds 60 --bad 200
    python tests/adversarial/clients.py --no-batching               # the other engine
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

SECRET = "cannot read /home/me/secret"
KINDS = {"whole": 5, "stream": 4, "several": 1, "scored": 1, "leaves": 4, "half": 1}  # of requests, and how often


class Asked(NamedTuple):
    prompt: str | list[int]
    n_tokens: int  # of the prompt
    max_tokens: int
    fills_context: bool
    answer: str


# -- the server ---------------------------------------------------------------------------------------------------


def serve(args: list[str]) -> None:
    """``twell serve``, of which a step of the model fails after each SIGUSR1."""
    from twell.workbench import cli
    from twell.workbench.cli import serve as serve_command

    wanted = threading.Event()

    def load_and_watch(*args: Any) -> Any:
        model, tokenizer = load(*args)

        def fail(module: Any, args: Any, kwargs: Any) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            if wanted.is_set() and ids.shape[1] > 1 and module is model:  # not its twin, which scores prompts
                wanted.clear()
                raise RuntimeError(SECRET)

        model.register_forward_pre_hook(fail, with_kwargs=True)
        return model, tokenizer

    load = serve_command.load_model
    serve_command.load_model = load_and_watch
    signal.signal(signal.SIGUSR1, lambda *_: wanted.set())
    sys.argv = ["twell", "serve", *args]
    cli.main()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"address: +http://(\S+)/v1", line):
            return found[1]
    raise RuntimeError("the server did not start")


# -- what is asked, and what is right -----------------------------------------------------------------------------


def make_requests(folder: Path, n: int, chance: random.Random) -> list[Asked]:
    """Prompts of all lengths and their answers, but for those that rounding could change."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import twell
    from serving import CONTEXT, VOCABULARY
    from twell.train.data import SAMPLE

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    twell.desparsify_(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text, made = SAMPLE.read_text(encoding="utf-8"), []
    while len(made) < n:
        n_tokens = chance.choice((1, CONTEXT - 1, chance.randrange(1, 20), chance.randrange(1, CONTEXT)))
        prompt: Any = [chance.randrange(1, VOCABULARY) for _ in range(n_tokens)]
        if chance.random() < 0.5:
            start = chance.randrange(len(text) - 1000)
            prompt = text[start : start + n_tokens]
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        room = CONTEXT - len(ids)
        max_tokens = room if chance.random() < 0.05 else min(room, chance.randrange(1, 24))
        how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": max_tokens}
        tokens = torch.tensor([ids])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **how)
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 1e-3 * logits.std():
            answer = tokenizer.decode(out.sequences[0, len(ids) :], skip_special_tokens=True)
            made.append(Asked(prompt, len(ids), max_tokens, max_tokens == room, str(answer)))
    return made


# -- clients --------------------------------------------------------------------------------------------------------


class Load:
    """What all clients share: whom to ask, until when, and what came of it."""

    def __init__(self, address: str, requests: list[Asked], bad: list[tuple[Any, str]], seconds: float) -> None:
        self.address, self.requests, self.bad_requests = address, requests, bad
        self.ends = time.monotonic() + seconds
        self.failed = float("inf")  # when a step was made to fail
        self.kinds: collections.Counter[str] = collections.Counter()
        self.answers: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def send(self, body: bytes | dict[str, Any]) -> tuple[http.client.HTTPConnection, float]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        started = time.monotonic()
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        return connection, started

    def client(self, seed: str, n_bad: int) -> None:
        """One request after the other. Bad ones are sent in between, and the rest of them at the end."""
        chance = random.Random(seed)
        while time.monotonic() < self.ends or n_bad:
            is_bad = n_bad and (time.monotonic() >= self.ends or chance.random() < 0.1)
            kind = "bad" if is_bad else chance.choices(list(KINDS), list(KINDS.values()))[0]
            n_bad -= bool(is_bad)
            try:
                said = getattr(self, kind)(chance)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            self.kinds[kind] += 1
            if said:
                self.wrong.append(f"{kind}: {said}")

    def wrong_error(self, status: int, error: dict[str, Any], started: float) -> str | None:
        """Whether an answer's error is one that a good request may get."""
        self.answers[f"status {status}"] += 1
        was_under_way = started < self.failed + 5 and time.monotonic() >= self.failed
        is_right = status in (500, 503) and "/" not in json.dumps(error) and was_under_way
        return None if is_right else f"status {status}: {error}"

    def good(self, asked: list[Asked], **how: Any) -> str | None:
        prompts = [one.prompt for one in asked]
        body = {"prompt": prompts if len(asked) > 1 else prompts[0], "temperature": 0, **how}
        connection, started = self.send({"max_tokens": asked[0].max_tokens, **body})
        with contextlib.closing(connection):
            response = connection.getresponse()
            content = response.read().decode()
        is_stream = response.status == 200 and how.get("stream")
        events = content.removesuffix("\n\n").split("\n\n") if is_stream else [content, "data: [DONE]"]
        if events[-1] != "data: [DONE]":
            return f"the stream has no end: {events[-1]}"
        parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        for part in parts:
            if "error" in part:
                return self.wrong_error(500 if response.status == 200 else response.status, part["error"], started)
        texts = ["".join(c["text"] for p in parts for c in p["choices"] if c["index"] == i) for i in range(len(asked))]
        for one, text in zip(asked, texts, strict=True):
            wanted = (one.prompt if how.get("echo") else "") + one.answer
            if text != wanted:
                return f"{one.n_tokens} tokens, {one.max_tokens} more: {text!r} instead of {wanted!r}"
        self.answers["right"] += 1
        self.answers["right of whole contexts"] += any(one.fills_context for one in asked)
        return None

    def whole(self, chance: random.Random) -> str | None:
        return self.good([chance.choice(self.requests)])

    def stream(self, chance: random.Random) -> str | None:
        return self.good([chance.choice(self.requests)], stream=True)

    def several(self, chance: random.Random) -> str | None:
        """Of one kind and with as many new tokens, as the protocol has it."""
        first = chance.choice(self.requests)
        alike = [r for r in self.requests if type(r.prompt) is type(first.prompt) and r.max_tokens == first.max_tokens]
        return self.good([first, *chance.sample(alike, min(len(alike), 3))], stream=chance.random() < 0.5)

    def scored(self, chance: random.Random) -> str | None:
        texts = [r for r in self.requests if isinstance(r.prompt, str)]
        return self.good([chance.choice(texts)], echo=True, logprobs=chance.randrange(3))

    def leaves(self, chance: random.Random) -> None:
        """Hangs up: at once, after a while, or in the middle of a stream."""
        asked, stream = chance.choice(self.requests), chance.random() < 0.5
        connection, _ = self.send({"prompt": asked.prompt, "max_tokens": asked.max_tokens, "stream": stream})
        with contextlib.closing(connection):
            time.sleep(chance.choice((0, chance.random() * 0.5)))
            if stream and chance.random() < 0.5:
                connection.getresponse().read(1)

    def half(self, chance: random.Random) -> None:
        """Sends a part of a request and hangs up."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        with contextlib.closing(connection):
            connection.connect()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            whole = f"{head}Content-Length: 100\r\n\r\n" + '{"prompt": "Once upon a time'
            connection.sock.sendall(whole[: chance.randrange(len(whole))].encode())
            time.sleep(chance.random() * 0.2)

    def bad(self, chance: random.Random) -> str | None:
        body, message = chance.choice(self.bad_requests)
        connection, _ = self.send(body)
        with contextlib.closing(connection):
            response = connection.getresponse()
            error = json.loads(response.read())["error"]["message"]
        if response.status == 400 and message in error:
            return None
        return f"{repr(body)[:80]}: status {response.status}: {error}"


# -- all of it ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="A server under many clients, and one failing step.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--bad", type=int, default=200, help="bad requests")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-batching", action="store_true", help="the engine that computes one at a time")
    options = parser.parse_args()
    from rich.progress import Progress

    from serving import make_model, request, wait_until
    from test_serve_clients import BAD
    from twell.train.run import quiet_libraries

    quiet_libraries()
    with tempfile.TemporaryDirectory() as work, Progress() as progress, contextlib.ExitStack() as at_the_end:
        bar = progress.add_task("what model.generate answers", total=None)
        folder, log = make_model(Path(work) / "model"), Path(work) / "log"
        requests = make_requests(folder, options.prompts, random.Random(options.seed))
        progress.update(bar, total=1, completed=1)
        args = [str(folder), "--port", "0", "--name", "tiny", *(["--no-batching"] if options.no_batching else [])]
        with log.open("w") as errors:
            command = [sys.executable, __file__, "serve", *args]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        at_the_end.callback(process.kill)
        load, memory = Load(address_of(process), requests, BAD, options.seconds), [resident(process)]
        fails_at = load.ends - options.seconds * random.Random(options.seed).uniform(0.3, 0.7)
        threads = []
        for i in range(options.clients):
            n_bad = options.bad // options.clients + (i < options.bad % options.clients)
            threads.append(threading.Thread(target=load.client, args=(f"{options.seed} {i}", n_bad)))
            threads[-1].start()
        bar = progress.add_task(f"{options.clients} clients", total=options.seconds)
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            progress.update(bar, completed=options.seconds - max(0.0, load.ends - time.monotonic()))
            if load.failed == float("inf") and time.monotonic() > fails_at:
                load.failed = time.monotonic()
                process.send_signal(signal.SIGUSR1)
        load.failed = float("inf")  # from here on no error is right
        try:
            wait_until(lambda: request(load.address, "GET", "/health") == (200, {"status": "ok", "running": 0}))
            load.wrong += [f"at the end: {said}" for one in requests[:20] if (said := load.good([one]))]
            memory.append(resident(process))
            process.send_signal(signal.SIGTERM)
            if code := process.wait(60):
                load.wrong.append(f"the server left with exit code {code}")
        except Exception as error:
            load.wrong.append(f"the server is not healthy: {type(error).__name__}: {error}")
        logged = log.read_text()
    n_planted, n_logged = len(re.findall(rf"^RuntimeError: {SECRET}$", logged, re.M)), logged.count("Traceback (")
    if n_logged != n_planted or not n_planted:
        load.wrong.append(f"{n_logged} tracebacks in the log, {n_planted} of the failed step:\n{logged[-4000:]}")
    print(f"{load.kinds.total():,} requests: " + ", ".join(f"{name} {n:,}" for name, n in load.kinds.most_common()))
    print("answers: " + ", ".join(f"{name} {n:,}" for name, n in load.answers.most_common()))
    print(f"memory of the server: {memory[0]} MB before, {memory[-1]} MB after")
    print(f"{len(load.wrong)} wrong")
    for line in load.wrong[:20]:
        print(line)
    return 1 if load.wrong else 0


def resident(process: subprocess.Popen[str]) -> int:
    import psutil

    return int(psutil.Process(process.pid).memory_info().rss / 1e6)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests share
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
    else:
        sys.exit(main())
