"""OpenAI's two routes that generate text: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from starlette.responses import Response

from services.gateway.completion import Completion, CompletionEngine
from services.gateway.errors import request_error
from services.gateway.http.chat_builder import ChatBuilder
from services.gateway.http.completion_builder import CompletionBuilder, usage_shape
from services.gateway.http.event_stream import event_stream
from services.gateway.http.openai_errors import ErrorResponse, error_body
from services.gateway.http.openai_requests import ChatBody, CompletionBody, UsageEvents
from services.gateway.http.openai_responses import ChatChunk, ChatCompletion, CompletionShape
from services.gateway.options import Prompt
from services.gateway.token_strings import TokenNumbers, TokenStrings

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

    async def respond(
        scope: ExitStack,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        time_limit: float | None,
        build: Callable[[Completion, TokenStrings], ChatBuilder | CompletionBuilder],
    ) -> Response:
        completion = scope.enter_context(await engine.start(body.model, prompts, body.options(time_limit)))
        builder = build(completion, numbers if body.return_tokens_as_token_ids else engine.strings)
        headers = {SEED_HEADER: str(completion.seed)}
        if body.stream:
            events = _events(builder, completion, body.usage_events, engine)
            return event_stream(events, engine.settings.ping_seconds, headers)
        text = (await builder.whole()).model_dump_json(exclude_unset=True)
        return Response(text, headers=headers, media_type="application/json")

    @router.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses={200: _streamed("chat.completion.chunk")}
    )
    async def chat(body: ChatBody, scope: RequestScope, time_limit: TimeLimit = None) -> Response:
        return await respond(
            scope, body, [body.prompt()], time_limit, lambda completion, names: ChatBuilder(completion, names, body)
        )

    @router.post("/v1/completions", response_model=CompletionShape, responses={200: _streamed("text_completion")})
    async def complete(body: CompletionBody, scope: RequestScope, time_limit: TimeLimit = None) -> Response:
        return await respond(
            scope, body, body.prompt, time_limit, lambda completion, names: CompletionBuilder(completion, names, body)
        )

    return router


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
