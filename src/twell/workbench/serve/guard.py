"""Access control: an API key, or else a check of the Host header. Drops slow readers, and counts requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from twell.workbench.serve.metrics import Metrics
from twell.workbench.serve.requests import ApiError

WRITE_SECONDS = 60.0  # for a client to accept the next part of its answer
KEY_VARIABLE, HOSTS_VARIABLE = "TWELL_API_KEY", "TWELL_HOSTS"  # environment variables, also passed to vLLM's server
PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: Any, *, api_key: str | None, hosts: tuple[str, ...], metrics: Metrics | None) -> None:
        self.app, self.api_key, self.metrics = app, api_key, metrics
        self.hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"

        is_slow = False

        async def counted(message: Any) -> None:
            nonlocal is_slow
            if message["type"] == "http.response.start" and self.metrics is not None:
                self.metrics.requests.labels(path, str(message["status"])).inc()
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await send(message)
            except TimeoutError:
                is_slow = True
                raise

        error = self._refusal(Headers(scope=scope), scope["path"])
        app = self.app if error is None else JSONResponse(error.body, error.status, _headers(error))
        try:
            await app(scope, receive, counted)
        except Exception:
            if not is_slow:  # a client that does not read is dropped without a traceback
                raise

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        if self.api_key is not None:
            given = headers.get("authorization", "")
            is_right = hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.api_key}".encode())
            if is_right or path == "/health":
                return None
            return ApiError(401, "this server needs a key: Authorization: Bearer KEY", code="invalid_api_key")
        host = headers.get("host")
        if host is None or is_safe_host(host, self.hosts):
            return None
        message = (
            f"the Host header names {host!r}: use an address or localhost, or start with --allow-host or --api-key"
        )
        return ApiError(403, message, code="host_not_allowed")


class HandedOver(Guard):
    """The guard around vLLM's application: vLLM constructs it without arguments, and counts requests itself."""

    def __init__(self, app: Any) -> None:
        hosts = tuple(os.environ[HOSTS_VARIABLE].split(","))
        super().__init__(app, api_key=os.environ.get(KEY_VARIABLE), hosts=hosts, metrics=None)


def _headers(error: ApiError) -> dict[str, str]:
    return {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}


def is_safe_host(header: str, hosts: set[str]) -> bool:
    """Whether a Host header cannot come from a web page whose owner points the page's name at this machine."""
    if header.startswith("["):
        name = header[1:].partition("]")[0]
    else:
        name = header.partition(":")[0].lower().removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name in hosts
    return True
