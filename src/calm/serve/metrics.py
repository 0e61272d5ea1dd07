"""What a server tells Prometheus."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """A registry of its own, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        model = ["model"]
        self.requests = counter("calm_requests", "Answers by path and status.", ["path", "status"])
        self.refused = counter("calm_texts_refused", "Texts for which the queue had no room.", model)
        self.tokens = counter("calm_tokens", "Tokens written.", model)
        self.chunks = counter("calm_chunks", "Chunks written: one for every text of a step.", model)
        self.steps = histogram("calm_step_seconds", "Time of a step of all texts.", model)
        self.first_chunk = histogram(
            "calm_first_chunk_seconds", "From a request to its first chunk, waiting included.", model
        )
        self.running = gauge("calm_texts_running", "Texts that grow.", model)
        self.waiting = gauge("calm_texts_waiting", "Texts that wait for a place.", model)

    def watch(self, model: str, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        self.running.labels(model).set_function(running)
        self.waiting.labels(model).set_function(waiting)

    def step(self, model: str, seconds: float, chunks: int, tokens: int) -> None:
        self.steps.labels(model).observe(seconds)
        self.chunks.labels(model).inc(chunks)
        self.tokens.labels(model).inc(tokens)

    def page(self) -> bytes:
        return generate_latest(self.registry)
