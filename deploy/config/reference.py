"""The fields of the configuration one by one: docs/configuration.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from spool.deploy.config.spool_config import SpoolConfig

_HEAD = """\
# Configuration

After this page you know every field of `spool.yaml`, the one file that configures everything, with its type, default
and meaning. `spool config explain` prints this page. Sections and fields with a default may be left out.
`spool config show FILE` prints the values that hold, or what is wrong with the file, and names files that are missing.
`--set scheduling.batch_size=16` overrides a field on the command line. The most used fields are options of
`spool serve`, too, under the same names. The file names no version: a release reads files of any other one, but for
fields that it does not have, which it refuses by name (CHANGELOG.md says which are gone).
"""
_TYPES = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
_FORMATS = {"path": "path", "date-time": "date and time", "password": "text, secret"}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_NOTES = {None: " May be null, for none.", "[]": " Each entry of the list has these fields."}

Section = Mapping[str, Any]
"""A JSON schema of an object."""


def field_names() -> list[str]:
    """The paths of all fields and sections."""
    names = []
    for path, section, _ in _sections((), _schema(), ""):
        names += [".".join((*path, name)) for name in section["properties"]]
    return names


def reference() -> str:
    """docs/configuration.md: a list for each section, of the fields that belong to no section below it."""
    parts, described = [_HEAD], dict[str, str]()
    for path, section, head in _sections((), _schema(), ""):
        if not path:
            continue
        name = ".".join(path)
        lines = (_line(field, one) for field, one in section["properties"].items() if _section_of(one) is None)
        listed = "".join(lines)
        earlier = described.setdefault(listed, name)
        if listed and earlier != name:
            listed = f"The same fields as `{earlier}`.\n"
        parts += [f"\n## {name}\n\n{head}\n", f"\n{listed}" if listed else ""]
    return "".join(parts)


@cache
def _schema() -> Section:
    return SpoolConfig.model_json_schema()


def _sections(path: tuple[str, ...], section: Section, head: str) -> Iterator[tuple[tuple[str, ...], Section, str]]:
    """A section and those below it, with their paths and descriptions."""
    yield path, section, head
    for name, one in section["properties"].items():
        if (below := _section_of(one)) is not None:
            default = one["default"]
            note = _NOTES[None] if default is None else _NOTES["[]"] if default == [] else ""
            yield from _sections((*path, name), below, _description(one) + note)


def _section_of(field: Section) -> Section | None:
    """The section that a field is, or that the entries of its list are."""
    found = _resolved(field)
    found = _resolved(found.get("items", found))
    return found if "properties" in found else None


def _resolved(schema: Section) -> Section:
    """What is not null of the alternatives, without references."""
    schema = schema.get("anyOf", [schema])[0]
    return _schema()["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _line(name: str, field: Section) -> str:
    default = f"`{_shown(field['default'])}`" if "default" in field else "required"
    return f"- `{name}` ({_type(field)}; {default}): {_description(field)}\n"


def _description(field: Section) -> str:
    # A section that is described as its class is has no description of its own here.
    field = field if "description" in field else _resolved(field)
    return " ".join(field["description"].split())


def _type(schema: Section) -> str:
    if "anyOf" in schema.get("anyOf", [{}])[0]:
        return "size, such as 2GiB"
    schema = _resolved(schema)
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    if schema["type"] == "object":
        return f"name: {_TYPES[schema['additionalProperties']['type']]}"
    limits = [f"{words} {schema[limit]}" for limit, words in _LIMITS.items() if limit in schema]
    return ", ".join([_FORMATS.get(schema.get("format", ""), _TYPES[schema["type"]]), *limits])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value.replace("_", "").isalnum() else json.dumps(value)
