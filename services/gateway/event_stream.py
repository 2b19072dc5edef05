"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PING = b": ping\n\n"


class EventStreamResponse(Response):
    """Sends events as they come, and a comment after each `ping_seconds` without one.

    Whatever ends the response, `events` is closed before it returns.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], ping_seconds: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._ping_seconds = ping_seconds
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upcoming: asyncio.Task[bytes] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while True:
                upcoming = upcoming or asyncio.create_task(self._next())
                await asyncio.wait({upcoming}, timeout=self._ping_seconds)
                if not upcoming.done():
                    await self._send(send, _PING)
                    continue
                event = upcoming.result()
                if not event:
                    break
                upcoming = None
                await self._send(send, event)
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes:
        """The next event; nothing at the end."""
        return await anext(self._events, b"")

    async def _send(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})


def data_event(data: str) -> bytes:
    """`data` is one line, as JSON without indentation is."""
    return f"data: {data}\n\n".encode()
