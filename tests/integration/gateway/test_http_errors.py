"""Responses of the HTTP API to bad requests and to failures."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.protos import scheduler_pb2
from spool.services.text.tokenizer import ModelTokenizer
from tests.integration.gateway.expected import (
    BAD_SCHEMA,
    CHAT,
    ENDLESS,
    EXPONENTIAL,
    FAULT,
    PROMPT,
    TIMEOUT,
    NoScheduler,
    NoTarget,
    Recorder,
    error_of,
    refuse_message,
)
from tests.support.clients import message_of
from tests.support.gateway import MODEL, Gateways, Served, save_tokenizer
from tests.support.stand_in_worker import ROW_FAILS, VOCABULARY

Bad = list[tuple[dict[str, Any], str | None, str]]

BAD_COMPLETIONS: Bad = [
    ({"prompt": None}, "prompt", "prompt is None, must be text"),
    ({"prompt": []}, "prompt", r"prompt is \[\]"),
    ({"prompt": ["a", 1]}, "prompt", "prompt holds 'a' at index 0, must be token ids"),
    ({"prompt": ["a", ""]}, "prompt", r"prompt\[1\] is empty"),
    ({"prompt": [1, -1]}, "prompt", r"prompt\[1\] is -1, must be a token id between 0 and 999"),
    ({"prompt": [VOCABULARY]}, "prompt", r"prompt\[0\] is 1000, must be a token id between 0 and 999"),
    ({"prompt": [True]}, "prompt", "holds True"),
    ({"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
    ({"prompt": "A" * 3000}, "prompt", "prompt has 3000 tokens.* makes 3001; the model's limit is 2000"),
    ({"max_tokens": 5000}, "prompt", "1 tokens.* max_tokens of 5000 makes 5001; .* limit is 2000"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, must be at least 1"),
    ({"max_tokens": 10**30}, "prompt", "makes 10000000"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens is '5', must be a valid integer"),
    ({"n": 0}, "n", "n is 0, must be between 1 and 128"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "make 200 sequences, must be at most 128"),
    ({"temperature": -0.5}, "temperature", "temperature is -0.5, must be between 0 and 100"),
    ({"temperature": float("nan")}, "temperature", "temperature is nan"),
    ({"top_k": -2}, "top_k", "top_k is -2, must be 0"),
    ({"seed": 2**64}, "seed", "seed is 18446744073709551616, must be between"),
    ({"stop": ["", "b"]}, "stop", r"stop\[0\] has 0 characters"),
    ({"stop": ["b"] * 17}, "stop", "stop has 17 strings, must have at most 16"),
    ({"stop": 1}, "stop", "stop is 1, must be a text or a list of texts"),
    ({"stop": [1]}, "stop.0", "stop.0 is 1, must be a valid string"),
    ({"stop": ["\ud800"]}, "stop.0", "half a surrogate pair"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", r"stop_token_ids\[0\] is -1"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "logit_bias.x is no token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "logit_bias.1 is 101, must be less than or equal to 100"),
    ({"logit_bias": {"1000": 1}}, "logit_bias", "names token id 1000, must be between 0 and 999"),
    ({"logprobs": 21}, "logprobs", "logprobs is 21, must be between 0 and 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21, must be between 0 and 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "with stream"),
    ({"bad_words": "b"}, "bad_words", "bad_words is 'b', must be a valid list"),
    ({"bad_words": ["b", ""]}, "bad_words", r"bad_words\[1\] has 0 characters"),
    ({"bad_words": [" "]}, "bad_words", "bad_words holds ' ', which makes no token"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "is 6, must be at most max_tokens, which is 5"),
    ({"priority": 2**31}, "priority", "priority is 2147483648, must be between -2147483648 and 2147483647"),
    ({"priority": "soon"}, "priority", "priority is 'soon', must be a valid integer"),
    ({"cache_salt": ""}, "cache_salt", "should have at least 1 character"),
    ({"cache_salt": 7}, "cache_salt", "must be a valid string"),
    ({"cache_salt": "\ud800"}, "cache_salt", "half a surrogate pair"),
    ({"spool": {"draft_length": -1}}, "spool.draft_length", "draft_length is -1"),
    ({"spool": {"draft_length": 10**18}}, "spool.draft_length", "must be between 0 and 2147483647"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "is 1e-300, must be between 0.01 and 100"),
    ({"spool": {"draft_length": 2, "speculation": False}}, "spool", "with speculation off"),
    ({"spool": {"proposer": "head"}}, "spool.proposer", "proposer is 'head', must be 'draft', 'lookup' or 'none'"),
    ({"spool": {"speed": 2}}, "spool.speed", "not a known field"),
    ({"unknown": 2}, "unknown", "unknown is not a known field$"),
    ({"max_token": 2}, "max_token", r"max_token is not a known field, did you mean max_tokens\?$"),
    ({"spool": {"draft_lenght": 2}}, "spool.draft_lenght", r"did you mean draft_length\?$"),
    ({"x" * 3_000_000: 2}, "x" * 200, "xxx is not a known field$"),
]

# Fields of messages are not null, a text is a list of characters, and what is empty is not there.
OF_JSON = ("prompt is None", r"prompt is \[\]", "bad_words is 'b'", "should have at least 1 character")


def refuse(http: httpx.Client, route: str, body: dict[str, Any], param: str | None, message: str) -> None:
    content = json.dumps(body).encode()
    response = http.post(f"/v1/{route}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert re.search(message, error_of(response)), error_of(response)
    assert response.json()["error"]["param"] == param
    assert len(error_of(response)) < 500


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS)
def test_bad_completions(
    http: httpx.Client, stub: GenerationServiceStub, body: dict[str, Any], param: str | None, message: str
) -> None:
    """Over gRPC too, unless its request has no such field or value."""
    refuse(http, "completions", {"prompt": "a", **body}, param, message)
    if not message.startswith(OF_JSON):
        with suppress(TypeError, ValueError):
            refuse_message(stub, message_of(**{"prompt": "a", **body}), param, message)


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


TOOL = tool()
BAD_CHATS: Bad = [
    ({"messages": []}, "messages", "messages has 0 entries"),
    ({"messages": [{"role": "pirate", "content": "arr"}]}, "messages.0.role", "'pirate'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "at index 0, must be"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages", "no tools here"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "messages.0.tool_call_id is missing"),
    ({"tools": [TOOL]}, "tools", "the model's chat template has no place for"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is missing"),
    ({"tools": [{**TOOL, "type": "custom"}]}, "tools.0.type", "is 'custom', must be 'function'"),
    ({"tools": [tool(name=None)]}, "tools.0.function.name", "is None, must be a valid string"),
    ({"tools": [tool(name="a b")]}, "tools.0.function.name", "is 'a b', .* pattern"),
    ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", "must be a valid dictionary"),
    ({"tools": [TOOL, tool(name="g"), TOOL]}, "tools.2.function.name", "is 'f', which is that of tools.0, must differ"),
    ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "tools", "has 129 entries, must have at most 128"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters", "is 'array', must be 'object'"),
    (
        {"tools": [TOOL, tool(name="g", parameters={"properties": {"a": {"type": "text"}}})]},
        "tools.1.function.parameters",
        "is no JSON schema: properties.a.type is 'text', must be one of",
    ),
    (
        {"tools": [tool(parameters={"description": "a" * 70_000})]},
        "tools.0.function.parameters",
        "has 70019 bytes, must have at most 65536",
    ),
    ({"tools": [tool(parameters={"const": "\ud800"})]}, "tools.0.function.parameters", "surrogate"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "is 'any', must be 'none', 'auto', "),
    ({"tools": [TOOL], "tool_choice": chosen("g")}, "tool_choice", "names 'g', must be one of .*: f"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice asks for a call, which needs tools"),
    (
        {"messages": [*CHAT, {"role": "user", "content": "a", "tool_calls": [called("{}")]}]},
        "messages.2.tool_calls",
        "is given with the role 'user'",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "is 'xml', must be 'text'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must have a json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}},
        "response_format.json_schema.mode",
        "not a known field",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}}, "response_format", FAULT),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "must be false with response_f"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21, must be between 0 and 20"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "no option of a template"),
    ({"chat_template_kwargs": {"shout": 1}}, "chat_template_kwargs", "has shout, which the model's .* does not read$"),
    ({"messages": [{"role": "user", "contents": "a"}]}, "messages.0.contents", r"did you mean content\?$"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", r"did you mean json\?$"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
def test_bad_chats(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    refuse(http, "chat/completions", {"messages": CHAT, **body}, param, message)


# A hundred of these intersections take the library minutes, a thousand choices at each character many seconds.
ENDLESS_SCHEMA = {"allOf": [{"properties": {"k": {"type": "string", "pattern": f"^.*{n}.*$"}}} for n in range(400)]}
# The library recurses into rules until its stack is full.
CHAIN = "\n".join(["start: A0", *(f"A{n}: A{n + 1}" for n in range(5000)), 'A5000: "a"'])
BAD_STRUCTURES: Bad = [
    ({}, "structured_outputs", "must have one of json"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs", "must have one of json"),
    ({"structural_tag": "a"}, "structured_outputs.structural_tag", "not a known field"),
    ({"json": {"$ref": "#/$defs/gone"}}, "structured_outputs", "cannot be used: .*does not exist"),
    ({"json": {"uniqueItems": True, "type": "array"}}, "structured_outputs", "cannot be used: Unimplemented keys"),
    ({"json": "{"}, "structured_outputs", "cannot be used: EOF while parsing"),
    ({"json": 1}, "structured_outputs.json", "is 1, must be an object"),
    ({"json": ENDLESS_SCHEMA}, "structured_outputs", "cannot be used: it takes more than 0.5 s of CPU time"),
    ({"regex": "(a"}, "structured_outputs", "cannot be used: .*unclosed group"),
    ({"regex": EXPONENTIAL}, "structured_outputs", "cannot be used: .*too many expressions"),
    ({"grammar": "start: gone"}, "structured_outputs", 'cannot be used: .*unknown name: "gone"'),
    ({"grammar": CHAIN}, "structured_outputs", "cannot be used: it is nested too deeply"),
    ({"json": '{"const": 1e9999999999999999999}'}, "structured_outputs", "cannot be used: .* must have an exponent"),
    ({"choice": []}, "structured_outputs.choice", "structured_outputs.choice"),
    ({"choice": ["\ud800"]}, "structured_outputs.choice.0", "half a surrogate pair"),
]


@pytest.mark.parametrize(("structure", "param", "message"), BAD_STRUCTURES)
def test_bad_structures(http: httpx.Client, structure: dict[str, Any], param: str, message: str) -> None:
    refuse(http, "completions", {"prompt": "a", "structured_outputs": structure}, param, message)


class Smaller(Recorder):
    """A model whose tokenizer has more tokens than its weights."""

    async def model(self) -> scheduler_pb2.ServedModel:
        served = scheduler_pb2.ServedModel()
        served.CopyFrom(await self.backend.model())
        served.vocabulary_size = 931
        return served


def test_tokens_without_weights_are_named_in_the_field_that_makes_them(gateways: Gateways) -> None:
    token = gateways.tokenizer.token_id("zz")
    message = f"holds 'zz', which is token {token}: the model's weights end with token 930"
    with gateways.serve(backend=Smaller(gateways)) as served, httpx.Client(base_url=served.url) as http:
        refuse(
            http,
            "chat/completions",
            {"messages": [*CHAT, *CHAT, {"role": "user", "content": "a zz"}]},
            "messages",
            f"^messages {message}",
        )
        refuse(http, "completions", {"prompt": "a zz"}, "prompt", f"^prompt {message}")
        refuse(http, "completions", {"prompt": ["a", "a zz"]}, "prompt", rf"^prompt\[1\] {message}")


def test_a_template_names_the_option_that_is_meant(gateways: Gateways, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = (
        "{% macro turn(m) %}{{ m.role }}{% if shout %}!{% endif %}{{ m.content }}{% endmacro %}"
        "{% set inner = 1 %}{% for m in messages %}{{ turn(m) }}{{ inner }}{% endfor %}"
        "{% if think is defined and not think %}{{ strftime_now('%Y') }}{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ModelTokenizer(tmp_path)
    with gateways.serve(tokenizer=tokenizer) as served, httpx.Client(base_url=served.url) as http:
        for options in ({"shout": True}, {"think": False, "shout": None}):
            assert http.post("/tokenize", json={"messages": CHAT, "chat_template_kwargs": options}).status_code == 200
        for name, meant in (("shuot", ", did you mean shout?"), ("inner", ""), ("enable_thinking", ""), ("m", "")):
            for route in ("/tokenize", "/v1/chat/completions"):
                response = http.post(route, json={"messages": CHAT, "chat_template_kwargs": {name: True}})
                assert (response.status_code, error_of(response)) == (
                    400,
                    f"chat_template_kwargs has {name}, which the model's chat template does not read{meant}",
                )


def test_an_encoded_body_is_refused_as_such(http: httpx.Client) -> None:
    content = gzip.compress(json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = http.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "content-encoding")
    assert error_of(response) == "the body has the content-encoding 'gzip', must be sent as it is"
    headers["content-encoding"] = "Identity"
    assert http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200
    assert http.get("/v1/models", headers={"content-encoding": "gzip"}).status_code == 200


class NoTokenizer(Recorder):
    async def model(self) -> scheduler_pb2.ServedModel:
        served = scheduler_pb2.ServedModel()
        served.CopyFrom(await self.backend.model())
        served.ClearField("tokenizer_digest")
        return served


def test_structures_need_a_tokenizer(gateways: Gateways) -> None:
    with gateways.serve(backend=NoTokenizer(gateways)) as served, httpx.Client(base_url=served.url) as http:
        body = {"prompt": "a", "response_format": {"type": "json_object"}}
        refuse(http, "completions", body, "response_format", "response_format needs a model with a tokenizer")


def test_chats_need_a_template(gateways: Gateways, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<0>"}', encoding="utf-8")
    tokenizer = ModelTokenizer(tmp_path)
    with gateways.serve(tokenizer=tokenizer) as served, httpx.Client(base_url=served.url) as http:
        refuse(http, "chat/completions", {"messages": CHAT}, "messages", "no chat template")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty"),
        (b'{"prompt": "a', "not JSON: Unterminated string starting at character 11$"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b'{"prompt": "\xff"}', "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"prompt": [1' + b"0" * 5000 + b"]}", "cannot be read as JSON"),
        (b'{"prompt": "a", "\\ud800": 1}', "half a surrogate pair"),
        (b'{"prompt": "a", "n": NaN}', "n is nan"),
        (b"{}", "prompt is missing"),
    ],
)
def test_bodies_that_are_no_request(http: httpx.Client, content: bytes, message: str) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert re.search(message, error_of(response)), error_of(response)
    text = http.post("/v1/completions", content=content, headers={"content-type": "text/plain"})
    assert text.status_code == 400
    assert not content or "content-type application/json" in error_of(text)


def test_large_bodies_are_refused_and_the_server_goes_on(http: httpx.Client) -> None:
    def drip() -> Iterator[bytes]:
        for _ in range(160):
            yield b" " * 65536

    for content in (b" " * 10_000_000, drip()):
        response = http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "must have at most 4194304" in error_of(response)
    assert http.get("/health").status_code == 200


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert http.get("/v2/models").status_code == 404
    assert "GET /v2/models" in error_of(http.get("/v2/models"))
    response = http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/ping", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert re.fullmatch("[0-9a-f]{32}", http.get("/nowhere").headers["x-request-id"])
    assert len(http.get("/ping", headers={"x-request-id": "x" * 500}).headers["x-request-id"]) == 32


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_bad_deadlines(http: httpx.Client, value: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-seconds": value})
    assert response.status_code == 400
    assert "x-request-timeout-seconds" in error_of(response)


def test_deadlines(http: httpx.Client, slowly_served: Served) -> None:
    response = http.post("/v1/completions", json=ENDLESS, headers={"x-request-timeout-seconds": "0.2"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    # Long enough for the stream to begin, too short for its end: the error is an event.
    limit = {"x-request-timeout-seconds": "1"}
    with openai.OpenAI(base_url=f"{slowly_served.url}/v1", api_key="x", default_headers=limit) as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900}
        stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError, match="not finished within its") as caught:
            list(stream)
        assert caught.value.code == "deadline_exceeded"


def test_the_failure_of_one_choice_ends_all(http: httpx.Client) -> None:
    body = {"prompt": [[20, 21], [ROW_FAILS]], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    response = http.post("/v1/completions", json=body)
    assert '"code":"sequence_failed"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("kind", [NoTarget, NoScheduler])
def test_nobody_to_generate(gateways: Gateways, kind: type[Recorder]) -> None:
    with gateways.serve(backend=kind(gateways)) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
        response = http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == http.get("/health").status_code == 503
        assert response.headers["retry-after"] == "1"
        assert error_of(response)
        assert http.get("/-/healthz").status_code == 503
        assert http.get("/ping").status_code == 200
        assert http.get("/metrics").status_code == 200
