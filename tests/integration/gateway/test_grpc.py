"""spool.v1.GenerationService, called with grpcio's stubs."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterator, Sequence
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

from services.gateway.settings import GatewaySettings, TlsFiles
from spool_client import AsyncClient, Client
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc
from tests.integration.gateway.expected import (
    BAD_SCHEMA,
    FAULT,
    PROMPT,
    NoTarget,
    expected_text,
    expected_tokens,
    stop_cases,
)
from tests.support.certificates import issue_by
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.stand_in_worker import MAX_LENGTH, ROW_FAILS, VOCABULARY
from tests.support.waiting import LONG

NEVER_ENDING = {"max_tokens": 1900, "ignore_eos": True, "draft_length": 0}


@pytest.fixture(scope="module")
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> generation_pb2_grpc.GenerationServiceStub:
    return generation_pb2_grpc.GenerationServiceStub(channel)


def refusal(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def trailing(error: grpc.RpcError) -> dict[str, str]:
    return dict(error.trailing_metadata() or ())


def test_generate(gateways: Gateways, stub: generation_pb2_grpc.GenerationServiceStub) -> None:
    prompt = gateways.tokenizer.encode(PROMPT)
    tokens = expected_tokens(gateways, prompt, 40)
    done = stub.Generate(pb.GenerateRequest(text=PROMPT, max_tokens=40, n=2, seed=3, top_logprobs=2), timeout=LONG)
    assert done.model == MODEL
    assert [choice.text for choice in done.choices] == [gateways.tokenizer.decode(tokens)] * 2
    assert [list(choice.token_ids) for choice in done.choices] == [tokens] * 2
    assert done.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert [entry.chosen.token_id for entry in done.choices[0].logprobs] == tokens
    assert [len(entry.top) for entry in done.choices[0].logprobs] == [2] * 40
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.seed) == (len(prompt), 80, 3)
    assert 0 < done.usage.accepted_tokens < done.usage.drafted_tokens


def test_stream(gateways: Gateways, stub: generation_pb2_grpc.GenerationServiceStub) -> None:
    prompt = gateways.tokenizer.encode(PROMPT)
    parts = list(stub.GenerateStream(pb.GenerateRequest(tokens=pb.TokenIds(token_ids=prompt), max_tokens=40)))
    assert "".join(part.choice.text for part in parts) == expected_text(gateways, prompt, 40)
    tokens = [token for part in parts for token in part.choice.token_ids]
    assert tokens == expected_tokens(gateways, prompt, 40)
    reasons = [part.choice.finish_reason for part in parts]
    assert reasons[-2:] == [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_UNSPECIFIED]
    assert not any(part.HasField("usage") for part in parts[:-1])
    assert not parts[-1].HasField("choice")
    assert parts[-1].usage.completion_tokens == len(tokens)


def test_chat_and_stops(gateways: Gateways, stub: generation_pb2_grpc.GenerationServiceStub) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    chat = pb.Chat(messages=[pb.ChatMessage(role="developer", content="be brief"), pb.ChatMessage(**messages[1])])
    done = stub.Generate(pb.GenerateRequest(chat=chat, max_tokens=30))
    prompt = gateways.tokenizer.encode_chat(messages)
    assert done.choices[0].text == expected_text(gateways, prompt, 30)
    for stop, before, count in stop_cases(gateways)[::16]:
        done = stub.Generate(pb.GenerateRequest(text=PROMPT, max_tokens=40, stop=[stop]))
        assert (done.choices[0].text, done.usage.completion_tokens) == (before, count)
        assert (done.choices[0].finish_reason, done.choices[0].stop_string) == (pb.FINISH_REASON_STOP, stop)
        assert len(done.choices[0].token_ids) == count
        kept = pb.GenerateRequest(text=PROMPT, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
        assert stub.Generate(kept).choices[0].text == before + stop
        later = stub.Generate(pb.GenerateRequest(text=PROMPT, max_tokens=40, stop=[stop], min_tokens=count))
        assert later.usage.completion_tokens > count
    token = expected_tokens(gateways, gateways.tokenizer.encode(PROMPT), 10)[4]
    done = stub.Generate(pb.GenerateRequest(text=PROMPT, max_tokens=40, stop_token_ids=[token]))
    assert done.choices[0].stop_token_id == token


def test_defaults_are_those_of_http(gateways: Gateways) -> None:
    backend = NoTarget(gateways)
    with (
        gateways.serve(backend=backend) as served,
        grpc.insecure_channel(served.address) as channel,
        httpx.Client(base_url=served.url, timeout=LONG) as http,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        for request in (pb.GenerateRequest(text=PROMPT, seed=1), pb.GenerateRequest(chat=chat, seed=1)):
            error = refusal(lambda: stub.Generate(request))  # noqa: B023
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert trailing(error)["retry-after"] == "1"
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
            error = refusal(lambda: client.generate(one, timeout=LONG))  # noqa: B023
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert trailing(error)["spool-error-code"] == "answer_too_large"
            assert "the client takes 50000 in one message: use GenerateStream" in (error.details() or "")
        tokens = [token for part in client.stream(request) for token in part.choice.token_ids if not part.choice.index]
    with Client(served.address, options=[(LIMIT, -1)]) as client:
        done = client.generate(request, timeout=LONG)
    assert done.ByteSize() > 50_000
    assert [list(choice.token_ids) for choice in done.choices] == [tokens] * 8


BAD = [
    (pb.GenerateRequest(), "prompt", "prompt is missing"),
    (pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1, 1000])), "prompt", r"prompt\[1\] is 1000, must be .* 999"),
    (pb.GenerateRequest(text="a", max_tokens=0), "max_tokens", "max_tokens is 0, must be at least 1"),
    (pb.GenerateRequest(text="a", max_tokens=5000), "prompt", "max_tokens of 5000 makes 5001; .* limit is 2000"),
    (pb.GenerateRequest(text="a", n=1000), "n", "n is 1000, must be between 1 and 128"),
    (pb.GenerateRequest(text="a", temperature=float("nan")), "temperature", "temperature is nan"),
    (pb.GenerateRequest(text="a", logit_bias={5000: 1}), "logit_bias", "token id 5000"),
    (pb.GenerateRequest(text="a", min_tokens=2**32 - 1), "min_tokens", "must be at most max_tokens, which is"),
    (pb.GenerateRequest(text="a", stop=[""]), "stop", r"stop\[0\] has 0 characters"),
    (pb.GenerateRequest(text="a", structured_outputs={}), "structured_outputs", "structured_outputs is empty"),
    (pb.GenerateRequest(text="a", structured_outputs={"json_schema": "no"}), "structured_outputs", "cannot be used"),
    (pb.GenerateRequest(text="a", structured_outputs={"choice": {}}), "structured_outputs", "at least one choice"),
    (
        pb.GenerateRequest(text="a", structured_outputs={"json_schema": json.dumps(BAD_SCHEMA)}),
        "structured_outputs",
        FAULT,
    ),
    (pb.GenerateRequest(text="a", top_logprobs=99), "top_logprobs", "is 99, must be between 0 and 20"),
    (pb.GenerateRequest(chat=pb.Chat()), "messages", "messages has 0 entries"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="x")])), "messages", "role 'x'"),
]


@pytest.mark.parametrize(("request_", "param", "message"), BAD)
def test_bad_requests(
    stub: generation_pb2_grpc.GenerationServiceStub, request_: pb.GenerateRequest, param: str, message: str
) -> None:
    for call in (lambda: stub.Generate(request_), lambda: list(stub.GenerateStream(request_))):
        error = refusal(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailing(error).get("spool-error-param") == param
        assert re.search(message, error.details()), error.details()


def test_unknown_model_and_failed_sequence(stub: generation_pb2_grpc.GenerationServiceStub) -> None:
    error = refusal(lambda: stub.Generate(pb.GenerateRequest(model="gpt é", text="a")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert trailing(error)["spool-error-code"] == "model_not_found"
    error = refusal(lambda: stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[ROW_FAILS]))))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "unlucky token" in error.details()


def raw(channel: grpc.Channel, method: str, content: bytes, stream: bool) -> Any:
    path = f"/spool.v1.GenerationService/{method}"
    if stream:
        return lambda: list(channel.unary_stream(path, lambda _: content)(empty_pb2.Empty()))
    return lambda: channel.unary_unary(path, lambda _: content)(empty_pb2.Empty())


@pytest.mark.parametrize("content", [b"\xff" * 9, b"\x12\x03ab\xff", b"\x08"])
def test_messages_that_cannot_be_read_or_are_too_large(
    channel: grpc.Channel, stub: generation_pb2_grpc.GenerationServiceStub, content: bytes
) -> None:
    for method in ("Generate", "GenerateStream", "Tokenize"):
        error = refusal(raw(channel, method, content, method == "GenerateStream"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in error.details()
    error = refusal(lambda: stub.Generate(pb.GenerateRequest(text="a" * 10_000_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Generate(pb.GenerateRequest(text="a")).choices


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_stub(slow: Gateways) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
    with slow.serve() as served, grpc.insecure_channel(served.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def test_deadlines_and_cancelled_streams_free_everything(
    slow: Gateways, slow_stub: generation_pb2_grpc.GenerationServiceStub
) -> None:
    request = pb.GenerateRequest(text=PROMPT, n=3, **NEVER_ENDING)
    for call in (
        lambda: slow_stub.Generate(request, timeout=0.5),
        lambda: list(slow_stub.GenerateStream(request, timeout=0.5)),
    ):
        assert refusal(call).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        slow.wait_until_idle()
    stream = slow_stub.GenerateStream(request)
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
    error = refusal(lambda: health.Check(health_pb2.HealthCheckRequest(service="other")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    error = refusal(lambda: list(health.Watch(health_pb2.HealthCheckRequest())))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert {"spool.v1.GenerationService", "grpc.health.v1.Health"} <= services(channel)


def test_a_client_without_stubs_finds_all_it_needs(gateways: Gateways, channel: grpc.Channel) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    service = pool.FindServiceByName("spool.v1.GenerationService")
    assert service.file.name == "spool/v1/generation.proto"
    called = set()
    for method in service.methods:
        ask, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        asks = "stream" if method.client_streaming else "unary"
        open_call = getattr(channel, f"{asks}_{'stream' if method.server_streaming else 'unary'}")
        call = open_call(f"/{service.full_name}/{method.name}", ask.SerializeToString, answer.FromString)
        match method.name:
            case "Generate" | "GenerateStream":
                said = call(ask(text=PROMPT, max_tokens=3))
                choices = [part.choice for part in said] if method.server_streaming else said.choices
                tokens = [token for choice in choices for token in choice.token_ids]
                assert tokens == expected_tokens(gateways, gateways.tokenizer.encode(PROMPT), 3)
            case "Tokenize":
                found = call(ask(text=PROMPT))
                assert list(found.token_ids) == gateways.tokenizer.encode(PROMPT)
                assert found.max_sequence_length == MAX_LENGTH
            case "Detokenize":
                assert call(ask(token_ids=gateways.tokenizer.encode(PROMPT))).text == PROMPT
            case "ListModels":
                [model] = call(ask()).models
                assert (model.id, model.vocabulary_size, model.max_sequence_length) == (MODEL, VOCABULARY, MAX_LENGTH)
            case "Replay":
                error = refusal(lambda: list(call(iter([ask(receipt="{}")]))))  # noqa: B023
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "this server signs no receipts" in error.details()
        called.add(method.name)
    assert called == {"Generate", "GenerateStream", "Tokenize", "Detokenize", "ListModels", "Replay"}


def test_every_method_but_health_takes_a_key(gateways: Gateways) -> None:
    with (
        gateways.serve(GatewaySettings(api_keys=(SecretStr("key"),))) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
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
                assert refusal(call).code() is grpc.StatusCode.UNAUTHENTICATED
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
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert stub.Generate(pb.GenerateRequest(text="a"), timeout=LONG).choices
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            error = refusal(lambda: stub.Generate(pb.GenerateRequest(text="a"), timeout=LONG))
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
