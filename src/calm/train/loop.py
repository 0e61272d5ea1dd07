"""The training loop: one for every stage, for one process or many, resumable at any step.

    batch of step s → micro-batches → forward, backward → clip → AdamW → now and then: log, evaluate, checkpoint

Between logging steps the CPU never waits for a GPU: metrics stay on the device, and a step whose loss or gradient is
not finite is skipped there.

Step s depends only on (seed, s) and the parameters, so a resumed run is identical to one that was not interrupted.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils import clip_grad_norm_

from calm import __version__
from calm.checkpoint import save_model
from calm.config import CONFIG_FILE, RunConfig, load_config, save_config
from calm.distributed import World, process_group
from calm.errors import ConfigError, UserError
from calm.files import TEMPORARY, locked_directory, write_json
from calm.seeds import SeedStream, torch_seed
from calm.train.checkpoint import Checkpoints, checkpoint_paths, load, older_version, state_of, step_of, versions
from calm.train.distributed import shard
from calm.train.optimizer import adamw, learning_rate
from calm.train.speed import Speed, measured_peak
from calm.train.stages import STAGES
from calm.train.tracking import Tracker, plot_losses

CHECKPOINTS = "checkpoints"
MAX_SKIPPED = 10  # consecutive steps without a finite loss and gradient before a run gives up
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TrainingStopped(UserError):
    """A signal stopped the run; a checkpoint was saved."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum, self.exit_code = signum, 128 + signum


class Diverged(UserError):
    """The loss or its gradient was not finite for several steps."""


@dataclass(frozen=True)
class Report:
    """Content of a progress line."""

    step: int
    steps: int
    metrics: dict[str, float]


def train(
    config: RunConfig,
    output: Path | str,
    *,
    resume: bool = False,
    report: Callable[[Report], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train the model that `config` describes in the directory `output`; returns a summary."""
    output = Path(output)
    with process_group() as world, locked_directory(output, "calm train") if world.is_main else nullcontext():
        if problem := world.broadcast(_conflict(config, output, resume) if world.is_main else None):
            raise ConfigError(problem)
        if not world.is_main:
            report = warn = _silent
        return _Run(config, output, world, report, warn).run()


def _silent(_: Any) -> None:
    """Only the main process reports and warns."""


def _conflict(config: RunConfig, output: Path, resume: bool) -> str | None:
    """Why this run cannot use the directory, or None."""
    entries = sorted(path.name for path in output.iterdir() if not path.name.endswith(TEMPORARY))
    if entries and CONFIG_FILE not in entries:
        return f"{output} holds files that calm train did not make ({', '.join(entries[:3])}); choose another directory"
    if entries and not resume:
        return f"{output} holds a run; continue it with --resume, or choose another directory"
    if entries and (version := older_version(output / CHECKPOINTS)) is not None:
        return (
            f"{output} was written by calm {version}, and calm {__version__} cannot resume it; finish it with that "
            "version, or start again in another directory"
        )
    if entries:
        before = load_config(str(output / CONFIG_FILE))
        different = [name for name in RunConfig.model_fields if getattr(before, name) != getattr(config, name)]
        if other := [name for name in different if name != "train"]:
            return f"{output} holds another run: it differs in {', '.join(other)}; only train.* may change on --resume"
        done = max(map(step_of, checkpoint_paths(output / CHECKPOINTS)), default=0)
        if done > config.train.steps:
            return (
                f"{output} has done {done} steps, but train.steps is {config.train.steps}; set it to at least {done}, "
                "or choose another directory"
            )
    return None


class _Run:
    def __init__(self, config: RunConfig, output: Path, world: World, report, warn):
        self.config, self.output, self.world, self.report, self.warn = config, output, world, report, warn
        self.stopped_by: int | None = None
        self.metrics: dict[str, float] = {}  # of the last logged step
        self.measures: dict[str, float] = {}  # of the last evaluation

    def build(self) -> None:
        """Make the model, compiled and sharded as configured, and its optimizer."""
        settings, optimizer = self.config.train, self.config.optimizer
        torch.manual_seed(self.config.seed)
        self.stage = STAGES[self.config.stage](self.config, self.world)
        self._check_memory()
        self.model: Any = self.stage.model
        if settings.gradient_checkpointing:
            self._checkpoint_gradients()
        if settings.compile:
            self._compile()
        shard(self.model, self.world, settings.shard_size, settings.precision)
        self.stage.initialize()
        optimize_for_cpu(self.model)
        self.model.train()
        self.optimizer = adamw(self.model, optimizer.betas, optimizer.eps, optimizer.weight_decay)
        self.skipped = torch.zeros(2, dtype=torch.long, device=self.world.device)  # steps in all, and in a row
        self.warned = 0  # of how many of them

    def run(self) -> dict[str, Any]:
        settings = self.config.train
        self.build()
        if self.world.is_main:  # from here on the directory belongs to this run
            save_config(self.config, self.output)
        record = {"config": self.config.model_dump(mode="json"), "random": {"seed": self.config.seed}}
        self.checkpoints = Checkpoints(
            self.output / CHECKPOINTS, settings.keep_checkpoints, self.world, record, self.warn
        )
        start = self._resume()
        self.tracker = Tracker(
            self.output,
            is_main=self.world.is_main,
            step=start,
            tensorboard=settings.tensorboard,
            wandb=settings.wandb,
            config=record["config"],
            warn=self.warn,
        )
        try:
            with _signals(self._stop):
                self._steps(start)
            return self._finish()
        finally:
            self.checkpoints.close()
            self.tracker.close()

    def _stop(self, signum: int) -> None:
        self.stopped_by = signum

    def _resume(self) -> int:
        newest = self.checkpoints.newest()
        if newest is None:
            return 0
        path, record = newest
        self.skipped = torch.tensor(record["skipped"], device=self.world.device)
        self.warned = record["skipped"][0]
        load(path, state_of(self.model, self.optimizer), self.world)
        return record["step"]

    def _steps(self, start: int) -> None:
        settings = self.config.train
        dtype = DTYPES[settings.precision]
        peak = measured_peak(self.world.device, dtype, optimize_for_cpu)
        speed = Speed(self.stage.tokens_per_step, self.world, dtype, peak)
        if start < settings.steps:
            speed.count_flops(self.model, self.stage.micro_batches(self.stage.read(start)), self._autocast())
        with ThreadPoolExecutor(1) as ahead:  # the next batch is read during this step
            batch = ahead.submit(self.stage.read, start)
            for step in range(start, settings.steps):
                parts = self.stage.micro_batches(batch.result())
                batch = ahead.submit(self.stage.read, step + 1)
                self._after(step + 1, self._step(step, parts), speed)

    def _after(self, done: int, metrics: dict[str, Tensor], speed: Speed) -> None:
        """Log, evaluate, save, and stop, if it is time for it."""
        settings, last = self.config.train, done == self.config.train.steps
        saving, logging = done % settings.checkpoint_every == 0 or last, done % settings.log_every == 0 or last
        if logging:
            self.metrics = {**self._read(done, metrics), **speed.since_last(done)}
            self.tracker.log(done, self.metrics)
        score = None
        if done % settings.evaluate_every == 0 or saving:  # every checkpoint has a score, so that the best is known
            with speed.paused(), self._autocast():
                self.measures = self.stage.evaluate()
            self.tracker.log(done, self.measures)
            score = self.measures["score"]
        self.report(Report(done, settings.steps, {**self.metrics, **self.measures}))
        agree = logging or saving or self.world.size == 1  # several processes stop at the same step
        stopped = agree and self.world.any(self.stopped_by is not None)
        if saving or stopped:
            state, skipped = state_of(self.model, self.optimizer), self.skipped.tolist()
            self.checkpoints.save(done, state, score=score, skipped=skipped)
        if stopped and not last:
            self._leave(done)

    def _step(self, step: int, parts: list[dict[str, Any]]) -> dict[str, Tensor]:
        """One optimizer step on the global batch; returns metrics, on the device."""
        settings = self.config.optimizer
        torch.manual_seed(torch_seed(self.config.seed, SeedStream.LIBRARIES, step))  # for dropout inside libraries
        sums: dict[str, Any] = {}
        for number, part in enumerate(parts):
            if self.world.size > 1:
                self.model.set_requires_gradient_sync(number == len(parts) - 1)  # pyright: ignore
            with self._autocast():
                output = self.model(**part)
            # FSDP averages gradients over processes, but the loss is already divided by the global count.
            (output["loss"] * self.world.size).backward()
            for name, value in output.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float()
        metrics = dict(zip(sums, self.world.all_reduce(torch.stack(list(sums.values()))).unbind(), strict=True))
        norm: Any = clip_grad_norm_(self.model.parameters(), settings.gradient_clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded under FSDP
        skip = ~(metrics["loss"].isfinite() & norm.isfinite())
        self.skipped = torch.stack([self.skipped[0] + skip, (self.skipped[1] + 1) * skip])
        self.optimizer.found_inf = skip.float()  # pyright: ignore  # the fused AdamW then changes nothing
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**metrics, "gradient_norm": norm}

    def _learning_rate(self, step: int) -> float:
        settings = self.config.optimizer
        return learning_rate(
            step, self.config.train.steps, settings.learning_rate, settings.warmup_steps, settings.schedule
        )

    def _read(self, done: int, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Metrics of a step, on the CPU. Warns of skipped steps, and gives up after too many in a row."""
        *values, skipped, in_a_row = torch.stack([*metrics.values(), *self.skipped]).tolist()
        read = dict(zip(metrics, values, strict=True))
        if skipped > self.warned:
            number = f"{skipped - self.warned:.0f} of the last {self.config.train.log_every} steps"
            self.warn(
                f"{number} skipped, up to step {done}: the loss or the gradient was not finite (now the loss is "
                f"{read['loss']}, the gradient norm {read['gradient_norm']})"
            )
            self.warned = skipped
        if in_a_row >= MAX_SKIPPED:
            raise Diverged(
                f"{in_a_row:.0f} steps in a row, up to step {done}, had a loss or gradient that is not finite; the "
                f"checkpoints in {self.output / CHECKPOINTS} are from before. A lower optimizer.learning_rate, a "
                "longer warm-up or train.precision=fp32 usually helps"
            )
        return {**read, "learning_rate": self._learning_rate(done - 1), "skipped_steps": int(skipped)}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")

    def _leave(self, step: int) -> None:
        saved = self.checkpoints.wait()
        state = f"saved at step {step}; --resume continues" if saved else "the last step could not be saved"
        assert self.stopped_by is not None or self.world.size > 1
        raise TrainingStopped(f"stopped: {state}", self.stopped_by or signal.SIGTERM)

    def _finish(self) -> dict[str, Any]:
        """Write the model, the record of the run, and its plot; returns the summary."""
        steps = self.config.train.steps
        if not self.checkpoints.wait():
            raise UserError("the last checkpoint could not be written; free disk space and run again with --resume")
        if not self.measures:
            with self._autocast():
                self.measures = self.stage.evaluate()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Any = get_model_state_dict(self.model, options=options)
        summary = {
            "steps": steps,
            "tokens": steps * self.stage.tokens_per_step,
            "skipped_steps": int(self.skipped[0]),
            **self.measures,
        }
        if self.world.is_main:
            model, unfinished = self.output / "model", self.output / "model.writing"
            _remove(unfinished)
            save_model(self.stage.model, unfinished, weights)
            self.stage.save_extras(unfinished)
            date = datetime.now(UTC).isoformat(timespec="seconds")
            run = {
                "summary": summary,
                "date": date,
                "versions": versions(),
                "config": self.config.model_dump(mode="json"),
            }
            write_json(unfinished / "run.json", run)  # a copied model keeps its provenance
            _remove(model)
            unfinished.rename(model)
            write_json(self.output / "run.json", run)
            plot_losses(self.output)
        return summary

    def _compile(self) -> None:
        """Compile layer by layer, since a whole model has graph breaks: at each row's random generator, for one."""
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # what torch looks for
        if self.world.device.type == "cpu" and not shutil.which(compiler):
            self.warn("no C++ compiler found; continuing without train.compile")
            return
        for module in self.model.compile_units():
            module.compile()

    def _checkpoint_gradients(self) -> None:
        if not hasattr(self.model, "backbone"):
            raise ConfigError(f"train.gradient_checkpointing: the {self.config.stage} has no backbone to checkpoint")
        self.model.backbone.gradient_checkpointing = True

    def _check_memory(self) -> None:
        needed, free = self.stage.estimated_memory(), _free_memory(self.world.device)
        if free is not None and needed > free:
            self.warn(
                f"about {needed / 1e9:.1f} GB will be needed and {free / 1e9:.1f} GB are free; a larger "
                "train.accumulation or a smaller data.batch_size needs less"
            )


def _remove(path: Path) -> None:
    """Delete a directory, or a link to one but not its target, if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def optimize_for_cpu(model: Any) -> None:
    """Apply the CPU backend's training optimizations, if it is installed."""
    try:
        from calm import cpu
    except ImportError:
        return
    cpu.optimize(model, training=True)


def _free_memory(device: torch.device) -> float | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    (line,) = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")]
    return int(line.split()[1]) * 1024


@contextmanager
def _signals(stop: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C stop the run after the current step; a second signal stops it at once."""

    def handle(signum: int, _frame: Any) -> None:
        stop(signum)
        signal.signal(signum, before[signum])

    before: dict[int, Any] = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
