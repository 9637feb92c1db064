"""``twell serve``: clients that disconnect, that send nonsense, too much or nothing, and that have no access."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")

from serving import CONTEXT, HEAD, PROMPTS, VOCABULARY, Server, raw_request, served, wait_until
from twell.workbench.serve import engine, guard, running
from twell.workbench.serve import server as serve_server
from twell.workbench.serve.batched import Batched
from twell.workbench.serve.guard import is_safe_host

# -- clients that go away -----------------------------------------------------------------------------------


def leave(server: Server, *, stream: bool, after_a_piece: bool = False) -> None:
    """A client that asks for the longest answer possible and disconnects."""
    body = {"prompt": "Once", "temperature": 0, "max_tokens": CONTEXT - 10, "stream": stream}
    with server.send(raw_request(body)) as sock:
        if after_a_piece:
            assert sock.recv(1)
        else:
            wait_until(lambda: server.running() > 0)


@pytest.mark.parametrize("stream", [False, True])
def test_computing_stops_when_the_client_disconnects(either: Server, stream: bool) -> None:
    tokens: list[int] = []
    slowly = either.app.model.register_forward_hook(lambda *_: (tokens.append(1), time.sleep(0.02))[0])
    try:
        leave(either, stream=stream)
        wait_until(lambda: either.running() == 0)
        time.sleep(0.1)
        so_far = len(tokens)
        time.sleep(0.2)
    finally:
        slowly.remove()
    assert len(tokens) == so_far < CONTEXT - 10
    if isinstance(either.engine, Batched):
        scheduler = either.engine.manager.batch_processor.scheduler
        assert not scheduler.active_requests and not scheduler.waiting_requests
    assert either.complete_text("Once") == either.expected("Once")


def test_a_request_that_waits_can_be_cancelled(sequential: Server) -> None:
    with sequential.complete(max_tokens=200, stream=True) as stream:
        next(iter(stream))
        for _ in range(3):
            leave(sequential, stream=True)
        assert sequential.complete_text("x") == sequential.expected("x")


def test_half_a_request(server: Server) -> None:
    for part in (b"POST /v1/compl", HEAD + b"Content-Length: 100\r\n\r\n{"):
        with server.send(part):
            time.sleep(0.05)
    assert server.complete_text("x") == server.expected("x")


# -- bad requests -------------------------------------------------------------------------------------------

BAD: list[tuple[Any, str]] = [
    (b"", "no valid JSON"),
    (b"{", "no valid JSON"),
    (b'{"prompt": "x"', "no valid JSON"),
    (b'{"prompt": "\xff"}', "no valid JSON"),
    (b'{"prompt": "\\ud800"}', "no valid JSON"),
    (b"[" * 100_000, "no valid JSON"),
    (b"[]", "expected a JSON object"),
    (b'"x"', "expected a JSON object"),
    (b"null", "expected a JSON object"),
    ({}, "prompt: is missing"),
    ({"prompt": None}, "prompt: is missing"),
    ({"prompt": ""}, "prompt: the prompt is empty"),
    ({"prompt": []}, "prompt: the prompt is empty"),
    ({"prompt": [""]}, "prompt: the prompt is empty"),
    ({"prompt": [[]]}, "prompt: the prompt is empty"),
    ({"prompt": 5}, "prompt: expected a string or a list of token ids"),
    ({"prompt": {"text": "x"}}, "prompt: expected a string"),
    ({"prompt": [1.5]}, "prompt: expected a string"),
    ({"prompt": [True]}, "prompt: expected a string"),
    ({"prompt": ["x", 1]}, "prompt: expected a string"),
    ({"prompt": [1, "x"]}, "prompt: expected a string"),
    ({"prompt": [[1], "x"]}, "prompt: expected a string"),
    ({"prompt": ["x", ""]}, "prompt: the prompt is empty"),
    ({"prompt": ["x"] * 257}, "at most 256 prompts a request, here are 257"),
    ({"prompt": [VOCABULARY]}, f"between 0 and {VOCABULARY - 1}"),
    ({"prompt": [-1]}, "between 0"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1] * CONTEXT}, "context is 256 tokens, the prompt has 256"),
    ({"prompt": ["x", [1] * CONTEXT]}, "prompt: expected a string"),
    ({"prompt": [[1], [1] * 10_000]}, "context is 256 tokens, the prompt has 10,000"),
    ({"prompt": "x " * 300}, "context is 256 tokens, the prompt has 6"),
    ({"prompt": "x " * 100_000}, "more: 200,000 characters, and no token has more than"),
    ({"prompt": [1] * 200, "max_tokens": 57}, "the prompt has 200 and max_tokens asks for 57 more"),
    ({"prompt": "x", "max_tokens": 10**9}, "max_tokens asks for 1,000,000,000 more"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens: "),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens: 0 needs echo"),
    ({"prompt": "x", "max_tokens": 0, "echo": "yes"}, "echo: "),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens: "),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens: "),
    ({"prompt": "x", "max_tokens": True}, "max_tokens: "),
    ({"prompt": "x", "temperature": -0.1}, "temperature: "),
    ({"prompt": "x", "temperature": 2.1}, "temperature: "),
    ({"prompt": "x", "temperature": "hot"}, "temperature: "),
    (b'{"prompt": "x", "temperature": NaN}', "temperature: "),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature: "),
    ({"prompt": "x", "top_p": 0}, "top_p: "),
    ({"prompt": "x", "top_p": 1.5}, "top_p: "),
    ({"prompt": "x", "top_k": 0}, "top_k: "),
    ({"prompt": "x", "seed": -1}, "seed: "),
    ({"prompt": "x", "seed": 2**64}, "seed: "),
    ({"prompt": "x", "stop": ""}, "stop: a stop string must not be empty"),
    ({"prompt": "x", "stop": [5]}, "stop.0: "),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop: "),
    ({"prompt": "x", "stream": "yes"}, "stream: "),
    ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage: "),
    ({"prompt": "x", "model": 5}, "model: "),
    ({"prompt": "x", "n": 2}, "n: 2 is not supported here; vLLM serves more"),
    ({"prompt": "x", "min_p": 0.1}, "min_p: 0.1 is not supported here"),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "is not supported here; vLLM serves more"),
    ({"prompt": "x", "logprobs": 21}, "logprobs: "),
    ({"prompt": "x", "logprobs": -1}, "logprobs: "),
    ({"prompt": "x", "logprobs": True}, "logprobs: "),
    ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty: 0.5 is not supported here"),
    ({"prompt": "x", "max_new_tokens": 5}, "max_new_tokens: 5 is not supported here"),
]


def test_bad_requests_say_what_is_wrong(server: Server) -> None:
    for body, message in BAD:
        status, answer = server.post("/v1/completions", body)
        assert status == 400 and message in answer["error"]["message"], (repr(body)[:80], status, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    assert server.complete_text("Once") == server.expected("Once")


def test_fields_that_change_nothing_are_taken(server: Server) -> None:
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 12, "user": "me", "n": 1, "logprobs": None, "echo": False}
    status, answer = server.post("/v1/completions", {**body, "presence_penalty": 0.0, "logit_bias": {}, "stop": None})
    assert (status, answer["choices"][0]["text"]) == (200, server.expected("Once"))


def test_other_models_paths_and_kinds_of_bodies(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here, only 'tiny'"):
        server.client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-4")
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    for path, status in (("/v1/embeddings", 404), ("/", 404), ("/v1/models", 405)):
        got, answer = server.post(path, {})
        assert got == status and path in answer["error"]["message"]
    assert server.get("/v1/completions")[0] == 405
    status, answer = server.post("/v1/completions", {"prompt": "x"}, **{"Content-Type": "text/plain"})
    assert status == 415 and "Content-Type: application/json" in answer["error"]["message"]
    status, answer = server.post("/v1/completions", b" " * (8 * 2**20 + 1))
    assert status == 413 and "larger than" in answer["error"]["message"]


def test_a_storm(either: Server) -> None:
    """Good, bad and leaving clients at once: the good ones get their answers, and nothing is left over."""
    chance = random.Random(0)
    expected = {prompt: either.expected(prompt) for prompt in PROMPTS}

    def somebody(kind: int) -> bool:
        prompt = PROMPTS[kind % len(PROMPTS)]
        if kind % 4 == 0:
            body, message = BAD[kind % len(BAD)]
            status, answer = either.post("/v1/completions", body)
            return status == 400 and message in answer["error"]["message"]
        if kind % 4 == 1:
            leave(either, stream=kind % 8 == 1, after_a_piece=kind % 8 == 1)
            return True
        hot = {"temperature": 1.5} if kind % 8 == 2 else {}
        text = either.complete_text(prompt, **hot)
        return bool(hot) or text == expected[prompt]

    kinds = [chance.randrange(1000) for _ in range(48)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(somebody, kinds))
    wait_until(lambda: either.running() == 0)
    assert either.complete_text("Once") == either.expected("Once")


# -- too much, too slowly -----------------------------------------------------------------------------------


def test_texts_far_too_long_are_refused_before_tokenizing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def __call__(self, text: str, **how: Any) -> Any:
            seen.append(len(text))
            return self.tokenizer(text, **how)

    prompts = server.app.prompts
    monkeypatch.setattr(prompts, "lanes", [(Counting(tokenizer), lock) for tokenizer, lock in prompts.lanes])
    status, answer = server.post("/v1/completions", {"prompt": "x" * 7_000_000})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded" and not seen


def test_a_long_text_does_not_block_short_ones(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = server.app.prompts
    waits, (slow, lock) = threading.Event(), prompts.lanes[1]

    def wait_and_encode(text: str, **how: Any) -> Any:
        assert waits.wait(30)
        return slow(text, **how)

    monkeypatch.setattr(prompts, "lanes", [prompts.lanes[0], (wait_and_encode, lock)])
    monkeypatch.setattr(prompts, "longest_token", 100)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, "/v1/completions", {"prompt": "x" * 5000})
        wait_until(lock.locked)
        assert server.complete_text("Once") == server.expected("Once")
        waits.set()
        assert long.result()[0] == 400


def test_the_number_of_waiting_requests_is_limited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_JOBS", 2)
    with pytest.raises(openai.InternalServerError, match=r"too many requests are waiting \(at most 2\)"):
        server.complete(["x", "y", "z"])
    assert len(server.complete(["x", "y"]).choices) == 2


def test_connections_that_send_nothing_are_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(serve_server, "READ_SECONDS", 0.1)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(folder, batched=False) as one:
        for sent, answer in (
            (b"", b""),
            (b"POST /v1/compl", b""),
            (HEAD + b"Content-Length: 100\r\n\r\n{", b"408"),
            (whole, b"200"),
            (whole + whole[:20], b"200"),
        ):
            with one.send(sent) as sock:
                said = b"".join(iter(lambda sock=sock: sock.recv(4096), b""))  # until the server closes it
                assert (answer in said[:12]) if answer else said == b"", (sent, said)
        slow = one.app.model.register_forward_hook(lambda *_: time.sleep(0.05))
        assert one.complete_text(max_tokens=8) == one.expected("Once", 8)  # an answer may take longer
        slow.remove()


def test_a_client_that_does_not_read_is_dropped(sequential: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(sequential.app.tokenizer, "decode", lambda ids, **_: "x" * 200_000 * len(ids))
    with sequential.send(raw_request({"prompt": [5], "temperature": 0, "max_tokens": 250, "stream": True})):
        wait_until(lambda: sequential.running() == 1)
        wait_until(lambda: sequential.running() == 0)


# -- who may ask --------------------------------------------------------------------------------------------


def test_dns_rebinding_is_refused(server: Server) -> None:
    """DNS rebinding: the page's name is pointed at this machine, and the browser sends it as Host."""
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        status, answer = server.get("/v1/models", Host=host)
        assert status == 403 and "--allow-host" in answer["error"]["message"], host
    for host in ("127.0.0.1", "127.0.0.1:9", "localhost:8000", "LOCALHOST", "[::1]:8000", "192.168.1.5"):
        assert server.get("/v1/models", Host=host)[0] == 200, host
    assert is_safe_host("Box.lan:80", {"box.lan"}) and not is_safe_host("other.lan", {"box.lan"})


def test_requests_need_the_key(folder: Path) -> None:
    with served(folder, batched=False, api_key="sésame") as one:
        for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "sesame"}):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                status, answer = one.get(path, **header)
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert one.post("/v1/completions", {"prompt": "x"}, **header)[0] == 401
        assert one.get("/health")[0] == 200
        right = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
        assert one.get("/v1/models", **right, Host="llm.example")[0] == 200  # with the key any Host will do


def test_errors_inside_the_server_stay_in_its_log(server: Server) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("cannot read /home/me/secret")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.app.prompts, "check", fail)
        status, answer = server.post("/v1/completions", {"prompt": [5]})
        assert status == 500 and answer["error"]["message"] == "the server failed; its log says why"
    handle = server.app.model.register_forward_pre_hook(lambda *_: handle.remove() or fail())
    status, answer = server.post("/v1/completions", {"prompt": [5]})
    assert status == 500 and "the model failed" in answer["error"]["message"] and "/home" not in str(answer)
    assert server.complete_text() == server.expected("Once")  # the next one is computed
    assert server.get("/health")[0] == 200


# -- the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [30.0, 0.1])
def test_sigterm_lets_answers_end(folder: Path, seconds: float) -> None:
    """New requests are refused at once, those under way go on for a while."""
    with served(folder, batched=True) as one:
        one.running_as.drain_seconds = seconds
        expected = one.expected("Once", 60)
        one.app.model.register_forward_hook(lambda *_: time.sleep(0.01))
        stream = one.complete(max_tokens=60, stream=True)
        text = next(iter(stream)).choices[0].text
        one.running_as.handle_exit(signal.SIGTERM, None)
        assert one.engine.problem == "the server is stopping"
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
            one.complete()
        if seconds > 1:
            assert text + "".join(part.choices[0].text for part in stream) == expected
        else:
            with pytest.raises(openai.APIError, match="the server is stopping"):
                list(stream)


def test_the_server_leaves_when_its_engine_dies(folder: Path) -> None:
    with served(folder, batched=True) as one:
        one.app.model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the model failed"):
            one.complete()
        wait_until(lambda: one.running_as.should_exit)
        assert one.engine.died
