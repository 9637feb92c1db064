"""What clients may ask for, in the shapes of OpenAI's endpoints. All else is refused: nothing is left out silently."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_STOPS = 16

# Fields that change no answer, and values of other fields that do not.
_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "suffix": "",
    "tools": [],
    "response_format": {"type": "text"},
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints take. Fields that would change the answer and are not known here are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
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
        neutral = {name for name, value in body.items() if name in _NEUTRAL and value == _NEUTRAL[name]}
        left_out = {name for name, value in body.items() if value is None}
        return {name: value for name, value in body.items() if name not in neutral | left_out | _NO_EFFECT}

    @field_validator("stop", mode="before")
    @classmethod
    def _some_strings(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list) and "" in stops:
            raise ValueError("a stop string must not be empty")
        return stops


class CompletionRequest(GenerationRequest):
    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            raise ValueError("one prompt a request: send several requests, they are computed together")
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(t) is int for t in prompt)):
            raise ValueError("expected a string or a list of token ids")
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt


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
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


_Asked = TypeVar("_Asked", bound=GenerationRequest)


class ApiError(Exception):
    """Becomes a response in the shape of OpenAI's errors."""

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
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is no valid JSON: {what.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        what = f"{json.dumps(first['input'])[:80]} is not supported here"
    elif first["type"] == "missing":
        what = "is missing"
    raise ApiError(400, f"{where}: {what}" if where else what, param=where or None)
