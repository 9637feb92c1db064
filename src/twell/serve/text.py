"""Text out of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable


class TextStream:
    """Text of tokens as they come; joined, the pieces are the text of all tokens decoded at once.

    The end of a text may change with the next token (parts of a character, a space that only shows inside), so a
    piece is what the last few tokens add to the ones before, once it ends in a whole character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context, self._done = 0, 0  # tokens [context, done) were given out and are decoded along

    def add(self, ids: list[int], *, last: bool = False) -> str:
        self._ids += ids
        before = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        if not last and (text.endswith("\ufffd") or len(text) <= len(before)):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(before) :]


class UntilStop:
    """Passes text on up to the first stop string; what may be the beginning of one is held back."""

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
        """How many characters at the end may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for n in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-n:]) for stop in self._stops):
                return n
        return 0
