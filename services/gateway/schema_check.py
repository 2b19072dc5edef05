"""Refuses JSON schemas whose grammars would not be the schemas': numbers with lost digits, outputs without an end.

The library (llguidance) takes numbers as doubles, and does not see that a place in a grammar has no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from spool.services.gateway.answers.schema_form import own_fault, reached, referenced
from spool.services.gateway.structure import JSON_OPTIONS

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_COMPACT: JsonCompileOptions = {**JSON_OPTIONS, "whitespace_pattern": None, "whitespace_flexible": False}
_LARGEST, _LARGEST_LIMIT = 2**63 - 1, 2**53
"""Of integers. A constant is taken as an integer of 64 bits, a limit as a double."""
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST_EXPONENT = 400
"""Of ten; beyond those of all doubles."""
_LONGEST_NUMBER = 1000
"""In characters; all digits of a double are fewer."""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def check_schemas(kind: str, text: str) -> None:
    """Of a structure (services/gateway/structure.py). Raises ValueError."""
    if kind == "json_schema":
        _check(_parsed(text))
    elif kind in ("grammar", "lark"):
        for place in re.finditer(r"%json\s*", text):
            _check(_parsed(text[place.end() :]))


def _parsed(text: str) -> Any:
    """The value at the beginning of the text; None where the library will say what is wrong."""
    try:
        return json.JSONDecoder(parse_float=_decimal, parse_int=_integer).raw_decode(text.strip())[0]
    except (json.JSONDecodeError, RecursionError):
        return None


def _decimal(text: str) -> Decimal:
    """Raises ValueError for numbers whose arithmetic could fail or take long."""
    _check_digits(text)
    try:
        number = Decimal(text)
    except InvalidOperation:  # of the exponent
        number = Decimal("Infinity")
    if not number.is_finite() or abs(number.adjusted()) > _LARGEST_EXPONENT:
        raise ValueError(
            f"the number {text} must have an exponent between -{_LARGEST_EXPONENT} and {_LARGEST_EXPONENT}"
        )
    return number


def _integer(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"the number {text[:40]}... has {len(text)} characters, must have at most {_LONGEST_NUMBER}")


def _check(schema: Any) -> None:
    parts = reached(schema)
    nodes = [(place, node) for place, node in parts.values() if isinstance(node, Mapping)]
    for place, node in nodes:
        if (fault := own_fault(place, node)) is not None:
            raise ValueError(fault)
    _check_numbers(nodes)
    _check_texts(nodes)
    _check_names(nodes)
    _check_ends(schema, parts)


def _check_numbers(nodes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    numbers: list[int | Decimal] = []
    for place, node in nodes:
        types = _types(node)
        _check_narrow(place, node)
        for name in ("const", "enum", *_LIMITS, "multipleOf"):
            for number in _numbers(node.get(name)):
                largest = _LARGEST_LIMIT if name in _LIMITS else _LARGEST
                if not _whole(number) or -largest <= number <= largest:
                    numbers.append(number)
                elif not (types == ["integer"] and _beyond_all(name, number)):
                    raise ValueError(f"{_at(place, name)} is {number}, must be between -{largest} and {largest}")
        for step in _numbers(node.get("multipleOf")):
            if not _whole(step) and "integer" in types:
                raise ValueError(f"{_at(place, 'multipleOf')} is {step}, must be an integer with the type integer")
    risky = [number for number in numbers if not _plain(number)]
    if not risky:
        return
    # The library's own reading of each, which a constant lays open.
    probe = f'{{"const": [{", ".join(map(str, risky))}]}}'
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(probe, overrides=_COMPACT), log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    kept = json.loads(matcher.compute_ff_bytes(), parse_float=Decimal)
    for number, became in zip(risky, kept, strict=True):
        if number != became:
            raise ValueError(f"the number {number} has too many digits, it would become {became}")


def _check_narrow(place: str, node: Mapping[str, Any]) -> None:
    """The library lets a number through that is its limit where that is whole and the other limit less than 1 away."""
    for exclusive, others in (("exclusiveMinimum", _LIMITS[1::2]), ("exclusiveMaximum", _LIMITS[::2])):
        for number in _numbers(node.get(exclusive)):
            for other in (other for name in others for other in _numbers(node.get(name))):
                if _whole(number) and 0 < abs(Decimal(other) - Decimal(number)) < 1:
                    raise ValueError(f"{_at(place, exclusive)} is {number}, which is too near to the limit {other}")


def _beyond_all(name: str, number: int | Decimal) -> bool:
    """Whether the limit leaves all integers of 64 bits; the library knows no others."""
    return name.endswith("aximum") and number - (2**63 - 1 if name == "maximum" else 2**63) >= 0


def _numbers(value: Any) -> Iterator[int | Decimal]:
    for leaf in _leaves(value):
        if isinstance(leaf, int | Decimal) and not isinstance(leaf, bool):
            yield leaf


def _leaves(value: Any) -> Iterator[Any]:
    """What is in a value of JSON, names included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        else:
            yield value


def _whole(number: int | Decimal) -> bool:
    return isinstance(number, int) or number == number.to_integral_value()


def _plain(number: int | Decimal) -> bool:
    """Whether the library reads it exactly for certain."""
    if isinstance(number, int):
        return abs(number) <= 2**53
    parts = number.as_tuple()
    return len(parts.digits) <= 15 and isinstance(parts.exponent, int) and abs(parts.exponent) <= 15


def _check_texts(nodes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    for place, node in nodes:
        names = node.get("properties")
        texts = {name: node.get(name) for name in ("const", "enum", "required")}
        texts["properties"] = list(names) if isinstance(names, Mapping) else None
        for name, value in texts.items():
            for text in _leaves(value):
                if isinstance(text, str) and _UNWRITABLE.search(text):
                    raise ValueError(f"{_at(place, name)} holds {text!r}, must have no control characters")


def _check_names(nodes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Names of properties that may come further: there is one, and enough of them where a number is asked for."""
    merged = any(name in node for _, node in nodes for name in ("$ref", "allOf", "anyOf", "oneOf"))
    everywhere = {name for _, node in nodes for name in _names(node)}
    for place, node in nodes:
        patterns = node.get("patternProperties")
        patterns = patterns if isinstance(patterns, Mapping) else {}
        names = everywhere if merged else _names(node)
        for pattern, value in patterns.items():
            if value is not False and not _has_name(names, {pattern: {"const": None}}, False):
                reason = f"has {pattern!r}, which matches no name that is not among the properties"
                raise ValueError(f"{_at(place, 'patternProperties')} {reason}")
        more = node.get("additionalProperties", True) is not False
        if more and False in patterns.values() and not _has_name(names, dict.fromkeys(patterns, False), True):
            raise ValueError(
                f"{_at(place, 'patternProperties')} leaves no name for additionalProperties, must be false"
            )
        least, required = node.get("minProperties"), node.get("required")
        # A grammar cannot tell that a name comes twice.
        most = len(set(required)) + 1 if isinstance(required, list) else 1
        if (more or patterns) and isinstance(least, int) and least > most:
            raise ValueError(f"{_at(place, 'minProperties')} is {least}, must be at most {most}: names may repeat")


def _names(node: Mapping[str, Any]) -> set[str]:
    named = [node[name] for name in ("properties", "required") if isinstance(node.get(name), Mapping | list)]
    return {name for names in named for name in names if isinstance(name, str)}


def _has_name(names: set[str], patterns: Mapping[str, Any], more: bool) -> bool:
    """Whether an object may have a property of the `patterns`, or another one, beside the `names`."""
    one: dict[str, Any] = {
        "type": "object",
        "properties": dict.fromkeys(sorted(names), False),
        "patternProperties": patterns,
    }
    one |= {"additionalProperties": {"const": None} if more else False, "minProperties": 1}
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(json.dumps(one), overrides=_COMPACT), log_level=0)
    if matcher.is_error():
        return True  # the library says why
    matcher.try_consume_tokens(_bytes().tokenize_str("{"))
    return any(matcher.compute_bitmask()) and not matcher.is_error()


def _check_ends(schema: Any, parts: Mapping[int, tuple[str, Any]]) -> None:
    """Each part has a text, which a part that needs itself does not."""
    needs = {key: list(_needs(schema, part)) for key, (_, part) in parts.items() if isinstance(part, Mapping)}
    ending = set(parts) - set(needs)
    before = -1
    while before < len(ending):
        before = len(ending)
        for key in reversed(needs):
            if key not in ending and all(any(id(one) in ending for one in options) for options in needs[key]):
                ending.add(key)
    for key in needs:
        if key not in ending:
            raise ValueError(": ".join(filter(None, (parts[key][0], "no text fits"))))


def _needs(schema: Any, part: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Of each of these, one must have a text for the part to have one."""
    if (target := referenced(schema, part)) is not None:
        yield [target]
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(options := part.get(name), list):
            yield from ([one] for one in options) if name == "allOf" else [options]
    properties, required = part.get("properties"), part.get("required")
    if _types(part) == ["object"] and isinstance(properties, Mapping) and isinstance(required, list):
        yield from ([properties[name]] for name in required if isinstance(name, str) and name in properties)
    least, items = part.get("minItems", 0), part.get("items", True)
    if _types(part) == ["array"] and isinstance(least, int) and least > 0 and not isinstance(items, list):
        prefix = part.get("prefixItems")
        prefix = prefix if isinstance(prefix, list) else []
        yield from ([one] for one in prefix[:least])
        if least > len(prefix) and isinstance(items, Mapping):
            yield [items]


def _types(node: Mapping[str, Any]) -> list[Any]:
    types = node.get("type")
    return types if isinstance(types, list) else [types]


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
