"""A gateway over HTTP and gRPC, beside a cell and over a session with its scheduler, as in service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.grpc.server import GrpcServer
from services.gateway.http.app import create_app
from services.gateway.http.server import HttpServer
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings, ListenSettings
from services.observability.tracing import RequestTracing
from services.text.tokenizer import ModelTokenizer
from tests.support.cells import CLIENT, Cell, SchedulerClient
from tests.support.gateway import MODEL, Served
from tests.support.waiting import until


@asynccontextmanager
async def running_gateway(
    cell: Cell,
    tokenizer: ModelTokenizer,
    settings: GatewaySettings | None = None,
    tracing: RequestTracing | None = None,
) -> AsyncIterator[Served]:
    free = {"http": ListenSettings(), "grpc": ListenSettings()}
    settings = (settings or GatewaySettings()).model_copy(update=free)
    metrics = GatewayMetrics(MODEL)
    async with (
        SchedulerClient([cell.resolve], options=CLIENT, gateway_id="gateway", listener=metrics) as backend,
        HttpServer(create_app(backend, tokenizer, settings, metrics, tracing), settings.http, drain_seconds=1) as http,
        GrpcServer(backend, tokenizer, settings, metrics, drain_seconds=1, tracing=tracing) as grpc,
    ):
        await until(lambda: backend.connected)
        yield Served(http.url, grpc.address)
