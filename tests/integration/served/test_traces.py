"""A request is one trace: below the client's span, in gateway and scheduler, with the counts that the client saw."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from scheduler.messages import Role
from services.observability.otel import OtelRequests, OtelSequences
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc
from tests.support.cell_gateways import running_gateway
from tests.support.cells import running_cell
from tests.support.gateway import save_tokenizer
from tests.support.stand_in_worker import ROW_FAILS
from tests.support.waiting import LONG, until
from tests.support.watched_engine import WatchedEngine

CLIENT_SPAN = "b7ad6b7169203331"
HTTP, GRPC, FAILING, UNSAMPLED, LOST = (digit * 32 for digit in "12345")


@dataclass(frozen=True)
class Traced:
    spans: Sequence[ReadableSpan]
    usages: dict[str, tuple[int, int, int]]
    """Output, drafted and accepted tokens, by trace."""

    def of(self, trace: str) -> list[ReadableSpan]:
        return [span for span in self.spans if f"{span.context.trace_id:032x}" == trace]

    def one(self, trace: str, name: str) -> ReadableSpan:
        (span,) = [span for span in self.of(trace) if span.name == name]
        return span


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return asyncio.run(drive(tmp_path_factory.mktemp("tokenizer")))


def traceparent(trace: str, sampled: bool = True) -> str:
    return f"00-{trace}-{CLIENT_SPAN}-{int(sampled):02}"


async def drive(folder: Path) -> Traced:
    tokenizer, exporter, provider = save_tokenizer(folder), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    usages: dict[str, tuple[int, int, int]] = {}
    async with (
        running_cell(
            targets=2, observers=[OtelSequences(provider)], tokenizer_digest=tokenizer.vocabulary_digest.hex()
        ) as cell,
        running_gateway(cell, tokenizer, tracing=OtelRequests(provider)) as served,
        httpx.AsyncClient(base_url=served.url, timeout=LONG) as http,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def over_http(parent: str, prompt: list[int], **fields: Any) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, **fields}
            return await http.post("/v1/completions", json=body, headers={"traceparent": parent, "x-request-id": "r"})

        usage = (await over_http(traceparent(HTTP), [20, 21], n=3)).json()["usage"]
        usages[HTTP] = usage["completion_tokens"], usage["spool"]["drafted"], usage["spool"]["accepted"]
        request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[20, 22]), max_tokens=40, ignore_eos=True)
        reply = await stub.Generate(request, metadata=(("traceparent", traceparent(GRPC)),))
        usages[GRPC] = reply.usage.completion_tokens, reply.usage.drafted_tokens, reply.usage.accepted_tokens
        assert (await over_http(traceparent(FAILING), [20, ROW_FAILS])).status_code == 500
        assert (await over_http(traceparent(UNSAMPLED, sampled=False), [20, 23])).status_code == 200
        assert (await over_http("no traceparent", [20, 24])).status_code == 200

        engines = [WatchedEngine(), WatchedEngine()]
        for engine, worker in zip(engines, cell.workers[1:], strict=True):
            engine.watch(worker.executor)
            engine.gate.close(but_for=3)
        before, core = cell.service.statistics().tokens, cell.service.core
        asked = asyncio.create_task(over_http(traceparent(LOST), [20, 25], spool={"speculation": False}))
        await until(lambda: cell.service.statistics().tokens == before + 3)
        (home,) = [one.worker_id for one in core.snapshot().workers if one.sequences and one.role is Role.TARGET]
        removal = asyncio.create_task(cell.service.remove_worker(home))
        await until(lambda: home not in cell.service.workers_up)
        for engine in engines:
            engine.gate.open()
        await removal
        usage = (await asked).json()["usage"]
        usages[LOST] = usage["completion_tokens"], usage["spool"]["drafted"], usage["spool"]["accepted"]
        await until(lambda: not cell.live_sequences)
    return Traced(exporter.get_finished_spans(), usages)


def counts(span: ReadableSpan) -> tuple[Any, ...]:
    return tuple((span.attributes or {})[f"spool.{name}"] for name in ("completion_tokens", "drafted", "accepted"))


def parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


@pytest.mark.parametrize(("trace", "sequences"), [(HTTP, 3), (GRPC, 1)])
def test_a_request_is_a_tree_below_the_clients_span(traced: Traced, trace: str, sequences: int) -> None:
    request = traced.one(trace, "request")
    assert parent_of(request) == CLIENT_SPAN
    found = [span for span in traced.of(trace) if span.name == "sequence"]
    assert [parent_of(span) for span in found] == [id_of(request)] * sequences
    for sequence in found:
        phases = [span for span in traced.of(trace) if parent_of(span) == id_of(sequence)]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        # One phase ends where the next begins, and all of them lie in the sequence.
        times = [time or 0 for span in phases for time in (span.start_time, span.end_time)]
        times = [sequence.start_time or 0, *times, sequence.end_time or 0]
        assert times == sorted(times)
    assert len(traced.of(trace)) == 1 + 4 * sequences


@pytest.mark.parametrize("trace", [HTTP, GRPC, LOST])
def test_counts_are_those_that_the_client_saw(traced: Traced, trace: str) -> None:
    assert counts(traced.one(trace, "request")) == traced.usages[trace]
    found = [counts(span) for span in traced.of(trace) if span.name == "sequence"]
    assert tuple(map(sum, zip(*found, strict=True))) == traced.usages[trace]
    assert traced.usages[trace][0] == 40 * len(found)


def test_the_request_has_its_id(traced: Traced) -> None:
    assert (traced.one(HTTP, "request").attributes or {})["spool.request_id"] == "r"


def test_a_failure_is_told_by_both(traced: Traced) -> None:
    for name in ("request", "sequence"):
        span = traced.one(FAILING, name)
        assert span.status.status_code is StatusCode.ERROR
        assert "unlucky token" in (span.status.description or "")


def test_a_client_that_does_not_sample_is_followed(traced: Traced) -> None:
    assert traced.of(UNSAMPLED) == []


def test_a_request_without_a_trace_begins_one(traced: Traced) -> None:
    known = (HTTP, GRPC, FAILING, UNSAMPLED, LOST)
    (request,) = [s for s in traced.spans if s.name == "request" and f"{s.context.trace_id:032x}" not in known]
    assert request.parent is None
    assert len(traced.of(f"{request.context.trace_id:032x}")) == 5


def test_a_lost_target_is_a_recovery(traced: Traced) -> None:
    sequence = traced.one(LOST, "sequence")
    phases = [span.name for span in traced.of(LOST) if parent_of(span) == id_of(sequence)]
    assert phases == ["queue", "prefill", "decode", "recovery", "decode"]
    assert (sequence.attributes or {})["spool.recoveries"] == 1


def test_opentelemetrys_sdk_is_not_loaded_where_tracing_is_off() -> None:
    modules = "services.gateway.http.app, services.gateway.grpc.server, services.scheduler.server"
    program = (
        f"import sys, {modules}; print({{'services.observability.otel', 'opentelemetry.sdk'}} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
