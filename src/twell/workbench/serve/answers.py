"""The answer to one prompt: its text piece by piece, and log probabilities in the shapes of OpenAI's responses."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from twell.hf.text import TextStream, decoder
from twell.workbench.serve.jobs import Job, Scored
from twell.workbench.serve.metrics import Metrics


@dataclasses.dataclass
class Piece:
    """A part of an answer. Its text can be empty and its tokens not: the next piece then has their text."""

    text: str = ""
    tokens: list[tuple[int, Scored | None]] = dataclasses.field(default_factory=list)  # a prompt's first: not scored


@dataclasses.dataclass(eq=False)
class Answer:
    """The text of one job, piece by piece; ``finish_reason`` says why it ended."""

    job: Job
    index: int
    stops: list[str]
    echo: str | None  # until the first piece, which begins with it
    tokenizer: Any
    eos: set[int]
    metrics: Metrics
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._text, self._until_stop, self._n_given = TextStream(decoder(self.tokenizer)), UntilStop(self.stops), 0
        self._offsets, self._offset = TextStream(decoder(self.tokenizer)), 0  # characters of text before the next token

    def add(self, new: list[int] | None) -> Piece:
        """The piece that new tokens complete. None: there are no more of them."""
        piece, is_last, until_stop = Piece(), new is None, self._until_stop
        if self.echo is not None:
            piece, self.echo = Piece(self.echo, list(zip(self.job.ids, self.job.prompt_scores, strict=False))), None
        if new and not self.tokens:
            self.metrics.first_token.observe(time.monotonic() - self._started)
        self.tokens += new or []
        self.metrics.completion_tokens.inc(len(new or []))
        text = until_stop.add(self._text.add(new or [], last=is_last), last=is_last)
        if text or is_last or until_stop.found:
            piece.text += text
            piece.tokens += zip(self.tokens[self._n_given :], self.job.scores[self._n_given :], strict=False)
            self._n_given = len(self.tokens)
        if is_last or until_stop.found:
            self.metrics.whole_answer.observe(time.monotonic() - self._started)
            is_cut = not until_stop.found and len(self.tokens) >= self.job.max_tokens
            self.finish_reason = "length" if is_cut and self.eos.isdisjoint(self.tokens[-1:]) else "stop"
        return piece

    # -- log probabilities -----------------------------------------------------------------------------

    def completion_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.job.n_top is None:
            return None
        return {
            "tokens": [self._text_of(token) for token, _ in piece.tokens],
            "token_logprobs": [None if scored is None else scored.logprob for _, scored in piece.tokens],
            "top_logprobs": [None if scored is None else self._top(token, scored) for token, scored in piece.tokens],
            "text_offset": [self._offset_of(token) for token, _ in piece.tokens],
        }

    def chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.job.n_top is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._text_of(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**entry(token, scored.logprob), "top_logprobs": [entry(*one) for one in scored.top]}
                for token, scored in piece.tokens
                if scored is not None
            ]
        }

    def _top(self, token: int, scored: Scored) -> dict[str, float]:
        """Log probabilities of the likeliest tokens and of the token, by text; of equal texts the likelier one."""
        top: dict[str, float] = {}
        for one, logprob in [*scored.top, (token, scored.logprob)]:
            top.setdefault(self._text_of(one), logprob)
        return top

    def _offset_of(self, token: int) -> int:
        before = self._offset
        self._offset += len(self._offsets.add([token]))
        return before

    def _text_of(self, token: int) -> str:
        text = str(self.tokenizer.decode([token]))
        return str(self.tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text  # part of a character


def usage_of(answers: list[Answer]) -> dict[str, int]:
    n_prompt = sum(len(answer.job.ids) for answer in answers)
    n_new = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


class UntilStop:
    """Passes text on up to the first stop string, and holds back an end that may be the beginning of one."""

    def __init__(self, stops: list[str]) -> None:
        self.found = False
        self._stops = stops
        self._pending = ""

    def add(self, text: str, *, last: bool = False) -> str:
        self._pending += text
        starts = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        self.found = bool(starts)
        ready = min(starts) if starts else len(self._pending) - (0 if last else self._held_back())
        text, self._pending = self._pending[:ready], self._pending[ready:]
        return text

    def _held_back(self) -> int:
        """The number of characters at the end that may begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        ends = (self._pending[-n:] for n in range(min(longest, len(self._pending)), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
