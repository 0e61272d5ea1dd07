"""What a quickstart does, and for how long. Steps follow from the minutes alone, so a run can be repeated exactly."""

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
SHARES = {"autoencoder": 0.17, "calm": 0.255, "transformer": 0.255}  # of the minutes; the rest is data and measures
STEPS_A_MINUTE = {"autoencoder": 500, "calm": 440, "transformer": 197}  # of two cores, measured
FEWEST_STEPS = 20
LEAST_TEXT = 200_000  # bytes
LEAST_TOKENS = 1_000  # of the texts that are kept back, each
EVALUATIONS = 6  # of a run


@dataclass(frozen=True)
class Plan:
    minutes: float = 15.0
    data: tuple[str, ...] = ("embedded",)
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and self.minutes > 0):
            raise UserError(f"--minutes must be above 0, not {self.minutes}; 15 are a good beginning")
        if self.minutes > 24 * 60:
            raise UserError(f"--minutes {self.minutes:g} are more than a day; calm train takes recipes of any length")

    def check_text(self) -> None:
        """Before anything is made: files that are too small are told at once."""
        sizes = [source.size for source in open_sources(list(self.data))]
        if None not in sizes and (total := sum(size or 0 for size in sizes)) < LEAST_TEXT:
            raise UserError(
                f"--data holds {total:,} bytes; a quickstart needs at least {LEAST_TEXT:,} of text (about 35,000 words)"
            )

    @property
    def preparation(self) -> PrepareOptions:
        own = self.data != ("embedded",)
        return PrepareOptions(
            "bpe:2048" if own else "bpe:4096",
            validation_share=0.05,
            test_share=0.05,
            document_size=4096 if own else 32_768,  # so that a small text has documents for every split
        )

    def minutes_of(self, stage: str) -> float:
        return self.minutes * SHARES[stage]

    def steps(self, stage: str) -> int:
        return max(FEWEST_STEPS, round(self.minutes_of(stage) * STEPS_A_MINUTE[stage]))

    def run(self, stage: str, output: Path) -> RunConfig:
        """The configuration of a training run."""
        steps, output = self.steps(stage), output.resolve()  # however the directory is called next time
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


def keep_plan(plan: Plan, output: Path) -> None:
    """Write the plan into a new directory, or see that the one there is the same."""
    path = output / PLAN
    wanted: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    if not path.exists():
        if found := sorted(p.name for p in output.iterdir() if not p.name.endswith(TEMPORARY)):
            raise UserError(f"{output} holds files that calm quickstart did not make ({', '.join(found[:3])})")
        plan.check_text()
        write_json(path, wanted)
        return
    try:
        before = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} cannot be read; remove {output}, or name another --output") from error
    if before != wanted:
        different = ", ".join(name for name in wanted if before.get(name) != wanted[name])
        raise UserError(
            f"{output} holds a quickstart with other settings ({different}); continue it with the same ones, remove "
            "it, or name another --output"
        )
