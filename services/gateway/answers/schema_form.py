"""The form of JSON schemas: whether a value is one, its parts, what they refer to, and the types of their values.

Where outputs are constrained, grammars check schemas fully."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_TYPES_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA = ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames")

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def schema_fault(schema: Any) -> str | None:
    """What is wrong with the schema, in one line; None if nothing is."""
    for place, part in reached(schema).values():
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            return f"{place or 'it'} is {_shown(part)}, must be an object"
        fault = own_fault(place, part)
        if fault is not None:
            return fault
    return None


def reached(schema: Any) -> dict[int, tuple[str, Any]]:
    """All schemas within one, also where only references lead, by identity; places for messages."""
    parts: dict[int, tuple[str, Any]] = {}
    waiting = [("", schema)]
    while waiting:
        root, start = waiting.pop()
        for place, part in _subschemas(start):
            if id(part) in parts:
                continue
            parts[id(part)] = (".".join(filter(None, (root, place))), part)
            if isinstance(part, Mapping) and (target := referenced(schema, part)) is not None:
                waiting.append((str(part["$ref"]), target))
    return parts


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schema and all within it, each with its place and before those within itself."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, schema = waiting.pop()
        yield place, schema
        if not isinstance(schema, Mapping):
            continue
        here = f"{place}." if place else ""
        for name in _OF_NAMES:
            if isinstance(schema.get(name), Mapping):
                waiting += [(f"{here}{name}.{key}", part) for key, part in schema[name].items()]
        # An older form of `items` is a list.
        for name in (*_OF_SCHEMAS, "items"):
            if isinstance(schema.get(name), list):
                waiting += [(f"{here}{name}.{number}", part) for number, part in enumerate(schema[name])]
        for name in _SCHEMA:
            if name in schema and not (name == "items" and isinstance(schema[name], list)):
                waiting.append((f"{here}{name}", schema[name]))


def referenced(schema: Any, part: Mapping[str, Any]) -> Any:
    """What `$ref` names within the schema; None where it names nothing that is there."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    found = schema
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and step in found:
            found = found[step]
        elif isinstance(found, list) and re.fullmatch("[0-9]{1,9}", step) and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def value_types(schema: Any, part: Any) -> frozenset[str]:
    """Types among which those of all values are that fit `part` of the schema; a "number" may be an "integer" too."""
    found: set[str] = set()
    waiting, seen = [part], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, Mapping):
            found.update(_TYPES)
        elif (target := referenced(schema, part)) is not None:
            waiting.append(target)
        elif "const" in part or "enum" in part:
            found.update(map(type_of, [part["const"]] if "const" in part else part["enum"]))
        elif "type" in part:
            found.update([part["type"]] if isinstance(part["type"], str) else part["type"])
        elif options := [option for name in ("anyOf", "oneOf", "allOf") for option in part.get(name, ())]:
            waiting += options
        else:
            found.update(_TYPES)
    return frozenset(found | {"integer"} if "number" in found else found or _TYPES)


def type_of(value: Any) -> str:
    return _TYPES_OF_VALUES.get(type(value), "null")


def own_fault(place: str, schema: Mapping[str, Any]) -> str | None:
    """As `schema_fault`, of a schema at this place in another one, without the schemas within it."""
    here = f"{place}." if place else ""
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if kind not in _TYPES:
            return f"{here}type is {_shown(kind)}, must be one of {', '.join(_TYPES)}"
    for name in _OF_NAMES:
        if not isinstance(schema.get(name, {}), Mapping):
            return f"{here}{name} is {_shown(schema[name])}, must be an object"
    for name in (*_OF_SCHEMAS, "enum"):
        if not isinstance(schema.get(name, []), list):
            return f"{here}{name} is {_shown(schema[name])}, must be a list"
    if not isinstance(schema.get("pattern", ""), str):
        return f"{here}pattern is {_shown(schema['pattern'])}, must be a text"
    for name in _COUNTS:
        if not _is_count(schema.get(name, 0)):
            return f"{here}{name} is {_shown(schema[name])}, must be a whole number of at least 0"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{here}required is {_shown(required)}, must be a list of names"
    return None


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return value >= 0 and (isinstance(value, int) or (math.isfinite(value) and value == int(value)))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
