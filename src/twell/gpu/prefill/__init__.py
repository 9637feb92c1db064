"""Batches of many tokens in three parts: hot neurons, heavy tokens, the tail."""
