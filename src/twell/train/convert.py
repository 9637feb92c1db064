"""``twell convert``: from a checkpoint with SiLU or GELU gates to a sparse one; ``twell train --from``: further on.

Changing the gate to ReLU costs a model part of what it knows; further training brings it back, and L1, which rises
from zero while it does, makes active neurons rare. The model stays the checkpoint's in all else: grouped heads, tied
embeddings, biases. So it is loaded, not made from the recipe; the recipe only describes its shape.
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
from twell.train.data import Blocks, Corpus, Progress, silent
from twell.train.files import writing
from twell.train.lora import ATTENTION, add_lora
from twell.train.recipe_file import RECIPE_FILE, check_same_run
from twell.train.recipes import Recipe, override
from twell.train.run import SUMMARY_FILE, Begin, describe, read_summary, run
from twell.train.tokenizer import load_tokenizer

HAVE_A_SPARSE_TYPE = ("llama", "qwen2")
LONGEST_CONTEXT = 2048  # by default: long ones are for models that are to keep using them
L1 = 4e-4  # of a model that is saved untrained
_SHAPE = ("hidden_size", "intermediate_size", "layers", "heads", "rope_theta", "gated", "activation", "vocab_size")

Bar = Callable[[str], contextlib.AbstractContextManager[Progress]]


def _no_bar(what: str) -> contextlib.AbstractContextManager[Progress]:
    return contextlib.nullcontext(silent)


# ---------------------------------------------------------------------------------------------------------
# without training
# ---------------------------------------------------------------------------------------------------------


def check(name: str, *, relufy: bool, l1: float = L1) -> Report:
    """What ``relufy_``, or without it ``sparsify_``, does to each layer of a model; nothing is written."""
    _config(name)  # whose error is clear
    model = load_causal_lm(name)
    return relufy_(model, l1) if relufy else sparsify_(model)


def convert(name: str, out: Path, *, relufy: bool, tokenizer: str | None = None, l1: float = L1) -> Report:
    """Save a model with ReLU FFNs, and its tokenizer, in ``out``; Llama and Qwen2 as their sparse types.

    ``relufy`` says that the function may change; without it only a model that is ReLU already is taken.
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
    if activation_of(model.config) == "unknown":
        raise ValueError(
            f"{name} cannot be saved with ReLU: the configuration of {config.model_type} has no field for it; "
            f"in Python call twell.relufy_ after every from_pretrained"
        )
    with writing(out):
        model.save_pretrained(out)
        tok.save_pretrained(out)
    return report


def _config(name: str) -> Any:
    check_name(name)
    config = load_config(name)
    if getattr(config, OWN_FIELD, None) or is_rowwise_fp8(getattr(config, "quantization_config", None)):
        raise ValueError(f"{name} has FP8 weights, which cannot be trained: convert the model that they were made from")
    return config


def activation_of(config: Any) -> str:
    """relu, silu, gelu...: as the configuration has it."""
    if _is_sparse_type(config):
        return "relu"  # whatever hidden_act says
    return next((str(found) for field in ACTIVATION_FIELDS if (found := getattr(config, field, None))), "unknown")


def _is_sparse_type(config: Any) -> bool:
    return isinstance(config, SparsityFields)


def _check_activation(name: str, config: Any, relufy: bool) -> None:
    activation = activation_of(config)
    if relufy and activation == "relu":
        raise ValueError(f"{name} is ReLU already: leave out --relufy")
    if not relufy and activation != "relu":
        raise ValueError(
            f"the activation of {name} is {activation}: twell convert --relufy --train makes it ReLU and trains it"
        )
    if not relufy and not _is_sparse_type(config) and config.model_type not in HAVE_A_SPARSE_TYPE:
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
    """How to train a model further: its shape, defaults that go with the number of steps, and ``changes``.

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
    chosen = override(recipe, changes)  # what follows depends on its steps and tokens
    steps, tokens = chosen.steps, chosen.steps * chosen.tokens_per_step
    by_steps = dataclasses.replace(
        recipe,
        lr_warmup=steps // 20,
        l1=chosen.l1,
        l1_warmup_end=steps // 2 if chosen.l1 else 0,
        dead_after_tokens=min(10_000_000, tokens // 10),
        eval_every=max(1, steps // 5),
        save_every=max(1, steps // 5),
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
    """Make a SiLU or GELU model ReLU and train it further into the folder ``out``, a run as of ``twell train``.

    Called again with the same arguments it goes on where it was. ``how`` goes to ``run``.
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
    """Train a ReLU model further into the folder ``out``: all its weights, or with ``lora`` adapters of that rank.

    Adapters hardly change which neurons fire, so with them there is no L1 unless ``changes`` ask for it. ``how`` goes
    to ``run``, which also resumes it.
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
    """The recipe for a model, which must be one that trains with L1, and have a tokenizer."""
    config = _config(name)
    _check_activation(name, config, relufy)
    if not _is_sparse_type(config) and config.model_type not in HAVE_A_SPARSE_TYPE:
        raise ValueError(f"{name} is a {config.model_type}: only llama and qwen2 train with L1 here")
    recipe = continued_recipe(config, changes)
    _tokenizer(name, tokenizer, config)  # before any data is read with it
    return recipe


def beginning(name: str, say: Callable[[str], None], bar: Bar, lora: dict[str, Any] | None = None) -> Begin:
    """Loads the model once the data is read; of several processes the first one talks."""
    if os.environ.get("RANK", "0") != "0":
        say, bar = (lambda line: None), _no_bar
    return lambda recipe, corpus: _begun(name, recipe, corpus, lora, say, bar)


def _begun(
    name: str, recipe: Recipe, corpus: Corpus, lora: dict[str, Any] | None, say: Callable[[str], None], bar: Bar
) -> tuple[Any, dict[str, Any]]:
    """The model to train, and its validation losses before and after a change of its activation."""
    model = load_causal_lm(name, torch.float32)  # as training keeps weights
    if torch.cuda.is_available():
        model.to(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    was = activation_of(model.config)
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
    facts["active_after"] = sum(active) / len(active)
    share = facts["active_after"] / recipe.intermediate_size
    what = name if was == "relu" else "with ReLU, not yet trained"
    active_now = f"{facts['active_after']:.1f} active neurons a token ({share:.1%})"
    say(f"{what}: validation cross-entropy {facts['loss_after']:.4f}, {active_now}")
    if lora is not None:
        torch.manual_seed(recipe.seed)
        add_lora(model, **lora)
        facts["lora"] = lora
    return model, facts


@torch.no_grad()
def validate(model: Any, tokens: Any, recipe: Recipe, progress: Progress = silent) -> tuple[float, list[float]]:
    """Cross-entropy of the blocks the trainer validates on, in its precision; mean active neurons by layer, if any."""
    blocks, device = Blocks(tokens, recipe.context), model.device
    nats, counted, fired = 0.0, 0, torch.zeros(recipe.layers, dtype=torch.float64)
    was_training, is_sparse = model.training, _is_sparse_type(model.config)
    for module in model.modules():
        if isinstance(module, SparseFFNBase):
            module.set_plan(None)  # densely, as training starts: a layer would else plan by these tokens
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
