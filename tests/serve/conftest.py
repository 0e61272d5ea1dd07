import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from calm.generate.text import TextGenerator
from calm.serve import run
from calm.serve.limits import Limits


@pytest.fixture(scope="session")
def generators(models) -> dict[str, TextGenerator]:
    """Two tiny models with random weights: a CALM model with chunks of two tokens, and a Transformer."""
    generators = {"calm-2": TextGenerator(models / "calm-2"), "softmax": TextGenerator(models / "softmax")}
    generators["calm-2"].model.config.backbone_config.max_position_embeddings = 4096  # for long-running requests
    return generators


class LocalServer:
    """A server in a thread of this process, on its own port."""

    def __init__(
        self,
        generators: dict[str, TextGenerator],
        limits: Limits,
        keys: list[str],
        allowed_hosts: set[str] | None = None,
    ):
        listener = run.bind("127.0.0.1", 0, True, False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # small, so that slow clients cause backpressure
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = run.make_server(generators, limits, keys, allowed_hosts)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        self.schedulers = {scheduler.name: scheduler for scheduler in self.server.schedulers}
        self.client = httpx.Client(base_url=self.url, timeout=60)
        wait_for(lambda: self.server.started)

    def post(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "calm-2", "prompt": "the", **fields})

    def text(self, **fields: Any) -> str:
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        return parse_events(self.post(stream=True, **fields).text)

    def send(self, **fields: Any) -> socket.socket:
        """Send a request on a new connection, and do not read the response."""
        body = json.dumps({"model": "calm-2", "prompt": "the", **fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        connection = self.connect()
        connection.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
        return connection

    def pause_steps(self, name: str = "calm-2") -> threading.Semaphore:
        """Block the decoding loop of a model: it runs one step per release of the returned semaphore."""
        scheduler, permits = self.schedulers[name], threading.Semaphore(0)
        step = scheduler._step

        def step_with_permit():
            permits.acquire(timeout=120)
            return step()

        scheduler._step = step_with_permit
        return permits

    def connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def stop(self) -> None:
        self.server.handle_exit(15, None)
        self.thread.join(60)
        assert not self.thread.is_alive()


def parse_events(body: str) -> list[dict[str, Any]]:
    """Parse the events of a stream, which must be complete."""
    *events, last, rest = body.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.005)


@pytest.fixture
def start(generators) -> Iterator[Callable[..., LocalServer]]:
    """Start servers with given limits and keys; they stop after the test."""
    servers: list[LocalServer] = []

    def start_one(keys: list[str] | None = None, allowed_hosts: set[str] | None = None, **limits: Any) -> LocalServer:
        servers.append(LocalServer(generators, Limits(**limits), keys or [], allowed_hosts))
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(generators) -> Iterator[LocalServer]:
    server = LocalServer(generators, Limits(), [])
    yield server
    server.stop()
