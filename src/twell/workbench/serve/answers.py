"""The answer to one prompt: its text piece by piece, and log probabilities in the shapes of OpenAI's responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from twell.hf.text import TextStream, decoder
from twell.workbench.serve.jobs import Job, Scored
from twell.workbench.serve.metrics import Metrics


class Piece(NamedTuple):
    text: str
    tokens: list[tuple[int, Scored | None]]  # with log probabilities; the first token of a prompt has none


class Answer:
    """The text of one job, piece by piece; afterwards ``finish_reason`` says why it ended."""

    def __init__(
        self,
        job: Job,
        results: asyncio.Queue[Any],
        *,
        index: int,
        stops: list[str],
        echo: str | None,
        tokenizer: Any,
        eos: set[int],
        metrics: Metrics,
    ) -> None:
        self.job, self.results, self.index, self.stops, self.echo = job, results, index, stops, echo
        self.tokenizer, self.eos, self.metrics = tokenizer, eos, metrics
        self.started = time.monotonic()
        self.tokens: list[int] = []
        self.finish_reason = "stop"
        self.offsets = TextStream(decoder(tokenizer))
        self.offset = 0  # characters of text before the next token

    async def pieces(self) -> AsyncIterator[Piece]:
        """With ``echo`` the first piece is the prompt. A piece with empty text can carry tokens."""
        text = TextStream(decoder(self.tokenizer))
        until_stop = UntilStop(self.stops)
        n_given, is_last = 0, False  # tokens in the pieces so far
        waits_for_prompt = self.echo is not None
        while not is_last:
            result = await self.results.get()
            if isinstance(result, Exception):
                raise result
            is_last, tokens = result is None, result or []
            if waits_for_prompt:
                waits_for_prompt = False
                yield Piece(self.echo or "", list(zip(self.job.ids, self.job.prompt_scores, strict=False)))
            if tokens and not self.tokens:
                self.metrics.first_token.observe(time.monotonic() - self.started)
            self.tokens += tokens
            self.metrics.completion_tokens.inc(len(tokens))
            piece = until_stop.add(text.add(tokens, last=is_last), last=is_last)
            ends = is_last or until_stop.found
            if piece or (ends and self.job.n_top is not None and n_given < len(self.tokens)):
                yield Piece(piece, list(zip(self.tokens[n_given:], self.job.scores[n_given:], strict=False)))
                n_given = len(self.tokens)
            if until_stop.found:
                break
        self.metrics.whole_answer.observe(time.monotonic() - self.started)
        last_token = self.tokens[-1] if self.tokens else None
        if not until_stop.found and len(self.tokens) >= self.job.max_tokens and last_token not in self.eos:
            self.finish_reason = "length"

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
        before = self.offset
        self.offset += len(self.offsets.add([token]))
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
        for n in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-n:]) for stop in self._stops):
                return n
        return 0
