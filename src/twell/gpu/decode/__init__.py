"""Few tokens, as in generation."""
