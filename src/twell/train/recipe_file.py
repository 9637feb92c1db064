"""``recipe.json``: what a run trains and on which tokens, and what a resumed run may change.

A resumed run may train for more steps, and its data may have moved. Nothing else changes: recipe, tokens, tokenizer.
The file contains its own checksum, since one changed digit would make it another run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from twell.train.data import Corpus
from twell.train.files import flaw_of_files, write_whole
from twell.train.recipes import Recipe

RECIPE_FILE = "recipe.json"
TOKENIZER_FOLDER = "tokenizer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What resuming needs besides a checkpoint."""

    recipe: Recipe
    data: list[str]
    validation: list[str]
    tokens_needed: int  # how much of a streamed dataset the run began with
    tokens: dict[str, str]  # checksums of the training and the validation tokens
    tokenizer: dict[str, dict[str, Any]]  # sizes and checksums of its files
    conversion: dict[str, Any] | None = None  # the configuration of the model it began with, and facts about it

    def write(self, out: Path) -> None:
        content = dataclasses.asdict(self)
        write_whole(out / RECIPE_FILE, json.dumps({**content, "sha256": _checksum(content)}, indent=1))

    @classmethod
    def read(cls, out: Path) -> Self:
        path = out / RECIPE_FILE
        if not path.is_file():
            raise ValueError(f"{out} holds no run to resume: it has no {RECIPE_FILE}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("sha256") == _checksum(content):
                return cls(**{**content, "recipe": Recipe(**content["recipe"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise ValueError(
            f"{path} is damaged or was edited: restore it, or start again in another folder (longer runs: "
            "twell train --resume steps=N)"
        )

    def extended(self, wanted: Recipe | None) -> Recipe:
        """The run's own recipe, with as many steps as wanted."""
        if wanted is None:
            return self.recipe
        if differences := differing_fields(dataclasses.replace(wanted, steps=self.recipe.steps), self.recipe):
            raise ValueError(
                f"a resumed run keeps its recipe, all but more steps; {differences}: leave that out, or choose another "
                "folder for a new run"
            )
        if wanted.steps < self.recipe.steps:
            raise ValueError(
                f"the run is one of {self.recipe.steps:,} steps: resumed, it may train longer, not for {wanted.steps:,}"
            )
        return wanted

    def check_tokenizer(self, out: Path) -> None:
        if flaw := flaw_of_files(out / TOKENIZER_FOLDER, self.tokenizer):
            raise ValueError(
                f"the tokenizer in {out / TOKENIZER_FOLDER} is damaged ({flaw}): restore it, or start again in another "
                "folder"
            )

    def check_tokens(self, corpus: Corpus) -> None:
        now = tokens_of(corpus)
        if changed := [part for part in self.tokens if now[part] != self.tokens[part]]:
            raise ValueError(
                f"the {' and '.join(changed)} text is not what the run began with (now: {corpus!r}): a resumed run "
                "needs the same text; for another one start a new run in another folder"
            )


def tokens_of(corpus: Corpus) -> dict[str, str]:
    """Checksums of the tokens; they do not depend on file names."""
    parts = {"training": corpus.train, "validation": corpus.held_out}
    return {name: hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest() for name, tokens in parts.items()}


def check_same_run(out: Path, recipe: Recipe, data: Sequence[Path | str], validation: Sequence[Path | str]) -> None:
    """Refuse a folder with another run, for commands that continue when they are repeated."""
    saved = Saved.read(out)
    now, was = [[str(p) for p in paths] for paths in (data, validation)], [saved.data, saved.validation]
    if what := differing_fields(recipe, saved.recipe) or (now != was and f"data {now} instead of {was}"):
        raise ValueError(f"{out} holds a run of another recipe or other data: {what}; choose another folder")


def differing_fields(recipe: Recipe, was: Recipe) -> str:
    """``lr=0.1 instead of 0.01, ...``; empty for equal recipes."""
    names = [f.name for f in dataclasses.fields(Recipe)]
    pairs = [(name, getattr(recipe, name), getattr(was, name)) for name in names]
    return ", ".join(f"{name}={now} instead of {before}" for name, now, before in pairs if now != before)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
