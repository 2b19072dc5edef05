"""Whatever tokens a grammar of calls allows, they make calls whose arguments fit their schemas."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from spool.engine.sampling.grammars import GrammarTokens
from spool.services.gateway.answers.call_grammar import calls_grammar, free_grammar, held_fault
from spool.services.gateway.answers.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta
from spool.services.gateway.answers.formats import FORMATS, CallFormat, ToolFormat
from spool.services.gateway.answers.reader import AnswerForm, AnswerReader
from spool.services.gateway.answers.reasoning import Reasoning
from spool.services.gateway.answers.tools import Tool, ToolUse
from spool.services.gateway.grammar_check import definition
from tests.unit.services.test_tokenizer import byte_level

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 3},
        "code": {"allOf": [{"$ref": "#/$defs/code"}], "description": "Of the place"},
        "unit": {"anyOf": [{"enum": ["C", "F/\n"]}, {"type": "null"}]},
        "side": {"enum": ["left", 'the "right"']},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {
        "day": {"type": "integer", "minimum": 1, "maximum": 31},
        "code": {"type": "string", "pattern": "^[a-c/]{2}(x|\\d)$"},
    },
}
TOOLS = (Tool("weather", "Tells the weather.", WEATHER, strict=True), Tool("stop"))
SCHEMAS = {"weather": WEATHER, "stop": {"type": "object", "maxProperties": 0}}
MAX_TOKENS = 2000
HERMES = FORMATS[ToolFormat.HERMES]


def tokenizer(marked: bool = False, special: bool = True) -> tokenizers.Tokenizer:
    """One token for each byte, and those of the markers. Some models have them as special tokens, some as others."""
    made = byte_level()
    markers = sorted({"<think>", "</think>"}.union(*(form.markers for form in FORMATS.values())))
    made.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in markers if marked])
    return made


PLAIN, MARKED, UNSPECIAL = tokenizer(), tokenizer(marked=True), tokenizer(marked=True, special=False)
every_tokenizer = pytest.mark.parametrize(
    "model", [PLAIN, MARKED, UNSPECIAL], ids=["markers-are-text", "markers-are-special", "markers-are-tokens"]
)


def walk(model: tokenizers.Tokenizer, lark: str, seed: int, beginning: str = "") -> str:
    """A text with this beginning that goes on with random ones of the tokens that the grammar allows. It ends with
    probability one half wherever it may."""
    tokens = GrammarTokens(model)
    matcher, rng = tokens.matcher(definition("lark", lark)), random.Random(seed)
    output: list[int] = model.encode(beginning).ids
    assert matcher.try_consume_tokens(output) == len(output), matcher.get_error()
    for _ in range(MAX_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]
        if tokens.end in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return model.decode(output, skip_special_tokens=False)
        token = rng.choice([token for token in allowed if token != tokens.end])
        assert matcher.consume_token(token), matcher.get_error()
        output.append(token)
    raise AssertionError(f"no end: {model.decode(output, skip_special_tokens=False)!r}")


def read(form: AnswerForm, text: str) -> tuple[list[AnswerDelta], list[tuple[str, Any]]]:
    """What is not part of a call, and the calls, whose arguments are checked."""
    deltas = AnswerReader(form).push(text, last=True)
    names = [delta.name for delta in deltas if isinstance(delta, CallDelta)]
    arguments = [json.loads(delta.text) for delta in deltas if isinstance(delta, ArgumentsDelta)]
    for name, given in zip(names, arguments, strict=True):
        jsonschema.validate(given, SCHEMAS[name])
    others = [delta for delta in deltas if not isinstance(delta, CallDelta | ArgumentsDelta)]
    return others, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("family", ToolFormat)
@every_tokenizer
def test_every_allowed_text_is_calls(family: ToolFormat, model: tokenizers.Tokenizer) -> None:
    form = AnswerForm(FORMATS[family], TOOLS)
    lark = calls_grammar(ToolUse(TOOLS, required=True), FORMATS[family], Reasoning.NONE, model.token_to_id)
    answers = [read(form, walk(model, lark, seed)) for seed in range(6)]
    assert not any(others for others, _ in answers)
    assert {name for _, calls in answers for name, _ in calls} == set(SCHEMAS)
    counts = {len(calls) for _, calls in answers}
    assert min(counts) == 1 < max(counts)


def test_arguments_are_an_object_whatever_the_schema_leaves_open() -> None:
    for parameters in ({}, {"$ref": "#/$defs/day", "$defs": {"day": {"required": ["a"]}}}):
        use = ToolUse((Tool("f", None, parameters),), name="f")
        lark = calls_grammar(use, HERMES, Reasoning.NONE, PLAIN.token_to_id)
        for arguments, length in (('{"a": 1}', 8), ('"a"', 0), ("[1]", 0), ("null", 0)):
            matcher = GrammarTokens(PLAIN).matcher(definition("lark", lark))
            begin = PLAIN.encode('<tool_call>\n{"name": "f", "arguments": ').ids
            assert matcher.try_consume_tokens(begin) == len(begin)
            assert matcher.try_consume_tokens(PLAIN.encode(arguments).ids) == length


@pytest.mark.parametrize(
    ("reasoning", "beginning", "thought"),
    [
        (Reasoning.POSSIBLE, "<tool_call>", []),
        (Reasoning.POSSIBLE, "<think>\nHm </ so</think>", ["Hm </ so"]),
        (Reasoning.OPEN, "Hm <tool so</think>\n\n", ["Hm <tool so"]),
    ],
)
@every_tokenizer
def test_thoughts_come_before_calls(
    reasoning: Reasoning, beginning: str, thought: list[str], model: tokenizers.Tokenizer
) -> None:
    form = AnswerForm(HERMES, TOOLS, reasoning=reasoning)
    lark = calls_grammar(ToolUse(TOOLS, name="stop"), HERMES, reasoning, model.token_to_id)
    for seed in range(2):
        others, calls = read(form, walk(model, lark, seed, beginning))
        assert calls == [("stop", {})]
        assert others == [ReasoningDelta(text) for text in thought]


def test_a_thought_must_end() -> None:
    lark = calls_grammar(ToolUse(TOOLS, name="stop"), HERMES, Reasoning.OPEN, PLAIN.token_to_id)
    matcher = GrammarTokens(PLAIN).matcher(definition("lark", lark))
    for token in PLAIN.encode('Hm </think>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>').ids:
        assert not matcher.is_accepting()
        assert matcher.consume_token(token)
    assert matcher.is_accepting()


def begun(form: CallFormat, name: str) -> str:
    """A call up to its arguments."""
    before = form.tags.name if form.tags else '{"name": "'
    after = form.tags.arguments if form.tags else '", "arguments": '
    return f"{form.before_all}{form.before_each}{before}{name}{after}"


@pytest.mark.parametrize("family", [family for family in ToolFormat if FORMATS[family].marked])
@pytest.mark.parametrize(("model", "parallel"), [(PLAIN, True), (MARKED, False), (UNSPECIAL, True)])
def test_free_answers_with_strict_calls(family: ToolFormat, model: tokenizers.Tokenizer, parallel: bool) -> None:
    form = FORMATS[family]
    strict = tuple(replace(tool, strict=True) for tool in TOOLS)
    lark = free_grammar(ToolUse(strict, parallel=parallel), form, Reasoning.NONE, model.token_to_id)
    for seed in range(2):
        others, calls = read(AnswerForm(form, TOOLS), walk(model, lark, seed, f"Well, {begun(form, 'weather')}"))
        assert others[0] == ContentDelta("Well,")
        assert calls[0][0] == "weather"
        assert parallel or len(calls) == 1
    # Text that only resembles a call is allowed; the marker as text is not where the marker is a token.
    matcher = GrammarTokens(model).matcher(definition("lark", lark))
    for token in model.encode('Say {"name": "weather", <tool or [TOOL]').ids:
        assert matcher.is_accepting()
        assert matcher.consume_token(token)
    spelt = [token for letter in form.begin for token in model.encode(letter).ids]
    assert matcher.try_consume_tokens(spelt) == len(spelt) - (model is not PLAIN)
    # Arguments of functions that are not strict are free.
    lark = free_grammar(ToolUse(TOOLS, parallel=parallel), form, Reasoning.NONE, model.token_to_id)
    tags = form.tags if form.tags and form.tags.key else None
    argument = f"{tags.key}a{tags.value}b{tags.value_end}" if tags else '{"a": "b"'
    for name, allowed in (("stop", True), ("weather", False)):
        matcher = GrammarTokens(model).matcher(definition("lark", lark))
        written = model.encode(begun(form, name) + argument).ids
        assert (matcher.try_consume_tokens(written) == len(written)) is allowed


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"required": ["a"]},
        {"properties": {"a": {"type": "string", "not": {"const": "b"}}}},
        {"properties": {"a<b": {"type": "string"}}},
        {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
        {"properties": {"a": {"type": "string", "pattern": "(^a)b"}}},
        {"properties": {"a": {"type": "string", "allOf": [{"enum": [["b"]]}]}}},
        {"properties": {"a": {"type": "string", "allOf": [False]}}},
    ],
)
def test_what_tags_have_no_place_for(schema: dict[str, Any]) -> None:
    tool = Tool("f", None, schema)
    assert held_fault(tool, FORMATS[ToolFormat.QWEN3_CODER])
    assert held_fault(tool, FORMATS[ToolFormat.GLM45])
    assert held_fault(tool, HERMES) is held_fault(tool, FORMATS[ToolFormat.DEEPSEEK_V3]) is None


def test_a_text_that_refers_to_itself_has_its_other_conditions() -> None:
    value = {"type": "string", "enum": ["a", "bb"], "maxLength": 1.0, "allOf": [{"$ref": "#/properties/a"}]}
    tool = Tool("f", None, {"properties": {"a": value}, "required": ["a"]})
    form = FORMATS[ToolFormat.QWEN3_CODER]
    lark = calls_grammar(ToolUse((tool,), name="f"), form, Reasoning.NONE, PLAIN.token_to_id)
    assert form.tags is not None
    before, after = begun(form, "f") + f"{form.tags.key}a{form.tags.value}", form.tags.value_end
    for text, fits in (("a", True), ("bb", False), ("c", False)):
        matcher = GrammarTokens(PLAIN).matcher(definition("lark", lark))
        written = PLAIN.encode(f"{before}{text}{after}").ids
        assert (matcher.try_consume_tokens(written) == len(written)) is fits


PATTERNS = ["a", "^a", "a$", "^(a|b)$", "a|b", "^[|$]/$", r"^\$", r"^a\/b", "^$", r"^[^\]]{2}$", "^(a(b|c))?d*$"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_texts(pattern: str) -> None:
    tool = Tool("f", None, {"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]})
    form = FORMATS[ToolFormat.QWEN3_CODER]
    lark = calls_grammar(ToolUse((tool,), name="f"), form, Reasoning.NONE, PLAIN.token_to_id)
    matches = GrammarTokens(PLAIN).matcher(definition("lark", lark))
    for text in (
        "",
        "a",
        "b",
        "ab",
        "a/b",
        "ba",
        "|/",
        "$/",
        "//",
        "$",
        "\\",
        "b\\",
        "abd",
        "acdd",
        "dd",
        "a\nb",
        "]]",
    ):
        matcher = matches.deep_copy()
        written = PLAIN.encode(f"{begun(form, 'f')}<parameter=a>\n{text}\n</parameter>\n").ids
        assert (matcher.try_consume_tokens(written) == len(written)) is bool(re.search(pattern, text)), text
