"""Reads JSON whose author is a stranger.

The interpreter's lock is held while a text is read, and what has many parts takes long, for reading and for the
collection of garbage. Values that are deeply nested exhaust the stack of whoever goes through them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

MAX_PARTS = 200_000
"""Objects, lists and members of objects. Of the largest honest requests, each message has about ten."""
MAX_DEPTH = 100


_TOO_DEEP = f"it is nested too deeply, must have at most {MAX_DEPTH} levels"
_PIECE = 1 << 16


def read_json(text: str) -> Any:
    """Raises json.JSONDecodeError for a text that is no JSON, ValueError for one beyond the limits."""
    # Counting all is cheap, and enough for almost all texts.
    if _parts(text) > MAX_PARTS and (count := _parts_outside_strings(text)) > MAX_PARTS:
        raise ValueError(f"it has {count} objects, lists and members of objects, must have at most {MAX_PARTS}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(value)
    return value


def _parts(text: str) -> int:
    return text.count("{") + text.count("[") + text.count(":")


def _parts_outside_strings(text: str) -> int:
    text = text.replace(r"\\", "").replace(r"\"", "")
    count, within = 0, 0
    for start in range(0, len(text), _PIECE):
        strings_between = text[start : start + _PIECE].split('"')
        count += _parts(" ".join(strings_between[within::2]))
        within ^= (len(strings_between) - 1) % 2
    return count


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for outer in level for part in _inner(outer) if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
