"""Markers in a text that comes in pieces."""

from __future__ import annotations

SPACE = " \t\r\n"


def held_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may still become `marker`; `marker` itself is not in the text."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)
