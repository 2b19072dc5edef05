"""What stands before every method of an internal server: strangers and bytes that are no message are refused."""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from services.channel_security import TOKEN_METADATA_KEY, ChannelSecurity

_HEALTH_PREFIX = "/grpc.health.v1.Health/"

# The types of grpc.aio's handlers are private.
_Handler = Any
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets calls pass that carry the token, and health checks. Others end before their message is read."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        if handler_call_details.method.startswith(_HEALTH_PREFIX) or self._knows(handler_call_details):
            return await continuation(handler_call_details)
        # Unknown methods are refused like all others, and none is told from the other.
        return grpc.stream_stream_rpc_method_handler(_refuse_stranger)

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == TOKEN_METADATA_KEY]
        if len(given) != 1:
            return False
        value = given[0] if isinstance(given[0], bytes) else given[0].encode()
        return hmac.compare_digest(value, self._expected)


class MessageGuard(grpc.aio.ServerInterceptor):
    """Answers bytes that are no message with INVALID_ARGUMENT, for methods that take one message.

    grpc.aio would call them UNKNOWN, and log a traceback. Methods that take a stream have to expect DecodeError from
    reading it.
    """

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
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


def guards(security: ChannelSecurity) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of an internal server."""
    return [*([TokenGuard(security.token)] if security.token else []), MessageGuard()]


async def refuse_malformed(context: grpc.aio.ServicerContext, error: DecodeError) -> None:
    """Ends a call whose message could not be read; raises."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {error}")


async def _refuse_stranger(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token of this cell")
