"""Connections that clients keep open, to a gateway that is stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.gateway.http.app import create_app
from services.gateway.http.server import HttpServer
from services.gateway.settings import GatewaySettings, ListenSettings
from tests.support.cells import Cell, client, running_cell
from tests.support.gateway import save_tokenizer
from tests.support.waiting import LONG, until
from tests.support.watched_engine import Gate, WatchedEngine

BODY = {"prompt": "once upon a time", "max_tokens": 6, "ignore_eos": True, "spool": {"speculation": False}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}


class Connection:
    """HTTP as it is on the wire."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> Connection:
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(self, head: str, body: bytes = b"", missing: int = 0) -> None:
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        sent = body[: len(body) - missing]
        self.writer.write(f"{head} HTTP/1.1\r\nhost: gateway\r\n{length}\r\n".encode() + sent)

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(LONG):
            return await self.reader.readuntil(end)

    async def rest(self) -> bytes:
        """Raises ConnectionResetError where the server does not end the connection in order."""
        async with asyncio.timeout(LONG):
            return await self.reader.read()


@asynccontextmanager
async def held_gateway(folder: Path) -> AsyncIterator[tuple[Cell, Gate, HttpServer]]:
    """Of a target that waits at the gate."""
    tokenizer, watched = save_tokenizer(folder), WatchedEngine()
    async with (
        running_cell(tokenizer_digest=tokenizer.vocabulary_digest.hex()) as cell,
        client(cell.resolve) as backend,
    ):
        await until(lambda: backend.connected)
        watched.watch(cell.workers[1].executor)
        watched.gate.close()
        server = HttpServer(create_app(backend, tokenizer, GatewaySettings()), ListenSettings(), LONG)
        try:
            yield cell, watched.gate, await server.__aenter__()
        finally:
            watched.gate.open()


async def test_a_gateway_that_stops_ends_answers_and_then_connections(tmp_path: Path) -> None:
    async with held_gateway(tmp_path) as (cell, gate, server):
        url = server.url
        idle, whole, streamed, sending = [await Connection.to(url) for _ in range(4)]
        idle.send("GET /ping")
        assert b"200 OK" in await idle.until(b"}")
        whole.send("POST /v1/completions", json.dumps(BODY).encode())
        # The first event of a chat comes before its tokens.
        streamed.send("POST /v1/chat/completions", json.dumps(CHAT).encode())
        await streamed.until(b"data: {")
        sending.send("POST /v1/completions", json.dumps(BODY).encode(), missing=1)
        await until(lambda: cell.live_sequences == 2)
        stopped = asyncio.create_task(server.__aexit__(None, None, None))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await Connection.to(url)
        sending.writer.write(b"}")
        await until(lambda: cell.live_sequences == 3)
        gate.open()
        for connection in (whole, sending):
            head, _, body = (await connection.rest()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close" in head.lower()
            assert json.loads(body)["usage"]["completion_tokens"] == BODY["max_tokens"]
        assert (await streamed.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await stopped
