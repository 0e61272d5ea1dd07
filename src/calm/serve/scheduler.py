"""Continuous batching: one thread lets the texts of all requests grow together.

    submit ─► waiting ─► join between steps ─► a step, a chunk of every text ─► events to whoever listens
                                  ▲                        │
                                  └── places of texts that ended, were given up, or took too long

Texts never wait for a listener: their events lie in queues that are as long as the texts may become.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from calm.sampling.batch import Text
from calm.sampling.predictor import check_room
from calm.sampling.text import GrowingText, Writer
from calm.serve.limits import Limits, shutting_down, too_busy
from calm.serve.metrics import Metrics

READ_AT_ONCE = 4096  # tokens of prompts that join in one step: others should not wait long

Finish = Literal["stop", "length", "timeout", "cancelled", "error"]


class Event(NamedTuple):
    """What a step brought to a text; with `finish` the last one."""

    text: str
    ids: list[int]
    agreement: float | None = None
    finish: Finish | None = None


@dataclass(eq=False)
class Job:
    """A text on its way through the server."""

    text: Text
    growing: GrowingText
    deadline: float  # on time.monotonic's clock
    events: "asyncio.Queue[tuple[Job, Event]]"  # which the texts of a request share
    submitted: float = field(default_factory=time.monotonic)
    given_up: bool = False


class Scheduler:
    """Of one model. `submit` and `give_up` are for the event loop's thread; everything else happens in its own."""

    def __init__(self, name: str, writer: Writer, limits: Limits, metrics: Metrics):
        self.name, self.writer, self.limits, self.metrics = name, writer, limits, metrics
        self.batch = writer.batch()
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # by the id of their text
        self.draining = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name=f"calm-{name}", daemon=True)
        metrics.watch(name, lambda: len(self.running), lambda: len(self.waiting))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Its thread ends by itself only once everything is done."""
        return self.thread.is_alive() or (self.draining and self.idle)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def check(self, text: Text) -> None:
        """Refuse what the model cannot do, before it waits in line."""
        text.sampling = self.writer.predictor.resolve(text.sampling)
        check_room(self.writer.predictor, text.prompt, text.max_new_tokens)

    def submit(self, jobs: list[Job]) -> None:
        """All texts of a request, or none."""
        with self.changed:
            if self.draining:
                raise shutting_down()
            free = self.limits.max_batch - len(self.running)
            if len(self.waiting) + len(jobs) > self.limits.max_queue + max(0, free):
                self.metrics.refused.labels(self.name).inc(len(jobs))
                raise too_busy(f"{len(self.waiting)} texts wait already, and at most {self.limits.max_queue} may")
            self.waiting.extend(jobs)
            self.changed.notify()

    def give_up(self, jobs: Iterable[Job]) -> None:
        """Nobody listens any more: places are free at the next step."""
        for job in jobs:
            job.given_up = True

    def drain(self) -> None:
        """Finish what was taken on, and end."""
        with self.changed:
            self.draining = True
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                while self.idle and not self.draining:
                    self.changed.wait()
                if self.idle:
                    return
                told = self._let_go()
                self._let_in()
            if self.running:
                told += self._step()
            self._tell(told)

    def _let_go(self) -> list[tuple[Job, Event]]:
        """Texts that nobody waits for, or for too long, end where they are."""
        now, told, kept = time.monotonic(), [], deque()
        for job in self.waiting:
            if job.given_up or now > job.deadline:
                told.append((job, Event("", [], finish="cancelled" if job.given_up else "timeout")))
            else:
                kept.append(job)
        self.waiting = kept
        for job in [job for job in self.running.values() if job.given_up or now > job.deadline]:
            finish: Finish = "cancelled" if job.given_up else "timeout"
            told.append((job, Event(job.growing.finish(), [], finish=finish)))
            self._end(job)
        return told

    def _let_in(self) -> None:
        tokens = 0
        while self.waiting and len(self.running) < self.limits.max_batch:
            tokens += len(self.waiting[0].text.prompt)
            if tokens > READ_AT_ONCE and self.batch.joining:
                break
            job = self.waiting.popleft()
            self.batch.join([job.text])
            self.running[id(job.text)] = job

    def _step(self) -> list[tuple[Job, Event]]:
        began = time.monotonic()
        try:
            grown = self.batch.step()
        except Exception as error:  # a broken model or no memory: those that run are lost, the server is not
            lost, self.running, self.batch = self.running, {}, self.writer.batch()
            reason = str(error) or repr(error)
            return [(job, Event(reason, [], finish="error")) for job in lost.values()]
        now = time.monotonic()
        told = []
        for text, ids, agreement in grown:
            job = self.running[id(text)]
            if len(text.new) == len(ids):
                self.metrics.first_chunk.labels(self.name).observe(now - job.submitted)
            shown = job.growing.push(ids)
            finish: Finish | None = None
            if text.met_end or job.growing.stopped:
                finish = "stop"
            elif text.ended:
                finish = "length"
            if finish is not None:
                shown += job.growing.finish()
                self._end(job)
            told.append((job, Event(shown, ids, agreement, finish)))
        self.metrics.step(self.name, now - began, len(grown), sum(len(step.ids) for step in grown))
        return told

    def _end(self, job: Job) -> None:
        self.batch.leave([job.text])
        del self.running[id(job.text)]

    def _tell(self, told: list[tuple[Job, Event]]) -> None:
        """One call a step for all listeners: each wakes the event loop."""

        def deliver() -> None:
            for job, event in told:
                job.events.put_nowait((job, event))

        if told and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(deliver)
