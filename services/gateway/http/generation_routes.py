"""OpenAI's two routes that generate text: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from pydantic import BaseModel
from starlette.responses import Response

from services.gateway.completion import Completion, CompletionEngine
from services.gateway.errors import request_error
from services.gateway.http.chat_builder import ChatBuilder
from services.gateway.http.completion_builder import CompletionBuilder, usage_shape
from services.gateway.http.event_stream import event_stream
from services.gateway.http.openai_errors import ErrorResponse, error_body
from services.gateway.http.openai_requests import ChatBody, CompletionBody, UsageEvents
from services.gateway.http.openai_responses import ChatChunk, ChatCompletion, CompletionShape
from services.gateway.options import GenerationOptions, Prompt
from services.gateway.token_strings import TokenNumbers

TIMEOUT_HEADER = "x-request-timeout-seconds"
SEED_HEADER = "x-spool-seed"
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "Refused"},
    "5XX": {"model": ErrorResponse, "description": "Failed"},
}
_DONE = "[DONE]"


async def request_scope() -> AsyncIterator[ExitStack]:
    """A stack that is closed when the response is sent, or will never be sent."""
    with ExitStack() as stack:
        yield stack


TimeLimit = Annotated[
    float | None,
    Header(alias=TIMEOUT_HEADER, description="Time for the whole request", gt=0, allow_inf_nan=False),
]
RequestScope = Annotated[ExitStack, Depends(request_scope)]


def generation_router(engine: CompletionEngine) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    numbers = TokenNumbers(engine.tokenizer)

    async def start(
        scope: ExitStack, model: str | None, prompts: Sequence[Prompt], options: GenerationOptions
    ) -> Completion:
        return scope.enter_context(await engine.start(model, prompts, options))

    def stream(builder: ChatBuilder | CompletionBuilder, completion: Completion, usage: UsageEvents) -> Response:
        events = _events(builder, completion, usage, engine)
        return event_stream(events, engine.settings.ping_seconds, _headers(completion))

    @router.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses={200: _streamed("chat.completion.chunk")}
    )
    async def chat(body: ChatBody, scope: RequestScope, time_limit: TimeLimit = None) -> Response:
        options = body.options(time_limit)
        completion = await start(scope, body.model, [body.prompt()], options)
        logprobs = options.top_logprobs is not None
        ids = bool(body.return_token_ids)
        names = numbers if body.return_tokens_as_token_ids else engine.strings
        builder = ChatBuilder(completion, names, logprobs, body.include_reasoning, body.prompt_logprobs, ids)
        if body.stream:
            return stream(builder, completion, body.usage_events)
        return _json(await builder.whole(), completion)

    @router.post("/v1/completions", response_model=CompletionShape, responses={200: _streamed("text_completion")})
    async def complete(body: CompletionBody, scope: RequestScope, time_limit: TimeLimit = None) -> Response:
        options = body.options(time_limit)
        completion = await start(scope, body.model, body.prompt, options)
        echo = bool(body.echo)
        ids = bool(body.return_token_ids)
        names = numbers if body.return_tokens_as_token_ids else engine.strings
        builder = CompletionBuilder(completion, names, body.logprobs, body.prompt_logprobs, echo, ids)
        if body.stream:
            return stream(builder, completion, body.usage_events)
        return _json(await builder.whole(), completion)

    return router


def _json(shape: BaseModel, completion: Completion) -> Response:
    text = shape.model_dump_json(exclude_unset=True)
    return Response(text, headers=_headers(completion), media_type="application/json")


def _headers(completion: Completion) -> dict[str, str]:
    return {SEED_HEADER: str(completion.seed)}


def _streamed(kind: str) -> dict[str, Any]:
    example = f'data: {{"object": "{kind}", ...}}\n\ndata: [DONE]\n\n'
    return {"content": {"text/event-stream": {"schema": {"type": "string"}, "example": example}}}


async def _events(
    builder: ChatBuilder | CompletionBuilder, completion: Completion, usage: UsageEvents, engine: CompletionEngine
) -> AsyncGenerator[str, None]:
    """The events of a stream. The status is sent by then, so an error becomes an event; [DONE] follows it as usual."""

    def event(chunk: ChatChunk | CompletionShape) -> str:
        if usage is UsageEvents.ALL:
            chunk.usage = usage_shape(completion.usage())
        elif usage is UsageEvents.LAST and chunk.usage is None:
            chunk.usage = None  # a field that was set is written, as null
        return chunk.model_dump_json(exclude_unset=True)

    try:
        for chunk in builder.first_chunks():
            yield event(chunk)
        async with aclosing(completion.pieces()) as pieces:
            async for piece in pieces:
                for chunk in builder.chunks(piece):
                    yield event(chunk)
        if usage is not UsageEvents.NONE:
            yield event(builder.usage_chunk())
    except Exception as error:
        known = request_error(error)
        engine.metrics.failed(known.kind)
        yield error_body(known)
    yield _DONE
