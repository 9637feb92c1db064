"""For generating and serving: text from a stream of tokens, and the length of a model's context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def context_of(model: Any) -> int | None:
    """The number of positions of a model; None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


class TextStream:
    """The text that tokens add to a prompt, piece by piece. The pieces together are the text of all tokens.

    A token alone may lose its space or be part of a character, so tokens are decoded with those before them. Not
    transformers' TextStreamer, which starts anew after every line; not tokenizers' DecodeStream, which drops an
    unfinished last character and needs a fast tokenizer.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids)
        # Tokens [context, done) were returned before and are decoded again.
        self._context, self._done = 0, len(self._ids)

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        self._ids += ids
        before, text = self._decode(self._ids[self._context : self._done]), self._decode(self._ids[self._context :])
        if not last and (text.endswith("\ufffd") or len(text) <= len(before)):
            return ""  # the last character is unfinished
        self._context, self._done = self._done, len(self._ids)
        return text[len(before) :]


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    return functools.partial(tokenizer.decode, skip_special_tokens=True)
