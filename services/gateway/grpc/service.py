"""The methods of spool.v1.GenerationService."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import grpc.aio

from services.gateway.completion import Completion, CompletionEngine
from services.gateway.grpc.call_start import begin_call
from services.gateway.grpc.errors import answer
from services.gateway.grpc.messages import (
    ChoiceMessages,
    options_from_message,
    prompt_from_message,
    text_from_message,
    usage_message,
)
from services.gateway.token_strings import TokenStrings
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc

# Some clients say "no deadline" by a deadline in the far future.
_LONGEST_SECONDS = 10 * 365 * 86400.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Methods are coroutines that write their answers themselves: a cancelled coroutine frees its sequences at once,
    but a cancelled generator would wait for the interpreter to close it."""

    def __init__(self, engine: CompletionEngine, strings: TokenStrings) -> None:
        self._engine = engine
        self._choices = ChoiceMessages(strings)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        return await self._answer("Generate", lambda: self._generate(request, context), context)

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await self._answer("GenerateStream", lambda: self._generate_stream(request, context), context)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return await self._answer("Tokenize", lambda: self._tokenize(request), context)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        return await self._answer("Detokenize", lambda: self._detokenize(request), context)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        return await self._answer("ListModels", self._list_models, context)

    async def _answer(self, method: str, work: Callable[[], Awaitable[T]], context: grpc.aio.ServicerContext) -> T:
        await begin_call(context)
        began = time.perf_counter()
        try:
            return await answer(work(), context, self._engine.metrics, self._engine.settings.retry_after_seconds)
        finally:
            figures = {"code": _number(context.code()), "seconds": round(time.perf_counter() - began, 6)}
            logger.info("gRPC %s", method, extra={"figures": figures})

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        with await self._start(request, context) as completion:
            choices = [pb.GeneratedChoice(index=choice.index) for choice in completion.choices]
            async with aclosing(completion.pieces()) as pieces:
                async for piece in pieces:
                    self._choices.extend(choices[piece.index], piece)
            return pb.GenerateResponse(
                id=completion.request_id,
                model=completion.model,
                choices=choices,
                usage=usage_message(completion.usage()),
            )

    async def _generate_stream(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        with await self._start(request, context) as completion:
            id_, model = completion.request_id, completion.model
            async with aclosing(completion.pieces()) as pieces:
                async for piece in pieces:
                    await context.write(pb.GenerateStreamResponse(id=id_, model=model, choice=self._choices.of(piece)))
            usage = usage_message(completion.usage())
            await context.write(pb.GenerateStreamResponse(id=id_, model=model, usage=usage))

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        _, info = await self._engine.model(request.model)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        tokens = await self._engine.tokenize(text_from_message(request), special)
        return pb.TokenizeResponse(token_ids=tokens, max_sequence_length=info.max_sequence_length)

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        _, info = await self._engine.model(request.model)
        return pb.DetokenizeResponse(text=await self._engine.detokenize("token_ids", request.token_ids, info))

    async def _list_models(self) -> pb.ListModelsResponse:
        name, info = await self._engine.model(None)
        models = [
            pb.ModelDescription(
                id=each, max_sequence_length=info.max_sequence_length, vocabulary_size=info.vocabulary_size
            )
            for each in self._engine.settings.model_names or (name,)
        ]
        return pb.ListModelsResponse(models=models)

    async def _start(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> Completion:
        left = context.time_remaining()
        timeout = None if left is None or left > _LONGEST_SECONDS else max(left, 0.001)
        options = options_from_message(request, timeout)
        return await self._engine.start(request.model, [prompt_from_message(request)], options)


def _number(code: grpc.StatusCode | int | None) -> int:
    """The number of a status code: gRPC gives an enum, a number, or nothing for a call that ends well."""
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else code or 0
