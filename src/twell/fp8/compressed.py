"""The description of FP8 weights in a ``config.json``, in compressed-tensors' terms but without that library.

The scheme is that of ``Fp8Linear``: format "float-quantized", one scale per output row ("channel"), x rounded token
by token in the call. All other linear layers are named under ``ignore``."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from twell.fp8.linear import Fp8Linear, is_foreign, take_over

METHOD, FORMAT = "compressed-tensors", "float-quantized"
OWN_FIELD = "fp8_quantization"  # in the configurations of our own model types: see hf/configs.py
_EITHER = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
_WEIGHTS = {**_EITHER, "strategy": "channel", "dynamic": False}
_X = {**_EITHER, "strategy": "token", "dynamic": True}


def describe(model: nn.Module) -> dict[str, Any]:
    """The ``quantization_config`` of a model with FP8 layers."""
    ignore = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix):  # a model without its head shares the configuration of the whole model
        ignore += [*(f"{prefix}.{name}" for name in ignore), "lm_head"]
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(_WEIGHTS),
                "input_activations": dict(_X),
                "output_activations": None,
                "format": FORMAT,
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def record_(model: nn.Module) -> None:
    """Describe the FP8 layers of a model with an FP8 FFN in its configuration, so that ``save_pretrained`` writes them.

    Layers that other libraries hold in this scheme, in attention, become ``Fp8Linear``s first: compressed-tensors
    makes its own plain in the first forward, and then no description fits both. Layers of other schemes stay, and the
    configuration with them."""
    if not any(isinstance(module, Fp8Linear) for module in model.modules()):
        return
    made: dict[nn.Module, Fp8Linear | None] = {}
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer not in made:
                made[layer] = take_over(layer)
            if made[layer] is not None:
                setattr(parent, name, made[layer])
    config = getattr(model, "config", None)
    if config is not None and not others(model):
        setattr(config, OWN_FIELD if hasattr(config, OWN_FIELD) else "quantization_config", describe(model))


def forget_(model: nn.Module) -> None:
    """Let the configuration of a model, and transformers' marks on it, say that nothing is quantised."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    config = getattr(model, "config", None)
    if config is not None:
        vars(config).pop(OWN_FIELD, None)
        vars(config).pop("quantization_config", None)


def others(model: nn.Module) -> list[str]:
    """The names of layers that another library holds and ``take_over`` does not take."""
    is_stated = _stated(model) is not None  # else compressed-tensors has dequantised it, and its schemes are left over

    def is_other(module: nn.Module) -> bool:
        return is_stated if hasattr(module, "quantization_scheme") else is_foreign(module)

    return [name for name, m in model.named_modules() if is_other(m) and take_over(m) is None]


def _stated(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "quantization_config", None)


def other_quantization(model: nn.Module) -> str | None:
    """The quantisation method in a model's configuration; None if there is none, or if it is this scheme alone."""
    found = _stated(model)
    if found is None or (is_rowwise_fp8(found) and not others(model)):
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def is_rowwise_fp8(quantization: Any) -> bool:
    """Whether a ``quantization_config`` describes this scheme and no other, for any layers."""
    if hasattr(quantization, "to_dict"):
        quantization = {**quantization.to_dict(), "quant_method": getattr(quantization, "quant_method", None)}
    if not isinstance(quantization, dict):
        return False
    method = getattr(quantization.get("quant_method"), "value", quantization.get("quant_method"))
    groups, more = quantization.get("config_groups"), ("kv_cache_scheme", "sparsity_config", "transform_config")
    if method != METHOD or quantization.get("format") != FORMAT or any(quantization.get(key) for key in more):
        return False
    if quantization.get("quantization_status", "compressed") != "compressed":
        return False
    return isinstance(groups, dict) and len(groups) > 0 and all(_is_rowwise_group(group) for group in groups.values())


def _is_rowwise_group(group: Any) -> bool:
    if not isinstance(group, dict) or group.get("output_activations") or not isinstance(group.get("targets"), list):
        return False
    for expected, found in ((_WEIGHTS, group.get("weights")), (_X, group.get("input_activations"))):
        if not isinstance(found, dict) or any(found.get(key) != value for key, value in expected.items()):
            return False
        if found.get("block_structure") or found.get("actorder"):
            return False
    return True


def place_fp8_(model: nn.Module, quantization: dict[str, Any], prefix: str = "") -> None:
    """Replace each linear that has FP8 weights in a checkpoint by an ``Fp8Linear`` of zeros on the same device.

    ``prefix``: what the checkpoint's names begin with, if ``model`` is a part of the saved model."""
    targets = [target for group in quantization["config_groups"].values() for target in group["targets"]]
    ignore = quantization.get("ignore") or []
    for name, linear in list(model.named_modules()):
        names = {name, prefix + name}
        if type(linear) is not nn.Linear or not name or any(_matches(n, i) for n in names for i in ignore):
            continue
        if any(_matches(n, target) for n in names for target in targets):
            bias, device = linear.bias, linear.weight.device
            new = Fp8Linear(
                linear.in_features,
                linear.out_features,
                bias is not None,
                device=device,
                dtype=None if bias is None else bias.dtype,
            )
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new.train(linear.training))


def _matches(name: str, pattern: str) -> bool:
    """By the library's rules a pattern is a layer's name, its class, or ``re:`` and a regular expression."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern in (name, "Linear")
