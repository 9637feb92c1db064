"""Triton kernels: plain tensors in, plain tensors out. ``twell.ops`` decides when they run."""
