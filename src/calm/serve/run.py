"""The server process: loading models, socket, timeouts, signals, and graceful shutdown."""

import resource
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from calm.checkpoint import resolve_model_dir
from calm.errors import UserError
from calm.generate.text import TextGenerator
from calm.serve.limits import Limits, host_name
from calm.serve.server import create_app

DRAIN_SECONDS = 0.5  # minimum time between signal and exit, in which late requests still get a 503
MAX_CONNECTIONS = 2048
OTHER_FILES = 256  # file descriptors besides connections


def load_generators(
    model: Path, baseline: Path | None, device: str = "auto", dtype: str = "auto"
) -> dict[str, TextGenerator]:
    """Load the model and the optional baseline. Returns them by the model names of the API."""
    generators: dict[str, TextGenerator] = {}
    for directory in [model] if baseline is None else [model, baseline]:
        name = model_name(directory)
        name = name if name not in generators else f"{name}-baseline"
        generators[name] = TextGenerator(resolve_model_dir(directory), device, dtype)
    return generators


def model_name(directory: Path) -> str:
    """The name of the directory, or NAME for runs/NAME/model."""
    path = directory if str(directory) == "bundled" else directory.resolve()
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def bind(host: str, port: int, has_keys: bool, open_to_all: bool) -> socket.socket:
    """A bound socket. Without API keys only loopback addresses are allowed, unless `open_to_all` is set."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot resolve --host {host!r}: {error}; use an address of this machine") from error
    if not (is_loopback(str(address[0])) or has_keys or open_to_all):
        raise UserError(
            f"--host {host} accepts connections from other machines, but no API key is set: set --api-key (or "
            "CALM_API_KEY), or pass --open-to-all"
        )
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio does not set TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}; try another --port") from error
    return listener


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def allowed_hosts(listener: socket.socket, host: str, names: list[str], has_keys: bool) -> set[str] | None:
    """Names that the Host header may have, or None for any.

    Args:
        host: `--host`, the address of the listener.
        names: `--allowed-host`. Without them only a loopback server without API keys checks the header.
    """
    if not names and (has_keys or not is_loopback(listener.getsockname()[0])):
        return None
    address = f"[{host}]" if ":" in host else host
    return {"localhost", "127.0.0.1", "[::1]", *(host_name(name) for name in (address, *names))}


class TimeoutProtocol(H11Protocol):
    """HTTP protocol with timeouts against slow clients.

    A connection is closed if no complete request head arrives within `receive_timeout`, even if single bytes do. It is
    aborted if the client does not read its response for `send_timeout`.
    """

    limits = Limits()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.receive_timer = self.loop.call_later(self.limits.receive_timeout, self._on_receive_timeout)
        self.send_timer = self.receive_timer  # replaced once the send buffer is full

    def connection_lost(self, exc: Exception | None) -> None:
        self.receive_timer.cancel()
        self.send_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.send_timer = self.loop.call_later(self.limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self.send_timer.cancel()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.receive_timer.cancel()
        self.receive_timer = self.loop.call_later(self.limits.receive_timeout, self._on_receive_timeout)

    def _on_receive_timeout(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()  # flushes the send buffer first
            self.send_timer.cancel()
            self.send_timer = self.loop.call_later(self.limits.send_timeout, self.transport.abort)


class Server(uvicorn.Server):
    """Drains at the first signal: rejects new requests, finishes the others, then exits.

    A second signal exits immediately.
    """

    draining_since: float | None = None

    @property
    def schedulers(self) -> list[Any]:
        app: Any = self.config.app
        return list(app.state.schedulers.values())

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.draining_since is not None:
            self.should_exit = self.force_exit = True
            return
        self.draining_since = time.monotonic()
        for scheduler in self.schedulers:
            scheduler.draining = True  # a signal handler must not take the lock; on_tick notifies the threads

    async def on_tick(self, counter: int) -> bool:
        if self.draining_since is not None:
            for scheduler in self.schedulers:
                scheduler.drain()
            elapsed = time.monotonic() - self.draining_since
            if elapsed > DRAIN_SECONDS and all(scheduler.idle for scheduler in self.schedulers):
                self.should_exit = True
        return await super().on_tick(counter)


def raise_file_limit() -> None:
    """Raise the soft limit on open files to fit MAX_CONNECTIONS, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < target:
        allowed = target if hard == resource.RLIM_INFINITY else min(target, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def make_server(
    generators: dict[str, TextGenerator], limits: Limits, keys: list[str], allowed_hosts: set[str] | None = None
) -> Server:
    app = create_app(generators, limits, keys, allowed_hosts=allowed_hosts)
    config = uvicorn.Config(
        app,
        http=type("Protocol", (TimeoutProtocol,), {"limits": limits}),
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(limits.send_timeout),
    )
    return Server(config)
