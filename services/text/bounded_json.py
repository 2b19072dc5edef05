"""Reads JSON whose author is a stranger.

The interpreter's lock is held while a text is read, and while garbage is looked for in what was read: both take long
for many parts. Values that are deeply nested exhaust the stack of whoever goes through them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

MAX_PARTS = 100_000
"""Objects, lists and members of objects. Large honest conversations have ten in each message."""
MAX_ENTRIES = 1_000_000
"""Commas. A prompt may be a list of token ids."""
MAX_DEPTH = 100

_TOO_DEEP = f"it is nested too deeply, must have at most {MAX_DEPTH} levels"
_PIECE = 1 << 16


def read_json(text: str) -> Any:
    """Raises json.JSONDecodeError for a text that is no JSON, ValueError for one beyond the limits."""
    check_size([text])
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # There are no more levels than marks that open one; most texts have few, and need no walk through all entries.
    if _count(text, "[{") > MAX_DEPTH:
        _check_depth(value)
    return value


def check_size(texts: Sequence[str]) -> None:
    """Raises ValueError for JSON with too many parts or entries in all."""
    for marks, most, what in (
        ("{[:", MAX_PARTS, "objects, lists and members of objects"),
        (",", MAX_ENTRIES, "entries"),
    ):
        # Counting those in strings too is cheap, and enough for almost all texts.
        if sum(_count(text, marks) for text in texts) > most:
            count = sum(_count_outside_strings(text, marks) for text in texts)
            if count > most:
                raise ValueError(f"it has {count} {what}, must have at most {most}")


def _count(text: str, marks: str) -> int:
    return sum(map(text.count, marks))


def _count_outside_strings(text: str, marks: str) -> int:
    text = text.replace(r"\\", "").replace(r"\"", "")
    count, within = 0, 0
    for start in range(0, len(text), _PIECE):
        strings_between = text[start : start + _PIECE].split('"')
        count += _count(" ".join(strings_between[within::2]), marks)
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
