"""What gateways need of tracing; services/observability/otel.py implements it with OpenTelemetry.

`traceparent` has the form of W3C Trace Context; it is empty if the request is not traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class RequestSpan(Protocol):
    """The span of a request in a gateway, from the request's arrival to its end."""

    @property
    def traceparent(self) -> str:
        """The parent for spans of other processes that work for the request."""
        ...

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """Ends the span; later calls have no effect. `error` says why the request failed."""


class RequestTracing(Protocol):
    def begin(self, traceparent: str, request_id: str) -> RequestSpan:
        """Starts the span of a request below the client's `traceparent`."""
        ...


class NoSpan:
    """Implements RequestSpan."""

    traceparent = ""

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        return


class NoTracing:
    """Implements RequestTracing."""

    def begin(self, traceparent: str, request_id: str) -> NoSpan:
        return _NO_SPAN


_NO_SPAN = NoSpan()
