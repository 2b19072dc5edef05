"""Whether a value has the form of a JSON schema. Where outputs are constrained, grammars check schemas fully."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames")


def schema_fault(schema: Any) -> str | None:
    """What is wrong with the schema, in one line; None if nothing is."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping):
            return f"{place or 'it'} is {_shown(schema)}, must be an object"
        here = f"{place}." if place else ""
        fault = _own_fault(here, schema)
        if fault is not None:
            return fault
        for name in _OF_NAMES:
            waiting += [(f"{here}{name}.{key}", part) for key, part in schema.get(name, {}).items()]
        for name in _OF_SCHEMAS:
            waiting += [(f"{here}{name}.{number}", part) for number, part in enumerate(schema.get(name, []))]
        for name in _SCHEMA:
            # An older form of `items` is a list.
            parts = schema[name] if name == "items" and isinstance(schema.get(name), list) else None
            if parts is not None:
                waiting += [(f"{here}items.{number}", part) for number, part in enumerate(parts)]
            elif name in schema:
                waiting.append((f"{here}{name}", schema[name]))
    return None


def _own_fault(here: str, schema: Mapping[str, Any]) -> str | None:
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
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{here}required is {_shown(required)}, must be a list of names"
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
