"""The counters behind /metrics, in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

if TYPE_CHECKING:
    from twell.workbench.serve.engine import Engine

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "twell_requests", "Requests answered, by path and status.", ["path", "status"], registry=registry
        )
        self.prompt_tokens = Counter("twell_prompt_tokens", "Tokens of prompts taken.", registry=registry)
        self.completion_tokens = Counter("twell_completion_tokens", "Tokens given out.", registry=registry)
        self.first_token = Histogram(
            "twell_first_token_seconds", "From a request to its first token.", registry=registry, buckets=_SECONDS
        )
        self.whole_answer = Histogram(
            "twell_answer_seconds", "From a request to its last token.", registry=registry, buckets=_SECONDS
        )
        running = Gauge("twell_running", "Prompts under way or waiting.", registry=registry)
        running.set_function(lambda: len(engine.jobs))
        failures = Gauge("twell_engine_failures", "Steps of the model that failed.", registry=registry)
        failures.set_function(lambda: engine.failures)

    def text(self) -> bytes:
        return generate_latest(self.registry)
