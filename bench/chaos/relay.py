"""Stands between a draft worker and whoever speaks to it, and does to the bytes what a network or a liar would."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

import psutil

from spool.protos import draft_pb2

HOST = "127.0.0.2"
_POLL_SECONDS = 0.02
_BYTES = 1 << 16

_Read = Callable[[asyncio.StreamReader], Awaitable[bytes]]


class Way(Enum):
    """What becomes of bytes. Those that are cut off come once they no longer are, as TCP sends them again."""

    OPEN = "open"
    CUT_TO = "nothing reaches it"
    CUT_FROM = "nothing comes from it"
    NOISE = "random bytes come from it"
    WRONG = "tokens at random come from it"
    BROKEN = "messages that break the protocol come from it"


class Relay:
    """Listens on `HOST` wherever this process listens on another address, and passes bytes on, in the way that `file`
    names; without the file, the way is open."""

    def __init__(self, file: Path, vocabulary_size: int) -> None:
        self._file = file
        self._vocabulary_size = vocabulary_size
        self._random = random.Random(1)

    async def start(self, address: str) -> str:
        """`address` is that of the gRPC server, of which the relay's is returned; every other port takes frames."""
        host, _, port = address.rpartition(":")
        listening = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        for number in {one.laddr.port for one in listening}:

            async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = number) -> None:
                there, back = await asyncio.open_connection(host, number)
                read = self._frames if number != int(port) else self._bytes
                await asyncio.gather(self._carry_to(reader, back), self._carry_from(there, writer, read))

            await asyncio.start_server(join, HOST, number)
        return f"{HOST}:{port}"

    @property
    def _way(self) -> Way:
        try:
            return Way[self._file.read_text(encoding="utf-8")]
        except OSError:
            return Way.OPEN

    async def _until_not(self, cut: Way) -> None:
        while self._way is cut:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def _carry_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_BYTES):
                await self._until_not(Way.CUT_TO)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _carry_from(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read: _Read) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while data := await read(reader):
                await self._until_not(Way.CUT_FROM)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _bytes(self, reader: asyncio.StreamReader) -> bytes:
        data = await reader.read(_BYTES)
        return self._random.randbytes(len(data)) if self._way is Way.NOISE else data

    async def _frames(self, reader: asyncio.StreamReader) -> bytes:
        """The next frame, as the way has it."""
        header = await reader.readexactly(4)
        message = await reader.readexactly(int.from_bytes(header, "big"))
        match self._way:
            case Way.NOISE:
                return self._random.randbytes(len(header) + len(message))
            case Way.WRONG:
                message = self._wrong(message)
            case Way.BROKEN:
                message = self._broken(message)
        return len(message).to_bytes(4, "big") + message

    def _wrong(self, message: bytes) -> bytes:
        """As many tokens; now and then the draft says that it knows nothing of a sequence."""
        proposals = draft_pb2.Proposals.FromString(message)
        proposals.tokens[:] = [self._random.randrange(self._vocabulary_size) for _ in proposals.tokens]
        if proposals.sequence_ids and self._random.random() < 0.05:
            proposals.unknown_ids.append(self._random.choice(proposals.sequence_ids))
        return proposals.SerializeToString()

    def _broken(self, message: bytes) -> bytes:
        proposals = draft_pb2.Proposals.FromString(message)
        match self._random.randrange(4):
            case 0:
                proposals.tokens.append(self._vocabulary_size)
            case 1:
                proposals.counts.append(1 << 31)
            case 2:
                proposals.ClearField("digests")
            case _:
                return self._random.randbytes(len(message) or 1)
        return proposals.SerializeToString()
