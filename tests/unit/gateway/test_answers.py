"""Answers of chats: thoughts, content and calls, in the forms of the families of models."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.services.gateway.answers.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    ReasoningDelta,
    joined,
)
from spool.services.gateway.answers.formats import FORMATS, ToolFormat, detect_format
from spool.services.gateway.answers.reader import AnswerForm, AnswerReader
from spool.services.gateway.answers.reasoning import Reasoning
from spool.services.gateway.answers.schema_form import schema_fault
from spool.services.gateway.answers.tools import Tool
from spool.services.text.chat_template import ChatTemplate
from tests.support import chat_templates
from tests.support.chat_templates import HERMES, LLAMA3, MISTRAL

# ruff: noqa: RUF001  (the bars in the markers of some models)

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "where": {"$ref": "#/$defs/place"},
    "days": {"type": "array"},
    "count": {"type": ["integer", "null"]},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
DEFINITIONS = {"place": {"enum": ["here", "there"]}}
NAMES = (Tool("f"), Tool("get_weather", None, {"properties": PROPERTIES, "$defs": DEFINITIONS}))
FORMS = {
    "plain": AnswerForm(),
    "hermes": AnswerForm(FORMATS[ToolFormat.HERMES], NAMES),
    "llama3": AnswerForm(FORMATS[ToolFormat.LLAMA3], NAMES),
    "mistral": AnswerForm(FORMATS[ToolFormat.MISTRAL], NAMES, hidden=frozenset({"[TOOL_CALLS]"})),
    "qwen3_coder": AnswerForm(FORMATS[ToolFormat.QWEN3_CODER], NAMES),
    "glm45": AnswerForm(FORMATS[ToolFormat.GLM45], NAMES),
    "deepseek": AnswerForm(FORMATS[ToolFormat.DEEPSEEK_V3], NAMES),
    "deepseek_v31": AnswerForm(FORMATS[ToolFormat.DEEPSEEK_V31], NAMES, hidden=frozenset({"<｜tool▁calls▁begin｜>"})),
    "either": AnswerForm(FORMATS[ToolFormat.HERMES], NAMES, either=True),
    "single": AnswerForm(FORMATS[ToolFormat.HERMES], NAMES, several=False),
    "thinking": AnswerForm(FORMATS[ToolFormat.HERMES], NAMES, reasoning=Reasoning.POSSIBLE),
    "in thought": AnswerForm(reasoning=Reasoning.OPEN),
    "in begun thought": AnswerForm(reasoning=Reasoning.BEGUN),
}


def read(form: AnswerForm, *pieces: str) -> list[AnswerDelta]:
    reader = AnswerReader(form)
    deltas = [delta for piece in pieces for delta in reader.push(piece, last=False)]
    return joined([*deltas, *reader.push("", last=True)])


def say(text: str) -> AnswerDelta:
    return ContentDelta(text)


def think(text: str) -> AnswerDelta:
    return ReasoningDelta(text)


def call(index: int, name: str, arguments: str) -> list[AnswerDelta]:
    return [CallDelta(index, name), *([ArgumentsDelta(index, arguments)] if arguments else [])]


def stays(form: str, text: str) -> tuple[str, str, list[AnswerDelta]]:
    return form, text, [say(text)]


CASES: list[tuple[str, str, list[AnswerDelta]]] = [
    ("plain", "<think>a</think> <tool_call>\n", [say("<think>a</think> <tool_call>\n")]),
    ("hermes", "", []),
    stays("hermes", " two  words \n"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1, {}]}}\n</tool_call>', call(0, "f", '{"a": [1, {}]}')),
    (
        "hermes",
        'Look:\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b":2}, "id": 7, "name": "get_weather"}</tool_call>\n',
        [say("Look:"), *call(0, "f", '{"a": "}</tool_call>\\""}'), *call(1, "get_weather", '{"b":2}')],
    ),
    (
        "hermes",
        '<tool_call>[{"name":"f","arguments":"{\\"a\\":1}"}, {"name":"f"}]</tool_call> Done.',
        [*call(0, "f", '{"a":1}'), *call(1, "f", "{}"), say("Done.")],
    ),
    # What is no call stays text.
    stays("hermes", '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'),
    stays("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    stays("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    stays("hermes", "<tool_call>none</tool_call> <tool_ca"),
    stays("hermes", "<tool_call> [] </tool_call>"),
    ("hermes", '<tool_<tool_call>{<tool_call>{"name": "f"}', [say("<tool_<tool_call>{"), *call(0, "f", "{}")]),
    # Cut off: a call that has begun stays one.
    stays("hermes", '<tool_call>\n{"name": "f", '),
    ("hermes", 'a\n<tool_call>\n{"name": "f", "arguments": {"a": "b', [say("a"), *call(0, "f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} well', [*call(0, "f", "{}"), say("well")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, x}', [*call(0, "f", "{}"), say("x}")]),
    ("single", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("llama3", ' {"name": "f", "parameters": {"x": "{"}}', call(0, "f", '{"x": "{"}')),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": null}\n',
        [*call(0, "f", "{}"), *call(1, "f", "{}")],
    ),
    stays("llama3", '{"name": "f", "age": 3}'),
    stays("llama3", 'So: {"name": "f", "parameters": {}}'),
    stays("llama3", "<|python_tag|>print(1)"),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "f", "arguments": {}}]',
        [*call(0, "f", '{"x": 1}'), *call(1, "f", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]none", [say("none")]),
    (
        "qwen3_coder",
        'Look:\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\n"a"\n</parameter>\n<parameter=where>\n12'
        "\n</parameter><parameter=count>3</parameter><parameter=days>\n[1,\n{}]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=f></function></tool_call> Done.",
        [
            say("Look:"),
            *call(0, "get_weather", '{"city": "\\n\\"a\\"", "where": "12", "count": 3, "days": [1,\n{}]}'),
            *call(1, "f", "{}"),
            say("Done."),
        ],
    ),
    # A value that is not of its type stays what it is, a text that cannot be JSON becomes one.
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>count</arg_key>\n<arg_value>None</arg_value>\n<arg_key>days</arg_key><arg_value>"
        "{'a'}</arg_value><arg_key>unit</arg_key><arg_value> 12 </arg_value><arg_key>more</arg_key><arg_value>NaN"
        "</arg_value></tool_call>, well",
        [*call(0, "get_weather", """{"count": null, "days": "{'a'}", "unit": " 12 ", "more": "NaN"}"""), say(", well")],
    ),
    (
        "deepseek",
        'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [say("Hm."), *call(0, "f", '{"a": "```"}'), *call(1, "get_weather", "{}")],
    ),
    stays("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
    stays("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>'),
    stays("glm45", "<tool_call>f(1)</tool_call> <arg_key>"),
    stays("glm45", "<tool_call></tool_call>"),
    stays("deepseek", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>"),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>",
        [say("<｜tool▁call▁begin｜>g<｜tool▁sep｜>")],
    ),
    # Cut off, or broken off.
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a", call(0, "f", "{")),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zü</arg",
        call(0, "get_weather", '{"city": "Zü'),
    ),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key> b", [*call(0, "f", "{}"), say("b")]),
    ("either", 'Yes <tool_call>{"name": "f"}', [say('Yes <tool_call>{"name": "f"}')]),
    (
        "either",
        '\n<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}',
        [*call(0, "f", "{}"), *call(1, "f", "{}")],
    ),
    ("thinking", "<think>\nHm, </th\n</think>\n\nYes.\n", [think("Hm, </th"), say("Yes.\n")]),
    ("thinking", "\n<think> </think>\n\nYes", [say("Yes")]),
    ("thinking", " <thinking> no", [say(" <thinking> no")]),
    ("thinking", "No <think>a</think>", [say("No <think>a</think>")]),
    ("thinking", "<think>on and on \n", [think("on and on")]),
    (
        "thinking",
        '<think>\n<tool_call>{"name": "f"}\n</think>\n<tool_call>{"name": "f"}</tool_call>',
        [think('<tool_call>{"name": "f"}'), *call(0, "f", "{}")],
    ),
    ("in thought", "so it is\n</think>\n\nIt is.", [think("so it is"), say("It is.")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_answers_are_divided_whatever_the_pieces(form: str, text: str, expected: list[AnswerDelta]) -> None:
    assert read(FORMS[form], *text) == expected
    for cut in range(len(text) + 1):
        assert read(FORMS[form], text[:cut], text[cut:]) == expected


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>"),
    *(
        "<tool_call>\n<function=f>\n",
        "<parameter=a>\n",
        "\n</parameter>\n",
        "</function>",
        "<tool_call>f",
        "</arg_value>",
    ),
    *("<arg_key>", "city</arg_key>\n<arg_value>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "f<｜tool▁sep｜>{"),
    *'[]{},:"\\\n a<',
    *('{"name": "f"', '"arguments": {', '"parameters"', '{"name": "f", "arguments": {"a": '),
]


@given(
    form=st.sampled_from(sorted(FORMS)),
    pieces=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join), max_size=8),
)
def test_any_text_in_any_pieces(form: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    deltas = read(FORMS[form], *pieces)
    assert deltas == read(FORMS[form], *text)
    if (
        FORMS[form].calls
        and form not in ("mistral", "deepseek_v31", "thinking", "single")
        and not any(isinstance(delta, CallDelta) for delta in deltas)
    ):
        assert joined([say(text)]) == deltas


def test_only_text_that_may_become_a_call_is_held_back() -> None:
    reader, text = AnswerReader(FORMS["hermes"]), 'Hi <b>\n<tool_call>{"name": "f", "arguments": {"a": 1}}'
    seen = [reader.push(letter, last=False) for letter in text]
    assert seen[:6] == [[say("H")], [say("i")], [], [], [say(" <b")], [say(">")]]
    certain = next(place for place, deltas in enumerate(seen) if CallDelta(0, "f") in deltas)
    assert text[: certain + 1].endswith('"arguments": {')
    assert [delta for deltas in seen[certain + 1 :] for delta in deltas] == [ArgumentsDelta(0, c) for c in '"a": 1}']


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": 'Zürich "a"\n\\<b>\n', "where": "12", "days": [1, 2], "count": None, "more": {"a": '"}]</tool_call>'}},
    {"city": "", "days": [{"</parameter>": "</arg_value>"}], "count": 5},
]
CHATML = ("<|im_start|>assistant\n", "<|im_end|>")
TEMPLATES = {
    ToolFormat.HERMES: (HERMES, *CHATML),
    ToolFormat.LLAMA3: (LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ToolFormat.MISTRAL: (MISTRAL, "", "</s>"),
    **{form: (getattr(chat_templates, form.name), *CHATML) for form in ToolFormat if FORMATS[form].tags is not None},
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_that_the_familys_template_writes_are_read_back(family: ToolFormat) -> None:
    """A model was trained on the output of its template."""
    source, begin, end = TEMPLATES[family]
    assert detect_format(source) is family
    form = AnswerForm(FORMATS[family], NAMES)
    template = ChatTemplate(source, {"eos_token": "</s>"})
    assert template.takes_tools
    assert template.takes_several_calls is (family is not ToolFormat.LLAMA3)
    for several in [ARGUMENTS] if template.takes_several_calls else [[arguments] for arguments in ARGUMENTS]:
        calls = [
            {
                "id": form.call_id("request", 0, index),
                "type": "function",
                "function": {"name": "get_weather", "arguments": arguments},
            }
            for index, arguments in enumerate(several)
        ]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        text = template.render([message], add_generation_prompt=False)
        written = text[text.index(begin) + len(begin) :].removesuffix("\n").removesuffix(end)
        deltas = read(form, written)
        assert [delta.name for delta in deltas if isinstance(delta, CallDelta)] == ["get_weather"] * len(calls)
        assert [json.loads(delta.text) for delta in deltas if isinstance(delta, ArgumentsDelta)] == several
        assert not any(isinstance(delta, ContentDelta) for delta in deltas)
        for cut in range(0, len(written) + 1, 7):
            assert read(form, written[:cut], written[cut:]) == deltas


def test_a_template_that_only_mentions_tools_takes_none() -> None:
    assert not ChatTemplate("{{ messages }} tools {% set tools = 1 %}", {}).takes_tools


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"type": ["string", 1]},
        {"properties": []},
        {"properties": {"a": 1}},
        {"properties": {"a": {"items": {"anyOf": [{"required": "a"}]}}}},
        {"required": [1]},
        {"allOf": {}},
        {"$defs": {"a": {"type": "strin"}}},
        {"additionalProperties": "no"},
        {"items": [{"enum": 1}]},
        {"properties": {"a": {"pattern": 5}}},
        {"properties": {"a": {"minLength": "x}){"}}},
        {"maxItems": -1},
        {"minProperties": 1.5},
        {"minLength": 1.0, "maxLength": 2, "pattern": "a"},
        {"properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": True}, "required": ["a"]},
        {"$defs": {"a": {"not": {"const": 1}}}, "additionalProperties": False, "oneOf": [{"$ref": "#/$defs/a"}]},
    ],
)
def test_the_form_of_schemas(schema: dict[str, Any]) -> None:
    try:
        # `items` may be a list in the older dialect alone.
        jsonschema.Draft7Validator.check_schema(schema)
        jsonschema.Draft202012Validator.check_schema({key: value for key, value in schema.items() if key != "items"})
        right = True
    except jsonschema.SchemaError:
        right = False
    assert (schema_fault(schema) is None) == right


@pytest.mark.parametrize("part", [{"type": 5}, {"enum": 5}, {"anyOf": 5}, {"pattern": {}}, 5])
def test_parts_that_only_references_name_are_schemas_too(part: Any) -> None:
    schema = {"properties": {"a": {"$ref": "#/x"}, "b": {"$ref": f"#/y/{'1' * 5000}"}}, "y": [{}]}
    assert schema_fault(schema | {"x": {"$ref": "#"}}) is None
    assert str(schema_fault(schema | {"x": part})).startswith("#/x")
