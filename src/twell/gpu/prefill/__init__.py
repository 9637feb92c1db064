"""Inference of many tokens: the split (hot neurons, heavy tokens, tail), and below it batches by tiles of tokens."""
