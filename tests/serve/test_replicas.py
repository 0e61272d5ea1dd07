"""More than one replica: behind nginx, as docs/serving.md configures it, and as a deployment of Ray Serve."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import near_ties  # of benchmarks
import pytest

from calm.models.directories import located
from calm.sampling.text import Writer

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEEDS = range(12)
PROMPTS = ["And God said", "In the beginning", "", "The king"]
LONG = {"model": "bundled", "prompt": "And God said", "max_tokens": 1024, "seed": 3, "stream": True}


class Replica(NamedTuple):
    process: subprocess.Popen
    url: str

    def count(self, name: str) -> float:
        """A number of its metrics, 0 where there is none yet."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def answered(self, status: int = 200) -> float:
        return self.count(f'calm_requests_total{{path="/v1/completions",status="{status}"}}')

    @property
    def writes(self) -> bool:
        return self.count('calm_texts_running{model="bundled"}') > 0


def body(seed: int) -> dict:
    """Requests that differ in everything that a text depends on."""
    prompt, temperature = PROMPTS[seed % 4], (1.0, 0.5)[seed % 2]
    return {"model": "bundled", "prompt": prompt, "max_tokens": 40 + seed, "seed": seed, "temperature": temperature}


def ask(url: str, seed: int) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body(seed), timeout=120)


def ask_all(url: str, seeds: range) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: ask(url, seed), seeds))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


class Alone(NamedTuple):
    """What a writer gives to each seed alone, and the seeds that no near-tie decides."""

    texts: list[str]
    settled: set[int]


@pytest.fixture(scope="module")
def alone() -> Alone:
    writer = Writer(located(Path("bundled")))

    def write(seed: int) -> str:
        asked = body(seed)
        return near_ties.written(writer, asked["prompt"], seed, asked["temperature"], asked["max_tokens"])

    texts = [write(seed) for seed in SEEDS]
    settled = set(near_ties.settled(writer, dict(enumerate(texts)), write))
    assert len(settled) >= 0.75 * len(SEEDS)
    return Alone(texts, settled)


def same_texts(answers: list[httpx.Response], alone: Alone) -> bool:
    """All but one, which a near-tie must decide: batches of another size round otherwise."""
    pairs = enumerate(zip(answers, alone.texts, strict=True))
    other = {seed for seed, (answer, text) in pairs if text_of(answer) != text}
    return len(other) <= 1 and not other & alone.settled


def written(pieces: list[bytes]) -> str:
    """The text of a stream that is whole."""
    events = b"".join(pieces).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            httpx.get(url)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"nothing answers at {url}")


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture
def replicas(tmp_path) -> Iterator[list[Replica]]:
    command = [sys.executable, "-m", "calm", "serve", "bundled", "--port", "0"]
    started = []
    try:
        logs = [tmp_path / "replica-0", tmp_path / "replica-1"]
        for log in logs:
            with log.open("w") as stderr:
                started.append(subprocess.Popen(command, stderr=stderr, env={**os.environ, "COLUMNS": "200"}))
        yield [Replica(process, said_url(process, log)) for process, log in zip(started, logs, strict=True)]
    finally:
        for process in started:
            end(process)


def said_url(process: subprocess.Popen, log: Path) -> str:
    for _ in range(600):
        if found := re.search(r"Serving bundled at (http://[\d.]+:\d+) ", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    pytest.fail(f"no address after a minute: {log.read_text()}")


@pytest.fixture
def balanced(replicas, tmp_path) -> Iterator[str]:
    """nginx with what the documentation shows, before two replicas."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    pages = "".join(page.read_text() for page in DOCS.glob("serving*.md"))
    shown = re.findall(r"```nginx\n(.*?)```", pages, re.DOTALL)
    assert len(shown) == 1
    port, (first, second) = free_port(), (replica.url.removeprefix("http://") for replica in replicas)
    site = shown[0]
    for example, ours in (
        ("127.0.0.1:8001", first),
        ("127.0.0.1:8002", second),
        ("127.0.0.1:8080", f"127.0.0.1:{port}"),
    ):
        assert site.count(example) == 1
        site = site.replace(example, ours)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/nginx.pid; error_log {tmp_path}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off; {places}\n{site}}}\n"
    )
    command = [nginx, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(tmp_path / "nginx.conf")]
    process = subprocess.Popen(command)
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def test_replicas_behind_nginx_write_what_a_writer_writes(replicas, balanced, alone):
    assert same_texts(ask_all(balanced, SEEDS), alone)
    served = [replica.answered() for replica in replicas]
    assert sum(served) == len(SEEDS)
    assert min(served) >= 3  # least_conn: about half each


def test_nginx_hands_a_stream_on_as_it_grows(replicas, balanced):
    with httpx.stream("POST", f"{balanced}/v1/completions", json=LONG, timeout=120) as stream:
        pieces = stream.iter_raw()
        first = next(pieces)
        assert any(replica.writes for replica in replicas)  # what has come was not kept until the end
        pieces = [first, *pieces]
    assert len(pieces) > 10
    whole = httpx.post(f"{replicas[0].url}/v1/completions", json={**LONG, "stream": False}, timeout=120)
    assert written(pieces) == text_of(whole)


def test_no_client_notices_that_a_replica_ends(replicas, balanced, alone, tmp_path):
    ending, staying = replicas
    before = staying.answered()
    with httpx.stream("POST", f"{ending.url}/v1/completions", json=LONG, timeout=120) as stream:
        pieces = stream.iter_raw()
        first = next(pieces)
        ending.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{ending.url}/ready").status_code == 200:
            time.sleep(0.05)
        answers = ask_all(balanced, SEEDS)  # one replica refuses them: it finishes its stream
        assert ending.answered(503) > 0, (tmp_path / "error.log").read_text()
        pieces = [first, *pieces]
    assert same_texts(answers, alone)
    assert written(pieces)
    assert ending.process.wait(60) == 0
    assert same_texts(ask_all(balanced, SEEDS), alone)  # now nobody listens there
    assert staying.answered() == before + 2 * len(SEEDS)


@pytest.fixture
def ray_url(monkeypatch) -> Iterator[str]:
    pytest.importorskip("ray", reason="ray is not installed (extra `ray`)")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray writes one into the home directory
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from calm.serve.ray_deployment import app

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"model": "bundled", "min_replicas": "2", "max_replicas": "2"}))  # as the command line gives them
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def test_replicas_of_ray_write_what_a_writer_writes(ray_url, alone):
    answers = ask_all(ray_url, SEEDS)
    assert [text_of(answer) for answer in answers] == alone.texts
    assert len({answer.headers["X-Replica"] for answer in answers}) == 2

    pages: dict[str, str] = {}
    while len(pages) < 2:  # Ray chooses who answers
        page = httpx.get(f"{ray_url}/metrics")
        pages[page.headers["X-Replica"]] = page.text
    chunks, steps = (
        sum(float(re.findall(rf"^{name}\S* (\S+)$", page, re.MULTILINE)[0]) for page in pages.values())
        for name in ("calm_chunks_total", "calm_step_seconds_count")
    )
    assert chunks > 1.5 * steps  # texts grew together

    with httpx.stream("POST", f"{ray_url}/v1/completions", json=LONG, timeout=120) as stream:
        pieces = list(stream.iter_raw())
    assert len(pieces) > 10
    assert written(pieces)
    refused = httpx.post(f"{ray_url}/v1/completions", json={"model": "bundled", "logprobs": 1})
    assert refused.status_code == 400
    assert "no probabilities" in refused.json()["error"]["message"]
