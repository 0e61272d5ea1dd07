"""What a server takes on, and the errors that tell a client about it, in OpenAI's form."""

from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 100  # characters of what was sent


@dataclass(frozen=True)
class Limits:
    """Each holds under any load; what is beyond is refused at once."""

    max_batch: int = 32  # texts that grow at once
    max_queue: int = 256  # texts that wait for a place
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 2048  # of a text
    max_candidates: int = 1000  # of a chunk
    max_draws: int = 8000  # of a step of a request: candidates of all its texts
    max_texts: int = 32  # of a request: prompts times n
    max_stops: int = 4
    max_stop_length: int = 200  # characters
    max_seconds: float = 300.0  # of a request, waiting included
    max_body: int = 2**20  # bytes
    patience: float = 10.0  # seconds in which a client has to send its request
    stalled: float = 60.0  # seconds after which a client that reads nothing is let go


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body = error_body(message, kind, param, code)


def shown(value: Any) -> str:
    """What a client sent, as far as an answer repeats it."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def too_busy(message: str, seconds: int = 1) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": str(seconds)})


def shutting_down() -> ApiError:
    message = "the server is shutting down: it finishes what it has taken on, and takes nothing more"
    return ApiError(503, message, kind="server_error", code="shutting_down", headers={"Retry-After": "5"})
