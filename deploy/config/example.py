"""A file with every field at its default, each under its description."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from deploy.config.field_documents import FieldDocument, documents
from deploy.config.spool_config import SpoolConfig

_WIDTH = 110


def example_file() -> str:
    """A `spool.yaml` that says what holds without it."""
    lines = ["# Configuration of Spool: every field with its default. What is left out keeps its default."]
    for document, commented in _with_comments():
        depth = len(document.path) - 1
        margin = ("  " * depth) + ("# " if commented else "")
        if depth == 0:
            lines.append("")
        about = f"{document.description} [{document.type}]" if not document.section else document.description
        lines += [f"{margin}# {line}" for line in textwrap.wrap(about, _WIDTH - len(margin))]
        lines.append(f"{margin}{document.path[-1]}:{_value(document)}")
    return "\n".join(lines) + "\n"


def _with_comments() -> Iterator[tuple[FieldDocument, bool]]:
    """Sections that are not there by default are commented out with all their fields; of a list, the fields of each."""
    left_out: list[tuple[str, ...]] = []
    for document in documents(SpoolConfig, SpoolConfig()):
        if document.optional:
            left_out.append(document.path)
        yield document, any(document.path[: len(path)] == path for path in left_out)
        if document.listed:
            left_out.append(document.path)


def _value(document: FieldDocument) -> str:
    if document.section:
        return " []" if document.listed else ""
    return " " + ("..." if document.required else shown_value(document.default))


def shown_value(value: Any) -> str:
    """A plain value as it would stand in the file."""
    return value if isinstance(value, str) and value.replace("_", "").isalnum() else json.dumps(value)
