"""No request makes an internal error, whatever its fields hold: each is answered, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.services.gateway.http.openai_requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.integration.gateway.expected import TIMEOUT
from tests.support.extreme_values import FLOATS, INTEGERS, changed, extreme_bodies, extreme_messages, places
from tests.support.gateway import Served, stand_in_gateways

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": "look", "tool_calls": [CALL], "reasoning_content": "so", "name": "me"},
    {"role": "user", "content": "go on", "name": "me"},
]
SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 5}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA, "strict": False}}
COMMON: dict[str, Any] = {
    **{"max_tokens": 2, "min_tokens": 1, "n": 1, "stop": ["xyz"], "stop_token_ids": [5], "seed": 1, "temperature": 0.5},
    **{"top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    **{"repetition_penalty": 1.5, "logit_bias": {"7": 1.5}, "bad_words": ["qq"], "priority": 0, "cache_salt": "salt"},
    **{"ignore_eos": False, "spool": {"draft_length": 2, "speculation": True}, "stream": True},
    **{"stream_options": {"include_usage": True}, "user": "me", "model": None, "return_token_ids": False},
}
BODIES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/completions": ({"prompt": "once", "logprobs": 2, "echo": False, **COMMON}, CompletionBody),
    "/v1/chat/completions": (
        {"messages": MESSAGES, "chat_template_kwargs": {}, **COMMON},
        ChatBody,
    ),
    "/tokenize": ({"messages": MESSAGES, "chat_template_kwargs": {}, "add_generation_prompt": True}, TokenizeBody),
    "/detokenize": ({"tokens": [1, 2, 3]}, DetokenizeBody),
}
STRUCTURES = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"tools": [TOOL], "tool_choice": "auto"},
]
MESSAGE = pb.GenerateRequest(text="once", max_tokens=2)
# Deadlines that cannot be met are the client's.
ANSWERED = {200, 400, 404, 413, 504}
STATUSES = {
    *(grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND),
    *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED),
}


def check(http: httpx.Client, route: str, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json", "x-request-timeout-seconds": "5"}
    response = http.post(route, content=json.dumps(body), headers=headers)
    shown = json.dumps(body)[:2000]
    assert response.status_code in ANSWERED, f"{response.status_code} {response.text[:500]} of {route} {shown}"
    assert "server_error" not in response.text, f"{response.text[:500]} of {route} {shown}"
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["message"], shown
        assert error["type"] == "invalid_request_error", shown


@pytest.mark.parametrize("route", BODIES)
def test_the_requests_that_are_changed_are_good(http: httpx.Client, route: str) -> None:
    response = http.post(route, json=BODIES[route][0])
    assert response.status_code == 200, response.text


def check_bodies(http: httpx.Client, route: str, seed: int, count: int) -> None:
    body, kind = BODIES[route]
    for variant in extreme_bodies(body, list(kind.model_fields), seed, count):
        check(http, route, variant)


def check_messages(stub: GenerationServiceStub, message: Message, seed: int, count: int) -> None:
    for variant in extreme_messages(message, seed, count):
        call = stub.GenerateStream(variant, timeout=5)
        with suppress(grpc.RpcError):
            list(call)
        assert call.code() in STATUSES, f"{call.code()} {call.details()} of {str(variant)[:2000]}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With workers that do not fail on some tokens."""
    with stand_in_gateways(tmp_path_factory.mktemp("model"), unlucky=False) as lucky, lucky.serve() as served:
        yield served
        lucky.wait_until_idle()


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[GenerationServiceStub]:
    with grpc.insecure_channel(served.address) as channel:
        yield GenerationServiceStub(channel)


@pytest.mark.parametrize("route", BODIES)
def test_extreme_fields_over_http(http: httpx.Client, route: str) -> None:
    check_bodies(http, route, seed=1, count=200)


def test_extreme_fields_over_grpc(stub: GenerationServiceStub) -> None:
    check_messages(stub, MESSAGE, seed=1, count=100)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: next(iter(structure)))
def test_extreme_structures(http: httpx.Client, structure: dict[str, Any]) -> None:
    for variant in extreme_bodies({"messages": MESSAGES, "max_tokens": 2, **structure}, [], seed=1, count=100):
        check(http, "/v1/chat/completions", variant)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_every_number_in_every_field(http: httpx.Client, route: str) -> None:
    body, kind = BODIES[route]
    for place in {*places(body), *((field,) for field in kind.model_fields)}:
        if "messages" not in place:
            for number in (*INTEGERS, *FLOATS):
                check(http, route, changed(body, place, number))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_extreme_fields(http: httpx.Client, stub: GenerationServiceStub, seed: int) -> None:
    for route in BODIES:
        check_bodies(http, route, seed, 1000)
    check_messages(stub, MESSAGE, seed, 1000)
