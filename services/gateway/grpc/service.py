"""The methods of spool.v1.GenerationService."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1 import generation_pb2_grpc
from spool.services.gateway.choice import Piece
from spool.services.gateway.completion import Completion, CompletionEngine
from spool.services.gateway.errors import ErrorKind, RequestError, note_error, request_error
from spool.services.gateway.grpc.call_start import begin_call
from spool.services.gateway.grpc.errors import abort
from spool.services.gateway.grpc.messages import (
    ChoiceMessages,
    options_from_message,
    prompt_from_message,
    text_from_message,
    usage_message,
)
from spool.services.gateway.replay import replay
from spool.services.gateway.turns import KeyTurns
from spool.services.observability.request_ids import current_account, given_in, noted_figures
from spool.services.rpc.call_guards import refuse_malformed
from spool.services.rpc.channel_options import MAX_MESSAGE_BYTES

# Some clients say "no deadline" by a deadline in the far future.
_LONGEST_SECONDS = 10 * 365 * 86400.0

_LIMIT_METADATA = "spool-max-message-bytes"
# Of gRPC's clients in all languages.
_DEFAULT_LIMIT = 4 * 1024 * 1024
# Of a token with its text, and of a log probability.
_TOKEN_BYTES, _LOGPROB_BYTES = 10, 28
# Of a key, in all of its calls; no more receipts are read. They take few places in the scheduler's queue, and make a
# step about as long as the key's choices do, which can be as many as there are places.
_REPLAYS_AT_ONCE = 4

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Reply = TypeVar("Reply")
_Method = Callable[["GenerationService", Request, grpc.aio.ServicerContext], Awaitable[Reply]]


def _answered(method: _Method[Request, Reply]) -> _Method[Request, Reply]:
    """Makes what a method raises its call's status, and logs a line at its end."""

    @functools.wraps(method)
    async def call(service: GenerationService, request: Request, context: grpc.aio.ServicerContext) -> Reply:
        await begin_call(context)
        began = time.perf_counter()
        try:
            return await method(service, request, context)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except DecodeError as error:
            await refuse_malformed(context, error)
        except Exception as error:  # noqa: BLE001
            known = request_error(error)
            service.engine.metrics.failed(known.kind)
            note_error(known)
            await abort(context, known)
        finally:
            seconds = round(time.perf_counter() - began, 6)
            figures = {"code": _number(context.code()), "seconds": seconds, **noted_figures()}
            logger.info("gRPC %s", method.__name__, extra={"figures": figures})

    return call


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Methods are coroutines that write their answers themselves: a cancelled coroutine frees its sequences at once,
    but a cancelled generator would wait for the interpreter to close it."""

    def __init__(self, engine: CompletionEngine) -> None:
        self.engine = engine
        self._choices = ChoiceMessages(engine.strings)
        self._replays = KeyTurns(None, _REPLAYS_AT_ONCE)

    @_answered
    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        limit = _message_limit(context)
        with await self._start(request, context) as completion:
            _check_size(_expected_bytes(request, completion), limit)
            choices = [pb.GeneratedChoice(index=choice.index) for choice in completion.choices]
            size = 0
            async with aclosing(completion.pieces()) as pieces:
                async for piece in pieces:
                    part, whole = await self._part(piece, completion), choices[piece.index]
                    size += part.ByteSize()
                    _check_size(size, limit)
                    text = whole.text + part.text
                    whole.MergeFrom(part)
                    whole.text = text
            return pb.GenerateResponse(
                id=completion.request_id,
                model=completion.model,
                choices=choices,
                usage=usage_message(completion.usage()),
                system_fingerprint=completion.fingerprint,
            )

    @_answered
    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        limit = _message_limit(context)
        with await self._start(request, context) as completion:
            id_, model = completion.request_id, completion.model
            async with aclosing(completion.pieces()) as pieces:
                async for piece in pieces:
                    part = await self._part(piece, completion)
                    _check_size(part.ByteSize(), limit)
                    known = completion.fingerprint
                    message = pb.GenerateStreamResponse(id=id_, model=model, choice=part, system_fingerprint=known)
                    await context.write(message)
            usage, known = usage_message(completion.usage()), completion.fingerprint
            message = pb.GenerateStreamResponse(id=id_, model=model, usage=usage, system_fingerprint=known)
            await context.write(message)

    @_answered
    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        _, info = await self.engine.model(request.model)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        text = await self.engine.threads.run(text_from_message, request, self.engine.settings.limits)
        tokens = await self.engine.tokenize(text, special, info)
        return pb.TokenizeResponse(token_ids=tokens, max_sequence_length=info.max_sequence_length)

    @_answered
    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        _, info = await self.engine.model(request.model)
        return pb.DetokenizeResponse(text=await self.engine.detokenize("token_ids", request.token_ids, info))

    @_answered
    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        name, info = await self.engine.model(None)
        models = [
            pb.ModelDescription(
                id=each, max_sequence_length=info.max_sequence_length, vocabulary_size=info.vocabulary_size
            )
            for each in self.engine.settings.model_names or (name,)
        ]
        return pb.ListModelsResponse(models=models)

    @_answered
    async def Replay(  # noqa: N802
        self, requests: AsyncIterator[pb.ReplayRequest], context: grpc.aio.ServicerContext
    ) -> None:
        account, writing = current_account(), asyncio.Lock()

        async def one(index: int, receipt: str) -> None:
            reason = await replay(receipt, self.engine)
            async with writing:
                await context.write(pb.ReplayResponse(index=index, equal=reason is None, reason=reason or ""))

        try:
            async with asyncio.TaskGroup() as tasks:
                number = itertools.count()
                async for request in requests:
                    await self._replays.take(account)
                    replaying = tasks.create_task(one(next(number), request.receipt))
                    replaying.add_done_callback(lambda _: self._replays.give_back(account))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _part(self, piece: Piece, completion: Completion) -> pb.GeneratedChoice:
        if piece.prompt_logprobs or piece.finish_reason is not None:
            # Those of a whole prompt may be very many, and a receipt has all tokens.
            return await asyncio.to_thread(self._choices.of, piece, completion)
        return self._choices.of(piece, completion)

    async def _start(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> Completion:
        left = context.time_remaining()
        timeout = None if left is None or left > _LONGEST_SECONDS else max(left, 0.001)
        options = await self.engine.threads.run(options_from_message, request, timeout)
        prompt = await self.engine.threads.run(prompt_from_message, request, self.engine.settings.limits)
        return await self.engine.start(request.model, [prompt], options)


def _message_limit(context: grpc.aio.ServicerContext) -> int:
    given = given_in(context.invocation_metadata(), _LIMIT_METADATA)
    return min(int(given) if re.fullmatch("[0-9]{1,18}", given) else _DEFAULT_LIMIT, MAX_MESSAGE_BYTES)


def _expected_bytes(request: pb.GenerateRequest, completion: Completion) -> int:
    """About as many as the answer has if every choice has all its tokens; a chat without max_tokens may end early."""
    output = request.max_tokens * (_TOKEN_BYTES + _LOGPROB_BYTES * _logprobs(request, "top_logprobs"))
    prompt = len(completion.prompts[0].tokens) * _LOGPROB_BYTES * _logprobs(request, "prompt_logprobs")
    return len(completion.choices) * (output + prompt)


def _logprobs(request: pb.GenerateRequest, field: str) -> int:
    return 1 + getattr(request, field) if request.HasField(field) else 0


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        message = (
            f"the answer may have {size} bytes, the client takes {limit} in one message: use GenerateStream, fewer "
            f"tokens, choices or log probabilities, or raise grpc.max_receive_message_length and send its value as "
            f"metadata, {_LIMIT_METADATA}"
        )
        raise RequestError(ErrorKind.TOO_LARGE, message, code="answer_too_large")


def _number(code: grpc.StatusCode | int | None) -> int:
    """The number of a status code: gRPC gives an enum, a number, or nothing for a call that ends well."""
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else code or 0
