"""Interceptors of gRPC servers: they refuse strangers, and bytes that are no message, before a method runs."""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from spool.services.rpc.channel_security import TOKEN_METADATA_KEY, ChannelSecurity

_HEALTH_PREFIX = "/grpc.health.v1.Health/"

# The types of grpc.aio's handlers are private.
_Handler = Any
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]


# Answers a call in place of its own handler, with an error.
Refusal = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]


class CallerGuard(grpc.aio.ServerInterceptor):
    """Decides by a call's `authorization` metadata whether the call may pass; health checks always may.

    A refused call ends before its message is read, and whether or not its method exists.
    """

    def __init__(self, refusal: Callable[[Sequence[bytes]], Refusal | None]) -> None:
        """`refusal` says how to refuse a call with these values of the metadata; None where the call may pass."""
        self._refusal = refusal

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        if not handler_call_details.method.startswith(_HEALTH_PREFIX):
            refuse = self._refusal(_authorization(handler_call_details))
            if refuse is not None:
                return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(handler_call_details)


def _authorization(details: grpc.HandlerCallDetails) -> list[bytes]:
    given = [value for key, value in details.invocation_metadata or () if key == TOKEN_METADATA_KEY]
    return [value if isinstance(value, bytes) else value.encode() for value in given]


class MessageGuard(grpc.aio.ServerInterceptor):
    """Answers bytes that are no message with INVALID_ARGUMENT. grpc.aio alone would answer UNKNOWN and log a traceback.

    A method that takes a stream gets DecodeError while it reads the stream, and lets it pass.
    """

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.request_streaming:
            return _refusing_malformed(handler)
        parse, serialize = handler.request_deserializer, handler.response_serializer

        async def parsed(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return parse(raw)
            except DecodeError as error:
                await refuse_malformed(context, error)

        async def answer(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            return await handler.unary_unary(await parsed(raw, context), context)

        async def write(raw: bytes, context: grpc.aio.ServicerContext) -> None:
            await handler.unary_stream(await parsed(raw, context), context)

        async def stream(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for reply in handler.unary_stream(await parsed(raw, context), context):
                yield reply

        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(answer, response_serializer=serialize)
        # Some handlers write their replies, others yield them.
        replies = write if inspect.iscoroutinefunction(handler.unary_stream) else stream
        return grpc.unary_stream_rpc_method_handler(replies, response_serializer=serialize)


def _refusing_malformed(handler: _Handler) -> _Handler:
    """Of a method that takes a stream."""
    parse, serialize = handler.request_deserializer, handler.response_serializer

    async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        try:
            return await (handler.stream_unary or handler.stream_stream)(requests, context)
        except DecodeError as error:
            await refuse_malformed(context, error)

    async def stream(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with aclosing(handler.stream_stream(requests, context)) as replies:
                async for reply in replies:
                    yield reply
        except DecodeError as error:
            await refuse_malformed(context, error)

    if not handler.response_streaming:
        return grpc.stream_unary_rpc_method_handler(answer, parse, serialize)
    replies = answer if inspect.iscoroutinefunction(handler.stream_stream) else stream
    return grpc.stream_stream_rpc_method_handler(replies, parse, serialize)


def guards(security: ChannelSecurity) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of an internal server: only calls that carry its token pass."""
    expected = f"Bearer {security.token}".encode()

    def refusal(authorization: Sequence[bytes]) -> Refusal | None:
        known = len(authorization) == 1 and hmac.compare_digest(authorization[0], expected)
        return None if known else _refuse_stranger

    return [*([CallerGuard(refusal)] if security.token else []), MessageGuard()]


async def refuse_malformed(context: grpc.aio.ServicerContext, error: DecodeError) -> NoReturn:
    """Ends a call whose message cannot be read."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {error}")


async def _refuse_stranger(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token of this cell")
