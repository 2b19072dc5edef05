"""Real models behind a gateway: sampling, structured output and calls, from OpenAI's client to the weights and back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
import tokenizers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from engine.models.fetching import fetch_model
from engine.models.loading import load_draft_engine, load_target_engine
from engine.models.source import demo_chat_template, resolve_model
from engine.settings import EngineSettings
from scheduler.messages import Role
from services.text.tokenizer import ModelTokenizer
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from tests.integration.gateway.test_http_tools import as_joined, joined, without_ids
from tests.support.cells import running_cell
from tests.support.chat_templates import THINKING
from tests.support.command_line import save_tokenizer
from tests.support.gateway import Gateways
from tests.support.tiny_models import save_tiny_pair
from tests.unit.gateway.test_schemas import CHECKS, schemas, written
from tests.unit.gateway.test_stop_strings import cut

pytestmark = pytest.mark.slow


@contextmanager
def served(
    target: str, draft: str, tokenizer: ModelTokenizer, dtype: str, max_model_len: int | None = None
) -> Iterator[openai.OpenAI]:
    common = {"threads": 1, "kv_pages": 400, "exact": False, "max_num_batched_tokens": 64}
    target_settings, draft_settings = (
        EngineSettings(model, dtype, max_model_len=max_model_len, **common) for model in (target, draft)
    )
    executors = [
        DraftStepExecutor(load_draft_engine(draft_settings, lambda *_: None)),
        TargetStepExecutor(load_target_engine(target_settings, lambda *_: None)),
    ]
    gateways = Gateways(tokenizer, running_cell(executors=executors))
    try:
        with gateways.serve() as gateway, openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            yield client
        gateways.wait_until_idle()
    finally:
        gateways.close()


# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {
    "prompt": "What is this?",
    "max_tokens": 60,
    "temperature": 0.8,
    "seed": 11,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    target, draft = save_tiny_pair("llama", tmp_path_factory.mktemp("tiny"))
    for folder in (target, draft):
        save_tokenizer(folder)
    with served(str(target), str(draft), ModelTokenizer(target), "float32") as client:
        yield client


def complete(client: openai.OpenAI, draft_length: int, **fields: Any) -> openai.types.Completion:
    """The draft is as large as the target, so the scheduler would hardly draft by itself."""
    [model] = client.models.list().data
    extra = {"spool": {"draft_length": draft_length}}
    return client.completions.create(model=model.id, **{**SAMPLED, **fields}, extra_body=extra)


def accepted(done: openai.types.Completion) -> int:
    assert done.usage is not None
    return int(done.usage.to_dict()["spool"]["accepted"])


def test_sampled_text_depends_on_its_seed_alone(tiny: openai.OpenAI) -> None:
    plain = [complete(tiny, 0, seed=11 + number).choices[0].text for number in range(4)]
    several = complete(tiny, 4, n=4)
    assert [choice.text for choice in several.choices] == plain
    assert len(set(plain)) == 4
    assert accepted(several) > 20


def test_log_probabilities_are_the_models(tiny: openai.OpenAI) -> None:
    drafted, plain = (
        complete(tiny, length, max_tokens=30, temperature=0, logprobs=5).choices[0].logprobs for length in (4, 0)
    )
    assert drafted is not None
    assert plain is not None
    assert drafted.tokens == plain.tokens
    assert drafted.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-3)
    assert drafted.text_offset == list(range(30))
    for token, logprob, top in zip(
        drafted.tokens or [], drafted.token_logprobs or [], drafted.top_logprobs or [], strict=True
    ):
        # Greedy: the likeliest token is the sampled one.
        assert max(top, key=lambda each: top[each]) == token
        assert top[token] == logprob < 0
        assert sum(math.exp(each) for each in top.values()) <= 1 + 1e-6


def test_stop_strings_inside_accepted_runs(tiny: openai.OpenAI) -> None:
    whole, total = complete(tiny, 0).choices[0].text, 0
    for start in range(5, 50, 5):
        stops = [whole[start : start + 3], whole[start + 1 : start + 6]]
        done = complete(tiny, 4, stop=stops)
        expected, stop = cut(whole, stops)
        assert stop is not None
        assert done.usage is not None
        # Each token of this tokenizer is one character.
        assert (done.choices[0].text, done.usage.completion_tokens) == (expected, len(expected + stop))
        total += accepted(done)
    assert total > 20


# --- structured output of the demo models -----------------------------------------------------------------------------


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


def demo_tokenizer(chat_template: str | None = None) -> ModelTokenizer:
    return ModelTokenizer(fetch_model(resolve_model("demo", Role.TARGET), lambda *_: None), chat_template)


@pytest.fixture(scope="module")
def demo() -> Iterator[openai.OpenAI]:
    with served("demo", "demo", demo_tokenizer(demo_chat_template()), "auto") as client:
        yield client


def test_parsed_answers(demo: openai.OpenAI) -> None:
    done = demo.chat.completions.parse(
        model="demo", messages=ASK, response_format=Person, temperature=0, max_tokens=400
    )
    [choice] = done.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


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


def test_other_structures(demo: openai.OpenAI) -> None:
    def text(**structure: object) -> str:
        done = demo.completions.create(
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


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_calls_fit_their_schemas_with_drafts_and_without(demo: openai.OpenAI, tool_choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": tool_choice,
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
    assert tool_choice == "required" or name == "get_weather"
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


# --- reasoning --------------------------------------------------------------------------------------------------------

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    shape = {"vocab_size": 96 + len(MARKERS), "max_position_embeddings": 1024}
    target, draft = save_tiny_pair("llama", tmp_path_factory.mktemp("thinker"), **shape)
    for folder in (target, draft):
        save_tokenizer(folder)
        model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        # As Qwen3 has them.
        model.add_tokens(
            [tokenizers.AddedToken(text, special=text.startswith("<|"), normalized=False) for text in MARKERS]
        )
        model.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with served(str(target), str(draft), ModelTokenizer(target, THINKING), "float32") as client:
        yield client


@pytest.mark.parametrize("tool_choice", [None, "auto", "required"])
@pytest.mark.parametrize("reasoning", ["begin_thinking", "enable_thinking"])
def test_reasoning_is_free_and_the_answer_is_not(
    thinker: openai.OpenAI, reasoning: str, tool_choice: str | None
) -> None:
    schema = closed(yes=SHORT, count=DIGIT)
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked: dict[str, Any] = {
        "model": thinker.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Hm?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        # The end of the reasoning and the marker of calls: a model with random weights hardly writes them.
        "logit_bias": {"97": 8, "98": 4},
        "max_tokens": 400,
        **({} if tool_choice is None else {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": False}),
    }
    extra = {"chat_template_kwargs": {reasoning: reasoning == "begin_thinking"}}
    thoughts = 0
    for seed in range(2):
        plain = {**extra, "spool": {"draft_length": 0}}
        answer = as_joined(thinker.chat.completions.create(**asked, seed=seed, extra_body=plain))
        drafted = {**extra, "spool": {"draft_length": 4}}
        chunks = list(thinker.chat.completions.create(**asked, seed=seed, extra_body=drafted, stream=True))
        assert without_ids(joined(chunks)) == without_ids(answer)
        assert (answer["finish_reason"] == "tool_calls") is (answer["content"] == "")
        assert tool_choice != "required" or answer["tool_calls"]
        for _, name, arguments in answer["tool_calls"]:
            jsonschema.validate(json.loads(arguments), TOOL_SCHEMAS[name])
        if answer["content"]:
            jsonschema.validate(json.loads(answer["content"]), schema)
        thoughts += bool(answer["reasoning_content"])
    assert (thoughts > 0) is (reasoning == "begin_thinking")


@pytest.mark.long
@settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=CHECKS)
@given(st.lists(schemas, min_size=40, max_size=40))
def test_a_thousand_schemas_are_refused_or_kept_with_drafts_and_without(
    thinker: openai.OpenAI, several: list[Any]
) -> None:
    [model] = thinker.models.list().data

    def answers(schema: str) -> tuple[Any, Any]:
        """With drafts and without. The numbers of the schema keep their digits on the way."""
        # The likelier the end is, the shorter are the texts.
        asked = f"{json.dumps(SAMPLED | {'model': model.id, 'max_tokens': 40, 'logit_bias': {'101': 8}})[:-1]}, "
        asked += f'"structured_outputs": {{"json": {schema}}}, "spool": {{"draft_length": '
        both = (
            http.post("completions", content=f"{asked}{length}}}}}", headers={"Content-Type": "application/json"})
            for length in (4, 0)
        )
        drafted, plain = ((one.status_code, one.json().get("choices")) for one in both)
        return drafted, plain

    texts = list(map(written, several))
    with httpx.Client(base_url=str(thinker.base_url), timeout=60) as http, ThreadPoolExecutor(8) as pool:
        for schema, (drafted, plain) in zip(texts, pool.map(answers, texts), strict=True):
            assert drafted == plain, schema
            status, choices = drafted
            assert status in (200, 400), schema
            if status == 200:
                assert not re.search(r"\s{41}", choices[0]["text"]), schema
                if choices[0]["finish_reason"] == "stop":
                    judge = jsonschema.Draft202012Validator(json.loads(schema, parse_float=Decimal))
                    judge.validate(json.loads(choices[0]["text"], parse_float=Decimal))
