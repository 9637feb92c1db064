"""For generating and serving: what ``generate`` gets and gives, text from a stream of tokens, a model's context."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any


def context_of(model: Any) -> int | None:
    """The number of positions of a model; None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def greedy_config(model: Any, **changes: Any) -> Any:
    """The model's own generation configuration, for one greedy answer a prompt, with ``changes``."""
    config = copy.deepcopy(model.generation_config)
    eos = config.eos_token_id
    config.update(
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        num_beams=1,
        num_return_sequences=1,
        max_length=None,
        # Rows that have ended continue with it, and it is dropped again: any token of the vocabulary will do.
        pad_token_id=(eos[0] if isinstance(eos, list) else eos) or 0,
    )
    config.update(**changes)
    return config


class Streamer:
    """For ``generate``, which puts the prompts first: keeps each step's tokens and time, and passes the tokens on."""

    def __init__(self, on_step: Callable[[list[int]], object] = lambda tokens: None) -> None:
        self.steps: list[tuple[float, list[int]]] = []  # time.perf_counter(), the token of each row
        self._on_step, self._is_prompt = on_step, True

    def put(self, tokens: Any) -> None:
        if not self._is_prompt:
            self.steps.append((time.perf_counter(), tokens.tolist()))
            self._on_step(self.steps[-1][1])
        self._is_prompt = False

    def end(self) -> None:
        pass


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
