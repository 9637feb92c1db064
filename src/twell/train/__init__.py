"""Training sparse language models."""
