"""Where a draft worker takes the connections for frames of targets that gRPC has let in."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from google.protobuf.message import DecodeError

from spool.protos import draft_pb2
from spool.services.worker.drafting.frames import SECRET_BYTES, WELCOME, size_of
from spool.services.worker.drafting.limits import MAX_STREAMS, BadMessageError
from spool.services.worker.drafting.target_stream import TargetStream

_SECRET_SECONDS = 5.0
_CLOSING_SECONDS = 5.0


class FrameListener:
    """A connection is its stream's once it has sent the stream's secret, which counts once; any other is closed. Of
    those that have sent none yet there are at most `MAX_STREAMS`: whoever comes then is spoken to by gRPC alone."""

    def __init__(self, read: Callable[[AsyncIterator[draft_pb2.DraftRequest], TargetStream], Awaitable[None]]) -> None:
        """`read` takes in the requests of a stream until they end."""
        self._read = read
        self._server: asyncio.Server | None = None
        self._offered: dict[bytes, TargetStream] = {}
        self._unknown = 0
        self._port = 0

    async def start(self, host: str) -> None:
        """Raises OSError."""
        self._server = await asyncio.start_server(self._connected, host, 0)
        self._port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def offer(self, stream: TargetStream) -> str:
        """What the target must know to connect."""
        secret = secrets.token_bytes(SECRET_BYTES)
        self._offered[secret] = stream
        return f"{self._port} {secret.hex()}"

    def withdraw(self, stream: TargetStream) -> None:
        """The stream has ended. Its target may read its last answers for a while."""
        self._offered = {secret: one for secret, one in self._offered.items() if one is not stream}
        if stream.frames is not None:
            asyncio.get_running_loop().call_later(_CLOSING_SECONDS, stream.frames.transport.abort)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            stream = await self._stream_of(reader)
            if stream is not None:
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                writer.write(WELCOME)
                stream.frames = writer
                await self._read(_requests_of(reader), stream)
                return
        writer.close()

    async def _stream_of(self, reader: asyncio.StreamReader) -> TargetStream | None:
        """Raises TimeoutError and IncompleteReadError where no secret comes."""
        if self._unknown >= MAX_STREAMS:
            return None
        self._unknown += 1
        try:
            async with asyncio.timeout(_SECRET_SECONDS):
                return self._offered.pop(await reader.readexactly(SECRET_BYTES), None)
        finally:
            self._unknown -= 1


async def _requests_of(reader: asyncio.StreamReader) -> AsyncIterator[draft_pb2.DraftRequest]:
    """Raises BadMessageError."""
    try:
        while True:
            data = await reader.readexactly(size_of(await reader.readexactly(4)))
            yield draft_pb2.DraftRequest.FromString(data)
    except (OSError, asyncio.IncompleteReadError):
        raise BadMessageError("the connection of the target's frames has ended", "UNAVAILABLE") from None
    except DecodeError as error:
        raise BadMessageError(f"the message cannot be read: {error}") from error
