"""Accepts connections on a listening socket, as many as the limits and the process's descriptors allow."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from spool.services.gateway.settings import ConnectionLimits

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 20.0
"""For TLS, and over gRPC for the first settings of HTTP/2."""

# Accepted before other work of the event loop has its turn.
_AT_ONCE = 16
# Of a listening socket: uvicorn's backlog.
_MOST_WAITING = 2048
_PAUSE_SECONDS = 0.1
_LOG_SECONDS = 60.0
# Descriptors for what else the process opens while all connections are taken.
_RESERVE = 64
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Release = Callable[[], None]
"""Says that a connection is closed."""


class Acceptor:
    """Hands each connection to a protocol that `make` makes, until it is closed; a connection beyond the limits gets
    `refusal` and is closed. Where no descriptor is left, connections wait. Each of both is logged once a minute."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[Release], asyncio.Protocol],
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None,
        refusal: bytes,
    ) -> None:
        self._listening = listening
        self._make = make
        self._total = affordable(limits.total)
        self._per_address = limits.per_address or self._total
        self._handshake_seconds = None if tls is None else HANDSHAKE_SECONDS
        self._tls = tls
        self._refusal = refusal
        self._open = Counter[str]()
        self._starting: set[asyncio.Task[None]] = set()
        self._spoke: dict[str, float] = {}
        self._refused = 0
        listening.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Accepts what waits, which the system resets when the listening socket is closed, and closes that at once."""
        self._loop.remove_reader(self._listening)
        self._accept(_MOST_WAITING)
        self._listening.close()
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        if self._starting:
            await asyncio.wait(self._starting)

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept, _AT_ONCE)

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                connection, peer = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Others are faults of one connection, such as one that the client reset before we took it.
                if error.errno not in _NO_DESCRIPTORS:
                    continue
                self._say("connections wait: %s, %d are open", os.strerror(error.errno), self._open.total())
                self._loop.remove_reader(self._listening)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            self._take(connection, _client_of(connection, peer[0]))

    def _take(self, connection: socket.socket, client: str) -> None:
        taken = self._open.total()
        if taken >= self._total or self._open[client] >= self._per_address:
            self._refused += 1
            self._say("%d connections were refused, %d are open", self._refused, taken)
            _refuse(connection, b"" if self._tls else self._refusal)
            return
        self._open[client] += 1
        task = asyncio.create_task(self._start(connection, client))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket, client: str) -> None:
        release = functools.partial(self._release, client)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                functools.partial(self._make, release),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_seconds,
            )
        except BaseException as error:
            # A handshake that fails: the protocol was never connected, so it does not say that its connection is lost.
            connection.close()
            release()
            if not isinstance(error, OSError):
                raise

    def _release(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def _say(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now >= self._spoke.get(message, -math.inf) + _LOG_SECONDS:
            self._spoke[message] = now
            logger.warning(message, *values)


def affordable(connections: int) -> int:
    """As many of these connections as descriptors are left for, at least one; the process may then open as many as the
    system's administrator allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max(1, min(connections, most - len(os.listdir("/dev/fd")) - _RESERVE))


def _client_of(connection: socket.socket, address: str) -> str:
    """The address, without the part that one IPv6 client chooses freely."""
    if connection.family != socket.AF_INET6:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return address if packed.startswith(bytes(10) + b"\xff\xff") else packed[:8].hex()


def _refuse(connection: socket.socket, answer: bytes) -> None:
    with connection:
        try:
            connection.setblocking(False)
            connection.send(answer)
            # What is unread when a connection is closed makes the system reset it, and the answer is lost.
            connection.shutdown(socket.SHUT_WR)
            connection.recv(65536)
        except OSError:
            return
