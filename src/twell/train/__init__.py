"""Training sparse language models: data so far."""
