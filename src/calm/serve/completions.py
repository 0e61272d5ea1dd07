"""Answers to /v1/completions, whole or as a stream with an event for each chunk."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from calm.errors import ConfigError
from calm.serve.limits import ApiError, Limits, error_body, too_busy
from calm.serve.requests import CompletionRequest, check_limit, check_possible, jobs_of, prompts_of
from calm.serve.scheduler import Event, Job, Scheduler


async def complete(http: Request, asked: CompletionRequest, scheduler: Scheduler, limits: Limits) -> Response:
    check_possible(asked)
    tokenizer = scheduler.writer.tokenizer
    prompts = await run_in_threadpool(prompts_of, asked, tokenizer, limits)  # a long text takes its time
    jobs = jobs_of(asked, prompts, tokenizer, limits)
    try:
        for job in jobs:
            scheduler.check(job.text)
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    draws = sum(job.text.sampling.draws for job in jobs)
    check_limit("the number of candidates of all texts", draws, limits.max_draws)
    check_limit("the number of texts", len(jobs), limits.max_batch + limits.max_queue)
    scheduler.submit(jobs)
    answer = Answer(asked, scheduler, jobs, prompts)
    if asked.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy should collect the chunks
        return StreamingResponse(answer.stream(http), media_type="text/event-stream", headers=headers)
    return await answer.whole(http)


class Answer:
    def __init__(
        self, asked: CompletionRequest, scheduler: Scheduler, jobs: list[Job], prompts: list[tuple[str, list[int]]]
    ):
        self.scheduler, self.jobs, self.events = scheduler, jobs, jobs[0].events
        self.usage_wanted = asked.stream_options is not None and asked.stream_options.include_usage
        repeated = [text for text, _ in prompts for _ in range(asked.n or 1)]
        self.echoed = repeated if asked.echo else [""] * len(jobs)
        self.prompt_tokens = sum(len(ids) for _, ids in prompts)
        self.frame = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }

    async def whole(self, http: Request) -> Response:
        texts = list(self.echoed)
        finishes: list[str | None] = [None] * len(self.jobs)
        async for index, event in self._events(http):
            if event.finish == "error":
                raise ApiError(500, f"the model failed: {event.text}", kind="server_error")
            texts[index] += event.text
            finishes[index] = event.finish
        if set(finishes) == {"timeout"} and not any(job.text.new for job in self.jobs):
            raise too_busy("no place became free within the time of a request")
        choices = [_choice(index, *ended) for index, ended in enumerate(zip(texts, finishes, strict=True))]
        return JSONResponse({**self.frame, "choices": choices, "usage": self._usage()})

    async def stream(self, http: Request) -> AsyncIterator[bytes]:
        """An event for each chunk of each text as it comes; one before, where the prompt is echoed."""
        for index, echoed in enumerate(self.echoed):
            if echoed:
                yield self._event([_choice(index, echoed, None)])
        async for index, event in self._events(http):
            if event.finish == "error":
                yield _sent(error_body(f"the model failed: {event.text}", "server_error"))
                return
            chunk = {"ids": event.ids, "agreement": event.agreement}
            yield self._event([{**_choice(index, event.text, event.finish), "chunk": chunk}])
        if self.usage_wanted:
            yield self._event([], self._usage())
        yield b"data: [DONE]\n\n"

    async def _events(self, http: Request) -> AsyncIterator[tuple[int, Event]]:
        """All that comes for the texts of this answer; who is gone, or asks no further, gives them up."""
        watch = asyncio.create_task(self._watch(http))
        running = len(self.jobs)
        try:
            while running:
                job, event = await self.events.get()
                running -= event.finish is not None
                yield self.jobs.index(job), event
        finally:
            watch.cancel()
            self.scheduler.give_up(self.jobs)

    async def _watch(self, http: Request) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.scheduler.give_up(self.jobs)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        return _sent({**self.frame, "choices": choices, **({"usage": usage} if self.usage_wanted else {})})

    def _usage(self) -> dict[str, int]:
        written = sum(len(job.text.new) for job in self.jobs)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _sent(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
