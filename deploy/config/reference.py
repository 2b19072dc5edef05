"""The fields of the configuration one by one: docs/configuration.md."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ParameterInfo

from deploy.config.spool_config import SpoolConfig

_HEAD = """\
# Configuration

After this page you know every field of `spool.yaml`, the one file that configures everything, with its type, default
and meaning. `spool config explain` prints this page. Sections and fields with a default may be left out.
`spool config show FILE` prints the values that hold, or what is wrong with the file.
`--set scheduling.batch_size=16` overrides a field on the command line. The most used fields are options of
`spool serve`, too, under the same names.
"""
_NAMES: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    datetime: "date and time",
    ByteSize: "size, such as 2GiB",
    SecretStr: "text, secret",
}
_LIMITS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


@dataclass(frozen=True, slots=True)
class FieldDocument:
    """One field, or the head of a section. `default` is as a file would hold it. A section whose default is null or an
    empty list may be left out."""

    path: tuple[str, ...]
    type: str
    default: str
    description: str
    is_section: bool

    @property
    def name(self) -> str:
        return ".".join(self.path)


def documents(
    model: type[BaseModel] = SpoolConfig, defaults: BaseModel | None = None, path: tuple[str, ...] = ()
) -> Iterator[FieldDocument]:
    """All fields of a section and of those below it, each after its section's head.

    `defaults` is the section as it is by default; without it the fields' own defaults count.
    """
    for name, field in model.model_fields.items():
        kind = _without_none(field.annotation)
        listed = get_args(kind)[0] if get_origin(kind) is tuple else kind
        section = listed if isinstance(listed, type) and issubclass(listed, BaseModel) else None
        default = getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)
        kind_name = "section" if section is not None else _type(kind, field.metadata)
        text = "" if isinstance(default, BaseModel) else _shown(default)
        yield FieldDocument((*path, name), kind_name, text, _description(field), section is not None)
        if section is not None:
            yield from documents(section, default if isinstance(default, BaseModel) else None, (*path, name))


def reference() -> str:
    """docs/configuration.md: a list for each section, of the fields that belong to no section below it."""
    heads, fields = [], dict[tuple[str, ...], str]()
    for document in documents():
        if document.is_section:
            note = {"null": " May be null, for none.", "[]": " Each entry of the list has these fields."}
            more = note.get(document.default, "")
            heads.append((document.path, f"\n## {document.name}\n\n{document.description}{more}\n"))
        else:
            default = document.default if document.default == "required" else f"`{document.default}`"
            line = f"- `{document.path[-1]}` ({document.type}; {default}): {document.description}\n"
            fields[document.path[:-1]] = fields.get(document.path[:-1], "") + line
    parts, described = [_HEAD], dict[str, str]()
    for path, head in heads:
        listed = fields.get(path, "")
        earlier = described.setdefault(listed, ".".join(path))
        if listed and earlier != ".".join(path):
            listed = f"The same fields as `{earlier}`.\n"
        parts += [head, f"\n{listed}" if listed else ""]
    return "".join(parts)


def _description(field: FieldInfo) -> str:
    """The field's own, or the help of the command-line option that it is too."""
    if field.description:
        return field.description
    option = next((extra for extra in field.metadata if isinstance(extra, ParameterInfo)), None)
    if option is None or not option.help:
        return ""
    return f"{option.help} Unset: {option.show_default}." if isinstance(option.show_default, str) else option.help


def _without_none(annotation: Any) -> Any:
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return parts[0] if get_origin(annotation) in (types.UnionType, Union) and len(parts) == 1 else annotation


def _type(kind: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind)
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    if get_origin(kind) is dict:
        return f"name: {_type(get_args(kind)[1])}"
    if get_origin(kind) is tuple:
        return f"list of {_type(get_args(kind)[0])}"
    limits = [
        f"{words} {getattr(extra, attribute)}"
        for extra in metadata
        for limit, attribute, words in _LIMITS
        if isinstance(extra, limit) and kind is not ByteSize
    ]
    return ", ".join([_NAMES.get(kind, str(kind)), *limits])


def _shown(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    value = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
    return value if isinstance(value, str) and value.replace("_", "").isalnum() else json.dumps(value)
