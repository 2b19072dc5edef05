"""Tracing in a replica, as the configuration says. OpenTelemetry is imported only where it is on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from deploy.configuration.observation import TracingSettings
from services.service_observer import ServiceObserver
from services.tracing import RequestTracing


def request_tracing(settings: TracingSettings, running: AsyncExitStack) -> RequestTracing | None:
    """For a gateway; None where tracing is off. Spans that wait are sent when `running` closes."""
    if settings.endpoint is None:
        return None
    from services.otel_tracing import OtelRequests, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.service_name, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return OtelRequests(provider)


def sequence_tracing(settings: TracingSettings, running: AsyncExitStack) -> list[ServiceObserver]:
    """The same for a scheduler; empty where tracing is off."""
    if settings.endpoint is None:
        return []
    from services.otel_tracing import OtelSequences, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.service_name, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return [OtelSequences(provider)]
