"""Request limits of the server, the middleware that applies them to request bodies, and errors in OpenAI's format."""

import asyncio
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_QUOTED_CHARS = 100  # of client input in an error message
MAX_COLLECTIONS = 10_000  # lists and objects in a request body; parsing more of them blocks the event loop


@dataclass(frozen=True)
class Limits:
    """Hard limits under any load. Requests that exceed them are rejected immediately."""

    max_batch: int = 32  # running sequences
    max_queue: int = 256  # waiting sequences
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 2048  # per sequence
    max_candidates: int = 1000  # per chunk
    max_draws: int = 8000  # candidates per step, summed over all sequences of a request
    max_sequences: int = 32  # per request: prompts times n
    max_stop_strings: int = 4
    max_stop_length: int = 200  # characters
    max_seconds: float = 300.0  # per request, including time in the waiting queue
    max_body_bytes: int = 2**20
    receive_timeout: float = 10.0  # seconds for a client to send its request
    send_timeout: float = 60.0  # seconds until a client that does not read is disconnected


class ApiError(Exception):
    """A response with a status other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body = error_body(message, error_type, param, code)


def truncated_repr(value: Any) -> str:
    """repr of client input, truncated for error messages."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}…"


def error_body(message: str, error_type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, error_type="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    message = "the server is shutting down and accepts no new requests; retry later or use another replica"
    return ApiError(503, message, error_type="server_error", code="shutting_down", headers={"Retry-After": "5"})


def has_too_many_collections(body: bytes) -> bool:
    """Whether JSON has more than MAX_COLLECTIONS lists and objects, without parsing it."""
    if body.count(b"[") + body.count(b"{") <= MAX_COLLECTIONS:  # those in strings included
        return False
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(without_escapes.split(b'"')[::2])
    return outside_strings.count(b"[") + outside_strings.count(b"{") > MAX_COLLECTIONS


def host_name(host: str) -> str:
    """The name in a Host header such as localhost:8000 or [::1]:8000, without the port."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


class HostCheckMiddleware:
    """Refuses requests to other host names: with DNS rebinding any web page can send requests to loopback addresses.

    Its name then resolves to 127.0.0.1, which makes the server part of the page's origin.
    """

    def __init__(self, app: ASGIApp, allowed: Set[str]):
        self.app, self.allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else None
        if host is None or host_name(host) in self.allowed:
            await self.app(scope, receive, send)
            return
        message = (
            f"the host {truncated_repr(host)} is not allowed; use one of {', '.join(sorted(self.allowed))}, or start "
            "the server with --allowed-host NAME"
        )
        response = JSONResponse(error_body(message, "invalid_request_error", code="host_not_allowed"), 403)
        await response(scope, receive, send)


class BodyLimitMiddleware:
    """Receives the whole request body, within size and time limits, before the application runs. Counts responses."""

    def __init__(self, app: ASGIApp, limits: Limits, responses: Counter):
        self.app, self.limits, self.responses = app, limits, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "unknown")
                self.responses.labels(path, message["status"]).inc()
            await send(message)

        try:
            body = await self._receive_body(scope, receive)
        except ApiError as error:
            response = JSONResponse(error.body, error.status, {**error.headers, "Connection": "close"})
            await response(scope, receive, send_and_count)
            return
        if body is None:
            return
        replayed = False

        async def replay_body() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay_body, send_and_count)

    async def _receive_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Returns the body, or None if the client disconnected."""
        limit = self.limits.max_body_bytes
        too_large = ApiError(413, f"the request body exceeds the limit of {limit} bytes; send fewer or shorter prompts")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        parts, total = [], 0
        try:
            async with asyncio.timeout(self.limits.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    total += len(parts[-1])
                    if total > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            message = f"the request body did not arrive within {self.limits.receive_timeout:g} s; send it again"
            raise ApiError(408, message) from None
        body = b"".join(parts)
        if has_too_many_collections(body):
            message = f"the request body has more than {MAX_COLLECTIONS:,} lists and objects; send fewer prompts"
            raise ApiError(400, message, code="limit_exceeded")
        return body
