"""The ``twell`` command. Heavy modules are imported inside the commands, so that --help is quick."""

from __future__ import annotations

import sys

from twell.cli import (
    bench,
    bench_train,
    converting,
    evaluating,
    generating,
    machine,
    measured,
    models,
    serving,
    training,
)
from twell.cli.app import app

__all__ = [
    "app",
    "bench",
    "bench_train",
    "converting",
    "evaluating",
    "generating",
    "machine",
    "main",
    "measured",
    "models",
    "serving",
    "training",
]


def main() -> None:
    """Entry point: bad input ends in one clear line and exit code 2."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"twell: error: {str(error).strip().partition(chr(10))[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("twell: interrupted", file=sys.stderr)
        sys.exit(130)
