import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from calm.sampling.text import Writer
from calm.serve import run
from calm.serve.limits import Limits


@pytest.fixture(scope="session")
def writers(models) -> dict[str, Writer]:
    """Two tiny models of random weights: a CALM model with chunks of two tokens, and a Transformer."""
    made = {"calm-2": Writer(models / "calm-2"), "softmax": Writer(models / "softmax")}
    made["calm-2"].model.config.backbone_config.max_position_embeddings = 4096  # for texts that take a while
    return made


class Running:
    """A server in this process, on a socket of its own."""

    def __init__(self, writers: dict[str, Writer], limits: Limits, keys: list[str]):
        listening = run.bind("127.0.0.1", 0, True, False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the system should not read for a client
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = run.make_server(writers, limits, keys)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        self.schedulers = {scheduler.name: scheduler for scheduler in self.server.schedulers}
        self.client = httpx.Client(base_url=self.url, timeout=60)
        wait_for(lambda: self.server.started)

    def ask(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "calm-2", "prompt": "the", **fields})

    def text(self, **fields: Any) -> str:
        answer = self.ask(**fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        return events_of(self.ask(stream=True, **fields).text)

    def send(self, **fields: Any) -> socket.socket:
        """Ask on a connection of one's own, and leave the answer there."""
        body = json.dumps({"model": "calm-2", "prompt": "the", **fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        connection = self.connect()
        connection.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
        return connection

    def step_by_step(self, name: str = "calm-2") -> threading.Semaphore:
        """From now on a model makes as many steps as the semaphore is released."""
        scheduler, allowed = self.schedulers[name], threading.Semaphore(0)
        step = scheduler._step

        def when_allowed():
            allowed.acquire(timeout=120)
            return step()

        scheduler._step = when_allowed
        return allowed

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


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a whole stream, which must have ended as streams end."""
    *events, last, rest = body.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


@pytest.fixture
def start(writers) -> Iterator[Callable[..., Running]]:
    """Start servers with limits and keys; they end with the test."""
    made: list[Running] = []

    def one(keys: list[str] | None = None, **limits: Any) -> Running:
        made.append(Running(writers, Limits(**limits), keys or []))
        return made[-1]

    yield one
    for running in made:
        running.stop()


@pytest.fixture(scope="module")
def server(writers) -> Iterator[Running]:
    running = Running(writers, Limits(), [])
    yield running
    running.stop()
