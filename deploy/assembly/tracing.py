"""Traces of requests, as the configuration says."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from opentelemetry.trace import Tracer

from spool.deploy.config.observation import TracingSettings
from spool.services.observability.observer import ServiceObserver


def request_tracing(settings: TracingSettings, running: AsyncExitStack) -> Tracer | None:
    """For a gateway; None where tracing is off. Spans that wait are sent when `running` closes."""
    if settings.endpoint is None:
        return None
    from spool.services.observability.otel import tracer_provider

    provider = tracer_provider(settings.endpoint, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return provider.get_tracer("spool.gateway")


def sequence_tracing(settings: TracingSettings, running: AsyncExitStack) -> list[ServiceObserver]:
    """The same for a scheduler; empty where tracing is off."""
    if settings.endpoint is None:
        return []
    from spool.services.observability.otel import OtelSequences, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return [OtelSequences(provider)]
