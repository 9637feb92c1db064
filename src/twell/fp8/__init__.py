"""FP8 weights: ``Fp8Linear`` (linear.py), and their description in checkpoints (compressed.py)."""

from twell.fp8.linear import E4M3, Fp8Linear, emulated, is_foreign, take_over, why_not_sizes, why_unavailable

__all__ = ["E4M3", "Fp8Linear", "emulated", "is_foreign", "take_over", "why_not_sizes", "why_unavailable"]
