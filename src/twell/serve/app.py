"""The web application: OpenAI's endpoints around one model and the engine that computes it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from twell.hf.text import TextStream, decoder
from twell.serve.engine import Engine, Job, Sampler, vocabulary_of
from twell.serve.requests import ApiError, ChatRequest, CompletionRequest, GenerationRequest, parse
from twell.serve.text import UntilStop

MAX_BODY = 32 * 2**20  # bytes
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's legacy endpoint has it; a chat goes on to the end of the context
ALMOST_ZERO = 1e-4  # temperatures below are greedy: logits divided by less overflow


Part = Literal["first", "middle", "last", "whole"]
Shape = Callable[[str, str | None, Part], dict[str, Any]]  # of a response, or of a part of one: text, why it ended


class Answer:
    """The text of one job, piece by piece; afterwards why it ended."""

    def __init__(self, job: Job, results: asyncio.Queue[Any], stops: list[str], server: ModelServer) -> None:
        self.job, self.results, self.stops, self.server = job, results, stops, server
        self.n_tokens, self.finish_reason = 0, "stop"

    async def pieces(self) -> AsyncIterator[str]:
        text = TextStream(decoder(self.server.tokenizer))
        until_stop = UntilStop(self.stops)
        last_token, is_last = -1, False
        while not is_last:
            result = await self.results.get()
            if isinstance(result, Exception):
                raise result
            is_last, tokens = result is None, result or []
            self.n_tokens += len(tokens)
            last_token = tokens[-1] if tokens else last_token
            if piece := until_stop.add(text.add(tokens, last=is_last), last=is_last):
                yield piece
            if until_stop.found:
                return
        if self.n_tokens >= self.job.max_tokens and last_token not in self.server.eos:
            self.finish_reason = "length"

    @property
    def usage(self) -> dict[str, int]:
        n_prompt = len(self.job.ids)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self.n_tokens,
            "total_tokens": n_prompt + self.n_tokens,
        }


class _EventStream(StreamingResponse):
    """Server-sent events. However the connection ends, so does the job."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()


class ModelServer:
    """One model behind OpenAI's endpoints; ``app`` is the ASGI application."""

    def __init__(self, model: Any, tokenizer: Any, name: str, engine: Engine, max_length: int) -> None:
        self.model, self.tokenizer, self.name, self.engine, self.max_length = model, tokenizer, name, engine, max_length
        eos = model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.vocabulary = vocabulary_of(model)
        self.created = int(time.time())
        self._encoding = asyncio.Lock()  # tokenizers do not like two threads
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _answer_error,
                HTTPException: _answer_error,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_failure,
            },
        )

    # -- endpoints -------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        problem = self.engine.problem
        status = {"status": "ok" if problem is None else problem, "running": len(self.engine.jobs)}
        return JSONResponse(status, 200 if problem is None else 503)

    async def models(self, request: Request) -> Response:
        this = {"id": self.name, "object": "model", "created": self.created, "owned_by": "twell"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [{**this, "max_model_len": self.max_length}]})
        self._check_name(request.path_params["name"])
        return JSONResponse({**this, "max_model_len": self.max_length})

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await _read(request))
        self._check_name(asked.model)
        prompt = asked.prompt
        ids = await self._encode(lambda: self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt
        answer = self._start(asked, ids, asked.max_tokens, DEFAULT_TOKENS, "prompt")

        def shape(text: str, reason: str | None, part: Part) -> dict[str, Any]:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
            return {"object": "text_completion", "choices": [choice]}

        return await self._respond(request, asked, answer, "cmpl", shape)

    async def chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await _read(request))
        self._check_name(asked.model)
        if self.tokenizer.chat_template is None:
            raise ApiError(400, f"{self.name} has no chat template, it continues texts: use /v1/completions")
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        ids = await self._encode(lambda: self._chat_ids(messages))
        answer = self._start(asked, ids, asked.max_completion_tokens or asked.max_tokens, None, "messages")

        def shape(text: str, reason: str | None, part: Part) -> dict[str, Any]:
            said = {} if part in ("middle", "last") else {"role": "assistant"}
            said |= {} if part == "last" else {"content": text}
            choice = {"index": 0, "logprobs": None, "finish_reason": reason}
            if part == "whole":
                return {"object": "chat.completion", "choices": [{**choice, "message": said}]}
            return {"object": "chat.completion.chunk", "choices": [{**choice, "delta": said}]}

        return await self._respond(request, asked, answer, "chatcmpl", shape)

    # -- what they share -------------------------------------------------------------------------------

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model {name!r} here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _encode(self, encode: Callable[[], list[int]]) -> list[int]:
        async with self._encoding:
            return await asyncio.to_thread(encode)  # a long text takes seconds, and others are streaming

    def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # so templates refuse roles or their order
            raise ApiError(400, f"messages: the chat template refuses them: {error}", param="messages") from None
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _start(
        self, asked: GenerationRequest, ids: list[int], max_tokens: int | None, default: int | None, field: str
    ) -> Answer:
        room = self.max_length - len(ids)
        if not ids:
            raise ApiError(400, f"{field}: it has no tokens", param=field)
        if not all(0 <= token < self.vocabulary for token in ids):
            raise ApiError(400, f"{field}: token ids must lie between 0 and {self.vocabulary - 1}", param=field)
        if room < 1 or room < (max_tokens or 1):
            wanted = f" and max_tokens asks for {max_tokens:,} more" if max_tokens and room >= 1 else ""
            message = f"{field}: the model's context is {self.max_length:,} tokens, the prompt has {len(ids):,}{wanted}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        loop, results = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def deliver(result: list[int] | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(results.put_nowait, result)

        job = Job(ids, max_tokens or min(room, default or room), self._sampler(asked), deliver)
        self.engine.start(job)
        return Answer(job, results, asked.stop, self)

    def _sampler(self, asked: GenerationRequest) -> Sampler | None:
        """By the request, else by the model's generation_config.json, else as OpenAI has it: temperature 1."""
        own = self.model.generation_config
        temperature = asked.temperature if asked.temperature is not None else own.temperature
        top_p = asked.top_p if asked.top_p is not None else own.top_p
        top_k = asked.top_k if asked.top_k is not None else own.top_k
        temperature = 1.0 if temperature is None else temperature
        if temperature < ALMOST_ZERO or top_k == 1:
            return None
        return Sampler(temperature, 1.0 if top_p is None else top_p, top_k or None, asked.seed, self.model.device)

    async def _respond(
        self,
        request: Request,
        asked: GenerationRequest,
        answer: Answer,
        prefix: str,
        shape: Shape,
    ) -> Response:
        head = {"id": f"{prefix}-{answer.job.name}", "created": int(time.time()), "model": self.name}

        def end() -> None:
            self.engine.cancel(answer.job)

        if asked.stream:
            events = _events(answer, head, shape, asked.stream_options.include_usage)
            return _EventStream(events, end)
        try:
            text = await _unless_gone(request, _joined(answer))
        finally:
            end()
        return JSONResponse({**head, **shape(text, answer.finish_reason, "whole"), "usage": answer.usage})


async def _joined(answer: Answer) -> str:
    return "".join([piece async for piece in answer.pieces()])


async def _events(answer: Answer, head: dict[str, Any], shape: Shape, with_usage: bool) -> AsyncIterator[str]:
    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    try:
        part: Part = "first"
        async for piece in answer.pieces():
            yield event({**head, **shape(piece, None, part)})
            part = "middle"
        yield event({**head, **shape("", answer.finish_reason, "last")})
        if with_usage:
            yield event({**head, **shape("", None, "last"), "choices": [], "usage": answer.usage})
    except ApiError as error:
        yield event(error.body)
    yield "data: [DONE]\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, str]) -> str:
    """What ``work`` returns; given up as soon as the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _read(request: Request) -> bytes:
    # Without this a page of the web could send requests to a server on its reader's own machine.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the request as JSON, with the header Content-Type: application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ApiError(413, f"the request is larger than {MAX_BODY:,} bytes")
    return bytes(body)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of the routing: no such path, or not with this method
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"the server failed: {type(error).__name__}: {error}").body, 500)


# ---------------------------------------------------------------------------------------------------------
# Running it
# ---------------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, so that a port that is taken shows before a model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot listen on {host} port {port}: {reason}; choose with --host and --port") from None
    return sock


def is_local(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


class _Uvicorn(uvicorn.Server):
    """Ends answers under way on Ctrl-C, instead of waiting for the last of them."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        self.engine.end_all("the server is stopping")


def run(server: ModelServer, sock: socket.socket) -> None:
    """Serve until Ctrl-C."""
    config = uvicorn.Config(server.app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
    with contextlib.suppress(KeyboardInterrupt):
        _Uvicorn(config, server.engine).run(sockets=[sock])
