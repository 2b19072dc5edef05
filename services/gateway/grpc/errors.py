"""Errors as gRPC statuses, with code and field in the trailing metadata."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from services.gateway.errors import UNEXPECTED, ErrorKind, RequestError, request_error
from services.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.KEY_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.FAILED: grpc.StatusCode.INTERNAL,
}


async def answer(work: Awaitable[T], context: grpc.aio.ServicerContext, metrics: GatewayMetrics) -> T:
    """The result of `work`; an error that `work` raises ends the call with its status."""
    try:
        return await work
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception as error:
        known = request_error(error)
        if known is None:
            logger.exception("a call failed")
            known = UNEXPECTED
        metrics.failed(known.kind)
        await abort(context, known)


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:
    """Ends the call."""
    trailing = [("spool-error-code", error.code), ("spool-error-param", error.param)]
    if error.retry_after is not None:
        trailing.append(("retry-after", str(error.retry_after)))
    metadata = tuple((name, _header(value)) for name, value in trailing if value)
    await context.abort(_CODES.get(error.kind, grpc.StatusCode.INTERNAL), error.message, metadata)


def _header(text: str) -> str:
    """Metadata holds ASCII only."""
    return text.encode("ascii", "backslashreplace").decode()
