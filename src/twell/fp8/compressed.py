"""compressed-tensors' words for FP8 weights, written into and read from a ``config.json`` without that library.

The scheme is the one that ``Fp8Linear`` computes: format "float-quantized", a scale for each output row ("channel"),
x rounded token by token in the call. Every other linear layer is named under ``ignore``."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from twell.fp8.linear import Fp8Linear

METHOD, FORMAT = "compressed-tensors", "float-quantized"
OWN_FIELD = "fp8_quantization"  # of the configurations of our model types, which read it themselves: see hf/configs.py
_EITHER = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
_WEIGHTS = {**_EITHER, "strategy": "channel", "dynamic": False}
_X = {**_EITHER, "strategy": "token", "dynamic": True}


def describe(model: nn.Module) -> dict[str, Any]:
    """The ``quantization_config`` of a model with FP8 layers."""
    ignore = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix):  # a model without its head: it shares its configuration with the whole
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
    """Have ``save_pretrained`` write what FP8 layers the model has; a model without a configuration saves none."""
    config = getattr(model, "config", None)
    if config is None:
        return
    field = OWN_FIELD if hasattr(config, OWN_FIELD) else "quantization_config"
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        setattr(config, field, describe(model))
    elif is_rowwise_fp8(getattr(config, field, None)):
        if field == OWN_FIELD:
            setattr(config, field, None)
        else:
            delattr(config, field)


def other_quantization(model: nn.Module) -> str | None:
    """The method by which a model's configuration says that it is quantised, unless it is the one above."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    if found is None or is_rowwise_fp8(found):
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def is_rowwise_fp8(quantization: Any) -> bool:
    """Whether a ``quantization_config`` describes the scheme above and nothing else, for whichever layers."""
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
    """Put an ``Fp8Linear`` of zeros where a checkpoint has FP8 weights, on the device of the linear that was there.

    ``prefix``: of the names in a checkpoint, where ``model`` is a part of what was saved."""
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
    """Of a linear layer: by the library's rules a pattern is its name, its class, or after ``re:`` an expression."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern in (name, "Linear")
