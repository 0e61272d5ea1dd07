"""Several replicas: behind nginx with the configuration of docs/serving.md, and as a Ray Serve deployment."""

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
import near_ties  # in benchmarks/
import pytest

from calm.checkpoint import resolve_model_dir
from calm.generate.text import TextGenerator

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEEDS = range(12)
PROMPTS = ["And God said", "In the beginning", "", "The king"]
LONG = {"model": "bundled", "prompt": "And God said", "max_tokens": 1024, "seed": 3, "stream": True}


class Replica(NamedTuple):
    process: subprocess.Popen
    url: str

    def metric(self, name: str) -> float:
        """The value of a metric, or 0 if it has none yet."""
        match = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def num_responses(self, status: int = 200) -> float:
        return self.metric(f'calm_requests_total{{path="/v1/completions",status="{status}"}}')

    @property
    def is_generating(self) -> bool:
        return self.metric('calm_sequences_running{model="bundled"}') > 0


def request_body(seed: int) -> dict:
    """A request whose prompt, length and temperature depend on the seed."""
    prompt, temperature = PROMPTS[seed % 4], (1.0, 0.5)[seed % 2]
    return {"model": "bundled", "prompt": prompt, "max_tokens": 40 + seed, "seed": seed, "temperature": temperature}


def post(url: str, seed: int) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=request_body(seed), timeout=120)


def post_all(url: str, seeds: range) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: post(url, seed), seeds))


def completion_text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


class Reference(NamedTuple):
    """The unbatched completion of each seed, and the seeds that do not depend on a near-tie."""

    texts: list[str]
    stable: set[int]


@pytest.fixture(scope="module")
def reference() -> Reference:
    generator = TextGenerator(resolve_model_dir(Path("bundled")))

    def generate(seed: int) -> str:
        request = request_body(seed)
        return near_ties.generate_text(
            generator, request["prompt"], seed, request["temperature"], request["max_tokens"]
        )

    texts = [generate(seed) for seed in SEEDS]
    stable = set(near_ties.stable_texts(generator, dict(enumerate(texts)), generate))
    assert len(stable) >= 0.75 * len(SEEDS)
    return Reference(texts, stable)


def same_texts(responses: list[httpx.Response], reference: Reference) -> bool:
    """At most one text may differ, and only at a near-tie: rounding depends on the batch size."""
    pairs = enumerate(zip(responses, reference.texts, strict=True))
    different = {seed for seed, (response, text) in pairs if completion_text(response) != text}
    return len(different) <= 1 and not different & reference.stable


def stream_text(parts: list[bytes]) -> str:
    """The text of a stream, which must be complete."""
    events = b"".join(parts).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            httpx.get(url)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"no response from {url}")


def terminate(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture
def replicas(tmp_path) -> Iterator[list[Replica]]:
    command = [sys.executable, "-m", "calm", "serve", "bundled", "--port", "0"]
    processes = []
    try:
        logs = [tmp_path / "replica-0", tmp_path / "replica-1"]
        for log in logs:
            with log.open("w") as stderr:
                processes.append(subprocess.Popen(command, stderr=stderr, env={**os.environ, "COLUMNS": "200"}))
        yield [Replica(process, wait_for_url(process, log)) for process, log in zip(processes, logs, strict=True)]
    finally:
        for process in processes:
            terminate(process)


def wait_for_url(process: subprocess.Popen, log: Path) -> str:
    for _ in range(600):
        if match := re.search(r"Serving bundled at (http://[\d.]+:\d+) ", log.read_text()):
            return match[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    pytest.fail(f"no URL was printed within a minute: {log.read_text()}")


@pytest.fixture
def balanced(replicas, tmp_path) -> Iterator[str]:
    """URL of nginx in front of two replicas, with the documented configuration."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    pages = "".join(page.read_text() for page in DOCS.glob("serving*.md"))
    examples = re.findall(r"```nginx\n(.*?)```", pages, re.DOTALL)
    assert len(examples) == 1
    port, (first, second) = free_port(), (replica.url.removeprefix("http://") for replica in replicas)
    site = examples[0]
    for example, actual in (
        ("127.0.0.1:8001", first),
        ("127.0.0.1:8002", second),
        ("127.0.0.1:8080", f"127.0.0.1:{port}"),
    ):
        assert site.count(example) == 1
        site = site.replace(example, actual)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp_paths = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/nginx.pid; error_log {tmp_path}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off; {temp_paths}\n{site}}}\n"
    )
    command = [nginx, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(tmp_path / "nginx.conf")]
    process = subprocess.Popen(command)
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        terminate(process)


def test_nginx_replicas_match_unbatched_generation(replicas, balanced, reference):
    assert same_texts(post_all(balanced, SEEDS), reference)
    counts = [replica.num_responses() for replica in replicas]
    assert sum(counts) == len(SEEDS)
    assert min(counts) >= 3  # least_conn distributes them about evenly


def test_nginx_does_not_buffer_streams(replicas, balanced):
    with httpx.stream("POST", f"{balanced}/v1/completions", json=LONG, timeout=120) as stream:
        iterator = stream.iter_raw()
        first = next(iterator)
        assert any(replica.is_generating for replica in replicas)  # the first part arrived before the end
        parts = [first, *iterator]
    assert len(parts) > 10
    full = httpx.post(f"{replicas[0].url}/v1/completions", json={**LONG, "stream": False}, timeout=120)
    assert stream_text(parts) == completion_text(full)


def test_replica_shutdown_is_invisible_to_clients(replicas, balanced, reference, tmp_path):
    stopping, remaining = replicas
    before = remaining.num_responses()
    with httpx.stream("POST", f"{stopping.url}/v1/completions", json=LONG, timeout=120) as stream:
        iterator = stream.iter_raw()
        first = next(iterator)
        stopping.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{stopping.url}/ready").status_code == 200:
            time.sleep(0.05)
        responses = post_all(balanced, SEEDS)  # the draining replica rejects them with a 503
        assert stopping.num_responses(503) > 0, (tmp_path / "error.log").read_text()
        parts = [first, *iterator]
    assert same_texts(responses, reference)
    assert stream_text(parts)
    assert stopping.process.wait(60) == 0
    assert same_texts(post_all(balanced, SEEDS), reference)  # now connections to it are refused
    assert remaining.num_responses() == before + 2 * len(SEEDS)


@pytest.fixture
def ray_url(monkeypatch) -> Iterator[str]:
    pytest.importorskip("ray", reason="ray is not installed (extra `ray`)")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray creates a token in the home directory
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from calm.serve.ray_deployment import app

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"model": "bundled", "min_replicas": "2", "max_replicas": "2"}))  # strings, as on a command line
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def test_ray_replicas_match_unbatched_generation(ray_url, reference):
    responses = post_all(ray_url, SEEDS)
    assert [completion_text(response) for response in responses] == reference.texts
    assert len({response.headers["X-Replica"] for response in responses}) == 2

    pages: dict[str, str] = {}
    while len(pages) < 2:  # Ray chooses the replica
        page = httpx.get(f"{ray_url}/metrics")
        pages[page.headers["X-Replica"]] = page.text
    chunks, steps = (
        sum(float(re.findall(rf"^{name}\S* (\S+)$", page, re.MULTILINE)[0]) for page in pages.values())
        for name in ("calm_chunks_total", "calm_step_seconds_count")
    )
    assert chunks > 1.5 * steps  # sequences were batched

    with httpx.stream("POST", f"{ray_url}/v1/completions", json=LONG, timeout=120) as stream:
        parts = list(stream.iter_raw())
    assert len(parts) > 10
    assert stream_text(parts)
    rejected = httpx.post(f"{ray_url}/v1/completions", json={"model": "bundled", "logprobs": 1})
    assert rejected.status_code == 400
    assert "no token probabilities" in rejected.json()["error"]["message"]
