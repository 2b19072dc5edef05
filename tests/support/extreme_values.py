"""Values at and beyond the edges of what fields can hold, and requests that have them in one place or several."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = [
    *(sign * 2**bits + offset for bits in (7, 31, 32, 53, 63, 64) for sign in (1, -1) for offset in (-1, 0, 1)),
    *(0, 1, -1, 10**18, 10**30, -(10**30), 10**4000),
]
FLOATS = [
    *(float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 0.5, 1.5, -1.5),
    *(5e-324, 1e-300, 1e-46, 1.5e-45, 1e-38, 3.5e38, 1e39, 1.7e308, -1e-300, -1.7e308, 1 + 2**-52, 0.9999999999),
]
TEXTS = [
    *("", " ", "a", "\0", "a\0b", "\ud800", "\udfff\ud800", "\ufeff", "\ufffe", "\U0010ffff", "\u2028", "e\u0301"),
    *("\u202eabc", "<0>", "<0><1>", "{{", "{% raw %}", "{{ self }}", "%s", "{}", "{", "[", "null", "-1", "1e999"),
    *("\ue000unparsed 0\ue001", '{"a": ' * 200, "(" * 300, "a" * 70_000, "\u00e9" * 3000, "x\n" * 2000),
]


def _nested(depth: int, leaf: Any, make: Any) -> Any:
    for _ in range(depth):
        leaf = make(leaf)
    return leaf


def _shapes() -> list[Any]:
    return [
        *([], {}, [[]], [{}], [None], [0], [-1], [""], ["a"], ["a", 1], [True], [[0]], [[""]], {"": 0}, {"a": None}),
        *({"self": 1}, {"messages": 1}, {"name": 1}, {"type": "function"}, {"type": []}, {"__class__": {}}),
        *({"\0": "\0"}, {"\ud800": 1}, {"0": 1e-300}, {"1": float("nan")}, {"99999999999": 1}, {"-1": 0}),
        *({"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"enum": []}, {"pattern": "("}),
        *([0] * 5000, [""] * 5000, [{}] * 5000, [[]] * 5000, {str(number): 0 for number in range(5000)}),
        *(_nested(80, [], lambda inner: [inner]), _nested(80, {}, lambda inner: {"a": inner})),
        *(_nested(300, [], lambda inner: [inner]), _nested(300, 0, lambda inner: {"items": inner})),
    ]


VALUES: list[Any] = [None, True, False, *INTEGERS, *FLOATS, *TEXTS, *_shapes()]


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values within a value of JSON."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*before, key)
        yield from places(inner, (*before, key))


def changed(body: dict[str, Any], place: Sequence[Any], value: Any) -> dict[str, Any]:
    """A copy with another value there."""
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return body


def extreme_bodies(body: dict[str, Any], fields: Sequence[str], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """`count` variants of a body, each with one to three values that are extreme; `fields` it may have besides."""
    draw = random.Random(seed)
    everywhere = [*places(body), *((field,) for field in fields)]
    for _ in range(count):
        variant = body
        # A place within a value that was changed before is gone.
        for place in sorted(draw.sample(everywhere, draw.choice((1, 1, 1, 2, 3))), key=len, reverse=True):
            variant = changed(variant, place, draw.choice(VALUES))
        yield variant


def extreme_messages(message: Message, seed: int, count: int) -> Iterator[Message]:
    """`count` variants of a message, each with extreme values in one to three fields, at any depth."""
    draw = random.Random(seed)
    for _ in range(count):
        variant = copy.deepcopy(message)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            _make_extreme(variant, draw)
        yield variant


def _make_extreme(message: Message, draw: random.Random) -> None:
    field = draw.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(draw.choice((1, 1, 3000))):
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            getattr(message, field.name)[_scalar(key, draw)] = _scalar(value, draw)
    elif field.message_type is not None and field.is_repeated:
        for _ in range(draw.choice((1, 1, 5000))):
            inner = getattr(message, field.name).add()
        _make_extreme(inner, draw)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if field.message_type.fields:
            _make_extreme(inner, draw)
    elif field.is_repeated:
        getattr(message, field.name).extend([_scalar(field, draw)] * draw.choice((1, 1, 5000)))
    else:
        setattr(message, field.name, _scalar(field, draw))


def _scalar(field: FieldDescriptor, draw: random.Random) -> Any:
    kinds = FieldDescriptor
    match field.cpp_type:
        case kinds.CPPTYPE_STRING:
            text = draw.choice([text for text in TEXTS if text.isascii() or (text.isprintable() and _whole(text))])
            return text.encode() if field.type == kinds.TYPE_BYTES else text
        case kinds.CPPTYPE_DOUBLE | kinds.CPPTYPE_FLOAT:
            return draw.choice(FLOATS)
        case kinds.CPPTYPE_BOOL:
            return draw.choice((False, True))
    bits = 32 if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 64
    signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return draw.choice([number for number in INTEGERS if least <= number <= most])


def _whole(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
