"""Errors as gRPC statuses, with code and field in the trailing metadata."""

from __future__ import annotations

from typing import NoReturn

import grpc
import grpc.aio

from spool.services.gateway.errors import ErrorKind, RequestError

_CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.KEY_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.FAILED: grpc.StatusCode.INTERNAL,
}


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
