"""Continuous batching: one thread per model decodes the sequences of all requests in one batch.

    add ─► waiting queue ─► running batch ─► decoding step, one chunk per sequence ─► output queues
                                 ▲                         │
                                 └── slots of finished, aborted and expired sequences

Sequences are added and removed between steps, and slots are shared among requests. A slow client never blocks the
batch: its outputs are queued, and max_new_tokens bounds the queue.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from calm.generate.engine import Sequence, TokenLogProb
from calm.generate.text import Detokenizer, TextGenerator
from calm.serve.limits import Limits, queue_full, shutting_down
from calm.serve.metrics import Metrics

MAX_PREFILL_TOKENS = 4096  # prompt tokens per step: a long prefill delays all running sequences

FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


class SequenceOutput(NamedTuple):
    """Output of one step for one sequence. The last output has a `finish_reason`, and `log_probs` if requested."""

    text: str
    token_ids: list[int]
    agreement: float | None = None
    finish_reason: FinishReason | None = None
    log_probs: list[TokenLogProb | None] | None = None  # of the prompt and all output


@dataclass(eq=False)
class SequenceState:
    """A waiting or running sequence."""

    sequence: Sequence
    detokenizer: Detokenizer
    deadline: float  # time.monotonic()
    outputs: "asyncio.Queue[tuple[SequenceState, SequenceOutput]]"  # shared by all sequences of a request
    num_log_probs: int | None = None  # number of most probable tokens per position; None: not requested
    prompt_only: bool = False  # nothing is added to the prompt
    arrival_time: float = field(default_factory=time.monotonic)
    aborted: bool = False


Outputs = list[tuple[SequenceState, SequenceOutput]]


class Scheduler:
    """Schedules the sequences of one model.

    Call `add` and `abort` from the thread of the event loop. Decoding runs in the scheduler's own thread.
    """

    def __init__(self, name: str, generator: TextGenerator, limits: Limits, metrics: Metrics):
        self.name, self.generator, self.limits, self.metrics = name, generator, limits, metrics
        self.engine = generator.engine()
        self.waiting: deque[SequenceState] = deque()
        self.running: dict[int, SequenceState] = {}  # by id() of the sequence
        self.unscored: deque[tuple[SequenceState, SequenceOutput]] = deque()  # last outputs without log-probabilities
        self.draining = False
        self.condition = threading.Condition()
        self.thread = threading.Thread(target=self._run, name=f"calm-{name}", daemon=True)
        metrics.running.labels(name).set_function(lambda: len(self.running))
        metrics.waiting.labels(name).set_function(lambda: len(self.waiting))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread.start()

    @property
    def alive(self) -> bool:
        """False if the thread has ended before the scheduler was drained."""
        return self.thread.is_alive() or (self.draining and self.idle)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.unscored)

    def add(self, states: list[SequenceState]) -> None:
        """Append all sequences of a request to the waiting queue, or raise ApiError and append none."""
        with self.condition:
            if self.draining:
                raise shutting_down()
            free_slots = self.limits.max_batch - len(self.running)
            if len(self.waiting) + len(states) > self.limits.max_queue + max(0, free_slots):
                self.metrics.rejected.labels(self.name).inc(len(states))
                waiting, limit = len(self.waiting), self.limits.max_queue
                raise queue_full(f"the queue is full ({waiting} sequences are waiting, limit {limit}); retry later")
            self.waiting.extend(states)
            self.condition.notify()

    def abort(self, states: Iterable[SequenceState]) -> None:
        """Abort sequences. They are removed before the next step."""
        for state in states:
            state.aborted = True

    def drain(self) -> None:
        """Accept no new sequences, finish the waiting and running ones, then end the thread."""
        with self.condition:
            self.draining = True
            self.condition.notify()

    def _run(self) -> None:
        while True:
            with self.condition:
                while self.idle and not self.draining:
                    self.condition.wait()
                if self.idle:
                    return
                outputs = self._remove_aborted_and_expired()
                self._schedule_waiting()
            if self.running:
                outputs += self._step()
            if self.unscored:  # one per step: like a long prefill, it delays all running sequences
                outputs.append(self._score(*self.unscored.popleft()))
            self._publish(outputs)

    def _remove_aborted_and_expired(self) -> Outputs:
        now, outputs = time.monotonic(), []
        for state in [*self.waiting, *self.running.values()]:
            if state.aborted or now > state.deadline:
                reason: FinishReason = "cancelled" if state.aborted else "timeout"
                outputs.append((state, SequenceOutput(state.detokenizer.finish(), [], finish_reason=reason)))
                if id(state.sequence) in self.running:
                    self._remove(state)
                else:
                    self.waiting.remove(state)
        return outputs

    def _schedule_waiting(self) -> None:
        """Move sequences from the waiting queue to the batch while there are free slots, shared among the requests.

        The request with the fewest running sequences comes first, then the oldest. A quarter of the slots is kept for
        requests that have none, so that requests with many sequences do not block others.
        """
        tokens, num_running = 0, Counter(state.outputs for state in self.running.values())
        while self.waiting and (free_slots := self.limits.max_batch - len(self.running)) > 0:
            state = min(self.waiting, key=lambda state: num_running[state.outputs])
            if num_running[state.outputs] and free_slots <= self.limits.max_batch // 4:
                break
            tokens += len(state.sequence.prompt)
            if tokens > MAX_PREFILL_TOKENS and self.engine.waiting:
                break
            self.waiting.remove(state)
            num_running[state.outputs] += 1
            self.engine.add([state.sequence])
            self.running[id(state.sequence)] = state

    def _step(self) -> Outputs:
        started = time.monotonic()
        try:
            step_outputs = self.engine.step()
        except Exception as error:  # e.g. out of memory: fail the running sequences, keep the server alive
            failed, self.running, self.engine = self.running, {}, self.generator.engine()
            message = str(error) or repr(error)
            return [(state, SequenceOutput(message, [], finish_reason="error")) for state in failed.values()]
        now = time.monotonic()
        outputs = []
        for sequence, token_ids, agreement in step_outputs:
            state = self.running[id(sequence)]
            if len(sequence.output_ids) == len(token_ids):
                self.metrics.first_chunk.labels(self.name).observe(now - state.arrival_time)
            reason: FinishReason | None = None
            if state.prompt_only:
                sequence.output_ids, sequence.hit_eos, token_ids = [], False, []
                reason = "length"
            text = state.detokenizer.push(token_ids)
            if sequence.hit_eos or state.detokenizer.stopped:
                reason = "stop"
            elif sequence.finished:
                reason = "length"
            if reason is not None:
                text += state.detokenizer.finish()
                self._remove(state)
            output = SequenceOutput(text, token_ids, agreement, reason)
            unscored = reason is not None and state.num_log_probs is not None
            (self.unscored if unscored else outputs).append((state, output))
        self.metrics.steps.labels(self.name).observe(now - started)
        self.metrics.chunks.labels(self.name).inc(len(step_outputs))
        self.metrics.tokens.labels(self.name).inc(sum(len(output.token_ids) for output in step_outputs))
        return outputs

    def _score(self, state: SequenceState, output: SequenceOutput) -> tuple[SequenceState, SequenceOutput]:
        """Add the log-probabilities to the last output of a sequence."""
        if state.aborted or state.num_log_probs is None:
            return state, output
        try:
            return state, output._replace(log_probs=self.engine.log_probs(state.sequence, state.num_log_probs))
        except Exception as error:
            return state, SequenceOutput(str(error) or repr(error), [], finish_reason="error")

    def _remove(self, state: SequenceState) -> None:
        self.engine.remove([state.sequence])
        del self.running[id(state.sequence)]

    def _publish(self, outputs: Outputs) -> None:
        """Put outputs into their queues, with one call per step: each call wakes the event loop."""

        def put_all() -> None:
            for state, output in outputs:
                state.outputs.put_nowait((state, output))

        if outputs and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(put_all)
