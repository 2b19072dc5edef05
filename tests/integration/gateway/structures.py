"""Schemas that no gateway lets in, and why."""

from __future__ import annotations

from typing import Any

# Three levels of repeats: what the library keeps of it grows with every token.
EXPONENTIAL = "((a{1,1000}){1,1000}){1,1000}"

BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "number?"}, "cannot be used: Invalid type: number"),
    ({"$ref": "#"}, "cannot be used: no text fits$"),
    ({"description": "x" * 1_000_000}, "has 1000019 bytes, must have at most 65536"),
    ({"type": "string", "pattern": f"^{EXPONENTIAL}$"}, "cannot be used: .*too many expressions"),
]
