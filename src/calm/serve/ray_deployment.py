"""`calm serve` as a Ray Serve deployment: Ray load-balances requests over replicas and scales them automatically.

serve run calm.serve.ray_deployment:app model=bundled max_replicas=8

Each replica runs the application of `calm serve`, including streaming. `serve.batch` collects requests that arrive
within milliseconds, so that their prompts are prefilled together. They then join the running batch of the scheduler.
`serve.batch` alone would process one batch after the other.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calm.serve.limits import Limits
from calm.serve.run import load_generators
from calm.serve.scheduler import Scheduler, SequenceOutput, SequenceState
from calm.serve.server import create_app

MAX_ONGOING_REQUESTS = 64  # per replica
MAX_QUEUED_REQUESTS = 256  # waiting for a replica; Ray rejects further ones with a 503
LIMITS = Limits(max_queue=MAX_ONGOING_REQUESTS * Limits.max_sequences)  # fits every request that Ray admits


class Options(BaseModel):
    """Arguments: name=value for `serve run`, or `args` in a Ray Serve config file."""

    model_config = ConfigDict(extra="forbid")

    model: str  # a directory that exists on every node, or `bundled`
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(16, gt=0)  # per replica; the target of Ray's autoscaling
    num_cpus: float = Field(1, ge=0)  # per replica; Ray sets the number of torch threads accordingly
    num_gpus: float = Field(0, ge=0)


class BatchingScheduler(Scheduler):
    """Adds concurrent requests in batches."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.tasks: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks

    def add(self, states: list[SequenceState]) -> None:
        task = asyncio.create_task(self._add(states))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _add(self, states: list[SequenceState]) -> None:
        try:
            await self.add_batch(states)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # the client would wait forever without an output
            for state in states:
                state.outputs.put_nowait((state, SequenceOutput(str(error), [], finish_reason="error")))

    @serve.batch(max_batch_size=LIMITS.max_batch, batch_wait_timeout_s=0.005)
    async def add_batch(self, requests: list[list[SequenceState]]) -> list[None]:
        super().add([state for states in requests for state in states])
        return [None] * len(requests)


class ReplicaHeaderMiddleware:
    """Adds the id of the replica to each response."""

    def __init__(self, app: ASGIApp, replica_id: str):
        self.app, self.replica_id = app, replica_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Replica"] = self.replica_id
            await send(message)

        await self.app(scope, receive, send_with_header)


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    max_queued_requests=MAX_QUEUED_REQUESTS,
    graceful_shutdown_timeout_s=LIMITS.max_seconds,
)
@serve.ingress()
class Completions:
    def __init__(self, model: str, keys: list[str]):
        self.api = create_app(load_generators(Path(model), None), LIMITS, keys, BatchingScheduler)
        self.schedulers: dict[str, Scheduler] = self.api.state.schedulers
        self.api.add_middleware(ReplicaHeaderMiddleware, replica_id=serve.get_replica_context().replica_id.unique_id)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.api

    def check_health(self) -> None:
        """Ray restarts a replica whose health check raises."""
        if not all(scheduler.alive for scheduler in self.schedulers.values()):
            raise RuntimeError("the thread of a model has died")


def app(args: dict[str, Any]) -> serve.Application:
    """Application builder for `serve run`. API keys come from CALM_API_KEY, since other users can see arguments."""
    options, keys = Options(**args), os.environ.get("CALM_API_KEY", "").split()
    model = Path(options.model)
    return Completions.options(  # pyright: ignore[reportAttributeAccessIssue]
        autoscaling_config=options.model_dump(include={"min_replicas", "max_replicas", "target_ongoing_requests"}),
        ray_actor_options=options.model_dump(include={"num_cpus", "num_gpus"}),
    ).bind(str(model.resolve()) if model.exists() else options.model, keys)
