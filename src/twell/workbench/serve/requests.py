"""The fields of requests to OpenAI's endpoints. Fields that are not supported are refused, never silently ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_STOPS = 16
MAX_PROMPTS = 256  # of one request
MAX_TOP = 20  # likeliest tokens at each place
# Without fail_fast a list with one wrong item costs an error for each of its items: seconds, and gigabytes.
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Ids = Annotated[list[int], Field(fail_fast=True)]
_Tokens = Annotated[list[_Ids], Field(fail_fast=True)]

# Fields that do not change the answer, and values of other fields that do not.
_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "suffix": "",
    "min_p": 0,
    "tools": [],
    "response_format": {"type": "text"},
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """The fields of both endpoints. Unknown fields that would change the answer are refused."""

    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None]  # None: as many as fit into the context
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: list[str] = Field([], max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")
        neutral = {
            name for name, value in body.items() if value is None or (name in _NEUTRAL and value == _NEUTRAL[name])
        }
        return {name: value for name, value in body.items() if name not in neutral | _NO_EFFECT}

    @field_validator("stop", mode="before")
    @classmethod
    def _some_strings(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list) and "" in stops:
            raise ValueError("a stop string must not be empty")
        return stops


class CompletionRequest(GenerationRequest):
    prompt_field: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = 16  # as in OpenAI's legacy endpoint
    prompt: _Texts | _Tokens | str | _Ids  # a single prompt becomes a list of one
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, logprobs: Any) -> Any:
        return None if logprobs is False else logprobs

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, prompt: Any) -> Any:
        prompts = [prompt] if isinstance(prompt, str) or isinstance(next(iter(prompt), None), int) else prompt
        if not all(prompts) or not prompts:
            raise ValueError("the prompt is empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts a request, here are {len(prompts):,}")
        return prompts

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo, else there is nothing to answer")
        return self

    @property
    def n_top(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if not all(isinstance(p, dict) and p.get("type") == "text" and type(p.get("text")) is str for p in content):
            raise ValueError("only parts of type text are supported")
        return "".join(part["text"] for part in content)


class ChatRequest(GenerationRequest):
    prompt_field: ClassVar[str] = "messages"
    default_tokens: ClassVar[int | None] = None
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)

    @model_validator(mode="after")
    def _top_of_what(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def n_top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


_Asked = TypeVar("_Asked", bound=GenerationRequest)


class ApiError(Exception):
    """Becomes a response in the format of OpenAI's errors."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def parse(kind: type[_Asked], body: bytes) -> _Asked:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    what = first["msg"].removeprefix("Value error, ")
    if first["loc"][:1] == ("prompt",) and len(first["loc"]) > 1:  # of the first of several types
        where, what = "prompt", "expected a string or a list of token ids, or a list of these"
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is no valid JSON: {what.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        what = f"{json.dumps(first['input'])[:80]} is not supported here; vLLM serves more of OpenAI's fields"
    elif first["type"] == "missing":
        what = "is missing"
    raise ApiError(400, f"{where}: {what}" if where else what, param=where or None)
