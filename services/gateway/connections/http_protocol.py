"""HTTP/1.1 by uvicorn and h11, within limits: what arrives is bounded in bytes, lines, chunks and time."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from http import HTTPStatus

import h11
from starlette.responses import Response
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from spool.scheduler.errors import SpoolError
from spool.services.gateway.connections.acceptor import Release
from spool.services.gateway.errors import ErrorKind, RequestError, invalid
from spool.services.gateway.http.openai_errors import error_response

HEADER_BYTES, HEADER_LINES = 64 * 1024, 128
"""Of a request's line and headers; as many bytes have a chunk's header, and trailers."""
BODY_CHUNKS = 8192
"""Of a body without content-length."""
HEADER_SECONDS = 20.0
"""For the headers, and for the rest of a body that was answered before its end."""
WRITE_SECONDS = 60.0
"""In which a client must take some of its answer."""

_BLANK_LINE = re.compile(rb"\n\r?\n")
_EMPTY_LINES = re.compile(rb"(?:\r?\n)*")
# Of Linux's tcp_info: segments not acknowledged yet, bytes acknowledged ever, and bytes not sent yet.
_TCP_INFO = struct.Struct("@24xI92xQ16xI")
# Parsed before the parser's limits are checked again.
_SLICE_BYTES = 16 * 1024
# A connection that is closed while its client sends is reset, and the client never sees the answer.
_LINGER_SECONDS, _LINGER_BYTES = 1.0, 1024 * 1024
# In which a new connection must send its request when the server stops.
_FIRST_REQUEST_SECONDS = 1.0


class RefusedError(SpoolError):
    """What arrived is no request, or more than a limit."""

    def __init__(self, reason: RequestError) -> None:
        super().__init__(reason.message)
        self.reason = reason


class LimitedConnection(h11.Connection):
    """Its `next_event` raises RefusedError before it parses what is beyond the limits."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER_BYTES)
        self._chunks = 0

    @property
    def head_began(self) -> bool:
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            if not self._skip_empty_lines():
                return h11.NEED_DATA
            self._check_head(self.trailing_data[0])
            self._chunks = 0
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                raise RefusedError(self._too_many("bytes", HEADER_BYTES)) from error
            raise RefusedError(invalid(f"the request is not HTTP/1.1: {error}", None, "invalid_http")) from error
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
            # A proxy that believes the other one takes a part of the body for a request (RFC 9112, section 6.1).
            message = "the request has both content-length and transfer-encoding"
            raise RefusedError(invalid(message, None, "invalid_http"))
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > BODY_CHUNKS:
                message = f"the body has more than {BODY_CHUNKS} chunks, send fewer or content-length"
                raise RefusedError(RequestError(ErrorKind.TOO_LARGE, message, code="too_many_chunks"))
        return event

    def _skip_empty_lines(self) -> bool:
        """Before a request line (RFC 9112, section 2.2). False where nothing else has come yet."""
        unread = self.trailing_data[0]
        empty = _EMPTY_LINES.match(unread)
        size = 0 if empty is None else empty.end()
        if size > HEADER_BYTES:
            raise RefusedError(self._too_many("bytes", HEADER_BYTES))
        if unread and unread[size:] in (b"", b"\r"):
            return False
        self._receive_buffer.maybe_extract_at_most(size)
        return True

    def _check_head(self, unread: bytes) -> None:
        end = _BLANK_LINE.search(unread)
        size = len(unread) if end is None else end.end()
        if size > HEADER_BYTES:
            raise RefusedError(self._too_many("bytes", HEADER_BYTES))
        # The request line ends with one, too, and the blank line.
        lines = unread.count(b"\n", 0, size) - (1 if end is None else 2)
        if lines > HEADER_LINES:
            raise RefusedError(self._too_many("lines", HEADER_LINES))

    def _too_many(self, unit: str, most: int) -> RequestError:
        message = f"the headers have more than {most} {unit}"
        return RequestError(ErrorKind.HEADERS_TOO_LARGE, message, code="headers_too_large")


class HttpProtocol(H11Protocol):
    """One connection, closed after `keep_alive_seconds` without a request. `release` is called once it is lost."""

    def __init__(self, config: Config, state: ServerState, keep_alive_seconds: float, release: Release) -> None:
        super().__init__(config, state, {})
        self.conn: LimitedConnection = LimitedConnection()
        self.timeout_keep_alive = keep_alive_seconds  # type: ignore[assignment]  # call_later takes fractions
        self._release = release
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._refused = False
        self._discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_sender()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        self._release()

    def shutdown(self) -> None:
        if self.cycle is not None:
            super().shutdown()
            return
        # The first request may be on its way.
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(_FIRST_REQUEST_SECONDS, super().shutdown)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if self._refused:
                self._discarded += len(data) - start
                if self._discarded > _LINGER_BYTES:
                    self.transport.abort()
                return
            super().data_received(data[start : start + _SLICE_BYTES])
        self._watch_sender()

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except RefusedError as refusal:
            self._refuse(refusal.reason)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_taker()
        if not self.transport.is_closing():
            self._watch_sender()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taker()

    def timeout_keep_alive_handler(self) -> None:
        if self._untaken():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _should_upgrade(self) -> bool:
        # Clients offer HTTP/2, and take an answer by HTTP/1.1 (RFC 9110, section 7.8).
        return False

    def _watch_taker(self) -> None:
        """Looks from time to time whether the client took some of what waits for it, until nothing waits."""
        if self._stall is None and self._untaken():
            self._stall = self.loop.call_later(WRITE_SECONDS, self._end_stall, self._taken())

    def _end_stall(self, taken: tuple[int, int]) -> None:
        self._stall = None
        if self._untaken() and self._taken() == taken:
            self.transport.abort()
        else:
            self._watch_taker()

    def _untaken(self) -> bool:
        unacknowledged, _, unsent = self._tcp_info()
        # With TLS, the transport does not count what is encrypted already.
        return self.transport.get_write_buffer_size() + unacknowledged + unsent > 0

    def _taken(self) -> tuple[int, int]:
        """Differs from earlier once the client has taken some of what waited then."""
        _, acknowledged, _ = self._tcp_info()
        return acknowledged, self.transport.get_write_buffer_size()

    def _tcp_info(self) -> tuple[int, int, int]:
        connection: socket.socket = self.transport.get_extra_info("socket")
        unacknowledged, acknowledged, unsent = _TCP_INFO.unpack(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        return unacknowledged, acknowledged, unsent

    def _watch_sender(self) -> None:
        """Sets the time for headers that have begun, and for the rest of a body that is answered already."""
        awaited = self.cycle is None or self.conn.head_began
        awaited = awaited or (self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY)
        if awaited and self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._end_waiting)
        elif not awaited and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_waiting(self) -> None:
        if self.conn.head_began and not self._refused:
            message = f"the headers did not arrive within {HEADER_SECONDS:g} s"
            self._refuse(RequestError(ErrorKind.SLOW_BODY, message, code="header_timeout"))
        else:
            self.transport.abort()

    def _refuse(self, reason: RequestError) -> None:
        """Answers, unless a response has begun, and ends the connection."""
        self._refused = True
        self._unset_keepalive_if_required()
        cycle = self.cycle
        began = cycle is not None and cycle.response_started and not cycle.response_complete
        if cycle is not None and not cycle.response_complete:
            # The application reads no more of this request, and its answer goes nowhere.
            cycle.disconnected = True
            cycle.message_event.set()
        if began or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write(closing_answer(error_response(reason)))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


def closing_answer(response: Response) -> bytes:
    """A response as HTTP/1.1 that ends its connection."""
    status = HTTPStatus(response.status_code)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])
