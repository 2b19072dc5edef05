"""Connections that clients keep open, to a gateway that is stopped."""

from __future__ import annotations

import asyncio
import json
import socket
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.connections.acceptor import Acceptor, Release
from spool.services.gateway.http.app import create_app
from spool.services.gateway.http.server import HttpServer
from spool.services.gateway.settings import ConnectionLimits, GatewaySettings, ListenSettings
from tests.support.cells import client, running_cell
from tests.support.gateway import save_tokenizer
from tests.support.waiting import LONG, until
from tests.support.watched_engine import WatchedEngine

BODY = {"prompt": "once upon a time", "max_tokens": 6, "ignore_eos": True, "spool": {"speculation": False}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}


def send(connection: HTTPConnection, path: str, body: bytes, missing: int = 0) -> None:
    connection.putrequest("POST", path)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body[: len(body) - missing])


async def answered(connection: HTTPConnection) -> HTTPResponse:
    return await asyncio.to_thread(connection.getresponse)


async def test_a_gateway_that_stops_ends_answers_and_then_connections(tmp_path: Path) -> None:
    tokenizer, watched = save_tokenizer(tmp_path), WatchedEngine()
    digest = tokenizer.vocabulary_digest.hex()
    async with running_cell(tokenizer_digest=digest) as cell, client(cell.resolve) as backend:
        await until(lambda: backend.connected)
        watched.watch(cell.workers[1].executor)
        watched.gate.close()
        engine = CompletionEngine(backend, tokenizer, GatewaySettings())
        server = HttpServer(create_app(engine), ListenSettings(), LONG)
        await server.__aenter__()
        address = server.url.removeprefix("http://")
        idle, whole, streamed, sending = [HTTPConnection(address, timeout=LONG) for _ in range(4)]
        idle.request("GET", "/ping")
        assert b"ok" in await asyncio.to_thread((await answered(idle)).read)
        send(whole, "/v1/completions", json.dumps(BODY).encode())
        # The first event of a chat comes before its tokens.
        send(streamed, "/v1/chat/completions", json.dumps(CHAT).encode())
        events = await answered(streamed)
        send(sending, "/v1/completions", json.dumps(BODY).encode(), missing=1)
        await until(lambda: cell.live_sequences == 2)
        stopped = asyncio.create_task(server.__aexit__(None, None, None))
        assert await asyncio.to_thread(idle.sock.recv, 1) == b""
        with pytest.raises(ConnectionRefusedError):
            HTTPConnection(address).connect()
        sending.send(b"}")
        await until(lambda: cell.live_sequences == 3)
        watched.gate.open()
        for connection in (whole, sending):
            response = await answered(connection)
            assert (response.status, response.headers["connection"]) == (200, "close")
            body = json.loads(await asyncio.to_thread(response.read))
            assert body["usage"]["completion_tokens"] == BODY["max_tokens"]
        assert (await asyncio.to_thread(events.read)).endswith(b"data: [DONE]\n\n")
        await stopped


async def test_connections_that_wait_when_a_gateway_stops_are_accepted() -> None:
    """The system would reset them, although others that share the port could have had them."""

    class Greeting(asyncio.Protocol):
        def __init__(self, release: Release) -> None:
            self.connection_lost = lambda _: release()  # type: ignore[method-assign]

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")
            transport.close()

    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    acceptor = Acceptor(listening, Greeting, ConnectionLimits(), None, b"")
    # The event loop has no turn before the end.
    clients = [socket.create_connection(address) for _ in range(3)]
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    await acceptor.wait_closed()
    for one in clients:
        with one:
            assert await asyncio.to_thread(one.recv, 16) == b"hello"
