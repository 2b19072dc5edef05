"""A request is one trace below the client's span, in gateway and scheduler, with the counts that the client saw; and
every log line of a request carries its id."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from spool.scheduler.messages import Role
from spool.services.observability.logs import LogFormat, install_logs
from spool.services.observability.otel import CONSOLE, OtelSequences, tracer_provider
from tests.support.cells import running_cell
from tests.support.clients import Answer, clients_of
from tests.support.gateway import running_gateway, save_tokenizer
from tests.support.logs import restored_logger
from tests.support.stand_in_worker import ROW_FAILS
from tests.support.waiting import until
from tests.support.watched_engine import WatchedEngine

CLIENT_SPAN = "b7ad6b7169203331"
HTTP, GRPC, FAILING, GRPC_FAILING, UNSAMPLED, LOST, WRONG, WRONG_HTTP = (digit * 32 for digit in "12345678")
NO_TRACE = "no-trace"
BOTH_SIDES = {"spool.services.gateway.completion", "spool.services.scheduler.session"}


@dataclass
class Observed:
    spans: Sequence[ReadableSpan] = ()
    lines: list[dict[str, Any]] = field(default_factory=list)
    usages: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Output, drafted and accepted tokens, by trace."""
    returned: dict[str, str] = field(default_factory=dict)
    """Request ids of the responses, by those of the requests, which are their traces."""

    def spans_of(self, trace: str) -> list[ReadableSpan]:
        return [span for span in self.spans if f"{span.context.trace_id:032x}" == trace]

    def span(self, trace: str, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans_of(trace) if span.name == name]
        return span

    def lines_of(self, trace: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("request_id") == trace]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    stream, observed = io.StringIO(), Observed()
    with restored_logger():
        install_logs(LogFormat.JSON, logging.DEBUG, stream)
        asyncio.run(drive(tmp_path_factory.mktemp("tokenizer"), observed))
    observed.lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return observed


async def drive(folder: Path, observed: Observed) -> None:
    tokenizer, exporter, provider = save_tokenizer(folder), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    digest = tokenizer.vocabulary_digest.hex()
    async with (
        running_cell(targets=2, observers=[OtelSequences(provider)], tokenizer_digest=digest) as cell,
        running_gateway(cell, tokenizer, tracing=provider.get_tracer("gateway")) as served,
        clients_of(served) as clients,
    ):

        def headers(trace: str) -> dict[str, str]:
            flag = "00" if trace is UNSAMPLED else "01"
            parent = {} if trace is NO_TRACE else {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flag}"}
            return {"x-request-id": trace, **parent}

        async def asked(ask: Any, trace: str, prompt: list[int], **fields: Any) -> int | grpc.StatusCode:
            answer: Answer = await ask(
                prompt, headers=headers(trace), **{"max_tokens": 40, "ignore_eos": True, **fields}
            )
            observed.returned[trace] = answer.headers["x-request-id"]
            observed.usages[trace] = answer.usage[1:4]
            return answer.status

        assert await asked(clients.over_http, HTTP, [20, 21], n=3) == 200
        assert await asked(clients.over_grpc, GRPC, [20, 22]) is grpc.StatusCode.OK
        assert await asked(clients.over_http, FAILING, [20, ROW_FAILS]) == 500
        assert await asked(clients.over_grpc, GRPC_FAILING, [20, ROW_FAILS]) is grpc.StatusCode.INTERNAL
        assert await asked(clients.over_grpc, WRONG, [20], temperature=-1.0) is grpc.StatusCode.INVALID_ARGUMENT
        assert await asked(clients.over_http, WRONG_HTTP, [20], top_p=2.0) == 400
        assert await asked(clients.over_http, UNSAMPLED, [20, 23]) == 200
        assert await asked(clients.over_http, NO_TRACE, [20, 24]) == 200

        engines = [WatchedEngine(), WatchedEngine()]
        for engine, worker in zip(engines, cell.workers[1:], strict=True):
            engine.watch(worker.executor)
            engine.gate.close(but_for=3)
        before, core = cell.service.statistics().tokens, cell.service.core
        lost = asyncio.create_task(asked(clients.over_http, LOST, [20, 25], draft_length=0))
        await until(lambda: cell.service.statistics().tokens == before + 3)
        (target,) = [one.worker_id for one in core.snapshot().workers if one.sequences and one.role is Role.TARGET]
        removal = asyncio.create_task(cell.service.remove_worker(target))
        await until(lambda: target not in cell.service.workers.up)
        for engine in engines:
            engine.gate.open()
        await removal
        assert await lost == 200
        await until(lambda: not cell.live_sequences)
    observed.spans = exporter.get_finished_spans()


def counts(span: ReadableSpan) -> tuple[Any, ...]:
    return tuple((span.attributes or {})[f"spool.{name}"] for name in ("completion_tokens", "drafted", "accepted"))


def parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


@pytest.mark.parametrize(("trace", "sequences"), [(HTTP, 3), (GRPC, 1)])
def test_a_request_is_a_tree_below_the_clients_span(observed: Observed, trace: str, sequences: int) -> None:
    request = observed.span(trace, "request")
    assert parent_of(request) == CLIENT_SPAN
    assert (request.attributes or {})["spool.request_id"] == trace
    found = [span for span in observed.spans_of(trace) if span.name == "sequence"]
    assert [parent_of(span) for span in found] == [id_of(request)] * sequences
    for sequence in found:
        phases = [span for span in observed.spans_of(trace) if parent_of(span) == id_of(sequence)]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        # One phase ends where the next begins, and all of them lie in the sequence.
        times = [time or 0 for span in phases for time in (span.start_time, span.end_time)]
        times = [sequence.start_time or 0, *times, sequence.end_time or 0]
        assert times == sorted(times)
    assert len(observed.spans_of(trace)) == 1 + 4 * sequences


@pytest.mark.parametrize("trace", [HTTP, GRPC, LOST])
def test_counts_are_those_that_the_client_saw(observed: Observed, trace: str) -> None:
    assert counts(observed.span(trace, "request")) == observed.usages[trace]
    found = [counts(span) for span in observed.spans_of(trace) if span.name == "sequence"]
    assert tuple(map(sum, zip(*found, strict=True))) == observed.usages[trace]
    assert observed.usages[trace][0] == 40 * len(found)


@pytest.mark.parametrize("trace", [FAILING, GRPC_FAILING])
def test_failures_are_in_both_spans_and_in_one_warning(observed: Observed, trace: str) -> None:
    for name in ("request", "sequence"):
        span = observed.span(trace, name)
        assert span.status.status_code is StatusCode.ERROR
        assert "unlucky token" in (span.status.description or "")
    (warning,) = [line for line in observed.lines_of(trace) if line["level"] == "WARNING"]
    assert warning["logger"] == "spool.services.scheduler.session"
    assert "unlucky token" in warning["message"]


def test_clients_decide_whether_there_is_a_trace(observed: Observed) -> None:
    assert observed.spans_of(UNSAMPLED) == []
    (request,) = [span for span in observed.spans if span.name == "request" and span.parent is None]
    assert (request.attributes or {})["spool.request_id"] == NO_TRACE
    assert len(observed.spans_of(f"{request.context.trace_id:032x}")) == 5


def test_a_lost_target_is_a_recovery(observed: Observed) -> None:
    sequence = observed.span(LOST, "sequence")
    phases = [span.name for span in observed.spans_of(LOST) if parent_of(span) == id_of(sequence)]
    assert phases == ["queue", "prefill", "decode", "recovery", "decode"]
    assert (sequence.attributes or {})["spool.recoveries"] == 1


def test_gateway_and_scheduler_log_the_request(observed: Observed) -> None:
    for trace, ends in ((HTTP, 3), (GRPC, 1)):
        lines = observed.lines_of(trace)
        assert {line["logger"] for line in lines} >= BOTH_SIDES
        (ended,) = [line for line in lines if line["message"] == "completion ended"]
        assert (ended["prompt_tokens"], ended["completion_tokens"]) == (2, 40 * ends)
        assert ended["finish_reasons"] == ["length"] * ends
        sequences = [line["message"] for line in lines if line["logger"] == "spool.services.scheduler.session"]
        assert (
            sorted(message.split(" ", 2)[2] for message in sequences) == ["ended: length"] * ends + ["entered"] * ends
        )


def test_one_line_explains_a_slow_request(observed: Observed) -> None:
    """Where its time went, what was drafted, what the cache had, and who computed it."""
    for trace in (HTTP, GRPC, LOST):
        (ended,) = [line for line in observed.lines_of(trace) if line["message"] == "completion ended"]
        assert (ended["completion_tokens"], ended["drafted"], ended["accepted"]) == observed.usages[trace]
        assert ended["cached_tokens"] == 0
        phases = [ended[f"{name}_seconds"] for name in ("queue", "prefill", "decode")]
        assert min(phases) > 0
        assert trace is HTTP or sum(phases) <= ended["seconds"]
        queue = [span for span in observed.spans_of(trace) if span.name == "queue"]
        longest = max(((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in queue)
        assert ended["queue_seconds"] == pytest.approx(longest, abs=0.2)
        workers = set(ended["workers"].split(","))
        assert workers <= {"target-0", "target-1"}
        assert len(workers) == 2 or trace is not LOST


def test_a_refused_request_names_its_field(observed: Observed) -> None:
    """Not what the field held, which is the client's."""
    (line,) = observed.lines_of(WRONG)
    assert (line["message"], line["code"]) == ("gRPC Generate", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert (line["param"], line["error"]) == ("temperature", "invalid")
    access = [line for line in observed.lines_of(WRONG_HTTP) if "status" in line]
    assert [(line["status"], line["param"], line["error"]) for line in access] == [(400, "top_p", "invalid")]


def test_lines_name_their_trace_and_spans_their_request(observed: Observed) -> None:
    for trace in (HTTP, GRPC, FAILING, LOST, UNSAMPLED):
        assert {line.get("trace_id") for line in observed.lines_of(trace)} == {trace}
        assert {(span.attributes or {})["spool.request_id"] for span in observed.spans_of(trace)} <= {trace}
    # The gateway began the trace, once the request was read.
    (request,) = [span for span in observed.spans if span.name == "request" and span.parent is None]
    lines = [line.get("trace_id") for line in observed.lines_of(NO_TRACE)]
    assert set(lines) == {f"{request.context.trace_id:032x}"}


@pytest.mark.parametrize("spans", [1, 3])
def test_spans_on_standard_error_are_a_line_each(capsys: pytest.CaptureFixture[str], spans: int) -> None:
    provider = tracer_provider(CONSOLE, 1.0)
    for number in range(spans):
        provider.get_tracer("tests").start_span(f"span {number}").end()
    provider.shutdown()
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["name"] for line in lines] == [f"span {number}" for number in range(spans)]


def test_no_line_of_a_request_is_without_its_id(observed: Observed) -> None:
    assert observed.returned == {trace: trace for trace in observed.returned}
    requests = (
        "spool.services.gateway.completion",
        "spool.services.gateway.http.middleware",
        "spool.services.gateway.grpc.service",
    )
    nameless = [line for line in observed.lines if not line.get("request_id")]
    assert not [line for line in nameless if line["logger"] in requests or "sequence" in line["message"]]
    assert {line["request_id"] for line in observed.lines if "request_id" in line} == observed.returned.keys()
