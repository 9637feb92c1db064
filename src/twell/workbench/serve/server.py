"""The web application: OpenAI's endpoints around one model and the engine that computes it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from twell.workbench.serve.answers import Answer, Piece, usage_of
from twell.workbench.serve.batched import vocabulary_of
from twell.workbench.serve.engine import Engine
from twell.workbench.serve.guard import Guard
from twell.workbench.serve.jobs import Job, Sampler
from twell.workbench.serve.metrics import CONTENT_TYPE, Metrics
from twell.workbench.serve.prompts import Prompts
from twell.workbench.serve.requests import ApiError, ChatRequest, CompletionRequest, parse

MAX_BODY = 8 * 2**20  # bytes
READ_SECONDS = 30.0  # for the whole body of a request
ALMOST_ZERO = 1e-4  # temperatures below are greedy: dividing logits by less overflows

Part = Literal["first", "middle", "last", "whole"]  # of an answer
Shape = Callable[[Answer, Piece, Part], dict[str, Any]]
Results = asyncio.Queue[tuple[int, Any]]  # (the answer's index, what its job delivers)


class ModelServer:
    """One model behind OpenAI's endpoints; ``app`` is the ASGI application.

    With an ``api_key`` clients must send the key. Without one, ``Host`` must be an address, localhost or one of
    ``hosts``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        engine: Engine,
        max_length: int,
        *,
        api_key: str | None = None,
        hosts: tuple[str, ...] = (),
    ) -> None:
        self.model, self.tokenizer, self.name, self.engine, self.max_length = model, tokenizer, name, engine, max_length
        eos = model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.created = int(time.time())
        self.prompts = Prompts(tokenizer, vocabulary_of(model), max_length)
        self.metrics = Metrics(engine)
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics_text),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _answer_error)
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.app = Guard(app, api_key=api_key, hosts=hosts, metrics=self.metrics)

    # -- endpoints -------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        problem = self.engine.problem
        status = {"status": "ok" if problem is None else problem, "running": len(self.engine.jobs)}
        return JSONResponse(status, 200 if problem is None else 503)

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        this = {"id": self.name, "object": "model", "created": self.created, "owned_by": "twell"}
        this["max_model_len"] = self.max_length
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [this]})
        self._check_name(name)
        return JSONResponse(this)

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await _read(request))
        self._check_name(asked.model)
        given: Any = asked.prompt
        self.engine.check_room(len(given))
        is_text = isinstance(given[0], str)
        prompts = await self.prompts.of_texts(given) if is_text else given
        echoes: list[Any] = [None] * len(prompts)
        if asked.echo:
            echoes = given if is_text else [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
        return await self._respond(request, asked, prompts, echoes)

    async def chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await _read(request))
        self._check_name(asked.model)
        self.engine.check_room(1)
        if self.tokenizer.chat_template is None:
            raise ApiError(400, f"{self.name} has no chat template, it continues texts: use /v1/completions")
        ids = await self.prompts.of_messages(asked.messages)
        return await self._respond(request, asked, [ids], [None])

    # -- what the two share ----------------------------------------------------------------------------

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model {name!r} here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _sampler(self, asked: CompletionRequest | ChatRequest) -> Sampler | None:
        """Defaults: those of the model's generation_config.json, else OpenAI's, which is temperature 1."""
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
        asked: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        echoes: list[str | None],
    ) -> Response:
        for ids in prompts:
            self.prompts.check(ids, asked.max_tokens, asked.prompt_field)
        answers, results = [], Results()
        for index, (ids, echo) in enumerate(zip(prompts, echoes, strict=True)):
            room = self.max_length - len(ids)
            n_tokens = min(room, asked.default_tokens or room) if asked.max_tokens is None else asked.max_tokens
            job = Job(ids, n_tokens, self._sampler(asked), _into(results, index), asked.n_top)
            job.scores_prompt = echo is not None and asked.n_top is not None
            answers.append(Answer(job, index, asked.stop, echo, self.tokenizer, self.eos, self.metrics))
        self._start(answers)
        shape, prefix = (_chat, "chatcmpl") if isinstance(asked, ChatRequest) else (_completion, "cmpl")
        head = {"id": f"{prefix}-{answers[0].job.name}", "created": int(time.time()), "model": self.name}
        if asked.stream:
            events = self._events(answers, results, head, shape, asked.stream_options.include_usage)
            return _EventStream(events, lambda: self._end(answers))
        watching = asyncio.create_task(_until_gone(request, results))
        wholes = [Piece() for _ in answers]
        try:
            async for answer, piece in self._pieces(answers, results):
                wholes[answer.index].text += piece.text
                wholes[answer.index].tokens += piece.tokens
        finally:
            watching.cancel()
            self._end(answers)
        bodies = [shape(answer, whole, "whole") for answer, whole in zip(answers, wholes, strict=True)]
        choices = [choice for body in bodies for choice in body["choices"]]
        return JSONResponse({**head, **bodies[0], "choices": choices, "usage": usage_of(answers)})

    async def _pieces(self, answers: list[Answer], results: Results) -> AsyncIterator[tuple[Answer, Piece]]:
        """The pieces of all answers, in the order in which they come."""
        running = len(answers)
        while running:
            index, result = await results.get()
            if isinstance(result, Exception):
                raise result
            answer = answers[index]
            if answer.finish_reason is not None:  # what came after a stop string
                continue
            piece = answer.add(result)
            if answer.finish_reason is not None:
                running -= 1
                self.engine.cancel(answer.job)
            yield answer, piece

    async def _events(
        self, answers: list[Answer], results: Results, head: dict[str, Any], shape: Shape, with_usage: bool
    ) -> AsyncIterator[str]:
        """The pieces as server-sent events."""

        def event(body: dict[str, Any]) -> str:
            return f"data: {json.dumps({**head, **body}, ensure_ascii=False)}\n\n"

        begun: set[int] = set()
        try:
            async for answer, piece in self._pieces(answers, results):
                if piece.text or piece.tokens:
                    yield event(shape(answer, piece, "middle" if answer.index in begun else "first"))
                    begun.add(answer.index)
                if answer.finish_reason is not None:
                    yield event(shape(answer, Piece(), "last"))
            if with_usage:
                yield event({**shape(answers[0], Piece(), "last"), "choices": [], "usage": usage_of(answers)})
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
        yield "data: [DONE]\n\n"

    def _start(self, answers: list[Answer]) -> None:
        """Give all jobs to the engine, or none."""
        self.engine.check_room(len(answers))
        try:
            for answer in answers:
                self.engine.start(answer.job)
                self.metrics.prompt_tokens.inc(len(answer.job.ids))
        except ApiError:
            self._end(answers)
            raise

    def _end(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.engine.cancel(answer.job)


def _completion(answer: Answer, piece: Piece, part: Part) -> dict[str, Any]:
    reason = answer.finish_reason if part in ("last", "whole") else None
    logprobs = answer.completion_logprobs(piece)
    choice = {"index": answer.index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}
    return {"object": "text_completion", "choices": [choice]}


def _chat(answer: Answer, piece: Piece, part: Part) -> dict[str, Any]:
    reason = answer.finish_reason if part in ("last", "whole") else None
    said = {} if part in ("middle", "last") else {"role": "assistant"}
    said |= {} if part == "last" else {"content": piece.text}
    choice = {"index": answer.index, "logprobs": answer.chat_logprobs(piece), "finish_reason": reason}
    if part == "whole":
        return {"object": "chat.completion", "choices": [{**choice, "message": said}]}
    return {"object": "chat.completion.chunk", "choices": [{**choice, "delta": said}]}


def _into(results: Results, index: int) -> Callable[[Any], None]:
    """Puts an answer's results into the queue from another thread."""
    loop = asyncio.get_running_loop()

    def deliver(result: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(results.put_nowait, (index, result))

    return deliver


async def _until_gone(request: Request, results: Results) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    results.put_nowait((0, ClientDisconnect()))


# -- requests and responses ----------------------------------------------------------------------------


class _EventStream(StreamingResponse):
    """Server-sent events. When the connection ends, in whatever way, so do the jobs."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()


async def _read(request: Request) -> bytes:
    # Browsers let any web page post other content types, also to a server on the reader's own machine.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the request as JSON, with the header Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > 4 * MAX_BODY:  # up to here it is read: clients listen only once all is sent
                    break
    except TimeoutError:
        raise ApiError(408, f"the request did not come within {READ_SECONDS:g} seconds") from None
    if len(body) > MAX_BODY:
        raise ApiError(413, f"the request is larger than {MAX_BODY:,} bytes")
    return bytes(body)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    headers = error.headers if isinstance(error, HTTPException) else None
    if isinstance(error, HTTPException):  # from the routing: an unknown path, or another method
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    if not isinstance(error, ApiError):  # the error itself goes to the log only: it can name paths
        error = ApiError(500, "the server failed; its log says why")
    if error.status in (408, 413):  # the rest of the body is not read
        headers = {"Connection": "close"}
    return JSONResponse(error.body, error.status, headers)
