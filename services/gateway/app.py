"""The HTTP application."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from services.backend import Backend
from services.gateway.api_keys import ApiKeys
from services.gateway.completion import CompletionEngine
from services.gateway.dashboard import dashboard_router
from services.gateway.generation_routes import generation_router
from services.gateway.http_errors import install_error_handlers
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import Gate, RequestIds, WholeBodies
from services.gateway.service_routes import DISTRIBUTION, open_router, service_router
from services.gateway.settings import GatewaySettings
from services.gateway.token_strings import TokenStrings
from services.tokenizer import ModelTokenizer
from services.tracing import RequestTracing


def create_app(
    backend: Backend,
    tokenizer: ModelTokenizer,
    settings: GatewaySettings,
    metrics: GatewayMetrics | None = None,
    tracing: RequestTracing | None = None,
) -> FastAPI:
    """`metrics` where the gRPC server of the same gateway counts into the same registry."""
    metrics = metrics or GatewayMetrics()
    engine = CompletionEngine(backend, tokenizer, settings, metrics, tracing)
    strings = TokenStrings(tokenizer)
    app = FastAPI(
        title="Spool",
        version=version(DISTRIBUTION),
        summary="OpenAI's API over batch speculative decoding",
        redirect_slashes=False,
    )
    # For the description alone; the gate before all routes is what checks.
    keys = [Security(HTTPBearer(auto_error=False))] if settings.api_keys else []
    app.include_router(generation_router(engine, strings), dependencies=keys)
    app.include_router(service_router(engine, strings), dependencies=keys)
    app.include_router(open_router(engine))
    app.include_router(dashboard_router(backend))
    install_error_handlers(app, metrics, settings.retry_after_seconds)
    # The last one added is the first that a request passes.
    app.add_middleware(WholeBodies, settings=settings, metrics=metrics)
    app.add_middleware(Gate, keys=ApiKeys(settings.api_keys), settings=settings, metrics=metrics)
    app.add_middleware(RequestIds)
    return app
