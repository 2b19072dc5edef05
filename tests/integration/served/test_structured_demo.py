"""Structured output and required calls of the demo models, as OpenAI's package asks for them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

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
# Every one bounds its texts.
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
]
UNSUPPORTED: list[dict[str, Any]] = [
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


def ask_for(client: openai.OpenAI, schema: dict[str, Any], temperature: float, draft_length: int) -> tuple[str, str]:
    """The text, and why it ended."""
    done = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"Write a short example of JSON that fits this schema:\n{schema}"}],
        response_format={"type": "json_schema", "json_schema": {"name": "asked", "schema": schema}},
        temperature=temperature,
        seed=1,
        max_tokens=200,
        extra_body={"spool": {"draft_length": draft_length}},
    )
    return done.choices[0].message.content or "", done.choices[0].finish_reason


def test_many_schemas_give_the_same_valid_text_with_drafts_and_without(client: openai.OpenAI) -> None:
    cases = list(itertools.product(MANY, (0.0, 0.8)))
    with ThreadPoolExecutor(8) as pool:
        drafted, plain = (
            list(pool.map(lambda case, length=length: ask_for(client, *case, length), cases)) for length in (4, 0)
        )
    assert drafted == plain
    for (schema, _), (text, reason) in zip(cases, drafted, strict=True):
        assert reason == "stop"
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("schema", UNSUPPORTED)
def test_schemas_with_unsupported_keywords_are_refused(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        ask_for(client, schema, 0.0, 0)


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
