"""Request schemas of the endpoints: OpenAI's fields, plus the extensions num_candidates and method."""

import asyncio
import secrets
import time
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from calm.data.tokenizer import Tokenizer
from calm.errors import ConfigError
from calm.generate.engine import Sequence
from calm.generate.sampler import Method, SamplingParams
from calm.generate.text import Detokenizer, sequence_seed
from calm.heads import Head
from calm.serve.limits import ApiError, Limits, truncated_repr
from calm.serve.scheduler import SequenceState

MAX_LOGIT_BIAS = 300  # entries, as in OpenAI's API
MAX_FIELDS = 100  # of an object, unknown ones included

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {  # field: (values without effect, which are accepted, reason)
    "best_of": ((None, 1), "completions are not ranked by this server; use n"),
    "presence_penalty": ((None, 0), "penalties are not available from this server; omit it"),
    "frequency_penalty": ((None, 0), "penalties are not available from this server; omit it"),
    "logit_bias": ((None, {}), "logits cannot be changed on this server; omit it"),
    "suffix": ((None, ""), "text can only be appended to a prompt, not inserted; omit it"),
}


def _check_surrogates(text: str) -> str:
    """JSON escapes can encode lone surrogates, which are not valid text."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("the string contains a lone surrogate")
    return text


def check_length(value: Any, limit: int, elements: str) -> Any:
    """Check before the elements are validated: validation blocks the event loop, and reports each invalid element."""
    if isinstance(value, list | dict) and len(value) > limit:
        message, context = "{count} {elements}, but at most {limit} are accepted", {"elements": elements}
        raise PydanticCustomError("too_long", message, context | {"count": f"{len(value):,}", "limit": f"{limit:,}"})
    return value


def _check_prompts(prompt: Any) -> Any:
    one = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)  # prompt of token ids
    return prompt if one else check_length(prompt, Limits.max_sequences, "prompts")


String = Annotated[str, Field(strict=True), AfterValidator(_check_surrogates)]
Number = StrictInt | StrictFloat
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
FailFast = Field(fail_fast=True)  # stop at the first invalid element: reporting all of a long list takes seconds
Strings = Annotated[list[String], FailFast]
TokenIds = Annotated[list[TokenId], FailFast]


class Object(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        return check_length(data, MAX_FIELDS, "fields")


class StreamOptions(Object):
    include_usage: StrictBool = False


class GenerationRequest(Object):
    """Fields of all endpoints that generate text."""

    model: String = Field(max_length=256, description="ID of a model listed at /v1/models.")
    temperature: Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)] | None = Field(
        None,
        description="Sampling temperature, from 0 (greedy) to 2. Models without token probabilities accept values "
        "above 1 with the method mixture. Defaults to 1.",
    )
    n: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Number of choices per prompt. Defaults to 1."
    )
    stop: Annotated[
        String | Strings | None, BeforeValidator(lambda value: check_length(value, Limits.max_stop_strings, "strings"))
    ] = Field(None, description="Stop strings. Generation ends at the first one, which is not part of the text.")
    seed: Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="Random seed. The noise depends on it and on the choice's index, not on other requests."
    )
    stream: StrictBool | None = Field(None, description="Whether to stream the completion, one event per chunk.")
    stream_options: StreamOptions | None = None
    user: String | None = Field(None, description="Accepted and ignored.")
    num_candidates: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Extension: number of candidates per chunk for temperatures below 1."
    )
    method: Method | None = Field(
        None, description="Extension: algorithm for temperatures below 1; see docs/sampling.md."
    )
    top_p: Number | None = Field(
        None,
        description="Keep the most probable tokens until they have this probability together. Models without token "
        "probabilities need the method mixture. Defaults to 1: all tokens.",
    )
    top_k: StrictInt | None = Field(
        None, description="Extension: keep the k most probable tokens; 0 and -1 keep all. Models: see top_p."
    )
    min_p: Number | None = Field(
        None,
        description="Extension: keep tokens with at least this share of the largest probability. Models: see top_p.",
    )
    presence_penalty: Number | None = Field(None, description="Not supported, except for 0.")
    frequency_penalty: Number | None = Field(None, description="Not supported, except for 0.")
    logit_bias: Annotated[
        dict[str, Number] | None, BeforeValidator(lambda value: check_length(value, MAX_LOGIT_BIAS, "entries"))
    ] = Field(None, description="Not supported, except for an empty object.")

    @property
    def num_log_probs(self) -> int | None:
        """Number of tokens per position whose log-probabilities are requested, or None."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "bundled", "prompt": "And God said", "max_tokens": 40, "temperature": 0.5}
        },
    )

    prompt: Annotated[
        String | Strings | TokenIds | Annotated[list[TokenIds], FailFast] | None, BeforeValidator(_check_prompts)
    ] = Field(None, description="A string or a list of token ids, or a list of either. Defaults to the empty string.")
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None,
        description="Maximum number of new tokens per completion; 0 only with echo. Defaults to 16, as in OpenAI's "
        "API.",
    )
    echo: StrictBool | None = Field(None, description="Whether to prepend the prompt to the completion.")
    logprobs: Annotated[int, Field(strict=True, ge=0, le=5)] | None = Field(
        None,
        description="Return the log-probabilities of the tokens (with echo also of the prompt's) and of this many of "
        "the most probable ones. Only for models with token probabilities, and without stream.",
    )
    best_of: StrictInt | None = Field(None, description="Not supported, except for 1.")
    suffix: String | None = Field(None, description="Not supported, except for an empty string.")

    @property
    def num_log_probs(self) -> int | None:
        return self.logprobs


def check_supported(request: GenerationRequest, head: Head) -> None:
    """Raise ApiError for fields that this server or a model's head does not support."""
    for field, (accepted, reason) in UNSUPPORTED.items():
        if (value := getattr(request, field, None)) not in accepted:
            message = f"{field} = {truncated_repr(value)} is not supported: {reason}"
            raise ApiError(400, message, param=field, code="unsupported_value")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options requires streaming; set stream to true", param="stream_options")
    if request.num_log_probs is not None:
        if not head.exact_likelihood:
            message = "logprobs are not available: this model has no token probabilities; omit logprobs"
            raise ApiError(400, message, param="logprobs", code="unsupported_value")
        if request.stream:
            raise ApiError(400, "logprobs are not available in streams; set stream to false", param="logprobs")


def parse_prompts(request: CompletionRequest, tokenizer: Tokenizer, limits: Limits) -> list[tuple[str, list[int]]]:
    """The text and the token ids of each prompt."""
    prompt = "" if request.prompt is None else request.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not prompt:
        raise ApiError(400, "prompt is an empty list; pass a string, which may be empty", param="prompt")
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    return [
        (each, tokenizer.encode(each)) if isinstance(each, str) else (_decode(each, tokenizer), list(each))
        for each in prompts
    ]


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    if ids and max(ids) >= tokenizer.vocab_size:
        message = f"token id {max(ids)} is out of range: the vocabulary has {tokenizer.vocab_size:,} entries"
        raise ApiError(400, message, param="prompt")
    return tokenizer.decode(ids)


def check_limit(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise ApiError(400, f"{name} is {value}, but this server accepts at most {limit}", code="limit_exceeded")


def build_sequences(
    request: GenerationRequest,
    prompts: list[tuple[str, list[int]]],
    max_tokens: int,
    tokenizer: Tokenizer,
    limits: Limits,
) -> list[SequenceState]:
    """The n sequences of each prompt, in OpenAI's order: all of the first prompt, then all of the second."""
    n = request.n or 1
    stop_strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
    prompt_length = max(len(ids) for _, ids in prompts)
    for name, value, limit in (
        ("n times the number of prompts", n * len(prompts), limits.max_sequences),
        ("max_tokens", max_tokens, limits.max_new_tokens),
        ("num_candidates", request.num_candidates or 1, limits.max_candidates),
        ("the number of prompt tokens", prompt_length, limits.max_prompt_tokens),
        ("the number of stop strings", len(stop_strings), limits.max_stop_strings),
        ("the length of a stop string", max(map(len, stop_strings), default=0), limits.max_stop_length),
    ):
        check_limit(name, value, limit)
    temperature = 1.0 if request.temperature is None else request.temperature
    seed = secrets.randbits(62) if request.seed is None else request.seed % 2**64
    deadline, outputs = time.monotonic() + limits.max_seconds, asyncio.Queue()
    try:
        params = SamplingParams(
            temperature,
            request.num_candidates,
            request.method,
            top_k=None if request.top_k in (0, -1) else request.top_k,  # keep all tokens, as in vLLM
            top_p=None if request.top_p == 1 else request.top_p,
            min_p=None if request.min_p == 0 else request.min_p,
        )
        return [
            SequenceState(
                Sequence(ids, sequence_seed(seed, number), max(1, max_tokens), params),
                Detokenizer(tokenizer, stop_strings),
                deadline,
                outputs,
                request.num_log_probs,
                prompt_only=max_tokens == 0,
            )
            for number, ids in enumerate(ids for _, ids in prompts for _ in range(n))
        ]
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
