"""What generating and serving share: text out of tokens, and how many a model takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def context_of(model: Any) -> int | None:
    """The positions a model has, or None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


class TextStream:
    """The text that tokens add to a prompt, or to nothing; pieces joined are the text of all tokens at once.

    Tokens are decoded with those before them: a token alone may lose its space (which is why this is not
    transformers' TextStreamer, which starts anew after every line) or be part of a character.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids)
        self._context, self._done = 0, len(self._ids)  # the text of tokens [context, done) was given out before

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        self._ids += ids
        before, text = self._decode(self._ids[self._context : self._done]), self._decode(self._ids[self._context :])
        if not last and (text.endswith("\ufffd") or len(text) <= len(before)):
            return ""  # the character, or the space, is not whole yet
        self._context, self._done = self._done, len(self._ids)
        return text[len(before) :]


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    return functools.partial(tokenizer.decode, skip_special_tokens=True)
