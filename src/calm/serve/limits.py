"""Request limits of the server, and API errors in OpenAI's format."""

from dataclasses import dataclass
from typing import Any

MAX_QUOTED_CHARS = 100  # of client input in an error message


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


def queue_full(message: str, retry_after: int = 1) -> ApiError:
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, error_type="rate_limit_error", code="queue_full", headers=headers)


def shutting_down() -> ApiError:
    message = "the server is shutting down and accepts no new requests; retry later or use another replica"
    return ApiError(503, message, error_type="server_error", code="shutting_down", headers={"Retry-After": "5"})
