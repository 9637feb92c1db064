"""``twell train``: a run is a folder with the tokenizer, metrics, checkpoints and, at its end, the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from twell.train.data import TEXT_SUFFIXES, Corpus, find_files, load_corpus, read_texts
from twell.train.recipes import Recipe
from twell.train.tokenizer import load_tokenizer, train_bpe
from twell.train.trainer import SparseTrainer, latest_checkpoint, make_model, make_trainer, resume

MODEL_FOLDER = "model"
TOKENIZER_FOLDER = "tokenizer"
RECIPE_FILE = "recipe.json"


def run(
    recipe: Recipe | None,
    data: Sequence[Path | str],
    out: Path,
    *,
    tokenizer: str | None = None,
    go_on: bool = False,
    say: Callable[[str], None] = print,
    **arguments: Any,
) -> SparseTrainer:
    """Train ``recipe`` on ``data`` into the folder ``out``.

    With ``go_on`` the run there continues with its own recipe from its newest finished checkpoint. ``say`` gets a
    line at a time; ``arguments`` go to ``TrainingArguments``.
    """
    checkpoint = latest_checkpoint(out) if go_on else None
    if go_on and checkpoint is None:
        raise ValueError(f"{out} has no finished checkpoint to resume from")
    if not go_on and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: resume the run there, or choose another folder")
    saved = out / TOKENIZER_FOLDER
    if go_on:
        recipe = Recipe(**json.loads((out / RECIPE_FILE).read_text()))
    if recipe is None:
        raise ValueError("a new run needs a recipe")
    tok = load_tokenizer(saved) if go_on else _tokenizer(tokenizer, data, recipe, say)
    corpus = read_corpus(recipe, data, tok)
    say(repr(corpus))
    out.mkdir(parents=True, exist_ok=True)
    tok.save_pretrained(saved)
    (out / RECIPE_FILE).write_text(json.dumps(dataclasses.asdict(recipe), indent=1))

    model = make_model(recipe, len(tok), tok.eos_token_id)
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters; {recipe.steps:,} steps")
    trainer = make_trainer(recipe, model, corpus, out, **arguments)
    trainer.add_callback(_Talk(recipe, say))
    if checkpoint is None:
        trainer.train()
    else:
        say(f"resuming from {checkpoint}")
        resume(trainer, checkpoint)
    trainer.save_model(str(out / MODEL_FOLDER))
    tok.save_pretrained(out / MODEL_FOLDER)
    say(f"the model is in {out / MODEL_FOLDER}")
    return trainer


def read_corpus(recipe: Recipe, data: Sequence[Path | str], tok: Any) -> Corpus:
    def encode(text: str) -> list[int]:
        return tok.encode(text, add_special_tokens=False)

    return load_corpus(data, encode=encode, end_of_text=tok.eos_token_id, vocab_size=len(tok), seed=recipe.seed)


def _tokenizer(name: str | None, data: Sequence[Path | str], recipe: Recipe, say: Callable[[str], None]) -> Any:
    if name is not None:
        return load_tokenizer(name)
    files = find_files(data)
    if any(path.suffix not in TEXT_SUFFIXES for path in files):
        raise ValueError("tokenised data needs the tokenizer it was made with: give --tokenizer")
    say(f"training a BPE of {recipe.vocab_size:,} tokens")
    return train_bpe((text for path in files for text in read_texts(path)), recipe.vocab_size)


class _Talk(TrainerCallback):
    """One line a log entry."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, self.say = recipe, say

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        where = f"step {state.global_step:>{len(str(self.recipe.steps))}}/{self.recipe.steps}"
        if "eval_loss" in logs:
            self.say(f"{where}  validation cross-entropy {logs['eval_loss']:.4f}")
        elif "ce_loss" in logs:
            share = logs["active_mean"] / self.recipe.intermediate_size
            self.say(
                f"{where}  cross-entropy {logs['ce_loss']:.4f}  L1 {logs['l1_loss']:.2f}  active "
                f"{logs['active_mean']:.1f} ({share:.1%})  dead {logs['dead_share']:.1%}"
            )
