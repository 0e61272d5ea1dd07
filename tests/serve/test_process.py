"""Tests of the server process: signals under load, and restart after SIGKILL."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.conftest import parse_events

COMMAND = [sys.executable, "-m", "calm", "serve", "bundled"]


class Process:
    def __init__(self, port: int = 0):
        environment = {**os.environ, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*COMMAND, "--port", str(port)], stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert match, line
        self.port = int(match[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        threading.Thread(target=self._read_stderr, daemon=True).start()
        ready = httpx.get(f"{self.url}/ready", timeout=60)  # the URL is printed once connections are accepted
        assert ready.status_code == 200

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)


@pytest.fixture
def process() -> Iterator[Process]:
    server = Process()
    yield server
    server.process.kill()
    server.process.wait()


def test_shutdown_loses_no_accepted_request(process):
    """SIGTERM with twelve streams running or waiting, and new requests after it: each is completed or rejected."""
    started, completed, rejected, failed = threading.Semaphore(0), [], [], []

    def post(seed: int) -> None:
        fields = {"model": "bundled", "prompt": "And God said", "max_tokens": 200, "stream": True, "seed": seed}
        try:
            with httpx.stream("POST", f"{process.url}/v1/completions", json=fields, timeout=120) as response:
                if response.status_code != 200:
                    rejected.append(response.status_code)
                    return
                started.release()
                completed.append(parse_events("".join(response.iter_text())))
        except httpx.ConnectError:
            rejected.append("closed")
        except Exception as error:
            failed.append(repr(error))

    first = [threading.Thread(target=post, args=(seed,)) for seed in range(12)]
    for thread in first:
        thread.start()
    for _ in first:
        assert started.acquire(timeout=60)
    process.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    late = [threading.Thread(target=post, args=(seed,)) for seed in range(12, 18)]
    for thread in late:
        thread.start()
    for thread in (*first, *late):
        thread.join(120)
    assert process.process.wait(60) == 0
    assert failed == []
    assert len(completed) == 12
    assert all(events[-1]["choices"][0]["finish_reason"] in ("stop", "length") for events in completed)
    assert rejected == [503] * 6
    assert not [line for line in process.log if "Traceback" in line or "Error" in line]


def test_restart_on_the_same_port_after_sigkill(process):
    with httpx.stream(
        "POST", f"{process.url}/v1/completions", json={"model": "bundled", "max_tokens": 2000, "stream": True}
    ) as response:
        next(response.iter_bytes())
        process.process.kill()
        process.process.wait()
    restarted = Process(process.port)
    try:
        response = httpx.post(f"{restarted.url}/v1/completions", json={"model": "bundled", "max_tokens": 4}, timeout=60)
        assert response.status_code == 200
        assert httpx.get(f"{restarted.url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        restarted.process.send_signal(signal.SIGINT)
        assert restarted.process.wait(60) == 0
    finally:
        restarted.process.kill()
