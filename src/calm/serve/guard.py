"""Checks before the application runs: body size, receive timeout, and API keys."""

import asyncio
import hmac
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calm.serve.limits import ApiError, Limits


class BodyLimitMiddleware:
    """Receives the whole request body, within size and time limits, before the application runs. Counts responses."""

    def __init__(self, app: ASGIApp, limits: Limits, count: Callable[[str, int], None]):
        self.app, self.limits, self.count = app, limits, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self.count(getattr(route, "path", "unknown"), message["status"])
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
                        return b"".join(parts)
        except TimeoutError:
            message = f"the request body did not arrive within {self.limits.receive_timeout:g} s; send it again"
            raise ApiError(408, message) from None


class ApiKeys:
    """Valid API keys, compared in constant time. An empty list disables authentication."""

    def __init__(self, keys: list[str]):
        self.keys = [key.encode() for key in keys]

    def check(self, authorization: str | None) -> None:
        if not self.keys:
            return
        scheme, _, credentials = (authorization or "").partition(" ")
        key_bytes = credentials.encode("latin-1")  # undoes the decoding of the header
        matches = [hmac.compare_digest(key_bytes, key) for key in self.keys]  # always compares all keys
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is missing or invalid; send a valid one as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, error_type="authentication_error", code="invalid_api_key")
