"""The gateway's own gRPC server.

Ray Serve's gRPC proxy is not used: it does not always pass on cancellations, and has neither keys nor TLS.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from spool.client.v1 import generation_pb2, generation_pb2_grpc
from spool.services.backend.interface import BackendUnavailableError
from spool.services.gateway.api_keys import ApiKeys
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.connections.acceptor import HANDSHAKE_SECONDS
from spool.services.gateway.grpc.call_start import key_guard
from spool.services.gateway.grpc.service import GenerationService
from spool.services.gateway.settings import ConnectionLimits
from spool.services.rpc.call_guards import MessageGuard
from spool.services.rpc.certificates import CertificateFiles, RenewedCertificate, grpc_credentials
from spool.services.rpc.channel_options import SERVER_OPTIONS
from spool.services.rpc.listening import bind

STREAMS = 1024
"""Calls at a time of one connection; its client waits with others."""
METADATA_BYTES = 16 * 1024
"""Of one call."""
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_RECEIVE_LIMIT = "grpc.max_receive_message_length"
_REUSE_PORT = "grpc.so_reuseport"
# A client without keep-alive pings never hears that a server gave it up while their link was lost.
_SILENCE = {"grpc.keepalive_timeout_ms": 60_000, "grpc.http2.ping_timeout_ms": 60_000}


class GrpcServer:
    """Serves spool.v1.GenerationService, health and reflection for as long as the `async with` block lasts.

    At the end of the block, calls under way have `drain_seconds` to end. Raises OSError for an address that cannot be
    bound or TLS files that cannot be used. A renewed certificate is shown from the next handshake on. With `share_port`
    several servers of one user can listen on one address; the kernel spreads connections over them.
    """

    def __init__(self, engine: CompletionEngine, drain_seconds: float = 10.0, *, share_port: bool = False) -> None:
        self._engine = engine
        self.drain_seconds = drain_seconds
        self._share_port = share_port
        settings = engine.settings
        keys = ApiKeys(settings.api_keys, settings.named_keys, settings.metrics_keys)
        self._guards = [key_guard(keys, engine.metrics), MessageGuard()]
        self._server: grpc.aio.Server | None = None
        self.address = ""
        """The address for clients; known inside the block."""

    async def __aenter__(self) -> Self:
        settings = self._engine.settings
        own = {_RECEIVE_LIMIT: settings.limits.body_bytes, _REUSE_PORT: int(self._share_port)}
        options = [*(dict(SERVER_OPTIONS) | _SILENCE | _connection_options(settings.connections) | own).items()]
        self._server = server = grpc.aio.server(interceptors=self._guards, options=options)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(self._engine), server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self._engine), server)
        reflection.enable_server_reflection([SERVICE, _HEALTH, reflection.SERVICE_NAME], server)
        tls = settings.grpc.tls
        credentials = None
        if tls is not None:
            certificate = RenewedCertificate(
                "the certificate of auth.tls, for gRPC",
                CertificateFiles(tls.certificate, tls.key),
                CertificateFiles.grpc_configuration,
            )
            self._engine.metrics.certificates["grpc"] = certificate
            credentials = grpc_credentials(certificate, mutual=False)
        self.address = bind(server, settings.grpc.host, settings.grpc.port, credentials)
        await server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.stop(self.drain_seconds)


def _connection_options(limits: ConnectionLimits) -> dict[str, int]:
    return {
        "grpc.max_allowed_incoming_connections": limits.grpc_total,
        "grpc.max_concurrent_streams": STREAMS,
        # Between these two gRPC would refuse calls at random.
        "grpc.max_metadata_size": METADATA_BYTES,
        "grpc.absolute_max_metadata_size": METADATA_BYTES,
        "grpc.server_handshake_timeout_ms": round(HANDSHAKE_SECONDS * 1000),
        # Clients connect again for their next call.
        "grpc.max_connection_idle_ms": round(limits.keep_alive_seconds * 1000),
        "grpc.max_connection_age_ms": round(limits.grpc_seconds * 1000),
    }


class _Health(health_pb2_grpc.HealthServicer):
    """Serving while a target worker is up. Watch is not implemented, which clients take for always serving."""

    def __init__(self, engine: CompletionEngine) -> None:
        self._engine = engine

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "the service is not known here")
        try:
            await self._engine.check_ready()
        except BackendUnavailableError:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not implemented, call Check")
