"""spool.v1.GenerationService, called with grpcio's stubs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from google.protobuf import empty_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from pydantic import SecretStr

from spool.client import AsyncClient, Client
from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.services.gateway.settings import ConnectionLimits, GatewaySettings, TlsFiles
from tests.integration.gateway.expected import (
    BAD_SCHEMA,
    FAULT,
    PROMPT,
    NoTarget,
    expected_tokens,
    refusal,
    refuse_message,
)
from tests.support.certificates import issue_by
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY
from tests.support.waiting import LONG, wait_until


def test_messages(gateways: Gateways, stub: GenerationServiceStub) -> None:
    tokens = expected_tokens(gateways, gateways.tokenizer.encode(PROMPT), 40)
    request = pb.GenerateRequest(text=PROMPT, max_tokens=40, top_logprobs=2)
    done = stub.Generate(request, timeout=LONG)
    assert done.model == MODEL
    assert [entry.chosen.token_id for entry in done.choices[0].logprobs] == tokens
    assert [len(entry.top) for entry in done.choices[0].logprobs] == [2] * 40
    parts = list(stub.GenerateStream(request, timeout=LONG))
    reasons = [part.choice.finish_reason for part in parts]
    assert reasons[-2:] == [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_UNSPECIFIED]
    assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
    assert not parts[-1].HasField("choice")


def test_calls_take_turns_among_gateways(gateways: Gateways) -> None:
    """A name with several addresses; the client is not told more than that."""
    with gateways.serve() as one, gateways.serve() as other, Client(f"ipv4:{one.address},{other.address}") as client:

        def both_were_asked() -> bool:
            client.generate(pb.GenerateRequest(text=PROMPT, max_tokens=1), timeout=LONG)
            return all(_read_a_prompt(served) for served in (one, other))

        wait_until(both_were_asked, "requests at both gateways")


def _read_a_prompt(served: Served) -> bool:
    lines = httpx.get(f"{served.url}/metrics", timeout=LONG).text.splitlines()
    return any(line.startswith("spool_prompt_tokens_total") and float(line.split()[-1]) > 0 for line in lines)


def test_an_old_connection_takes_no_more_calls(gateways: Gateways) -> None:
    """A stream on it goes on to its end; the next call connects again."""
    settings = GatewaySettings(connections=ConnectionLimits(grpc_seconds=0.5))
    with gateways.serve(settings) as served, grpc.insecure_channel(served.address) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        stub = GenerationServiceStub(channel)
        parts = stub.GenerateStream(pb.GenerateRequest(text=PROMPT, max_tokens=40), timeout=LONG)
        first = next(parts)
        wait_until(lambda: grpc.ChannelConnectivity.IDLE in states[1:], "the end of the connection for new calls")
        tokens = [token for part in (first, *parts) for token in part.choice.token_ids]
        assert tokens == expected_tokens(gateways, gateways.tokenizer.encode(PROMPT), 40)
        states.clear()
        assert stub.Generate(pb.GenerateRequest(text=PROMPT, max_tokens=1), timeout=LONG).usage.completion_tokens == 1
        wait_until(lambda: grpc.ChannelConnectivity.READY in states, "another connection")


def test_defaults_are_those_of_http(gateways: Gateways) -> None:
    backend = NoTarget(gateways)
    with (
        gateways.serve(backend=backend) as served,
        grpc.insecure_channel(served.address) as channel,
        httpx.Client(base_url=served.url, timeout=LONG) as http,
    ):
        stub = GenerationServiceStub(channel)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        for request in (pb.GenerateRequest(text=PROMPT, seed=1), pb.GenerateRequest(chat=chat, seed=1)):
            error, trailing = refusal(lambda: stub.Generate(request))  # noqa: B023
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert trailing["retry-after"] == "1"
        http.post("/v1/completions", json={"prompt": PROMPT, "seed": 1})
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "seed": 1})
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    text, conversation, *over_http = backend.requests
    for ours, theirs in zip((text, conversation), over_http, strict=True):
        same = {"request_id": "", "deadline_seconds": None}
        assert replace(ours, **same) == replace(theirs, **same)  # type: ignore[arg-type]


LIMIT = "grpc.max_receive_message_length"
LARGE = {"n": 8, "top_logprobs": 20, "ignore_eos": True, "seed": 1}


def test_answers_beyond_a_clients_limit_arrive_or_are_refused_by_name(gateways: Gateways, served: Served) -> None:
    request = pb.GenerateRequest(text=PROMPT, max_tokens=20, **LARGE)
    # A chat without max_tokens may end early.
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]), **LARGE)
    scored = pb.GenerateRequest(text=PROMPT * 20, max_tokens=1, prompt_logprobs=20)
    with Client(served.address, options=[(LIMIT, 50_000)]) as client:
        for one in (request, chat, scored):
            error, trailing = refusal(lambda: client.generate(one, timeout=LONG))  # noqa: B023
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert trailing["spool-error-code"] == "answer_too_large"
            assert "the client takes 50000 in one message: use GenerateStream" in (error.details() or "")
        tokens = [token for part in client.stream(request) for token in part.choice.token_ids if not part.choice.index]
    with Client(served.address, options=[(LIMIT, -1)]) as client:
        done = client.generate(request, timeout=LONG)
    assert done.ByteSize() > 50_000
    assert [list(choice.token_ids) for choice in done.choices] == [tokens] * 8


BAD = [
    (pb.GenerateRequest(), "prompt", "prompt is missing"),
    (pb.GenerateRequest(text="a", structured_outputs={}), "structured_outputs", "structured_outputs is empty"),
    (pb.GenerateRequest(text="a", structured_outputs={"json_schema": "no"}), "structured_outputs", "cannot be used"),
    (pb.GenerateRequest(text="a", structured_outputs={"choice": {}}), "structured_outputs", "at least one choice"),
    (
        pb.GenerateRequest(text="a", structured_outputs={"json_schema": json.dumps(BAD_SCHEMA)}),
        "structured_outputs",
        FAULT,
    ),
    (pb.GenerateRequest(text="a", proposer="head"), "proposer", "is 'head', must be one of draft, lookup, none"),
    (pb.GenerateRequest(text="a", top_logprobs=99), "top_logprobs", "is 99, must be between 0 and 20"),
    (pb.GenerateRequest(chat=pb.Chat()), "messages", "messages has 0 entries"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="x")])), "messages", "role 'x'"),
]
"""What HTTP has otherwise; test_http_errors.py has the rest."""


@pytest.mark.parametrize(("request_", "param", "message"), BAD)
def test_bad_requests(stub: GenerationServiceStub, request_: pb.GenerateRequest, param: str, message: str) -> None:
    refuse_message(stub, request_, param, message)


REFLECTION = f"/{reflection_pb2.DESCRIPTOR.services_by_name['ServerReflection'].full_name}/ServerReflectionInfo"


def raw(channel: grpc.Channel, method: str, content: bytes, stream: bool) -> Any:
    path = f"/spool.v1.GenerationService/{method}"
    if stream:
        return lambda: list(channel.unary_stream(path, lambda _: content)(empty_pb2.Empty()))
    return lambda: channel.unary_unary(path, lambda _: content)(empty_pb2.Empty())


@pytest.mark.parametrize("content", [b"\xff" * 9, b"\x12\x03ab\xff", b"\x08"])
def test_messages_that_cannot_be_read_or_are_too_large(
    channel: grpc.Channel, stub: GenerationServiceStub, content: bytes
) -> None:
    for method in ("Generate", "GenerateStream", "Tokenize"):
        error, _ = refusal(raw(channel, method, content, method == "GenerateStream"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in error.details()
    for path in ("/spool.v1.GenerationService/Replay", REFLECTION):
        error, _ = refusal(lambda: list(channel.stream_stream(path, lambda _: b"\xff")(iter([empty_pb2.Empty()]))))  # noqa: B023
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in error.details()
    error, _ = refusal(lambda: stub.Generate(pb.GenerateRequest(text="a" * 10_000_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Generate(pb.GenerateRequest(text="a")).choices


# --- clients that go away ---------------------------------------------------------------------------------------------


def test_deadlines_and_cancelled_streams_free_everything(slow: Gateways, slowly_served: Served) -> None:
    request = pb.GenerateRequest(text=PROMPT, n=3, max_tokens=1900, ignore_eos=True, draft_length=0)
    with grpc.insecure_channel(slowly_served.address) as channel:
        stub = GenerationServiceStub(channel)
        for call in (
            lambda: stub.Generate(request, timeout=0.5),
            lambda: list(stub.GenerateStream(request, timeout=0.5)),
        ):
            assert refusal(call)[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED
            slow.wait_until_idle()
        stream = stub.GenerateStream(request)
        next(stream)
        stream.cancel()
        slow.wait_until_idle()


# --- security, health, reflection -------------------------------------------------------------------------------------


def services(channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    [reply] = stub.ServerReflectionInfo(requests, metadata=metadata)
    return {service.name for service in reply.list_services_response.service}


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "spool.v1.GenerationService"):
        status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    error, _ = refusal(lambda: health.Check(health_pb2.HealthCheckRequest(service="other")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    error, _ = refusal(lambda: list(health.Watch(health_pb2.HealthCheckRequest())))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert {"spool.v1.GenerationService", "grpc.health.v1.Health"} <= services(channel)


def test_calls_that_generate_nothing(gateways: Gateways, channel: grpc.Channel, stub: GenerationServiceStub) -> None:
    """One of them by a client without stubs, which finds all that it needs."""
    service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName("spool.v1.GenerationService")
    assert service.file.name == "spool/v1/generation.proto"
    method, prompt = service.methods_by_name["Tokenize"], gateways.tokenizer.encode(PROMPT)
    ask, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call = channel.unary_unary(f"/{service.full_name}/Tokenize", ask.SerializeToString, answer.FromString)
    found = call(ask(text=PROMPT))
    assert (list(found.token_ids), found.max_sequence_length) == (prompt, MAX_LENGTH)
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=prompt)).text == PROMPT
    error, _ = refusal(lambda: list(stub.Tokenize(pb.TokenizeRequest(text="A" * (MAX_LENGTH + 1))).token_ids))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"prompt has {MAX_LENGTH + 1} tokens; the model's limit is {MAX_LENGTH}"
    [model] = stub.ListModels(pb.ListModelsRequest()).models
    assert (model.id, model.vocabulary_size, model.max_sequence_length) == (MODEL, VOCABULARY, MAX_LENGTH)
    error, _ = refusal(lambda: list(stub.Replay(iter([pb.ReplayRequest(receipt="{}")]))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "this server signs no receipts" in error.details()


def test_every_method_but_health_takes_a_key(gateways: Gateways) -> None:
    with (
        gateways.serve(GatewaySettings(api_keys=(SecretStr("key"),))) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        stub = GenerationServiceStub(channel)
        request = pb.GenerateRequest(text="a")
        for metadata in ([], [("authorization", "Bearer key"), ("authorization", "Bearer kez")]):
            for call in (
                lambda: stub.Generate(request, metadata=metadata),  # noqa: B023
                lambda: list(stub.GenerateStream(request, metadata=metadata)),  # noqa: B023
                lambda: stub.ListModels(pb.ListModelsRequest(), metadata=metadata),  # noqa: B023
                lambda: list(stub.Replay(iter([pb.ReplayRequest()]), metadata=metadata)),  # noqa: B023
                lambda: services(channel, metadata),  # noqa: B023
                lambda: channel.unary_unary("/no.such/Method", lambda _: b"")(request, metadata=metadata),  # noqa: B023
            ):
                assert refusal(call)[0].code() is grpc.StatusCode.UNAUTHENTICATED
        good = [("authorization", "Bearer key")]
        assert stub.Generate(request, metadata=good).choices
        assert "spool.v1.GenerationService" in services(channel, good)
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status


def test_tls(gateways: Gateways, tmp_path: Path) -> None:
    authority = trustme.CA()
    ours = issue_by(authority, tmp_path, "localhost")
    tls = TlsFiles(certificate=Path(ours.certificate_file), key=Path(ours.key_file))
    with gateways.serve(tls=tls) as served:
        address = served.address.replace("127.0.0.1", "localhost")
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(address, credentials) as channel:
            stub = GenerationServiceStub(channel)
            assert stub.Generate(pb.GenerateRequest(text="a"), timeout=LONG).choices
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())) as channel:
            stub = GenerationServiceStub(channel)
            error, _ = refusal(lambda: stub.Generate(pb.GenerateRequest(text="a"), timeout=LONG))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        with Client(address, credentials=credentials) as client:
            assert client.list_models(LONG).models

        async def from_a_loop() -> None:
            async with AsyncClient(address, credentials=credentials) as client:
                assert (await client.list_models(LONG)).models

        asyncio.run(from_a_loop())
        url = served.url.replace("127.0.0.1", "localhost")
        with httpx.Client(base_url=url, timeout=LONG) as http, pytest.raises(httpx.TransportError):
            http.get("/ping")
        context = ssl.create_default_context(cafile=ours.ca_file)
        with httpx.Client(base_url=url, verify=context, timeout=LONG) as http:
            assert http.get("/ping").status_code == 200
