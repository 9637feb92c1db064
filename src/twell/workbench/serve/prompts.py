"""Token ids of prompts. A prompt that is far too long is refused by its characters, before tokenizing costs time."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from jinja2 import TemplateError

from twell.workbench.serve.requests import ApiError, Message

QUICK = 4096  # characters; shorter texts do not wait for longer ones
SLICE = 2**16  # characters


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
        return [await self._encode(text, "prompt") for text in texts]

    async def of_messages(self, messages: list[Message]) -> list[int]:
        if len(messages) > self.max_length:
            raise self.too_long("messages", f"more: {len(messages):,} messages")
        self._check_characters(sum(len(message.content) for message in messages), "messages")
        text = await asyncio.to_thread(self._chat_text, messages)
        return await self._encode(text, "messages", add_special_tokens=False)

    def _chat_text(self, messages: list[Message]) -> str:
        said = [message.model_dump(exclude_none=True) for message in messages]
        try:
            return self.template_of.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # templates refuse roles or their order in this way
            raise ApiError(400, f"messages: the chat template refuses them: {error}", param="messages") from None

    def check(self, ids: list[int], field: str) -> None:
        if not ids:
            raise ApiError(400, f"{field}: it has no tokens", param=field)
        if len(ids) > self.max_length:
            raise self.too_long(field, f"{len(ids):,}")
        if not (min(ids) >= 0 and max(ids) < self.vocabulary):
            raise ApiError(400, f"{field}: token ids must lie between 0 and {self.vocabulary - 1}", param=field)

    def too_long(self, field: str, how_many: str) -> ApiError:
        message = f"{field}: the model's context is {self.max_length:,} tokens, the prompt has {how_many}"
        return ApiError(400, message, param=field, code="context_length_exceeded")

    def _check_characters(self, n: int, field: str) -> None:
        if n > self.max_length * self.longest_token:
            raise self.too_long(field, f"more: {n:,} characters, and no token has more than {self.longest_token}")

    async def _encode(self, text: str, field: str, **how: Any) -> list[int]:
        tokenizer, lock = self.lanes[len(text) > QUICK]
        async with lock:
            if await asyncio.to_thread(self._is_far_too_long, tokenizer, text):
                raise self.too_long(field, f"more than {2 * self.max_length:,}")
            return await asyncio.to_thread(lambda: tokenizer(text, **how).input_ids)

    def _is_far_too_long(self, tokenizer: Any, text: str) -> bool:
        """Whether a text has more than twice as many tokens as the context, counted slice by slice.

        Cutting a text into slices changes a token or two, nowhere near half of them.
        """
        n_tokens = 0
        for start in range(0, len(text) if len(text) > SLICE else 0, SLICE):
            n_tokens += len(tokenizer(text[start : start + SLICE], add_special_tokens=False).input_ids)
            if n_tokens > 2 * self.max_length + SLICE // 16:
                return True
        return False
