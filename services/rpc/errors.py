"""Errors of gRPC calls, in words for logs, statuses and other errors."""

from __future__ import annotations

import grpc
import grpc.aio


def rpc_details(error: grpc.aio.AioRpcError | grpc.Call) -> str:
    """What the other side said of the error, on one line; empty where it said nothing."""
    return " ".join((error.details() or "").split())


def rpc_reason(error: grpc.aio.AioRpcError | grpc.Call) -> str:
    """The name of the status and, where there are any, the details: `UNAVAILABLE: connection refused`."""
    details = rpc_details(error)
    return f"{error.code().name}: {details}" if details else error.code().name


def reason_of(error: Exception) -> str:
    """`rpc_reason` of an error of gRPC; the type and the message of any other."""
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return rpc_reason(error)
    return f"{type(error).__name__}: {error}"
