"""``twell train``: a run is a folder with tokenizer, metrics, checkpoints and, at its end, the model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from twell.train.convert import Start
from twell.train.data import TEXT_SUFFIXES, Corpus, find_files, load_corpus, read_texts
from twell.train.files import (
    LOCK_FILE,
    MANIFEST_FILE,
    NOT_FINISHED,
    PART,
    checkpoints,
    describe_files,
    hold,
    newest_sound,
    step_of,
    write_whole,
    writing,
)
from twell.train.hub_data import find_dataset, read_dataset, stream_corpus
from twell.train.lora import add_lora, merge_lora, save_adapter
from twell.train.recipe_file import RECIPE_FILE, TOKENIZER_FOLDER, Saved, tokens_of
from twell.train.recipes import Recipe
from twell.train.summary import bytes_a_token, describe, last_evaluation, summarise
from twell.train.tokenizer import load_tokenizer, train_bpe
from twell.train.trainer import METRICS_FILE, SparseTrainer, make_model, make_trainer, resume

MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"  # only with LoRA
DATA_FOLDER = "data"  # the tokens of a streamed dataset
BPE_TEXTS = 20_000  # documents of a streamed dataset that a tokenizer is trained on
SUMMARY_FILE = "summary.json"
_BEGUN = RECIPE_FILE + PART  # renamed to the recipe once the run has begun


def run(
    recipe: Recipe | None,
    data: Sequence[Path | str],
    out: Path,
    *,
    validation: Sequence[Path | str] = (),
    tokenizer: str | None = None,
    start: Start | None = None,
    go_on: bool = False,
    say: Callable[[str], None] = print,
    live: bool = False,
    save_memory: bool = False,
    **arguments: Any,
) -> SparseTrainer:
    """Train ``recipe`` on ``data`` into the folder ``out``, which no other process may use meanwhile.

    ``validation``: files to validate on; without them one document in a hundred is held out.
    ``start``: a model to train further, whose shape the recipe must describe; without it weights are fresh.
    ``go_on``: continue the run in ``out`` from its newest sound checkpoint, with its own recipe, model and data. Then
        ``recipe`` may only ask for more steps, and ``data`` may only say where the same text is now.
    ``say``: gets the output line by line. ``live``: show the training as one screen instead.
    ``save_memory``: see the method of that name of the sparse models. ``arguments``: for ``TrainingArguments``.
    """
    is_first = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher started
    if not is_first:
        say = _say_nothing
    with hold(out) if is_first else contextlib.nullcontext():
        saved = Saved.read(out) if go_on else None
        if saved is not None:
            recipe = saved.extended(recipe)
            data, validation = data or saved.data, validation or saved.validation
            checkpoint, tok = _checkpoint(out, recipe.steps, say), _saved_tokenizer(saved, out, tokenizer)
        elif recipe is None:
            raise ValueError("a new run needs a recipe")
        else:
            if is_first and not _is_free(out):
                raise ValueError(f"{out} is not empty: resume the run there, or choose another folder")
            checkpoint, tok = None, _tokenizer(tokenizer, data, recipe, say)
        tokens_needed = saved.tokens_needed if saved else recipe.steps * recipe.tokens_per_step
        corpus = read_corpus(recipe, data, validation, tok, out / DATA_FOLDER, is_first, say, tokens_needed)
        say(repr(corpus))
        if saved is not None:
            saved.check_tokens(corpus)
            if recipe.steps > saved.recipe.steps and find_dataset(data):
                say(f"a longer run reads no further: it sees its {len(corpus.train):,} tokens again")
        conversion = saved.conversion if saved else None
        if conversion is not None and checkpoint is not None:
            model = _empty_model(conversion)  # the checkpoint has the weights
        elif start := Start.of(conversion["facts"]) if conversion else start:
            model, facts = start.begin(recipe, corpus, say)
            conversion = {"facts": facts, "config": json.loads(model.config.to_json_string(use_diff=False))}
        else:
            model = make_model(recipe, len(tok), tok.eos_token_id)
        if save_memory:
            _save_memory(model, arguments)
        say(
            f"{model.num_parameters():,} parameters, {model.num_parameters(only_trainable=True):,} of them train; "
            f"{recipe.steps:,} steps of {recipe.tokens_per_step:,} tokens"
        )
        trainer = make_trainer(recipe, model, corpus, out, **arguments)
        if is_first:  # everything has been checked: from now on the folder is a run's, and it is not finished
            (out / SUMMARY_FILE).unlink(missing_ok=True)
            if checkpoint is None:
                (out / METRICS_FILE).unlink(missing_ok=True)
            if saved is None:
                (out / _BEGUN).touch()
                with writing(out / TOKENIZER_FOLDER):
                    tok.save_pretrained(out / TOKENIZER_FOLDER)
            Saved(
                recipe=recipe,
                data=[str(p) for p in data],
                validation=[str(p) for p in validation],
                tokens_needed=tokens_needed,
                tokens=saved.tokens if saved else tokens_of(corpus),
                tokenizer=saved.tokenizer if saved else describe_files(out / TOKENIZER_FOLDER),
                conversion=conversion,
            ).write(out)
        begun = time.perf_counter()
        if live:
            from twell.train.live import LiveView  # which needs rich
        with LiveView(recipe) if live else contextlib.nullcontext(_Talk(recipe, say)) as view:
            trainer.add_callback(view)
            if checkpoint is None:
                trainer.train()
            else:
                resume(trainer, checkpoint)
        seconds = time.perf_counter() - begun
        _save_model(trainer, out, conversion, is_first)
        if last_evaluation(trainer).get("step") != trainer.state.global_step:
            trainer.evaluate()
        if is_first:
            summary = summarise(trainer, read_metrics(out), seconds, bytes_a_token(corpus.held_out, tok))
            if conversion is not None:
                summary["conversion"] = {**conversion["facts"], "loss_recovered": summary["validation_loss"]}
            write_whole(out / SUMMARY_FILE, json.dumps(summary, indent=1))  # a run with a summary is finished
            say(describe(summary))
            say(f"the model is in {out / MODEL_FOLDER}")
        return trainer


def _save_memory(model: Any, arguments: dict[str, Any]) -> None:
    if not hasattr(model, "save_memory"):
        raise ValueError(f"save_memory is for sparse models: {type(model).__name__} has activation=silu")
    if arguments.get("fsdp") or arguments.get("gradient_checkpointing"):
        raise ValueError("save_memory is for one GPU or DDP, and instead of gradient_checkpointing")
    model.save_memory()


def _is_free(out: Path) -> bool:
    """Whether a run may begin in ``out``: it is empty, or a run was killed there before it had a recipe."""
    names = {path.name for path in out.iterdir()} - {DATA_FOLDER, LOCK_FILE}
    return not names or (_BEGUN in names and names <= {_BEGUN, TOKENIZER_FOLDER})


def _checkpoint(out: Path, steps: int, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from; none in a run that was killed before its first."""
    checkpoint, flaws = newest_sound(out)
    skipped = f"{', '.join(flaws)}: " if flaws else ""
    if checkpoint is not None:
        is_done = step_of(checkpoint) >= steps
        say(f"{skipped}resuming from {checkpoint}" + (", the last; steps=N trains longer" if is_done else ""))
    elif all(flaw.endswith(NOT_FINISHED) for flaw in flaws):
        say(f"{skipped}there is no finished checkpoint; starting again at step 0")
    else:
        raise ValueError(
            f"{out} has no sound checkpoint to resume from: {', '.join(flaws)}; start again in another folder"
        )
    return checkpoint


def _saved_tokenizer(saved: Saved, out: Path, other: str | None) -> Any:
    """The run's own tokenizer. Another name is fine if it gives the same one."""
    saved.check_tokenizer(out)
    tok = load_tokenizer(out / TOKENIZER_FOLDER)
    if other is not None and load_tokenizer(other).get_vocab() != tok.get_vocab():
        raise ValueError(f"a resumed run keeps its tokenizer, and {other} is another one: leave out --tokenizer")
    return tok


def _empty_model(conversion: dict[str, Any]) -> PreTrainedModel:
    """A model that the run did not make from its recipe, as it was when the run began."""
    config = AutoConfig.for_model(**conversion["config"])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if lora := conversion["facts"].get("lora"):
        add_lora(model, **lora)
    return model


def _save_model(trainer: SparseTrainer, out: Path, conversion: dict[str, Any] | None, is_first: bool) -> None:
    if conversion is not None and conversion["facts"].get("lora"):
        with writing(out / ADAPTER_FOLDER):
            if is_first:
                save_adapter(trainer.model, conversion["facts"]["model"], out / ADAPTER_FOLDER)
        merge_lora(trainer.model)
    with writing(out / MODEL_FOLDER):
        trainer.save_model(str(out / MODEL_FOLDER))
        if is_first:  # copied, not saved again: that would add the path it was loaded from
            shutil.copytree(
                out / TOKENIZER_FOLDER, out / MODEL_FOLDER, copy_function=shutil.copyfile, dirs_exist_ok=True
            )


def how_to_go_on(out: Path, options: Sequence[str] = ()) -> str:
    """What to tell someone who has interrupted a run."""
    if not (out / RECIPE_FILE).exists():
        return "twell: nothing was written yet; the same command starts again"
    finished = [path.name for path in checkpoints(out) if (path / MANIFEST_FILE).exists()]
    where = f"from {finished[0]}" if finished else "from the beginning (no checkpoint yet)"
    return f"twell: to go on {where}: {shlex.join(['twell', 'train', '--resume', '--out', str(out), *options])}"


def quiet_libraries() -> None:
    """Commands do their own talking: silence progress bars, hints and warnings of transformers and the hub."""
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _say_nothing(line: str) -> None:
    pass


def read_summary(out: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    path = out / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        describe(summary)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is damaged: twell train --resume --out {out} writes it anew") from None
    return dict(summary)


def read_metrics(out: Path) -> list[dict[str, float]]:
    """The entries of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (out / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def read_corpus(
    recipe: Recipe,
    data: Sequence[Path | str],
    validation: Sequence[Path | str],
    tok: Any,
    cache: Path,
    is_first: bool,
    say: Callable[[str], None],
    tokens_needed: int | None = None,
) -> Corpus:
    """The tokens of a run. A streamed dataset is read up to ``tokens_needed``, by default what the recipe needs."""

    def encode(texts: list[str]) -> list[list[int]]:
        return tok(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)[
            "input_ids"
        ]

    from rich.console import Console
    from rich.progress import Progress as Bar

    dataset, console = find_dataset(data), Console(stderr=True)
    with Bar(console=console, transient=True, disable=not (is_first and console.is_terminal)) as bar:
        task = bar.add_task("reading data", total=None)
        common: dict[str, Any] = {
            "encode": encode,
            "end_of_text": tok.eos_token_id,
            "vocab_size": len(tok),
            "held_out": validation or 0.01,
            "progress": lambda done, total: bar.update(task, completed=done, total=total),
        }
        if dataset is None:
            return load_corpus(data, seed=recipe.seed, **common)
        return stream_corpus(
            dataset,
            cache=cache,
            tokens_needed=tokens_needed or recipe.steps * recipe.tokens_per_step,
            held_out_least=recipe.context,
            wait=not is_first,
            say=say,
            **common,
        )


def _tokenizer(name: str | None, data: Sequence[Path | str], recipe: Recipe, say: Callable[[str], None]) -> Any:
    if name is not None:
        return load_tokenizer(name)
    if dataset := find_dataset(data):
        say(f"training a BPE of {recipe.vocab_size:,} tokens on the first {BPE_TEXTS:,} documents of {dataset}")
        with contextlib.closing(read_dataset(dataset)) as texts:
            return train_bpe(itertools.islice(texts, BPE_TEXTS), recipe.vocab_size)
    files = find_files(data)
    if any(path.suffix not in TEXT_SUFFIXES for path in files):
        raise ValueError("tokenised data needs the tokenizer it was made with: give --tokenizer")
    say(f"training a BPE of {recipe.vocab_size:,} tokens")
    return train_bpe((text for path in files for text in read_texts(path)), recipe.vocab_size)


class _Talk(TrainerCallback):
    """Says one line for each log entry."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, self.say = recipe, say

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        where = f"step {state.global_step:>{len(str(self.recipe.steps))}}/{self.recipe.steps}"
        if "eval_loss" in logs:
            self.say(f"{where}  validation cross-entropy {logs['eval_loss']:.4f}")
        elif "ce_loss" in logs:
            line = f"{where}  cross-entropy {logs['ce_loss']:.4f}"
            if "active_mean" in logs:
                share = logs["active_mean"] / self.recipe.intermediate_size
                line += f"  L1 {logs['l1_loss']:.2f} x {logs['l1']:.2g}  active {logs['active_mean']:.1f} ({share:.1%})"
                line += f"  dead {logs['dead_share']:.1%}"
                if logs["sparse_layers"]:
                    line += f"  sparse {logs['sparse_layers']}/{self.recipe.layers}"
            if "tokens_per_second" in logs:
                line += f"  {logs['tokens_per_second']:,.0f} tokens/s"
            self.say(line)
