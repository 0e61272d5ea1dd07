"""What stands before the application: bodies that are too long or too slow, and API keys."""

import asyncio
import hmac
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calm.serve.limits import ApiError, Limits


class Guard:
    """Reads a request's body whole, within its limits, before anybody works on it."""

    def __init__(self, app: ASGIApp, limits: Limits, count: Callable[[str, int], None]):
        self.app, self.limits, self.count = app, limits, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self.count(getattr(route, "path", "unknown"), message["status"])
            await send(message)

        try:
            body = await self._body(scope, receive)
        except ApiError as error:
            answer = JSONResponse(error.body, error.status, {**error.headers, "Connection": "close"})
            await answer(scope, receive, counted)
            return
        if body is None:
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, counted)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None where the client left."""
        most = self.limits.max_body
        too_long = ApiError(413, f"the body is longer than {most} bytes, which is the most that is read")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise too_long
        parts, total = [], 0
        try:
            async with asyncio.timeout(self.limits.patience):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    total += len(parts[-1])
                    if total > most:
                        raise too_long
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.limits.patience:g} s") from None


class Keys:
    """API keys, compared in constant time; without keys everybody may ask."""

    def __init__(self, keys: list[str]):
        self.keys = [key.encode() for key in keys]

    def check(self, authorization: str | None) -> None:
        if not self.keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        key_given = given.encode("latin-1")  # the bytes that came
        matches = [hmac.compare_digest(key_given, key) for key in self.keys]  # all of them, always
        if scheme.lower() != "bearer" or not any(matches):
            message = "a valid API key is needed, as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
