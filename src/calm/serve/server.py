"""The application: OpenAI's completions, the models, health, metrics, and the page to play with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from calm import __version__
from calm.sampling.text import Writer
from calm.serve.completions import complete
from calm.serve.guard import Guard, Keys
from calm.serve.limits import MOST_SHOWN, ApiError, Limits, error_body, shown
from calm.serve.metrics import Metrics
from calm.serve.requests import CompletionRequest
from calm.serve.scheduler import Scheduler

PAGES = {name: (files("calm") / "serve" / "playground" / f"{name}.html").read_text() for name in ("index", "docs")}
OF_PAGES = {  # they need nothing from elsewhere, and nobody may put them into a frame
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts, whole or, with stream, as server-sent events that end with [DONE].",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be served as it is; the message says why."},
    401: {"description": "No valid API key."},
    404: {"description": "No such model."},
    408: {"description": "The body came too slowly."},
    413: {"description": "The body is too long."},
    429: {"description": "Too many texts wait; Retry-After says when to come again."},
    500: {"description": "The model failed."},
    503: {"description": "The server is shutting down."},
}


def create_app(
    writers: dict[str, Writer], limits: Limits, keys: list[str], scheduler: type[Scheduler] = Scheduler
) -> FastAPI:
    """An application that serves models by name; the first is the one to play with, a second its baseline."""
    metrics, lock = Metrics(), Keys(keys)
    schedulers = {name: scheduler(name, writer, limits, metrics) for name, writer in writers.items()}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for scheduler in schedulers.values():
            scheduler.start(asyncio.get_running_loop())
        yield
        for scheduler in schedulers.values():
            scheduler.drain()

    app = FastAPI(title="calm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.schedulers = schedulers
    app.add_middleware(Guard, limits=limits, count=lambda path, status: metrics.requests.labels(path, status).inc())

    def authorized(authorization: Annotated[str | None, Header()] = None) -> None:
        lock.check(authorization)

    @app.post("/v1/completions", dependencies=[Depends(authorized)], responses=ANSWERS | ERRORS, tags=["OpenAI"])
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        """Continue a text by chunks of K tokens, whole or as a stream."""
        return await complete(http, asked, _known(asked.model), limits)

    @app.get("/v1/models", dependencies=[Depends(authorized)], responses={401: ERRORS[401]}, tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """What is served."""
        return {"object": "list", "data": [_described(scheduler, limits) for scheduler in schedulers.values()]}

    no_model: dict[int | str, dict[str, Any]] = {401: ERRORS[401], 404: ERRORS[404]}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(authorized)], responses=no_model, tags=["OpenAI"])
    async def model(name: str) -> dict[str, Any]:
        """One of the models."""
        return _described(_known(name), limits)

    @app.get("/health", tags=["operation"], responses={503: {"description": "A model's thread has ended."}})
    async def health() -> Response:
        """Whether the process should live on."""
        alive = all(scheduler.alive for scheduler in schedulers.values())
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    @app.get("/ready", tags=["operation"], responses={503: {"description": "It is shutting down."}})
    async def ready() -> Response:
        """Whether requests should be sent here."""
        draining = any(scheduler.draining for scheduler in schedulers.values())
        return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """For Prometheus."""
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, name in (("/", "index"), ("/docs", "docs")):
        app.get(path, include_in_schema=False)(_page(name))

    def _known(name: str) -> Scheduler:
        if name not in schedulers:
            message = f"no model {name[:100]!r} is served here, only {', '.join(schedulers)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return schedulers[name]

    for described in app.openapi()["paths"].values():  # kept by FastAPI, which says 422 where we say 400
        for operation in described.values():
            operation["responses"].pop("422", None)
    app.exception_handler(ApiError)(_tell)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_other)
    app.exception_handler(Exception)(_failed)
    return app


def _described(scheduler: Scheduler, limits: Limits) -> dict[str, Any]:
    """OpenAI's fields, and what the page needs to know."""
    config = scheduler.writer.model.config
    return {
        "id": scheduler.name,
        "object": "model",
        "created": 0,
        "owned_by": "calm",
        "chunk_size": scheduler.writer.predictor.chunk_size,
        "head": getattr(config, "head", "softmax"),
        "max_tokens": limits.max_new_tokens,
        "max_candidates": limits.max_candidates,
    }


def _page(name: str):
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGES[name], headers=OF_PAGES)

    return page


async def _tell(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _invalid(_: Request, error: Any) -> JSONResponse:
    """The first thing that is wrong with a body, by its name."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = place[0][:MOST_SHOWN] if place and not place[0].isdigit() else None
    if first["type"] == "extra_forbidden":
        message = f"there is no field {shown('.'.join(place))}"
    elif first["type"] == "json_invalid":
        param, message = None, "the body is not JSON"
    else:
        message = f"{param or 'body'}: {first['msg']}"
    return JSONResponse(error_body(message, "invalid_request_error", param), 400)


async def _other(_: Request, error: Any) -> JSONResponse:
    """Unknown paths and methods, bodies that no parser takes."""
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code, error.headers)


async def _failed(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error_body("the server failed; its log says more", "server_error"), 500)
