"""Replies that are no messages: grpc.aio gives the client None in their place, and logs a traceback."""

from __future__ import annotations

from typing import TypeVar

import grpc
import grpc.aio

T = TypeVar("T")


class UnreadableReplyError(grpc.aio.AioRpcError):
    """A reply cannot be read. Unlike a connection that breaks, this may come again with the same request: DATA_LOSS."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        details = "the reply cannot be read"
        super().__init__(grpc.StatusCode.DATA_LOSS, nothing, nothing, details, debug_error_string=details)


def readable(reply: T | None) -> T:
    """A reply as its call gave it. Raises UnreadableReplyError where the bytes that came are no such message."""
    if reply is None:
        raise UnreadableReplyError
    return reply
