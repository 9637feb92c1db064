"""Running a server from its socket to its end: timeouts, draining, and an engine that dies."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from twell.workbench.serve.server import ModelServer

HEADER_SECONDS = 15.0  # for a connection to send the head of a request
STOPPING = "the server is stopping"


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, so that a port in use is found before the model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot listen on {host} port {port}: {reason}; choose with --host and --port") from None
    return sock


def is_local(sock: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


class TimedProtocol(H11Protocol):
    """Closes connections that send no request: uvicorn itself waits forever for the first one."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        self.loop.call_later(HEADER_SECONDS, self._close_if_idle, self.cycle)

    def _close_if_idle(self, last: Any) -> None:
        if self.cycle is last and (last is None or last.response_complete):  # else a request has come since
            self.transport.close()


class Running(uvicorn.Server):
    """Drains on SIGTERM; ends answers at once on Ctrl-C or a second signal; stops when the engine dies."""

    def __init__(self, server: ModelServer, drain_seconds: float = 30) -> None:
        how: dict[str, Any] = {"http": TimedProtocol, "ws": "none", "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(server.app, timeout_graceful_shutdown=3, **how))
        self.engine, self.drain_seconds, self.has_ended_all = server.engine, drain_seconds, False
        self.engine.on_death = self._leave

    def handle_exit(self, sig: int, frame: Any) -> None:
        # uvicorn's own handler raises the signal again at the end: SIGTERM would kill the process before it has closed
        if sig == signal.SIGTERM and not self.should_exit:
            self.engine.refuse(STOPPING)
            self.config.timeout_graceful_shutdown = int(self.drain_seconds) + 3
            timer = threading.Timer(self.drain_seconds, self.engine.end_all, [STOPPING])
            timer.daemon = True
            timer.start()
        else:
            self.force_exit, self.has_ended_all = self.has_ended_all, True
            self.engine.end_all(STOPPING)
        self._leave()

    def _leave(self) -> None:
        self.should_exit = True


def run(server: ModelServer, sock: socket.socket, drain_seconds: float = 30) -> bool:
    """Serve until a signal. Returns whether the engine lived to the end."""
    with contextlib.suppress(KeyboardInterrupt):
        Running(server, drain_seconds).run(sockets=[sock])
    return not server.engine.died
