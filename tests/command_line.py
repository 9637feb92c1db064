"""The command line in the tests' own process: the fixture ``twell`` (conftest.py) and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Twell = Callable[..., Result]
