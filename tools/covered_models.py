"""Find out which of transformers' causal language models can run sparsely, from their default configurations.

Encoder-decoder models, such as T5, are outside of the walk, unless transformers has a causal language model of them.

python tools/covered_models.py docs/models.md      # rewrites the tables of that page for the installed transformers
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import transformers
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from twell.hf.configs import SparsityFields
from twell.hf.known import ACTIVATION_FIELDS, KNOWN, REFUSED

# Model types for which some versions of transformers cannot make a default configuration.
NO_DEFAULT = {
    "gemma4_assistant": "transformers refuses its default configuration; its FFN is that of gemma4",
    "musicgen": "transformers refuses its default configuration; GELU",
    "musicgen_melody": "transformers refuses its default configuration; GELU",
}

_IN_CODE = "in its code"
_RELU_IN_CODE = re.compile(r"\brelu\(|\bReLU\(|functional\.relu\b")
_TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Architecture(NamedTuple):
    """A model type, the activation of its language model by default, and what ``sparsify_`` makes of its FFNs."""

    model_type: str
    activation: str
    is_relu: bool  # also ReLU², a ReLU written into the code, or zeros by another rule
    blocks: tuple[str, ...]  # its classes in hf/known.py
    why_not: str  # why it is refused; empty if it is covered, or neither covered nor refused

    @property
    def is_covered(self) -> bool:
        return bool(self.blocks)


def walk() -> list[Architecture]:
    """Every causal language model of the installed transformers, sorted by name."""
    return [_look_at(model_type) for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if _is_theirs(model_type)]


def _is_theirs(model_type: str) -> bool:
    return not issubclass(CONFIG_MAPPING[model_type], SparsityFields)


def _look_at(model_type: str) -> Architecture:
    try:
        config = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    except Exception:  # unless the type is known to fail, it may be a ReLU model
        return Architecture(model_type, "unknown", model_type not in NO_DEFAULT, (), NO_DEFAULT.get(model_type, ""))
    module = type(config).__module__
    package = module.rpartition(".")[0]
    fields = config.to_dict()
    told = [fields[field] for field in ACTIVATION_FIELDS if isinstance(fields.get(field), str)]
    told += [value for value in fields.values() if isinstance(value, str) and value in ACT2FN]
    if told:
        activation, is_relu = told[0], any("relu" in name for name in told)
        is_relu |= any("sparsity" in str(field) and value for field, value in fields.items())
    else:
        activation, is_relu = _IN_CODE, _RELU_IN_CODE.search(_code(module)) is not None
    blocks = tuple(name.rpartition(".")[2] for name in KNOWN if name.startswith(f"{package}."))
    reasons = [reason for name, reason in REFUSED.items() if name.startswith(f"{package}.")]
    return Architecture(model_type, activation, is_relu, blocks, "" if blocks else "; ".join(reasons))


def _code(module: str) -> str:
    """The source of the modeling files beside a configuration."""
    folder = Path(str(sys.modules[module].__file__)).parent
    return "\n".join(path.read_text() for path in sorted(folder.glob("modeling_*.py")))


# ---------------------------------------------------------------------------------------------------------
# docs/models.md
# ---------------------------------------------------------------------------------------------------------


def updated(document: str) -> str:
    """The text of a document with its tables rewritten."""
    found = walk()
    relu = [each for each in found if each.is_relu]
    others = [each for each in found if not each.is_relu]
    tables = {
        "relu-models": _table(relu),
        "other-models": _table([each for each in others if each.is_covered or each.why_not]),
        "rest": ", ".join(each.model_type for each in others if not each.is_covered and not each.why_not),
    }
    source = f"\n\ntransformers {transformers.__version__}; `python tools/covered_models.py docs/models.md`\n"
    return _TABLE.sub(lambda match: match[1] + tables[match[2]] + source + match[3], document)


def _table(found: list[Architecture]) -> str:
    lines = ["| architecture | default activation | covered |", "|---|---|---|"]
    for each in found:
        how = f"yes: {', '.join(each.blocks)}" if each.is_covered else f"no: {each.why_not}"
        lines.append(f"| {each.model_type} | {each.activation} | {how} |")
    return "\n".join(lines)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(updated(page.read_text()))
