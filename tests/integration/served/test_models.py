"""Real models behind a gateway: structured output and calls, from OpenAI's client to the weights and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jsonschema
import openai
import pytest

from spool.engine.models.fetching import fetch_model
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.models.source import demo_chat_template, resolve_model
from spool.engine.settings import EngineSettings
from spool.scheduler.messages import Role
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.cells import running_cell
from tests.support.gateway import Gateways

pytestmark = pytest.mark.slow


@contextmanager
def served(
    target: str, draft: str, tokenizer: ModelTokenizer, dtype: str, max_model_len: int | None = None
) -> Iterator[openai.OpenAI]:
    common = {"threads": 1, "kv_pages": 400, "exact": False, "max_num_batched_tokens": 64}
    target_settings, draft_settings = (
        EngineSettings(model, dtype, max_model_len=max_model_len, **common) for model in (target, draft)
    )
    cell = running_cell(
        draft=load_draft_engine(draft_settings, lambda *_: None),
        target=load_target_engine(target_settings, lambda *_: None),
    )
    with Gateways(tokenizer, cell) as gateways:
        with gateways.serve() as gateway, openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            yield client
        gateways.wait_until_idle()


# What the demo says depends on the instruction set. So everything has an end, however the model goes on.
def closed(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 4}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
# Every one bounds its texts.
MANY: list[dict[str, Any]] = [
    {"const": {"a": [1, None]}},
    {"enum": ["red", 3, False, None, "green"]},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
    closed(name=SHORT, place=closed(x=DIGIT, y=DIGIT)),
    {"oneOf": [closed(kind={"const": "cat"}, lives=DIGIT), closed(kind={"const": "dog"})]},
    {"$defs": {"end": {"type": "null"}}, **closed(next={"anyOf": [{"$ref": "#/$defs/end"}, closed(n=DIGIT)]})},
]


def demo_tokenizer(chat_template: str | None = None) -> ModelTokenizer:
    return ModelTokenizer(fetch_model(resolve_model("demo", Role.TARGET), lambda *_: None), chat_template)


@pytest.fixture(scope="module")
def demo() -> Iterator[openai.OpenAI]:
    with served("demo", "demo", demo_tokenizer(demo_chat_template()), "auto") as client:
        yield client


def ask_for(client: openai.OpenAI, schema: dict[str, Any], temperature: float, draft_length: int) -> str:
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"Write a short example of JSON that fits this schema:\n{schema}"}],
        response_format={"type": "json_schema", "json_schema": {"name": "asked", "schema": schema}},
        temperature=temperature,
        seed=1,
        max_tokens=200,
        logprobs=True,
        stream=True,
        extra_body={"spool": {"draft_length": draft_length}},
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert choices[-1].finish_reason == "stop"
    # A token without an alternative is certain.
    assert all(one.logprob <= 0 for choice in choices if choice.logprobs for one in choice.logprobs.content or [])
    return "".join(choice.delta.content or "" for choice in choices)


def test_many_schemas_give_the_same_valid_text_with_drafts_and_without(demo: openai.OpenAI) -> None:
    # Greedy and sampled in turn.
    cases = [(schema, 0.8 * (number % 2)) for number, schema in enumerate(MANY)]
    with ThreadPoolExecutor(8) as pool:
        drafted, plain = (
            list(pool.map(lambda case, length=length: ask_for(demo, *case, length), cases)) for length in (4, 0)
        )
    assert drafted == plain
    for (schema, _), text in zip(cases, drafted, strict=True):
        jsonschema.validate(json.loads(text), schema)


# --- calls of the demo models -----------------------------------------------------------------------------------------

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


def test_required_calls_fit_their_schemas_with_drafts_and_without(demo: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0.8,
        "seed": 2,
        "max_tokens": 200,
    }

    def whole(draft_length: int) -> tuple[str, str]:
        extra = {"spool": {"draft_length": draft_length}}
        [choice] = demo.chat.completions.create(**asked, extra_body=extra).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        return call.function.name, call.function.arguments

    name, arguments = whole(4)
    jsonschema.validate(json.loads(arguments), TOOL_SCHEMAS[name])
    assert whole(0) == (name, arguments)
    chunks = [chunk.choices[0] for chunk in demo.chat.completions.create(**asked, stream=True) if chunk.choices]
    parts = [call.function for chunk in chunks for call in chunk.delta.tool_calls or [] if call.function]
    assert "".join(part.name or "" for part in parts) == name
    assert "".join(part.arguments or "" for part in parts) == arguments


def test_without_tools_the_template_is_the_models_own() -> None:
    ours, own = demo_tokenizer(demo_chat_template()), demo_tokenizer()
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hello."}
    for messages in (QUESTION, [system, *QUESTION], [*QUESTION, answer, *QUESTION]):
        for begin in (True, False):
            text = own.render_chat(messages, add_generation_prompt=begin)
            assert ours.render_chat(messages, add_generation_prompt=begin) == text
    prompt = ours.render_chat([system, *QUESTION], tools=TOOLS)
    assert prompt.count("Be brief.") == prompt.count("SmolLM") + 1 == 1
