"""The scheduler's own /metrics over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as WaitedTooLongError
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_READ_SECONDS = 5.0
_FRESH_SECONDS = 0.5
# Each connection has a thread; one more is closed.
_CONNECTIONS = 16


class MetricsEndpoint:
    """Serves what `families` gives on `host`:`port` (0: a free port) for as long as the `async with` block lasts.

    The server and its connections, 16 at most, have threads; a connection that is still open after
    `connection_seconds`, whatever its client does, is closed. `families` is called on the event loop, once for all
    scrapes of half a second. Nobody has to show a key. A port in use is no error: another scheduler may be about to
    leave it, so the endpoint tries again every `retry_seconds`. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = 5.0,
        connection_seconds: float = 10.0,
    ) -> None:
        self._families = families
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._connection_seconds = connection_seconds
        self._host = host
        self._port = port
        self._server: WSGIServer | None = None
        self._attempts: asyncio.Task[None] | None = None

    @property
    def url(self) -> str | None:
        """None while the port is in use by somebody else."""
        if self._server is None:
            return None
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"

    async def __aenter__(self) -> Self:
        trouble = self._start()
        if trouble is not None:
            where = f"{self._host}:{self._port}"
            logger.warning("metrics cannot be served on %s (%s), which is tried again and again", where, trouble)
            self._attempts = asyncio.create_task(self._start_some_time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attempts is not None:
            self._attempts.cancel()
            await asyncio.gather(self._attempts, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            # Takes until the thread looks up, and a scrape under way needs the event loop.
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _start(self) -> OSError | None:
        registry = CollectorRegistry()
        registry.register(_FromLoop(self._families, asyncio.get_running_loop(), self._clock))
        try:
            self._server = _Server(self._host, self._port, self._connection_seconds)
        except OSError as error:
            return error
        self._server.set_app(make_wsgi_app(registry))
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        logger.info("metrics are served at %s", self.url)
        return None

    async def _start_some_time(self) -> None:
        while True:
            await asyncio.sleep(self._retry_seconds)
            if self._start() is None:
                return


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads who has scraped."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, connection_seconds: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connection_seconds = connection_seconds
        # When each open connection has to end.
        self._ends: dict[Any, float] = {}
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._ends) >= _CONNECTIONS:
            self.shutdown_request(request)
            return
        self._ends[request] = time.monotonic() + self._connection_seconds
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """At the end of a connection, also of one whose thread could not be started."""
        self._ends.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second, and after each new connection."""
        self._end_connections(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._end_connections(math.inf)

    def _end_connections(self, now: float) -> None:
        """Those whose time is over: their threads wake up, and close them."""
        for request, end in self._ends.copy().items():
            if end <= now:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape failed", exc_info=True)  # noqa: LOG014  (called while an error is handled)


class _FromLoop(Collector):
    """Asks the event loop from the server's threads, once for all scrapes of half a second."""

    def __init__(
        self, families: Callable[[], Iterable[Family]], loop: asyncio.AbstractEventLoop, clock: Callable[[], float]
    ) -> None:
        self._families = families
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._known: list[Family] = []
        self._read_at = -math.inf

    def collect(self) -> Iterable[Family]:
        with self._lock:
            if self._clock() - self._read_at >= _FRESH_SECONDS:
                read = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
                try:
                    self._known = read.result(_READ_SECONDS)
                except WaitedTooLongError:
                    read.cancel()
                    raise
                self._read_at = self._clock()
            return self._known

    def describe(self) -> Iterable[Family]:
        """Nothing, so that registering does not ask the event loop from within it."""
        return ()

    async def _read(self) -> list[Family]:
        return list(self._families())
