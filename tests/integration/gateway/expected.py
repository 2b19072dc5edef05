"""The expected output of gateways over stand-in workers, backends that fail, and what requests have in common."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import httpx
import pytest

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.protos import scheduler_pb2
from spool.services.backend.interface import BackendUnavailableError, GenerationRequest
from spool.services.scheduler_client.remote_stream import RemoteStream
from tests.support.gateway import Gateways
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG

PROMPT = "once upon a time"
TIMEOUT = 2 * LONG
CHAT: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "spool": {"speculation": False}}
THREE = {**ENDLESS, "n": 3}

# A step takes so long that a sequence of ENDLESS outlasts every wait: only cancelling frees its pages in time.
STEP_SECONDS = 0.08
assert STEP_SECONDS * ENDLESS["max_tokens"] > LONG

# Three levels of repeats: the library's state for it grows with every token.
EXPONENTIAL = "((a{1,1000}){1,1000}){1,1000}"
BAD_SCHEMA, FAULT = {"type": "integer", "minimum": 9007199254740993}, "minimum is 9007199254740993, must be between"
"""tests/unit/gateway/test_schemas.py has the other faults."""


def expected_tokens(gateways: Gateways, prompt: Sequence[int], count: int) -> list[int]:
    """The output of the stand-in model, up to its end token."""
    tokens = continuation(prompt, count)
    ends = [place for place, token in enumerate(tokens) if token in gateways.tokenizer.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def expected_text(gateways: Gateways, prompt: Sequence[int], count: int) -> str:
    return gateways.tokenizer.decode(expected_tokens(gateways, prompt, count))


def encoded(gateways: Gateways, text: str = PROMPT) -> list[int]:
    return gateways.tokenizer.encode(text)


def completion(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(http: httpx.Client, route: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, with its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = http.post(f"/v1/{route}", json={**options, **body}).text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


def refusal(call: Callable[[], object]) -> tuple[grpc.RpcError, dict[str, str]]:
    """Of gRPC, with its trailing metadata."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value, dict(caught.value.trailing_metadata() or ())


def refuse_message(stub: GenerationServiceStub, request: pb.GenerateRequest, param: str | None, message: str) -> None:
    for call in (lambda: stub.Generate(request), lambda: list(stub.GenerateStream(request))):
        error, trailing = refusal(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailing.get("spool-error-param") == param
        assert re.search(message, error.details()), error.details()


class Recorder:
    """A backend that keeps the requests of the gateway."""

    def __init__(self, gateways: Gateways) -> None:
        self.requests: list[GenerationRequest] = []
        self.backend = gateways.backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def submit(self, request: GenerationRequest) -> RemoteStream:
        self.requests.append(request)
        return self.backend.submit(request)


class NoTarget(Recorder):
    """A backend whose scheduler has no target any more."""

    def submit(self, request: GenerationRequest) -> RemoteStream:
        self.requests.append(request)
        raise BackendUnavailableError("no target worker is up")

    async def statuses(self) -> list[scheduler_pb2.StatusReply]:
        statuses = await self.backend.statuses()
        for status in statuses:
            del status.workers[:]
        return statuses


class NoScheduler(Recorder):
    """A backend that reaches no scheduler."""

    async def statuses(self) -> list[scheduler_pb2.StatusReply]:
        raise BackendUnavailableError("the scheduler does not answer")

    async def model(self) -> scheduler_pb2.ServedModel:
        raise BackendUnavailableError("the scheduler does not answer")

    async def watch(self, period_seconds: float, max_sequences: int, cell: int) -> AsyncIterator[Any]:
        raise BackendUnavailableError("the scheduler does not answer")
        yield
