"""Spans of requests, by OpenTelemetry's interface, which does nothing where no tracer is set up.

`traceparent` has the form of W3C Trace Context; it is empty if the request is not traced.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

REQUEST_ID_ATTRIBUTE = "spool.request_id"
"""Of every span."""

_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


def begin_request_span(tracer: Tracer | None, traceparent: str, request_id: str) -> Span:
    """The span `request` below the client's `traceparent`, from the request's arrival to its end."""
    attributes = {REQUEST_ID_ATTRIBUTE: request_id}
    return (tracer or NoOpTracer()).start_span("request", context_of(traceparent), SpanKind.SERVER, attributes)


def end_span(span: Span, attributes: Mapping[str, str | int | float], error: str | None = None) -> None:
    """Later ends have no effect. `error` says why what the span is about failed."""
    if span.is_recording():
        span.set_attributes(attributes)
        if error is not None:
            span.set_status(StatusCode.ERROR, error)
        span.end()


def context_of(traceparent: str) -> Context:
    """For spans below this one; a new trace if there is none, or none that can be read."""
    return _PROPAGATOR.extract({_TRACEPARENT: traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """For spans of other processes that work for the request."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(_TRACEPARENT, "")
