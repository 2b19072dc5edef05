"""JSON with one bit that is another one."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any


def each_changed_bit(data: dict[str, Any], rng: random.Random) -> Iterator[tuple[str | int, ...]]:
    """Changes one bit of each name and each value in `data`, one after the other, and gives the names that lead there:
    whoever reads `data` then sees this change alone."""
    for path, parent in list(_places(data, ())):
        name = path[-1]
        value = parent[name]
        if value is not None and not isinstance(value, dict | list):
            parent[name] = _changed(value, rng)
            yield path
            parent[name] = value
        if isinstance(name, str):
            del parent[name]
            parent[_changed(name, rng)] = value
            yield path[:-1] or path
            parent.popitem()
            parent[name] = value


def _places(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, name), node
        if isinstance(value, dict | list):
            yield from _places(value, (*path, name))


def _changed(value: Any, rng: random.Random) -> Any:
    match value:
        case int():
            return value ^ 1 << rng.randrange(17)
        case float():
            (bits,) = struct.unpack("<Q", struct.pack("<d", value))
            return struct.unpack("<d", struct.pack("<Q", bits ^ 1 << rng.randrange(64)))[0]
        case str():
            place = rng.randrange(len(value))
            return value[:place] + chr(ord(value[place]) ^ 1 << rng.randrange(7)) + value[place + 1 :]
    raise TypeError(f"{value!r} has no bits")
