"""The process around the application: a socket, signals, an end that loses nothing."""

import resource
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from calm.distributed import default_device
from calm.errors import UserError
from calm.models.directories import located
from calm.sampling.text import Writer
from calm.serve.limits import Limits
from calm.serve.server import create_app

GRACE = 0.5  # seconds in which requests that are on their way are still answered, if only by a refusal
MOST_CONNECTIONS = 2048
OTHER_FILES = 256


def load_writers(model: Path, baseline: Path | None) -> dict[str, Writer]:
    """Models by the names that they are served under."""
    found: dict[str, Writer] = {}
    for directory in [model] if baseline is None else [model, baseline]:
        name = name_of(directory)
        found[name if name not in found else f"{name}-baseline"] = Writer(located(directory), default_device())
    return found


def name_of(directory: Path) -> str:
    """That of the directory; of runs/NAME/model it is NAME."""
    path = directory if str(directory) == "bundled" else directory.resolve()
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def bind(host: str, port: int, has_keys: bool, open_to_all: bool) -> socket.socket:
    """A socket to listen on; without keys on this machine only, unless told otherwise."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r} is no address of this machine: {error}") from error
    loopback = str(address[0]).startswith("127.") or address[0] == "::1"
    if not (loopback or has_keys or open_to_all):
        raise UserError(
            f"--host {host} lets other machines in, and there is no API key: set --api-key (or CALM_API_KEY), or say "
            "--open-to-all"
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}; try another --port") from error
    return listening


class Patient(H11Protocol):
    """A connection on which no request begins for a while is closed, however slowly bytes drip in; one whose client
    reads nothing is cut off.
    """

    limits = Limits()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.until = self.loop.call_later(self.limits.patience, self._still_nothing)
        self.unread = self.until  # the timer of what waits to be read

    def connection_lost(self, exc: Exception | None) -> None:
        self.until.cancel()
        self.unread.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.loop.call_later(self.limits.stalled, self.transport.abort)

    def resume_writing(self) -> None:
        self.unread.cancel()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.until.cancel()
        self.until = self.loop.call_later(self.limits.patience, self._still_nothing)

    def _still_nothing(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()  # when all is sent
            self.unread.cancel()
            self.unread = self.loop.call_later(self.limits.stalled, self.transport.abort)


class Server(uvicorn.Server):
    """At the first signal nothing more is taken on, and the end comes when all is answered; at the second at once."""

    drained_at: float | None = None

    @property
    def schedulers(self) -> list[Any]:
        app: Any = self.config.app
        return list(app.state.schedulers.values())

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.drained_at is not None:
            self.should_exit = self.force_exit = True
            return
        self.drained_at = time.monotonic()
        for scheduler in self.schedulers:
            scheduler.draining = True  # no lock in a signal handler; on_tick wakes them

    async def on_tick(self, counter: int) -> bool:
        if self.drained_at is not None:
            for scheduler in self.schedulers:
                scheduler.drain()
            if time.monotonic() - self.drained_at > GRACE and all(scheduler.idle for scheduler in self.schedulers):
                self.should_exit = True
        return await super().on_tick(counter)


def allow_connections() -> None:
    """As many open files as connections, where the system lets us have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def make_server(writers: dict[str, Writer], limits: Limits, keys: list[str]) -> Server:
    app = create_app(writers, limits, keys)
    config = uvicorn.Config(
        app,
        http=type("Protocol", (Patient,), {"limits": limits}),
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(limits.stalled),
    )
    return Server(config)
