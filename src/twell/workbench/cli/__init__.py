"""The ``twell`` command. Heavy modules are imported inside the commands, so that --help is quick."""

from __future__ import annotations

import os
import sys
import warnings

from twell.workbench.cli import (  # noqa: F401  each adds its commands to the app
    analyze,
    bench_decode,
    bench_ffn,
    bench_model,
    bench_train,
    calibrate,
    compare,
    convert,
    demo,
    doctor,
    errors,
    eval,
    generate,
    quantize,
    serve,
    sweep,
    train,
    tune,
)
from twell.workbench.cli.app import app


def main() -> None:
    """Run the command that was given; every error ends in one clear line and an exit code."""
    warnings.formatwarning = errors.one_line
    try:
        app()
    except KeyboardInterrupt:
        print("twell: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get(errors.SHOW_TRACEBACK, "0") != "0":
            raise
        said, code = errors.explain(error)
        print(said, file=sys.stderr)
        sys.exit(code)
