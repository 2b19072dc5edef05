"""OpenAI's two routes that generate text: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from starlette.responses import Response

from spool.services.gateway.choice import Piece
from spool.services.gateway.completion import Completion, CompletionEngine
from spool.services.gateway.errors import note_error, request_error
from spool.services.gateway.http.body_parsing import parsing_route
from spool.services.gateway.http.chat_builder import ChatBuilder
from spool.services.gateway.http.completion_builder import CompletionBuilder, usage_shape
from spool.services.gateway.http.event_stream import event_stream
from spool.services.gateway.http.openai_errors import ErrorResponse, error_body
from spool.services.gateway.http.openai_requests import ChatBody, CompletionBody, UsageEvents
from spool.services.gateway.http.openai_responses import ChatChunk, ChatCompletion, CompletionShape
from spool.services.gateway.options import Prompt
from spool.services.gateway.token_strings import TokenNumbers, TokenStrings

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
    router = APIRouter(responses=ERRORS, route_class=parsing_route(engine))
    numbers = TokenNumbers(engine.tokenizer)

    async def respond(
        scope: ExitStack,
        body: ChatBody | CompletionBody,
        read_prompts: Callable[[], Sequence[Prompt]],
        time_limit: float | None,
        build: Callable[[Completion, TokenStrings], ChatBuilder | CompletionBuilder],
    ) -> Response:
        # Long conversations, and answers with many log probabilities, take long to change from one form to another.
        prompts, options = await engine.threads.run(lambda: (read_prompts(), body.options(time_limit)))
        completion = scope.enter_context(await engine.start(body.model, prompts, options))
        builder = build(completion, numbers if body.return_tokens_as_token_ids else engine.strings)
        headers = {SEED_HEADER: str(completion.seed)}
        if body.stream:
            events = _events(builder, completion, body.usage_events, engine)
            return event_stream(events, engine.settings.ping_seconds, headers)
        text = await asyncio.to_thread(_whole_text, builder, await completion.whole())
        return Response(text, headers=headers, media_type="application/json")

    @router.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses={200: _streamed("chat.completion.chunk")}
    )
    async def chat(body: ChatBody, scope: RequestScope, time_limit: TimeLimit = None) -> Response:
        return await respond(
            scope,
            body,
            lambda: [body.prompt()],
            time_limit,
            lambda completion, names: ChatBuilder(completion, names, body),
        )

    @router.post("/v1/completions", response_model=CompletionShape, responses={200: _streamed("text_completion")})
    async def complete(body: CompletionBody, scope: RequestScope, time_limit: TimeLimit = None) -> Response:
        return await respond(
            scope,
            body,
            lambda: body.prompt,
            time_limit,
            lambda completion, names: CompletionBuilder(completion, names, body),
        )

    return router


def _whole_text(builder: ChatBuilder | CompletionBuilder, pieces: Sequence[Piece]) -> str:
    """The response, of which each choice is written by itself: no other thread runs while pydantic writes."""
    shape = builder.whole(pieces)
    choices = ",".join(choice.model_dump_json(exclude_unset=True) for choice in shape.choices)
    shape.choices = []
    return shape.model_dump_json(exclude_unset=True).replace('"choices":[]', f'"choices":[{choices}]', 1)


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
    except Exception as error:  # noqa: BLE001
        known = request_error(error)
        engine.metrics.failed(known.kind)
        note_error(known)
        yield error_body(known)
    yield _DONE
