"""LoRA: peft's adapters, put into the model that trains.

The model keeps its class, so trainer and checkpoints are the same as in any run, and checkpoints hold the base weights.
A run ends with the adapter, as peft loads it, and the model with the adapter merged into its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

# Not the feed-forward projections: a layer with an adapter on one of these runs densely.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def add_lora(model: Any, rank: int, modules: Sequence[str] = ATTENTION) -> None:
    """Put adapters on the linear layers of these names; from then on nothing else trains."""
    tuners = _peft().tuners.lora
    found = {name.rpartition(".")[2]: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if missing := [name for name in modules if name not in found]:
        raise ValueError(
            f"LoRA: no linear layer is called {', '.join(missing)}; the model has {', '.join(sorted(found))}"
        )
    if tied := [name for name in modules if found[name].weight is model.get_input_embeddings().weight]:
        raise ValueError(f"LoRA: {tied[0]} shares its weight with the embedding, so it can have no adapter of its own")
    config = tuners.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(modules), task_type="CAUSAL_LM")
    tuners.LoraModel(model, config, "default")


def save_adapter(model: Any, name: str, out: Path) -> None:
    """Save the adapter for ``peft.PeftModel.from_pretrained(model, out)``. ``name``: the base model's."""
    peft = _peft()
    weights = peft.get_peft_model_state_dict(model, adapter_name="default")
    out.mkdir(exist_ok=True)
    # With the prefix of peft's own wrapper.
    save_file({f"base_model.model.{key}": w.contiguous().cpu() for key, w in weights.items()}, out / _WEIGHTS)
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = name, True
    config.save_pretrained(str(out))


def merge_lora(model: Any) -> None:
    """Add the adapters to the weights and remove them from the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, _peft().tuners.tuners_utils.BaseTunerLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    del model.peft_config


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise RuntimeError(f"LoRA needs one more package ({error}): pip install peft") from None
    return peft


_WEIGHTS = "adapter_model.safetensors"
