"""`calm reproduce`: train the models of the experiments, measure them, and write tables, figures and a report.

OUTPUT/data             prepared data, for scales that use the embedded text
OUTPUT/runs/RECIPE-KEY  output of calm train for each run, shared by all experiments that need it
OUTPUT/results.json     measured results; these are never measured, and their runs never trained, again
OUTPUT/NAME.md, .png    table and figure of an experiment
OUTPUT/report.html      report of all experiments
"""

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

from calm import __version__
from calm.config import CONFIG_FILE, load_config, save_config
from calm.data.prepare import prepare
from calm.data.shards import MANIFEST, read_manifest
from calm.distributed import World, process_group
from calm.errors import UserError
from calm.files import locked_directory
from calm.paper.experiment import FAILED, Experiment, Row, Table, build_table
from calm.paper.measures import Inputs, Measure, evaluate
from calm.paper.results import Results
from calm.paper.scales import EMBEDDED, EMBEDDED_DIGEST, STEPS, Run, Scale, digest
from calm.screen import Screen
from calm.train.loop import Diverged, TrainingStopped, train
from calm.train.tracking import METRICS

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
OUTPUT_VERSION = 3  # increase when tables, figures or verdicts change, so that existing ones are written again


class Reproduction:
    """All experiments of one scale, in one output directory."""

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
        self.data_digest = EMBEDDED_DIGEST if self.prepares else _data_digest(self.data)
        name = f"{scale.name}, K = {scale.chunk_size}" if scale.has_custom_chunk_size else scale.name
        self.results = Results(output, name, self.data_digest)
        self._check_version()

    def _check_version(self) -> None:
        """Raise UserError if runs were started by another version: resuming them would mix two versions in one run."""
        runs = sorted((self.output / "runs").glob("*"))
        unfinished = [path.name for path in runs if not _is_trained(path)]
        if self.results.created_by != __version__ and unfinished:
            raise UserError(
                f"{self.output} contains unfinished runs of calm {self.results.created_by} "
                f"({', '.join(unfinished[:3])}), but this is version {__version__}; remove them from "
                f"{self.output / 'runs'} or choose another --output"
            )

    def run(self, experiment: Experiment, position: str = "") -> None:
        """Train and measure everything that is pending for an experiment."""
        while pending := self.pending(experiment):
            for number, (measure, label) in enumerate(pending, start=1):
                self.screen.stage(number, len(pending), f"{position}{experiment.name}", f"{label}: {measure.kind}")
                self._measure(measure)

    def pending(self, experiment: Experiment) -> list[tuple[Measure, str]]:
        """Measures without a stored result, without duplicates, and the label of the row that needs each."""
        unique = {measure.key(self.data_digest): (measure, label) for measure, label in self._measures(experiment)}
        return [pair for pair in unique.values() if self.results.find(pair[0]) is None]

    def digest(self, experiment: Experiment) -> str:
        """Hash of everything that determines the output of an experiment."""
        keys = [measure.key(self.data_digest) for measure, _ in self._measures(experiment)]
        return digest([__version__, OUTPUT_VERSION, keys])

    def table(self, experiment: Experiment) -> Table:
        """The table of an experiment without pending measures."""
        rows, repeats = self.rows(experiment), self._repeats(experiment)
        base_keys = {measure.key(self.data_digest) for measure in repeats}

        def stored(measures: list[Measure]) -> list[dict[str, Any]]:
            return [self.results.measures[measure.key(self.data_digest)]["answer"] for measure in measures]

        def of_all_seeds(measure: Measure) -> list[dict[str, Any]]:
            """Results with each seed of the scale or, for the base model, with all of its seeds."""
            return stored(repeats if measure.key(self.data_digest) in base_keys else self._seeded(measure))

        results = {row.label: [of_all_seeds(measure) for measure in row.measures] for row in rows}
        return build_table(experiment, rows, results, stored(repeats))

    def rows(self, experiment: Experiment) -> list[Row]:
        return experiment.rows(self.scale, self.results.find)

    def commands(self, experiment: Experiment) -> list[str]:
        """The `calm train` commands of an experiment."""
        runs = [run for measure, _ in self._measures(experiment) for run in measure.runs]
        return [self._command(run) for run in dict.fromkeys(runs)]

    def _command(self, run: Run) -> str:
        settings = " ".join(f"--set {quote(item)}" for item in run.overrides(self.data, self._autoencoder(run)))
        return f"calm train {run.recipe} --output {quote(str(self.directory(run)))} {settings}"

    def directory(self, run: Run) -> Path:
        return self.output / "runs" / f"{run.recipe}-{run.key(self.data_digest)}"

    def _autoencoder(self, run: Run) -> Path | None:
        return self.directory(run.autoencoder) / "model" if run.autoencoder is not None else None

    def _measures(self, experiment: Experiment) -> list[tuple[Measure, str]]:
        """All measures of an experiment, and the label of the row that needs each."""
        required = [(measure, row.label) for row in self.rows(experiment) for measure in row.measures]
        measures = [(seeded, label) for measure, label in required for seeded in self._seeded(measure)]
        return measures + [(measure, "another seed") for measure in self._repeats(experiment)]

    def _seeded(self, measure: Measure) -> list[Measure]:
        return [measure.with_seed(seed) for seed in self.scale.seeds] if measure.is_seeded else [measure]

    def _repeats(self, experiment: Experiment) -> list[Measure]:
        return [experiment.repeat(self.scale, seed) for seed in self.scale.repeats] if experiment.repeat else []

    def _measure(self, measure: Measure) -> None:
        self._prepare()
        start = time.perf_counter()
        try:
            for run in measure.runs:
                self._train(run)
            start = time.perf_counter()
            config = measure.run.config(self.data, self._autoencoder(measure.run))
            with self.screen.evaluation() as report:
                inputs = Inputs(config, self.directory(measure.run) / "model", self.data, self.world, report)
                result = self.world.broadcast(evaluate(measure, inputs))
        except Diverged as error:  # divergence is a result of its own
            self.screen.warn(str(error))
            result = {FAILED: str(error).splitlines()[0]}
        self.results.add(measure, result, time.perf_counter() - start)
        if self.world.is_main:
            self.results.write()

    def _prepare(self) -> None:
        if (self.data / MANIFEST).exists():
            return
        if not self.prepares:
            remedy = f"; create it with: {self.scale.preparation}" if self.scale.preparation else ""
            raise UserError(f"{self.data} contains no prepared data{remedy}")
        if self.world.is_main:
            with self.screen.preparation() as report:
                prepare(["embedded"], self.data, EMBEDDED, resume=True, report=report, warn=self.screen.warn)
        self.world.broadcast(None)  # barrier: the other processes wait for the data

    def _train(self, run: Run) -> None:
        directory = self.directory(run)
        if _is_trained(directory):
            return
        if directory.exists() and not self.resume:
            raise UserError(f"{directory} contains an unfinished run; continue it with --resume")
        config = run.config(self.data, self._autoencoder(run))
        if self.world.is_main and run.is_extendable and not directory.exists():
            self._start_from_shorter_run(run, directory)
        self.world.broadcast(None)
        try:
            with self.screen.training(config.train.steps) as report:
                train(config, directory, resume=True, report=report, warn=self.screen.warn)
        except TrainingStopped as stopped:
            raise TrainingStopped("stopped; repeat the command with --resume to continue", stopped.signum) from stopped
        self.world.broadcast(None)  # barrier: wait until the model is saved

    def _start_from_shorter_run(self, run: Run, directory: Path) -> None:
        """Copy the checkpoints of the longest finished run that this run extends, if there is one."""
        shorter = {}
        for path in (self.output / "runs").glob(f"{run.recipe}-*"):
            if _is_trained(path):
                steps = load_config(str(path / CONFIG_FILE)).train.steps
                if steps < run.steps and self.directory(run.with_settings({STEPS: steps})) == path:
                    shorter[steps] = path
        if not shorter:
            return
        source, temporary = shorter[max(shorter)], directory.with_name(directory.name + ".writing")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        shutil.copytree(source / "checkpoints", temporary / "checkpoints")
        shutil.copy(source / METRICS, temporary / METRICS)
        save_config(load_config(str(source / CONFIG_FILE)), temporary)
        temporary.rename(directory)


def _data_digest(data: Path) -> str:
    """Hash of the contents of a prepared data directory, or "missing"."""
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
    """Open an output directory with an exclusive lock, held by this process (or by one torchrun job)."""
    with process_group() as world, locked_directory(output, "calm reproduce") if world.is_main else nullcontext():
        try:
            yield Reproduction(scale, output, screen, world, data=data, resume=resume)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise UserError(
                f"no space left on the device of {output}; free some space and continue with --resume"
            ) from error
