"""Models that exist already: ``twell convert`` saves one as its sparse type, ``twell train --from`` trains one further.

Changing a SiLU or GELU gate to ReLU costs a model part of what it knows. Further training brings it back, while L1
makes active neurons rare. All else stays as in the checkpoint: grouped heads, tied embeddings, biases. So the model is
loaded, not built from the recipe; the recipe only describes its shape.
"""

from __future__ import annotations

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
from twell.train.data import Blocks, Corpus
from twell.train.files import writing
from twell.train.lora import add_lora
from twell.train.recipes import Recipe, override
from twell.train.tokenizer import load_tokenizer

HAVE_A_SPARSE_TYPE = ("llama", "qwen2")
LONGEST_CONTEXT = 2048  # the default for models with a longer one
L1 = 4e-4  # for a model that is saved untrained
_SHAPE = ("hidden_size", "intermediate_size", "layers", "heads", "rope_theta", "gated", "activation", "vocab_size")


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
    if not relufy and not _has_sparse_type(config):
        raise ValueError(
            f"{name} is a {config.model_type}, which has no sparse type (llama and qwen2 have): load it as it is, and "
            "twell.sparsify_ makes it sparse; --check shows how"
        )
    kind: str = config.model_type
    if isinstance(config, SparsityFields):
        raise ValueError(f"{name} is a {kind} already: there is nothing to convert")
    tok = _tokenizer(name, tokenizer, config)
    model = load_causal_lm(name)
    report = relufy_(model, l1)
    if not report.changed:
        why = report.skipped[0].why if report.skipped else NONE_FOUND
        raise ValueError(f"no feed-forward layer of {name} ({config.model_type}) can be converted: {why}")
    if configured_activation(model.config) != "relu":
        raise ValueError(
            f"{name} cannot be saved with ReLU: the configuration of {config.model_type} cannot say so of its "
            f"feed-forward layers alone; in Python call twell.relufy_ after every from_pretrained"
        )
    with writing(out):
        model.save_pretrained(out)
        tok.save_pretrained(out)
    return report


def configured_activation(config: Any) -> str:
    """The FFN's activation according to a model's configuration: relu, silu, gelu..."""
    if isinstance(config, SparsityFields):
        return "relu"  # whatever hidden_act says
    text = config.get_text_config()
    return next((str(found) for field in ACTIVATION_FIELDS if (found := getattr(text, field, None))), "unknown")


def _has_sparse_type(config: Any) -> bool:
    return isinstance(config, SparsityFields) or config.model_type in HAVE_A_SPARSE_TYPE


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
    if not relufy and activation != "relu":
        raise ValueError(f"the activation of {name} is {activation}: --relufy makes it ReLU, which costs training")


def _tokenizer(name: str, other: str | None, config: Any) -> PreTrainedTokenizerBase:
    tok = load_tokenizer(other or name)
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


@dataclasses.dataclass(frozen=True)
class Start:
    """The model that a run trains further. ``lora``: the rank and the modules of adapters that train alone."""

    model: str
    lora: dict[str, Any] | None = None

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Start:
        """The start of a run that has written these facts down."""
        return cls(facts["model"], facts.get("lora"))

    def recipe(self, changes: Sequence[str] = (), *, relufy: bool = False, tokenizer: str | None = None) -> Recipe:
        """The recipe for the model; refuses models that cannot train with L1 or have no tokenizer.

        ``relufy`` allows replacing SiLU or GELU by ReLU. Adapters hardly change which neurons fire, so with them there
        is no L1 unless ``changes`` ask for it.
        """
        given = {change.partition("=")[0] for change in changes}
        if self.lora is not None:
            if "restart_every" in given:
                raise ValueError(
                    "restart_every gives neurons new weights, and with --lora these do not train: leave it out"
                )
            if not given & {"l1", "target_active"}:
                changes = [*changes, "l1=0"]
        config = _config(self.model)
        _check_activation(self.model, config, relufy)
        if not _has_sparse_type(config):
            raise ValueError(f"{self.model} is a {config.model_type}: only llama and qwen2 train with L1 here")
        recipe = continued_recipe(config, changes)
        _tokenizer(self.model, tokenizer, config)  # before any data is read
        return recipe

    def begin(self, recipe: Recipe, corpus: Corpus, say: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        """The model to train, and its validation losses before and after a change of its activation."""
        model = load_causal_lm(self.model, torch.float32)  # training keeps weights in fp32
        if torch.cuda.is_available():
            model.to(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        was = configured_activation(model.config)
        name = str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model
        facts: dict[str, Any] = {"model": name, "type": model.config.model_type, "activation": was}
        if was != "relu":
            say(f"validating {self.model}, {was}")
            facts["loss_before"], _ = validate(model, corpus.held_out, recipe)
            say(f"validation cross-entropy {facts['loss_before']:.4f}; validating it with ReLU")
        if not isinstance(model.config, SparsityFields):
            relufy_(model, recipe.l1 or 0.0)
        elif recipe.l1 or (recipe.l1 == 0 and self.lora is None):  # else it keeps its own, which steering starts from
            model.config.sparsity_l1_coeff = recipe.l1
        facts["loss_after"], active = validate(model, corpus.held_out, recipe)
        facts.setdefault("loss_before", facts["loss_after"])
        facts["active_after"] = active
        say(f"validation cross-entropy {facts['loss_after']:.4f}, {active:.1f} active neurons a token")
        if self.lora is not None:
            torch.manual_seed(recipe.seed)
            add_lora(model, **self.lora)
            facts["lora"] = self.lora
        return model, facts


@torch.no_grad()
def validate(model: Any, tokens: Any, recipe: Recipe) -> tuple[float, float]:
    """(cross-entropy, mean active neurons a token or 0), on the trainer's validation blocks in its precision."""
    blocks, device, was_training = Blocks(tokens, recipe.context), model.device, model.training
    nats, fired, counted = 0.0, 0.0, 0
    for module in model.modules():
        if isinstance(module, SparseFFNBase):
            module.set_plan(None)  # dense, as training starts; else the layer would plan by these tokens
    model.eval()
    for start in range(0, len(blocks), recipe.micro_batch):
        batch = [blocks[i]["input_ids"] for i in range(start, min(start + recipe.micro_batch, len(blocks)))]
        ids = torch.stack(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(input_ids=ids, labels=ids, use_cache=False)
        n, stats = ids.shape[0] * (ids.shape[1] - 1), getattr(out, "sparsity", None) or ()
        counted += n
        nats += float(out.ce_loss if stats else out.loss) * n
        fired += sum(int(s.counts.sum()) for s in stats) / recipe.layers
    model.train(was_training)
    return nats / counted, fired / counted
