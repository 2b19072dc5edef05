"""Whatever tokens a grammar of calls allows, they make calls whose arguments fit their schemas."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from engine.sampling.grammars import GrammarTokens
from services.gateway.answers.call_grammar import calls_grammar, free_grammar
from services.gateway.answers.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta
from services.gateway.answers.formats import FORMATS, ToolFormat
from services.gateway.answers.reader import AnswerForm, AnswerReader
from services.gateway.answers.reasoning import Reasoning
from services.gateway.answers.tools import Tool, ToolUse
from services.gateway.grammar_check import definition
from tests.unit.services.test_tokenizer import byte_level

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 3},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
}
TOOLS = (Tool("weather", "Tells the weather.", WEATHER, strict=True), Tool("stop"))
SCHEMAS = {"weather": WEATHER, "stop": {"type": "object", "maxProperties": 0}}
MAX_TOKENS = 2000
HERMES = FORMATS[ToolFormat.HERMES]


def tokenizer(*special: str) -> tokenizers.Tokenizer:
    """One token for each byte, and these."""
    made = byte_level()
    made.add_special_tokens(list(special))
    return made


PLAIN = tokenizer()
MARKED = tokenizer("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")
both_tokenizers = pytest.mark.parametrize("model", [PLAIN, MARKED], ids=["markers-are-text", "markers-are-tokens"])


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
@both_tokenizers
def test_every_allowed_text_is_calls(family: ToolFormat, model: tokenizers.Tokenizer) -> None:
    form = AnswerForm(FORMATS[family], frozenset(SCHEMAS))
    lark = calls_grammar(ToolUse(TOOLS, required=True), FORMATS[family], Reasoning.NONE, model.token_to_id)
    answers = [read(form, walk(model, lark, seed)) for seed in range(12)]
    assert not any(others for others, _ in answers)
    assert {name for _, calls in answers for name, _ in calls} == set(SCHEMAS)
    counts = {len(calls) for _, calls in answers}
    assert min(counts) == 1
    assert (max(counts) > 1) == FORMATS[family].several


@pytest.mark.parametrize("use", [ToolUse(TOOLS, name="weather"), ToolUse(TOOLS, required=True, parallel=False)])
def test_one_call(use: ToolUse) -> None:
    form = AnswerForm(HERMES, frozenset(SCHEMAS))
    lark = calls_grammar(use, HERMES, Reasoning.NONE, MARKED.token_to_id)
    for seed in range(8):
        others, [(name, _)] = read(form, walk(MARKED, lark, seed))
        assert not others
        assert use.name in (None, name)


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
@both_tokenizers
def test_thoughts_come_before_calls(
    reasoning: Reasoning, beginning: str, thought: list[str], model: tokenizers.Tokenizer
) -> None:
    form = AnswerForm(HERMES, frozenset(SCHEMAS), reasoning=reasoning)
    lark = calls_grammar(ToolUse(TOOLS, name="stop"), HERMES, reasoning, model.token_to_id)
    for seed in range(6):
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


@pytest.mark.parametrize("family", [ToolFormat.HERMES, ToolFormat.MISTRAL])
@both_tokenizers
@pytest.mark.parametrize("parallel", [True, False])
def test_free_answers_with_strict_calls(family: ToolFormat, model: tokenizers.Tokenizer, parallel: bool) -> None:
    form = FORMATS[family]
    begin = "[TOOL_CALLS] [" if family is ToolFormat.MISTRAL else "<tool_call>\n"
    strict = tuple(replace(tool, strict=True) for tool in TOOLS)
    lark = free_grammar(ToolUse(strict, parallel=parallel), form, Reasoning.NONE, model.token_to_id)
    for seed in range(6):
        text = walk(model, lark, seed, f'Well, {begin}{{"name": "weather"')
        others, calls = read(AnswerForm(form, frozenset(SCHEMAS)), text)
        assert others[0] == ContentDelta("Well,")
        assert calls[0][0] == "weather"
        assert parallel or len(calls) == 1
    # Text that only resembles a call is allowed; the marker as text is not where the marker is a token.
    matcher = GrammarTokens(model).matcher(definition("lark", lark))
    for token in model.encode('Say {"name": "weather", <tool or [TOOL]').ids:
        assert matcher.is_accepting()
        assert matcher.consume_token(token)
    spelt = [model.token_to_id(letter) for letter in form.begin]
    assert matcher.try_consume_tokens(spelt) == len(spelt) - (model is MARKED)
    # Arguments of functions that are not strict are free.
    lark = free_grammar(ToolUse(TOOLS, parallel=parallel), form, Reasoning.NONE, model.token_to_id)
    for call, allowed in (('"stop", "arguments": {"a": 1}}', True), ('"weather", "arguments": {"a": 1}}', False)):
        matcher = GrammarTokens(model).matcher(definition("lark", lark))
        written = model.encode(f'{begin}{{"name": {call}').ids
        assert (matcher.try_consume_tokens(written) == len(written)) is allowed
