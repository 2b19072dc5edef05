"""Server-sent events, by sse-starlette."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus

# The library would end all streams when the server starts to shut down; HttpServer gives them time to end.
AppStatus.disable_automatic_graceful_drain()

_SEPARATOR = "\n"
# JSON escapes the other characters at which str.splitlines, and with it some clients, end a line.
_LINE_ENDS = ("\x85", "\u2028", "\u2029")


def event_stream(
    events: AsyncGenerator[str, None], ping_seconds: float, headers: Mapping[str, str] | None = None
) -> EventSourceResponse:
    """Sends each text of `events`, JSON of one line, as an event's data, and a comment every `ping_seconds`.

    Whatever ends the response, `events` is closed before the response returns.
    """
    return EventSourceResponse(
        _escaped(events),
        headers={"cache-control": "no-cache", **(headers or {})},
        ping=ping_seconds,
        ping_message_factory=lambda: ServerSentEvent(comment="ping", sep=_SEPARATOR),
        sep=_SEPARATOR,
    )


async def _escaped(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            if not event.isascii():
                for character in _LINE_ENDS:
                    event = event.replace(character, f"\\u{ord(character):04x}")
            yield event
