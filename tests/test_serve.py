"""``twell serve``: OpenAI's client over loopback, many clients, clients that go away, clients that send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from command_line import Twell

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
uvicorn = pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig

import twell
from twell import cpu, serve
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.hf.text import TextStream
from twell.nn import SparseFFNBase
from twell.serve.jobs import Job, Sampler
from twell.serve.running import Running
from twell.serve.text import UntilStop
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import train_bpe

VOCABULARY, CONTEXT = 320, 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # so that tokens differ, and few logits are close
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["Once upon a time", "x", "The king " * 20, "é🦊", " ", "\n\n", "What is", "a b c d e f g"] * 2


# ---------------------------------------------------------------------------------------------------------
# A model, and servers of it
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as ``twell train`` leaves one, with random weights."""
    path = tmp_path_factory.mktemp("my-run") / "model"
    torch.manual_seed(0)
    model = LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**SHAPE, num_key_value_heads=2))
    with torch.no_grad():
        model.lm_head.weight[0] = 0  # no greedy answer ends by itself
    model.save_pretrained(path)
    train_bpe(["".join(read_texts(SAMPLE))[:50_000]], VOCABULARY).save_pretrained(path)
    return path


class Server(NamedTuple):
    url: str
    client: Any
    app: serve.ModelServer
    expected: Callable[..., str]  # the text that model.generate gives, computed before a server had the model

    @property
    def engine(self) -> Any:
        return self.app.engine

    def complete(self, prompt: Any = "Once", **how: Any) -> Any:
        how = {"temperature": 0, "max_tokens": 12, **how}
        return self.client.completions.create(model="tiny", prompt=prompt, **how)

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        return post(self.url, path, body, **headers)

    def running(self) -> int:
        return int(get(self.url, "/health")[1]["running"])


def post(url: str, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _request(url, "POST", path, data, {"Content-Type": "application/json", **headers})


def get(url: str, path: str) -> tuple[int, dict[str, Any]]:
    return _request(url, "GET", path, None, {})


def _request(url: str, *request: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(*request)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@contextlib.contextmanager
def served(folder: Path, *, batched: bool, chat: bool = False, **changes: Any) -> Iterator[Server]:
    """A server in this process: uvicorn in a thread, on a port of loopback."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    model.generation_config.update(**changes)
    twin: Any = AutoModelForCausalLM.from_pretrained(folder).eval()  # batching may change how a model attends
    twin.generation_config.update(**changes)
    twell.desparsify_(twin)

    def expected(prompt: str, max_tokens: int = 12, special: bool = True) -> str:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
        ids = twin.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return str(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))

    engine, why_not = serve.choose_engine(model, 4096) if batched else (serve.OneAtATime(model), "asked for")
    assert (why_not is None) == batched
    with engine:
        app = serve.ModelServer(model, tokenizer, "tiny", engine, CONTEXT)
        sock = serve.bind("127.0.0.1", 0)
        server = Running(app)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        wait_until(lambda: server.started)
        try:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
                yield Server(url, client, app, expected)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with served(folder, batched=True) as one:
        yield one


@pytest.fixture(scope="module")
def sequential(folder: Path) -> Iterator[Server]:
    with served(folder, batched=False) as one:
        yield one


@pytest.fixture(params=["server", "sequential"])
def either(request: pytest.FixtureRequest) -> Server:
    one: Server = request.getfixturevalue(request.param)
    return one


@pytest.fixture(scope="module")
def chat_server(folder: Path) -> Iterator[Server]:
    with served(folder, batched=True, chat=True) as one:
        yield one


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------
# Right answers
# ---------------------------------------------------------------------------------------------------------


def test_greedy_is_what_generate_gives(either: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse_calls = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args, **kw: sparse_calls.append(1) or forward(*args, **kw))
    for prompt in PROMPTS[:8]:
        whole = either.complete(prompt)
        assert whole.choices[0].text == either.expected(prompt)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 12
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert sparse_calls, "the sparse path was not taken"


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_streamed_pieces_are_the_whole_text(either: Server, max_tokens: int) -> None:
    for prompt in PROMPTS[:4]:
        how = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        *parts, last, usage = either.complete(prompt, **how)
        assert "".join(part.choices[0].text for part in parts) == either.expected(prompt, max_tokens)
        assert {part.choices[0].finish_reason for part in parts} <= {None}
        assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
        assert usage.choices == [] and usage.usage.completion_tokens == max_tokens
        assert len({part.id for part in (*parts, last, usage)}) == 1


def test_text_streams_while_it_is_made(server: Server) -> None:
    with server.complete(max_tokens=200, stream=True) as stream:
        next(iter(stream))
        assert server.running() == 1  # the first piece is here, the last is not made


def test_an_end_of_text_token_ends_it(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = generated(model, [[5, 6, 7]], 12)[0]
    with served(folder, batched=True, eos_token_id=[0, tokens[6]]) as one:
        whole = one.complete([5, 6, 7], max_tokens=100)
        n = tokens.index(tokens[6]) + 1
        assert whole.usage.completion_tokens == n
        assert whole.choices[0].text == one.app.tokenizer.decode(tokens[:n], skip_special_tokens=True)
        assert whole.choices[0].finish_reason == "stop"
        assert one.complete([5, 6, 7], max_tokens=n).choices[0].finish_reason == "stop"
        *parts, last = one.complete([5, 6, 7], max_tokens=100, stream=True)
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        assert last.choices[0].finish_reason == "stop"


def test_token_ids_are_a_prompt(server: Server) -> None:
    ids = server.app.tokenizer("Once upon").input_ids
    for prompt in (ids, [ids], ["Once upon"]):
        assert server.complete(prompt).choices[0].text == server.expected("Once upon")


def test_a_completion_has_16_tokens_unless_told(server: Server) -> None:
    answer = server.client.completions.create(model="tiny", prompt="Once", temperature=0)
    assert answer.usage.completion_tokens == 16
    near_the_end = [5] * (CONTEXT - 3)
    assert server.complete(near_the_end, max_tokens=None).usage.completion_tokens == 3
    assert server.complete([5] * (CONTEXT - 3), max_tokens=3).usage.completion_tokens == 3


def test_stop_strings(either: Server) -> None:
    text = either.expected("Once", 40)
    stop = text[10:13]
    for stops in (stop, [stop], ["never seen", stop, text[20:24]]):
        answer = either.complete("Once", max_tokens=40, stop=stops).choices[0]
        assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
        *parts, last = either.complete("Once", max_tokens=40, stop=stops, stream=True)
        assert "".join(part.choices[0].text for part in parts) == answer.text
        assert last.choices[0].finish_reason == "stop"
    wait_until(lambda: either.running() == 0)  # what comes after a stop string is not computed


def test_sixteen_clients_at_once(either: Server) -> None:
    expected = [either.expected(prompt, 10 + i) for i, prompt in enumerate(PROMPTS)]
    barrier = threading.Barrier(len(PROMPTS))

    def ask(i: int) -> str:
        barrier.wait()
        how = {"max_tokens": 10 + i}
        if i % 2:
            return str(either.complete(PROMPTS[i], **how).choices[0].text)
        return "".join(part.choices[0].text for part in either.complete(PROMPTS[i], stream=True, **how))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == expected
    assert either.running() == 0


def test_requests_are_computed_together(server: Server) -> None:
    """Sixteen answers take about as many steps of the model as one."""
    steps: list[int] = []
    hook = server.app.model.register_forward_hook(lambda *_: steps.append(1))
    try:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: server.complete(max_tokens=100), range(16)))
    finally:
        hook.remove()
    assert len(steps) < 16 * 100 / 2


# ---------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------


def test_every_request_is_sampled_in_its_own_way(server: Server) -> None:
    """A greedy client is not touched by hot ones beside it, and a seed gives the same alone and in company."""

    def seeded(seed: int) -> str:
        return str(server.complete("Once", temperature=1.5, seed=seed, max_tokens=30).choices[0].text)

    alone = [seeded(seed) for seed in (1, 2)]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(12) as pool:
        hot = [pool.submit(seeded, seed) for seed in (1, 2) * 4]
        cold = [pool.submit(server.complete, "Once", max_tokens=30) for _ in range(4)]
        assert [future.result() for future in hot] == alone * 4
        assert {future.result().choices[0].text for future in cold} == {server.expected("Once", 30)}


def test_both_engines_draw_the_same(server: Server, sequential: Server) -> None:
    how = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "max_tokens": 30, "extra_body": {"top_k": 40}}
    assert server.complete(**how).choices[0].text == sequential.complete(**how).choices[0].text


def test_without_a_temperature_it_samples_as_openai_does(server: Server) -> None:
    texts = {server.complete("Once", temperature=None, max_tokens=30).choices[0].text for _ in range(4)}
    assert len(texts) > 1
    assert server.complete("Once", temperature=1e-40).choices[0].text == server.expected("Once")
    assert server.complete("Once", temperature=2, extra_body={"top_k": 1}).choices[0].text == server.expected("Once")


def test_the_models_own_temperature_counts(folder: Path) -> None:
    with served(folder, batched=False, do_sample=True, temperature=1e-9) as one:
        assert one.complete("Once", temperature=None).choices[0].text == one.expected("Once")


def test_a_sampler_draws_by_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    for temperature, top_p, top_k in ((1.0, 1.0, None), (0.5, 1.0, None), (1.0, 1.0, 2), (1.0, 0.7, None)):
        sampler = Sampler(temperature, top_p, top_k, 0, torch.device("cpu"))
        n = 2000
        drawn = Counter(int(sampler(logits.clone()).argmax()) for _ in range(n))
        p = (logits / temperature).softmax(0)
        if top_k is not None:
            p[top_k:] = 0
        if top_p < 1:
            p[2:] = 0  # the first two are 0.88
        for token, probability in enumerate(p / p.sum()):
            error = 5 * float(probability * (1 - probability) / n) ** 0.5
            assert abs(drawn[token] / n - float(probability)) <= error, (temperature, top_p, top_k, token)


# ---------------------------------------------------------------------------------------------------------
# Chat
# ---------------------------------------------------------------------------------------------------------


def test_chat_follows_the_template(chat_server: Server) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "I."},
        {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]},
    ]
    expected = chat_server.expected("<user>Who?\n<assistant>I.\n<user>Why?\n<assistant>", 20, special=False)
    how = {"model": "tiny", "messages": messages, "temperature": 0}
    whole = chat_server.client.chat.completions.create(**how, max_completion_tokens=20)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", expected)
    *parts, last = chat_server.client.chat.completions.create(**how, max_tokens=20, stream=True)
    assert "".join(part.choices[0].delta.content for part in parts) == expected
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert last.choices[0].finish_reason == "length"
    to_the_end = chat_server.client.chat.completions.create(**how)
    assert to_the_end.usage.total_tokens == CONTEXT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: is missing"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": "hello"}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content: is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the chat template refuses them: no system here"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools: "),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "context is 256 tokens"),
    ],
)
def test_bad_chats(chat_server: Server, body: dict[str, Any], message: str) -> None:
    status, answer = chat_server.post("/v1/chat/completions", body)
    assert status == 400 and message in answer["error"]["message"], answer


def test_a_model_without_a_chat_template_says_what_to_use(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"no chat template.*use /v1/completions"):
        server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])


# ---------------------------------------------------------------------------------------------------------
# Clients that go away
# ---------------------------------------------------------------------------------------------------------


def leave(server: Server, *, stream: bool, after_a_piece: bool = False) -> None:
    """A client that asks for the longest answer there is and hangs up."""
    body = {"prompt": "Once", "temperature": 0, "max_tokens": CONTEXT - 10, "stream": stream}
    data = json.dumps(body).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if after_a_piece:
            assert sock.recv(1)
        else:
            wait_until(lambda: server.running() > 0)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_that_went_away_asked_for_is_not_computed(
    either: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    slowly = either.app.model.register_forward_hook(lambda *_: (tokens.append(1), time.sleep(0.02))[0])
    try:
        leave(either, stream=stream)
        wait_until(lambda: either.running() == 0)
        time.sleep(0.2)
        so_far = len(tokens)
        time.sleep(0.3)
    finally:
        slowly.remove()
    assert len(tokens) == so_far < CONTEXT - 10
    if isinstance(either.engine, serve.Batched):
        scheduler = either.engine.manager.batch_processor.scheduler
        assert not scheduler.active_requests and not scheduler.waiting_requests
    assert either.complete("Once").choices[0].text == either.expected("Once")


def test_a_request_that_waits_can_be_cancelled(sequential: Server) -> None:
    with sequential.complete(max_tokens=200, stream=True) as stream:
        next(iter(stream))
        for _ in range(3):
            leave(sequential, stream=True)
        assert sequential.complete("x").choices[0].text == sequential.expected("x")


def test_half_a_request(server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    for part in (
        b"POST /v1/compl",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n",
    ):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(part + b"Content-Length: 100\r\n\r\n{" if part.endswith(b"\n") else part)
            time.sleep(0.05)
    assert server.complete("x").choices[0].text == server.expected("x")


# ---------------------------------------------------------------------------------------------------------
# Bad requests
# ---------------------------------------------------------------------------------------------------------

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
    ({"prompt": ["x", "y"]}, "one prompt a request"),
    ({"prompt": [[1], [2]]}, "one prompt a request"),
    ({"prompt": ["x", 1]}, "one prompt a request"),
    ({"prompt": [VOCABULARY]}, f"between 0 and {VOCABULARY - 1}"),
    ({"prompt": [-1]}, "between 0"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1] * CONTEXT}, "context is 256 tokens, the prompt has 256"),
    ({"prompt": "x " * 100_000}, "context is 256 tokens"),
    ({"prompt": [1] * 200, "max_tokens": 57}, "the prompt has 200 and max_tokens asks for 57 more"),
    ({"prompt": "x", "max_tokens": 10**9}, "max_tokens asks for 1,000,000,000 more"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens: "),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens: "),
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
    ({"prompt": "x", "n": 2}, "n: 2 is not supported here"),
    ({"prompt": "x", "logprobs": 5}, "logprobs: 5 is not supported here"),
    ({"prompt": "x", "echo": True}, "echo: true is not supported here"),
    ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty: 0.5 is not supported here"),
    ({"prompt": "x", "max_new_tokens": 5}, "max_new_tokens: 5 is not supported here"),
]


def test_bad_requests_say_what_is_wrong(server: Server) -> None:
    for body, message in BAD:
        status, answer = server.post("/v1/completions", body)
        assert status == 400 and message in answer["error"]["message"], (repr(body)[:80], status, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    assert server.complete("Once").choices[0].text == server.expected("Once")


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
    assert get(server.url, "/v1/completions")[0] == 405
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
        text = str(either.complete(prompt, **hot).choices[0].text)
        return bool(hot) or text == expected[prompt]

    kinds = [chance.randrange(1000) for _ in range(48)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(somebody, kinds))
    wait_until(lambda: either.running() == 0)
    assert either.complete("Once").choices[0].text == either.expected("Once")


# ---------------------------------------------------------------------------------------------------------
# Engines
# ---------------------------------------------------------------------------------------------------------


def tokens_of(engine: serve.Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    results: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in prompts]
    for ids, result in zip(prompts, results, strict=True):
        engine.start(Job(ids, max_tokens, None, result.put))
    answers: list[list[int]] = []
    for result in results:
        answers.append([])
        while isinstance(part := result.get(timeout=60), list):
            answers[-1] += part
        assert part is None, part
    return answers


def generated(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    tensors = [torch.tensor([ids]) for ids in prompts]
    how = {"max_new_tokens": max_tokens, "do_sample": False}
    return [model.generate(t, attention_mask=torch.ones_like(t), **how)[0, t.shape[1] :].tolist() for t in tensors]


def test_more_requests_than_the_cache_holds(folder: Path) -> None:
    """Two pages of 256 tokens for ten requests of up to 220: they take turns, and lose nothing."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(chance.choice([3, 60, 180]))] for _ in range(10)]
    expected = generated(model, prompts, 40)
    with serve.Batched(model, 512) as engine:
        assert tokens_of(engine, prompts, 40) == expected


def test_a_model_that_batching_gets_wrong_is_served_one_at_a_time() -> None:
    """ALiBi's positions are lost in a batch. The answers would be wrong, and nothing would say so."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=None)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    prompts = [[5, 6, 7], [9] * 20]
    expected = generated(model, prompts, 10)
    engine, why_not = serve.choose_engine(model, 1024)
    with engine:
        assert isinstance(engine, serve.OneAtATime)
        assert why_not is not None and "otherwise than model.generate" in why_not
        assert tokens_of(engine, prompts, 10) == expected


def test_layers_do_not_plan_by_what_is_tried_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    looks: list[int] = []
    monkeypatch.setattr(SparseFFNBase, "_look_at", lambda self, x: looks.append(x.shape[-2]))
    model.model.layers[0].mlp.set_plan(None)
    engine, _ = serve.choose_engine(model, 1024)
    with engine:
        assert not looks
        tokens_of(engine, [[5, 6, 7]], 2)
        assert looks  # real tokens
    assert [layer.mlp._plans_itself for layer in model.model.layers] == [False, True]


def test_a_generation_config_that_batching_would_leave_out(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = generated(model, [[5, 6, 7]], 30)
    model.generation_config.repetition_penalty = 5.0
    expected = generated(model, [[5, 6, 7]], 30)
    assert expected != plain
    engine, why_not = serve.choose_engine(model, 1024)
    with engine:
        assert why_not == "generation_config.json asks for RepetitionPenaltyLogitsProcessor"
        assert tokens_of(engine, [[5, 6, 7]], 30) == expected


def test_a_model_that_fails_is_told_to_all_clients(folder: Path) -> None:
    """Clients get a 503, those that wait and those that come later; nobody waits forever."""
    with served(folder, batched=True) as one:
        broken = threading.Event()

        def fail(*_: Any) -> None:
            time.sleep(0.02)
            if broken.is_set():
                raise RuntimeError("out of memory, say")

        one.app.model.register_forward_pre_hook(fail)
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(one.complete, max_tokens=200) for _ in range(4)]
            wait_until(lambda: one.running() == 4)
            broken.set()
            for future in waiting:
                with pytest.raises(openai.InternalServerError, match="out of memory, say"):
                    future.result(timeout=30)
        wait_until(lambda: get(one.url, "/health")[0] == 503)
        with pytest.raises(openai.InternalServerError, match="out of memory, say"):
            one.complete()


def test_a_request_that_fails_leaves_the_next_alone(sequential: Server) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("just this once")

    hook = sequential.app.model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(openai.InternalServerError, match="just this once"):
            sequential.complete()
        with pytest.raises(openai.APIError, match="just this once"):
            list(sequential.complete(stream=True))
    finally:
        hook.remove()
    assert sequential.complete("Once").choices[0].text == sequential.expected("Once")


# ---------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_bpe() -> Any:
    return train_bpe(["ab é 🦊 " * 50], 300)


@given(st.lists(st.lists(st.integers(0, 290), max_size=4), max_size=12), st.text(max_size=12))
def test_pieces_of_any_tokens_are_the_whole(byte_bpe: Any, parts: list[list[int]], text: str) -> None:
    """Random bytes, too: halves of characters, and bytes that are none."""
    parts = [*parts, *([token] for token in byte_bpe(text).input_ids)]

    def decode(ids: list[int]) -> str:
        return str(byte_bpe.decode(ids, skip_special_tokens=True))

    stream = TextStream(decode)
    pieces = [stream.add(part) for part in parts] + [stream.add([], last=True)]
    assert "".join(pieces) == decode([token for part in parts for token in part])


def test_a_space_that_only_shows_inside() -> None:
    """As in Llama's first tokenizers: the first token of a text loses its space, the others keep it."""
    words = {1: " Once", 2: " upon", 3: " a"}
    stream = TextStream(lambda ids: "".join(words[token] for token in ids).removeprefix(" "))
    assert [stream.add([1]), stream.add([2, 3]), stream.add([], last=True)] == ["Once", " upon a", ""]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_up_to_a_stop_string(text: str, stops: list[str], data: Any) -> None:
    until = UntilStop(stops)
    given_out, at = "", 0
    while at < len(text) and not until.found:
        n = data.draw(st.integers(1, 5))
        given_out, at = given_out + until.add(text[at : at + n]), at + n
        assert not any(stop in given_out for stop in stops), "a stop string was given out"
    if not until.found:
        given_out += until.add("", last=True)
    assert text.startswith(given_out)
    assert until.found == any(stop in text for stop in stops)
    if until.found:
        assert any(text.startswith(stop, len(given_out)) for stop in stops)
    else:
        assert given_out == text


# ---------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------


def test_the_command_from_start_to_ctrl_c(folder: Path, tmp_path: Path) -> None:
    """What a newcomer does: start it, send what it prints as an example, use the client, end it with Ctrl-C."""
    folder = shutil.copytree(folder, tmp_path / "my-run" / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20_000}))
    command = [sys.executable, "-m", "twell", "serve", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        said = ""
        while "Ctrl-C ends it" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        assert f"{folder}, float32, on cpu" in said
        assert "sparse:   all 2 feed-forward layers" in said
        assert "frozen:   2 feed-forward layers frozen, 0.0 MB beside their weights\n" in said
        assert "requests: computed together, up to 20,000 tokens each" in said
        assert "warning" not in said
        url = re.search(r"address:  (http://127\.0\.0\.1:\d+)/v1", said)
        assert url is not None
        words = shlex.split(said[said.index("curl ") : said.index("Ctrl-C")].replace("\\\n", ""))
        assert words[1].startswith(url[1])
        status, answer = post(url[1], words[1].removeprefix(url[1]), words[words.index("-d") + 1].encode())
        assert status == 200 and 1 <= answer["usage"]["completion_tokens"] <= 32
        client = openai.OpenAI(base_url=f"{url[1]}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["my-run"]  # a run's model is called by the run
        stream = client.completions.create(model="my-run", prompt="Once", max_tokens=19_000, temperature=0, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert out.strip() == "stopped"
        assert err == ""
    finally:
        process.kill()


@pytest.fixture
def command(twell: Twell) -> Twell:
    """Runs ``twell serve``."""
    return functools.partial(twell, "serve")


def test_help(command: Twell) -> None:
    result = command("--help")
    assert result.returncode == 0 and "Usage" in result.stdout and "Example" in result.stdout


def test_bad_input_ends_in_one_line(command: Twell, folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for args, message in (
            ([str(folder), "--port", port], f"cannot listen on 127.0.0.1 port {port}: Address already in use"),
            ([str(folder), "--port", "0", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
            ([str(tmp_path), "--port", "0"], f"{tmp_path} is no folder of a model: it has no config.json"),
            (["nowhere", "--port", "0"], "nowhere is no folder of a model"),
            ([str(folder.parent), "--port", "0"], f"{folder.parent} is no folder of a model: it has no config.json; "),
            ([str(folder), "--port", "0", "--dtype", "int8"], "unknown dtype 'int8'"),
            ([str(folder), "--port", "0", "--device", "tpu"], "unknown device 'tpu'"),
        ):
            result = command(*args)
            assert result.returncode == 2
            assert result.stderr.startswith(f"twell: error: {message}"), result.stderr
            assert result.stderr.count("\n") == 1


def test_a_missing_package_is_named(command: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("twell.serve")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(twell, "serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = command("somewhere")
    assert result.returncode == 2 and "pip install 'twell[serve]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_options_are_told(command: Twell, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dense, --no-batching, --host, --name, --cache-tokens, --dtype, and models of transformers' own."""
    seen = []
    monkeypatch.setattr(serve, "run", lambda server, sock: seen.append((server, sock)) or sys.exit(0))
    out = command(str(folder), "--port", "0", "--dense", "--no-batching", "--host", "0.0.0.0", "--name", "me").stdout
    assert "sparse:   no layer of 2 (--dense)" in out
    assert "one at a time (--no-batching), up to 256 tokens" in out
    assert "warning:  other machines can reach this address" in out
    assert '"model": "me"' in out
    assert {layer.mlp.backend for layer in seen[0][0].model.model.layers} == {"reference"}
    assert "up to 256 tokens each, 512 in all" in command(str(folder), "--port", "0", "--cache-tokens", "512").stdout
    assert seen[1][1].getsockname()[0] == "127.0.0.1"

    torch.manual_seed(0)
    for activation, line in (
        ("relu", "sparse:   all 2 feed-forward layers"),
        ("silu", "sparse:   nothing is sparse: 2 dense: silu: call relufy_ first"),
    ):
        path = tmp_path / activation
        AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, hidden_act=activation)).save_pretrained(path)
        AutoTokenizer.from_pretrained(folder).save_pretrained(path)
        how = ["--dtype", "bfloat16", *(["--no-batching"] if activation == "silu" else [])]
        assert line in command(str(path), "--port", "0", *how).stdout
        assert seen[-1][0].name == activation
        assert seen[-1][0].model.dtype == torch.bfloat16


@pytest.mark.gpu
def test_on_a_gpu(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval().cuda()
    prompts = [[5, 6, 7], [9] * 100, [1, 2]]
    tensors = [torch.tensor([ids], device="cuda") for ids in prompts]
    how = {"max_new_tokens": 20, "do_sample": False}
    expected = [model.generate(t, attention_mask=torch.ones_like(t), **how)[0, t.shape[1] :].tolist() for t in tensors]
    engine, why_not = serve.choose_engine(model, serve.cache_tokens_for(model))
    with engine:
        assert why_not is None
        assert tokens_of(engine, prompts, 20) == expected
        drawn = [queue.SimpleQueue[Any]() for _ in range(2)]
        for result in drawn:
            engine.start(Job([5, 6, 7], 20, Sampler(1.5, 0.9, 40, 3, model.device), result.put))
        first, second = ([t for part in iter(lambda one=one: one.get(timeout=60), None) for t in part] for one in drawn)
        assert first == second
