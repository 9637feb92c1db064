"""An OpenAI-compatible server for one model: /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics.

transformers' continuous batching computes the model's steps: requests join and leave the batch between two tokens. The
web application around it is our own, because ``transformers serve`` (5.17 to 5.22), with batching,

- samples every request with the temperature of the first one, and ignores stop strings;
- lets any client load other models or unload this one, and lists the download cache as /v1/models;
- hardly checks types, does not check the length of a prompt, and goes on computing for a client that has disconnected,
  unless it streams.

Requests are checked here before the model sees them: an unsupported field is refused, never silently ignored.
"""
