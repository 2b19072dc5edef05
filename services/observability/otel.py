"""How spans are exported, and those of schedulers. Imported only if tracing is on, since the SDK takes long to load."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, Tracer, set_span_in_context

from spool.scheduler.messages import EmitTokens, SendStep, SequenceRequest
from spool.services.observability.observer import SequenceEnd, ServiceObserver
from spool.services.observability.tracing import REQUEST_ID_ATTRIBUTE, context_of, end_span

CONSOLE = "console"
"""The endpoint that means standard error, a span on each line."""


def span_exporter(endpoint: str) -> SpanExporter:
    """Exports by OTLP over HTTP to the URL of a collector, or to standard error for CONSOLE."""
    if endpoint == CONSOLE:
        return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: f"{span.to_json(indent=None)}\n")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint)


def tracer_provider(endpoint: str, sample_ratio: float) -> TracerProvider:
    """`shutdown` of the provider sends the spans that wait.

    The client's decision to sample is followed; of requests without one, `sample_ratio` are sampled. The service is
    `spool`, unless $OTEL_SERVICE_NAME says otherwise.
    """
    sampler = ParentBased(TraceIdRatioBased(sample_ratio))
    resource = Resource.create({SERVICE_NAME: os.environ.get(OTEL_SERVICE_NAME, "spool")})
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(span_exporter(endpoint)))
    return provider


@dataclass(slots=True)
class _Sequence:
    """The span `sequence` of a live sequence, and the span of its current phase."""

    span: Span
    phase: Span
    named: dict[str, str]
    """An attribute of each span: the request's id."""
    resumed: bool
    opened: bool = False
    begun: bool = False
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recoveries: int = 0


class OtelSequences(ServiceObserver):
    """Each sequence is a span `sequence` below the request's span, with a span for each phase below it.

    The phases are `queue`, `prefill` and `decode`. When a step opens the sequence at a target again, `recovery` lasts
    until its next tokens, and `decode` follows again.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("spool.scheduler")
        self._live: dict[int, _Sequence] = {}

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        if not traceparent:
            return
        resumed = len(request.committed_output)
        named = {REQUEST_ID_ATTRIBUTE: request_id}
        counts = {"spool.prompt_tokens": len(request.prompt), "spool.resumed_tokens": resumed}
        span = self._tracer.start_span("sequence", context_of(traceparent), attributes={**named, **counts})
        if span.is_recording():
            phase = _phase(self._tracer, span, "queue", named)
            self._live[request.sequence_id] = _Sequence(span, phase, named, resumed > 0)

    def step_sent(self, step: SendStep, now: float) -> None:
        for row in step.rows:
            if row.opening is not None and (live := self._live.get(row.sequence_id)):
                again = live.opened or live.resumed
                live.opened = True
                live.recoveries += again
                self._enter_phase(live, "recovery" if again else "prefill")

    def tokens_emitted(self, emissions: Sequence[EmitTokens]) -> None:
        for emission in emissions:
            live = self._live.get(emission.sequence_id)
            if live is not None:
                self._count(live, emission)

    def _count(self, live: _Sequence, emission: EmitTokens) -> None:
        live.tokens += len(emission.tokens)
        live.rounds += live.begun
        live.begun = True
        live.drafted += emission.drafted
        live.accepted += emission.accepted
        if live.phase.name != "decode":  # type: ignore[attr-defined]  # recording spans have names
            self._enter_phase(live, "decode")

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        live = self._live.pop(sequence_id, None)
        if live is None:
            return
        live.phase.end()
        counts: dict[str, str | int | float] = {
            "spool.outcome": end.outcome,
            "spool.completion_tokens": live.tokens,
            "spool.rounds": live.rounds,
            "spool.drafted": live.drafted,
            "spool.accepted": live.accepted,
            "spool.recoveries": live.recoveries,
        }
        end_span(live.span, counts, end.error)

    def _enter_phase(self, live: _Sequence, name: str) -> None:
        live.phase.end()
        live.phase = _phase(self._tracer, live.span, name, live.named)


def _phase(tracer: Tracer, parent: Span, name: str, attributes: dict[str, str]) -> Span:
    return tracer.start_span(name, set_span_in_context(parent, Context()), attributes=attributes)
