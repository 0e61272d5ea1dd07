"""From a command to its first output, in seconds, in turns: files are warm, since everything is run once before.

What `calm generate` cannot do without is importing torch, which is measured beside it.
"""

import argparse
import statistics
import subprocess
import sys
import time

CALM = [sys.executable, "-m", "calm"]
SAY = "print('here', flush=True)"
COMMANDS = {
    "a bare Python": [sys.executable, "-c", SAY],
    "calm --help": [*CALM, "--help"],
    "import torch": [sys.executable, "-c", f"import torch; {SAY}"],
    "import torch and transformers' models": [sys.executable, "-c", f"import transformers.modeling_utils; {SAY}"],
    "calm generate": [*CALM, "generate", "bundled", "And God said", "--max-new-tokens", "4"],
}


def first_output(command: list[str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = process.stdout.read(1)
        spent = time.perf_counter() - began
        process.stdout.read()
    if not found or process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times = {name: [first_output(command)] for name, command in COMMANDS.items()}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            times[name].append(first_output(command))
    for name, (_, *seconds) in times.items():
        print(f"{name:38} {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
