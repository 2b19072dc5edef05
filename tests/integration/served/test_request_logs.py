"""Every log line of a request carries the request's id, in gateway and scheduler."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from scheduler.config import Policy, SchedulerConfig
from services.observability.logs import LogFormat, install_logs
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc
from tests.support.cell_gateways import running_gateway
from tests.support.cells import running_cell
from tests.support.gateway import save_tokenizer
from tests.support.logs import restored_loggers
from tests.support.stand_in_worker import ROW_FAILS
from tests.support.waiting import LONG, until
from tests.support.watched_engine import WatchedEngine

OF_REQUESTS = ("services.gateway.completion", "services.gateway.http.middleware", "services.gateway.grpc.service")
BOTH_SIDES = {"services.gateway.completion", "services.scheduler.session"}


@dataclass(frozen=True)
class Logged:
    lines: list[dict[str, Any]]
    returned: dict[str, str | None]

    def of(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("request_id") == request_id]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    stream = io.StringIO()
    with restored_loggers():
        install_logs(LogFormat.JSON, logging.DEBUG, stream)
        returned = asyncio.run(drive(tmp_path_factory.mktemp("tokenizer")))
    return Logged([json.loads(line) for line in stream.getvalue().splitlines()], returned)


async def drive(folder: Path) -> dict[str, str | None]:
    """The ids of the responses, by the ids of the requests."""
    tokenizer, returned, watched = save_tokenizer(folder), {}, WatchedEngine()
    config = SchedulerConfig(policy=Policy.RAGGED, max_running=1, max_queued_sequences=1)
    async with (
        running_cell(config=config, tokenizer_digest=tokenizer.vocabulary_digest.hex()) as cell,
        running_gateway(cell, tokenizer) as served,
        httpx.AsyncClient(base_url=served.url, timeout=LONG) as http,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        watched.watch(cell.workers[1].executor)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def over_http(request_id: str, prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}
            response = await http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
            returned[request_id] = response.headers.get("x-request-id")
            return response.status_code

        async def over_grpc(request_id: str, prompt: list[int], **fields: Any) -> grpc.StatusCode:
            request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=prompt), max_tokens=5, ignore_eos=True, **fields)
            call = stub.Generate(request, metadata=(("x-request-id", request_id),))
            returned[request_id] = dict(await call.initial_metadata()).get("x-request-id")
            return await call.code()

        assert await over_http("http-1", [20, 21]) == 200
        assert await over_grpc("grpc-1", [20, 22]) is grpc.StatusCode.OK
        assert await over_http("http-fails", [20, ROW_FAILS]) == 500
        assert await over_grpc("grpc-fails", [20, ROW_FAILS]) is grpc.StatusCode.INTERNAL
        assert await over_grpc("grpc-wrong", [20], temperature=-1.0) is grpc.StatusCode.INVALID_ARGUMENT
        call = stub.GenerateStream(pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[20]), max_tokens=3))
        returned["none given"] = dict(await call.initial_metadata()).get("x-request-id")
        assert [reply async for reply in call][-1].usage.completion_tokens
        watched.gate.close()
        held = [asyncio.create_task(over_http(f"held-{number}", [30, 31])) for number in range(2)]
        await until(lambda: cell.live_sequences == 2)
        assert await over_http("http-refused", [20, 21]) == 429
        watched.gate.open()
        assert await asyncio.gather(*held) == [200, 200]
    return returned


def test_answers_carry_the_id(logged: Logged) -> None:
    returned = dict(logged.returned)
    assert len(returned.pop("none given") or "") == 32
    assert {given: given for given in returned} == returned


@pytest.mark.parametrize("request_id", ["http-1", "grpc-1"])
def test_gateway_and_scheduler_name_the_request(logged: Logged, request_id: str) -> None:
    lines = logged.of(request_id)
    assert {line["logger"] for line in lines} >= BOTH_SIDES
    (ended,) = [line for line in lines if line["message"] == "completion ended"]
    assert (ended["prompt_tokens"], ended["completion_tokens"], ended["finish_reasons"]) == (2, 5, ["length"])
    sequence = [line["message"] for line in lines if line["logger"] == "services.scheduler.session"]
    assert [message.split(" ", 2)[2] for message in sequence] == ["entered", "ended: length"]


@pytest.mark.parametrize("request_id", ["http-fails", "grpc-fails"])
def test_a_failure_is_a_warning_that_names_the_request(logged: Logged, request_id: str) -> None:
    (warning,) = [line for line in logged.of(request_id) if line["level"] == "WARNING"]
    assert warning["logger"] == "services.scheduler.session"
    assert "unlucky token" in warning["message"]


def test_a_refusal_names_the_request(logged: Logged) -> None:
    messages = [line["message"] for line in logged.of("http-refused")]
    assert any("was refused: 1 sequences wait, the limit is 1" in message for message in messages)
    (access,) = [line for line in logged.of("http-refused") if line["logger"] == "services.gateway.http.middleware"]
    assert access["status"] == 429


def test_a_call_that_is_refused_ends_with_its_code(logged: Logged) -> None:
    (line,) = logged.of("grpc-wrong")
    assert (line["message"], line["code"]) == ("gRPC Generate", grpc.StatusCode.INVALID_ARGUMENT.value[0])


def test_no_line_of_a_request_is_without_its_id(logged: Logged) -> None:
    nameless = [line for line in logged.lines if not line.get("request_id")]
    assert not [line for line in nameless if line["logger"] in OF_REQUESTS or "sequence" in line["message"]]
    known = {request_id for request_id in logged.returned.values() if request_id}
    assert {line["request_id"] for line in logged.lines if "request_id" in line} == known
