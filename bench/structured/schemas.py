"""JSON schemas from files, in the forms in which collections of them come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """`content` is an object, or one of the schemas true and false."""

    name: str
    content: dict[str, Any] | bool


def read_schemas(folder: Path) -> list[NamedSchema]:
    """All schemas of the JSON files below a folder, in the order of their names.

    A file is a list of groups of tests, each with its schema (JSON Schema Test Suite), an object with a schema and its
    tests (MaskBench), or a schema. Raises ValueError naming a file that is none of these.
    """
    files = sorted(folder.rglob("*.json"))
    return [schema for file in files for schema in _of_file(file, file.relative_to(folder).with_suffix("").as_posix())]


def _of_file(file: Path, name: str) -> Iterator[NamedSchema]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    match content:
        case list() if all(isinstance(group, dict) and "schema" in group for group in content):
            for number, group in enumerate(content):
                yield NamedSchema(f"{name}/{group.get('description', number)}", group["schema"])
        case {"schema": dict() | bool() as schema, "tests": list()}:
            yield NamedSchema(name, schema)
        case dict() | bool():
            yield NamedSchema(name, content)
        case _:
            raise ValueError(f"{file} holds neither a schema nor groups of tests with schemas")
