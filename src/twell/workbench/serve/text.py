"""Text as it comes, up to a stop string."""

from __future__ import annotations


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
