"""Where spans are sent, and which spans exist; tests/integration/served/test_traces_and_logs.py tests their content."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spool.services.observability.otel import tracer_provider
from spool.services.observability.tracing import begin_request_span, end_span
from tests.support.waiting import LONG


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()
        thread.join(LONG)


@pytest.mark.parametrize("name", ["spool", "my-spool"])
def test_a_collector_gets_what_was_traced(
    collector: tuple[str, list[ExportTraceServiceRequest]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url, received = collector
    if name != "spool":
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    provider = tracer_provider(url, 1.0)
    end_span(begin_request_span(provider.get_tracer("spool"), "", "mine"), {"spool.completion_tokens": 5})
    provider.shutdown()
    (resource,) = [one for request in received for one in request.resource_spans]
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == name
    ((span,),) = [one.spans for one in resource.scope_spans]
    assert span.name == "request"
    values = {one.key: one.value for one in span.attributes}
    assert values["spool.request_id"].string_value == "mine"
    assert values["spool.completion_tokens"].int_value == 5
