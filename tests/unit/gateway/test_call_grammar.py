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
from services.gateway.answers.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    ReasoningDelta,
)
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


def tokenizer(*special: str) -> tokenizers.Tokenizer:
    """One token for each byte, and these."""
    made = byte_level()
    made.add_special_tokens(list(special))
    return made


PLAIN = tokenizer()
MARKED = tokenizer("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")


def walk(tokens: GrammarTokens, model: tokenizers.Tokenizer, lark: str, seed: int, said: str = "") -> str:
    """A text that begins with what is `said` and goes on with tokens that the grammar allows, each drawn at random; the
    end is drawn wherever it may be with one half."""
    matcher, rng = tokens.matcher(definition("lark", lark)), random.Random(seed)
    output: list[int] = model.encode(said).ids
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


def read(form: AnswerForm, text: str, says: bool = False) -> tuple[list[AnswerDelta], list[tuple[str, Any]]]:
    """All deltas, and the calls with their arguments. Unless it `says` something, nothing is said beside the calls."""
    deltas = AnswerReader(form).push(text, last=True)
    names = [delta.name for delta in deltas if isinstance(delta, CallDelta)]
    arguments = [json.loads(delta.text) for delta in deltas if isinstance(delta, ArgumentsDelta)]
    others = [delta for delta in deltas if not isinstance(delta, CallDelta | ArgumentsDelta | ReasoningDelta)]
    assert says or others == [], text
    return deltas, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("family", ToolFormat)
@pytest.mark.parametrize("model", [PLAIN, MARKED], ids=["markers-are-text", "markers-are-tokens"])
def test_all_that_is_allowed_is_a_call(family: ToolFormat, model: tokenizers.Tokenizer) -> None:
    tokens = GrammarTokens(model)
    form = AnswerForm(FORMATS[family], frozenset(SCHEMAS))
    use = ToolUse(TOOLS, required=True)
    counts, called = set(), set()
    for seed in range(12):
        lark = calls_grammar(use, FORMATS[family], Reasoning.NONE, model.token_to_id)
        _, calls = read(form, walk(tokens, model, lark, seed))
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        counts.add(len(calls))
        called |= {name for name, _ in calls}
    assert called == set(SCHEMAS)
    assert 0 not in counts
    assert (max(counts) > 1) == FORMATS[family].several


def test_arguments_are_an_object_whatever_the_schema_leaves_open() -> None:
    tokens, form = GrammarTokens(PLAIN), FORMATS[ToolFormat.HERMES]
    for parameters in ({}, {"$ref": "#/$defs/day", "$defs": {"day": {"required": ["a"]}}}):
        lark = calls_grammar(ToolUse((Tool("f", None, parameters),), name="f"), form, Reasoning.NONE, PLAIN.token_to_id)
        for arguments, length in (('{"a": 1}', 8), ('"a"', 0), ("[1]", 0), ("null", 0)):
            matcher = tokens.matcher(definition("lark", lark))
            begin = PLAIN.encode('<tool_call>\n{"name": "f", "arguments": ').ids
            assert matcher.try_consume_tokens(begin) == len(begin)
            assert matcher.try_consume_tokens(PLAIN.encode(arguments).ids) == length


@pytest.mark.parametrize("use", [ToolUse(TOOLS, name="weather"), ToolUse(TOOLS, required=True, parallel=False)])
def test_one_call(use: ToolUse) -> None:
    tokens = GrammarTokens(MARKED)
    form = AnswerForm(FORMATS[ToolFormat.HERMES], frozenset(SCHEMAS))
    for seed in range(8):
        lark = calls_grammar(use, FORMATS[ToolFormat.HERMES], Reasoning.NONE, MARKED.token_to_id)
        _, [(name, arguments)] = read(form, walk(tokens, MARKED, lark, seed))
        assert use.name in (None, name)
        jsonschema.validate(arguments, SCHEMAS[name])


@pytest.mark.parametrize(
    ("reasoning", "said", "thought"),
    [
        (Reasoning.POSSIBLE, "", None),
        (Reasoning.POSSIBLE, "<think>\nHm </ so</think>", "Hm </ so"),
        (Reasoning.OPEN, "Hm <tool_call> so</think>\n\n", "Hm <tool_call> so"),
    ],
)
@pytest.mark.parametrize("model", [PLAIN, MARKED], ids=["markers-are-text", "markers-are-tokens"])
def test_thoughts_come_before_calls(
    reasoning: Reasoning, said: str, thought: str | None, model: tokenizers.Tokenizer
) -> None:
    if model is MARKED:
        said, thought = (text and text.replace("<tool_call>", "<") for text in (said, thought))
    tokens = GrammarTokens(model)
    form = AnswerForm(FORMATS[ToolFormat.HERMES], frozenset(SCHEMAS), reasoning=reasoning)
    lark = calls_grammar(ToolUse(TOOLS, name="stop"), FORMATS[ToolFormat.HERMES], reasoning, model.token_to_id)
    for seed in range(6):
        text = walk(tokens, model, lark, seed, said or "<tool_call>")
        deltas, calls = read(form, text)
        assert calls == [("stop", {})]
        assert [delta.text for delta in deltas if isinstance(delta, ReasoningDelta)] == ([thought] if thought else [])


def test_a_thought_must_end() -> None:
    lark = calls_grammar(ToolUse(TOOLS, name="stop"), FORMATS[ToolFormat.HERMES], Reasoning.OPEN, PLAIN.token_to_id)
    matcher = GrammarTokens(PLAIN).matcher(definition("lark", lark))
    whole = PLAIN.encode('Hm </think>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>').ids
    for token in whole:
        assert not matcher.is_accepting()
        assert matcher.consume_token(token)
    assert matcher.is_accepting()


@pytest.mark.parametrize("family", [ToolFormat.HERMES, ToolFormat.MISTRAL])
@pytest.mark.parametrize("model", [PLAIN, MARKED], ids=["markers-are-text", "markers-are-tokens"])
@pytest.mark.parametrize("parallel", [True, False])
def test_free_answers_with_strict_calls(family: ToolFormat, model: tokenizers.Tokenizer, parallel: bool) -> None:
    tokens, form = GrammarTokens(model), FORMATS[family]
    begin = "[TOOL_CALLS] [" if family is ToolFormat.MISTRAL else "<tool_call>\n"
    strict = tuple(replace(tool, strict=True) for tool in TOOLS)
    lark = free_grammar(ToolUse(strict, parallel=parallel), form, Reasoning.NONE, model.token_to_id)
    for seed in range(6):
        text = walk(tokens, model, lark, seed, f'Well, {begin}{{"name": "weather"')
        deltas, calls = read(AnswerForm(form, frozenset(SCHEMAS)), text, says=True)
        assert deltas[0] == ContentDelta("Well,")
        assert calls[0][0] == "weather"
        assert parallel or len(calls) == 1
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
    # Nothing but a call has the marker, and whatever else is said is left alone.
    matcher = tokens.matcher(definition("lark", lark))
    for token in model.encode('Say {"name": "weather", <tool or [TOOL]').ids:
        assert matcher.is_accepting()
        assert matcher.consume_token(token)
    spelt = [model.token_to_id(letter) for letter in form.begin]
    assert matcher.try_consume_tokens(spelt) == len(spelt) - (model is MARKED)
    # Arguments of functions that are not strict are free.
    lark = free_grammar(ToolUse(TOOLS, parallel=parallel), form, Reasoning.NONE, model.token_to_id)
    for arguments, allowed in (('"stop", "arguments": {"a": 1}}', True), ('"weather", "arguments": {"a": 1}}', False)):
        matcher, written = tokens.matcher(definition("lark", lark)), model.encode(f'{begin}{{"name": {arguments}').ids
        assert (matcher.try_consume_tokens(written) == len(written)) is allowed
