"""Converts dataclasses and enumerations to and from protobuf messages, field by field, by their names.

A field that the dataclass and the message both have is carried; all others are left alone. So a new field takes one
line in the dataclass and one in the message. Rows of steps are converted by hand, since there are many of them
(services/rpc/worker_codec.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Enum)
F = TypeVar("F", bound=Callable[..., Any])


def _cached(function: F) -> F:
    """`functools.cache` for functions of classes, which mypy does not take for hashable."""
    return cast(F, cache(function))


class WireEnum(Generic[E]):
    """The values of `kind` that an enumeration of a proto has too, under the same names after a prefix."""

    def __init__(self, kind: type[E], wire: Any, prefix: str) -> None:
        self._what = f"{prefix.removesuffix('_').lower()}"
        numbers = dict(wire.items())
        self._numbers = {value: numbers[name] for value in kind if (name := f"{prefix}{value.name}") in numbers}
        self._values = {number: value for value, number in self._numbers.items()}

    def to_wire(self, value: E) -> Any:
        return self._numbers[value]

    def from_wire(self, number: int) -> E:
        """Raises ValueError for a number that this version does not know."""
        value = self._values.get(number)
        if value is None:
            raise ValueError(f"{self._what} is {number}, must be one of {sorted(self._values)}")
        return value


def to_wire(kind: type[M], *sources: object, **more: Any) -> M:
    """A message of this kind. A field comes from `more`, or from the first source that has it; None leaves it unset."""
    values: dict[str, Any] = {}
    for source in reversed(sources):
        for name in _shared_names(kind, type(source)):
            values[name] = getattr(source, name)
    values |= more
    return kind(**{name: _plain(value) for name, value in values.items() if value is not None})


def from_wire(kind: type[T], message: Message, **more: Any) -> T:
    """A dataclass of this kind. What the message leaves unset has its default.

    Raises whatever the dataclass raises for values out of range.
    """
    values = {
        name: _typed(hint, getattr(message, name))
        for name, hint, has_presence in _carried(kind, type(message))
        if not has_presence or message.HasField(name)
    }
    return kind(**(values | more))


@_cached
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@_cached
def _shared_names(message: type[Message], source: type) -> list[str]:
    names = source.DESCRIPTOR.fields_by_name if issubclass(source, Message) else dir(source)
    return [name for name in message.DESCRIPTOR.fields_by_name if name in names]


@_cached
def _carried(kind: type, message: type[Message]) -> list[tuple[str, Any, bool]]:
    """The fields that both have: the name, the type of the dataclass' field, whether the message's can be unset."""
    fields = message.DESCRIPTOR.fields_by_name
    return [(name, hint, fields[name].has_presence) for name, hint in _hints(kind).items() if name in fields]


def _plain(value: Any) -> Any:
    """The form in which the constructor of a message takes a value."""
    if isinstance(value, int | float | str | bytes | Message):
        return value
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _hints(type(value)) if getattr(value, name) is not None}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        # A list of lists is a list of messages TokenSequence.
        return [{"token_ids": inner} for inner in value]
    return value


def _typed(hint: Any, value: Any) -> Any:
    """A value of a message in the form that the type of the dataclass' field asks for."""
    if isinstance(value, int | float | str | bytes):
        return value
    origin = get_origin(hint)
    if isinstance(value, Message):
        kind: Any = next(one for one in (hint, *get_args(hint)) if is_dataclass(one))
        return from_wire(kind, value)
    if origin is frozenset:
        return frozenset(value)
    if origin is tuple:
        nested = get_origin(get_args(hint)[0]) is tuple
        return tuple(tuple(inner.token_ids) for inner in value) if nested else tuple(value)
    return dict(value) if origin is not None and issubclass(origin, Mapping) else value
