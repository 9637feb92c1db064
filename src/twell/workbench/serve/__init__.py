"""An OpenAI-compatible server for one model: /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics.

The model's steps are computed by transformers' continuous batching: requests join and leave the batch between two
tokens. The web application around it is our own, since ``transformers serve`` (5.17 to 5.22), with batching,

- samples all requests by the temperature of the first one, and leaves stop strings out;
- lets anybody load other models or unload this one, and lists the download cache as /v1/models;
- hardly checks types and not the length of a prompt; goes on computing for a client that is gone, unless it streams.

Requests are checked here, before the model sees them: what is not supported is refused, nothing is left out silently.
"""

from twell.workbench.serve.app import ModelServer
from twell.workbench.serve.batched import Batched
from twell.workbench.serve.choosing import cache_tokens_for, choose_engine, context_of
from twell.workbench.serve.engine import Engine, OneAtATime
from twell.workbench.serve.handover import counts_problem, hand_over, vllm_command, why_not_vllm
from twell.workbench.serve.running import bind, is_local, run

__all__ = [
    "Batched",
    "Engine",
    "ModelServer",
    "OneAtATime",
    "bind",
    "cache_tokens_for",
    "choose_engine",
    "context_of",
    "counts_problem",
    "hand_over",
    "is_local",
    "run",
    "vllm_command",
    "why_not_vllm",
]
