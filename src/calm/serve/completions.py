"""/v1/completions: one JSON body, or a stream with one event per chunk."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from calm.errors import ConfigError
from calm.generate.engine import TokenLogProb
from calm.generate.text import Detokenizer
from calm.serve.limits import ApiError, Limits, error_body, queue_full
from calm.serve.requests import (
    CompletionRequest,
    GenerationRequest,
    build_sequences,
    check_limit,
    check_supported,
    parse_prompts,
)
from calm.serve.scheduler import Scheduler, SequenceOutput, SequenceState


async def create_completion(
    request: CompletionRequest, raw_request: Request, scheduler: Scheduler, limits: Limits
) -> Response:
    check_supported(request, scheduler.generator.model.head)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens = 0 returns only the prompt; set echo to true", param="max_tokens")
    # long prompts would block the event loop
    prompts = await run_in_threadpool(parse_prompts, request, scheduler.generator.tokenizer, limits)
    return await respond(Completion, request, raw_request, scheduler, limits, prompts, max_tokens)


async def respond(
    response_class: "type[Completion]",
    request: GenerationRequest,
    raw_request: Request,
    scheduler: Scheduler,
    limits: Limits,
    prompts: list[tuple[str, list[int]]],
    max_tokens: int,
) -> Response:
    """Schedule the sequences of a request, and build its response from their outputs."""
    states = build_sequences(request, prompts, max_tokens, scheduler.generator.tokenizer, limits)
    try:
        for state in states:
            scheduler.engine.validate(state.sequence)
            if state.sequence.params.draws > limits.max_candidates:  # the default is above the limit
                state.sequence.params = replace(state.sequence.params, num_candidates=limits.max_candidates)
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    draws = sum(state.sequence.params.draws for state in states)
    check_limit("the number of candidates of all sequences", draws, limits.max_draws)
    check_limit("the number of sequences", len(states), limits.max_batch + limits.max_queue)
    scheduler.add(states)
    completion = response_class(request, scheduler, states, prompts)
    if request.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer the stream
        return StreamingResponse(completion.stream(raw_request), media_type="text/event-stream", headers=headers)
    return await completion.full_response(raw_request)


LogProbs = list[TokenLogProb | None]


class Completion:
    """The response to one request, built from the outputs of its sequences."""

    id_prefix, object, stream_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: GenerationRequest,
        scheduler: Scheduler,
        states: list[SequenceState],
        prompts: list[tuple[str, list[int]]],
    ):
        self.scheduler, self.states, self.outputs = scheduler, states, states[0].outputs
        self.include_usage = request.stream_options is not None and request.stream_options.include_usage
        prompt_texts = [text for text, _ in prompts for _ in range(request.n or 1)]
        self.echo = isinstance(request, CompletionRequest) and bool(request.echo)
        self.prefixes = prompt_texts if self.echo else [""] * len(states)
        self.prompt_tokens = sum(len(ids) for _, ids in prompts)
        self.common_fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.stream_object if request.stream else self.object,
            "created": int(time.time()),
            "model": request.model,
        }

    def first_deltas(self) -> list[dict[str, Any]]:
        """Choices of events before the first chunk: the echoed prompts."""
        return [self.delta(index, prefix, None) for index, prefix in enumerate(self.prefixes) if prefix]

    def choice(
        self, index: int, text: str, finish_reason: str | None, log_probs: LogProbs | None = None
    ) -> dict[str, Any]:
        """A choice of the full response."""
        logprobs = None if log_probs is None else self._logprobs(index, log_probs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, log_probs: LogProbs) -> dict[str, Any]:
        """In OpenAI's format: lists with one element per token."""
        sequence, tokenizer = self.states[index].sequence, self.scheduler.generator.tokenizer
        skipped = 0 if self.echo else len(sequence.prompt)
        ids, log_probs = [*sequence.prompt, *sequence.output_ids][skipped:], log_probs[skipped:]
        detokenizer, offsets = Detokenizer(tokenizer), []
        for token in ids:
            offsets.append(detokenizer.emitted)
            detokenizer.push([token])
        top_logprobs = []
        for token, each in zip(ids, log_probs, strict=True):
            top = None
            if each is not None:  # the first of several tokens with the same text is the most probable one
                top = {tokenizer.decode([other]): value for other, value in reversed(each.top)}
                top.setdefault(tokenizer.decode([token]), each.log_prob)
            top_logprobs.append(top)
        return {
            "tokens": [tokenizer.decode([token]) for token in ids],
            "token_logprobs": [None if each is None else each.log_prob for each in log_probs],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A choice of an event."""
        return self.choice(index, text, finish_reason)

    async def full_response(self, raw_request: Request) -> Response:
        texts = list(self.prefixes)
        finish_reasons: list[str | None] = [None] * len(self.states)
        log_probs: list[LogProbs | None] = [None] * len(self.states)
        async for index, output in self._iterate(raw_request):
            if output.finish_reason == "error":
                raise ApiError(500, f"the model failed: {output.text}", error_type="server_error")
            texts[index] += output.text
            finish_reasons[index], log_probs[index] = output.finish_reason, output.log_probs
        if set(finish_reasons) == {"timeout"} and not any(state.sequence.output_ids for state in self.states):
            timeout = self.scheduler.limits.max_seconds
            raise queue_full(f"the request timed out in the waiting queue after {timeout:g} s; retry later")
        each = zip(range(len(texts)), texts, finish_reasons, log_probs, strict=True)
        # long prompts would block the event loop
        choices = await run_in_threadpool(lambda: [self.choice(*fields) for fields in each])
        return JSONResponse({**self.common_fields, "choices": choices, "usage": self._usage()})

    async def stream(self, raw_request: Request) -> AsyncIterator[bytes]:
        """One event per chunk of each sequence."""
        for delta in self.first_deltas():
            yield self._event([delta])
        async for index, output in self._iterate(raw_request):
            if output.finish_reason == "error":
                yield _sse(error_body(f"the model failed: {output.text}", "server_error"))
                return
            chunk = {"ids": output.token_ids, "agreement": output.agreement}
            yield self._event([{**self.delta(index, output.text, output.finish_reason), "chunk": chunk}])
        if self.include_usage:
            yield self._event([], self._usage())
        yield b"data: [DONE]\n\n"

    async def _iterate(self, raw_request: Request) -> AsyncIterator[tuple[int, SequenceOutput]]:
        """All outputs of the request, with the index of the choice. Aborts its sequences if the client disconnects."""
        watcher = asyncio.create_task(self._abort_on_disconnect(raw_request))
        unfinished = len(self.states)
        try:
            while unfinished:
                state, output = await self.outputs.get()
                unfinished -= output.finish_reason is not None
                yield self.states.index(state), output
        finally:
            watcher.cancel()
            self.scheduler.abort(self.states)

    async def _abort_on_disconnect(self, raw_request: Request) -> None:
        while (await raw_request.receive())["type"] != "http.disconnect":
            pass
        self.scheduler.abort(self.states)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        return _sse({**self.common_fields, "choices": choices, **({"usage": usage} if self.include_usage else {})})

    def _usage(self) -> dict[str, int]:
        completion_tokens = sum(len(state.sequence.output_ids) for state in self.states)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


def _sse(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
