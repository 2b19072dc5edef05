"""Structured output and required calls of the demo models, as OpenAI's package asks for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from bench.structured.conformance import Asked, measure
from bench.structured.schemas import read_schemas
from engine.models.fetching import fetch_model
from engine.models.source import demo_chat_template, resolve_model
from engine.settings import EngineSettings
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch
from services.text.tokenizer import ModelTokenizer
from tests.support.gateway import Gateways

pytestmark = pytest.mark.slow


# What the demo says depends on the instruction set. So everything has an end, however the model goes on.
class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)
    zip_code: int = Field(ge=0, le=99999)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    mood: Literal["good", "bad"]
    addresses: list[Address] = Field(max_length=1)


ASK: list[Any] = [{"role": "user", "content": "Describe Ann from Paris, with her mood and one address, as short JSON."}]
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}},
        "required": ["capital"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
    {"enum": ["red", "green", 3]},
]


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 4}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
# What the library takes is in all but the last two of these. Every one bounds its texts.
MANY: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None]}},
    {"enum": ["red", 3, False, None, "green"]},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
    closed(name=SHORT, age=DIGIT),
    closed(place=closed(x=DIGIT, y=DIGIT)),
    {**closed(a=DIGIT, b=DIGIT), "required": ["b"]},
    {"anyOf": [{"type": "boolean"}, closed(no=DIGIT)]},
    {"oneOf": [closed(kind={"const": "cat"}, lives=DIGIT), closed(kind={"const": "dog"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"$defs": {"digit": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/digit"}, "maxItems": 2},
    {"$defs": {"end": {"type": "null"}}, **closed(next={"anyOf": [{"$ref": "#/$defs/end"}, closed(n=DIGIT)]})},
    {"type": "array", "items": DIGIT, "uniqueItems": True},
    {"type": "integer", "not": {"const": 4}},
]


def tokenizer(chat_template: str | None = None) -> ModelTokenizer:
    return ModelTokenizer(fetch_model(resolve_model("demo", Role.TARGET), lambda *_: None), chat_template)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    launches = []
    for role in (Role.TARGET, Role.DRAFT):
        settings = EngineSettings("demo", threads=1, kv_pages=400, exact=False, max_num_batched_tokens=64)
        launches.append(WorkerLaunch(role, asdict(settings), threads=1))
    gateways = Gateways(tokenizer(demo_chat_template()), launches)
    try:
        with gateways.serve() as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            yield client
        gateways.wait_until_idle()
    finally:
        gateways.close()


def test_parsed_answers(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="demo", messages=ASK, response_format=Person, temperature=0, max_tokens=400
    )
    [choice] = done.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


def test_streams_are_the_same_with_drafts_and_without(client: openai.OpenAI) -> None:
    def text(draft_length: int) -> str:
        stream = client.chat.completions.create(
            model="demo",
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": Person.model_json_schema()},
            },
            temperature=0.8,
            seed=4,
            max_tokens=400,
            stream=True,
            extra_body={"spool": {"draft_length": draft_length}},
        )
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        assert chunks[-1].finish_reason == "stop"
        return "".join(chunk.delta.content or "" for chunk in chunks)

    drafted = text(4)
    assert Person.model_validate_json(drafted)
    assert drafted == text(0)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_text_fits_its_schema(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    done = client.completions.create(
        model="demo",
        prompt="Q: What is the capital of France? Answer in JSON.\nA: ",
        temperature=0.8,
        seed=1,
        max_tokens=200,
        n=3,
        logprobs=2,
        extra_body={"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}},
    )
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), schema)
        assert choice.logprobs is not None
        # A token without alternative is certain.
        assert max(choice.logprobs.token_logprobs or []) <= 0


def test_other_structures(client: openai.OpenAI) -> None:
    def text(**structure: object) -> str:
        done = client.completions.create(
            model="demo",
            prompt="The year is",
            temperature=0,
            max_tokens=30,
            extra_body={"structured_outputs": structure, "min_tokens": 2},
        )
        assert done.choices[0].finish_reason == "stop"
        return done.choices[0].text

    assert re.fullmatch("[0-9]{4}", text(regex="[0-9]{4}"))
    assert text(choice=["one", "two"]) in ("one", "two")
    assert re.fullmatch("a b{1,3}", text(grammar='root ::= "a " "b" "b"? "b"?'))
    assert json.loads(text(json={"type": "integer", "minimum": 1990, "maximum": 2030})) in range(1990, 2031)


def test_many_schemas_give_the_same_valid_text_with_drafts_and_without(client: openai.OpenAI, tmp_path: Path) -> None:
    for number, schema in enumerate(MANY):
        (tmp_path / f"{number:02}.json").write_text(json.dumps(schema), encoding="utf-8")
    asked = Asked("demo", max_tokens=200, closing_bias=5.0, seed=1)
    report = asyncio.run(measure(str(client.base_url), "none", asked, read_schemas(tmp_path), concurrency=8))
    assert (report.differing, report.invalid, report.unchecked, report.failed) == ([], [], [], [])
    assert report.reasons == {'Unimplemented keys: ["uniqueItems"]': 1, 'Unimplemented keys: ["not"]': 1}
    assert (report.schemas, report.refused, report.valid, report.valid_outputs) == (22, 2, 20, 40)
    assert 0 < report.accepted < report.tokens


PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "get_time", "description": "The time"}},
]
TOOL_SCHEMAS = {"get_weather": PLACE, "get_time": {"type": "object", "maxProperties": 0}}
QUESTION: list[Any] = [{"role": "user", "content": "How will the weather be in Paris in the next three days?"}]


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_calls_fit_their_schemas(client: openai.OpenAI, tool_choice: Any) -> None:
    done = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        temperature=0.8,
        seed=2,
        n=2,
        max_tokens=200,
    )
    for choice in done.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert tool_choice == "required" or call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), TOOL_SCHEMAS[call.function.name])


def test_calls_are_the_same_with_drafts_and_without(client: openai.OpenAI) -> None:
    def calls(draft_length: int, stream: bool) -> list[tuple[str, str]]:
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": QUESTION,
            "tools": TOOLS,
            "tool_choice": "required",
            "temperature": 0.8,
            "seed": 7,
            "max_tokens": 60,
            "extra_body": {"spool": {"draft_length": draft_length}},
        }
        if not stream:
            whole = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
            return [(call.function.name, call.function.arguments) for call in whole if call.type == "function"]
        found: list[tuple[str, str]] = []
        for chunk in client.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                assert delta.function is not None
                if delta.id is not None:
                    found.append((delta.function.name or "", ""))
                found[delta.index] = (found[delta.index][0], found[delta.index][1] + (delta.function.arguments or ""))
        return found

    drafted = calls(4, stream=False)
    assert drafted
    assert drafted == calls(0, stream=False) == calls(4, stream=True)


def test_without_tools_the_template_is_the_models_own() -> None:
    ours, own = tokenizer(demo_chat_template()), tokenizer()
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hello."}
    for messages in (QUESTION, [system, *QUESTION], [*QUESTION, answer, *QUESTION]):
        for begin in (True, False):
            text = own.render_chat(messages, add_generation_prompt=begin)
            assert ours.render_chat(messages, add_generation_prompt=begin) == text
    prompt = ours.render_chat([system, *QUESTION], tools=TOOLS)
    assert prompt.count("Be brief.") == prompt.count("SmolLM") + 1 == 1
