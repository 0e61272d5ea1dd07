"""/v1/chat/completions: messages become a prompt by the model's chat template, or by concatenation without one."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Tokenizer as Backend

from calm.data.tokenizer import Tokenizer
from calm.errors import one_line
from calm.generate.text import REPLACEMENT, TextGenerator
from calm.serve.completions import Completion, LogProbs, respond
from calm.serve.limits import ApiError, Limits
from calm.serve.requests import FailFast, GenerationRequest, Object, String, check_length, check_supported
from calm.serve.scheduler import Scheduler

MAX_MESSAGES = 1000  # per request
MAX_PARTS = 100  # per message
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # that a template may use


class TextPart(Object):
    type: Literal["text"]
    text: String


class Message(Object):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        String | Annotated[list[TextPart], FailFast],
        BeforeValidator(lambda value: check_length(value, MAX_PARTS, "parts")),
    ] = Field(description="A string, or a list of text parts.")
    name: String | None = None
    refusal: None = Field(None, description="Accepted, so that a response can be sent back.")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "bundled", "messages": [{"role": "user", "content": "And God said"}], "max_tokens": 40}
        },
    )

    messages: Annotated[list[Message], BeforeValidator(lambda value: check_length(value, MAX_MESSAGES, "messages"))] = (
        Field(min_length=1, description="The conversation so far.")
    )
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Maximum number of new tokens per choice. Defaults to what the model and the server allow."
    )
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Older name of max_completion_tokens, which has precedence."
    )
    logprobs: StrictBool | None = Field(
        None,
        description="Return the log-probabilities of the tokens. Only for models with token probabilities, and without "
        "stream.",
    )
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = Field(
        None, description="With logprobs: also those of this many of the most probable tokens."
    )

    @property
    def num_log_probs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class ChatTemplate:
    """Renders messages as the prompt of a model.

    The template is the model directory's chat_template.jinja, or the `chat_template` of its tokenizer_config.json.
    Without one the prompt is the concatenation of the messages' contents.
    """

    def __init__(self, generator: TextGenerator):
        self.tokenizer: Tokenizer = generator.tokenizer
        file, config_file = (generator.directory / name for name in ("chat_template.jinja", "tokenizer_config.json"))
        config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
        self.template = file.read_text("utf-8") if file.exists() else _default_template(config.get("chat_template"))
        special_tokens = {name: config.get(name) for name in SPECIAL_TOKENS}
        self.special_tokens: dict[str, Any] = {
            name: token["content"] if isinstance(token, dict) else token for name, token in special_tokens.items()
        }
        self.backend = Backend.from_str(self.tokenizer.content)  # encodes the special tokens of the template as such

    def prompt(self, messages: list[Message]) -> tuple[str, list[int]]:
        """The text and the token ids of the prompt for the assistant's next message."""
        if self.template is None:
            text = "".join(message.text for message in messages)
            return text, self.tokenizer.encode(text)
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [{**message.model_dump(exclude_none=True), "content": message.text} for message in messages]
        try:
            (text,), _ = render_jinja_template(
                [conversation], chat_template=self.template, add_generation_prompt=True, **self.special_tokens
            )  # pyright: ignore[reportAssignmentType]
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(400, f"the model's chat template fails: {one_line(error)}", param="messages") from error
        return text, self.backend.encode(text, add_special_tokens=False).ids


def _default_template(template: Any) -> str | None:
    """The template itself, or the one named default of a list of named templates."""
    if isinstance(template, list):
        return next((each["template"] for each in template if each["name"] == "default"), None)
    return template


async def create_chat_completion(
    request: ChatCompletionRequest, raw_request: Request, scheduler: Scheduler, limits: Limits, template: ChatTemplate
) -> Response:
    check_supported(request, scheduler.generator.model.head)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs; set logprobs to true", param="top_logprobs")
    text, ids = await run_in_threadpool(template.prompt, request.messages)
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is None:
        max_tokens = max(1, int(min(scheduler.engine.max_new_tokens(ids), limits.max_new_tokens)))
    return await respond(ChatCompletion, request, raw_request, scheduler, limits, [(text, ids)], max_tokens)


class ChatCompletion(Completion):
    """The response to one chat request."""

    id_prefix, object, stream_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_deltas(self) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""}, None) for index in range(len(self.states))]

    def choice(
        self, index: int, text: str, finish_reason: str | None, log_probs: LogProbs | None = None
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        logprobs = None if log_probs is None else self._logprobs(index, log_probs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, log_probs: LogProbs) -> dict[str, Any]:
        """In OpenAI's format: a list of tokens."""
        sequence, decode = self.states[index].sequence, self.scheduler.generator.tokenizer.decode

        def token(number: int, log_prob: float) -> dict[str, Any]:
            text = decode([number])
            return {"token": text, "logprob": log_prob, "bytes": None if REPLACEMENT in text else list(text.encode())}

        pairs = zip(sequence.output_ids, log_probs[len(sequence.prompt) :], strict=True)
        content = [
            {**token(number, each.log_prob), "top_logprobs": [token(*other) for other in each.top]}
            for number, each in pairs
            if each is not None
        ]
        return {"content": content, "refusal": None}

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return self._delta(index, {"content": text}, finish_reason)

    def _delta(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
