"""Latency of small requests to `calm serve`: alone, and while it receives hostile bodies of 1 MB.

    python benchmarks/latency.py [MODEL] [--rounds 5] [--bodies 1 8]

The hostile bodies are valid JSON. `--bodies` connections send one at once, while another one sends `GET /ready` until
all are answered; the largest latency of each round counts.
"""

import argparse
import json
import signal
import statistics
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection

from serving import start_server

SIZE = 2**20 - 2**12  # bytes of a hostile body, just below the server's limit
HEADERS = {"Content-Type": "application/json"}


def hostile_bodies(model: str) -> dict[str, bytes]:
    """Bodies with as many elements as fit, by the collection that holds them."""

    def repeat(element: str) -> str:
        """Comma-separated elements, numbered where they say so."""
        count = SIZE // (len(element.replace("{i}", "123456")) + 1)
        return ",".join(element.replace("{i}", str(100_000 + i)) for i in range(count))

    bodies = {
        "logit_bias, invalid": '"logit_bias":{' + repeat('"{i}":""') + "}",
        "logit_bias, valid": '"logit_bias":{' + repeat('"{i}":1') + "}",
        "unknown fields": repeat('"{i}":1'),
        "stream_options": '"stream_options":{' + repeat('"{i}":1') + "}",
        "token ids": '"prompt":[' + repeat("1") + "]",
        "prompts": '"prompt":[' + repeat('"a"') + "]",
        "prompts of token ids": '"prompt":[' + repeat("[1]") + "]",
        "invalid prompts": '"prompt":[' + repeat("{}") + "]",
        "one long prompt": '"prompt":"' + "a b " * (SIZE // 4) + '"',
        "stop strings": '"stop":[' + repeat('"a"') + "]",
        "messages": '"messages":[' + repeat("{}") + "]",
        "a long number": '"seed":' + "9" * 4000,
    }
    return {name: f'{{"model":{json.dumps(model)},{body}}}'.encode() for name, body in bodies.items()}


def request(connection: HTTPConnection, method: str, path: str, body: bytes | None = None) -> float:
    """Milliseconds until the response."""
    began = time.perf_counter()
    connection.request(method, path, body, HEADERS)
    connection.getresponse().read()
    return 1e3 * (time.perf_counter() - began)


def latencies_under(attack: Callable[[], float], count: int, small: Callable[[], float]) -> list[float]:
    """Of small requests, one after the other, while `count` threads run an attack."""
    threads = [threading.Thread(target=attack) for _ in range(count)]
    for thread in threads:
        thread.start()
    milliseconds = []
    while any(thread.is_alive() for thread in threads):
        milliseconds.append(small())
        time.sleep(0.001)  # leaves the core to the server
    return milliseconds


def report(name: str, milliseconds: list[float]) -> None:
    print(
        f"{name:36s} median {statistics.median(milliseconds):8.1f} ms, largest {max(milliseconds):8.1f} ms", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--rounds", type=int, default=5, help="per measurement")
    parser.add_argument("--bodies", type=int, nargs="+", default=[1, 8], help="numbers of concurrent hostile bodies")
    args = parser.parse_args()
    process, name, port = start_server(args.model)
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    tokens = json.dumps({"model": name, "prompt": "And God said", "max_tokens": 4}).encode()

    def ready() -> float:
        return request(connection, "GET", "/ready")

    def four_tokens() -> float:
        return request(connection, "POST", "/v1/completions", tokens)

    try:
        for label, small in (("GET /ready", ready), ("four tokens", four_tokens)):
            small()  # warm-up
            report(label, [small() for _ in range(args.rounds)])
        for label, body in hostile_bodies(name).items():
            path = "/v1/chat/completions" if label == "messages" else "/v1/completions"

            def attack(path: str = path, body: bytes = body) -> float:
                return request(HTTPConnection("127.0.0.1", port, timeout=120), "POST", path, body)

            for count in args.bodies:
                rounds = [latencies_under(attack, count, ready) for _ in range(args.rounds)]
                report(f"{label}, {count} at once", [max(latencies) for latencies in rounds])
    finally:
        process.send_signal(signal.SIGTERM)
        print(f"exit code {process.wait(120)}")


if __name__ == "__main__":
    main()
