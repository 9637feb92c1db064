"""Load models from files that others wrote: every fault is an error of one line, and their code never runs.

transformers initialises missing weights at random, skips a broken ``generation_config.json``, and asks on the terminal
whether to run a model's code. Here each of these is an error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from twell.fp8 import Fp8Linear, is_foreign, why_unavailable
from twell.hf.classify import LEFT_ALONE, classify, find_ffns, projection_names

SAMPLE_MODEL = Path(__file__).parent.parent / "sample"  # ships with the package: see its MODEL.md

_SIZES = (  # fields of a configuration, if it has them
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMED = 5  # missing weights to name
_LONGEST = 300  # characters to quote of a library's message


@contextlib.contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Turn a library's error about the files of ``name``, of whatever type, into a ValueError of one line."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):  # not about the files
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            raise ValueError(
                f"{name} needs code of its own (auto_map in its files), and code of models is never run here: "
                f"only architectures that transformers has can be loaded"
            ) from None
        if not isinstance(error, ValueError | OSError):  # a KeyError's message is only the key
            said = f"{type(error).__name__}: {said}"
        said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
        raise ValueError(said if str(name) in said else f"{name} cannot be loaded: {said}") from error


def model_path(name: str) -> str:
    """The folder of the shipped model for the name ``sample``; any other name unchanged.

    If the working folder holds a file or folder called ``sample``, the name means that one.
    """
    return str(SAMPLE_MODEL) if name == SAMPLE_MODEL.name and not Path(name).exists() else name


def check_name(name: str) -> None:
    """Refuse a name that is neither a folder of a model nor looks like owner/name on the hub."""
    name = model_path(name)
    folder = Path(name)
    if (folder / "config.json").is_file():
        return
    if not folder.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return
    inside = f"; {name}/model has" if (folder / "model" / "config.json").is_file() else ""
    there = "has no config.json" if folder.exists() else "does not exist"
    raise ValueError(f"{name} is no folder of a model: it {there}{inside}")


def load_config(name: str) -> Any:
    name = model_path(name)
    with reading(f"{name}/config.json" if Path(name).is_dir() else name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    text = config.get_text_config()
    for size in _SIZES:
        if isinstance(number := getattr(text, size, None), int) and number < 1:
            raise ValueError(f"{name}: {size} in config.json must be at least 1, got {number}")
    return config


def load_causal_lm(name: str, dtype: torch.dtype | str = "auto") -> Any:
    """A causal language model from a folder or the hub; the files must hold every weight."""
    name = model_path(name)
    check_name(name)
    config = load_config(name)
    if (Path(name) / "generation_config.json").exists():
        with reading(f"{name}/generation_config.json"):
            GenerationConfig.from_pretrained(name)
    try:
        with reading(name):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except ImportError as error:  # a quantiser's package is missing
        raise RuntimeError(f"{name} needs another package: {' '.join(str(error).split())}") from None
    model, info = loaded
    if mismatched := sorted(info["mismatched_keys"]):
        key, found, expected = mismatched[0]
        raise ValueError(
            f"{name}: the weights do not fit config.json: {key} is {list(found)}, expected {list(expected)}"
            + (f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else "")
        )
    refuse_missing(name, info)
    _check_generation(name, model.generation_config)
    return model


def refuse_fp8(name: str, model: Any, device: torch.device) -> None:
    """Refuse a model with FP8 layers, now or after ``sparsify_``, if ``device`` cannot run them."""
    reason = why_unavailable(device)
    if reason is None:
        return
    has_own = any(isinstance(module, Fp8Linear) for module in model.modules())
    if has_own or any(_becomes_fp8(ffn) for *_, ffn in find_ffns(model)):
        raise RuntimeError(f"{name} has FP8 weights: {reason}. In Python, twell.dequantize_(model) makes them plain")


def _becomes_fp8(ffn: Any) -> bool:
    if classify(ffn).kind == LEFT_ALONE:
        return False
    return any(is_foreign(getattr(ffn, projection)) for projection in projection_names(ffn))


def refuse_missing(name: Any, info: Mapping[str, Any]) -> None:
    """Refuse a model with missing weights. ``info``: transformers' loading info."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueError(
            f"{name} lacks {len(missing)} of its model's weights: {', '.join(missing[:_NAMED])}{more}. They would be "
            f"random; the checkpoint is incomplete, or config.json is of another model"
        )


def _check_generation(name: str, config: GenerationConfig | None) -> None:
    if config is None:
        return
    with reading(f"{name}/generation_config.json"):
        for what in (*_SAMPLING, *_TOKENS):
            value = getattr(config, what, None)
            expected = int if what in _TOKENS else int | float
            each = value if isinstance(value, list) and what in _TOKENS else [] if value is None else [value]
            if any(isinstance(number, bool) or not isinstance(number, expected) for number in each):
                raise ValueError(f"{what} must be a number, got {value!r}")
        config.validate()
