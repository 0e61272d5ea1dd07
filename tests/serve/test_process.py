"""The whole process: signals under load, and a start after the worst."""

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

from tests.serve.conftest import events_of

COMMAND = [sys.executable, "-m", "calm", "serve", "bundled"]


class Process:
    def __init__(self, port: int = 0):
        environment = {**os.environ, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*COMMAND, "--port", str(port)], stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.errors: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        ready = httpx.get(f"{self.url}/ready", timeout=60)  # it says where only when nobody is refused
        assert ready.status_code == 200

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.process.kill()
    made.process.wait()


def test_no_accepted_request_is_lost_at_the_end(process):
    """Twelve streams run or wait when the signal comes, and others keep coming: each is answered whole, or refused."""
    began, whole, refused, wrong = threading.Semaphore(0), [], [], []

    def ask(seed: int) -> None:
        fields = {"model": "bundled", "prompt": "And God said", "max_tokens": 200, "stream": True, "seed": seed}
        try:
            with httpx.stream("POST", f"{process.url}/v1/completions", json=fields, timeout=120) as answer:
                if answer.status_code != 200:
                    refused.append(answer.status_code)
                    return
                began.release()
                whole.append(events_of("".join(answer.iter_text())))
        except httpx.ConnectError:
            refused.append("closed")
        except Exception as error:
            wrong.append(repr(error))

    first = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in first:
        thread.start()
    for _ in first:
        assert began.acquire(timeout=60)
    process.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    late = [threading.Thread(target=ask, args=(seed,)) for seed in range(12, 18)]
    for thread in late:
        thread.start()
    for thread in (*first, *late):
        thread.join(120)
    assert process.process.wait(60) == 0
    assert wrong == []
    assert len(whole) == 12
    assert all(events[-1]["choices"][0]["finish_reason"] in ("stop", "length") for events in whole)
    assert refused == [503] * 6
    assert not [line for line in process.errors if "Traceback" in line or "Error" in line]


def test_after_kill_9_it_serves_again_on_the_same_port(process):
    with httpx.stream(
        "POST", f"{process.url}/v1/completions", json={"model": "bundled", "max_tokens": 2000, "stream": True}
    ) as answer:
        next(answer.iter_bytes())
        process.process.kill()
        process.process.wait()
    again = Process(process.port)
    try:
        answer = httpx.post(f"{again.url}/v1/completions", json={"model": "bundled", "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200
        again.process.send_signal(signal.SIGINT)
        assert again.process.wait(60) == 0
    finally:
        again.process.kill()
