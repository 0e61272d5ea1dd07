"""Prometheus metrics."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds


class Metrics:
    """Metrics of one server. Each instance has its own registry, so one process can run several servers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=BUCKETS)
        model = ["model"]
        self.requests = counter("calm_requests", "HTTP responses by path and status.", ["path", "status"])
        self.rejected = counter(
            "calm_sequences_rejected", "Sequences rejected because the waiting queue was full.", model
        )
        self.tokens = counter("calm_tokens", "Generated tokens.", model)
        self.chunks = counter("calm_chunks", "Generated chunks: one per running sequence and step.", model)
        self.steps = histogram("calm_step_seconds", "Duration of a decoding step of the whole batch.", model)
        self.first_chunk = histogram(
            "calm_first_chunk_seconds", "Time from a request to its first chunk, including time in the queue.", model
        )
        self.running = gauge("calm_sequences_running", "Running sequences.", model)
        self.waiting = gauge("calm_sequences_waiting", "Waiting sequences.", model)
