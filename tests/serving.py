"""A tiny model, and servers of it in the tests' own process, for tests of ``twell serve``."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import twell
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import train_bpe
from twell.workbench.serve.batched import choose_engine
from twell.workbench.serve.engine import Engine
from twell.workbench.serve.running import Running, bind
from twell.workbench.serve.server import ModelServer

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


def make_model(path: Path) -> Path:
    """A model as ``twell train`` leaves one, with random weights."""
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
    app: ModelServer
    running_as: Running
    expected: Callable[..., str]  # the text that model.generate gives

    @property
    def engine(self) -> Any:
        return self.app.engine

    def complete(self, prompt: Any = "Once", **how: Any) -> Any:
        how = {"temperature": 0, "max_tokens": 12, **how}
        return self.client.completions.create(model="tiny", prompt=prompt, **how)

    def complete_text(self, prompt: Any = "Once", **how: Any) -> str:
        answer = self.complete(prompt, **how)
        return "".join(part.choices[0].text for part in (answer if how.get("stream") else [answer]))

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return request(self.url, "POST", path, data, {"Content-Type": "application/json", **headers})

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        return request(self.url, "GET", path, None, headers)

    def running(self) -> int:
        return int(self.get("/health")[1]["running"])

    def send(self, data: bytes) -> socket.socket:
        """A connection on which these bytes were sent."""
        sock = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=60)
        sock.sendall(data)
        return sock


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


def request(url: str, *asked: Any) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an answer; ``asked``: method, path, body, headers."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(*asked)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@contextlib.contextmanager
def served(folder: Path, *, batched: bool, api_key: str | None = None, **changes: Any) -> Iterator[Server]:
    """A server in this process: uvicorn in a thread, on a port of loopback. ``changes``: to the generation config."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    twin: Any = AutoModelForCausalLM.from_pretrained(folder).eval()  # batching may change how a model attends
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    for one in (model, twin):
        one.generation_config.update(**changes)
    twell.desparsify_(twin)

    def expected(prompt: str, max_tokens: int = 12, special: bool = True) -> str:
        ids = tokenizer(prompt, add_special_tokens=special).input_ids
        return str(tokenizer.decode(generated(twin, [ids], max_tokens)[0], skip_special_tokens=True))

    engine, why_not = choose_engine(model, 4096) if batched else (Engine(model), "asked for")
    assert (why_not is None) == batched
    with engine, bind("127.0.0.1", 0) as sock:
        app = ModelServer(model, tokenizer, "tiny", engine, CONTEXT, api_key=api_key)
        server = Running(app)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        how: dict[str, Any] = {"api_key": api_key or "none", "max_retries": 0, "timeout": 60}
        try:
            with openai.OpenAI(base_url=f"{url}/v1", **how) as client:
                yield Server(url, client, app, server, expected)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def generated(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    tensors = [torch.tensor([ids]) for ids in prompts]
    how = {"max_new_tokens": max_tokens, "do_sample": False}
    return [model.generate(t, attention_mask=torch.ones_like(t), **how)[0, t.shape[1] :].tolist() for t in tensors]
