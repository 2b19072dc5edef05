"""A JSON schema is refused, or whatever follows its grammar ends and fits the schema; jsonschema is the judge."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from spool.engine.sampling.grammars import (
    GrammarError,
    GrammarRow,
    Grammars,
    GrammarState,
    GrammarTokens,
    check_grammar,
)
from spool.scheduler.sampling import Grammar
from spool.services.gateway.grammar_check import definition
from tests.support.tiny_chat import END, tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer().backend_tokenizer
TOKENS = GrammarTokens(TOKENIZER)
GRAMMARS = Grammars(TOKENIZER, beside_model=False)
LONGEST = 200

names = st.sampled_from(["s", "t", "st", "\n", 'a"b'])
patterns = st.sampled_from(["^s$", "^(s|t)$", "s", "^t.?$", ".*", "^[a-z]$", "^$", "."])
integers = st.sampled_from([-1, 0, 1, 2, 5, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**64])
decimals = st.sampled_from(
    ["0.1", "1.5", "-2.25", "1.0", "123456789.12345679", "0.30000000000000004", "1e22", "5e-7", "1e300", "2.5e-310"]
)
numbers = integers | decimals.map(Decimal)
counts = st.integers(0, 3)
plain = st.none() | st.booleans() | numbers | st.sampled_from(["", "s", "stst", "\x01", "\n"])
constants = st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2))
types = st.sampled_from(["integer", "number", "string", "null", "boolean", "object", "array"])
limits = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers)
texts = {"minLength": counts, "maxLength": counts, "pattern": st.sampled_from(["^a", "b$", "^[ab]*$", "^ab$"])}


def form(kind: str, optional: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=optional)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    inner |= st.just({"$ref": "#"})
    objects = {
        "properties": st.dictionaries(names, inner, max_size=2),
        "patternProperties": st.dictionaries(patterns, inner, min_size=1, max_size=1),
        "additionalProperties": st.just(False) | inner,
        "required": st.lists(names, max_size=2, unique=True),
        "minProperties": counts,
        "maxProperties": counts,
    }
    arrays = {"items": inner, "prefixItems": some, "minItems": counts, "maxItems": counts}
    return st.one_of(
        *(form("object", objects) for _ in range(2)),
        form("array", arrays),
        st.fixed_dictionaries({"anyOf": some}),
        st.fixed_dictionaries({"allOf": some}),
    )


leaves = st.one_of(
    form("integer", {**limits, "multipleOf": st.sampled_from([2, 3, Decimal("0.4")])}),
    form("number", limits),
    form("string", texts),
    st.fixed_dictionaries({"const": constants}),
    st.fixed_dictionaries({"enum": st.lists(constants, max_size=3)}, optional={"type": types}),
    st.booleans(),
    st.fixed_dictionaries({"type": types}),
)
schemas = larger(st.recursive(leaves, larger, max_leaves=4))


def written(value: Any) -> str:
    """The JSON text, with all digits."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {written(part)}' for name, part in value.items())}}}"
    return json.dumps(value)


def compiled(schema: str) -> Grammar | None:
    """None for a schema that is refused."""
    try:
        found = definition("json_schema", schema)
        check_grammar(TOKENS, found)
    except (GrammarError, ValueError):
        return None
    return Grammar(found, frozenset([TOKENIZER.token_to_id(END)]))


def walk(grammar: Grammar, rng: random.Random) -> str | None:
    """What a model might write; None where the text is not at its end after `LONGEST` tokens."""
    closing = {TOKENIZER.token_to_id(END), *(TOKENIZER.encode(letter).ids[0] for letter in ']}"')}
    state, output, spaces = GrammarState(), list[int](), 0
    for _ in range(LONGEST):
        masks = GRAMMARS.masks([GrammarRow(state, grammar, output)]).result()
        assert masks.errors == [None]
        allowed = np.flatnonzero(np.unpackbits(masks.allowed[0], bitorder="little")).tolist()
        assert allowed, TOKENIZER.decode(output)
        ends = [token for token in allowed if token in closing]
        token = rng.choice(ends if ends and rng.random() < 0.6 else allowed)
        if token in grammar.end_token_ids:
            return TOKENIZER.decode(output)
        output.append(token)
        spaces = spaces + 1 if TOKENIZER.decode([token]).isspace() else 0
        assert spaces <= 40, TOKENIZER.decode(output)
    return None


def holds(schema: Any, count: int) -> None:
    text = written(schema)
    grammar = compiled(text)
    if grammar is None:
        return
    judge = Draft202012Validator(json.loads(text, parse_float=Decimal))
    rng = random.Random(text)
    for _ in range(count):
        output = walk(grammar, rng)
        if output is not None:
            judge.validate(json.loads(output, parse_float=Decimal))


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=CHECKS)
@given(schemas)
def test_schemas_are_refused_or_kept(schema: Any) -> None:
    holds(schema, 1)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, phases=[Phase.generate], suppress_health_check=CHECKS)
@given(schemas)
def test_more_schemas_are_refused_or_kept(schema: Any) -> None:
    holds(schema, 5)


TWO = {"type": "object", "properties": {"s": {"type": "integer"}, "t": {"type": "integer"}}, "required": ["s", "t"]}
REFUSED: list[tuple[str, str]] = [
    ('{"const": 1234567890123456789}', "1234567890123456789 has too many digits, it would become 1234567890123456768"),
    ('{"enum": [{"a": [9007199254740993]}]}', "9007199254740993 has too many digits"),
    ('{"type": "integer", "minimum": 9007199254740993}', "minimum is 9007199254740993, must be between -9"),
    (
        '{"properties": {"a": {"exclusiveMaximum": -1e300}}}',
        r"properties.a.exclusiveMaximum is -1E\+300, must be between",
    ),
    ('{"const": 123456789.12345679}', "123456789.12345679 has too many digits"),
    ('{"const": 0.1234567890123456789}', "0.1234567890123456789 has too many digits"),
    ('{"$ref": "#/x", "x": {"const": -9223372036854775808}}', "^#/x.const is -9223372036854775808, must be between"),
    ('{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}', "exclusiveMinimum is 0, which is too near to the li"),
    ('{"type": "integer", "multipleOf": 0.4}', "multipleOf is 0.4, must be an integer"),
    (
        json.dumps(TWO | {"patternProperties": {"^s$": {}}, "additionalProperties": False}),
        r"has '\^s\$', which matches no",
    ),
    ('{"type": "object", "patternProperties": {"": false}}', "leaves no name for additionalProperties"),
    ('{"type": "object", "minProperties": 2}', "minProperties is 2, must be at most 1: names may repeat"),
    ('{"properties": {"a": {"const": "\\u0001"}}}', "properties.a.const holds .*, must have no control characters"),
    ('{"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}', r"^\$defs.a: no text fits"),
    ('{"const": 1e9999999999999999999}', "1e9999999999999999999 must have an exponent between -400 and 400"),
    ('{"const": -1e-9999999999999999999}', "-1e-9999999999999999999 must have an exponent between"),
    ('{"type": "number", "exclusiveMinimum": 1e1000000, "maximum": 5}', "1e1000000 must have an exponent between"),
    (f'{{"multipleOf": {"1" * 5000}}}', r"1\.\.\. has 5000 characters, must have at most 1000"),
    (f'{{"minimum": 0.{"1" * 5000}}}', r"1\.\.\. has 5002 characters, must have at most 1000"),
    ('{"type": "string", "maxLength": 1e300, "minLength": -1}', "minLength is -1, must be a whole number"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_a_grammar_cannot_keep_is_refused(schema: str, message: str) -> None:
    for kind, text in (("json_schema", schema), ("grammar", f"start: part\npart: %json {schema}\n")):
        with pytest.raises(ValueError, match=message):
            definition(kind, text)


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        (
            '{"const": [0.1, 9007199254740992, 1e-7, 9223372036854775807]}',
            "[0.1,9007199254740992,0.0000001,92233720368",
        ),
        ('{"default": 9007199254740993, "properties": {"const": {"type": "integer"}}}', '{"const":1}'),
        ('{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}', "7"),
        ('{"type": "object", "patternProperties": {".*": {"type": "integer"}}}', '{"a":1}'),
        ('{"properties": {"a": {"$ref": "#"}}}', '{"a":{"a":{}}}'),
    ],
)
def test_what_a_grammar_keeps_is_taken(schema: str, output: str) -> None:
    grammar, tokens = compiled(schema), TOKENIZER.encode(output).ids
    assert grammar is not None
    assert GRAMMARS.allowed_prefix(GrammarRow(GrammarState(), grammar, []), tokens) == tokens


def test_a_name_has_one_form() -> None:
    """Another, with an escaped letter, would have no schema."""
    grammar, tokens = compiled(json.dumps(TWO)), TOKENIZER.encode(r'{"s":1,"t":2,"\u0073":"x"}').ids
    assert grammar is not None
    allowed = GRAMMARS.allowed_prefix(GrammarRow(GrammarState(), grammar, []), tokens)
    assert TOKENIZER.decode(allowed) == r'{"s":1,"t":2,"' + "\\"


def test_options_of_the_library_in_a_schema_are_not_used() -> None:
    grammar = compiled('{"type": "array", "x-guidance": {"item_separator": "x"}}')
    assert grammar is not None
    tokens = TOKENIZER.encode("[1x2]").ids
    assert GRAMMARS.allowed_prefix(GrammarRow(GrammarState(), grammar, []), tokens) == tokens[:2]
