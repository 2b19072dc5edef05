"""Traces of requests, as gateways and scheduler see them; services/otel_tracing.py makes spans of them.

`traceparent` is that of W3C Trace Context; empty where nothing is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from scheduler.messages import EmitTokens, Role, Row, SequenceRequest

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


class SequenceTracing(Protocol):
    """Follows sequences in a scheduler. Calls come from the event loop and must not block."""

    def entered(self, request: SequenceRequest, traceparent: str) -> None: ...

    def rows_sent(self, role: Role, rows: Iterable[Row]) -> None: ...

    def emitted(self, emission: EmitTokens) -> None: ...

    def ended(self, sequence_id: int, outcome: str, error: str | None = None) -> None: ...


class NoSpan:
    """Implements RequestSpan."""

    traceparent = ""

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        return


class NoTracing:
    """Implements RequestTracing."""

    def begin(self, traceparent: str, request_id: str) -> NoSpan:
        return _NO_SPAN


class NoSequenceTracing:
    """Implements SequenceTracing."""

    def entered(self, request: SequenceRequest, traceparent: str) -> None:
        return

    def rows_sent(self, role: Role, rows: Iterable[Row]) -> None:
        return

    def emitted(self, emission: EmitTokens) -> None:
        return

    def ended(self, sequence_id: int, outcome: str, error: str | None = None) -> None:
        return


_NO_SPAN = NoSpan()
