"""Token ids of prompts. A prompt that is far too long is refused by its characters, before tokenizing costs time."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from jinja2 import TemplateError

from twell.workbench.serve.requests import ApiError, Message

QUICK = 4096  # characters; shorter texts do not wait for longer ones


class Prompts:
    """Tokenizes texts and messages in threads: a long text takes seconds, and other requests are streaming."""

    def __init__(self, tokenizer: Any, vocabulary: int, max_length: int) -> None:
        self.template_of, self.vocabulary, self.max_length = tokenizer, vocabulary, max_length
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)  # characters
        # Tokenizers are not thread-safe: each lane has its own, and a lock.
        self.lanes = [(copy.deepcopy(tokenizer), asyncio.Lock()) for _ in ("quick", "slow")]

    async def of_texts(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            self._check_characters(len(text), "prompt")
        return [await self._encode(text) for text in texts]

    async def of_messages(self, messages: list[Message]) -> list[int]:
        self._check_characters(sum(len(message.content) for message in messages), "messages")
        said = [message.model_dump(exclude_none=True) for message in messages]
        how = {"add_generation_prompt": True, "tokenize": False}
        try:
            text = await asyncio.to_thread(self.template_of.apply_chat_template, said, **how)
        except TemplateError as error:  # templates refuse roles or their order in this way
            raise ApiError(400, f"messages: the chat template refuses them: {error}", param="messages") from None
        return await self._encode(text, add_special_tokens=False)

    def check(self, ids: list[int], max_tokens: int | None, field: str) -> None:
        if not ids:
            raise ApiError(400, f"{field}: it has no tokens", param=field)
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise ApiError(400, f"{field}: token ids must lie between 0 and {self.vocabulary - 1}", param=field)
        room = self.max_length - len(ids)
        if room < (1 if max_tokens is None else max_tokens):
            more = f" and max_tokens asks for {max_tokens:,} more" if max_tokens and room >= 1 else ""
            raise self._too_long(field, f"{len(ids):,}{more}")

    def _too_long(self, field: str, how_many: str) -> ApiError:
        message = f"{field}: the model's context is {self.max_length:,} tokens, the prompt has {how_many}"
        return ApiError(400, message, param=field, code="context_length_exceeded")

    def _check_characters(self, n: int, field: str) -> None:
        if n > self.max_length * self.longest_token:
            raise self._too_long(field, f"more: {n:,} characters, and no token has more than {self.longest_token}")

    async def _encode(self, text: str, **how: Any) -> list[int]:
        tokenizer, lock = self.lanes[len(text) > QUICK]
        async with lock:
            return await asyncio.to_thread(lambda: tokenizer(text, **how).input_ids)
