"""How long work reports its progress: a callback that is told how much is done, of how much."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (done, total)


def silent(done: int, total: int) -> None:
    """Report nothing."""
