"""The fields of the configuration one by one: path, type, default, description."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ParameterInfo

_PLAIN_NAMES: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    ByteSize: "size, such as 2GiB",
    SecretStr: "text, secret",
}


@dataclass(frozen=True, slots=True)
class FieldDocument:
    """One field, or the head of a section. `default` is plain data; `optional` sections may be left out whole, and of
    `listed` ones there is a list, empty by default."""

    path: tuple[str, ...]
    type: str
    default: Any
    description: str
    section: bool
    optional: bool = False
    required: bool = False
    listed: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)


def documents(
    model: type[BaseModel], defaults: BaseModel | None = None, path: tuple[str, ...] = ()
) -> Iterator[FieldDocument]:
    """All fields of a section and of those below it, each after its section's head.

    `defaults` is the section as it is by default; without it the fields' own defaults count.
    """
    for name, field in model.model_fields.items():
        kind, optional = _without_none(field.annotation)
        default = getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)
        required = default is PydanticUndefined
        listed = _listed_section(kind)
        if listed is not None:
            yield FieldDocument((*path, name), "list of sections", [], _description(field), section=True, listed=True)
            yield from documents(listed, None, (*path, name))
            continue
        section = isinstance(kind, type) and issubclass(kind, BaseModel)
        below = default if section and isinstance(default, BaseModel) else None
        yield FieldDocument(
            path=(*path, name),
            type="section" if section else _type_name(kind, field.metadata),
            default=None if required or section else _plain(default),
            description=_description(field),
            section=section,
            optional=section and optional,
            required=required,
        )
        if section:
            yield from documents(kind, below, (*path, name))


def section_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The section at a path; None where there is none."""
    for name in path:
        if name.isdecimal():
            continue
        field = model.model_fields.get(name)
        kind = _without_none(field.annotation)[0] if field is not None else None
        kind = _listed_section(kind) or kind
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        model = kind
    return model


def _listed_section(kind: Any) -> type[BaseModel] | None:
    """Of what sections there is a list; None where the kind is something else."""
    first = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
    return first if isinstance(first, type) and issubclass(first, BaseModel) else None


def _description(field: FieldInfo) -> str:
    """Of fields that are command-line options too, the option's help."""
    if field.description:
        return field.description
    option = next((extra for extra in field.metadata if isinstance(extra, ParameterInfo)), None)
    if option is None or not option.help:
        return ""
    return f"{option.help} Unset: {option.show_default}." if isinstance(option.show_default, str) else option.help


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (types.UnionType, Union):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _type_name(kind: Any, metadata: Sequence[Any]) -> str:
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        metadata = [*metadata, *more]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind)
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        return f"name: {_type_name(arguments[1], ())}"
    if get_origin(kind) is tuple:
        return f"list of {_type_name(arguments[0], ())}"
    return _PLAIN_NAMES.get(kind, str(kind)) + _limits(kind, metadata)


def _limits(kind: Any, metadata: Sequence[Any]) -> str:
    low = next((extra for extra in metadata if isinstance(extra, (Ge, Gt))), None)
    high = next((extra for extra in metadata if isinstance(extra, (Le, Lt))), None)
    if kind is ByteSize or (low is None and high is None):
        return ""
    if isinstance(low, Ge) and isinstance(high, Le):
        return f", {low.ge} to {high.le}"
    words = []
    if low is not None:
        words.append(f"at least {low.ge}" if isinstance(low, Ge) else f"above {low.gt}")
    if high is not None:
        words.append(f"at most {high.le}" if isinstance(high, Le) else f"below {high.lt}")
    return f", {', '.join(words)}"


def _size(count: int) -> str | int:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit}{name}"
    return int(count)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ByteSize):
        return _size(value)
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
