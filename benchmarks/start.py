"""Startup time: seconds from the start of a command to its first output.

    python benchmarks/start.py [--rounds 7]

The commands run in turn, after one warm-up run that fills the file cache. `import torch` is a lower bound for
`calm generate`.
"""

import argparse
import statistics
import subprocess
import sys
import time

CALM = [sys.executable, "-m", "calm"]
PRINT = "print('ready', flush=True)"
COMMANDS = {
    "Python": [sys.executable, "-c", PRINT],
    "calm --help": [*CALM, "--help"],
    "import torch": [sys.executable, "-c", f"import torch; {PRINT}"],
    "import torch and transformers' models": [sys.executable, "-c", f"import transformers.modeling_utils; {PRINT}"],
    "calm generate": [*CALM, "generate", "bundled", "And God said", "--max-new-tokens", "4"],
}


def time_to_first_output(command: list[str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            seconds = time_to_first_output(command)
            if number:
                times[name].append(seconds)
    for name, seconds in times.items():
        print(f"{name:38} {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
