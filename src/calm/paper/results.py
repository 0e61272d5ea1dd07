"""results.json: everything that was measured, by the hash of what it was measured on. No weights, no paths.

One line a measure, so that a file in a repository shows what a sitting has added.
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
    def __init__(self, directory: Path, scale: str, text: str):
        self.path, self.text = directory / FILE, text
        self.header = {"format": FORMAT, "scale": scale, "calm": __version__}
        self.measures: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, Any] = {}
        self.begun_by = __version__
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            kept = json.loads(self.path.read_bytes())
            found = {name: kept[name] for name in self.header}
            self.measures, self.experiments = dict(kept["measures"]), dict(kept["experiments"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} cannot be read ({error}); restore it, or name another --output") from error
        for name in ("format", "scale"):
            wanted = self.header[name]
            if found[name] != wanted:
                raise UserError(f"{self.path} has {name} {found[name]!r}, not {wanted!r}; name another --output")
        self.begun_by = found["calm"]

    def find(self, measure: Measure) -> dict[str, Any] | None:
        kept = self.measures.get(measure.key(self.text))
        return kept["answer"] if kept is not None else None

    def keep(self, measure: Measure, answer: dict[str, Any], seconds: float) -> None:
        self.measures[measure.key(self.text)] = {
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
    """The processor and how many of it this process may use."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
