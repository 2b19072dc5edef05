"""Server-sent events: events and comments are sent, and the source of events is always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from services.gateway.http.event_stream import event_stream
from tests.support.waiting import LONG


class Events:
    """Two events; the second one waits for `go_on`."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.closed = False

    async def read(self) -> AsyncGenerator[str, None]:
        try:
            yield "1"
            await self.go_on.wait()
            yield "2"
        finally:
            self.closed = True


class Client:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pinged = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        if message.get("body") == b": ping\n\n":
            self.pinged.set()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise RuntimeError("a client that stays sends nothing more")

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def test_a_stream_sends_its_events_and_comments() -> None:
    async def run() -> None:
        events, client = Events(), Client()
        response = event_stream(events.read(), 0.01, {"x-more": "1"})
        sending = asyncio.create_task(response({"type": "http", "method": "GET"}, client.receive, client.send))
        await asyncio.wait_for(client.pinged.wait(), LONG)
        events.go_on.set()
        await asyncio.wait_for(sending, LONG)
        assert client.body.replace(b": ping\n\n", b"") == b"data: 1\n\ndata: 2\n\n"
        assert events.closed
        headers = dict(client.messages[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert (headers[b"cache-control"], headers[b"x-more"]) == (b"no-cache", b"1")
        assert client.messages[-1]["more_body"] is False

    asyncio.run(run())


def test_cancelling_closes_the_events_at_once() -> None:
    async def run() -> None:
        events, client = Events(), Client()
        response = event_stream(events.read(), 0.01)
        sending = asyncio.create_task(response({"type": "http", "method": "GET"}, client.receive, client.send))
        await asyncio.wait_for(client.pinged.wait(), LONG)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert events.closed

    asyncio.run(run())
