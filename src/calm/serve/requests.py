"""What clients send to /v1/completions: the fields that OpenAI's clients know, and two of our own."""

import asyncio
import secrets
import time
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt

from calm.data.tokenizer import Tokenizer
from calm.errors import ConfigError
from calm.sampling.batch import Text
from calm.sampling.next_chunk import Method, Sampling
from calm.sampling.text import GrowingText, noise_seed
from calm.serve.limits import ApiError, Limits, shown
from calm.serve.scheduler import Job

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {  # fields that cannot work: the values that ask for nothing, and why
    "logprobs": ((None,), "a CALM model draws vectors and has no probabilities of tokens"),
    "top_p": ((None, 1), "a CALM model draws vectors and has no probabilities to cut; use temperature"),
    "best_of": ((None, 1), "without probabilities no text is known to be better than another; use n"),
    "presence_penalty": ((None, 0), "there are no probabilities of tokens that could be lowered"),
    "frequency_penalty": ((None, 0), "there are no probabilities of tokens that could be lowered"),
    "logit_bias": ((None, {}), "a CALM model has no logits"),
    "suffix": ((None, ""), "texts are continued at their end only"),
}


def _well_formed(text: str) -> str:
    """JSON can name halves of characters, which no text has."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("it has half a character (a lone surrogate)")
    return text


String = Annotated[str, Field(strict=True), AfterValidator(_well_formed)]
Number = StrictInt | StrictFloat
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Few = Field(fail_fast=True)  # a long list that is wrong is wrong at its first element: others cost seconds
Strings = Annotated[list[String], Few]
TokenIds = Annotated[list[TokenId], Few]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False


class CompletionRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"model": "bundled", "prompt": "And God said", "max_tokens": 40, "temperature": 0.5}
        },
    )

    model: String = Field(max_length=256, description="One of /v1/models.")
    prompt: String | Strings | TokenIds | Annotated[list[TokenIds], Few] | None = Field(
        None, description="A text, several, or token ids; by default the empty text."
    )
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = Field(None, description="By default 16, as OpenAI's.")
    temperature: Annotated[float, Field(strict=True, gt=0, le=2, allow_inf_nan=False)] | None = Field(
        None,
        description="Above 0 and at most 1, for models with a chain head and Transformers also more; 1 by default.",
    )
    n: Annotated[int, Field(strict=True, ge=1)] | None = Field(None, description="Texts for each prompt.")
    stop: String | Strings | None = Field(None, description="Where texts end; not part of them.")
    seed: Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="The same seed, the same noise, whoever else is served."
    )
    stream: StrictBool | None = Field(None, description="An event for each chunk.")
    stream_options: StreamOptions | None = None
    echo: StrictBool | None = Field(None, description="Begin with the prompt.")
    user: String | None = Field(None, description="Taken and not used.")
    num_candidates: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Ours: draws for each chunk at a low temperature."
    )
    method: Method | None = Field(None, description="Ours: how a temperature is made; docs/sampling.md.")
    logprobs: StrictInt | None = Field(None, description="Cannot work: refused.")
    top_p: Number | None = Field(None, description="Only 1.")
    best_of: StrictInt | None = Field(None, description="Only 1.")
    presence_penalty: Number | None = Field(None, description="Only 0.")
    frequency_penalty: Number | None = Field(None, description="Only 0.")
    logit_bias: dict[str, Number] | None = Field(None, description="Only empty.")
    suffix: String | None = Field(None, description="Only empty.")


def check_possible(request: CompletionRequest) -> None:
    """Refuse what a CALM model cannot do, and say why."""
    for field, (neutral, reason) in NEUTRAL.items():
        if (value := getattr(request, field)) not in neutral:
            message = f"{field} = {shown(value)} cannot work: {reason}"
            raise ApiError(400, message, param=field, code="unsupported_value")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is for streams; set stream to true", param="stream_options")


def prompts_of(request: CompletionRequest, tokenizer: Tokenizer, limits: Limits) -> list[tuple[str, list[int]]]:
    """The prompts as text and as ids."""
    given = "" if request.prompt is None else request.prompt
    if isinstance(given, str):
        texts: list[Any] = [given]
    elif not given:
        raise ApiError(400, "prompt is an empty list; give a text, which may be empty", param="prompt")
    else:
        texts = [given] if isinstance(given[0], int) else list(given)
    check_limit("n times the number of prompts", (request.n or 1) * len(texts), limits.max_texts)
    return [
        (text, tokenizer.encode(text)) if isinstance(text, str) else (_decoded(text, tokenizer), list(text))
        for text in texts
    ]


def _decoded(ids: list[int], tokenizer: Tokenizer) -> str:
    if ids and max(ids) >= tokenizer.vocab_size:
        message = f"prompt has token {max(ids)}, and the vocabulary {tokenizer.vocab_size} tokens"
        raise ApiError(400, message, param="prompt")
    return tokenizer.decode(ids)


def check_limit(name: str, value: int, most: int) -> None:
    if value > most:
        raise ApiError(400, f"{name} is {value}, and this server takes at most {most}", code="limit_exceeded")


def jobs_of(
    request: CompletionRequest, prompts: list[tuple[str, list[int]]], tokenizer: Tokenizer, limits: Limits
) -> list[Job]:
    """A job for each text that a request asks for, in OpenAI's order: all of the first prompt, then the second."""
    count, length = request.n or 1, request.max_tokens or 16
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    longest = max(len(ids) for _, ids in prompts)
    for name, value, most in (
        ("max_tokens", length, limits.max_new_tokens),
        ("num_candidates", request.num_candidates or 1, limits.max_candidates),
        ("the number of tokens of a prompt", longest, limits.max_prompt_tokens),
        ("the number of stop strings", len(stops), limits.max_stops),
        ("the length of a stop string", max(map(len, stops), default=0), limits.max_stop_length),
    ):
        check_limit(name, value, most)
    temperature = 1.0 if request.temperature is None else request.temperature
    seed = secrets.randbits(62) if request.seed is None else request.seed % 2**64
    deadline, events = time.monotonic() + limits.max_seconds, asyncio.Queue()
    try:
        limited = request.num_candidates or (limits.max_candidates if request.method == "exact" else None)
        sampling = Sampling(temperature, limited, request.method)
        return [
            Job(Text(ids, noise_seed(seed, number), length, sampling), GrowingText(tokenizer, stops), deadline, events)
            for number, ids in enumerate(ids for _, ids in prompts for _ in range(count))
        ]
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
