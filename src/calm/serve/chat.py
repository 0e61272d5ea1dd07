"""/v1/chat/completions: messages become a prompt by the model's chat template, or by concatenation without one."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Tokenizer as Backend

from calm.data.tokenizer import Tokenizer
from calm.errors import one_line
from calm.generate.text import TextGenerator
from calm.serve.completions import Completion, respond
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
    logprobs: Literal[False] | None = Field(None, description="Not supported, except for false.")


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
    check_supported(request)
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

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return self._delta(index, {"content": text}, finish_reason)

    def _delta(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
