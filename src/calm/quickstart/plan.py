"""The plan of a quickstart. Step counts depend only on the requested minutes, so that runs are reproducible."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calm.config import RunConfig, load_config
from calm.data.corpus import open_sources
from calm.data.workers import PrepareOptions
from calm.errors import UserError
from calm.files import TEMPORARY, write_json

PLAN = "quickstart.json"
STAGES = ("autoencoder", "calm", "transformer")
SHARES = {"autoencoder": 0.17, "calm": 0.255, "transformer": 0.255}  # the rest is for preparation and evaluation
STEPS_PER_MINUTE = {"autoencoder": 500, "calm": 400, "transformer": 197}  # measured on two cores
MIN_STEPS = 20
MIN_BYTES = 200_000
EVALUATIONS = 6  # per training run


@dataclass(frozen=True)
class Plan:
    minutes: float = 15.0
    data: tuple[str, ...] = ("embedded",)
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and self.minutes > 0):
            raise UserError(f"--minutes must be above 0, not {self.minutes}; a good first value is 15")
        if self.minutes > 24 * 60:
            raise UserError(f"--minutes {self.minutes:g} is more than a day; use calm train for longer runs")

    def check_data(self) -> None:
        """Raise UserError early if the input files are too small."""
        sizes = [source.size for source in open_sources(list(self.data))]
        if None not in sizes and (total := sum(size or 0 for size in sizes)) < MIN_BYTES:
            raise UserError(f"--data has {total:,} bytes; quickstart needs at least {MIN_BYTES:,} (about 35,000 words)")

    @property
    def preparation(self) -> PrepareOptions:
        custom = self.data != ("embedded",)
        return PrepareOptions(
            "bpe:2048" if custom else "bpe:4096",
            validation_share=0.05,
            test_share=0.05,
            document_size=4096 if custom else 32_768,  # small enough that every split gets documents
        )

    def minutes_of(self, stage: str) -> float:
        return self.minutes * SHARES[stage]

    def steps(self, stage: str) -> int:
        return max(MIN_STEPS, round(self.minutes_of(stage) * STEPS_PER_MINUTE[stage]))

    def run(self, stage: str, output: Path) -> RunConfig:
        """The configuration of the training run of a stage."""
        steps, output = self.steps(stage), output.resolve()  # the working directory may differ when resuming
        every = max(1, steps // EVALUATIONS)
        settings = [
            f"seed={self.seed}",
            f"data.sets.0.path={json.dumps(str(output / 'data'))}",
            f"train.steps={steps}",
            f"train.evaluate_every={every}",
            f"train.checkpoint_every={every}",
            f"optimizer.warmup_steps={min(50, steps // 5)}",
        ]
        if stage == "calm":
            settings.append(f"language_model.autoencoder={json.dumps(str(model_of(output, 'autoencoder')))}")
        return load_config(f"quickstart-{stage}", settings)


def model_of(output: Path, stage: str) -> Path:
    return output / "runs" / stage / "model"


def save_or_check_plan(plan: Plan, output: Path) -> None:
    """Write the plan to a new directory, or check that an existing directory has the same plan."""
    path = output / PLAN
    expected: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    if not path.exists():
        if others := sorted(p.name for p in output.iterdir() if not p.name.endswith(TEMPORARY)):
            names = ", ".join(others[:3])
            raise UserError(
                f"{output} contains files not created by calm quickstart ({names}); choose another --output"
            )
        plan.check_data()
        write_json(path, expected)
        return
    try:
        existing = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"cannot read {path}; remove {output} or choose another --output") from error
    if existing != expected:
        different = ", ".join(name for name in expected if existing.get(name) != expected[name])
        raise UserError(
            f"{output} contains a quickstart with other settings ({different}); repeat the original settings to "
            "continue it, remove it, or choose another --output"
        )
