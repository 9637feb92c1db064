"""Layers: sparse feed-forward blocks, and functions of models that have them.

layers.py has the two layers and how a call runs; their base classes are in projections.py, planned.py and
fp8_layer.py. frozen.py, parallel.py and quantize.py: frozen, tensor parallel and FP8 layers; whole_model.py: functions
of a model."""

from twell.nn.layers import INLINE, GatedSparseFFN, SparseFFN, SparseFFNBase
from twell.nn.planned import FIRST_LOOK, LOOK_AT_LEAST, LOOK_TOKENS
from twell.nn.projections import FP8_WEIGHTS, activation_of, find_activation, neuron_major_, why_called
from twell.nn.whole_model import FreezeReport, check_model, freeze_, refresh_, restore_layout_, sparse_ffns, thaw_

__all__ = [
    "FIRST_LOOK",
    "FP8_WEIGHTS",
    "INLINE",
    "LOOK_AT_LEAST",
    "LOOK_TOKENS",
    "FreezeReport",
    "GatedSparseFFN",
    "SparseFFN",
    "SparseFFNBase",
    "activation_of",
    "check_model",
    "find_activation",
    "freeze_",
    "neuron_major_",
    "refresh_",
    "restore_layout_",
    "sparse_ffns",
    "thaw_",
    "why_called",
]
