"""Preparation against a bare `encode_batch` loop with the same number of threads, and its peak memory.

    python benchmarks/preparation.py [FILE] [--copies 10] [--vocabulary 8192] [--repeat 3]

FILE is a .jsonl.gz; without one, the enwik8 text beside the project is used where it exists, else the embedded corpus.
Both sides use the same trained tokenizer. Prints seconds, the ratio of speeds, and the peak resident memory of all
processes of the preparation together.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ENWIK8 = Path(__file__).resolve().parents[2] / "shared" / "data" / "enwik8.train.jsonl.gz"

BARE = """
import gzip, json, sys, time
from tokenizers import Tokenizer
documents = [json.loads(line)["text"] for line in gzip.open(sys.argv[1], "rt")]
tokenizer = Tokenizer.from_file(sys.argv[2])
began = time.perf_counter()
tokens = 0
for start in range(0, len(documents), 256):
    tokens += sum(len(e.ids) for e in tokenizer.encode_batch(documents[start : start + 256], add_special_tokens=False))
print(time.perf_counter() - began, tokens)
"""


def embedded(path: Path) -> Path:
    from calm.data.corpus import documents, open_sources

    with gzip.open(path, "wt") as file:
        for block in open_sources(["embedded"])[0].blocks():
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents(block))
    return path


def bare(source: Path, tokenizer: Path, threads: int) -> float:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", BARE, str(source), str(tokenizer / "tokenizer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0])


def prepare(sources: list[Path], tokenizer: str, output: Path, threads: int) -> tuple[float, float]:
    """Seconds, and peak megabytes over all processes."""
    command = [sys.executable, "-m", "calm", "prepare", *map(str, sources), "--tokenizer", tokenizer]
    command += ["--output", str(output), "--workers", str(threads), "--validation-share", "0", "--overwrite"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        main = psutil.Process(process.pid)
        while not over.wait(0.1):
            try:
                family = [main, *main.children(recursive=True)]
                peak = max(peak, sum(member.memory_info().rss for member in family))
            except psutil.NoSuchProcess:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    if code:
        raise SystemExit(f"calm prepare failed with {code}")
    return seconds, peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--copies", type=int, default=1, help="also prepare this many copies, to see memory stay flat")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        source = arguments.file or (ENWIK8 if ENWIK8.exists() else embedded(here / "embedded.jsonl.gz"))
        seconds, peak = prepare([source], f"bpe:{arguments.vocabulary}", here / "first", threads)
        print(f"{source.name}, {threads} threads")
        print(f"prepare, training the tokenizer too: {seconds:6.1f} s, peak {peak:4.0f} MB", flush=True)
        tokenizer = here / "first" / "tokenizer"
        ratios = []
        for _ in range(arguments.repeat):
            alone = bare(source, tokenizer, threads)
            seconds, peak = prepare([source], str(tokenizer), here / "again", threads)
            ratios.append(alone / seconds)
            print(
                f"bare encode_batch {alone:6.1f} s   prepare {seconds:6.1f} s, peak {peak:4.0f} MB",
                flush=True,
            )
        print(f"speed of prepare as a ratio to bare encode_batch: median {statistics.median(ratios):.2f}")
        if arguments.copies > 1:
            copies = []
            for number in range(arguments.copies):
                copies.append(here / f"copy-{number}.jsonl.gz")
                copies[-1].symlink_to(source.resolve())
            seconds, peak = prepare(copies, str(tokenizer), here / "copies", threads)
            print(f"{arguments.copies} copies: {seconds:6.1f} s, peak {peak:4.0f} MB")


if __name__ == "__main__":
    main()
