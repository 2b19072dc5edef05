"""Traces of requests, as gateways see them; services/otel_tracing.py makes spans of them.

`traceparent` is that of W3C Trace Context; empty where nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class RequestSpan(Protocol):
    """A request in a gateway, from its arrival to its end."""

    @property
    def traceparent(self) -> str:
        """For what is done for the request elsewhere."""
        ...

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """The first end counts."""


class RequestTracing(Protocol):
    def begin(self, traceparent: str, request_id: str) -> RequestSpan:
        """`traceparent` is the client's."""
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
