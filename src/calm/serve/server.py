"""The ASGI application: OpenAI-compatible API, health checks, metrics, and the playground."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from calm import __version__
from calm.generate.text import TextGenerator
from calm.serve.chat import ChatCompletionRequest, ChatTemplate, create_chat_completion
from calm.serve.completions import create_completion
from calm.serve.limits import (
    MAX_QUOTED_CHARS,
    ApiError,
    BodyLimitMiddleware,
    HostCheckMiddleware,
    Limits,
    error_body,
    truncated_repr,
)
from calm.serve.metrics import Metrics
from calm.serve.requests import CompletionRequest
from calm.serve.scheduler import Scheduler

PAGES = {name: (files("calm") / "serve" / "playground" / f"{name}.html").read_text() for name in ("index", "docs")}
PAGE_HEADERS = {  # the pages load nothing from other hosts and must not be framed
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
COMPLETION_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The completions as JSON, or as server-sent events ending with [DONE] if stream is true.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "Invalid or unsupported request; the message gives the reason."},
    401: {"description": "Missing or invalid API key."},
    403: {"description": "The Host header has a name that is not allowed."},
    404: {"description": "Unknown model."},
    408: {"description": "The request body did not arrive in time."},
    413: {"description": "The request body is too large."},
    429: {"description": "The waiting queue is full; retry after Retry-After seconds."},
    500: {"description": "The model failed."},
    503: {"description": "The server is shutting down."},
}


def create_app(
    generators: dict[str, TextGenerator],
    limits: Limits,
    keys: list[str],
    scheduler_class: type[Scheduler] = Scheduler,
    allowed_hosts: Set[str] | None = None,
) -> FastAPI:
    """Create the application.

    Args:
        generators: Models by name. The playground shows them side by side, in this order.
        limits: Request limits.
        keys: Valid API keys; empty to disable authentication.
        scheduler_class: Called with (name, generator, limits, metrics) for each model.
        allowed_hosts: Names that the Host header may have; None: any.
    """
    templates = {name: ChatTemplate(generator) for name, generator in generators.items()}
    metrics, valid_keys = Metrics(), [key.encode() for key in keys]
    schedulers = {name: scheduler_class(name, generator, limits, metrics) for name, generator in generators.items()}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for scheduler in schedulers.values():
            scheduler.start(asyncio.get_running_loop())
        yield
        for scheduler in schedulers.values():
            scheduler.drain()

    app = FastAPI(title="calm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.schedulers = schedulers

    if allowed_hosts is not None:
        app.add_middleware(HostCheckMiddleware, allowed=allowed_hosts)
    app.add_middleware(BodyLimitMiddleware, limits=limits, responses=metrics.requests)

    def authorized(authorization: Annotated[str | None, Header()] = None) -> None:
        scheme, _, credentials = (authorization or "").partition(" ")
        key_bytes = credentials.encode("latin-1")  # undoes the decoding of the header
        matches = [hmac.compare_digest(key_bytes, key) for key in valid_keys]  # always compares all keys
        if valid_keys and (scheme.lower() != "bearer" or not any(matches)):
            message = "the API key is missing or invalid; send a valid one as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, error_type="authentication_error", code="invalid_api_key")

    responses = COMPLETION_RESPONSES | ERROR_RESPONSES

    @app.post("/v1/completions", dependencies=[Depends(authorized)], responses=responses, tags=["OpenAI"])
    async def completions(request: CompletionRequest, raw_request: Request) -> Response:
        """Complete a prompt, in chunks of K tokens. The response is a single JSON object or a stream."""
        return await create_completion(request, raw_request, get_scheduler(request.model), limits)

    @app.post("/v1/chat/completions", dependencies=[Depends(authorized)], responses=responses, tags=["OpenAI"])
    async def chat_completions(request: ChatCompletionRequest, raw_request: Request) -> Response:
        """Continue a conversation. The response is a single JSON object or a stream."""
        scheduler = get_scheduler(request.model)
        return await create_chat_completion(request, raw_request, scheduler, limits, templates[scheduler.name])

    @app.get("/v1/models", dependencies=[Depends(authorized)], responses={401: ERROR_RESPONSES[401]}, tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """List the served models."""
        return {"object": "list", "data": [_model_info(scheduler, limits) for scheduler in schedulers.values()]}

    model_errors: dict[int | str, dict[str, Any]] = {status: ERROR_RESPONSES[status] for status in (401, 404)}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(authorized)], responses=model_errors, tags=["OpenAI"])
    async def model(name: str) -> dict[str, Any]:
        """Describe one model."""
        return _model_info(get_scheduler(name), limits)

    @app.get("/health", tags=["operation"], responses={503: {"description": "The thread of a model has died."}})
    async def health() -> Response:
        """Liveness check: restart the process if this fails."""
        alive = all(scheduler.alive for scheduler in schedulers.values())
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    @app.get("/ready", tags=["operation"], responses={503: {"description": "The server is shutting down."}})
    async def ready() -> Response:
        """Readiness check: send no requests while this fails."""
        draining = any(scheduler.draining for scheduler in schedulers.values())
        return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, name in (("/", "index"), ("/docs", "docs")):
        app.get(path, include_in_schema=False)(_page(name))

    def get_scheduler(name: str) -> Scheduler:
        if name not in schedulers:
            quoted = repr(name[:MAX_QUOTED_CHARS])
            message = f"the model {quoted} does not exist; available models: {', '.join(schedulers)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return schedulers[name]

    endpoints = []
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            endpoints.append(f"{method.upper()} {path}")
            operation["responses"].pop("422", None)  # FastAPI documents it for validation errors, which are 400 here

    async def http_error(_: Request, error: Any) -> JSONResponse:
        """Unknown paths and methods, and bodies that cannot be parsed."""
        message = str(error.detail)
        if error.status_code == 404:
            message = f"this endpoint does not exist; this server has {', '.join(endpoints)}"
        return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)

    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(RequestValidationError)(_validation_error)
    app.exception_handler(HTTPException)(http_error)
    app.exception_handler(Exception)(_internal_error)
    return app


def _model_info(scheduler: Scheduler, limits: Limits) -> dict[str, Any]:
    """OpenAI's model fields, plus the fields that the playground needs."""
    model = scheduler.generator.model
    return {
        "id": scheduler.name,
        "object": "model",
        "created": 0,
        "owned_by": "calm",
        "chunk_size": model.chunk_size,
        "head": getattr(model.config, "head", "softmax"),
        "default_method": model.head.default_method(tempered=True, truncated=False),
        "max_tokens": limits.max_new_tokens,
        "max_candidates": limits.max_candidates,
    }


def _page(name: str):
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGES[name], headers=PAGE_HEADERS)

    return page


async def _api_error(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _validation_error(_: Request, error: Any) -> JSONResponse:
    """Report the first validation error of a request body."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if part != "body"]
    param = location[0][:MAX_QUOTED_CHARS] if location and not location[0].isdigit() else None
    if first["type"] == "extra_forbidden":
        message = f"unknown field {truncated_repr('.'.join(location))}; see /docs for the supported fields"
    elif first["type"] == "json_invalid":
        param, message = None, "the request body is not valid JSON"
    else:
        message = f"{param or 'body'}: {first['msg']}"
    return JSONResponse(error_body(message, "invalid_request_error", param), 400)


async def _internal_error(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error_body("internal server error; see the server log", "server_error"), 500)
