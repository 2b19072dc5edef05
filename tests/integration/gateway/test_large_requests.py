"""No request keeps the event loop of a gateway from the streams of others, however large and wrong the request is."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.gateway.expected import CHAT, error_of

BYTES = 4 * 1024 * 1024 - 1024
CHATS, TEXTS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
ZEROS, EMPTY, OBJECTS = "0", '""', "{}"

MOST_SECONDS = 0.15
"""Of the event loop's thread for one callback, in time on a processor: others that compute do not count, nor does the
collection of the test's own garbage. gRPC parses messages there, in C; that comes on top."""


def filled(before: str, entry: str, after: str, most: int = 900_000) -> bytes:
    """As many entries, separated by commas, as a body has room for; fewer than a body may have."""
    count = min(most, (BYTES - len(before) - len(after)) // (len(entry) + 1))
    return f"{before}{','.join([entry] * count)}{after}".encode()


def members(before: str, value: str, after: str) -> bytes:
    count = (BYTES - len(before) - len(after)) // (len(value) + 11)
    given = ",".join(f'"{number:07}":{value}' for number in range(count))
    return f"{before}{given}{after}".encode()


def with_message(inner: str, entry: str, after: str = "]}]}") -> bytes:
    return filled(f'{{"messages":[{inner}', entry, after)


SAID = '{"role":"user","content":"a"}'
CALLED = '{"role":"assistant","content":"a","tool_calls":['
CALL = '{"id":"a","function":{"name":"f","arguments":"{"}}'
PARTS = "objects, lists and members of objects, must have at most 100000"

LARGE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "messages: zeros": (CHATS, lambda: filled('{"messages":[', ZEROS, "]}"), "messages has .* at most 4096"),
    "entries": (CHATS, lambda: filled('{"messages":[', ZEROS, "]}", BYTES), "entries, must have at most 1000000"),
    "messages: objects": (CHATS, lambda: filled('{"messages":[', OBJECTS, "]}"), PARTS),
    "messages: short": (CHATS, lambda: filled('{"messages":[', SAID, "]}"), PARTS),
    "tools": (CHATS, lambda: filled(f'{{"messages":[{SAID}],"tools":[', ZEROS, "]}"), "tools has .* at most 128"),
    "parts": (CHATS, lambda: with_message('{"role":"user","content":[', EMPTY), "messages.0.content has .* 1024"),
    "calls": (CHATS, lambda: with_message(CALLED, CALL), PARTS),
    "few calls": (CHATS, lambda: with_message(CALLED, ZEROS), "messages.0.tool_calls has .* 1024"),
    "annotations": (CHATS, lambda: with_message('{"role":"user","content":7,"annotations":[', ZEROS), "content is 7"),
    "arguments": (
        CHATS,
        lambda: with_message(f'{CALLED}{{"id":"a","function":{{"name":"f","arguments":"[', ZEROS, ']"}}]},0]}'),
        "messages.1 is 0",
    ),
    "arguments in all": (
        CHATS,
        lambda: with_message(CALLED, CALL[:-3] + "[]," * 9000 + CALL[-3:]),
        "messages has arguments that are too large in all: it has .* must have at most 100000",
    ),
    "template options": (
        CHATS,
        lambda: members(f'{{"messages":[{SAID}],"chat_template_kwargs":{{', "0", "}}"),
        PARTS,
    ),
    "fields": (CHATS, lambda: members("{", "0", "}"), PARTS),
    "schema": (
        CHATS,
        lambda: members(
            f'{{"messages":[{SAID}],"response_format":{{"type":"json_schema","json_schema":{{"schema":{{', "0", "}}}}"
        ),
        PARTS,
    ),
    "enum": (
        CHATS,
        lambda: filled(
            f'{{"messages":[{SAID}],"response_format":{{"type":"json_schema","json_schema":{{"schema":{{"enum":[',
            EMPTY,
            "]}}}}",
        ),
        "response_format has .* at most 65536",
    ),
    "parameters": (
        CHATS,
        lambda: filled(
            f'{{"messages":[{SAID}],"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"required":[',
            EMPTY,
            "]}}}]}",
        ),
        "tools.0.function.parameters has .* at most 65536",
    ),
    "unsupported": (CHATS, lambda: filled('{"documents":[', ZEROS, "]}"), "documents is .* not supported"),
    "stop": (TEXTS, lambda: filled('{"prompt":"a","stop":[', ZEROS, "]}"), "stop has .* at most 16"),
    "stop tokens": (TEXTS, lambda: filled('{"prompt":"a","stop_token_ids":[', EMPTY, "]}"), "stop_token_ids has"),
    "bad words": (TEXTS, lambda: filled('{"prompt":"a","bad_words":[', ZEROS, "]}"), "bad_words has .* at most 64"),
    "bias": (TEXTS, lambda: members('{"prompt":"a","logit_bias":{', '"x"', "}}"), PARTS),
    "choices": (
        TEXTS,
        lambda: filled('{"prompt":"a","structured_outputs":{"choice":[', ZEROS, "]}}"),
        "choice.0 is 0, must be a valid string",
    ),
    "prompts": (TEXTS, lambda: filled('{"prompt":[', EMPTY, "]}"), "prompt has .* at most 128"),
    "lists": (TEXTS, lambda: filled('{"prompt":[', "[]", "]}"), PARTS),
    "tokens": (TEXTS, lambda: filled('{"prompt":[', ZEROS, "]}"), "prompt has .* tokens, .*limit is 2000"),
    "no tokens": (TEXTS, lambda: filled('{"prompt":[0,', EMPTY, "]}"), "prompt holds '' at index 1"),
    "deep": (TEXTS, lambda: b"[" * BYTES, PARTS),
    "deep and wide": (TEXTS, lambda: filled("[", "[" * 300 + "]" * 300, "]"), PARTS),
    "text": (TEXTS, lambda: b'{"prompt":"' + b"hello, world! " * (BYTES // 14) + b'"}', "at least .* limit is 2000"),
    "conversation": (
        CHATS,
        lambda: json.dumps({"messages": [{"role": "user", "content": "<0><0" * (BYTES // 5 - 100)}]}).encode(),
        "at least .* limit is 2000",
    ),
    "encoded": (TOKENIZE, lambda: b'{"prompt":"' + b"hello" * 200_000 + b'"}', "at least .* limit is 2000"),
    "decoded": (DETOKENIZE, lambda: filled('{"tokens":[', ZEROS, "]}"), "tokens has .* at most 2000"),
    "not tokens": (DETOKENIZE, lambda: filled('{"tokens":[', EMPTY, "]}"), "tokens.0 is ''"),
}


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """Of the callbacks of event loops up to now, in seconds on a processor."""
    found, run = [0.0], asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        found.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.disable()
    yield lambda: max(found)
    gc.enable()


@pytest.mark.parametrize("kind", LARGE)
def test_large_bodies_do_not_hold_the_event_loop(http: httpx.Client, longest: Callable[[], float], kind: str) -> None:
    route, body, message = LARGE[kind]
    response = http.post(route, content=body(), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text[:500]
    assert re.search(message, error_of(response)), error_of(response)
    assert len(error_of(response)) < 500
    assert longest() < MOST_SECONDS


MESSAGES: dict[str, tuple[Callable[[], pb.GenerateRequest], str]] = {
    "messages": (
        lambda: pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * (BYTES // 2))),
        "messages has .* at most 4096",
    ),
    "stop": (lambda: pb.GenerateRequest(text="a", stop=[""] * (BYTES // 2)), "stop has .* at most 16"),
    "stop tokens": (lambda: pb.GenerateRequest(text="a", stop_token_ids=[0] * BYTES), "stop_token_ids has"),
    "bias": (
        lambda: pb.GenerateRequest(text="a", logit_bias=dict.fromkeys(range(200000), 0.0)),
        "logit_bias has .* at most 1024",
    ),
    "tokens": (
        lambda: pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[0] * BYTES)),
        "prompt has .* tokens, .*limit is 2000",
    ),
    "choices": (
        lambda: pb.GenerateRequest(
            text="a", structured_outputs=pb.StructuredOutputs(choice=pb.Choices(texts=[""] * (BYTES // 3)))
        ),
        "structured_outputs has .* at most 65536",
    ),
    "text": (lambda: pb.GenerateRequest(text="hello, world! " * (BYTES // 14)), "at least .* limit is 2000"),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_large_messages_do_not_hold_the_event_loop(
    stub: GenerationServiceStub, longest: Callable[[], float], kind: str
) -> None:
    make, message = MESSAGES[kind]
    request = make()
    with pytest.raises(grpc.RpcError, match=message) as refused:
        stub.Generate(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    data, began = request.SerializeToString(), time.thread_time()
    pb.GenerateRequest.FromString(data)
    parsing = time.thread_time() - began
    # What looks at each element takes tens of times as long. Parsing and freeing them takes twice, and more where the
    # memory is somebody else's meanwhile.
    assert longest() < MOST_SECONDS + 10 * parsing


def test_only_the_models_length_limits_the_largest_honest_requests(http: httpx.Client) -> None:
    """What agents send: many messages and functions, and texts with many brackets."""
    parameters = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(50)}}
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}} for number in range(128)
    ]
    assert "limit is 2000" in error_of(http.post(TOKENIZE, json={"messages": CHAT * 2048}))
    response = http.post(CHATS, json={"messages": CHAT, "tools": tools})
    assert "tools is given, which the model's chat template has no place for" in error_of(response)
    assert "limit is 2000" in error_of(http.post(TOKENIZE, json={"prompt": '{"a": [1, {"b": "c\\"[{"}]}' * 20_000}))
