"""Throughput of `calm prepare` compared with a bare `encode_batch` loop on the same number of threads; peak memory.

    python benchmarks/preparation.py [FILE] [--copies 10] [--vocabulary 8192] [--repeat 3]

FILE is a .jsonl.gz file; the default is the enwik8 text next to the project if it exists, else the embedded corpus.
Both use the same trained tokenizer. Peak memory is the resident memory of all processes of `calm prepare` together.
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

ENCODE_LOOP = """
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


def write_embedded_corpus(path: Path) -> Path:
    from calm.data.corpus import documents, open_sources

    with gzip.open(path, "wt") as file:
        for block in open_sources(["embedded"])[0].blocks():
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents(block))
    return path


def encode_loop(source: Path, tokenizer: Path, threads: int) -> float:
    """Seconds of the bare loop, in its own process."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", ENCODE_LOOP, str(source), str(tokenizer / "tokenizer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0])


def calm_prepare(sources: list[Path], tokenizer: str, output: Path, threads: int) -> tuple[float, float]:
    """Seconds, and peak memory over all processes in MB."""
    command = [sys.executable, "-m", "calm", "prepare", *map(str, sources), "--tokenizer", tokenizer]
    command += ["--output", str(output), "--workers", str(threads), "--validation-share", "0", "--overwrite"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        parent = psutil.Process(process.pid)
        while not finished.wait(0.1):
            try:
                processes = [parent, *parent.children(recursive=True)]
                peak = max(peak, sum(each.memory_info().rss for each in processes))
            except psutil.NoSuchProcess:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - began
    finished.set()
    watcher.join()
    if code:
        raise SystemExit(f"calm prepare failed with exit code {code}")
    return seconds, peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--copies", type=int, default=1, help="also prepare this many copies; memory should stay flat")
    parser.add_argument("--vocabulary", type=int, default=8192, help="vocabulary size")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = args.file or (ENWIK8 if ENWIK8.exists() else write_embedded_corpus(folder / "embedded.jsonl.gz"))
        seconds, peak = calm_prepare([source], f"bpe:{args.vocabulary}", folder / "first", threads)
        print(f"{source.name}, {threads} threads")
        print(f"calm prepare with tokenizer training: {seconds:6.1f} s, peak memory {peak:4.0f} MB", flush=True)
        tokenizer = folder / "first" / "tokenizer"
        ratios = []
        for _ in range(args.repeat):
            bare = encode_loop(source, tokenizer, threads)
            seconds, peak = calm_prepare([source], str(tokenizer), folder / "again", threads)
            ratios.append(bare / seconds)
            prepared = f"calm prepare {seconds:6.1f} s, peak memory {peak:4.0f} MB"
            print(f"encode_batch loop {bare:6.1f} s   {prepared}", flush=True)
        print(f"throughput of calm prepare / encode_batch loop: median {statistics.median(ratios):.2f}")
        if args.copies > 1:
            copies = [folder / f"copy-{number}.jsonl.gz" for number in range(args.copies)]
            for copy in copies:
                copy.symlink_to(source.resolve())
            seconds, peak = calm_prepare(copies, str(tokenizer), folder / "copies", threads)
            print(f"{args.copies} copies: {seconds:6.1f} s, peak memory {peak:4.0f} MB")


if __name__ == "__main__":
    main()
