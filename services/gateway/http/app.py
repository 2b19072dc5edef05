"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from spool.services.gateway.api_keys import ApiKeys
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.dashboard.routes import dashboard_router
from spool.services.gateway.http.generation_routes import SEED_HEADER, generation_router
from spool.services.gateway.http.middleware import BodyReader, KeyGate, RequestIds
from spool.services.gateway.http.openai_errors import install_error_handlers
from spool.services.gateway.http.service_routes import open_router, service_router
from spool.services.observability.request_ids import REQUEST_ID
from spool.services.rpc.protocol_version import SOFTWARE_VERSION


def create_app(engine: CompletionEngine) -> ASGIApp:
    settings, metrics = engine.settings, engine.metrics
    app = FastAPI(
        title="Spool",
        version=SOFTWARE_VERSION,
        summary="OpenAI's API over batch speculative decoding",
        redirect_slashes=False,
    )
    # For the OpenAPI description only: KeyGate checks the keys, before all routes.
    keys = [Security(HTTPBearer(auto_error=False))] if settings.keys_required else []
    app.include_router(generation_router(engine), dependencies=keys)
    app.include_router(service_router(engine), dependencies=keys)
    app.include_router(open_router(engine))
    app.include_router(dashboard_router(engine.backend))
    install_error_handlers(app, metrics)
    # A request passes the middleware that was added last first.
    body_bytes, held_bytes = settings.limits.body_bytes, settings.connections.held_body_bytes
    app.add_middleware(BodyReader, body_bytes=body_bytes, held_bytes=held_bytes, metrics=metrics)
    api_keys = ApiKeys(settings.api_keys, settings.named_keys, settings.metrics_keys)
    app.add_middleware(KeyGate, keys=api_keys, metrics=metrics, known_hosts=settings.known_hosts)
    # The framework answers unexpected errors outside the middleware that it adds.
    outer: ASGIApp = app
    if settings.allowed_origins:
        # Before KeyGate: a browser asks without the key whether it may send it.
        outer = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=(REQUEST_ID, SEED_HEADER, "retry-after"),
        )
    return RequestIds(outer)
