"""What users can name, listed in public_surface.txt, so that nothing is lost or added unnoticed.

After a change that is meant: ``PYTHONPATH=src python tests/test_public_surface.py``, and a line in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import twell
from twell.train import recipes
from twell.workbench import cli

LISTED = Path(__file__).with_name("public_surface.txt")


def commands(command: Any, name: str) -> Iterator[str]:
    """A line for each command: its arguments, and its options by all their names."""
    for sub_name, sub in sorted(getattr(command, "commands", {}).items()):
        yield from commands(sub, f"{name} {sub_name}")
    if not hasattr(command, "commands"):
        given = [
            p.name.upper() if p.param_type_name == "argument" else "/".join([*p.opts, *p.secondary_opts])
            for p in command.params
        ]
        yield " ".join([name, *given])


def surface() -> list[str]:
    requests = pytest.importorskip("twell.workbench.serve.requests", reason="needs pip install 'twell[serve]'")
    return [
        *(f"twell.{name}" for name in twell.__all__),
        *commands(typer.main.get_command(cli.app), "twell"),
        *(f"recipe {field.name}" for field in dataclasses.fields(recipes.Recipe)),
        *(f"preset {name}" for name in recipes.PRESETS),
        *(f"/v1/completions {name}" for name in requests.CompletionRequest.model_fields),
        *(f"/v1/chat/completions {name}" for name in requests.ChatRequest.model_fields),
    ]


def test_nothing_public_is_lost_or_added_unnoticed() -> None:
    changes = list(difflib.unified_diff(LISTED.read_text().splitlines(), surface(), "listed", "now", n=0, lineterm=""))
    assert not changes, "\n".join([*changes, "If this is meant: PYTHONPATH=src python tests/test_public_surface.py"])


def test_every_public_name_is_there() -> None:
    assert {*twell.__all__} <= {*dir(twell)}
    assert all(hasattr(twell, name) for name in twell.__all__)


if __name__ == "__main__":
    LISTED.write_text("\n".join(surface()) + "\n")
