"""Traces of requests, as the configuration says."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from deploy.config.observation import TracingSettings
from services.observability.observer import ServiceObserver
from services.observability.tracing import RequestTracing


def request_tracing(settings: TracingSettings, running: AsyncExitStack) -> RequestTracing | None:
    """For a gateway; None where tracing is off. Spans that wait are sent when `running` closes."""
    if settings.endpoint is None:
        return None
    from services.observability.otel import OtelRequests, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.service_name, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return OtelRequests(provider)


def sequence_tracing(settings: TracingSettings, running: AsyncExitStack) -> list[ServiceObserver]:
    """The same for a scheduler; empty where tracing is off."""
    if settings.endpoint is None:
        return []
    from services.observability.otel import OtelSequences, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.service_name, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return [OtelSequences(provider)]
