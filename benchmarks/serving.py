"""How fast `calm serve` answers many at once, and whether anything is lost, mixed up or kept.

    python benchmarks/serving.py [MODEL] [--streams 1 4 16 64] [--rounds 3] [--requests 10000] [--temperature 1.0]

Starts a server of its own and asks it over loopback from this process. Every answer is compared with what the same
request gave when it was served alone: only near-ties may differ. `--requests` short ones follow, while the server's
memory is watched.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import near_ties
import psutil

from calm.models.directories import located
from calm.sampling.text import Writer

PROMPTS = ("And God said", "In the beginning", "The LORD is my", "Blessed are", "", "And it came to pass that")
MEMORY_STREAMS = 32


class Answer(NamedTuple):
    text: str
    tokens: int
    first: float  # seconds to the first chunk


async def ask(port: int, fields: dict[str, Any]) -> Answer:
    """A stream by hand: a library of HTTP would be most of the load on two cores."""
    body = json.dumps({**fields, "stream": True}).encode()
    began, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    text, tokens, done = [], 0, False
    status = await reader.readline()
    if b"200" not in status:
        raise RuntimeError(f"{status!r} {await reader.read()!r}")
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        first = first or time.perf_counter() - began
        choice = json.loads(line[6:])["choices"][0]
        text.append(choice["text"])
        tokens += len(choice["chunk"]["ids"])
    writer.close()
    if not done:
        raise RuntimeError("a stream ended before its end")
    return Answer("".join(text), tokens, first)


async def many(port: int, requests: list[dict[str, Any]], streams: int) -> list[Answer]:
    """All requests, so many at once."""
    answers: list[Answer | None] = [None] * len(requests)
    numbers = iter(range(len(requests)))

    async def work() -> None:
        for number in numbers:
            answers[number] = await ask(port, requests[number])

    await asyncio.gather(*(work() for _ in range(streams)))
    return [answer for answer in answers if answer is not None]


def made(model: str, count: int, tokens: int, temperature: float) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": tokens,
            "seed": number,
            "temperature": temperature,
        }
        for number in range(count)
    ]


def start(model: str) -> tuple[subprocess.Popen, int]:
    command = [sys.executable, "-m", "calm", "serve", model, "--port", "0", "--max-batch", "64"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stderr is not None
    found = re.search(r"Serving (\S+) at http://127\.0\.0\.1:(\d+)", process.stderr.readline())
    assert found, "the server did not start"
    return process, int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    process, port = start(options.model)
    try:
        measure(options, process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        print(f"exit code {process.wait(120)}")


def measure(options: argparse.Namespace, process: subprocess.Popen, port: int) -> None:
    name = options.model
    requests = made(name, max(4, 2 * max(options.streams)), options.tokens, options.temperature)
    alone = asyncio.run(many(port, requests, 1))
    speeds: dict[int, list[float]] = {streams: [] for streams in options.streams}
    firsts: dict[int, list[float]] = {streams: [] for streams in options.streams}
    other: list[int] = []  # seeds of texts that were not as alone
    for _ in range(options.rounds):  # in turns, so that a busy machine slows all of them
        for streams in options.streams:
            chosen = requests[: max(4, 2 * streams)]
            began = time.perf_counter()
            answers = asyncio.run(many(port, chosen, streams))
            seconds = time.perf_counter() - began
            assert len(answers) == len(chosen), "an answer was lost"
            speeds[streams].append(sum(answer.tokens for answer in answers) / seconds)
            firsts[streams] += [answer.first for answer in answers]
            pairs = enumerate(zip(answers, alone, strict=False))
            other += [seed for seed, (found, before) in pairs if found.text != before.text]
    total = options.rounds * sum(max(4, 2 * streams) for streams in options.streams)
    print(f"{name}, temperature {options.temperature:g}, {options.tokens} tokens; medians of {options.rounds} rounds")
    base = statistics.median(speeds[options.streams[0]])
    print("streams  tokens/s   times   first chunk: median   99%")
    for streams in options.streams:
        speed = statistics.median(speeds[streams])
        late = statistics.quantiles(firsts[streams], n=100)[98] if len(firsts[streams]) > 1 else firsts[streams][0]
        median = statistics.median(firsts[streams])
        print(f"{streams:7d} {speed:9.0f} {speed / base:7.2f} {1e3 * median:17.0f} ms {1e3 * late:6.0f} ms")
    wrong = mixed_up(options, {seed: alone[seed].text for seed in other})
    print(f"{total} answers, none lost, {len(other)} other than alone ({len(set(other))} texts)")
    print(f"of these texts {len(set(other)) - len(wrong)} hang on a near-tie; mixed up: {wrong or 'none'}")
    watch(name, process, port, options.requests)


def mixed_up(options: argparse.Namespace, texts: dict[int, str]) -> list[int]:
    """The seeds of texts that no near-tie explains."""
    writer = Writer(located(Path(options.model)))

    def write(seed: int) -> str:
        prompt = PROMPTS[seed % len(PROMPTS)]
        return near_ties.written(writer, prompt, seed, options.temperature, options.tokens)

    strange = [seed for seed, text in texts.items() if write(seed) != text]  # not even alone what a writer gives
    return strange + list(near_ties.settled(writer, texts, write))


def watch(name: str, process: subprocess.Popen, port: int, count: int) -> None:
    """Memory over many short requests, a tenth at a time."""
    memory = psutil.Process(process.pid).memory_info
    seen = []
    for start in range(0, count, max(1, count // 10)):
        requests = made(name, min(max(1, count // 10), count - start), 8, 1.0)
        answers = asyncio.run(many(port, requests, MEMORY_STREAMS))
        assert len(answers) == len(requests), "an answer was lost"
        seen.append(memory().rss / 2**20)
    if seen:
        print(f"memory over {count} requests, MB: {' '.join(f'{megabytes:.0f}' for megabytes in seen)}")


if __name__ == "__main__":
    main()
