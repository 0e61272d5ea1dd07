"""results.json: all measured results by a hash of the run and options. It contains neither weights nor paths.

Each measure is one line, so that diffs of a file under version control show which results were added.
"""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calm import __version__
from calm.errors import UserError
from calm.files import write_atomic
from calm.paper.measures import Measure
from calm.train.checkpoint import versions

FILE = "results.json"
FORMAT = 1


class Results:
    """Results of one scale, backed by results.json."""

    def __init__(self, directory: Path, scale: str, data_digest: str):
        self.path, self.data_digest = directory / FILE, data_digest
        self.header = {"format": FORMAT, "scale": scale, "calm": __version__}
        self.measures: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, Any] = {}
        self.created_by = __version__
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            stored = json.loads(self.path.read_bytes())
            header = {name: stored[name] for name in self.header}
            self.measures, self.experiments = dict(stored["measures"]), dict(stored["experiments"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"cannot read {self.path} ({error}); restore the file or choose another --output"
            ) from error
        for name in ("format", "scale"):
            expected = self.header[name]
            if header[name] != expected:
                raise UserError(f"{self.path} has {name} {header[name]!r}, not {expected!r}; choose another --output")
        self.created_by = header["calm"]

    def find(self, measure: Measure) -> dict[str, Any] | None:
        """The stored result of a measure, or None."""
        stored = self.measures.get(measure.key(self.data_digest))
        return stored["answer"] if stored is not None else None

    def add(self, measure: Measure, answer: dict[str, Any], seconds: float) -> None:
        self.measures[measure.key(self.data_digest)] = {
            "kind": measure.kind,
            "recipe": measure.run.recipe,
            "settings": dict(measure.run.settings),
            "autoencoder": dict(measure.run.autoencoder.settings) if measure.run.autoencoder else None,
            "options": dict(measure.options),
            "versions": versions(),
            "hardware": hardware(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "answer": answer,
        }

    def write(self) -> None:
        lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in self.header.items()]
        for part, values in (("measures", self.measures), ("experiments", self.experiments)):
            inner = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items())
            lines.append(f"{json.dumps(part)}: {{\n{inner}\n}}" + ("," if part == "measures" else ""))
        write_atomic(self.path, ("{\n" + "\n".join(lines) + "\n}\n").encode())


def hardware() -> str:
    """CPU model, and the number of cores available to this process."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def processor() -> str:
    """CPU model."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
