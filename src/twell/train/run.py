"""``twell train``: a run is a folder with the tokenizer, metrics, checkpoints and, at its end, the model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from twell import __version__
from twell.train.data import TEXT_SUFFIXES, Corpus, Progress, find_files, load_corpus, read_texts
from twell.train.files import (
    LOCK_FILE,
    MANIFEST_FILE,
    NOT_FINISHED,
    PART,
    Found,
    checkpoints,
    describe_files,
    hold,
    newest_sound,
    step_of,
    write_whole,
    writing,
)
from twell.train.hub_data import find_dataset, read_dataset, stream_corpus
from twell.train.live import LiveView
from twell.train.lora import add_lora, merge_lora, save_adapter
from twell.train.recipe_file import RECIPE_FILE, TOKENIZER_FOLDER, Saved, tokens_of
from twell.train.recipes import Recipe
from twell.train.tokenizer import load_tokenizer, train_bpe
from twell.train.trainer import METRICS_FILE, SparseTrainer, make_model, make_trainer, resume

MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"  # of a run with LoRA
DATA_FOLDER = "data"  # of a streamed dataset
BPE_TEXTS = 20_000  # of a streamed dataset, to train a tokenizer on
SUMMARY_FILE = "summary.json"
_BEGUN = RECIPE_FILE + PART  # becomes the recipe: until then a run has not begun

# A model to start from, made once the data is read, and what the summary should say of it.
Begin = Callable[[Recipe, Corpus], tuple[PreTrainedModel, dict[str, Any]]]


def run(
    recipe: Recipe | None,
    data: Sequence[Path | str],
    out: Path,
    *,
    validation: Sequence[Path | str] = (),
    tokenizer: str | None = None,
    begin: Begin | None = None,
    go_on: bool = False,
    say: Callable[[str], None] = print,
    live: bool = False,
    save_memory: bool = False,
    **arguments: Any,
) -> SparseTrainer:
    """Train ``recipe`` on ``data`` into the folder ``out``, which no other process may use meanwhile.

    ``validation`` are files to validate on; without them one document in a hundred is held out. ``begin`` gives a model
    to start from, whose shape the recipe must describe; without it weights are fresh. With ``go_on`` the run there
    continues from its newest sound checkpoint, with its own recipe, model and data: a ``recipe`` may then only ask for
    more steps, and ``data`` only say where the same text is now. ``say`` gets a line at a time; with ``live`` the
    terminal shows the training as one screen instead. ``save_memory``: see the models' method of that name.
    ``arguments`` go to ``TrainingArguments``.
    """
    if go_on and not (out / RECIPE_FILE).exists():
        raise ValueError(f"{out} holds no run to resume: it has no {RECIPE_FILE}")
    with hold(out) if _is_first() else contextlib.nullcontext():
        return _run(recipe, data, out, validation, tokenizer, begin, go_on, say, live, save_memory, arguments)


def _is_first() -> bool:
    """Of the processes a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def _run(
    recipe: Recipe | None,
    data: Sequence[Path | str],
    out: Path,
    validation: Sequence[Path | str],
    tokenizer: str | None,
    begin: Begin | None,
    go_on: bool,
    say: Callable[[str], None],
    live: bool,
    save_memory: bool,
    arguments: dict[str, Any],
) -> SparseTrainer:
    is_first = _is_first()
    if not is_first:
        say = _say_nothing
    saved = Saved.read(out) if go_on else None
    if saved is not None:
        _check_places(out)
        recipe = saved.extended(recipe)
        data, validation = data or saved.data, validation or saved.validation
        found, tok = _found(out, recipe.steps, say), _saved_tokenizer(saved, out, tokenizer)
    elif recipe is None:
        raise ValueError("a new run needs a recipe")
    else:
        if is_first and not _is_free(out):
            raise ValueError(f"{out} is not empty: resume the run there, or choose another folder")
        found, tok = Found(None, {}), _tokenizer(tokenizer, data, recipe, say)
    tokens_needed = saved.tokens_needed if saved else recipe.steps * recipe.tokens_per_step
    corpus = read_corpus(recipe, data, validation, tok, out / DATA_FOLDER, is_first, say, tokens_needed)
    say(repr(corpus))
    if saved is not None:
        saved.check_tokens(corpus)
    model, conversion = _model(recipe, corpus, tok, saved if found.checkpoint else None, begin)
    if saved is not None and saved.conversion and not conversion:
        raise ValueError(f"{out} has no checkpoint yet, so the model it began with is needed: give begin again")
    if save_memory:
        _save_memory(model, arguments)
    if saved is not None and recipe.steps > saved.recipe.steps and find_dataset(data):
        say(f"a longer run reads no further: it sees its {len(corpus.train):,} tokens again")
    size, trained = f"{model.num_parameters():,} parameters", model.num_parameters(only_trainable=True)
    size += "" if trained == model.num_parameters() else f", {trained:,} of them train"
    say(f"{size}; {recipe.steps:,} steps of {recipe.tokens_per_step:,} tokens")
    trainer = make_trainer(recipe, model, corpus, out, **arguments)
    trainer.unsound = list(found.flaws)
    if is_first:  # everything has been checked: from here on the folder is a run's
        if saved is None:
            (out / _BEGUN).touch()
            with writing(out / TOKENIZER_FOLDER):
                tok.save_pretrained(out / TOKENIZER_FOLDER)
        now = Saved(
            recipe=recipe,
            data=[str(p) for p in data],
            validation=[str(p) for p in validation],
            tokens_needed=tokens_needed,
            tokens=saved.tokens if saved else tokens_of(corpus),
            tokenizer=saved.tokenizer if saved else describe_files(out / TOKENIZER_FOLDER),
            conversion=conversion,
        )
        if saved is None or saved.recipe != recipe or found.checkpoint is None:
            for name in (SUMMARY_FILE, *([] if found.checkpoint else [METRICS_FILE])):
                (out / name).unlink(missing_ok=True)  # it is not finished, or starts again
        if now != saved:
            now.write(out)
    start = time.perf_counter()
    with LiveView(recipe) if live else _Talk(recipe, say) as view:
        trainer.add_callback(view)
        if found.checkpoint is None:
            trainer.train()
        else:
            resume(trainer, found.checkpoint)
    _finish(trainer, corpus, tok, out, time.perf_counter() - start, conversion, say)
    return trainer


def _save_memory(model: Any, arguments: dict[str, Any]) -> None:
    if not hasattr(model, "save_memory"):
        raise ValueError(f"save_memory is for sparse models: {type(model).__name__} has activation=silu")
    if arguments.get("fsdp") or arguments.get("gradient_checkpointing"):
        raise ValueError("save_memory is for one GPU or DDP, and instead of gradient_checkpointing")
    model.save_memory()


def _is_free(out: Path) -> bool:
    """Whether a run may begin there: it holds nothing, or what one left that was killed before it had a recipe."""
    names = {path.name for path in out.iterdir()} - {DATA_FOLDER, LOCK_FILE}
    return not names or (_BEGUN in names and names <= {_BEGUN, TOKENIZER_FOLDER})


def _check_places(out: Path) -> None:
    """What a run will write, a folder of that name would stop: after the training, were it not looked for before."""
    for name in (METRICS_FILE, SUMMARY_FILE):
        if (out / name).is_dir():
            raise ValueError(f"{out / name} is a folder, and the run writes a file of that name: remove it")
    if (out / MODEL_FOLDER).is_file():
        raise ValueError(f"{out / MODEL_FOLDER} is a file, and the run writes a folder of that name: remove it")


def _found(out: Path, steps: int, say: Callable[[str], None]) -> Found:
    """The checkpoint to go on from; none at all in a run that was cut short before its first."""
    found = newest_sound(out)
    skipped = f"{found}: " if found.flaws else ""
    if found.checkpoint is not None:
        is_done = step_of(found.checkpoint) >= steps
        say(f"{skipped}resuming from {found.checkpoint}" + (", the last; steps=N trains longer" if is_done else ""))
    elif all(flaw == NOT_FINISHED for flaw in found.flaws.values()):
        say(f"{skipped}there is no finished checkpoint; starting again at step 0")
    else:
        raise ValueError(f"{out} has no sound checkpoint to resume from: {found}; start again in another folder")
    return found


def _saved_tokenizer(saved: Saved, out: Path, other: str | None) -> Any:
    """The run's own; another may be named, if it is the same."""
    saved.check_tokenizer(out)
    tok = load_tokenizer(out / TOKENIZER_FOLDER)
    if other is not None and load_tokenizer(other).get_vocab() != tok.get_vocab():
        raise ValueError(f"a resumed run keeps its tokenizer, and {other} is another one: leave out --tokenizer")
    return tok


def _model(
    recipe: Recipe, corpus: Corpus, tok: Any, saved: Saved | None, begin: Begin | None
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """The model to train, and of a converted one its configuration and what is known of it."""
    if saved is not None and saved.conversion is not None:  # weights come from the checkpoint
        config = AutoConfig.for_model(**saved.conversion["config"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if lora := saved.conversion["facts"].get("lora"):
            add_lora(model, **lora)
        return model, saved.conversion
    if saved is None and begin is not None:
        model, facts = begin(recipe, corpus)
        return model, {"facts": facts, "config": json.loads(model.config.to_json_string(use_diff=False))}
    return make_model(recipe, len(tok), tok.eos_token_id), None


def _finish(
    trainer: SparseTrainer,
    corpus: Corpus,
    tok: Any,
    out: Path,
    seconds: float,
    conversion: dict[str, Any] | None,
    say: Callable[[str], None],
) -> None:
    """Save the model, validate it where that was not done yet, and last of all write the summary."""
    if _is_first():
        (out / SUMMARY_FILE).unlink(missing_ok=True)  # of a finished run, whose model is written again here
    if conversion is not None and conversion["facts"].get("lora"):
        with writing(out / ADAPTER_FOLDER):
            if _is_first():
                save_adapter(trainer.model, conversion["facts"]["model"], out / ADAPTER_FOLDER)
        merge_lora(trainer.model)
    with writing(out / MODEL_FOLDER):
        trainer.save_model(str(out / MODEL_FOLDER))
        if _is_first():  # the run's own files: a tokenizer loaded from them would be saved with a note of that
            shutil.copytree(
                out / TOKENIZER_FOLDER, out / MODEL_FOLDER, copy_function=shutil.copyfile, dirs_exist_ok=True
            )
    if _last_evaluation(trainer).get("step") != trainer.state.global_step:
        trainer.evaluate()
    if _is_first():
        summary = summarise(trainer, out, seconds, _bytes_a_token(corpus.held_out, tok))
        if conversion is not None:
            summary["conversion"] = {**conversion["facts"], "loss_recovered": summary["validation_loss"]}
        write_whole(out / SUMMARY_FILE, json.dumps(summary, indent=1))  # a run with a summary is finished
        say(describe(summary))
        say(f"the model is in {out / MODEL_FOLDER}")


def how_to_go_on(out: Path, options: Sequence[str] = ()) -> str:
    """The line for whoever has just interrupted a run."""
    if not (out / RECIPE_FILE).exists():
        return "twell: nothing was written yet; the same command starts again"
    finished = [path.name for path in checkpoints(out) if (path / MANIFEST_FILE).exists()]
    where = f"from {finished[0]}" if finished else "from the beginning (no checkpoint yet)"
    return f"twell: to go on {where}: {shlex.join(['twell', 'train', '--resume', '--out', str(out), *options])}"


def quiet_libraries() -> None:
    """Commands speak for themselves: no bars, hints and retries of the libraries below."""
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _say_nothing(line: str) -> None:
    pass


def _last_evaluation(trainer: SparseTrainer) -> dict[str, Any]:
    return next((row for row in reversed(trainer.state.log_history) if "eval_loss" in row), {})


def summarise(trainer: SparseTrainer, out: Path, seconds: float, bytes_a_token: float) -> dict[str, Any]:
    """What a finished run reached, measured on the validation text, and where it ran."""
    recipe, stats = trainer.recipe, trainer.eval_stats
    model: Any = trainer.model
    validation_loss = _last_evaluation(trainer)["eval_loss"]
    on_gpu = torch.cuda.is_available()
    metrics = read_metrics(out)
    speeds = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    summary: dict[str, Any] = {
        "validation_loss": validation_loss,
        "bits_per_byte": validation_loss / math.log(2) / bytes_a_token,
        "tokens": recipe.steps * recipe.tokens_per_step,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds": seconds,
        **time_and_energy(metrics, recipe.tokens_per_step),
        "peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
    }
    if stats:
        active = [int(s.counts.sum()) / int(s.tokens) for s in stats]
        summary |= {
            "active": active,
            "active_mean": sum(active) / len(active),
            "active_share": sum(active) / len(active) / recipe.intermediate_size,
            "dead_share": trainer.dead_share(),
            "silent_share": float(torch.cat([s.counts == 0 for s in stats]).float().mean()),  # on the validation text
        }
    if recipe.target_neurons is not None:
        summary["target"] = {"neurons": recipe.target_neurons, "l1": trainer.l1, **_held(recipe, metrics)}
    return summary | {
        "parameters": model.num_parameters(),
        "processes": trainer.args.world_size,
        "compiled": bool(trainer.args.torch_compile),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "versions": {"twell": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "recipe": dataclasses.asdict(recipe),
    }


def time_and_energy(metrics: list[dict[str, float]], tokens_per_step: int) -> dict[str, float]:
    """Seconds and joules of training alone, by the log's tokens a second and watts.

    >>> time_and_energy([{"step": 5, "tokens_per_second": 10.0, "watts": 3.0}], tokens_per_step=20)
    {'training_seconds': 10.0, 'joules': 30.0}
    """
    seconds, joules, before = 0.0, 0.0, 0.0
    for row in metrics:
        if "tokens_per_second" in row:
            passed = (row["step"] - before) * tokens_per_step / row["tokens_per_second"]
            seconds, joules, before = seconds + passed, joules + passed * row.get("watts", 0.0), row["step"]
    return {"training_seconds": seconds, **({"joules": joules} if joules else {})}


def _held(recipe: Recipe, metrics: list[dict[str, float]]) -> dict[str, float]:
    """Least and most active neurons in training once the first third of the steps is over: means of a twentieth."""
    logged = [row for row in metrics if "active_mean" in row and 3 * row["step"] >= recipe.steps]
    n = max(1, recipe.steps // (20 * recipe.log_every))
    means = [statistics.fmean(row["active_mean"] for row in logged[i : i + n]) for i in range(len(logged) - n + 1)]
    return {"least": min(means), "most": max(means)} if means else {}


def describe(summary: dict[str, Any]) -> str:
    """A summary in a line."""
    text = f"validation cross-entropy {summary['validation_loss']:.4f} ({summary['bits_per_byte']:.4f} bits per byte)"
    if "active_mean" in summary:
        text += (
            f"; {summary['active_mean']:.1f} active neurons a token ({summary['active_share']:.1%}), "
            f"{summary['dead_share']:.1%} dead"
        )
        if "least" in (target := summary.get("target", {})):
            text += f"; trained to {target['neurons']:.1f}, held within {target['least']:.1f} and {target['most']:.1f}"
    if conversion := summary.get("conversion"):
        text += f"; it was {conversion['loss_before']:.4f} before"
        if conversion["loss_after"] != conversion["loss_before"]:
            text += f" conversion, {conversion['loss_after']:.4f} right after"
    return text


def read_summary(out: Path) -> dict[str, Any]:
    """What a finished run reached."""
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


def _bytes_a_token(tokens: np.ndarray, tok: Any) -> float:
    """Bytes of text a token stands for, end-of-text tokens counted as tokens of no bytes."""
    text = tok.decode(tokens[tokens != tok.eos_token_id].tolist(), clean_up_tokenization_spaces=False)
    return max(1, len(text.encode())) / len(tokens)


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
    """The tokens of a run; of a streamed dataset as many as the recipe needs, or as told."""

    def encode(texts: list[str]) -> list[list[int]]:
        return tok(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)[
            "input_ids"
        ]

    dataset = find_dataset(data)
    with _reading_bar(is_first) as progress:
        common: dict[str, Any] = {
            "encode": encode,
            "end_of_text": tok.eos_token_id,
            "vocab_size": len(tok),
            "held_out": validation or 0.01,
            "progress": progress,
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


@contextlib.contextmanager
def _reading_bar(shown: bool) -> Iterator[Progress]:
    """A bar on standard error while data is read; nothing where that is no terminal."""
    from rich import progress as rp
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rp.TextColumn("reading data"),
        rp.BarColumn(),
        rp.TaskProgressColumn(),
        rp.TimeElapsedColumn(),
        rp.TimeRemainingColumn(),
    )
    with rp.Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
    """One line a log entry."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, self.say = recipe, say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

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
