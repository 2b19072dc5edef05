"""The gateway's own HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spool.services.gateway.connections.acceptor import Acceptor, Release
from spool.services.gateway.connections.http_protocol import HttpProtocol, closing_answer
from spool.services.gateway.errors import ErrorKind, RequestError
from spool.services.gateway.http.openai_errors import error_body, error_response
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.settings import ConnectionLimits, ListenSettings, TlsFiles
from spool.services.rpc.certificates import CertificateFiles, RenewedCertificate, https_context

_STOPPING = RequestError(ErrorKind.UNAVAILABLE, "the server stops, before the answer is complete", code="unavailable")
_FULL = RequestError(ErrorKind.UNAVAILABLE, "too many connections are open", code="too_many_connections")


class HttpServer:
    """Serves an application for as long as the `async with` block lasts; raises OSError for an address in use, and for
    TLS files that cannot be used. A renewed certificate is shown from the next handshake on.

    At the end of the block, responses under way have `drain_seconds` to end; then they end with an error. With
    `share_port` several servers of one user can listen on one address; the kernel spreads connections over them.
    """

    def __init__(
        self,
        app: ASGIApp,
        listen: ListenSettings,
        drain_seconds: float = 10.0,
        *,
        share_port: bool = False,
        limits: ConnectionLimits | None = None,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self._listen = listen
        self._share_port = share_port
        tls = None if listen.tls is None else _tls(listen.tls, metrics)
        self._app = app
        self.drain_seconds = drain_seconds
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            http=HttpProtocol,
            ws="none",
        )
        self._server = _Server(config, limits or ConnectionLimits(), tls)
        self._socket: socket.socket | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Known inside the block."""
        if self._socket is None:
            raise RuntimeError("the HTTP server is not running")
        host, port = self._socket.getsockname()[:2]
        return f"{'https' if self._listen.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def __aenter__(self) -> Self:
        self._socket = _bind(self._listen, self._share_port)
        self._run = asyncio.create_task(self._server.serve([self._socket]))
        started = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._run, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._run.done():
            self._socket.close()
            self._run.result()
            raise RuntimeError("the HTTP server ended at its start")
        return self

    def begin_end(self) -> None:
        """No connection is accepted any more, and the time for draining begins; the end of the block waits for it."""
        self._server.config.timeout_graceful_shutdown = max(1, round(self.drain_seconds))
        self._server.should_exit = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.begin_end()
        if self._run is not None:
            await self._run

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False
        headers_alone = scope["method"] == "HEAD"

        async def send_noting(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                if self._server.should_exit:
                    MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
                if headers_alone:
                    # Whatever the application still sends is left out.
                    await send({"type": "http.response.body", "body": b""})
            elif not headers_alone:
                await send(message)

        if headers_alone:
            scope = {**scope, "method": "GET"}
        if not scope["path"].startswith("/"):
            # As to a proxy: the whole URL (RFC 9112, section 3.2.2).
            scope = {**scope, "path": "/" + scope["path"].partition("://")[2].partition("/")[2]}
        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            if not self._server.should_exit:
                raise
            if not began:
                await error_response(_STOPPING)(scope, receive, send_noting)
            elif scope["path"].startswith("/v1/"):
                events = f"data: {error_body(_STOPPING)}\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": events.encode()})


class _Server(uvicorn.Server):
    """Leaves signals to the process, and sets `ready` once it accepts connections, which it does within `limits`."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._limits = limits
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def make(release: Release) -> HttpProtocol:
            return HttpProtocol(self.config, self.server_state, self._limits.keep_alive_seconds, release)

        refusal = closing_answer(error_response(_FULL))
        self.servers = []
        for listening in sockets or ():
            listening.listen(self.config.backlog)
            # It has what uvicorn uses of asyncio's server.
            self.servers.append(Acceptor(listening, make, self._limits, self._tls, refusal))  # type: ignore[arg-type]
        self.started = True
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _tls(files: TlsFiles, metrics: GatewayMetrics | None) -> ssl.SSLContext:
    certificate = RenewedCertificate(
        "the certificate of auth.tls, for HTTP",
        CertificateFiles(files.certificate, files.key),
        CertificateFiles.ssl_context,
    )
    if metrics is not None:
        metrics.certificates["http"] = certificate
    return https_context(certificate)


def _bind(listen: ListenSettings, share_port: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        where = f"host {listen.host}, port {listen.port}"
        raise OSError(error.errno, f"{where}: cannot be bound: {error.strerror}") from error
    return bound
