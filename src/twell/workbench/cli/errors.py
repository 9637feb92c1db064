"""The one place where errors of commands end: bad input is one clear line, a bug says how to report it."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys

SHOW_TRACEBACK = "TWELL_TRACEBACK"  # an environment variable: set to 1, errors are raised as they are
BAD_INPUT, BUG = 2, 70  # exit codes; 1 is a command's own verdict
_EXTRAS = {  # the extra that brings a package
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "accelerate": "train",
    "pyarrow": "train",
    "lm_eval": "eval",
    "datasets": "data",
    "pynvml": "bench",
    "matplotlib": "plot",
    "starlette": "serve",
    "uvicorn": "serve",
    "pydantic": "serve",
    "jinja2": "serve",
}


def wants_traceback() -> bool:
    return os.environ.get(SHOW_TRACEBACK, "") not in ("", "0")


def one_line(message: Warning | str, *_: object, **__: object) -> str:
    """How a warning is shown: without the place in the code that gave it."""
    return f"twell: warning: {message}\n"


def explain(error: Exception) -> tuple[str, int]:
    """What to say of an error, and the exit code. ValueError, RuntimeError and OSError are about input, others bugs."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("twell"):
        package = error.name.partition(".")[0]
        what = f"'twell[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        return f"twell: error: this needs another package, {package}: pip install {what}", BAD_INPUT
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        said = f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | RuntimeError | OSError) and said:
        return f"twell: error: {said}", BAD_INPUT
    again = shlex.join(["twell", *sys.argv[1:]])
    return (
        f"twell: unexpected error: {type(error).__name__}: {said}\n"
        f"This is a bug of twell. Please report it {_where()}, with what this prints: {SHOW_TRACEBACK}=1 {again}"
    ), BUG


def _where() -> str:
    """The address that the package's metadata names for issues, if any."""
    try:
        urls = importlib.metadata.metadata("twell").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        urls = []
    named = (url.partition(",") for url in urls)
    return next((f"at {url.strip()}" for label, _, url in named if label.lower() == "issues"), "to its maintainers")
