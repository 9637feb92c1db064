"""The one place where errors of commands end: bad input gives one clear line, a bug says how to report it."""

from __future__ import annotations

import shlex
import sys

from twell.workbench.extras import EXTRAS

SHOW_TRACEBACK = "TWELL_TRACEBACK"  # an environment variable: 1 raises errors as they are
BAD_INPUT, BUG = 2, 70  # exit codes; 1 is a command's own verdict


def one_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning without the place in the code that gave it."""
    return f"twell: warning: {message}\n"


def explain(error: Exception) -> tuple[str, int]:
    """What to print for an error, and the exit code.

    A failed import names the package to install. ValueError, RuntimeError and OSError are bad input; others are bugs.
    """
    said = str(error).strip().partition("\n")[0]
    package = (getattr(error, "name", None) or "twell").partition(".")[0]
    if isinstance(error, ImportError) and package != "twell":
        extras = [extra for extra, packages in EXTRAS.items() if package in packages]
        extras.sort(key=lambda extra: extra not in sys.argv[1:2])  # first the one that is named as the command
        what = f"'twell[{extras[0]}]'" if extras else package
        if isinstance(error, ModuleNotFoundError):
            return f"twell: error: this needs another package, {package}: pip install {what}", BAD_INPUT
        return f"twell: error: this needs another version of {package} ({said}): pip install -U {what}", BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        said = f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | RuntimeError | OSError) and said:
        return f"twell: error: {said}", getattr(error, "exit_code", BAD_INPUT)
    again = shlex.join(["twell", *sys.argv[1:]])
    return (
        f"twell: unexpected error: {type(error).__name__}: {said}\n"
        f"This is a bug of twell. Please report it, with what this prints: {SHOW_TRACEBACK}=1 {again}"
    ), BUG
