"""What stands before every gRPC method: who may call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from services.gateway.api_keys import ApiKeys
from services.gateway.errors import RequestError
from services.gateway.grpc_request_ids import begin_call
from services.gateway.metrics import GatewayMetrics

_OPEN_PREFIX = "/grpc.health.v1.Health/"

# The types of grpc.aio's handlers are private.
_Handler = Any
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]


class KeyGuard(grpc.aio.ServerInterceptor):
    """Lets calls pass that carry a key, and health checks. Others end before their message is read."""

    def __init__(self, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        given = shown[0] if len(shown) == 1 else None
        try:
            self._keys.check(given.encode() if isinstance(given, str) else given)
        except RequestError as error:
            self._metrics.failed(error.kind)
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        return await continuation(handler_call_details)


def _refusal(error: RequestError) -> Callable[..., Awaitable[None]]:
    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await begin_call(context)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message, _metadata(error))

    return refuse


def _metadata(error: RequestError) -> tuple[tuple[str, str], ...]:
    return (("spool-error-code", error.code),) if error.code else ()
