"""`calm serve` as a deployment of Ray Serve: Ray starts replicas as they are needed, and shares the requests out.

serve run calm.serve.ray_deployment:app model=bundled max_replicas=8

A replica is the application of `calm serve`, streams included. Ray gathers requests that come within milliseconds, so
that their prompts are read together. Then they join the texts that grow already: Ray's groups alone would run in turn.
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
from calm.serve.run import load_writers
from calm.serve.scheduler import Event, Job, Scheduler
from calm.serve.server import create_app

ONGOING, WAITING = 64, 256  # requests of a replica, and before they have one; further ones get a 503 from Ray
LIMITS = Limits(max_queue=ONGOING * Limits.max_texts)  # all that Ray lets through has room


class Options(BaseModel):
    """What `serve run` takes as name=value, and a configuration of Ray Serve as args."""

    model_config = ConfigDict(extra="forbid")

    model: str  # a directory that every machine has, or `bundled`
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(16, gt=0)  # of a replica; Ray starts and ends replicas to keep it
    num_cpus: float = Field(1, ge=0)  # of a replica; Ray lets torch use as many threads
    num_gpus: float = Field(0, ge=0)


class Gathered(Scheduler):
    """Requests come in by groups."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.handed_over: set[asyncio.Task[None]] = set()  # asyncio itself holds its tasks weakly

    def submit(self, jobs: list[Job]) -> None:
        task = asyncio.create_task(self._hand_over(jobs))
        self.handed_over.add(task)
        task.add_done_callback(self.handed_over.discard)

    async def _hand_over(self, jobs: list[Job]) -> None:
        try:
            await self.gather(jobs)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # nobody else would tell those who wait
            for job in jobs:
                job.events.put_nowait((job, Event(str(error), [], finish="error")))

    @serve.batch(max_batch_size=LIMITS.max_batch, batch_wait_timeout_s=0.005)
    async def gather(self, requests: list[list[Job]]) -> list[None]:
        super().submit([job for jobs in requests for job in jobs])
        return [None] * len(requests)


class Named:
    """Says in a header which replica answers."""

    def __init__(self, app: ASGIApp, name: str):
        self.app, self.name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Replica"] = self.name
            await send(message)

        await self.app(scope, receive, named)


@serve.deployment(
    max_ongoing_requests=ONGOING, max_queued_requests=WAITING, graceful_shutdown_timeout_s=LIMITS.max_seconds
)
@serve.ingress()
class Completions:
    def __init__(self, model: str, keys: list[str]):
        self.api = create_app(load_writers(Path(model), None), LIMITS, keys, Gathered)
        self.schedulers: dict[str, Scheduler] = self.api.state.schedulers
        self.api.add_middleware(Named, name=serve.get_replica_context().replica_id.unique_id)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.api

    def check_health(self) -> None:
        """Ray puts another replica in the place of one that raises here."""
        if not all(made.alive for made in self.schedulers.values()):
            raise RuntimeError("a model's thread has ended")


def app(args: dict[str, Any]) -> serve.Application:
    """What `serve run` runs. Keys come from CALM_API_KEY, as those of `calm serve`: arguments are seen by others."""
    options, keys = Options(**args), os.environ.get("CALM_API_KEY", "").split()
    model = Path(options.model)
    return Completions.options(  # pyright: ignore[reportAttributeAccessIssue]
        autoscaling_config=options.model_dump(include={"min_replicas", "max_replicas", "target_ongoing_requests"}),
        ray_actor_options=options.model_dump(include={"num_cpus", "num_gpus"}),
    ).bind(str(model.resolve()) if model.exists() else options.model, keys)
