"""The ``twell`` command. Heavy modules are imported inside the commands, so that --help is quick."""

from __future__ import annotations

import sys
import warnings

from twell.workbench.cli import (
    bench,
    bench_model,
    bench_train,
    converting,
    errors,
    evaluating,
    generating,
    machine,
    measured,
    models,
    serving,
    training,
)
from twell.workbench.cli.app import app

__all__ = [
    "app",
    "bench",
    "bench_model",
    "bench_train",
    "converting",
    "errors",
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
    warnings.formatwarning = errors.one_line
    try:
        app()
    except KeyboardInterrupt:
        print("twell: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if errors.wants_traceback():
            raise
        said, code = errors.explain(error)
        print(said, file=sys.stderr)
        sys.exit(code)
