"""`calm reproduce`: train what experiments need, measure it, write tables, figures and a report.

OUTPUT/data             the text, where the scale takes the embedded one
OUTPUT/runs/RECIPE-KEY  a directory of calm train for every run, whichever experiments need it
OUTPUT/results.json     what was measured; what is there is never measured, and its runs never trained, again
OUTPUT/NAME.md, .png    an experiment's table and figure
OUTPUT/report.html      all of them
"""

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from calm import __version__
from calm.config import CONFIG_FILE, load_config, save_config
from calm.data.prepare import prepare
from calm.data.shards import MANIFEST, read_manifest
from calm.distributed import World, process_group
from calm.errors import UserError
from calm.files import claimed
from calm.paper.experiment import Experiment, Row
from calm.paper.measures import Measure, Place, take
from calm.paper.results import Results
from calm.paper.runs import STEPS, Run, digest
from calm.paper.scales import EMBEDDED, Scale
from calm.paper.values import FAILED, Table, fill
from calm.screen import Screen
from calm.train.loop import Diverged, TrainingStopped, train
from calm.train.tracking import METRICS

FULL = {errno.ENOSPC, errno.EDQUOT}
DRAWN = 2  # to be raised when tables, figures or answers are made in another way


class Reproduction:
    """The experiments of one scale in one directory."""

    def __init__(
        self,
        scale: Scale,
        output: Path,
        screen: Screen,
        world: World,
        *,
        data: Path | None = None,
        resume: bool = False,
    ):
        self.scale, self.output, self.screen, self.world, self.resume = scale, output, screen, world, resume
        self.data = data or scale.prepared or output / "data"
        self.prepares = data is None and scale.prepared is None
        self.text = digest(["embedded", asdict(EMBEDDED)]) if self.prepares else _text(self.data)
        name = f"{scale.name}, K = {scale.chunk_size}" if scale.has_other_chunks else scale.name
        self.results = Results(output, name, self.text)
        self._check_version()

    def _check_version(self) -> None:
        """Half of a run by one version and half by another would be a run of none."""
        runs = sorted((self.output / "runs").glob("*"))
        unfinished = [path.name for path in runs if not _is_trained(path)]
        if self.results.begun_by != __version__ and unfinished:
            raise UserError(
                f"{self.output} holds unfinished runs of calm {self.results.begun_by} ({', '.join(unfinished[:3])}), "
                f"and this is {__version__}; remove them from {self.output / 'runs'}, or name another --output"
            )

    def run(self, experiment: Experiment, position: str = "") -> None:
        """Measure what an experiment still wants."""
        while wanted := self.wanted(experiment):
            for number, (measure, label) in enumerate(wanted, start=1):
                self.screen.stage(number, len(wanted), f"{position}{experiment.name}", f"{label}: {measure.kind}")
                self._measure(measure)

    def wanted(self, experiment: Experiment) -> list[tuple[Measure, str]]:
        """What is not measured yet, each once, and the row that it is for."""
        every = [(measure, row.label) for row in self.rows(experiment) for measure in self._measures([row])]
        every += [(measure, "another seed") for measure in self._repeats(experiment)]
        wanted = {measure.key(self.text): (measure, label) for measure, label in every}
        return [pair for pair in wanted.values() if self.results.find(pair[0]) is None]

    def digest(self, experiment: Experiment) -> str:
        """Of everything that its numbers follow from."""
        return digest([__version__, DRAWN, [measure.key(self.text) for measure in self._every(experiment)]])

    def table(self, experiment: Experiment) -> Table:
        """Of an experiment that was measured."""
        rows = self.rows(experiment)
        repeats = self._repeats(experiment)
        found = {row.label: [self._answers(self._known_seeds(each, repeats)) for each in row.measures] for row in rows}
        return fill(experiment, rows, found, self._answers(repeats))

    def _known_seeds(self, measure: Measure, repeats: list[Measure]) -> list[Measure]:
        """Those of the scale; of the base model, which has more, all."""
        keys = [each.key(self.text) for each in repeats]
        return repeats if measure.key(self.text) in keys else self._seeded(measure)

    def _answers(self, measures: list[Measure]) -> list[dict[str, Any]]:
        return [self.results.measures[measure.key(self.text)]["answer"] for measure in measures]

    def rows(self, experiment: Experiment) -> list[Row]:
        return experiment.rows(self.scale, self.results.find)

    def commands(self, experiment: Experiment) -> list[str]:
        """What it trains, as commands."""
        runs = [run for measure in self._every(experiment) for run in measure.runs]
        return [self.command(run) for run in dict.fromkeys(runs)]

    def command(self, run: Run) -> str:
        settings = " ".join(f"--set {quote(item)}" for item in run.overrides(self.data, self._autoencoder(run)))
        return f"calm train {run.recipe} --output {quote(str(self.directory(run)))} {settings}"

    def directory(self, run: Run) -> Path:
        return self.output / "runs" / f"{run.recipe}-{run.key(self.text)}"

    def _autoencoder(self, run: Run) -> Path | None:
        return self.directory(run.autoencoder) / "model" if run.autoencoder is not None else None

    def _seeded(self, measure: Measure) -> list[Measure]:
        return [measure.of(seed) for seed in self.scale.seeds] if measure.is_seeded else [measure]

    def _measures(self, rows: list[Row]) -> list[Measure]:
        return [seeded for row in rows for measure in row.measures for seeded in self._seeded(measure)]

    def _repeats(self, experiment: Experiment) -> list[Measure]:
        return [experiment.repeat(self.scale, seed) for seed in self.scale.repeats] if experiment.repeat else []

    def _every(self, experiment: Experiment) -> list[Measure]:
        return self._measures(self.rows(experiment)) + self._repeats(experiment)

    def _measure(self, measure: Measure) -> None:
        self._prepare()
        began = time.perf_counter()
        try:
            for run in measure.runs:
                self._train(run)
            began = time.perf_counter()
            answer = self._take(measure)
        except Diverged as error:  # a result, too
            self.screen.warn(str(error))
            answer = {FAILED: str(error).splitlines()[0]}
        self.results.keep(measure, answer, time.perf_counter() - began)
        if self.world.is_main:
            self.results.write()

    def _take(self, measure: Measure) -> dict[str, Any]:
        config = measure.run.config(self.data, self._autoencoder(measure.run))
        with self.screen.evaluation() as tell:
            place = Place(config, self.directory(measure.run) / "model", self.data, self.world, tell)
            return self.world.broadcast(take(measure, place))

    def _prepare(self) -> None:
        if (self.data / MANIFEST).exists():
            return
        if not self.prepares:
            how = f"; make it with: {self.scale.preparation}" if self.scale.preparation else ""
            raise UserError(f"{self.data} holds no prepared text{how}")
        if self.world.is_main:
            with self.screen.preparation() as tell:
                prepare(["embedded"], self.data, EMBEDDED, resume=True, report=tell, warn=self.screen.warn)
        self.world.broadcast(None)  # the others wait

    def _train(self, run: Run) -> None:
        directory = self.directory(run)
        if _is_trained(directory):
            return
        if directory.exists() and not self.resume:
            raise UserError(f"{directory} holds an unfinished run; --resume goes on with it")
        config = run.config(self.data, self._autoencoder(run))
        if self.world.is_main and run.can_go_on and not directory.exists():
            self._take_over(run, directory)
        self.world.broadcast(None)
        try:
            with self.screen.training(config.train.steps) as tell:
                train(config, directory, resume=True, report=tell, warn=self.screen.warn)
        except TrainingStopped as stopped:
            raise TrainingStopped("stopped; the same command with --resume goes on", stopped.signum) from stopped
        self.world.broadcast(None)  # until the model is written

    def _take_over(self, run: Run, directory: Path) -> None:
        """Begin with the last checkpoint of the longest run that this one is a continuation of, if there is one."""
        shorter = {}
        for path in (self.output / "runs").glob(f"{run.recipe}-*"):
            if _is_trained(path):
                steps = load_config(str(path / CONFIG_FILE)).train.steps
                if steps < run.steps and self.directory(run.but({STEPS: steps})) == path:
                    shorter[steps] = path
        if not shorter:
            return
        source, aside = shorter[max(shorter)], directory.with_name(directory.name + ".writing")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        shutil.copytree(source / "checkpoints", aside / "checkpoints")
        shutil.copy(source / METRICS, aside / METRICS)
        save_config(load_config(str(source / CONFIG_FILE)), aside)
        aside.rename(directory)


def _text(data: Path) -> str:
    """What a prepared directory holds; of one that is not there, that it is not."""
    if not (data / MANIFEST).exists():
        return "missing"
    manifest = read_manifest(data)
    return digest([manifest["tokenizer_sha256"], manifest["splits"]])


def _is_trained(directory: Path) -> bool:
    return (directory / "model" / "config.json").exists()


@contextmanager
def reproduction(
    scale: Scale, output: Path, screen: Screen, *, data: Path | None = None, resume: bool = False
) -> Iterator[Reproduction]:
    """A directory of experiments, kept to one process (or to those of one torchrun)."""
    with process_group() as world, claimed(output, "calm reproduce") if world.is_main else nullcontext():
        try:
            yield Reproduction(scale, output, screen, world, data=data, resume=resume)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise UserError(f"no space is left for {output}; make some, and go on with --resume") from error


def as_json(table: Table) -> dict[str, Any]:
    """The numbers of an experiment and what they answer."""
    return {
        "rows": [
            {
                "label": line.row.label,
                "series": line.row.series or None,
                "x": line.row.x,
                "values": {
                    name: {**value._asdict(), "by_seed": list(value.by_seed)} for name, value in line.values.items()
                },
                "failed": line.failed,
                "paper": line.row.paper,
            }
            for line in table.lines.values()
        ],
        "verdicts": [verdict._asdict() for verdict in table.experiment.claims(table)],
    }
