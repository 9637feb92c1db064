"""``twell convert`` makes a sparse model of a SiLU or GELU checkpoint; ``twell train --from`` trains a model further.

Changing the gate to ReLU costs a model part of what it knows. Further training brings it back, while L1 makes active
neurons rare. All else stays as in the checkpoint: grouped heads, tied embeddings, biases. So the model is loaded, not
built from the recipe; the recipe only describes its shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from twell.fp8.compressed import OWN_FIELD, is_rowwise_fp8
from twell.hf.configs import SparsityFields
from twell.hf.known import ACTIVATION_FIELDS
from twell.hf.loading import check_name, load_causal_lm, load_config
from twell.hf.relufy import relufy_
from twell.hf.sparsify import NONE_FOUND, Report, sparsify_
from twell.nn import SparseFFNBase
from twell.progress import Progress, silent
from twell.train.data import Blocks, Corpus
from twell.train.files import writing
from twell.train.lora import ATTENTION, add_lora
from twell.train.recipe_file import RECIPE_FILE, check_same_run
from twell.train.recipes import Recipe, override
from twell.train.run import SUMMARY_FILE, Begin, describe, read_summary, run
from twell.train.tokenizer import load_tokenizer

HAVE_A_SPARSE_TYPE = ("llama", "qwen2")
LONGEST_CONTEXT = 2048  # the default for models with a longer one
L1 = 4e-4  # for a model that is saved untrained
_SHAPE = ("hidden_size", "intermediate_size", "layers", "heads", "rope_theta", "gated", "activation", "vocab_size")

Bar = Callable[[str], contextlib.AbstractContextManager[Progress]]


def _no_bar(what: str) -> contextlib.AbstractContextManager[Progress]:
    return contextlib.nullcontext(silent)


# ---------------------------------------------------------------------------------------------------------
# without training
# ---------------------------------------------------------------------------------------------------------


def check(name: str, *, relufy: bool, l1: float = L1) -> Report:
    """What ``relufy_``, or ``sparsify_`` without ``relufy``, does to each layer of a model. Writes nothing."""
    _config(name)  # for its clear error
    model = load_causal_lm(name)
    return relufy_(model, l1) if relufy else sparsify_(model)


def convert(name: str, out: Path, *, relufy: bool, tokenizer: str | None = None, l1: float = L1) -> Report:
    """Save a model with ReLU FFNs and its tokenizer in ``out``; Llama and Qwen2 as their sparse types.

    ``relufy`` allows changing what the model computes; without it only a ReLU model is taken.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder")
    config = _config(name)
    _check_activation(name, config, relufy)
    if _is_sparse_type(config):
        raise ValueError(f"{name} is a {config.model_type} already: there is nothing to convert, only to --train")
    tok = _tokenizer(name, tokenizer, config)
    model = load_causal_lm(name)
    report = relufy_(model, l1)
    if not report.changed:
        why = report.skipped[0].why if report.skipped else NONE_FOUND
        raise ValueError(f"no feed-forward layer of {name} ({config.model_type}) can be converted: {why}")
    if configured_activation(model.config) == "unknown":
        raise ValueError(
            f"{name} cannot be saved with ReLU: the configuration of {config.model_type} has no field for it; "
            f"in Python call twell.relufy_ after every from_pretrained"
        )
    with writing(out):
        model.save_pretrained(out)
        tok.save_pretrained(out)
    return report


def configured_activation(config: Any) -> str:
    """The FFN's activation according to a model's configuration: relu, silu, gelu..."""
    if _is_sparse_type(config):
        return "relu"  # whatever hidden_act says
    return next((str(found) for field in ACTIVATION_FIELDS if (found := getattr(config, field, None))), "unknown")


def _is_sparse_type(config: Any) -> bool:
    return isinstance(config, SparsityFields)


def _config(name: str) -> Any:
    check_name(name)
    config = load_config(name)
    if getattr(config, OWN_FIELD, None) or is_rowwise_fp8(getattr(config, "quantization_config", None)):
        raise ValueError(f"{name} has FP8 weights, which cannot be trained: convert the model that they were made from")
    return config


def _check_activation(name: str, config: Any, relufy: bool) -> None:
    activation = configured_activation(config)
    if relufy and activation == "relu":
        raise ValueError(f"{name} is ReLU already: leave out --relufy")
    if relufy:
        return
    if activation != "relu":
        raise ValueError(
            f"the activation of {name} is {activation}: twell convert --relufy --train makes it ReLU and trains it"
        )
    if not _is_sparse_type(config) and config.model_type not in HAVE_A_SPARSE_TYPE:
        raise ValueError(
            f"{name} is a {config.model_type}, which has no sparse type (llama and qwen2 have): load it as it is, and "
            "twell.sparsify_ makes it sparse; --check shows how"
        )


def _tokenizer(name: str, other: str | None, config: Any) -> PreTrainedTokenizerBase:
    try:
        tok = load_tokenizer(other or name)
    except (OSError, ValueError, KeyError) as error:
        if other is not None or "end-of-text" in str(error):
            raise
        raise ValueError(f"{name} has no tokenizer that can be loaded: give --tokenizer") from None
    if len(tok) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {other or name} has {len(tok):,} tokens, the model's vocabulary {config.vocab_size:,}: "
            "another model's tokenizer?"
        )
    return tok


# ---------------------------------------------------------------------------------------------------------
# with training
# ---------------------------------------------------------------------------------------------------------


def continued_recipe(config: Any, changes: Sequence[str] = ()) -> Recipe:
    """How to train a model further: the model's shape, defaults that follow from the number of steps, and ``changes``.

    >>> from transformers import LlamaConfig
    >>> recipe = continued_recipe(LlamaConfig(), ["steps=300"])
    >>> recipe.hidden_size, recipe.lr_warmup, recipe.target_active
    (4096, 15, 0.01)
    """
    for change in changes:
        if change.partition("=")[0] in _SHAPE:
            raise ValueError(f"{change!r}: a model keeps its shape; leave it out")
    recipe = Recipe(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "sparsity_new_intermediate_size", None) or config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        context=min(config.max_position_embeddings, LONGEST_CONTEXT),
        rope_theta=(config.rope_parameters or {}).get("rope_theta", 1e4),
        gated=getattr(config, "sparsity_gated_mlp", True),
        vocab_size=config.vocab_size,
        steps=1000,
        sequences_per_step=32,
        lr=3e-4,
    )
    chosen = override(recipe, changes)  # the other defaults depend on its steps and tokens
    by_steps = dataclasses.replace(
        recipe,
        lr_warmup=chosen.steps // 20,
        l1=chosen.l1,
        l1_warmup_end=chosen.steps // 2 if chosen.l1 else 0,
        dead_after_tokens=min(10_000_000, chosen.steps * chosen.tokens_per_step // 10),
        eval_every=max(1, chosen.steps // 5),
        save_every=max(1, chosen.steps // 5),
    )
    chosen = override(by_steps, changes)
    if chosen.context > config.max_position_embeddings:
        raise ValueError(
            f"context {chosen.context:,} is longer than the model's, {config.max_position_embeddings:,}: it would see "
            "positions it was not made for"
        )
    return chosen


def convert_and_train(
    name: str,
    out: Path,
    data: Sequence[Path | str],
    *,
    changes: Sequence[str] = (),
    validation: Sequence[Path | str] = (),
    tokenizer: str | None = None,
    say: Callable[[str], None] = print,
    bar: Bar = _no_bar,
    **how: Any,
) -> None:
    """Make a SiLU or GELU model ReLU and train it further into the folder ``out``, which becomes a ``twell train`` run.

    The same call again continues the run. ``how`` goes to ``run``.
    """
    if not data:
        raise ValueError("--train needs text to train on: give --data")
    recipe = _recipe_of(name, changes, tokenizer, relufy=True)
    begun = (out / RECIPE_FILE).exists()
    if begun:
        check_same_run(out, recipe, data, validation, name)
    if (out / SUMMARY_FILE).exists():
        say(f"{out} is finished: {describe(read_summary(out))}")
        return
    own: dict[str, Any] = {"go_on": True} if begun else {"validation": validation, "tokenizer": tokenizer or name}
    run(recipe, data, out, begin=beginning(name, say, bar), say=say, **own, **how)


def continue_training(
    name: str,
    out: Path,
    data: Sequence[Path | str],
    *,
    lora: int | None = None,
    lora_modules: Sequence[str] = ATTENTION,
    changes: Sequence[str] = (),
    tokenizer: str | None = None,
    say: Callable[[str], None] = print,
    bar: Bar = _no_bar,
    **how: Any,
) -> None:
    """Train a ReLU model further into the folder ``out``: all weights, or with ``lora`` adapters of that rank.

    Adapters hardly change which neurons fire, so with them there is no L1 unless ``changes`` ask for it. ``how`` goes
    to ``run``, which also resumes the run.
    """
    given = {change.partition("=")[0] for change in changes}
    if lora is not None:
        if lora < 1:
            raise ValueError(f"--lora is the rank of the adapters, at least 1; got {lora}")
        if "restart_every" in given:
            raise ValueError(
                "restart_every gives neurons new weights, and with --lora these do not train: leave it out"
            )
        if not given & {"l1", "target_active"}:
            changes = [*changes, "l1=0"]
    recipe = _recipe_of(name, changes, tokenizer, relufy=False)
    adapters = None if lora is None else {"rank": lora, "modules": list(lora_modules)}
    begin = beginning(name, say, bar, adapters)
    run(recipe, data, out, begin=begin, tokenizer=tokenizer or name, say=say, **how)


def _recipe_of(name: str, changes: Sequence[str], tokenizer: str | None, *, relufy: bool) -> Recipe:
    """The recipe for a model; refuses models that cannot train with L1 or have no tokenizer."""
    config = _config(name)
    _check_activation(name, config, relufy)
    if not _is_sparse_type(config) and config.model_type not in HAVE_A_SPARSE_TYPE:
        raise ValueError(f"{name} is a {config.model_type}: only llama and qwen2 train with L1 here")
    recipe = continued_recipe(config, changes)
    _tokenizer(name, tokenizer, config)  # before any data is read
    return recipe


def beginning(name: str, say: Callable[[str], None], bar: Bar, lora: dict[str, Any] | None = None) -> Begin:
    """A function that loads the model once the data is read. Only the first process prints."""
    if os.environ.get("RANK", "0") != "0":
        say, bar = (lambda line: None), _no_bar

    def begin(recipe: Recipe, corpus: Corpus) -> tuple[Any, dict[str, Any]]:
        """The model to train, and its validation losses before and after a change of its activation."""
        model = load_causal_lm(name, torch.float32)  # training keeps weights in fp32
        if torch.cuda.is_available():
            model.to(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        was = configured_activation(model.config)
        facts: dict[str, Any] = {"model": name, "type": model.config.model_type, "activation": was}
        if was != "relu":
            with bar("validating the original") as progress:
                facts["loss_before"], _ = validate(model, corpus.held_out, recipe, progress)
            say(f"{name}, {was}: validation cross-entropy {facts['loss_before']:.4f}")
        if not _is_sparse_type(model.config):
            relufy_(model, recipe.l1 or 0.0)
        model.config.sparsity_l1_coeff = recipe.l1 or 0.0
        model.config.sparsity_start_warmup_step = recipe.l1_warmup_start
        model.config.sparsity_end_warmup_step = recipe.l1_warmup_end
        model.config.sparsity_tokens_until_dead = recipe.dead_after_tokens
        with bar("validating") as progress:
            facts["loss_after"], active = validate(model, corpus.held_out, recipe, progress)
        facts.setdefault("loss_before", facts["loss_after"])
        facts["active_after"] = mean = sum(active) / len(active)
        what = name if was == "relu" else "with ReLU, not yet trained"
        active_now = f"{mean:.1f} active neurons a token ({mean / recipe.intermediate_size:.1%})"
        say(f"{what}: validation cross-entropy {facts['loss_after']:.4f}, {active_now}")
        if lora is not None:
            torch.manual_seed(recipe.seed)
            add_lora(model, **lora)
            facts["lora"] = lora
        return model, facts

    return begin


@torch.no_grad()
def validate(model: Any, tokens: Any, recipe: Recipe, progress: Progress = silent) -> tuple[float, list[float]]:
    """(cross-entropy, mean active neurons by layer or []), on the trainer's validation blocks in its precision."""
    blocks, device = Blocks(tokens, recipe.context), model.device
    nats, counted, fired = 0.0, 0, torch.zeros(recipe.layers, dtype=torch.float64)
    was_training, is_sparse = model.training, _is_sparse_type(model.config)
    for module in model.modules():
        if isinstance(module, SparseFFNBase):
            module.set_plan(None)  # dense, as training starts; else the layer would plan by these tokens
    model.eval()
    for start in range(0, len(blocks), recipe.micro_batch):
        batch = [blocks[i]["input_ids"] for i in range(start, min(start + recipe.micro_batch, len(blocks)))]
        ids = torch.stack(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(input_ids=ids, labels=ids, use_cache=False)
        n = ids.shape[0] * (ids.shape[1] - 1)
        nats, counted = nats + float(out.ce_loss if is_sparse else out.loss) * n, counted + n
        if is_sparse:
            fired += torch.stack([stats.counts.sum() for stats in out.sparsity]).double().cpu()
        progress(start + len(batch), len(blocks))
    model.train(was_training)
    return nats / counted, (fired / counted).tolist() if is_sparse else []
